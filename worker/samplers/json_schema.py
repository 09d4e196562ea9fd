"""Answers that are JSON of a schema: after each token, which ones may come next (by llguidance)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


class UnsupportedSchema(ValueError):
    """The schema is none, or uses something that cannot be held to."""


class Vocabulary:
    """A tokenizer as llguidance knows it. Takes about a second to make, so it is made once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, stop_ids: frozenset[int]) -> None:
        """`size` is that of the model's head, which may be larger than the tokenizer's."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            name = type(tokenizer).__name__
            raise UnsupportedSchema(f"answers under a schema need a fast tokenizer, and {name} is none")
        self.size = size
        self.tokenizer: LLTokenizer = from_tokenizer(tokenizer, size, sorted(stop_ids))

    def grammar(self, schema: Mapping[str, Any]) -> str:
        """Raise UnsupportedSchema if answers cannot be held to the schema."""
        # Models that may put any white space anywhere tend to put it everywhere.
        compact = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": compact}))
        except ValueError as cause:
            raise UnsupportedSchema(str(cause)) from cause
        problem = LLMatcher.validate_grammar(grammar, self.tokenizer)
        if problem:
            raise UnsupportedSchema(problem)
        return grammar


class Held:
    """The answers of one batch, each at its place in the grammar. Rows are numbered as the batch began."""

    def __init__(self, vocabulary: Vocabulary, grammar: str, rows: int) -> None:
        first = LLMatcher(vocabulary.tokenizer, grammar)
        self._matchers = [first, *(first.deep_copy() for _ in range(rows - 1))]
        self._size = vocabulary.size

    def masked(self, logits_RV: Tensor, row_R: Sequence[int]) -> Tensor:
        """The logits of the live rows with every token that must not come next at -inf."""
        words = allocate_token_bitmask(len(row_R), self._size)
        for at, row in enumerate(row_R):
            fill_next_token_bitmask(self._matchers[row], words, at)
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
        allowed_RV = bits.view(len(row_R), -1)[:, : self._size].bool().to(logits_RV.device)
        return logits_RV.masked_fill(~allowed_RV, float("-inf"))

    def take(self, row_R: Sequence[int], token_R: Sequence[int]) -> None:
        """Each row has gone on by a token."""
        for row, token in zip(row_R, token_R, strict=True):
            taken = self._matchers[row].consume_token(token)
            assert taken, self._matchers[row].get_error()
