"""The messages and tools of a row, for every method: one set of checks, and what the chat template gets of a message.

    {"role": "user", "content": "The weather in Oslo?"}
    {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function",
                                          "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}}]}
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}

Functions here yield the problems of a row as (path, message) pairs.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_KEYS = {"role", "content", "name", "weight", "tool_calls", "tool_call_id", "function_call"}
# Extra fields of a message copied from a response of OpenAI's or Azure's. Null and empty values are dropped before the
# model's chat template sees the message.
EMPTY_KEYS = {"refusal", "tool_calls", "tool_call_id", "function_call", "audio", "annotations"}

# The limits of OpenAI's API, which chats have, too (core/chat.py).
MAX_TOOLS = 128
TOOL_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
FUNCTION_KEYS = {"name", "description", "parameters", "strict"}

Problem = tuple[str, str]  # path in the row, message


def tool_problems(row: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems of `tools` and `parallel_tool_calls`, next to the messages of a row."""
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        yield "tools", f"must be a list of functions, not {kind(tools)}"
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        yield "tools", f"has {len(tools)} functions, and at most {MAX_TOOLS} are supported"
    names = set[str]()
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function" or len(tool) > 2:
            function = {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            yield f"tools[{index}]", 'must be {"type": "function", "function": {"name": "...", ...}}'
        elif not re.fullmatch(TOOL_NAME, name):
            yield f"tools[{index}].function.name", "must be 1 to 64 letters, digits, '_' or '-'"
        elif name in names:
            yield f"tools[{index}].function.name", f"the tool {name[:64]!r} is already in the list"
        elif not isinstance(function.get("parameters"), Mapping | None):
            yield f"tools[{index}].function.parameters", "must be a JSON schema"
        else:
            names.add(name)
            yield from _function_problems(f"tools[{index}].function", function)
    if not isinstance(row.get("parallel_tool_calls"), bool | None):
        yield "parallel_tool_calls", "must be true or false"


def _function_problems(path: str, function: Mapping[str, Any]) -> Iterator[Problem]:
    for key in function:
        if key not in FUNCTION_KEYS:
            yield f"{path}.{key}", f"is not a key of functions, which have {', '.join(sorted(FUNCTION_KEYS))}"
    if not isinstance(function.get("description"), str | None):
        yield f"{path}.description", f"must be a string, not {kind(function['description'])}"
    if not isinstance(function.get("strict"), bool | None):
        yield f"{path}.strict", "must be true or false"


def conversation_problems(path: str, row: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems of `row["messages"]`, whose path is given: of each message, and of calls with their results."""
    messages = row.get("messages")
    if "messages" not in row:
        yield path, "is missing"
    elif not isinstance(messages, list) or not messages:
        yield path, "must be a list of at least one message"
    else:
        for index, message in enumerate(messages):
            yield from message_problems(f"{path}[{index}]", message)
        yield from _result_problems(path, messages)


def message_problems(path: str, message: Any) -> Iterator[Problem]:
    """The problems of one message, whatever is around it."""
    if not isinstance(message, Mapping):
        yield path, f"must be an object, not {kind(message)}"
        return
    for key in message:
        if key not in MESSAGE_KEYS and (key not in EMPTY_KEYS or message[key] not in (None, [], "")):
            yield f"{path}.{key}", "is not a message key that this version supports"
    if message.get("role") not in ROLES:
        yield f"{path}.role", f"must be one of {', '.join(ROLES)}"
    if not isinstance(message.get("name"), str | None):
        yield f"{path}.name", f"must be a string, not {kind(message['name'])}"
    if message.get("function_call") is not None:
        yield f"{path}.function_call", "is deprecated and not supported by this version; use tool_calls"
    if "weight" in message:
        yield from _weight_problems(path, message)
    calls = message.get("tool_calls")
    if calls not in (None, []):
        yield from _call_problems(f"{path}.tool_calls", calls, message.get("role"))
    if message.get("content") is not None:
        yield from content_problems(f"{path}.content", message["content"])
    elif not calls:
        yield f"{path}.content", "is missing"


def _weight_problems(path: str, message: Mapping[str, Any]) -> Iterator[Problem]:
    if message.get("role") != "assistant":
        yield f"{path}.weight", "is only for messages of the assistant"
    elif type(message["weight"]) is not int or message["weight"] not in (0, 1):  # bool is a subclass of int
        yield f"{path}.weight", "must be 0 or 1"


def _call_problems(path: str, calls: Any, role: Any) -> Iterator[Problem]:
    if role != "assistant":
        yield path, "is only for messages of the assistant"
    if not isinstance(calls, list):
        yield path, "must be a list of at least one call"
        return
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str) and _id_of(call)):
            yield (
                f"{path}[{index}]",
                'must be {"id": "...", "type": "function", "function": {"name": "...", ...}}',
            )
        elif not isinstance(function.get("arguments", ""), str):
            yield f"{path}[{index}].function.arguments", "must be a string of JSON"


def _result_problems(path: str, messages: list[Any]) -> Iterator[Problem]:
    """Results without their call, and calls of a message with one id: which call has which result must be certain."""
    waiting = set[str]()  # calls of the last message of the assistant that have no result yet
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue
        if message.get("role") == "tool":
            yield from _answer_problems(f"{path}[{index}].tool_call_id", message.get("tool_call_id"), waiting)
            continue
        if message.get("tool_call_id") not in (None, ""):
            yield f"{path}[{index}].tool_call_id", "is only for messages of a tool"
        waiting = set[str]()
        calls = message.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            if (call_id := _id_of(call)) in waiting:
                yield (
                    f"{path}[{index}].tool_calls[{number}].id",
                    f"{call_id[:64]!r} is the id of another call of this message; give each its own",
                )
            if call_id:
                waiting.add(call_id)


def _answer_problems(path: str, call_id: Any, waiting: set[str]) -> Iterator[Problem]:
    if not isinstance(call_id, str) or not call_id:
        yield path, "is missing: the id of the call whose result this is"
    elif call_id not in waiting:
        yield (
            path,
            f"{call_id[:64]!r} is no call of the assistant's message before it that still has no result",
        )
    else:
        waiting.remove(call_id)


def _id_of(call: Any) -> str:
    """The id of a call; "" if it has none."""
    value = call.get("id") if isinstance(call, Mapping) else None
    return value if isinstance(value, str) else ""


def content_problems(path: str, content: Any) -> Iterator[Problem]:
    """The problems of a content, which is a text or a list of its parts."""
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        yield path, "must be a string or a list of text parts"
        return
    for index, part in enumerate(content):
        yield from _part_problems(f"{path}[{index}]", part)


def _part_problems(path: str, part: Any) -> Iterator[Problem]:
    if not isinstance(part, dict):
        yield path, f"must be an object, not {kind(part)}"
    elif "image" in str(part.get("type")):  # image_url, input_image
        yield path, "images are not supported by this version"
    elif part.get("type") != "text":
        yield f"{path}.type", 'must be "text"'
    elif part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        yield path, 'must be {"type": "text", "text": "..."}'


def stated(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without null and empty extra fields, as chat templates expect it."""
    return {
        key: value
        for key, value in message.items()
        if not (key in EMPTY_KEYS and value in (None, [], "")) and not (key == "name" and value is None)
    }


def kind(value: Any) -> str:
    """The JSON name of the type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
