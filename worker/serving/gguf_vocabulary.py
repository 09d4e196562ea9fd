"""Write a tokenizer as a vocabulary of GGUF.

llama.cpp has regular expressions of pre-tokenizers in its code, and the file names one. So the steps of the tokenizer
choose the name, and a tokenizer with other steps is refused: under a wrong name most texts would get the right tokens,
and a few others.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from worker.refusals import UnsupportedModel

Steps = tuple[str, ...]

DIGITS, BYTES, GPT2_BYTES = "each digit", "bytes", "GPT-2's expression and bytes"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# Names of llama.cpp's src/llama-vocab.cpp, by whether a whole word of the vocabulary is taken without merges, and by
# the steps before that. tests/worker/test_gguf.py compares the tokens of each with llama.cpp's.
PRE_TOKENIZERS: Mapping[tuple[bool, Steps], str] = {
    (False, (GPT2_BYTES,)): "gpt-2",
    (False, (DIGITS, GPT2_BYTES)): "smollm",
    (False, (_QWEN2, BYTES)): "qwen2",
    (True, (_LLAMA3, BYTES)): "llama-bpe",
}


def add_vocabulary(
    writer: gguf.GGUFWriter, folder: Path, tokenizer: PreTrainedTokenizerBase, size: int
) -> None:
    """Write tokens, merges, special tokens and the chat template.

    Args:
        folder: with the files of `tokenizer`.
        size: rows of the embedding, of which some may have no token.

    Raises:
        UnsupportedModel: llama.cpp would tokenize in another way.
    """
    description, name = read_description(folder)
    texts, types = _tokens(description, size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=size)
    special.chat_template = chat_template_of(tokenizer)
    special.add_special_token |= _added(tokenizer)
    special.add_to_gguf(writer, quiet=True)


def read_description(folder: Path) -> tuple[Mapping[str, Any], str]:
    """The content of a folder's tokenizer.json, and the name that llama.cpp has for its pre-tokenizer.

    Raises:
        UnsupportedModel: llama.cpp would tokenize in another way.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UnsupportedModel(
            "GGUF needs a tokenizer.json, and the model's tokenizer has none. Export 'merged'."
        )
    description: Mapping[str, Any] = json.loads(path.read_text())
    return description, pre_tokenizer_of(description)


def chat_template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template, of several the default one; None: the model has none."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def pre_tokenizer_of(description: Mapping[str, Any]) -> str:
    """The name that llama.cpp has for the pre-tokenizer of a tokenizer.json.

    Raises:
        UnsupportedModel: it has none, or the tokenizer is not a byte-level BPE.
    """
    model = description["model"]
    normalizer = (description.get("normalizer") or {"type": "NFC"})["type"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback, as SentencePiece has" if model["type"] == "BPE" else model["type"]
        raise _unsupported(f"it is a {kind}, and only byte-level BPE is tested")
    # Of text in NFC, as most is, llama.cpp gives the same tokens without a normalizer.
    if normalizer != "NFC":
        raise _unsupported(f"its normalizer is {normalizer}")
    _refuse_options(description)
    steps = _steps(description.get("pre_tokenizer") or {"type": "none"})
    ignores_merges = bool(model.get("ignore_merges"))
    found = PRE_TOKENIZERS.get((ignores_merges, steps))
    if found is None:
        known = ", ".join(PRE_TOKENIZERS.values())
        raise _unsupported(
            f"its pre-tokenizer ({' then '.join(steps)}; ignore_merges {str(ignores_merges).lower()}) is not one of "
            f"those that are tested ({known})"
        )
    return found


def _refuse_options(description: Mapping[str, Any]) -> None:
    """Refuse what llama.cpp has no field for in a file with a byte-level BPE."""
    model = description["model"]
    options = ["continuing_subword_prefix", "end_of_word_suffix", "dropout"]
    if not set(ByteLevel.alphabet()) <= model["vocab"].keys():
        options.append("unk_token")  # with all bytes in the vocabulary no text is unknown
    for option in options:
        if model.get(option):
            raise _unsupported(f"its BPE has the option {option} ({model[option]!r})")
    for token in description["added_tokens"]:
        for option in ("lstrip", "rstrip", "single_word"):
            if token.get(option):
                raise _unsupported(f"its token {token['content']} has the option {option}")


def _unsupported(reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"GGUF is not supported for this tokenizer: {reason}. Export the format 'gguf-adapter', which has no "
        "tokenizer, or 'merged'."
    )


def _steps(pre_tokenizer: Mapping[str, Any]) -> Steps:
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return tuple(step for one in pre_tokenizer["pretokenizers"] for step in _steps(one))
    match pre_tokenizer:
        case {"type": "Digits", "individual_digits": True}:
            return (DIGITS,)
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return (GPT2_BYTES if pre_tokenizer.get("use_regex", True) else BYTES,)
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": str(pattern)}}:
            return (pattern,)
    return (json.dumps(pre_tokenizer, ensure_ascii=False),)


def _tokens(description: Mapping[str, Any], size: int) -> tuple[list[str], list[TokenType]]:
    """The text and the type of each token of `size`."""
    texts = {number: text for text, number in description["model"]["vocab"].items()}
    types = dict.fromkeys(texts, TokenType.NORMAL)
    for token in description["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    if max(texts) >= size:
        raise UnsupportedModel(
            f"GGUF is not supported: the tokenizer has a token {max(texts)}, and the model's embedding {size} rows."
        )
    return (
        [texts.get(number, f"[PAD{number}]") for number in range(size)],
        [types.get(number, TokenType.UNUSED) for number in range(size)],
    )


def _added(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Whether a text gets a token before and after it, if it is no chat."""
    plain: Sequence[int] = tokenizer("a", add_special_tokens=False).input_ids
    whole: Sequence[int] = tokenizer("a").input_ids
    before = after = []
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            before, after = list(whole[:start]), list(whole[start + len(plain) :])
            break
    if before not in ([], [tokenizer.bos_token_id]) or after not in ([], [tokenizer.eos_token_id]):
        raise _unsupported(f"it puts the tokens {before} before each text and {after} after it")
    return {"bos": bool(before), "eos": bool(after)}
