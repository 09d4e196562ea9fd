"""Trainers that have the sampler sleep during a step, or continue with the new policy after it."""

from pathlib import Path
from typing import Protocol

from worker.learn.trainer import Trainer
from worker.types import Group, UpdateMetrics


class Sleeper(Protocol):
    """A sampler whose engines can sleep. Its next `sample` wakes them."""

    def sleep(self) -> None:
        """Wait until they have released their memory."""
        ...


class AlternatingTrainer:
    """Implements Trainer. The sampler sleeps while the trainer computes, which is in `step` alone without `overlap`."""

    def __init__(self, trainer: Trainer, sampler: Sleeper) -> None:
        self._trainer, self._sampler = trainer, sampler

    def add(self, group: Group) -> None:
        self._trainer.add(group)

    def step(self) -> UpdateMetrics:
        self._sampler.sleep()
        return self._trainer.step()

    def save(self, folder: Path) -> None:
        self._trainer.save(folder)

    def load(self, folder: Path) -> None:
        self._trainer.load(folder)


class Updated(Protocol):
    """A sampler whose answers in flight can continue with the policy as it is now."""

    def update_in_flight(self) -> None: ...


class UpdatingTrainer:
    """Implements Trainer. Answers that are being sampled during a step continue with the policy after it."""

    def __init__(self, trainer: Trainer, sampler: Updated) -> None:
        self._trainer, self._sampler = trainer, sampler

    def add(self, group: Group) -> None:
        self._trainer.add(group)

    def step(self) -> UpdateMetrics:
        update = self._trainer.step()
        self._sampler.update_in_flight()
        return update

    def save(self, folder: Path) -> None:
        self._trainer.save(folder)

    def load(self, folder: Path) -> None:
        self._trainer.load(folder)
