"""Sample a job's first answers while its base model is being loaded, for a sampler that needs no loaded model."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from worker.interfaces import Trainer
from worker.sampling import Answer, Sampler, Sampling
from worker.types import Group, Prompt, UpdateMetrics


class LoadingTrainer:
    """Implements Trainer over one that `load` returns in another thread.

    Groups are kept until it is there. The first step waits for it, as does reading or writing a checkpoint. They raise
    the error of `load` if there is one.
    """

    def __init__(self, load: Callable[[], Trainer]) -> None:
        self._trainer: Future[Trainer] = Future()
        self._groups: list[Group] = []
        threading.Thread(target=self._load, args=(load,), name="loading").start()

    def _load(self, load: Callable[[], Trainer]) -> None:
        try:
            self._trainer.set_result(load())
        except BaseException as cause:
            self._trainer.set_exception(cause)

    def raise_failure(self) -> None:
        """Raise the error of `load` if it has failed."""
        if self._trainer.done():
            self._trainer.result()

    def add(self, group: Group) -> None:
        self._groups.append(group)
        if self._trainer.done():
            self._loaded()

    def step(self) -> UpdateMetrics:
        return self._loaded().step()

    def save(self, folder: Path) -> None:
        self._loaded().save(folder)

    def load(self, folder: Path) -> None:
        self._loaded().load(folder)

    def policy_before(self, steps: int) -> AbstractContextManager[int]:
        # Before the first step there is no earlier policy.
        return self._loaded().policy_before(steps) if self._trainer.done() else nullcontext(0)

    def _loaded(self) -> Trainer:
        trainer = self._trainer.result()
        groups, self._groups = self._groups, []
        for group in groups:
            trainer.add(group)
        return trainer


class SamplerMeanwhile:
    """Implements Sampler over one that samples while the trainer is being loaded, and ends if that fails."""

    def __init__(self, sampler: Sampler, trainer: LoadingTrainer) -> None:
        self._sampler, self._trainer = sampler, trainer

    def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        # Called here and not when the first answer is wanted: it reads the policy as it is now.
        return self._answers(self._sampler.sample(prompts_P, sampling))

    async def _answers(self, answers: AsyncIterator[Answer]) -> AsyncIterator[Answer]:
        async for answer in answers:
            self._trainer.raise_failure()
            yield answer
