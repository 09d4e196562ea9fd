"""Constrain answers to a JSON schema: compute the allowed next tokens after each token (with llguidance).

The trainer applies the same grammar (`allowed`), so that its probabilities are over the same tokens as the sampler's.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from core.response_format import SchemaTooLarge, grammar


class UnsupportedTokenizer(ValueError):
    """The model's tokenizer does not support a response schema."""


@lru_cache(maxsize=32)
def schema_problem(tokenizer: PreTrainedTokenizerBase) -> str:
    """Why answers of the model cannot follow a schema or a budget of thoughts; empty if they can. Takes about a second
    the first time.
    """
    try:
        _tokenizer_of(tokenizer)
    except UnsupportedTokenizer as cause:
        return str(cause)
    return ""


def _tokenizer_of(tokenizer: PreTrainedTokenizerBase, *options: Any) -> LLTokenizer:
    needs = "a response schema or a limit of thoughts needs a tokenizer whose tokens have known bytes"
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedTokenizer(f"{needs}, and {type(tokenizer).__name__} is not a fast tokenizer")
    try:
        return from_tokenizer(tokenizer, *options)
    except ValueError as cause:  # no decoder, or one of an unknown kind
        raise UnsupportedTokenizer(f"{needs}, and this model's has none ({cause})") from cause


class Vocabulary:
    """A tokenizer as llguidance knows it. Takes about a second to make, so it is made once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, stop_ids: frozenset[int]) -> None:
        """`size` is that of the model's head, which may be larger than the tokenizer's.

        Raises:
            UnsupportedTokenizer: the bytes of its tokens are not known.
        """
        self.size = size
        self.tokenizer = _tokenizer_of(tokenizer, size, sorted(stop_ids))

    def start(self, response_schema: str) -> LLMatcher:
        """The place before the first token of an answer."""
        return LLMatcher(self.tokenizer, grammar(response_schema))

    def first(self, response_schema: str) -> Tensor:
        """Bits [1, words] of the tokens that may begin an answer."""
        words = every_token(1, self.size)
        fill(words, 0, self.start(response_schema))
        return words

    def allowed(self, response_schema: str, ids_T: Sequence[int]) -> Tensor:
        """Bits [T, words] of the tokens that could have stood in place of each of these, 32 to a word (int32).

        Raises:
            SchemaTooLarge: as the sampler did, or should have.
        """
        words = every_token(len(ids_T), self.size)
        matcher = self.start(response_schema)
        for t, token in enumerate(ids_T):
            fill(words, t, matcher)
            take(matcher, token)
        return words


# llguidance.torch has both of these, too. It compiles a kernel when it is imported, and to load torch's compiler for
# that takes every worker process two seconds.


def every_token(rows: int, size: int) -> Tensor:
    """Bits [rows, ceil(size / 32)] that allow each of `size` tokens."""
    shape = (rows, -(-size // 32))
    try:
        return torch.full(shape, -1, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    except RuntimeError:  # a limit of locked memory (containers, WSL), or a driver that torch cannot use
        return torch.full(shape, -1, dtype=torch.int32)


def fill(words: Tensor, row: int, matcher: LLMatcher) -> None:
    """Allow in one row what may come next."""
    bits = words[row]
    matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.numel() * bits.element_size())


def masked(logits: Tensor, words: Tensor) -> Tensor:
    """Logits [N, V] with the tokens whose bit in words [N, ceil(V / 32)] is 0 at -inf."""
    return logits.masked_fill(forbidden(words, logits.shape[-1]), float("-inf"))


def forbidden(words: Tensor, size: int) -> Tensor:
    """Whether the bit of each of `size` tokens in words [N, ceil(size / 32)] is 0: bool [N, size]."""
    # By bytes, of which the first has the lowest bits: a bit takes a quarter of the memory that it takes by words.
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=words.device)
    unset = (words.contiguous().view(torch.uint8)[:, :, None] & bits) == 0
    return unset.view(len(words), 8 * unset.shape[1])[:, :size]


def take(matcher: LLMatcher, token: int) -> None:
    """Take a token that the mask allows. Raises SchemaTooLarge."""
    taken = matcher.consume_token(token)
    check(matcher)
    assert taken, "a token that the mask does not allow"


def check(matcher: LLMatcher) -> None:
    """Raises SchemaTooLarge if the schema exceeds a limit here."""
    if matcher.is_error():
        reason = matcher.get_error().strip().split("\n")[0]
        raise SchemaTooLarge(f"The schema is too complex at one position of an answer ({reason}).")
