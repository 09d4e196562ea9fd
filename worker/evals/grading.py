"""The results of one item: what each criterion says about its sample."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from core.evals.budgets import JUDGES
from core.results.evals import pass_threshold
from graders.judge.model_graders import MAX_SHOWN, clipped
from graders.spec import GraderSpec, dump
from graders.types import ErrorKind, Grade, JudgeSample

Result = dict[str, Any]


def result_of(spec: GraderSpec, grade: Grade, criteria: Sequence[GraderSpec]) -> Result:
    """A result of an output item. A null score could not be graded, for the given reason.

    Args:
        criteria: all of the item. Those with a judge share MAX_SHOWN characters of prompts, and as many of replies: an
            eval may have 100, and a page of items is built and read in memory.
    """
    threshold = (
        1.0 if spec.type == "string_check" and spec.pass_threshold is None else pass_threshold(dump(spec))
    )
    return {
        "name": spec.name,
        "type": spec.type,
        "passed": grade.score is not None and grade.score >= threshold,
        "score": grade.score,
        "reason": grade.reason,
        "error": None if grade.error is None else grade.error.value,
        "output": grade.output,
        "sample": None if grade.judge is None else judge_sample(grade.judge, MAX_SHOWN // _judges(criteria)),
    }


def _judges(criteria: Sequence[GraderSpec]) -> int:
    return max(1, sum(spec.type in JUDGES for spec in criteria))


def judge_sample(judge: JudgeSample, most: int) -> dict[str, Any]:
    """The `sample` of a result: the messages to a judge model, and its reply, each of `most` characters at most."""
    share = most // max(1, len(judge.messages))
    shown = [{**message, "content": clipped(message["content"], share)} for message in judge.messages]
    output = None if judge.output is None else clipped(judge.output, most)
    usage, sampling = judge.usage, judge.sampling
    error = {"code": ErrorKind.model_grader_server_error.value, "message": judge.error}
    return {
        "input": shown,
        "output": [] if output is None else [{"role": "assistant", "content": output}],
        "finish_reason": judge.finish_reason,
        "model": judge.model,
        "usage": asdict(usage) | {"total_tokens": usage.prompt_tokens + usage.completion_tokens},
        "error": None if judge.error is None else error,
        "seed": sampling.get("seed"),
        "temperature": sampling.get("temperature"),
        "top_p": sampling.get("top_p"),
        "max_completions_tokens": sampling.get("max_completion_tokens"),  # as graders spell it
    }


def status_of(sample: Mapping[str, Any], results: Sequence[Result]) -> Literal["pass", "fail", "error"]:
    """error: there is no sample, or a criterion could not grade it."""
    if sample.get("error") is not None or any(result["score"] is None for result in results):
        return "error"
    return "pass" if all(result["passed"] for result in results) else "fail"
