"""Which conversation of an episode a request continues. Pure functions.

Clients send back what they have read with small changes: they drop thoughts, and write the arguments of calls in
another way. Such a conversation is still the same.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


def continued(known: Sequence[Message], sent: Sequence[Message]) -> Sequence[Message] | None:
    """The messages behind a known conversation; None: `sent` does not continue it."""
    if len(known) > len(sent) or not all(map(is_same, known, sent)):
        return None
    return sent[len(known) :]


def is_same(known: Message, sent: Message) -> bool:
    """Whether a message is a known one: a thought that is absent fits any, and arguments are compared as JSON."""
    thought = sent.get("reasoning_content")
    if thought and thought != known.get("reasoning_content"):
        return False
    return _without_thought(known) == _without_thought(sent)


def _without_thought(message: Message) -> tuple[Any, ...]:
    role = message["role"]
    return (
        "system" if role == "developer" else role,
        message.get("content") or "",
        message.get("name"),
        message.get("tool_call_id"),
        [_call(call) for call in message.get("tool_calls") or ()],
    )


def _call(call: Mapping[str, Any]) -> tuple[Any, ...]:
    function = call["function"]
    return call["id"], function["name"], _arguments(function.get("arguments", "{}"))


def _arguments(text: str) -> tuple[bool, str]:
    """JSON in one spelling, so that 1 and true differ; or the text, if it is not JSON."""
    try:
        return True, json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return False, text


def spelled(tools: Tools) -> str:
    """The functions that answers may call, in one spelling of JSON."""
    return json.dumps(list(tools), sort_keys=True)
