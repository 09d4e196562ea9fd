"""The input of graders, made from an answer of the policy."""

from collections.abc import Mapping
from dataclasses import replace

from graders.types import Sample, StepScore
from worker.types import Rollout


def sample_of(
    rollout: Rollout,
    *,
    parse_json: bool,
    model_scores: Mapping[str, float | tuple[StepScore, ...] | str] | None = None,
) -> Sample:
    """The answer as graders read it.

    Args:
        parse_json: It also has the answer as `sample.output_json`.
        model_scores: Of the reward models that the grader reads.
    """
    sample = Sample.from_text(rollout.content, rollout.finish_reason, parse_json, reasoning=rollout.reasoning)
    if (episode := rollout.episode) is not None:
        sample = replace(sample, messages=episode.messages, stop=episode.stop, trace_id=episode.trace_id)
    return replace(
        sample,
        model_scores=model_scores or {},
        output_tools=rollout.tool_calls,
        output_tools_error="" if rollout.parsed is None else rollout.parsed.error,
    )
