"""Sample and grade the groups of a step, and pass them to the trainer.

There are three schedules. With `overlap`, the trainer gets each group as soon as it is graded, while others are still
being sampled. With `off_policy_steps`, groups are sampled during the update of the previous step. Otherwise the trainer
gets all groups at once.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from core.jobs.hyperparameters import Resolved
from worker.clock import Clock
from worker.learn import grpo
from worker.learn.trainer import Trainer
from worker.rollout.prompts import PromptStream
from worker.rollout.rewards import Scoring
from worker.rollout.samplers import Sampler, Sampling
from worker.rollout.steps import with_steps_only
from worker.types import Group, Prompt


@dataclass
class Collector:
    """Collects for one run. `seed` is the job's."""

    settings: Resolved
    seed: int
    prompts: PromptStream
    sampler: Sampler
    rewards: Scoring
    trainer: Trainer
    held_to: str = ""  # response schema of the answers
    # With `off_policy_steps`: seconds in which the step's answers were sampled, while the trainer could learn from
    # those of the step before. None: nothing else was done meanwhile.
    ahead_seconds: float | None = field(default=None, init=False)
    _ahead: asyncio.Task[list[Group]] | None = field(default=None, init=False)
    _ahead_clock: Clock | None = field(default=None, init=False)

    async def collect(self, step: int, clock: Clock) -> tuple[list[Group], list[Group]]:
        """Return the step's own groups and the resampled ones, after the trainer has received all of them."""
        if self.settings.off_policy_steps:
            return await self._from_before(step, clock), []
        groups_P = await self._learn(self.prompts.batch(step), step, clock)
        return groups_P, await self._replace_silent(step, groups_P, clock)

    async def sampler_is_free(self) -> None:
        """Wait until sampling ahead has completed, and keep its groups."""
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

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
        if self._ahead is None:  # the first step, or the first after a restart
            sampling = self._sample(self.prompts.batch(step), step, Clock(), policy_steps=step - 1)
            self._ahead = asyncio.create_task(sampling)
        with clock("sampling"):  # the remaining time
            groups_P = await self._ahead
        self.ahead_seconds = None if self._ahead_clock is None else self._ahead_clock.seconds["sampling"]
        self._ahead = self._ahead_clock = None
        if step < self.settings.total_steps:
            self._ahead_clock = Clock()
            # `sample` reads the policy when it is called, so this uses the policy before this step's update.
            sampling = self._sample(
                self.prompts.batch(step + 1), step + 1, self._ahead_clock, policy_steps=step - 1
            )
            self._ahead = asyncio.create_task(sampling)
            await asyncio.sleep(0)  # lets the task start, which calls `sample`
        return await self._hand_over(groups_P, clock)

    async def _sample(
        self, prompts_P: Sequence[Prompt], step: int, clock: Clock, *, policy_steps: int | None = None
    ) -> list[Group]:
        sampling = self.sampling(step)
        if self.settings.continue_in_flight:
            sampling = replace(sampling, policy_steps=policy_steps)
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
