"""Messages as chat templates expect them, for the worker that renders and for the API that counts tokens."""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from core.conversations import text_of
from core.tool_parsers import known_tool_parser

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def messages_for(template: object, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in OpenAI's format as `template` is given them.

    A developer is the system, parts are one text, arguments of calls are objects, and ids of calls are those that the
    template accepts.

    Args:
        template: Jinja text, or several by name.
    """
    return list(map(_for_template, with_ids_for(template, messages)))


def with_ids_for(template: object, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with ids of calls that the template accepts: 9 letters and digits in Mistral's, equal for equal ids.

    Args:
        template: Jinja text, or several by name.
    """
    if known_tool_parser(template) != "mistral":
        return [dict(message) for message in messages]
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    short = dict(message)
    if message.get("tool_calls"):
        short["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
    if message.get("tool_call_id"):
        short["tool_call_id"] = _short_id(message["tool_call_id"])
    return short


def _short_id(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else sha256(call_id.encode()).hexdigest()[:9]


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    rendered = {**message, "role": role, "content": text_of(message.get("content"))}
    calls = message.get("tool_calls")
    return rendered | {"tool_calls": list(map(_with_arguments_as_object, calls))} if calls else rendered


def _with_arguments_as_object(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments_of(call)}}


def arguments_of(call: Mapping[str, Any]) -> Any:
    """The arguments of a call: an object, or the text as it is if it is none."""
    text = call["function"].get("arguments", "{}")
    try:
        read = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return text
    return read if isinstance(read, dict) else text
