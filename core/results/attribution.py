"""The share of each group, and of each part of a multi grader, in the update of a step.

From stored answers alone. The gradient of an answer is its advantage times the gradient of its log-probability, of
which only the first factor is stored. A share is of the sizes of these factors, as the loss adds them up while the
policy has not moved: docs/howto/rollouts.md says what that leaves out.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import comb, fsum
from typing import Any

from core.database.tables import RolloutPage
from core.errors import InvalidRequest
from core.results import rollouts
from core.results.what_if import GroupKey
from core.storage.store import BlobStore

# Losses of which each answer has one weight, whatever its length; in the others each token has.
MEANS_OF_ANSWERS = ("grpo", "gspo")
# Coalitions of parts double with each part: 256 values of the formula for each answer.
MAX_PARTS = 8

_COLUMNS = ["split", "group", "line", "score", "sub_scores", "advantage", "trained", "completion_tokens"]

Scores = Mapping[str, float]
"""Of the parts of a multi grader, by name."""

Formula = Callable[[Scores], float | None]
"""Of these scores; None: it has no value."""


@dataclass(frozen=True)
class LearnedAnswer:
    """A stored answer, as the update used it."""

    group: GroupKey
    line: int | None
    score: float | None
    advantage: float  # 0: not trained on
    tokens: int
    parts: Scores  # those that have one


@dataclass(frozen=True)
class GroupShare:
    """A group of answers to one prompt, and its part of the update's size."""

    step: int
    group: int
    line: int | None
    share: float
    answers: int
    trained: int
    mean_reward: float | None


def refuse_other_advantages(method: str, resolved: Mapping[str, Any]) -> None:
    """Refuse jobs whose answers do not have one advantage each.

    Args:
        resolved: the job's hyperparameters; empty: no run has resolved them, so there are no answers.

    Raises:
        InvalidRequest: naming the reason.
    """
    loss, reason = resolved.get("loss"), None
    if method != "reinforcement":
        reason = f"the method '{method}' has no advantages of answers"
    elif loss in ("reinforce_plus_plus", "ppo"):
        reason = f"with the loss '{loss}' tokens have different advantages"
    elif resolved.get("supervision") == "process":
        reason = "with process supervision the steps of an answer have different advantages"
    if reason is not None:
        raise InvalidRequest(
            f"The update of this job cannot be attributed to answers: {reason}. Choose a job of the method "
            "'reinforcement' with another loss and the supervision 'outcome'.",
            param="job_id",
        )


def learned_answers(
    blobs: BlobStore, pages: Sequence[RolloutPage], invalid_grade: float | None
) -> list[LearnedAnswer]:
    """The stored answers of training steps. `invalid_grade` is the score of a part that failed; None: it has none."""
    found: list[LearnedAnswer] = []
    for step, table in rollouts.columns(blobs, pages, _COLUMNS):
        for split, group, line, score, parts, advantage, is_trained, tokens in zip(
            *(table[name].to_pylist() for name in _COLUMNS), strict=True
        ):
            weight = (advantage or 0.0) if is_trained else 0.0
            scores = {
                name: known
                for name, own in parts or ()
                if (known := invalid_grade if own is None else own) is not None
            }
            found.append(LearnedAnswer((step, split, group), line, score, weight, tokens or 0, scores))
    return found


def group_shares(answers: Sequence[LearnedAnswer], *, by_token: bool) -> list[GroupShare]:
    """The groups by their share of the sum of |advantage| over answers, or over their tokens; the largest first.

    The shares of groups sum to 1, or are all 0 where nothing was trained on.
    """
    groups: dict[GroupKey, list[LearnedAnswer]] = defaultdict(list)
    for answer in answers:
        groups[answer.group].append(answer)
    sizes = {
        key: fsum(abs(one.advantage) * (one.tokens if by_token else 1) for one in members)
        for key, members in groups.items()
    }
    whole = fsum(sizes.values())
    shares = [_share(members, sizes[key] / whole if whole else 0.0) for key, members in groups.items()]
    return sorted(shares, key=lambda group: (-group.share, group.step, group.group))


def _share(members: Sequence[LearnedAnswer], share: float) -> GroupShare:
    (step, _, group), line = members[0].group, members[0].line
    scores = [answer.score for answer in members if answer.score is not None]
    return GroupShare(
        step,
        group,
        line,
        share,
        answers=len(members),
        trained=sum(answer.advantage != 0.0 for answer in members),
        mean_reward=statistics.fmean(scores) if scores else None,
    )


def groups_of_half(shares: Sequence[GroupShare]) -> int:
    """The smallest number of groups that have half of the update; 0 where nothing was trained on."""
    sums = accumulate(group.share for group in shares)
    return next((count for count, total in enumerate(sums, start=1) if total >= 0.5), 0)


def part_shares(
    answers: Iterable[LearnedAnswer],
    names: Sequence[str],
    formula: Formula,
) -> dict[str, float] | None:
    """The share of each part of a multi grader in the differences of reward that the advantages follow.

    phi_ik, the Shapley value of part k in the reward of answer i (Lundberg and Lee 2017, eq. 8), is its effect on the
    formula against the means of the parts in the group. The share of k is sum_i A_i phi_ik / sum_i A_i sum_k phi_ik, so
    shares sum to 1. With a weighted sum it is w_k sum_i A_i (s_ik - mean of s_k) / the same sum over all parts. A
    negative share: the update lowers that part for the sake of others.

    Args:
        names: of the parts, at most MAX_PARTS. Groups in which the formula has no value are left out.

    Returns:
        By name; None where no advantage follows a difference of these parts.
    """
    groups: dict[GroupKey, list[tuple[float, Scores]]] = defaultdict(list)
    for answer in answers:
        if answer.parts.keys() >= set(names):
            groups[answer.group].append((answer.advantage, answer.parts))
    pulls = [pull for members in groups.values() if (pull := _pull(members, names, formula)) is not None]
    sums = {name: fsum(pull[name] for pull in pulls) for name in names}
    whole = fsum(sums.values())
    return {name: value / whole for name, value in sums.items()} if whole > 0 else None


def _pull(
    members: Sequence[tuple[float, Scores]], names: Sequence[str], formula: Formula
) -> dict[str, float] | None:
    """The sum of A_i phi_ik over the answers of a group, by part k; None: the formula lacks a value for one of them."""
    means = {name: statistics.fmean(scores[name] for _, scores in members) for name in names}
    effects = [
        (advantage, _shapley_values(scores, means, names, formula))
        for advantage, scores in members
        if advantage != 0.0
    ]
    if any(values is None for _, values in effects):
        return None
    return {name: fsum(advantage * (values or {})[name] for advantage, values in effects) for name in names}


def _shapley_values(
    scores: Scores, means: Scores, names: Sequence[str], formula: Formula
) -> dict[str, float] | None:
    """By name, of the formula at `scores` against the one at `means`; None: it lacks a value between them."""
    count = len(names)
    values: dict[frozenset[str], float] = {}
    for size in range(count + 1):
        for chosen in combinations(names, size):
            value = formula({name: scores[name] if name in chosen else means[name] for name in names})
            if value is None:
                return None
            values[frozenset(chosen)] = value
    return {
        name: fsum(
            (values[others | {name}] - values[others]) / (count * comb(count - 1, len(others)))
            for others in values
            if name not in others
        )
        for name in names
    }
