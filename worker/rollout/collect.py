"""Sample and grade the groups of a step, and pass them to the trainer.

There are three schedules. With `overlap`, the trainer gets each group as soon as it is graded, while others are still
being sampled. With `off_policy_steps`, the groups of as many later steps are sampled during an update. Otherwise the
trainer gets all groups at once.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from core.jobs.hyperparameters import Resolved
from worker.clock import Clock
from worker.interfaces import Scorer, Trainer
from worker.learn import grpo
from worker.rollout.prompts import PromptStream
from worker.rollout.samplers import Answer, Sampler, Sampling
from worker.rollout.steps import with_steps_only
from worker.types import Group, Prompt


@dataclass
class AheadBatch:
    """A batch that is sampled before its step."""

    clock: Clock = field(default_factory=Clock)
    waited: float = 0.0  # seconds until the batches before it were sampled, which `clock` counts too
    groups: asyncio.Task[list[Group]] = field(init=False)

    @property
    def sampling_seconds(self) -> float:
        return self.clock.seconds["sampling"] - self.waited


@dataclass
class Collector:
    """Collects for one run. `seed` is the job's."""

    settings: Resolved
    seed: int
    prompts: PromptStream
    sampler: Sampler
    rewards: Scorer
    trainer: Trainer
    held_to: str = ""  # response schema of the answers
    # With `off_policy_steps`: seconds in which the step's answers were sampled, while the trainer could learn from
    # those of the steps before. None: nothing else was done meanwhile.
    ahead_seconds: float | None = field(default=None, init=False)
    _ahead: dict[int, AheadBatch] = field(default_factory=dict, init=False)  # by step
    # Of the batches at the sampler, in the order of their steps. A batch is graded while the next one is sampled.
    _sampling_turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def collect(self, step: int, clock: Clock) -> tuple[list[Group], list[Group]]:
        """Return the step's own groups and the resampled ones, after the trainer has received all of them."""
        if self.settings.off_policy_steps:
            return await self._from_before(step, clock), []
        groups_P = await self._learn(self.prompts.batch(step), step, clock)
        return groups_P, await self._replace_silent(step, groups_P, clock)

    async def sampler_is_free(self) -> None:
        """Wait until sampling ahead has completed, and keep its groups."""
        if self._ahead:
            await asyncio.wait([batch.groups for batch in self._ahead.values()])

    async def _learn(self, prompts_P: Sequence[Prompt], step: int, clock: Clock) -> list[Group]:
        if not self.settings.overlap:
            return await self._hand_over(await self._sample(prompts_P, step, clock), clock)

        def hand_over(group: Group) -> None:
            self.trainer.add(self._taught(group))

        sampling = self.sampling(step)
        answers = self.sampler.sample(prompts_P, sampling)
        groups_P = await self.rewards.grade(prompts_P, answers, sampling.group_size, clock, hand_over)
        return [self._taught(group) for group in groups_P]

    async def _from_before(self, step: int, clock: Clock) -> list[Group]:
        """Return the groups of the step, and start to sample the last step that may be ahead of it.

        Step s is sampled with the policy after step s - 1 - `off_policy_steps`, regardless of timing and restarts.
        """
        most = self.settings.off_policy_steps
        is_first = not self._ahead  # of the run, or after a restart
        if is_first:
            for later in range(most):
                self._begin(step + later, learned=step - 1, steps_ago=most - later)
        with clock("sampling"):  # the remaining time
            groups_P = await self._ahead[step].groups
        batch = self._ahead.pop(step)
        self.ahead_seconds = None if is_first else batch.sampling_seconds
        self._begin(step + most, learned=step - 1, steps_ago=0)
        return await self._hand_over(groups_P, clock)

    def _begin(self, step: int, *, learned: int, steps_ago: int) -> None:
        """Have the batch of a step sampled, with the policy of `steps_ago` steps before `learned`."""
        if step > self.settings.total_steps:
            return
        batch, prompts_P = AheadBatch(), self.prompts.batch(step)
        with self.trainer.policy_before(steps_ago) as really_ago:
            policy_step, sampling = learned - really_ago, self.sampling(step)
            if self.settings.continue_in_flight:
                sampling = replace(sampling, policy_steps=policy_step)
            # `sample` reads the policy when it is called.
            answers = self.sampler.sample(prompts_P, sampling)
        in_turn = self._in_turn(answers, batch, policy_step)
        grading = self.rewards.grade(prompts_P, in_turn, sampling.group_size, batch.clock)
        batch.groups = asyncio.create_task(grading)
        self._ahead[step] = batch

    async def _in_turn(
        self, answers: AsyncIterator[Answer], batch: AheadBatch, policy_step: int
    ) -> AsyncIterator[Answer]:
        """The answers, once those of the batches before it are sampled."""
        began = time.perf_counter()
        async with self._sampling_turn:
            batch.waited = time.perf_counter() - began
            async for answer in answers:
                yield replace(answer, rollout=replace(answer.rollout, policy_step=policy_step))

    async def _sample(self, prompts_P: Sequence[Prompt], step: int, clock: Clock) -> list[Group]:
        sampling = self.sampling(step)
        answers = self.sampler.sample(prompts_P, sampling)
        return await self.rewards.grade(prompts_P, answers, sampling.group_size, clock)

    async def _hand_over(self, groups_P: Sequence[Group], clock: Clock) -> list[Group]:
        taught_P = [self._taught(group) for group in groups_P]
        with clock("training"):
            for group in taught_P:
                await asyncio.to_thread(self.trainer.add, group)
        return taught_P

    async def _replace_silent(self, step: int, groups_P: Sequence[Group], clock: Clock) -> list[Group]:
        """Replace zero-variance groups by DAPO's dynamic sampling (section 3.2), within a budget."""
        resampled_P: list[Group] = []
        silent = sum(not self._has_signal(group) for group in groups_P)
        if not self.settings.resample_prompts or not silent:
            return resampled_P
        # In a thread, because the shuffle of a large file would block the event loop.
        others = (await asyncio.to_thread(self.prompts.others, step))[: self.settings.resample_prompts]
        while others and silent:
            learned_P = await self._learn(others[:silent], step, clock)
            others = others[silent:]
            silent -= sum(self._has_signal(group) for group in learned_P)
            resampled_P += learned_P
        return resampled_P

    def _has_signal(self, group: Group) -> bool:
        return grpo.signal(group.taught_by(self.settings.supervision)) == "mixed"

    def _taught(self, group: Group) -> Group:
        return with_steps_only(group) if self.settings.supervision == "process" else group

    def sampling(self, step: int) -> Sampling:
        settings = self.settings
        return Sampling(
            group_size=settings.group_size,
            temperature=settings.temperature,
            max_completion_tokens=settings.max_completion_tokens,
            job_seed=self.seed,
            step=step,
            held_to=self.held_to,
            thinking_budget=settings.thinking_budget,
        )
