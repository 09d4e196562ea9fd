"""Which conversation of an episode a request continues, and the items of Responses as its messages. Pure functions.

Imports nothing but the standard library. The client has a link to this file (sdk/regraft/_rules).

Clients send back what they have read with small changes: they drop thoughts, and write the arguments of calls in
another way. Such a conversation is still the same.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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


def merged(messages: Iterable[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """The messages of a chat from those of the items of Responses, where an answer's text and calls are several.

    Results must follow their calls in a chat: text between them would be refused, or break a chat template.

    Args:
        messages: one for each item; None for an item that a chat does not have.
    """
    chat: list[dict[str, Any]] = []
    said_after: dict[int, list[Any]] = defaultdict(list)  # by the place of the message with the calls
    for message in messages:
        if message is None:
            continue
        last = chat[-1] if chat else {}
        if "tool_calls" in message and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        elif "tool_calls" in last and message["role"] == "assistant":
            said_after[len(chat) - 1].append(message["content"])
        else:
            chat.append(message)
    for index, contents in said_after.items():
        # One text: the parts of all may be more than a message may have.
        texts = (content for content in (chat[index]["content"], *contents) if content is not None)
        chat[index]["content"] = "\n".join(map(text_of, texts))
    return chat


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a message, which may be in parts."""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())
