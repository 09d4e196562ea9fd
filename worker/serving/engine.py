"""The interfaces between the inference server and the models that it has loaded."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from worker.model.reasoning import Reasoning


@dataclass(frozen=True)
class GenerationRequest:
    """One answer."""

    prompt_ids: tuple[int, ...]
    adapter: Path | None  # its folder, named by the hash of its content; None: the base model
    temperature: float
    top_p: float
    seed: int
    max_tokens: int
    response_schema: str  # a schema (core/response_format.py), or ""
    stop_ids: frozenset[int]
    top_logprobs: int | None  # None: no log-probabilities at all
    reasoning: Reasoning | None = None  # how the model reasons with the request's template
    thinking_budget: int | None = None  # tokens after which a thought is closed


@dataclass(frozen=True)
class Token:
    """The next token of an answer. Log-probabilities are the model's own, before temperature, top_p and schema."""

    id: int
    last: bool  # a stop token, or the token limit
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class LoadedModel(Protocol):
    """A loaded base model with any number of adapters: an `Engine`, or vLLM's server (vllm_server.py)."""

    @property
    def lost(self) -> bool:
        """Whether it has died and must be replaced."""
        ...

    async def close(self) -> None: ...


class Engine(LoadedModel, Protocol):
    """A model that yields an answer's tokens (continuous.py)."""

    context: int  # tokens of prompt and answer together
    tokenizer: PreTrainedTokenizerBase
    tool_parser: str | None  # of the model's registry entry

    def stop_ids(self, template: str | None) -> frozenset[int]:
        """The tokens that end answers to prompts of this chat template; None: the model's own."""
        ...

    def generate(self, ask: GenerationRequest) -> AsyncGenerator[Token, None]:
        """Stream the answer's tokens. Closing the iterator aborts the request."""
        ...
