"""Rollouts to rewards through the job's grader, and what an ungraded answer means: nothing at all."""

from collections.abc import Sequence

from graders.run import grade_all
from graders.types import Grader, Sample
from worker.types import Group, Prompt, Rollout


class Rewards:
    """Grades whole steps. A grade that failed stays a None with its reason; nothing here turns it into 0."""

    def __init__(self, grader: Grader, *, concurrency: int = 64, timeout_s: float = 120.0) -> None:
        self.grader = grader
        self.concurrency = concurrency
        self.timeout_s = timeout_s

    async def grade(
        self, prompts_P: Sequence[Prompt], rollouts_PG: Sequence[tuple[Rollout, ...]]
    ) -> list[Group]:
        pairs = [
            (Sample.from_text(rollout.text, rollout.finish_reason), prompt.item)
            for prompt, rollouts_G in zip(prompts_P, rollouts_PG, strict=True)
            for rollout in rollouts_G
        ]
        grades = iter(
            await grade_all(self.grader, pairs, concurrency=self.concurrency, timeout_s=self.timeout_s)
        )
        return [
            Group(prompt, rollouts_G, tuple(next(grades) for _ in rollouts_G))
            for prompt, rollouts_G in zip(prompts_P, rollouts_PG, strict=True)
        ]
