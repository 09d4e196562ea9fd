"""Other scores for the stored answers of a job: the rewards and signal that they would have given.

They come from another formula over the stored scores of a multi grader's parts, which takes milliseconds and costs no
judge, or from another grader (core/evals/regrades.py).
"""

import math
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from core.database.tables import RolloutPage
from core.results import rollouts
from core.rewards import all_equal, equal
from core.storage.store import BlobStore

_COLUMNS = ["split", "group", "score", "sub_scores"]

AdvantageScale = Literal["none", "group", "batch"]
"""The divisor of a reward minus the mean of its group, as of a loss: none, or the std of the group or of the step."""

GroupKey = tuple[int, str, int]
"""Step, split, and index of the prompt."""


@dataclass(frozen=True)
class Rescored:
    """A stored answer: its group, its score, and the new one. None: no score."""

    group: GroupKey
    before: float | None
    after: float | None


@dataclass(frozen=True)
class RewardSummary:
    """The rewards by one formula or grader."""

    graded: int
    mean: float | None
    passed: int  # with a score of at least the threshold
    groups_with_signal: int  # with answers of different scores: only these teach the model
    # The expected share of groups with signal, by the number of answers of a group: 2, 4, 8 ... up to the stored ones.
    signal_by_group_size: Mapping[int, float]


@dataclass(frozen=True)
class ScoreComparison:
    answers: int
    groups: int  # with at least two answers
    before: RewardSummary
    after: RewardSummary
    higher: int
    lower: int
    same: int
    gained: int  # only now with a score
    lost: int  # no longer with a score
    now_passed: int  # now at least the threshold, and before below it
    now_failed: int
    changed_signs: int  # of the reward minus the mean of its group: the model learns the opposite
    # Of the vectors of rewards minus the means of their groups: 1 teaches the same, 0 something unrelated, -1 the
    # opposite. None: a vector is 0.
    centered_cosine: float | None
    rank_correlation: (
        float | None
    )  # Spearman's, over answers with both scores; None where one of them never changes


def rescored(
    blobs: BlobStore,
    pages: Sequence[RolloutPage],
    score: Callable[[Mapping[str, float | None]], float | None],
) -> list[Rescored]:
    """All stored answers of the pages with the score that `score` gives their sub-scores."""
    known: dict[tuple[tuple[str, float | None], ...], float | None] = {}

    def rescored(parts: Sequence[tuple[str, float | None]] | None) -> float | None:
        key = tuple(parts or ())
        if key not in known:
            known[key] = score(dict(key))
        return known[key]

    found: list[Rescored] = []
    for step, table in rollouts.columns(blobs, pages, _COLUMNS):
        columns = (table[name].to_pylist() for name in _COLUMNS)
        found += [
            Rescored((step, split, group), before, rescored(parts))
            for split, group, before, parts in zip(*columns, strict=True)
        ]
    return found


def compare(
    answers: Sequence[Rescored], threshold: float, *, threshold_before: float | None = None
) -> ScoreComparison:
    """Count the changes. Answers pass from `threshold` on, and with their stored score from `threshold_before` on.

    The default of `threshold_before` is `threshold`.
    """
    passes = threshold if threshold_before is None else threshold_before
    pairs = [(one.before, one.after) for one in answers if one.before is not None and one.after is not None]
    sizes = Counter(one.group for one in answers)
    before, after = ([one.before for one in answers], [one.after for one in answers])
    groups = [one.group for one in answers]
    centered_before, centered_after = _centered(groups, before), _centered(groups, after)
    return ScoreComparison(
        answers=len(answers),
        groups=sum(size > 1 for size in sizes.values()),
        before=_rewards(groups, before, passes),
        after=_rewards(groups, after, threshold),
        higher=sum(new > old and not equal(old, new) for old, new in pairs),
        lower=sum(new < old and not equal(old, new) for old, new in pairs),
        same=sum(equal(old, new) for old, new in pairs),
        gained=sum(one.before is None and one.after is not None for one in answers),
        lost=sum(one.before is not None and one.after is None for one in answers),
        now_passed=sum(old < passes and new >= threshold for old, new in pairs),
        now_failed=sum(old >= passes and new < threshold for old, new in pairs),
        changed_signs=sum(
            old is not None and new is not None and old * new < 0
            for old, new in zip(centered_before, centered_after, strict=True)
        ),
        centered_cosine=_cosine(centered_before, centered_after),
        rank_correlation=_rank_correlation(pairs),
    )


def _cosine(before: Sequence[float | None], after: Sequence[float | None]) -> float | None:
    """Of two vectors; an answer without a score counts as 0."""
    old, new = ([value or 0.0 for value in values] for values in (before, after))
    size = math.hypot(*old) * math.hypot(*new)
    return max(-1.0, min(1.0, math.fsum(map(operator.mul, old, new)) / size)) if size else None


@dataclass(frozen=True)
class AdvantageSizes:
    """How far answers push the model, whatever the direction. None: no answer has a score."""

    mean: float | None
    largest: float | None


def advantage_sizes(
    answers: Sequence[Rescored], scale: AdvantageScale
) -> tuple[AdvantageSizes, AdvantageSizes]:
    """The sizes of the advantages by the stored scores, and by the new ones.

    Standard deviations are over n, and of all graded answers of the step and split: with the defaults of a job, the
    advantages that it trains on, unless its batches leave answers out.
    """
    groups = [one.group for one in answers]
    before, after = ([one.before for one in answers], [one.after for one in answers])
    return _sizes(groups, before, scale), _sizes(groups, after, scale)


def _sizes(
    groups: Sequence[GroupKey], scores: Sequence[float | None], scale: AdvantageScale
) -> AdvantageSizes:
    """A centered score is 0 where all of its group are equal, so no divisor of another one is 0."""
    keys: Sequence[tuple[Any, ...]] = [key[:2] for key in groups] if scale == "batch" else groups
    values: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for key, score in zip(keys, scores, strict=True):
        if score is not None:
            values[key].append(score)
    divisors = {key: 1.0 if scale == "none" else statistics.pstdev(some) for key, some in values.items()}
    sizes = [
        abs(gap) / divisors[key] if gap else 0.0
        for key, gap in zip(keys, _centered(groups, scores), strict=True)
        if gap is not None
    ]
    return AdvantageSizes(statistics.fmean(sizes), max(sizes)) if sizes else AdvantageSizes(None, None)


def _rewards(groups: Sequence[GroupKey], scores: Sequence[float | None], threshold: float) -> RewardSummary:
    values = [score for score in scores if score is not None]
    return RewardSummary(
        graded=len(values),
        mean=statistics.fmean(values) if values else None,
        passed=sum(value >= threshold for value in values),
        groups_with_signal=sum(not all_equal(some) for some in _by_group(groups, scores).values()),
        signal_by_group_size=signal_by_group_size(list(_by_group(groups, scores).values())),
    )


def signal_by_group_size(groups: Sequence[Sequence[float]]) -> dict[int, float]:
    """The expected share of groups with answers of different scores, by the number of answers of a group.

    Over all subsets of each group: 1 - sum over scores v of C(n_v, size) / C(n, size), with n_v answers of score v
    (Chen et al. 2021, eq. 1, is this estimate for right and wrong answers). Sizes are 2, 4, 8 ... and that of the
    largest groups. Other groups, which have ungraded answers, are left out, so that all sizes are of the same groups.
    """
    most = max(map(len, groups), default=0)
    sizes = sorted({2**power for power in range(1, most.bit_length()) if 2**power <= most} | {most} - {0, 1})
    largest = [some for some in groups if len(some) == most]
    return {size: statistics.fmean(_chance_of_signal(some, size) for some in largest) for size in sizes}


def _chance_of_signal(scores: Sequence[float], size: int) -> float:
    counts: list[int] = []
    first = math.nan
    for score in sorted(scores):
        if counts and equal(first, score):
            counts[-1] += 1
        else:
            first = score
            counts.append(1)
    return 1.0 - sum(math.comb(count, size) for count in counts) / math.comb(len(scores), size)


def _by_group(groups: Iterable[GroupKey], scores: Iterable[float | None]) -> dict[GroupKey, list[float]]:
    found: dict[GroupKey, list[float]] = defaultdict(list)
    for group, score in zip(groups, scores, strict=True):
        if score is not None:
            found[group].append(score)
    return found


def _centered(groups: Sequence[GroupKey], scores: Sequence[float | None]) -> list[float | None]:
    """Each score minus the mean of its group; 0 in groups without signal, and up to rounding at the mean."""
    found = _by_group(groups, scores)
    means = {group: statistics.fmean(some) for group, some in found.items()}
    spreads = {group: 0.0 if all_equal(some) else max(some) - min(some) for group, some in found.items()}

    def centered(group: GroupKey, score: float) -> float:
        gap, spread = score - means[group], spreads[group]
        return 0.0 if spread == 0.0 or equal(gap / spread, 0.0) else gap

    return [
        None if score is None else centered(group, score) for group, score in zip(groups, scores, strict=True)
    ]


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's correlation of the ranks, where equal values share the mean of their ranks (Spearman 1904)."""
    if len(pairs) < 2:
        return None
    old, new = (_ranks(values) for values in zip(*pairs, strict=True))
    if len(set(old)) == 1 or len(set(new)) == 1:
        return None
    return statistics.correlation(old, new)


def _ranks(values: Sequence[float]) -> list[float]:
    ranks: dict[float, float] = {}
    below = 0
    for value, count in sorted(Counter(values).items()):
        ranks[value] = below + (count + 1) / 2
        below += count
    return [ranks[value] for value in values]


def part_names(grader: Mapping[str, Any]) -> list[str]:
    """The names of a multi grader's parts, which a formula reads; empty for other graders."""
    return list(grader["graders"]) if grader.get("type") == "multi" else []
