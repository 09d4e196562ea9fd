"""The inputs of a grader (Sample, Item), its result (Grade), and its protocol (Grader)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from typing import Any, Protocol

Item = Mapping[str, Any]
"""One dataset row: `{{item.key}}` in a template is `item["key"]`."""


@dataclass(frozen=True)
class Sample:
    """One model output. `output_json` stays None unless the text was meant to be JSON and is.

    `output_text` is the final answer; `output_reasoning` is what a reasoning model wrote before it.
    """

    output_text: str
    output_json: Any | None = None
    output_tools: tuple[Mapping[str, Any], ...] = ()  # calls of functions, in OpenAI's format
    finish_reason: str = "stop"
    output_reasoning: str = ""
    # By reward models of the project, by name: a score, those of the steps, or why there is none. Not for templates.
    model_scores: Mapping[str, float | tuple[StepScore, ...] | str] = field(default_factory=dict)
    # The reason why the calls in the text could not be read; it stays in `output_text`.
    output_tools_error: str = ""
    # Of an episode: the messages after the prompt, why it ended, and its id. Else empty.
    messages: tuple[Mapping[str, Any], ...] = ()
    stop: str = ""
    trace_id: str = ""

    @classmethod
    def from_text(
        cls, text: str, finish_reason: str = "stop", parse_json: bool = False, reasoning: str = ""
    ) -> Sample:
        """Create a sample from `text`; `parse_json` also sets `output_json` if the text is a JSON object."""
        parsed = _json_object(text) if parse_json else None
        return cls(text, parsed, finish_reason=finish_reason, output_reasoning=reasoning)

    def as_namespace(self) -> dict[str, Any]:
        """Return all fields of `{{sample...}}`."""
        tools = list(self.output_tools)
        answers = [message for message in self.messages if message["role"] == "assistant"]
        message: Mapping[str, Any] = {
            "role": "assistant",
            "content": self.output_text,
            "tool_calls": answers[-1].get("tool_calls") if answers else tools or None,
        }
        return {
            "choices": [{"index": 0, "message": message, "finish_reason": self.finish_reason}],
            "output_text": self.output_text,
            "output_json": self.output_json,
            "output_tools": tools,
            "output_tools_error": self.output_tools_error or None,
            "output_reasoning": self.output_reasoning,
            "output_reasoning_summary": None,
            "output_audio": None,
            "messages": list(self.messages) or None,
            "turns": len(answers) or None,
            "stop": self.stop or None,
            "trace_id": self.trace_id or None,
        }


class ErrorKind(StrEnum):
    """The reason for a missing score: the boolean error flags of the graders/run response, in its order."""

    formula_parse_error = auto()
    sample_parse_error = auto()
    truncated_observation_error = auto()
    unresponsive_reward_error = auto()
    invalid_variable_error = auto()
    other_error = auto()
    python_grader_server_error = auto()
    python_grader_runtime_error = auto()
    model_grader_server_error = auto()
    model_grader_refusal_error = auto()
    model_grader_parse_error = auto()
    model_grader_exceeded_max_tokens_error = auto()
    endpoint_grader_internal_error = auto()
    endpoint_grader_server_error = auto()
    endpoint_grader_safety_check_error = auto()


@dataclass(frozen=True)
class TokenUsage:
    """Token usage of one judge model. Cached tokens are included in the prompt tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    def __sub__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.prompt_tokens - other.prompt_tokens,
            self.completion_tokens - other.completion_tokens,
            self.cached_tokens - other.cached_tokens,
        )


def summed(usages: Iterable[Mapping[str, TokenUsage]]) -> dict[str, TokenUsage]:
    """Add up the token usage of each model."""
    total: dict[str, TokenUsage] = {}
    for usage in usages:
        for model, tokens in usage.items():
            total[model] = total.get(model, TokenUsage()) + tokens
    return total


@dataclass(frozen=True)
class JudgeSample:
    """The request to a judge model and its reply, with texts of bounded length.

    `output` is None if there is no reply, for the reason in `error`.
    """

    model: str
    messages: Sequence[Mapping[str, str]]
    sampling: Mapping[str, Any]  # keys of the chat completions API
    output: str | None = None
    finish_reason: str = "stop"
    usage: TokenUsage = field(default_factory=TokenUsage)
    error: str | None = None


MAX_STEPS = 256


# Scores are summed and squared, in float32 as well. Above about 1e18 the square of one overflows.
MAX_SCORE = 1e15


def is_score(number: float) -> bool:
    """Return whether training can compute with this score: it is finite and its magnitude at most MAX_SCORE."""
    return -MAX_SCORE <= number <= MAX_SCORE


def too_large(number: float) -> str:
    """Return the error for a finite number that is_score refuses."""
    return f"returned {number:g}; the magnitude of a score is at most {MAX_SCORE:g}"


@dataclass(frozen=True)
class StepScore:
    """The score of one step of an answer, which ends before character `end` of the text."""

    score: float
    end: int


def steps_of(raw: Any, length: int) -> tuple[StepScore, ...]:
    """Parse the steps of an answer of `length` characters, from [{"end": int, "score": number}, ...].

    The input is untrusted. Raises ValueError unless there are at most 256 steps, with valid scores and increasing
    ends within the text; the step of an empty answer ends at 0.
    """
    if type(raw) is not list or len(raw) > MAX_STEPS:
        raise ValueError(f"'steps' must be a list of at most {MAX_STEPS}")
    steps: list[StepScore] = []
    last = min(0, length - 1)
    for number, step in enumerate(raw):
        if type(step) is not dict or set(step) != {"end", "score"}:
            raise ValueError(f"step {number} must be an object with 'end' and 'score'")
        end, score = step["end"], step["score"]
        if type(end) is not int or not last < end <= length:
            raise ValueError(
                f"step {number} must end after the one before and within the {length} characters"
            )
        if type(score) not in (int, float) or not is_score(score):
            raise ValueError(f"the score of step {number} must be a finite number, at most {MAX_SCORE:g}")
        steps.append(StepScore(float(score), end))
        last = end
    return tuple(steps)


@dataclass(frozen=True)
class Grade:
    """The grade of one sample: a score (see `is_score`), or None with the reason and kind of the failure.

    None does not mean 0: the caller decides how to treat an ungraded sample. `output` is the printed output of the
    grader, truncated to 16 kB.
    """

    score: float | None
    reason: str = ""
    error: ErrorKind | None = None
    sub_grades: Mapping[str, Grade] = field(default_factory=dict)
    seconds: float = 0.0
    usage: Mapping[str, TokenUsage] = field(default_factory=dict)  # by model, including sub-grades
    output: str = ""
    steps: tuple[StepScore, ...] = ()  # step scores of an answer that is graded step by step
    judge: JudgeSample | None = None  # of a model grader

    def without_judges(self) -> Grade:
        """The grade and its sub-grades without what models were asked and replied, which may be 128 kB each."""
        parts = {name: part.without_judges() for name, part in self.sub_grades.items()}
        return replace(self, judge=None, sub_grades=parts)

    def __post_init__(self) -> None:
        if self.score is None:
            if not self.reason or self.error is None:
                raise ValueError("A grade without a score must say why: give a reason and an error.")
        elif not is_score(self.score):
            raise ValueError(
                f"A score must be finite and at most {MAX_SCORE:g}, not {self.score!r}; None means 'could not be "
                "judged'."
            )


class Grader(Protocol):
    """Grades samples. Safe to call concurrently; graders.run converts its errors to a Grade."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> str: ...

    async def grade(self, sample: Sample, item: Item) -> Grade: ...


@dataclass(frozen=True)
class GraderWrapper:
    """Base of graders that limit another one, and have its name."""

    grader: Grader

    @property
    def name(self) -> str:
        return self.grader.name

    @property
    def type(self) -> str:
        return self.grader.type


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):  # a model can write JSON nested deep enough to exhaust the stack
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")  # Python's parser accepts NaN and Infinity, which are not JSON


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number
