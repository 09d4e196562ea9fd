"""Token counts of chat completions, checked: they come from servers that may omit them or report nonsense."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from graders.types import TokenUsage

# Of one call: above the context window of any model, and below anything that would overflow a sum.
MAX_TOKENS = 100_000_000
_WRITTEN = ("content", "refusal", "reasoning_content", "tool_calls")
BYTES_PER_TOKEN = 4  # as OpenAI's rule of thumb for English text


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
