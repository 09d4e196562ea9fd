"""Stream the answer of a reasoning model in two channels: its thought, and the final answer."""

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from worker.model.reasoning import AnswerPart, Reasoning
from worker.serving.detokenizer import Detokenizer, Piece
from worker.serving.engine import Token


class ReasoningAnswer:
    """As Detokenizer, with the thought in `Piece.reasoning`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
        stops: Sequence[str],
        reasoning: Reasoning,
    ) -> None:
        form = reasoning.form
        self.stop_ids, self.form = stop_ids, form
        self.finish_reason: Literal["stop", "length"] | None = None
        self.tokens = self.reasoning_tokens = 0
        self._place = AnswerPart(reasoning)
        # Tags may be special tokens; a thought ends where its closing text begins.
        self._thought = Detokenizer(tokenizer, frozenset(), (form.closing, form.end), special=True)
        self._answer = Detokenizer(tokenizer, stop_ids, stops)
        self._undecided: list[Token] = []
        self._begun = self._answering = False
        self._pending = (
            ""  # of the thought: it may turn out to be its start tag, or white space before its end
        )

    @property
    def ids(self) -> Sequence[int]:
        """The tokens of the final answer so far."""
        return self._answer.ids

    def add(self, token: Token) -> Piece:
        """Add a token and return the text that is final. Sets `finish_reason` when the answer ends."""
        self.tokens += 1
        before = self._place.at
        self._place.take(token.id)
        if before == "answer":
            return self._final([token])
        if before == "undecided":
            self._undecided.append(token)
            if self._place.at == "answer" or token.last:
                return self._final(self._undecided)
            self.reasoning_tokens = len(self._undecided)
            return Piece("", [])
        return self._think(token)

    def _think(self, token: Token) -> Piece:
        self.reasoning_tokens += 1
        if token.last:
            self.finish_reason = "stop" if token.id in self.stop_ids else "length"
        if token.id not in self.stop_ids and not self._thought.finish_reason:
            self._pending += self._thought.add(token).text
        is_over = self._place.at == "answer"
        text = "" if not is_over else self._without_newlines(self._place.overflow)
        return Piece(text, [], self._settled(is_over or token.last))

    def _settled(self, is_over: bool) -> str:
        """The part of `_pending` that is known to belong to the thought."""
        start = self.form.start
        if not self._begun:
            self._pending = self._pending.lstrip()
            if start.startswith(self._pending) and not is_over:
                return ""
            self._pending = self._pending.removeprefix(start).lstrip()
            self._begun = bool(self._pending)
        text = self._pending.rstrip()
        self._pending = self._pending[len(text) :]
        return text

    def _final(self, tokens: Sequence[Token]) -> Piece:
        pieces = [self._answer.add(token) for token in tokens]
        self.finish_reason = self._answer.finish_reason
        if self._place.answer_start == 0:
            self.reasoning_tokens = 0
            text = "".join(piece.text for piece in pieces)
        else:
            text = self._without_newlines("".join(piece.text for piece in pieces))
        return Piece(text, [one for piece in pieces for one in piece.logprobs])

    def _without_newlines(self, text: str) -> str:
        """Remove the newlines between the tag and the answer."""
        if not self._answering:
            text = text.lstrip("\n")
            self._answering = bool(text)
        return text
