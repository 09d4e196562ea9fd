"""The shadow grader of a job: it scores the validation answers, and nothing is trained on its scores."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graders.run import grade_all
from graders.types import ErrorKind, Grade, Grader
from worker.rollout.samples import sample_of
from worker.types import Group

DISCARDED = Grade(None, "the episode was discarded", ErrorKind.other_error)


@dataclass(frozen=True)
class Shadow:
    """Grades graded groups once more. A grade that fails has no score, and the run continues."""

    grader: Grader
    parse_json: bool = False

    async def grade(self, groups_P: Sequence[Group]) -> list[Group]:
        pairs = [
            (sample_of(rollout, parse_json=self.parse_json), group.prompt.item)
            for group in groups_P
            for rollout in group.rollouts_G
            if not rollout.is_discarded
        ]
        grades = iter(await grade_all(self.grader, pairs))
        return [
            replace(
                group,
                shadow_G=tuple(
                    DISCARDED if rollout.is_discarded else next(grades) for rollout in group.rollouts_G
                ),
            )
            for group in groups_P
        ]
