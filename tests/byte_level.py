"""Byte-level tokenizers of some hundred tokens with the pre-tokenizers of real ones."""

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def plain() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=False)


def gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False)


def split(expression: str) -> PreTokenizer:
    return Split(Regex(expression), "isolated")


# By the names that llama.cpp has for them.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": gpt2(),
    "smollm": pre_tokenizers.Sequence([Digits(individual_digits=True), gpt2()]),
    "qwen2": pre_tokenizers.Sequence([split(QWEN2), plain()]),
    "llama-bpe": pre_tokenizers.Sequence([split(QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")), plain()]),
}


def byte_level_tokenizer(
    pre_tokenizer: PreTokenizer,
    *,
    size: int = 600,
    ignore_merges: bool = False,
    template: str | None = CHATML,
) -> PreTrainedTokenizerFast:
    """Merges of this repository's prose.

    They are learned without a pre-tokenizer, so many of them reach over words, digits and line ends: a wrong one shows.
    """
    tokens = Tokenizer(BPE(ignore_merges=ignore_merges))
    tokens.pre_tokenizer = plain()
    text = (ROOT / "README.md").read_text()[
        :6000
    ] + "\n\n 12345 678 9  1000 2026-11-27 it's I'll we've don't" * 20
    lines = [text[start : start + 60] for start in range(0, len(text), 60)]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=size - 1,
        special_tokens=special,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokens.train_from_iterator(lines, trainer)
    tokens.add_tokens([AddedToken("<think>", normalized=False)])  # a token of text, and not a special one
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizer, ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
