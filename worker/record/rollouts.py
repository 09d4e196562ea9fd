"""Convert graded groups to stored rows (core/results/rollouts.py). Pure functions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.jobs.hyperparameters import Resolved
from core.results.rollouts import Row, Split
from core.text import storable
from graders.types import Grade
from worker.learn import grpo
from worker.learn.batch import Lesson, lessons
from worker.types import Group, Rollout


@dataclass(frozen=True)
class GradedStep:
    """One split of one step, ready to be stored."""

    split: Split
    groups_P: Sequence[Group]
    settings: Resolved | None = None  # settings of the update; None: no update
    own: int | None = None  # groups from this index on were resampled; None: none were


def rows_of(step: int, graded: GradedStep) -> list[list[Row]]:
    """Yield the rows of each group."""
    learned_PG = (
        [None] * len(graded.groups_P)
        if graded.settings is None
        else lessons(graded.groups_P, graded.settings)
    )
    own = len(graded.groups_P) if graded.own is None else graded.own
    return [
        _group(
            group,
            learned_G,
            {"step": step, "split": graded.split, "group": number, "replacement": number >= own},
        )
        for number, (group, learned_G) in enumerate(zip(graded.groups_P, learned_PG, strict=True))
    ]


def _group(group: Group, learned_G: list[Lesson] | None, where: Mapping[str, Any]) -> list[Row]:
    item = dict(group.prompt.item)
    shared = {
        **where,
        "line": group.prompt.line,
        "messages": json.dumps(item.pop("messages")),
        "item": json.dumps(item),
        "prompt_tokens": len(group.prompt.ids),
    }
    centred_G = grpo.centred(group.rewards_G)
    return [
        {
            **shared,
            "member": member,
            **_answer(rollout, grade),
            "centered_reward": centred_G[member],
            **_lesson(grade, None if learned_G is None else learned_G[member]),
        }
        for member, (rollout, grade) in enumerate(zip(group.rollouts_G, group.grades_G, strict=True))
    ]


def _answer(rollout: Rollout, grade: Grade) -> dict[str, Any]:
    subs = grade.sub_grades
    return {
        "output_text": storable(rollout.text),
        "output_reasoning": storable(rollout.reasoning) or None,
        "completion_tokens": len(rollout.output_ids_T),
        "reasoning_tokens": rollout.reasoning_tokens,
        "grammar_start": rollout.grammar_start,
        "finish_reason": rollout.finish_reason,
        "score": grade.score,
        "reason": storable(grade.reason),
        "error": None if grade.error is None else grade.error.value,
        "output": storable(grade.output),
        "sub_scores": {name: sub.score for name, sub in subs.items()},
        "sub_reasons": {name: storable(sub.reason) for name, sub in subs.items() if sub.reason},
        "sub_errors": {name: sub.error.value for name, sub in subs.items() if sub.error is not None},
        "sub_outputs": {name: storable(sub.output) for name, sub in subs.items() if sub.output},
    }


def _lesson(grade: Grade, learned: Lesson | None) -> dict[str, Any]:
    advantages_J = learned.steps_J if learned is not None and learned.steps_J else [None] * len(grade.steps)
    return {
        "advantage": None if learned is None else learned.advantage,
        "trained": learned is not None and learned.is_trained,
        "steps": [
            {"end": step.end, "score": step.score, "advantage": advantage}
            for step, advantage in zip(grade.steps, advantages_J, strict=True)
        ],
    }
