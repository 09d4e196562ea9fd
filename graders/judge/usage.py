"""Token counts of chat completions, checked: they come from servers that may omit them or report nonsense."""

import threading
from collections.abc import Mapping
from typing import Any, TypeGuard

from graders.types import TokenUsage

# Of one call: above the context window of any model, and below anything that would overflow a sum.
MAX_TOKENS = 100_000_000
_WRITTEN = ("content", "refusal", "reasoning_content", "tool_calls")
BYTES_PER_TOKEN = 4  # as OpenAI's rule of thumb for English text


class TokenLedger:
    """Tokens that models on servers have used, by model: counted with each reply, whatever becomes of the grade.

    `unbooked` are those that no usage of a project includes yet. Any thread may use it.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._used: dict[str, TokenUsage] = {}
        self._booked = 0

    def add(self, model: str, used: TokenUsage) -> None:
        with self._changing:
            self._used[model] = self._used.get(model, TokenUsage()) + used

    @property
    def used(self) -> dict[str, TokenUsage]:
        with self._changing:
            return dict(self._used)

    @property
    def total(self) -> int:
        """Prompt and completion tokens; cached ones are part of the prompt."""
        all_models = sum(self.used.values(), TokenUsage())
        return all_models.prompt_tokens + all_models.completion_tokens

    @property
    def unbooked(self) -> int:
        return self.total - self._booked

    def book(self, tokens: int) -> None:
        """Count so many as included in the project's usage."""
        with self._changing:
            self._booked += tokens


def token_usage(completion: Mapping[str, Any], prompt: bytes) -> TokenUsage:
    """Read `usage`. Estimates a count that is absent or impossible from the length of the text.

    A count must be an integer from 1 to MAX_TOKENS, or 0 for no text. An estimate is one token for BYTES_PER_TOKEN.

    Args:
        prompt: The body of the request.
    """
    message = completion["choices"][0]["message"]
    usage = _mapping(completion.get("usage"))
    answer = "".join(str(message.get(name) or "") for name in _WRITTEN)
    prompt_tokens = _count(usage.get("prompt_tokens"), len(prompt))
    cached = _mapping(usage.get("prompt_tokens_details")).get("cached_tokens")
    return TokenUsage(
        prompt_tokens,
        _count(usage.get("completion_tokens"), len(answer.encode(errors="surrogatepass"))),
        cached if _is_count(cached) and cached <= prompt_tokens else 0,
    )


def _count(reported: Any, size: int) -> int:
    if _is_count(reported) and (reported or not size):
        return reported
    return -(-size // BYTES_PER_TOKEN)


def _is_count(reported: Any) -> TypeGuard[int]:
    return type(reported) is int and 0 <= reported <= MAX_TOKENS  # a bool is no count


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
