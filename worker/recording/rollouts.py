"""Convert graded groups to stored rows (core/results/rollouts.py). Pure functions."""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core.results.rollouts import TOKENS, Row
from graders.types import Grade
from worker.training import grpo
from worker.types import AnswerKey, AnswerSignal, GradedStep, Group, Rollout, TokenValues

LARGEST = 65504.0  # of half precision

TextsOf = Callable[[Sequence[int]], list[str]]
"""From the tokens of an answer to the text of each."""


def rows_of(step: int, graded: GradedStep) -> list[list[Row]]:
    """Yield the rows of each group."""
    learned_PG = [None] * len(graded.groups_P) if graded.signals_PG is None else graded.signals_PG
    own = len(graded.groups_P) if graded.own is None else graded.own
    return [
        _group(
            group,
            learned_G,
            {
                "step": step,
                "split": graded.split,
                "group": number,
                "replacement": number >= own,
                "has_tokens": False,
            },
        )
        for number, (group, learned_G) in enumerate(zip(graded.groups_P, learned_PG, strict=True))
    ]


def with_tokens(
    rows_PG: Sequence[list[Row]], graded: GradedStep, texts_of: TextsOf, *, most_tokens: int, seed: str
) -> list[list[Row]]:
    """Add the values of each token to the rows of some groups, of `most_tokens` tokens in all.

    Groups that were trained on come first, in an order that `seed` shuffles: so those of validations are the same
    prompts each time. A group that does not fit is left out, and smaller ones after it may fit.
    """
    order = list(range(len(rows_PG)))
    random.Random(seed).shuffle(order)
    order.sort(key=lambda number: not any(row["trained"] for row in rows_PG[number]))
    left, chosen = most_tokens, set[int]()
    for number in order:
        tokens = sum(len(rollout.output_ids_T) for rollout in graded.groups_P[number].rollouts_G)
        if 0 < tokens <= left:
            left -= tokens
            chosen.add(number)
    return [
        _group_tokens(rows_G, group, graded.tokens, texts_of) if number in chosen else rows_G
        for number, (rows_G, group) in enumerate(zip(rows_PG, graded.groups_P, strict=True))
    ]


def _group_tokens(
    rows_G: list[Row], group: Group, learned: Mapping[AnswerKey, TokenValues], texts_of: TextsOf
) -> list[Row]:
    return [
        row
        | {
            "has_tokens": True,
            TOKENS.name: _tokens(
                row,
                rollout,
                learned.get(id(rollout)),
                texts_of(rollout.output_ids_T),
            ),
        }
        for row, rollout in zip(rows_G, group.rollouts_G, strict=True)
    ]


def _tokens(row: Row, rollout: Rollout, learned: TokenValues | None, texts: Sequence[str]) -> list[Row]:
    """The values of each token of one answer. An answer that was trained on and not computed had no advantage."""
    sampled = [at for at, is_sampled in enumerate(rollout.is_sampled_T) if is_sampled]
    tokens: list[Row] = [{"text": text, "logprob": None, "advantage": None, "gap": None} for text in texts]
    for place, at in enumerate(sampled):
        tokens[at]["logprob"] = _half(rollout.logprobs_T[at])
        if learned is not None:
            tokens[at]["gap"] = _half(float(learned.logprobs_T[place]) - rollout.logprobs_T[at])
            tokens[at]["advantage"] = _half(float(learned.advantages_T[place]))
        elif row["trained"]:
            tokens[at]["advantage"] = row["advantage"]
    return tokens


def _half(value: float) -> float | None:
    return max(-LARGEST, min(LARGEST, value)) if math.isfinite(value) else None


def _group(group: Group, learned_G: Sequence[AnswerSignal] | None, where: Mapping[str, Any]) -> list[Row]:
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
            "policy_step": _policy_step(rollout, where),
            **_answer(rollout, grade),
            "centered_reward": centred_G[member],
            **_training_fields(grade, None if learned_G is None else learned_G[member]),
        }
        for member, (rollout, grade) in enumerate(zip(group.rollouts_G, group.grades_G, strict=True))
    ]


def _policy_step(rollout: Rollout, where: Mapping[str, Any]) -> int:
    """The steps that the policy had learned from which sampled the answer, or its oldest token."""
    if rollout.oldest_policy_step is not None:
        return rollout.oldest_policy_step
    learned: int = where["step"] - (where["split"] == "train")
    return learned


def _answer(rollout: Rollout, grade: Grade) -> dict[str, Any]:
    subs = grade.sub_grades
    return {
        "output_text": rollout.content,
        "output_tools": json.dumps(rollout.tool_calls) if rollout.parsed is not None else None,
        "output_tools_error": (rollout.parsed.error or None) if rollout.parsed is not None else None,
        **_episode(rollout),
        "output_reasoning": rollout.reasoning or None,
        "completion_tokens": len(rollout.output_ids_T),
        "reasoning_tokens": rollout.reasoning_tokens,
        "grammar_start": rollout.grammar_start,
        "finish_reason": rollout.finish_reason,
        "score": grade.score,
        "reason": grade.reason,
        "error": None if grade.error is None else grade.error.value,
        "output": grade.output,
        "sub_scores": {name: sub.score for name, sub in subs.items()},
        "sub_reasons": {name: sub.reason for name, sub in subs.items() if sub.reason},
        "sub_errors": {name: sub.error.value for name, sub in subs.items() if sub.error is not None},
        "sub_outputs": {name: sub.output for name, sub in subs.items() if sub.output},
    }


def _episode(rollout: Rollout) -> dict[str, Any]:
    episode = rollout.episode
    if episode is None:
        return {"conversation": None, "stop": None, "trace_id": None}
    return {
        "conversation": json.dumps(episode.messages),
        "stop": episode.stop,
        "trace_id": episode.trace_id,
    }


def _training_fields(grade: Grade, learned: AnswerSignal | None) -> dict[str, Any]:
    advantages_J = learned.steps_J if learned is not None and learned.steps_J else [None] * len(grade.steps)
    return {
        "advantage": None if learned is None else learned.advantage,
        "trained": learned is not None and learned.is_trained,
        "steps": [
            {"end": step.end, "score": step.score, "advantage": advantage}
            for step, advantage in zip(grade.steps, advantages_J, strict=True)
        ],
    }
