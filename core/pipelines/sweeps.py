"""A sweep: one job with several settings at once, on the same validation rows. Pure functions; `_N` is the rows' axis.

Two comparisons are made. While the jobs run, a job stops once another is certainly better at the same step (`beaten`).
When all have ended, those that succeeded are compared (`ranked`). core/pipelines/sweep_jobs.py applies both.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from core.errors import InvalidRequest
from core.jobs.hyperparameter_places import GROUPS, PLACES
from core.jobs.hyperparameters import Hyperparameters
from core.rewards import equal
from core.statistics import differences, paired, sequential_low

MAX_JOBS = 16
# Of validations that stop a job. With fewer, rare large differences are easily missing, and the bound is too narrow.
MIN_ROWS = 30
Scores = Sequence[float | None]  # of each validation row; None: no answer could be graded

OF_THE_JOB = ("model", "seed")
_HYPERPARAMETERS = ("method", "reinforcement", "hyperparameters")


def path_of(name: str) -> tuple[str, ...]:
    """The path in a job's request of a setting: `seed`, `batch_size`, `learning_rate` or `optimizer.learning_rate`.

    Raises:
        InvalidRequest: there is no setting of this name.
    """
    fields = [field for field in Hyperparameters.model_fields if field != "advanced"]
    if name in OF_THE_JOB:
        return (name,)
    if name in fields:
        return (*_HYPERPARAMETERS, name)
    if name in PLACES:
        return (*_HYPERPARAMETERS, "advanced", PLACES[name].group, PLACES[name].field)
    if name == "train":
        return (*_HYPERPARAMETERS, "advanced", name)
    group, dot, field = name.partition(".")
    if group in GROUPS and dot and field:
        return (*_HYPERPARAMETERS, "advanced", group, field)
    close = get_close_matches(name, [*OF_THE_JOB, *fields, *PLACES], n=1, cutoff=0.75)
    meant = f" Did you mean '{close[0]}'?" if close else ""
    raise InvalidRequest(
        f"Invalid value for 'over': there is no setting '{name}'.{meant} Settings are the hyperparameters, such as "
        "learning_rate or sampling.group_size, and model and seed.",
        param=f"over.{name}",
    )


def combinations(over: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of one value of each setting; the last setting varies fastest."""
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def with_settings(job: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The request of a job with these settings in their places.

    Raises:
        InvalidRequest: a place is inside of something that is not an object, or there is no setting of a name.
    """
    changed = deepcopy(dict(job))
    for name, value in settings.items():
        *way, last = path_of(name)
        table = changed
        for key in way:
            inner = table.get(key)
            table[key] = {} if inner is None else inner
            table = table[key]
            if not isinstance(table, dict):
                raise InvalidRequest(
                    f"Invalid value for 'job': '{key}' must be an object.", param=f"job.{key}"
                )
        table[last] = value
    return changed


def setting_named_twice(names: Sequence[str]) -> str | None:
    """A name whose setting another name before it has, too, such as optimizer.learning_rate and learning_rate."""
    places = [path_of(name) for name in names]
    return next((name for index, name in enumerate(names) if places[index] in places[:index]), None)


def in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


@dataclass(frozen=True)
class Candidate:
    """A job of a sweep that may still win."""

    settings: Mapping[str, Any]
    validated: Collection[int]  # the steps of its validations after step 0
    scores: Callable[[int], Scores]  # of one of these validations


def beaten(candidate: Candidate, others: Sequence[Candidate], jobs: int) -> str | None:
    """The reason for which a job has lost: another is certainly better at the last step that both validated; else None.

    The k-th look at a pair has the share 6 / (pi^2 k^2) of the level that the pair has of `ALARM_LEVEL` (Bonferroni
    over looks and pairs). If means are about normal, no number of looks makes a wrong stop likelier than `ALARM_LEVEL`
    in the whole sweep. Fewer than MIN_ROWS graded rows stop no job.

    Args:
        jobs: of the whole sweep.
    """
    for other in others:
        shared = {*candidate.validated} & {*other.validated}
        if not shared:
            continue
        step = max(shared)
        looks = math.ceil(_pairs(jobs) * (math.pi * len(shared)) ** 2 / 6)
        differences_N = differences(paired(zip(candidate.scores(step), other.scores(step), strict=True)))
        low = sequential_low(differences_N, looks) if len(differences_N) >= MIN_ROWS else None
        if low is not None and low > 0:
            mean = math.fsum(differences_N) / len(differences_N)
            return (
                f"{in_words(other.settings)} is better at step {step}: by {mean:.3g} on {len(differences_N)} "
                f"validation rows, at least by {low:.3g}"
            )
    return None


@dataclass(frozen=True)
class Rank:
    """A job that has succeeded, beside the one with the highest mean reward."""

    rows: int  # that are graded in all jobs
    reward: float | None  # mean over the rows that are graded in all jobs
    difference: (
        float | None
    )  # of the best job minus this one; None: it is the best one, or no row is graded in all
    # The lower bound of the difference, of all pairs at once; None: too few rows for one, or no difference.
    low: float | None

    @property
    def is_worse(self) -> bool:
        """Whether the best job is better than this one beyond chance."""
        return self.low is not None and self.low > 0


def ranked(scores_JN: Sequence[Scores], validations_J: Sequence[int], jobs: int) -> list[Rank]:
    """Each job beside the best, on the rows that are graded in all of them; the first of equal means is the best.

    The bounds hold for all pairs at once, and for all pairs of validations of the two (`sequential_low`): the best job
    was chosen by the same rows, and so was the checkpoint that each job delivers.

    Args:
        validations_J: of each job, among which it has chosen.
        jobs: of the whole sweep, with those that are not here.
    """
    rows = [scores for scores in zip(*scores_JN, strict=True) if None not in scores]
    if not rows:
        return [Rank(0, None, None, None) for _ in scores_JN]
    graded_JN = list(zip(*rows, strict=True))
    means_J = [math.fsum(scores_N) / len(rows) for scores_N in graded_JN]
    best = next(index for index, mean in enumerate(means_J) if equal(mean, max(means_J)))
    ranks_J = []
    for index, mean in enumerate(means_J):
        if index == best:
            ranks_J.append(Rank(len(rows), mean, None, None))
            continue
        differences_N = differences(paired(zip(graded_JN[index], graded_JN[best], strict=True)))
        looks = _pairs(jobs) * max(1, validations_J[index]) * max(1, validations_J[best])
        low = sequential_low(differences_N, looks)
        ranks_J.append(Rank(len(rows), mean, math.fsum(differences_N) / len(rows), low))
    return ranks_J


def best_of(ranks_J: Sequence[Rank]) -> int:
    """The place of the best job; of the first one if none could be compared."""
    return next(index for index, rank in enumerate(ranks_J) if rank.difference is None)


def conclusion(settings_J: Sequence[Mapping[str, Any]], ranks_J: Sequence[Rank]) -> str:
    """One sentence on jobs that have succeeded and their ranks."""
    best = best_of(ranks_J)
    name = in_words(settings_J[best])
    if len(ranks_J) == 1:
        return f"{name} is the only one to compare."
    if all(rank.reward is None for rank in ranks_J):
        return f"No validation row is graded in all jobs: {name} is only the first."
    if any(rank.difference is not None and rank.low is None for rank in ranks_J):
        rows = ranks_J[best].rows
        return (
            f"{rows} validation rows are too few to tell: the model is that of {name}, with the highest mean."
        )
    close = [
        in_words(settings)
        for index, (settings, rank) in enumerate(zip(settings_J, ranks_J, strict=True))
        if index != best and not rank.is_worse
    ]
    if not close:
        return f"{name} is better than every other one that was compared."
    others = " and ".join(close)
    return f"No difference beyond chance between {name} and {others}: the model is that of {name}."


def _pairs(jobs: int) -> int:
    """Ordered ones: any job may be better than any other."""
    return jobs * (jobs - 1)
