"""Constrain answers to a JSON schema: compute the allowed next tokens after each token (with llguidance).

The trainer applies the same grammar (`allowed`), so that its probabilities are over the same tokens as the sampler's.
"""

from collections.abc import Sequence

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from core.response_format import SchemaTooLarge, grammar


class UnsupportedTokenizer(ValueError):
    """The model's tokenizer does not support a response schema."""


class Vocabulary:
    """A tokenizer as llguidance knows it. Takes about a second to make, so it is made once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, stop_ids: frozenset[int]) -> None:
        """`size` is that of the model's head, which may be larger than the tokenizer's."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            name = type(tokenizer).__name__
            raise UnsupportedTokenizer(f"a response schema needs a fast tokenizer, and {name} is not one")
        self.size = size
        self.tokenizer: LLTokenizer = from_tokenizer(tokenizer, size, sorted(stop_ids))

    def start(self, held_to: str) -> LLMatcher:
        """The place before the first token of an answer."""
        return LLMatcher(self.tokenizer, grammar(held_to))

    def allowed(self, held_to: str, ids_T: Sequence[int]) -> Tensor:
        """Bits [T, words] of the tokens that could have stood in place of each of these, 32 to a word (int32).

        Raises:
            SchemaTooLarge: as the sampler did, or should have.
        """
        words = allocate_token_bitmask(len(ids_T), self.size)
        matcher = self.start(held_to)
        for t, token in enumerate(ids_T):
            fill_next_token_bitmask(matcher, words, t)
            _take(matcher, token)
        return words


class Held:
    """The answers of one batch, each at its place in the grammar. Rows are numbered as the batch began."""

    def __init__(self, vocabulary: Vocabulary, held_to: str, rows: int) -> None:
        first = vocabulary.start(held_to)
        self._matchers = [first, *(first.deep_copy() for _ in range(rows - 1))]
        self._size = vocabulary.size

    def masked(self, logits_RV: Tensor, row_R: Sequence[int]) -> Tensor:
        """The logits of the live rows with every token that must not come next at -inf.

        Raises:
            SchemaTooLarge: for one of them, that cannot be said.
        """
        words = allocate_token_bitmask(len(row_R), self._size)
        for at, row in enumerate(row_R):
            fill_next_token_bitmask(self._matchers[row], words, at)
            _check(self._matchers[row])
        return masked(logits_RV, words.to(logits_RV.device))

    def take(self, row_R: Sequence[int], token_R: Sequence[int]) -> None:
        """Each row has gone on by a token that `masked` left it. Raises SchemaTooLarge."""
        for row, token in zip(row_R, token_R, strict=True):
            _take(self._matchers[row], token)


def masked(logits: Tensor, words: Tensor) -> Tensor:
    """Logits [N, V] with the tokens whose bit in words [N, ceil(V / 32)] is 0 at -inf."""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    allowed = bits.view(len(words), -1)[:, : logits.shape[-1]].bool()
    return logits.masked_fill(~allowed, float("-inf"))


def _take(matcher: LLMatcher, token: int) -> None:
    taken = matcher.consume_token(token)
    _check(matcher)
    assert taken, "a token that the mask does not allow"


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = matcher.get_error().strip().split("\n")[0]
        raise SchemaTooLarge(f"The schema is too complex at one position of an answer ({reason}).")
