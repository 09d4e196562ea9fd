"""What the inference server needs of whatever computes. Implementations: continuous.py, vllm_engine.py."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Ask:
    """One answer."""

    prompt_ids: tuple[int, ...]
    adapter: Path | None  # its folder, whose name is the hash of what is in it; None is the base model
    temperature: float
    top_p: float
    seed: int
    max_tokens: int
    held_to: str  # a schema (core/response_format.py), or ""
    top_logprobs: int | None  # None: not even that of the token itself


@dataclass(frozen=True)
class Token:
    """The next token of an answer. Log-probabilities are the model's own, before temperature, top_p and schema."""

    id: int
    last: bool  # a stop token, or as many as were asked for
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Engine(Protocol):
    """A loaded base model with any number of adapters."""

    context: int  # tokens of prompt and answer together
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]

    def generate(self, ask: Ask) -> AsyncGenerator[Token, None]:
        """The answer's tokens as they come. Closing the iterator aborts the request."""
        ...

    @property
    def lost(self) -> bool:
        """It has died, and another one has to take its place."""
        ...

    async def close(self) -> None: ...
