"""Anchor answers, which a judge grades again at each validation: equal answers with other scores are its drift."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from core.jobs.alarm_sizes import ANCHORS
from core.statistics import sequential_low
from graders.calls import ServerAway
from graders.judge.judges import asking_again
from graders.run import grade_all
from graders.types import Grader, Item, Sample
from worker.rollout.samples import sample_of
from worker.types import Group, Rollout


@dataclass
class JudgeAnchors:
    """Answers of the first validation of the attempt, with their scores then.

    A resumed job has other ones: a change of the judge between two attempts is not seen.
    """

    grader: Grader
    looks: int  # validations after the first one, at each of which an alarm may fire
    unit: float = 1.0  # by how much the judges can move a score, at least 1
    parse_json: bool = False
    _anchors: list[tuple[Sample, Item, float]] = field(default_factory=list, init=False)

    async def drift(self, groups_P: Sequence[Group]) -> dict[str, float | None]:
        """Grade the anchors again, and return the metrics of their change. The first call chooses them.

        A grade that fails is left out; without the judge's server there is no metric.
        """
        if not self._anchors:
            self._anchors = self._chosen(groups_P)
            return {}
        try:
            with asking_again():
                grades = await grade_all(self.grader, [(sample, item) for sample, item, _ in self._anchors])
        except ServerAway:
            return {}
        changes = [
            (grade.score - before) / self.unit
            for grade, (_, _, before) in zip(grades, self._anchors, strict=True)
            if grade.score is not None
        ]
        if not changes:
            return {}
        high = sequential_low([-one for one in changes], 2 * self.looks)
        return {
            "judge_drift": fmean(changes),
            "judge_drift_low": sequential_low(changes, 2 * self.looks),
            "judge_drift_high": None if high is None else -high,
        }

    def _chosen(self, groups_P: Sequence[Group]) -> list[tuple[Sample, Item, float]]:
        """The first answer of as many rows, at equal distances in the file."""
        graded = [
            (group, score)
            for group in groups_P
            if (score := group.grades_G[0].score) is not None and _is_graded(group.rollouts_G[0])
        ]
        number = min(ANCHORS, len(graded))
        places = (place * len(graded) // number for place in range(number))
        return [
            (sample_of(group.rollouts_G[0], parse_json=self.parse_json), group.prompt.item, score)
            for group, score in (graded[place] for place in places)
        ]


def _is_graded(rollout: Rollout) -> bool:
    """Whether the job's grader has scored it. The reward that an agent gave is no score of a judge."""
    return not rollout.is_discarded and (rollout.episode is None or rollout.episode.reward is None)
