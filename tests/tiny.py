"""A model small enough to learn in seconds: two layers, seventy words, random weights, made when asked for."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = """
    <pad> <unk> <end> <user> <assistant> <system>
    yes no maybe red green blue cat dog bird one two three four five six seven eight nine ten
    say the word what colour animal number is it a of my your name please tell me now again
    north south east west spring summer autumn winter bread milk salt sugar water fire wood iron
""".split()

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_tiny_model(
    folder: Path, *, layers: int = 2, head_dim: int = 16, key_heads: int = 2, seed: int = 0
) -> Path:
    """Save the model and its tokenizer into `folder` in Hugging Face format."""
    torch.manual_seed(seed)
    return save_llama(tiny_tokenizer(), len(WORDS), layers, folder, head_dim=head_dim, key_heads=key_heads)


def tiny_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One word, one token."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        chat_template=chat_template,
    )


def make_byte_model(folder: Path, *, seed: int = 0) -> Path:
    """One whose tokens are bytes, so that it can write anything; what it writes is noise."""
    torch.manual_seed(seed)
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", *letters])}
    tokens = Tokenizer(BPE(vocabulary, []))
    tokens.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokens.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
    )
    return save_llama(tokenizer, len(vocabulary), 2, folder, head_dim=32)


def save_llama(
    tokenizer: PreTrainedTokenizerFast,
    size: int,
    layers: int,
    folder: Path,
    head_dim: int | None = None,
    key_heads: int = 2,
) -> Path:
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=max(4, key_heads),
        head_dim=head_dim,
        num_key_value_heads=key_heads,  # grouped-query attention, as the real models have
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        # Larger than usual, so that different inputs give visibly different outputs.
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
