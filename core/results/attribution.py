"""The share of each group, and of each part of a multi grader, in the update of a step.

From stored answers alone. The gradient of an answer is its advantage times the gradient of its log-probability, of
which only the first factor is stored. A share is of the sizes of these factors, as the loss adds them up while the
policy has not moved. docs/howto/rollouts.md#attribution says what that leaves out.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import comb, fsum
from typing import Any

from core.database.tables import RolloutPage
from core.errors import InvalidRequest
from core.results import rollouts
from core.results.what_if import GroupKey
from core.storage.store import BlobStore

# Subsets of parts double with each part: 256 values of the formula for each answer.
MAX_PARTS = 8
ROUNDING = 1e-9  # of a sum of shares
LEAST = 0.05  # a share of parts divides by a sum; where it is smaller than this part of its terms, it says nothing

_COLUMNS = ["split", "group", "line", "score", "sub_scores", "advantage", "trained", "completion_tokens"]

Scores = Mapping[str, float]
"""Of the parts of a multi grader, by name."""

Effects = Callable[[Scores, Scores], Scores | None]
"""The effects of the parts on the score of an answer, by the scores of its parts and their means in its group.

None: the formula has no value between them.
"""


@dataclass(frozen=True)
class LearnedAnswer:
    """A stored answer, as the update used it."""

    group: GroupKey
    line: int | None
    score: float | None
    advantage: float  # 0: none, or not trained on
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
    with_advantage: int
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

    A loss divides by the answers or tokens of its step, so each step with an advantage has the same share. The shares
    of groups sum to 1, or are all 0 where no answer has an advantage.
    """
    groups: dict[GroupKey, list[LearnedAnswer]] = defaultdict(list)
    for answer in answers:
        groups[answer.group].append(answer)
    sizes = {
        key: fsum(abs(one.advantage) * (one.tokens if by_token else 1) for one in members)
        for key, members in groups.items()
    }
    of_step: dict[int, float] = defaultdict(float)
    for (step, _, _), size in sizes.items():
        of_step[step] += size
    updates = sum(size > 0.0 for size in of_step.values())
    shares = [
        _share(members, sizes[key] / of_step[key[0]] / updates if sizes[key] else 0.0)
        for key, members in groups.items()
    ]
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
        with_advantage=sum(answer.advantage != 0.0 for answer in members),
        mean_reward=statistics.fmean(scores) if scores else None,
    )


def groups_of_half(shares: Sequence[GroupShare]) -> int:
    """The smallest number of groups that have half of the updates; 0 where no answer has an advantage."""
    sums = accumulate(group.share for group in shares)
    return next((count for count, total in enumerate(sums, start=1) if total >= 0.5 - ROUNDING), 0)


def part_shares(
    answers: Sequence[LearnedAnswer],
    names: Sequence[str],
    effects: Effects,
    *,
    by_token: bool,
) -> dict[str, float] | None:
    """The share of each part of a multi grader in the differences of reward that the advantages follow.

    phi_ik is the effect of part k on the score of answer i, against the means of the parts in its group. The share of k
    in a group is sum_i A_i phi_ik / sum_i A_i sum_k phi_ik, and groups count with their shares of the updates, so the
    shares of parts sum to 1. A negative share: the updates make the term of this part smaller for the sake of others.

    Groups are left out whose advantages do not follow their scores (sum_i A_i sum_k phi_ik is under LEAST of the sizes
    that it sums up), as where the best answer is masked, and those in which an answer has no effects.

    Returns:
        By name; None where no group is left.
    """
    groups: dict[GroupKey, list[LearnedAnswer]] = defaultdict(list)
    for answer in answers:
        if answer.parts.keys() >= set(names):
            groups[answer.group].append(answer)
    shares = dict.fromkeys(names, 0.0)
    for group in group_shares(answers, by_token=by_token):
        members = groups.get((group.step, "train", group.group), []) if group.share else []
        for name, share in (_shares_in_group(members, names, effects) or {}).items():
            shares[name] += group.share * share
    whole = fsum(shares.values())
    return {name: share / whole for name, share in shares.items()} if whole else None


def _shares_in_group(
    members: Sequence[LearnedAnswer], names: Sequence[str], effects: Effects
) -> dict[str, float] | None:
    """By part, with a sum of 1; None: the group is left out."""
    if not any(answer.advantage for answer in members):
        return None
    means = {name: statistics.fmean(answer.parts[name] for answer in members) for name in names}
    products: list[Scores] = []  # A_i phi_ik
    for answer in members:
        phi = effects(answer.parts, means) if answer.advantage else dict.fromkeys(names, 0.0)
        if phi is None:
            return None
        products.append({name: answer.advantage * phi[name] for name in names})
    sums = {name: fsum(product[name] for product in products) for name in names}
    whole = fsum(sums.values())
    sizes = fsum(abs(value) for product in products for value in product.values())
    return {name: value / whole for name, value in sums.items()} if whole > LEAST * sizes else None


def weighted_effects(weights: Scores) -> Effects:
    """Of the parts of a weighted sum: the weight times the difference from the mean."""
    return lambda scores, means: {
        name: weight * (scores[name] - means[name]) for name, weight in weights.items()
    }


def shapley_effects(names: Sequence[str], formula: Callable[[Scores], float | None]) -> Effects:
    """Of the parts of any formula: their Shapley values (Lundberg and Lee 2017, eq. 8).

    Args:
        names: at most MAX_PARTS: the formula is computed for each subset of them.
        formula: of scores; None: it has no value, and the answer no effects.
    """
    count = len(names)
    subsets = [frozenset(chosen) for size in range(count + 1) for chosen in combinations(names, size)]

    def effects(scores: Scores, means: Scores) -> Scores | None:
        values: dict[frozenset[str], float] = {}
        for subset in subsets:
            value = formula({name: scores[name] if name in subset else means[name] for name in names})
            if value is None:
                return None
            values[subset] = value
        return {
            name: fsum(
                (values[subset | {name}] - values[subset]) / (count * comb(count - 1, len(subset)))
                for subset in subsets
                if name not in subset
            )
            for name in names
        }

    return effects
