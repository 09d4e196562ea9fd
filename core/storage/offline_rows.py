"""The rows of jobs that learn from the answers in their file, in OpenAI's formats.

    supervised: {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    dpo:        {"input": {"messages": [{"role": "user", "content": "2 + 2?"}]},
                 "preferred_output": [{"role": "assistant", "content": "4"}],
                 "non_preferred_output": [{"role": "assistant", "content": "Five."}]}

Those of a reward model are ours: rows of dpo, which may have a `margin`, or answers with scores. A file has one kind.

    reward_model: {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
                   "score": 1.0}

Functions here yield the problems of a row as (path, message) pairs. An assistant message of a supervised row with
`"weight": 0` is read and not learned.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from .datasets import (
    EMPTY_KEYS,
    MESSAGE_KEYS,
    ROLES,
    Problem,
    RowForm,
    content_problems,
    kind,
)

# OpenAI's minimum; it refuses smaller files with `invalid_n_examples`.
MIN_ROWS = 10
MAX_ROWS = 1_000_000
TOOL_KEYS = {"tool_calls", "tool_call_id", "function_call"}


def format_of(row: Mapping[str, Any]) -> str | None:
    """The method whose format the row seems to have; None: none of them. Pairs are dpo's."""
    if "messages" in row:
        return "reward_model" if "score" in row else "supervised"
    return "dpo" if {"input", "preferred_output", "non_preferred_output"} & row.keys() else None


def method_of(row: Mapping[str, Any]) -> str | None:
    """The method that a row seems to be made for, by its format and who speaks last; None: unknown."""
    if (found := format_of(row)) != "supervised":
        return found
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        return None
    return "supervised" if _role(messages[-1]) == "assistant" else "reinforcement"


def supervised_problems(row: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _unknown_keys(row, {"messages", "tools", "parallel_tool_calls", "functions"})
    yield from _tool_problems(row)
    messages = row.get("messages")
    if "messages" not in row:
        yield "messages", "is missing"
    elif not isinstance(messages, list) or not messages:
        yield "messages", "must be a list of at least one message"
    else:
        for index, message in enumerate(messages):
            yield from _message_problems(f"messages[{index}]", message)
        if not any(map(is_learned, messages)):
            yield "messages", "has no message to learn from: no assistant message has a weight other than 0"


def reward_problems(row: Mapping[str, Any]) -> Iterator[Problem]:
    """Of a pair, or of an answer with a score."""
    if not is_scored(row):
        margin = row.get("margin")
        if margin is not None and not (_is_finite(margin) and margin >= 0):
            yield "margin", "must be a number >= 0"
        yield from preference_problems({key: value for key, value in row.items() if key != "margin"})
        return
    score = row.get("score")
    if not _is_finite(score):
        yield "score", "is missing" if score is None else "must be a finite number"
    yield from supervised_problems({key: value for key, value in row.items() if key != "score"})
    messages = row.get("messages")
    if isinstance(messages, list) and messages and _role(messages[-1]) != "assistant":
        yield "messages", "must end with the answer of the assistant that has the score"


def is_scored(row: Mapping[str, Any]) -> bool:
    """Whether a row of a reward model is an answer with a score, and not a pair."""
    return "messages" in row


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def preference_problems(row: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _unknown_keys(row, {"input", "preferred_output", "non_preferred_output"})
    given = row.get("input")
    if not isinstance(given, Mapping):
        yield "input", "is missing" if given is None else f"must be an object, not {kind(given)}"
    else:
        unknown = {"messages", "tools", "parallel_tool_calls"}
        yield from ((f"input.{path}", problem) for path, problem in _unknown_keys(given, unknown))
        yield from ((f"input.{path}", problem) for path, problem in _tool_problems(given))
        messages = given.get("messages")
        if not isinstance(messages, list) or not messages:
            yield "input.messages", "must be a list of at least one message"
        else:
            for index, message in enumerate(messages):
                yield from _message_problems(f"input.messages[{index}]", message)
            if _role(messages[-1]) == "assistant":
                yield "input.messages", "must not end with a message of the assistant"
    for name in ("preferred_output", "non_preferred_output"):
        yield from _answer_problems(name, row.get(name))
    if not isinstance(given, Mapping) or row.get("preferred_output") is None:
        return
    if row.get("preferred_output") == row.get("non_preferred_output"):
        yield "non_preferred_output", "is the same as preferred_output"


def is_learned(message: Any) -> bool:
    """Whether a supervised job learns this message."""
    return _role(message) == "assistant" and bool(message.get("weight", 1) != 0)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _unknown_keys(row: Mapping[str, Any], known: Collection[str]) -> Iterator[Problem]:
    for key in row:
        if key not in known:
            yield str(key), "is not a key of this format"


def _tool_problems(row: Mapping[str, Any]) -> Iterator[Problem]:
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(one, Mapping) for one in tools)):
        yield "tools", "must be a list of objects"
    if row.get("functions") not in (None, []):
        yield "functions", "is deprecated and not supported by this version; use tools"
    if not isinstance(row.get("parallel_tool_calls"), bool | None):
        yield "parallel_tool_calls", "must be true or false"


def _answer_problems(name: str, answer: Any) -> Iterator[Problem]:
    if not isinstance(answer, list) or len(answer) != 1:
        yield (
            name,
            "is missing" if answer is None else "must be a list of exactly one message of the assistant",
        )
        return
    yield from _message_problems(f"{name}[0]", answer[0])
    if isinstance(answer[0], Mapping):
        if _role(answer[0]) != "assistant":
            yield f"{name}[0].role", "must be assistant"
        if "weight" in answer[0]:
            yield f"{name}[0].weight", "is only for messages of supervised rows"


def _message_problems(path: str, message: Any) -> Iterator[Problem]:
    if not isinstance(message, Mapping):
        yield path, f"must be an object, not {kind(message)}"
        return
    for key in message:
        if key not in MESSAGE_KEYS | TOOL_KEYS and (
            key not in EMPTY_KEYS or message[key] not in (None, [], "")
        ):
            yield f"{path}.{key}", "is not a message key that this version supports"
    if message.get("role") not in ROLES:
        yield f"{path}.role", f"must be one of {', '.join(ROLES)}"
    if not isinstance(message.get("name"), str | None):
        yield f"{path}.name", f"must be a string, not {kind(message['name'])}"
    if message.get("function_call") is not None:
        yield f"{path}.function_call", "is deprecated and not supported by this version; use tool_calls"
    if "weight" in message:
        if message.get("role") != "assistant":
            yield f"{path}.weight", "is only for messages of the assistant"
        elif type(message["weight"]) is not int or message["weight"] not in (0, 1):
            yield f"{path}.weight", "must be 0 or 1"
    calls = message.get("tool_calls")
    if calls is not None:
        yield from _call_problems(f"{path}.tool_calls", calls, message.get("role"))
    if message.get("content") is not None:
        yield from content_problems(f"{path}.content", message["content"])
    elif not calls:
        yield f"{path}.content", "is missing"


def _call_problems(path: str, calls: Any, role: Any) -> Iterator[Problem]:
    if role != "assistant":
        yield path, "is only for messages of the assistant"
    if not isinstance(calls, list) or not calls:
        yield path, "must be a list of at least one call"
        return
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            yield (
                f"{path}[{index}]",
                'must be {"id": "...", "type": "function", "function": {"name": "...", ...}}',
            )
        elif not isinstance(function.get("arguments", ""), str):
            yield f"{path}[{index}].function.arguments", "must be a string of JSON"


FORMS: Mapping[str, RowForm] = MappingProxyType(
    {
        "supervised": RowForm(supervised_problems, lambda row: row["messages"]),
        "dpo": RowForm(preference_problems, lambda row: row["input"]["messages"]),
        "reward_model": RowForm(
            reward_problems, lambda row: row["messages"] if is_scored(row) else row["input"]["messages"]
        ),
    }
)
