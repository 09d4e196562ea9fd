"""Convert tokens to complete characters, and apply stop strings, log-probabilities and finish reasons."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from worker.serving.engine import Token

UNFINISHED = "\ufffd"  # U+FFFD, which tokenizers emit for incomplete UTF-8
MAX_UNREAD = 16  # tokens that may be a part of one character, which has at most four bytes


@dataclass(frozen=True)
class Piece:
    """An increment of an answer: its new text and log-probabilities."""

    text: str
    logprobs: list[dict[str, Any]]
    reasoning: str = ""  # text of the thought


@dataclass
class Detokenizer:
    """Incremental detokenizer of one answer."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    stops: Sequence[str] = ()
    finish_reason: Literal["stop", "length"] | None = None
    tokens: int = 0
    reasoning_tokens: int = 0  # of these: none without a thought
    special: bool = False  # whether the text includes special tokens
    _ids: list[int] = field(default_factory=list)
    _from: int = 0  # decode from this token, because the text of a token depends on those before it
    _read: int = 0  # the text of the tokens before this one is in `_text`
    _text: str = ""
    _returned: int = 0  # characters of it that have been returned
    _logprobs: list[tuple[int, dict[str, Any]]] = field(
        default_factory=list
    )  # each with the offset of its text

    @property
    def ids(self) -> Sequence[int]:
        """The tokens so far."""
        return self._ids

    def add(self, token: Token) -> Piece:
        """Add a token and return the text that is final. Sets `finish_reason` when the answer ends."""
        self.tokens += 1
        if token.logprob is not None and token.id not in self.stop_ids:
            self._logprobs.append((len(self._text), entry(self.tokenizer, token)))
        self._ids.append(token.id)
        self._decode(last=token.last)
        if token.last:
            self.finish_reason = "stop" if token.id in self.stop_ids else "length"
        cut = min(
            (at for stop in self.stops if (at := self._text.find(stop, self._unsearched(stop))) >= 0),
            default=-1,
        )
        if cut >= 0:
            self._text, self.finish_reason = self._text[:cut], "stop"
        until = len(self._text) if self.finish_reason else len(self._text) - self._held_back()
        piece = Piece(self._text[self._returned : until], self._logprobs_until(until))
        self._returned = max(self._returned, until)
        return piece

    def _decode(self, *, last: bool) -> None:
        before = self._decoded(self._ids[self._from : self._read])
        after = self._decoded(self._ids[self._from :])
        is_whole = len(after) > len(before) and (last or not after.endswith(UNFINISHED))
        # Otherwise an answer of broken characters or hidden tokens would be decoded from its start for each token.
        if is_whole or len(self._ids) - self._read >= MAX_UNREAD:
            self._text += after[len(before) :]
            self._from, self._read = self._read, len(self._ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not self.special)) if ids else ""

    def _unsearched(self, stop: str) -> int:
        return max(0, self._returned - len(stop))

    def _held_back(self) -> int:
        """Return the number of characters at the end that may be the start of a stop string."""
        return max(
            (
                size
                for stop in self.stops
                for size in range(1, min(len(stop), len(self._text) + 1))
                if self._text.endswith(stop[:size])
            ),
            default=0,
        )

    def _logprobs_until(self, until: int) -> list[dict[str, Any]]:
        """Return the log-probabilities of tokens whose text begins before `until`."""
        ready = [one for at, one in self._logprobs if at < until]
        self._logprobs = self._logprobs[len(ready) :]
        return ready


def entry(tokenizer: PreTrainedTokenizerBase, token: Token) -> dict[str, Any]:
    """Convert a token to an entry of OpenAI's logprobs.content."""
    top = [spelled(tokenizer, id) | {"logprob": value} for id, value in token.top]
    return spelled(tokenizer, token.id) | {"logprob": token.logprob, "top_logprobs": top}


def spelled(tokenizer: PreTrainedTokenizerBase, id: int) -> dict[str, Any]:
    text = str(tokenizer.decode([id]))
    if UNFINISHED not in text:
        return {"token": text, "bytes": list(text.encode())}
    # An incomplete character: byte-level tokenizers map each byte to one character.
    piece = str(tokenizer.convert_ids_to_tokens(id))
    known = _byte_letters()
    whole = all(letter in known for letter in piece)
    return {"token": text, "bytes": [known[letter] for letter in piece] if whole else None}


@cache
def _byte_letters() -> dict[str, int]:
    """Return GPT-2's mapping of characters to bytes: printable Latin-1 maps to itself, other bytes to U+0100 and up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
