"""The rows of jobs that learn from the answers in their file, in OpenAI's formats.

    supervised: {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    dpo:        {"input": {"messages": [{"role": "user", "content": "2 + 2?"}]},
                 "preferred_output": [{"role": "assistant", "content": "4"}],
                 "non_preferred_output": [{"role": "assistant", "content": "Five."}]}

Rows of dpo with one labeled answer are ours, for the loss kto: {"input": ..., "output": [...], "label": true}.

Those of a reward model are ours: rows of dpo, which may have a `margin`, answers with a `score`, or answers with a
label for each step, which is a line with text in it. A file has one kind.

    reward_model: {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
                   "score": 1.0}
                  {"messages": [{"role": "user", "content": "1 + 2 + 3?"},
                                {"role": "assistant", "content": "1 + 2 = 3\n3 + 3 = 7"}], "step_labels": [1, 0]}

Functions here yield the problems of a row as (path, message) pairs. An assistant message of a supervised row with
`"weight": 0` is read and not learned.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal

from . import foreign_files
from .datasets import InvalidDataset, LineError, RowForm, read_objects
from .foreign_files import FIRST_ROWS
from .message_rows import Problem, conversation_problems, kind, message_problems, tool_problems

RewardKind = Literal["pairs", "scores", "steps"]
# OpenAI's minimum; it refuses smaller files with `invalid_n_examples`.
MIN_ROWS = 10
MAX_ROWS = 1_000_000
# The methods whose rows a job reads, by its method or variant (core/jobs/methods.py).
ROWS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "reinforcement": ("reinforcement",),
        "distillation": ("reinforcement",),
        "distillation_logits": ("supervised",),
        "supervised": ("supervised",),
        "dpo": ("dpo",),
        "reward_model": ("reward_model", "dpo"),
    }
)
_ASK = '{"role": "user", "content": "2 + 2?"}'
_EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "reinforcement": f'{{"messages": [{_ASK}], "answer": "4"}}',
        "supervised": f'{{"messages": [{_ASK}, {{"role": "assistant", "content": "4"}}]}}',
        "dpo": f'{{"input": {{"messages": [{_ASK}]}}, "preferred_output": [{{"role": "assistant", "content": "4"}}], '
        '"non_preferred_output": [{"role": "assistant", "content": "5"}]}',
        "reward_model": f'{{"messages": [{_ASK}, {{"role": "assistant", "content": "4"}}], "score": 1.0}}',
    }
)


def format_of(row: Mapping[str, Any]) -> str | None:
    """The method whose format the row seems to have; None: none of them. Pairs are dpo's."""
    if foreign_files.repeats_an_answer(row):
        return None
    if "messages" in row:
        return "reward_model" if {"score", "step_labels"} & row.keys() else "supervised"
    # The keys `input` and `output` alone do not make a row of dpo: Alpaca's rows have both.
    given = row.get("input")
    has_prompt = isinstance(given, Mapping) and "messages" in given
    is_pair = not row.keys().isdisjoint({"preferred_output", "non_preferred_output"})
    return "dpo" if has_prompt or is_pair else None


def method_of(row: Mapping[str, Any]) -> str | None:
    """The method that a row seems to be made for, by its format and who speaks last; None: unknown."""
    if (found := format_of(row)) != "supervised":
        return found
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        return None
    return "supervised" if _role(messages[-1]) == "assistant" else "reinforcement"


def remedy(made_for: str, method: str) -> str:
    """The advice for a file that was made for one method and is used in a job of another."""
    return f"Use method '{made_for}' for this file, or rows such as {_EXAMPLES[ROWS_OF[method][0]]}."


def explained(
    invalid: InvalidDataset, chunks: Callable[[], Iterable[bytes]], method: str, name: str
) -> InvalidDataset:
    """The errors of a file as the user reads them.

    A file in a foreign format gets one sentence in place of the errors of its lines. The errors of a file for another
    method follow a sentence that names that method.

    Args:
        chunks: returns the file's content, from its start.
        method: of the job, or its variant.
        name: of the file.
    """
    foreign = foreign_files.detect(chunks(), name)
    if foreign is not None:
        return InvalidDataset([LineError(0, foreign.sentence(ROWS_OF[method][0]))])
    first = islice(read_objects(chunks()), FIRST_ROWS)
    found = {method_of(row[1]) for row in first if isinstance(row, tuple)}
    [made_for] = found if len(found) == 1 else [None]
    if made_for is None or made_for in ROWS_OF[method]:
        return invalid
    read_as = ROWS_OF[method][0]
    sentence = f"the rows are made for method '{made_for}', and were read as rows for '{read_as}'. "
    sentence += remedy(made_for, method)
    return InvalidDataset([LineError(0, sentence), *invalid.errors], invalid.more)


def supervised_problems(row: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _unknown_keys(row, {"messages", "tools", "parallel_tool_calls", "functions"})
    yield from tool_problems(row)
    if row.get("functions") not in (None, []):
        yield "functions", "is deprecated and not supported by this version; use tools"
    yield from conversation_problems("messages", row)
    messages = row.get("messages")
    if isinstance(messages, list) and messages and not any(map(is_learned, messages)):
        yield "messages", "has no message to learn from: no assistant message has a weight other than 0"


def reward_problems(row: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems of a pair, or of an answer with a score or with labels of its steps."""
    kind_of_row = reward_kind(row)
    if kind_of_row == "pairs" and is_labeled(row):
        yield (
            "output",
            "is one answer with a label, which only the loss kto of dpo reads; put it into messages, with a score",
        )
        return
    if kind_of_row == "pairs":
        margin = row.get("margin")
        if margin is not None and not (_is_finite(margin) and margin >= 0):
            yield "margin", "must be a number >= 0"
        yield from preference_problems({key: value for key, value in row.items() if key != "margin"})
        return
    score = row.get("score")
    if kind_of_row == "scores" and not _is_finite(score):
        yield "score", "is missing" if score is None else "must be a finite number"
    own = {"score"} if kind_of_row == "scores" else {"step_labels"}
    yield from supervised_problems({key: value for key, value in row.items() if key not in own})
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return
    if _role(messages[-1]) != "assistant":
        yield "messages", "must end with the answer of the assistant that is judged"
    elif kind_of_row == "steps":
        yield from _label_problems(row["step_labels"], messages[-1].get("content"))


def _label_problems(labels: Any, answer: Any) -> Iterator[Problem]:
    if not isinstance(labels, list) or not all(_is_finite(one) and 0 <= one <= 1 for one in labels):
        yield "step_labels", "must be a list of numbers from 0 to 1"
    elif not isinstance(answer, str):
        yield "messages", "must end with an answer whose content is one text"
    elif len(labels) != (steps := len(step_ends(answer))):
        yield (
            "step_labels",
            f"has {len(labels)} labels, and the answer has {steps} steps: lines with text in them",
        )


def reward_kind(row: Mapping[str, Any]) -> RewardKind:
    """Return what a reward model learns from this row."""
    if "step_labels" in row:
        return "steps"
    return "scores" if "messages" in row else "pairs"


def step_ends(answer: str) -> list[int]:
    """The ends of the steps of an answer in characters. A step is a line with text, with the line end after it.

    Lines without text belong to the step before them, or to the first one. A text without any is one step.
    """
    ends: list[int] = []
    place = 0
    for line in answer.splitlines(keepends=True):
        place += len(line)
        if line.strip() or not ends:
            ends.append(place)
        else:
            ends[-1] = place
    if len(ends) > 1 and not answer[: ends[0]].strip():
        ends = ends[1:]
    return ends or [0]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def preference_problems(row: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems of a pair, or of an answer with a label."""
    outputs = ["output"] if is_labeled(row) else ["preferred_output", "non_preferred_output"]
    yield from _unknown_keys(row, {"input", "label", *outputs} if is_labeled(row) else {"input", *outputs})
    if is_labeled(row) and not isinstance(row.get("label"), bool):
        yield "label", "is missing" if row.get("label") is None else "must be true (desirable) or false"
    given = row.get("input")
    if not isinstance(given, Mapping):
        yield "input", "is missing" if given is None else f"must be an object, not {kind(given)}"
    else:
        unknown = {"messages", "tools", "parallel_tool_calls"}
        yield from ((f"input.{path}", problem) for path, problem in _unknown_keys(given, unknown))
        yield from ((f"input.{path}", problem) for path, problem in tool_problems(given))
        messages = given.get("messages")
        if messages is None:
            yield "input.messages", "must be a list of at least one message"
        else:
            yield from conversation_problems("input.messages", given)
        if isinstance(messages, list) and messages and _role(messages[-1]) == "assistant":
            yield "input.messages", "must not end with a message of the assistant"
    for name in outputs:
        yield from _answer_problems(name, row.get(name))
    if is_labeled(row) or not isinstance(given, Mapping) or row.get("preferred_output") is None:
        return
    if row.get("preferred_output") == row.get("non_preferred_output"):
        yield "non_preferred_output", "is the same as preferred_output"


def is_labeled(row: Mapping[str, Any]) -> bool:
    """Whether a row of dpo is an answer with a label, and not a pair."""
    return "output" in row


def is_learned(message: Any) -> bool:
    """Whether a supervised job learns this message."""
    return _role(message) == "assistant" and bool(message.get("weight", 1) != 0)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _unknown_keys(row: Mapping[str, Any], known: Collection[str]) -> Iterator[Problem]:
    for key in row:
        if key not in known:
            yield str(key), "is not a key of this format"


def _answer_problems(name: str, answer: Any) -> Iterator[Problem]:
    if not isinstance(answer, list) or len(answer) != 1:
        yield (
            name,
            "is missing" if answer is None else "must be a list of exactly one message of the assistant",
        )
        return
    yield from message_problems(f"{name}[0]", answer[0])
    if isinstance(answer[0], Mapping):
        if _role(answer[0]) != "assistant":
            yield f"{name}[0].role", "must be assistant"
        if "weight" in answer[0]:
            yield f"{name}[0].weight", "is only for messages of supervised rows"


_SUPERVISED = RowForm(supervised_problems, lambda row: row["messages"])
FORMS: Mapping[str, RowForm] = MappingProxyType(
    {
        "supervised": _SUPERVISED,
        "distillation_logits": _SUPERVISED,
        "dpo": RowForm(preference_problems, lambda row: row["input"]["messages"]),
        "reward_model": RowForm(
            reward_problems,
            lambda row: row["input"]["messages"] if reward_kind(row) == "pairs" else row["messages"],
        ),
    }
)
