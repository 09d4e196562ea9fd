"""Convert a grade to the graders/run response."""

from __future__ import annotations

from typing import Any

from graders.build import environments_of
from graders.spec import GraderSpec, MultiSpec
from graders.types import ErrorKind, Grade, TokenUsage

_WITH_DETAILS = frozenset(
    {
        ErrorKind.sample_parse_error,
        ErrorKind.invalid_variable_error,
        ErrorKind.python_grader_runtime_error,
        ErrorKind.model_grader_server_error,
        ErrorKind.model_grader_refusal_error,
        ErrorKind.model_grader_parse_error,
        ErrorKind.endpoint_grader_internal_error,
        ErrorKind.endpoint_grader_server_error,
    }
)


def run_report(spec: GraderSpec, grade: Grade) -> dict[str, Any]:
    """Build the response body. The reward of an ungraded sample is 0, as in OpenAI's API; `errors` has the reason.

    `metadata.reason`, `metadata.output` (the output that python graders printed) and `metadata.environment` (their
    package environment) are extensions of OpenAI's API. For a multi, `scores` holds null for a failed sub-grader, and
    `sub_rewards` holds its substitute score `invalid_grade`, or omits it if `invalid_grade` is unset.
    """
    stand_in = spec.invalid_grade if isinstance(spec, MultiSpec) else None
    return {
        "reward": _reward(grade, None),
        "metadata": {
            "name": spec.name,
            "type": spec.type,
            "errors": _errors(_reasons(grade)),
            "execution_time": grade.seconds,
            "scores": {key: sub.score for key, sub in grade.sub_grades.items()},
            "token_usage": _tokens(sum(grade.usage.values(), TokenUsage())) if grade.usage else None,
            "sampled_model_name": ", ".join(grade.usage) or None,
            "reason": grade.reason,
            "output": _output(grade),
            "environment": ", ".join(environments_of(spec)) or None,
        },
        "sub_rewards": {
            key: _reward(sub, stand_in)
            for key, sub in grade.sub_grades.items()
            if sub.score is not None or stand_in is not None
        },
        "model_grader_token_usage_per_model": {model: _tokens(usage) for model, usage in grade.usage.items()},
    }


def _output(grade: Grade) -> str:
    parts = [f"{key}: {sub.output}" for key, sub in grade.sub_grades.items() if sub.output]
    return grade.output or "\n".join(parts)


def _tokens(usage: TokenUsage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def _reward(grade: Grade, stand_in: float | None) -> float:
    return grade.score if grade.score is not None else (stand_in or 0.0)


def _reasons(grade: Grade) -> dict[ErrorKind, str]:
    """Return the reason of each error flag. Failures of sub-graders count even if `invalid_grade` applies."""
    reasons: dict[ErrorKind, str] = {}
    if grade.error is not None:
        reasons[grade.error] = grade.reason
    for key, sub in grade.sub_grades.items():
        if sub.error is not None:
            reasons.setdefault(sub.error, f"{key}: {sub.reason}")
    return reasons


def _errors(reasons: dict[ErrorKind, str]) -> dict[str, bool | str | None]:
    """Return all 24 keys in the order of OpenAI's API: one flag per kind, and the details of kinds that have them."""
    errors: dict[str, bool | str | None] = {}
    for kind in ErrorKind:
        errors[kind.value] = kind in reasons
        if kind in _WITH_DETAILS:
            errors[f"{kind}_details"] = reasons.get(kind)
        if kind is ErrorKind.python_grader_server_error:
            errors[f"{kind}_type"] = None  # a code such as "unauthorized_error", not a reason
    return errors
