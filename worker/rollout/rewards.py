"""Grade answers with the job's grader. An ungraded answer has no reward, not a reward of 0."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from graders.run import grade_one
from graders.types import Grade, Grader, Sample
from worker.clock import Clock
from worker.refusals import first_error
from worker.rollout.reward_models import AnswerScores, Scores
from worker.rollout.samplers import Answer
from worker.types import Group, Prompt, Rollout


class Rewards:
    """Grades answers as they are sampled. A failed grade is None with a reason, never 0."""

    def __init__(
        self,
        grader: Grader,
        *,
        concurrency: int = 64,
        parse_json: bool = False,
        models: AnswerScores | None = None,
    ) -> None:
        """`concurrency` limits grades in flight, of all calls of `grade` together. A sandbox, a judge or an endpoint
        may have its own lower limit.

        `parse_json` also gives graders the answer as `sample.output_json`. `models` are the reward models that the
        grader reads; they score the answers when all of them are there, because they may share the policy's weights.

        There is no deadline here, because it would include queueing; each grader that can hang has its own.
        """
        self.grader = grader
        self._slots = asyncio.Semaphore(concurrency)
        self.parse_json = parse_json
        self.models = models

    async def grade(
        self,
        prompts_P: Sequence[Prompt],
        answers: AsyncIterator[Answer],
        group_size: int,
        clock: Clock,
        use: Callable[[Group], None] | None = None,
    ) -> list[Group]:
        """Return the graded groups, with prompts and members in order.

        Grading overlaps with sampling; the clock's "grading" is only the time beyond that, and its "training" the time
        of `use` beyond both. Calls `use` with each group in a thread, in the order in which the groups completed
        sampling, so that grading time does not affect the order and a run is bit-reproducible.
        """
        scores: dict[tuple[int, int], Scores] = {}
        if self.models is not None:
            answers, scores = await self._scored(self.models, prompts_P, answers, clock)
        grading_P: list[dict[int, tuple[Rollout, asyncio.Task[Grade]]]] = [{} for _ in prompts_P]
        sampled: asyncio.Queue[int | None] = asyncio.Queue()
        groups: dict[int, Group] = {}

        async def read(tasks: asyncio.TaskGroup) -> None:
            async for answer in answers:
                of_models = scores.get((answer.prompt, answer.member), {})
                grading = self._grade(prompts_P[answer.prompt], answer.rollout, of_models)
                task = tasks.create_task(grading)
                grading_P[answer.prompt][answer.member] = answer.rollout, task
                if len(grading_P[answer.prompt]) == group_size:
                    sampled.put_nowait(answer.prompt)
            sampled.put_nowait(None)

        async def put_together() -> None:
            while (place := await sampled.get()) is not None:
                members = [grading_P[place][member] for member in range(group_size)]
                grades_G = [await task for _, task in members]
                rollouts_G = tuple(rollout for rollout, _ in members)
                groups[place] = Group(prompts_P[place], rollouts_G, tuple(grades_G))
                if use is not None:
                    await asyncio.to_thread(use, groups[place])

        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(read(tasks))
                putting = tasks.create_task(put_together())
                with clock("sampling"):
                    await reading
                with clock("grading"):
                    await asyncio.gather(*(task for grading in grading_P for _, task in grading.values()))
                with clock("training"):
                    await putting
        except BaseExceptionGroup as several:
            raise first_error(several) from None  # a Refusal of the sampler fails the job by its own name
        return [groups[place] for place in range(len(prompts_P))]

    @staticmethod
    async def _scored(
        models: AnswerScores, prompts_P: Sequence[Prompt], answers: AsyncIterator[Answer], clock: Clock
    ) -> tuple[AsyncIterator[Answer], dict[tuple[int, int], Scores]]:
        """All answers, and the scores of the reward models by prompt and member."""
        with clock("sampling"):
            sampled = [answer async for answer in answers]
        with clock("grading"):
            texts = [(prompts_P[answer.prompt], [answer.rollout.text]) for answer in sampled]
            scores_PG = await models.score(texts)

        async def again() -> AsyncIterator[Answer]:
            for answer in sampled:
                yield answer

        scores = zip(sampled, scores_PG, strict=True)
        return again(), {(answer.prompt, answer.member): one for answer, [one] in scores}

    async def _grade(self, prompt: Prompt, rollout: Rollout, of_models: Scores) -> Grade:
        async with self._slots:
            sample = Sample.from_text(
                rollout.text, rollout.finish_reason, self.parse_json, reasoning=rollout.reasoning
            )
            return await grade_one(self.grader, replace(sample, model_scores=of_models), prompt.item)
