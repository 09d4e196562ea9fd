"""Answers to rewards through the job's grader, and what an ungraded answer means: nothing at all."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from graders.run import grade_one
from graders.types import Grade, Grader, Sample
from worker.clock import Clock
from worker.samplers import Answer
from worker.types import Group, Prompt, Rollout


class Rewards:
    """Grades answers as they are sampled. A grade that failed stays a None with its reason, and never becomes 0."""

    def __init__(self, grader: Grader, *, concurrency: int = 64) -> None:
        """`concurrency` bounds what is under way at once; a sandbox, a judge or an endpoint may bound itself tighter.

        There is no deadline here, where waiting for one's turn would count: whatever can hang has its own.
        """
        self.grader = grader
        self.concurrency = concurrency

    async def grade(
        self, prompts_P: Sequence[Prompt], answers: AsyncIterator[Answer], clock: Clock
    ) -> list[Group]:
        """The graded groups, prompts and members in order.

        Grading runs beside the sampling of the rest; the clock's "grading" is only what it takes beyond that.
        """
        slots = asyncio.Semaphore(self.concurrency)
        graded: dict[tuple[int, int], tuple[Rollout, asyncio.Task[Grade]]] = {}
        async with asyncio.TaskGroup() as tasks:
            with clock("sampling"):
                async for answer in answers:
                    task = tasks.create_task(self._grade(slots, prompts_P[answer.prompt], answer.rollout))
                    graded[answer.prompt, answer.member] = answer.rollout, task
            with clock("grading"):
                await asyncio.gather(*(task for _, task in graded.values()))
        return [
            Group(prompt, *zip(*_members(graded, number), strict=True))
            for number, prompt in enumerate(prompts_P)
        ]

    async def _grade(self, slots: asyncio.Semaphore, prompt: Prompt, rollout: Rollout) -> Grade:
        async with slots:
            sample = Sample.from_text(rollout.text, rollout.finish_reason)
            return await grade_one(self.grader, sample, prompt.item)


def _members(
    graded: dict[tuple[int, int], tuple[Rollout, asyncio.Task[Grade]]], prompt: int
) -> list[tuple[Rollout, Grade]]:
    places = sorted(place for place in graded if place[0] == prompt)
    return [(graded[place][0], graded[place][1].result()) for place in places]
