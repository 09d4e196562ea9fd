"""Score answers by a teacher, in place of a grader: by how likely their tokens are to it and to the student."""

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from graders.types import ErrorKind, Grade, TokenUsage
from worker.clock import Clock
from worker.device_work import DEVICE_WORK
from worker.model.batch import ids_of, rows_read
from worker.recording import divergence
from worker.sampling import Answer
from worker.training.teacher import Teacher
from worker.types import Group, Prompt, Rollout


class TeacherRewards:
    """Grades as `Rewards` does: an answer's score is the mean of log p_teacher - log p_student over its tokens.

    Its negative is an estimate of the reverse KL per token, so a score is 0 at best in the mean.
    """

    def __init__(self, teacher: Teacher, *, temperature: float, paid: str | None = None) -> None:
        """`temperature` is that at which answers are sampled, in training and in validation.

        `paid` is the name of a teacher on a server, under which its tokens are counted.
        """
        self.teacher = teacher
        self.temperature = temperature
        self.paid = paid

    async def grade(
        self,
        prompts_P: Sequence[Prompt],
        answers: AsyncIterator[Answer],
        group_size: int,
        clock: Clock,
        use: Callable[[Group], None] | None = None,
    ) -> list[Group]:
        """The teacher reads the answers when all of them are there: it may be the model that samples them."""
        members_P: list[dict[int, Rollout]] = [{} for _ in prompts_P]
        with clock("sampling"):
            async for answer in answers:
                members_P[answer.prompt][answer.member] = answer.rollout
        divergence.check_answers(rollout for members in members_P for rollout in members.values())
        answers_P = [
            (prompt, [members[member] for member in range(group_size)])
            for prompt, members in zip(prompts_P, members_P, strict=True)
        ]
        with clock("grading"):
            logprobs_PG = await asyncio.to_thread(self.teacher.logprobs, answers_P, self.temperature)
        groups_P = [
            self._group(prompt, rollouts_G, logprobs_G)
            for (prompt, rollouts_G), logprobs_G in zip(answers_P, logprobs_PG, strict=True)
        ]
        if use is not None:
            with clock("training"):
                for group in groups_P:
                    await DEVICE_WORK.run(use, group)
        return groups_P

    def _group(
        self, prompt: Prompt, rollouts_G: Sequence[Rollout], logprobs_G: Sequence[tuple[float, ...]]
    ) -> Group:
        answered_G = tuple(
            replace(rollout, teacher_T=teacher_T)
            for rollout, teacher_T in zip(rollouts_G, logprobs_G, strict=True)
        )
        grades_G = (_grade(rollout, self._usage(prompt, rollout)) for rollout in answered_G)
        return Group(prompt, answered_G, tuple(grades_G))

    def _usage(self, prompt: Prompt, rollout: Rollout) -> dict[str, TokenUsage]:
        if self.paid is None:
            return {}
        rows = rows_read(prompt.ids, rollout)
        return {self.paid: TokenUsage(sum(len(ids_of(row)) for row in rows), len(rows))}


def _grade(rollout: Rollout, usage: dict[str, TokenUsage]) -> Grade:
    if not rollout.output_ids_T:
        return Grade(None, "the policy sampled no token", ErrorKind.other_error, usage=usage)
    return Grade(_score(rollout), usage=usage)


def _score(rollout: Rollout) -> float:
    pairs = zip(rollout.teacher_T, rollout.logprobs_T, strict=True)
    return statistics.fmean(teacher - own for teacher, own in pairs)
