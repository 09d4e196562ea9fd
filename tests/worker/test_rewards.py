"""How answers of a batch, or of several batches at once, are graded."""

import asyncio
from collections.abc import AsyncIterator

from graders.types import Grade, Item, Sample
from worker.clock import Clock
from worker.rollout.experience import Rewards
from worker.sampling import Answer
from worker.types import Prompt, Rollout


class CountingGrader:
    """Knows how many answers it graded at once, at most. Each grade ends after others could begin."""

    name, type = "counting", "string_check"

    def __init__(self) -> None:
        self.now = self.most = 0

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(5):
            await asyncio.sleep(0)
        self.now -= 1
        return Grade(1.0)


async def answers() -> AsyncIterator[Answer]:
    for member in range(6):
        yield Answer(0, member, Rollout((1,), (-0.5,), "a", "stop"))


def test_batches_that_are_graded_at_once_share_the_limit_of_grades_in_flight() -> None:
    grader = CountingGrader()
    rewards, prompts_P = Rewards(grader, concurrency=3), [Prompt(1, (1,), {})]

    async def both() -> None:
        batches = (rewards.grade(prompts_P, answers(), 6, Clock()) for _ in range(2))
        await asyncio.gather(*batches)

    asyncio.run(both())

    assert grader.most == 3
