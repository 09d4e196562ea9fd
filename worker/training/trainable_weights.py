"""The weights that a job trains, with their optimizer and the reference of the loss: updates and checkpoints.

An adapter is small: one process has all of it, and its optimizer's state is in `trainer.pt`. All weights of a model are
large: their master weights, moments and reference are in separate files, written and read one after the other. With a
sharded model each rank trains its part, and the others do whatever rank 0 does.
"""

import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from worker.model.full import FullPolicy
from worker.model.sharded_full import ShardedFullPolicy
from worker.model.tensor_files import TensorFiles, TensorWriter
from worker.refusals import InvalidModel
from worker.training.loss import Loss
from worker.training.optimizer import AdapterOptimizer
from worker.training.world import World

# Files of a checkpoint, beside those of the model and its master weights.
MOMENTS, REFERENCE = "moments", "reference"
_ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainedState(Protocol):
    """The weights that a job trains, with what a checkpoint needs to continue them."""

    optimizer: AdapterOptimizer  # of this process

    def prepare(self, divisor: float) -> float | None:
        """As AdapterOptimizer.prepare."""
        ...

    def descend(self, steps_taken: int, rate: float) -> float:
        """As AdapterOptimizer.descend."""
        ...

    def keep(self) -> None:
        """As AdapterOptimizer.keep."""
        ...

    def restore(self) -> None:
        """As AdapterOptimizer.restore."""
        ...

    def clear(self) -> None:
        """Drop the gradient."""
        ...

    def keep_reference(self) -> None:
        """Compare with the current policy from now on, in place of the model that was loaded."""
        ...

    def save(self, folder: Path | None) -> dict[str, Any]:
        """Write the weights, and return what `load` needs of `trainer.pt`."""
        ...

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Read what `save` has written and returned. Raises InvalidModel: it is damaged, or of another model."""
        ...


class _Own:
    """What this process trains."""

    def __init__(self, loss: Loss, optimizer: AdapterOptimizer) -> None:
        self.loss = loss
        self.optimizer = optimizer

    def prepare(self, divisor: float) -> float | None:
        return self.optimizer.prepare(divisor)

    def descend(self, steps_taken: int, rate: float) -> float:
        return self.optimizer.descend(steps_taken, rate)

    def keep(self) -> None:
        self.optimizer.keep()

    def restore(self) -> None:
        self.optimizer.restore()

    def clear(self) -> None:
        self.optimizer.clear()

    def keep_reference(self) -> None:
        self.loss.change_reference(None)  # so that the last one is not in memory beside the new one
        self.loss.change_reference(self.loss.policy.snapshot())


class TrainedAdapter(_Own):
    """Implements TrainedState."""

    def save(self, folder: Path | None) -> dict[str, Any]:
        assert folder is not None, "rank 0 has the whole adapter"
        self.loss.policy.save(folder)
        return {"optimizer": self.optimizer.state_dict(), "reference": self.loss.changed_reference}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        self.loss.policy.load(folder)
        self.optimizer.load_state_dict(state["optimizer"])
        self.loss.change_reference(state["reference"])


class TrainedModel(_Own):
    """Implements TrainedState for all weights of a model, or the part of them that this process has.

    If it has a part, `save` and `load` are for all ranks together; only one of them writes.
    """

    def __init__(self, policy: FullPolicy, loss: Loss, optimizer: AdapterOptimizer) -> None:
        super().__init__(loss, optimizer)
        self.policy = policy

    def save(self, folder: Path | None) -> dict[str, Any]:
        policy = self.policy
        reference = self.loss.changed_reference
        with TensorWriter(folder) as writer:
            files = policy.write_tensors(writer)
            writer.write(MOMENTS, self._moments())
            if reference is not None:
                whole = (policy.full_tensor_of(number, one) for number, one in enumerate(reference))
                writer.write(REFERENCE, zip(policy.names, whole, strict=True))
        # After all that is collective: a failure may be followed by another attempt.
        if folder is not None:
            policy.write_description(folder, files)
        steps = {float(state["step"]) for state in self.optimizer.adamw.state.values()}
        assert len(steps) <= 1, "the optimizer moves all weights in each step"
        return {"adamw_steps": steps.pop() if steps else None, "has_reference": reference is not None}

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        """Of the weights that have had a gradient."""
        for number, weight in enumerate(self.policy.trainable):
            if state := self.optimizer.adamw.state.get(weight):
                for moment in _ADAMW_MOMENTS:
                    yield (
                        f"{moment}.{self.policy.names[number]}",
                        self.policy.full_tensor_of(number, state[moment]),
                    )

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        policy, adamw = self.policy, self.optimizer.adamw
        policy.load(folder)
        adamw.state.clear()
        with TensorFiles(folder, MOMENTS) as files:
            saved = files.names()
            for number, (name, weight) in enumerate(zip(policy.names, policy.trainable, strict=True)):
                if f"{_ADAMW_MOMENTS[0]}.{name}" in saved:
                    moments = {one: torch.zeros_like(weight, requires_grad=False) for one in _ADAMW_MOMENTS}
                    for moment, tensor in moments.items():
                        policy.fill(number, tensor, f"{moment}.{name}", files)
                    steps = torch.tensor(state["adamw_steps"], dtype=torch.float32, device=weight.device)
                    adamw.state[weight] = {"step": steps, **moments}
        self.loss.change_reference(None)
        if state["has_reference"]:
            reference = policy.snapshot()
            with TensorFiles(folder, REFERENCE) as files:
                for number, (name, tensor) in enumerate(zip(policy.names, reference, strict=True)):
                    policy.fill(number, tensor, name, files)
            self.loss.change_reference(reference)


@dataclass(frozen=True)
class OnParts:
    """The order to the other ranks to do with their parts what rank 0 does with its own."""

    operation: Literal[
        "prepare", "descend", "keep", "restore", "clear", "keep_reference", "save", "load", "write_weights"
    ]
    arguments: tuple[Any, ...] = ()


class LedParts(TrainedModel):
    """Implements TrainedState over all ranks, each of which has a part; this process is rank 0."""

    def __init__(
        self, policy: ShardedFullPolicy, loss: Loss, optimizer: AdapterOptimizer, world: World
    ) -> None:
        super().__init__(policy, loss, optimizer)
        self.world = world
        policy.with_others = partial(self._together, OnParts("write_weights"))

    @contextmanager
    def _together(self, order: OnParts) -> Iterator[None]:
        with self.world.giving():
            self.world.give([order] * self.world.size)
            yield

    def prepare(self, divisor: float) -> float | None:
        with self._together(OnParts("prepare", (divisor,))):
            return super().prepare(divisor)

    def descend(self, steps_taken: int, rate: float) -> float:
        with self._together(OnParts("descend", (steps_taken, rate))):
            return super().descend(steps_taken, rate)

    def keep(self) -> None:
        with self._together(OnParts("keep")):
            super().keep()

    def restore(self) -> None:
        with self._together(OnParts("restore")):
            super().restore()

    def clear(self) -> None:
        with self._together(OnParts("clear")):
            super().clear()

    def keep_reference(self) -> None:
        with self._together(OnParts("keep_reference")):
            super().keep_reference()

    def save(self, folder: Path | None) -> dict[str, Any]:
        with self._together(OnParts("save")):
            return super().save(folder)

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        with self._together(OnParts("load", (folder, state))):
            load_together(super().load, self.world, folder, state)


def load_together(
    load: Callable[[Path, Any], None], world: World, folder: Path, state: dict[str, Any]
) -> None:
    """Load, wait for the others, and on rank 0 raise what any of them has raised.

    Raises:
        InvalidModel: by any rank.
    """
    problem = ""
    try:
        load(folder, state)
    except InvalidModel as cause:
        problem = str(cause)
    problems = [one for one in world.gather(problem) if one]
    if problems:
        raise InvalidModel(problems[0])


def carry_out_on_part(order: OnParts, trained: TrainedModel, world: World) -> None:
    """On a rank above 0."""
    match order.operation:
        case "prepare":
            trained.prepare(*order.arguments)
        case "descend":
            trained.descend(*order.arguments)
        case "keep":
            trained.keep()
        case "restore":
            trained.restore()
        case "clear":
            trained.clear()
        case "keep_reference":
            trained.keep_reference()
        case "save":
            trained.save(None)
        case "load":
            load_together(trained.load, world, *order.arguments)
        case "write_weights":
            trained.policy.write_weights(None)


def sum_gradients(loss: Loss, world: World) -> None:
    """Leave the sums over all ranks where they are needed: on rank 0, or each part on the rank that trains it."""
    policy = loss.policy
    if isinstance(policy, ShardedFullPolicy):
        policy.collect_gradients()
        world.sum_gradients(policy.replicated, on_all=True)
    world.sum_gradients(loss.trainable)


def trained_of(loss: Loss, optimizer: AdapterOptimizer, world: World | None = None) -> TrainedState:
    """Return the trained weights of a run, of which this process is rank 0."""
    policy = loss.policy
    if isinstance(policy, ShardedFullPolicy):
        assert world is not None, "the weights are sharded over ranks"
        return LedParts(policy, loss, optimizer, world)
    if isinstance(policy, FullPolicy):
        return TrainedModel(policy, loss, optimizer)
    return TrainedAdapter(loss, optimizer)


def save_state(state: object, file: Path) -> None:
    """Write what `read_state` reads.

    Raises:
        OSError, or a RuntimeError in whose context there is one: the disk refuses it, for example because it is full.
            To a path instead of an open file, torch writes by itself, and its errors have no number.
    """
    with file.open("wb") as opened:
        torch.save(state, opened)


def read_state(file: Path) -> Any:
    """Read `trainer.pt` of a checkpoint, or a file like it. Raises InvalidModel: it is damaged."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, struct.error) as cause:
        raise InvalidModel(f"The optimizer's state in the checkpoint cannot be read: {cause}") from cause
