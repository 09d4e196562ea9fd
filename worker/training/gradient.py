"""Accumulate the gradient of a loss over the packs of a step, micro-batch by micro-batch.

The results are sums: the trainer divides them once the whole step is known. `LocalGradient` computes in this process;
`DistributedGradient` (worker/training/distributed.py) computes on all ranks of the run. `LoweringGradient` answers
out-of-memory errors of both.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch

from worker.model import memory
from worker.model.batch import RowCost, micro_batches, padded_tokens
from worker.model.lowering import PlanSizes
from worker.model.sizing import kernel_tokens
from worker.out_of_memory import LostPass, OutOfDeviceMemory, Shortage, lacking
from worker.progress import PROGRESS
from worker.training.loss import Batch, GradientSums, KeptValues, Loss, StepValues
from worker.training.row_cost import row_cost
from worker.training.trainable_weights import sum_gradients
from worker.training.world import World
from worker.types import Pack

Result = TypeVar("Result")


class StepMemory(Protocol):
    """The sizes of a run, from what is measured. worker/prepare/run_memory.py: RunMemory."""

    def fit(self, free: int) -> PlanSizes | None:
        """Return the sizes for these free bytes, once everything is loaded. None: they stay as they are."""
        ...

    def lower(self, shortage: Shortage) -> PlanSizes:
        """Return the sizes with which work is repeated after an out-of-memory error. Raises if nothing is left."""
        ...


class Gradient(Protocol):
    """The gradient of one step. Call `add` any number of times, then `collect`; per further pass `repeat`, `collect`.

    With mini-batches, call `remember` for all but the first part before its `collect`, then `repeat` for each of them.
    """

    @property
    def capacity(self) -> int:
        """Return the number of tokens that fill all ranks."""
        ...

    def add(self, packs: Sequence[Pack], values: StepValues) -> None:
        """Add packs."""
        ...

    def remember(self, packs: Sequence[Pack], part: int) -> None:
        """Keep the packs of a mini-batch, with what the loss needs of the policy that sampled them."""
        ...

    def repeat(self, values: StepValues, part: int = 0) -> None:
        """Add all packs of this mini-batch, under the current policy. Those of `add` are part 0."""
        ...

    def collect(self) -> GradientSums:
        """Write the gradient of all packs added since the last call to `grad` of the loss's weights."""
        ...

    def measure(self, packs: Sequence[Pack], values: StepValues) -> GradientSums:
        """The sums of these packs, without a gradient."""
        ...

    def of_packs(
        self, compute: Callable[..., Result], packs: Sequence[Pack], *arguments: Any
    ) -> list[Result]:
        """Compute something else of these packs, without a gradient.

        Args:
            compute: a method of the loss. It gets an iterator of micro-batches and the arguments.

        Returns:
            The results of all ranks.
        """
        ...

    def of_micro_batches(self, compute: Callable[..., Result], *arguments: Any) -> list[Result]:
        """As `of_packs`, of all micro-batches that the step has kept."""
        ...

    def of_updated(self, compute: Callable[..., Result], *arguments: Any) -> list[Result]:
        """As `of_micro_batches`, under weights that the caller has updated since the last call, and may restore."""
        ...

    def end(self) -> None:
        """Discard the step's packs."""
        ...


class LowerableGradient(Gradient, Protocol):
    """A Gradient whose work can be repeated in smaller parts after an out-of-memory error.

    The methods that return something raise OutOfDeviceMemory, also for an error in those before that return nothing.
    """

    def free(self) -> int:
        """Return the free bytes of the device, on the rank with the fewest."""
        ...

    def resize(self, sizes: PlanSizes) -> None:
        """Compute with these sizes from now on. Begins the pass under way anew: what it has added up is discarded."""
        ...


class LoweringGradient:
    """Implements Gradient with sizes that fit: they are measured before the first computation, when the engines have
    started, and an out-of-memory error lowers them and the step continues."""

    def __init__(self, inner: LowerableGradient, step_memory: StepMemory) -> None:
        self._inner, self._memory = inner, step_memory
        self._is_fitted = False

    @property
    def inner(self) -> LowerableGradient:
        """The gradient, with sizes that fit."""
        if not self._is_fitted:
            self._is_fitted = True
            if (sizes := self._memory.fit(self._inner.free())) is not None:
                self._inner.resize(sizes)
        return self._inner

    @property
    def capacity(self) -> int:
        return self._inner.capacity

    def add(self, packs: Sequence[Pack], values: StepValues) -> None:
        self.inner.add(packs, values)

    def remember(self, packs: Sequence[Pack], part: int) -> None:
        self.inner.remember(packs, part)

    def repeat(self, values: StepValues, part: int = 0) -> None:
        self.inner.repeat(values, part)

    def collect(self) -> GradientSums:
        return self._repeated(self.inner.collect)

    def measure(self, packs: Sequence[Pack], values: StepValues) -> GradientSums:
        return self._repeated(lambda: self.inner.measure(packs, values))

    def of_packs(
        self, compute: Callable[..., Result], packs: Sequence[Pack], *arguments: Any
    ) -> list[Result]:
        return self._repeated(lambda: self.inner.of_packs(compute, packs, *arguments))

    def of_micro_batches(self, compute: Callable[..., Result], *arguments: Any) -> list[Result]:
        return self._repeated(lambda: self.inner.of_micro_batches(compute, *arguments))

    def of_updated(self, compute: Callable[..., Result], *arguments: Any) -> list[Result]:
        return self._repeated(lambda: self.inner.of_updated(compute, *arguments))

    def end(self) -> None:
        self._inner.end()

    def _repeated(self, do: Callable[[], Result]) -> Result:
        while True:
            try:
                return do()
            except LostPass:
                raise  # the other ranks would get no order before the limit
            except OutOfDeviceMemory as cause:
                shortage = cause.shortage
            self.inner.resize(self._memory.lower(shortage))


def keep_memory() -> None:
    """Keep the memory of a step for the next one."""


class NewKernels:
    """Shows in the progress that kernels are compiled: the first micro-batch of each size compiles its own."""

    def __init__(self) -> None:
        self._known: set[tuple[int, bool]] = set()  # tokens, and whether a backward pass follows
        self._expected: set[tuple[int, bool]] = set()

    def expect(self, tokens: Iterable[int]) -> None:
        """Micro-batches of these sizes, in tokens with padding, come."""
        self._expected.update(map(self._kernel, tokens))

    @contextmanager
    def computing(self, tokens: int) -> Iterator[None]:
        kernel = self._kernel(tokens)
        if kernel in self._known:
            yield
            return
        with PROGRESS.compiling(len(self._known), len(self._known | self._expected)):
            yield
        self._known.add(kernel)

    def _kernel(self, tokens: int) -> tuple[int, bool]:
        return kernel_tokens(tokens), torch.is_grad_enabled()


@dataclass
class Added:
    """The packs of one call of `add` or `remember`, as they are divided now."""

    packs: Sequence[Pack]
    part: int
    is_remembered: bool  # its values of the sampling policy are computed before its first pass
    batches: list[Batch] = field(default_factory=list)
    values: StepValues | None = None  # of the pass under way, if it is in it


class LocalGradient:
    """Implements LowerableGradient in this process, computing packs as they are added.

    A forward or backward pass of a sharded base is a collective operation. So where ranks of `world` have shards, all
    of them compute as many micro-batches: those with fewer compute fillers. An out-of-memory error of one of them
    leaves the others in the middle of a pass, so LostPass is raised at once (worker/training/world.py).
    """

    def __init__(
        self,
        loss: Loss,
        *,
        token_budget: int,
        world: World | None = None,
        release: Callable[[], None] = keep_memory,
    ) -> None:
        """`release`: called at the end of each step, when nothing of it is in use any more."""
        self.loss = loss
        self.policy = loss.policy
        self.capacity = token_budget
        self.world = world
        self._use(release)
        self.shortage: Shortage | None = None  # nothing is computed until `resize`
        self._added: list[Added] = []
        self._sums = GradientSums()
        self._computing: Batch | None = None
        self._kernels = NewKernels()
        self._sizes: PlanSizes | None = None  # of the newest `resize`
        self._releases_once = False  # at the end of this step, because engines start again after it

    def _use(self, release: Callable[[], None]) -> None:
        self.release = release
        if release is not keep_memory and self.policy.device.type == "cuda":
            memory.use_expandable_segments()

    @property
    def _batches(self) -> list[Batch]:
        return [batch for added in self._added for batch in added.batches]

    def add(self, packs: Sequence[Pack], values: StepValues) -> None:
        added = self._keep(Added(packs, 0, is_remembered=False, values=values))

        def compute() -> None:
            for batch in self._tracked(added.batches):
                self._backward(batch, values)
                PROGRESS.row(0 if batch.is_filler else len(batch.packs))

        self._attempt(compute)

    @torch.no_grad()
    def remember(self, packs: Sequence[Pack], part: int) -> None:
        self._attempt(self._remember, self._keep(Added(packs, part, is_remembered=True)))

    def repeat(self, values: StepValues, part: int = 0) -> None:
        for added in self._added:
            if added.part == part:
                added.values = values
        self._attempt(self._compute_pass)

    @torch.no_grad()
    def _remember(self, added: Added) -> None:
        for batch in self._tracked(added.batches):
            if batch.old_logp is None:
                self.loss.remember(batch)

    def _compute_pass(self) -> None:
        for added in self._added:
            if added.values is not None:
                for batch in self._tracked(added.batches):
                    self._backward(batch, added.values)

    def _backward(self, batch: Batch, values: StepValues) -> None:
        loss, sums = self.loss(batch, values)
        if batch.is_filler:
            loss = loss * 0.0
        else:
            self._sums += sums
        loss.backward()  # type: ignore[no-untyped-call]

    def collect(self) -> GradientSums:
        self.check()
        if self.world is not None:
            sum_gradients(self.loss, self.world)
        sums, self._sums = self._sums, GradientSums()
        for added in self._added:
            added.values = None
        return sums

    def check(self) -> None:
        """Raises OutOfDeviceMemory: something before was not computed."""
        if self.shortage is not None:
            raise OutOfDeviceMemory(self.shortage)

    @torch.no_grad()
    def measure(self, packs: Sequence[Pack], values: StepValues) -> GradientSums:
        def compute() -> GradientSums:
            sums = GradientSums()
            for batch in self._micro_batches(packs):
                _, of_batch = self.loss(batch, values)
                if not batch.is_filler:
                    sums += of_batch
                    PROGRESS.row(len(batch.packs))
            return sums

        return self._result(compute)

    @torch.no_grad()
    def of_packs(
        self, compute: Callable[..., Result], packs: Sequence[Pack], *arguments: Any
    ) -> list[Result]:
        return self._result(lambda: [compute(self.loss, self._micro_batches(packs), *arguments)])

    @torch.no_grad()
    def of_micro_batches(self, compute: Callable[..., Result], *arguments: Any) -> list[Result]:
        return self._result(lambda: [compute(self.loss, self._batches, *arguments)])

    def of_updated(self, compute: Callable[..., Result], *arguments: Any) -> list[Result]:
        return self.of_micro_batches(compute, *arguments)

    def end(self) -> None:
        self._added = []
        if self._releases_once:
            memory.release_unused(self.policy.device.type)
            self._releases_once = False
        else:
            self.release()

    def _attempt(self, do: Callable[..., object], *arguments: Any) -> None:
        """Compute, unless the device had too little memory for this or for something before."""
        if self.shortage is not None:
            return
        self._computing = None
        try:
            do(*arguments)
        except Exception as cause:
            if lacking(cause, self.policy.device.type) != self.policy.device.type:
                raise
            shortage = self._shortage_of(cause)
        else:
            return
        # Here the traceback is gone, which keeps all tensors of the computation.
        if self.policy.is_sharded:
            raise LostPass(shortage)
        self.shortage = shortage

    def _result(self, do: Callable[[], Result]) -> Result:
        """The result of a computation. Raises OutOfDeviceMemory: this or something before was not computed."""
        results: list[Result] = []
        self._attempt(lambda: results.append(do()))
        self.check()
        return results[0]

    def free(self) -> int:
        memory.release_unused(self.policy.device.type)
        return memory.available(self.policy.device.type)

    def resize(self, sizes: PlanSizes) -> None:
        self.shortage = None
        self.capacity = sizes.token_budget
        before, self._sizes = self._sizes, sizes
        if before is not None and sizes.engine != before.engine:
            self._releases_once = True
        if sizes.sleeps:
            self._use(torch.cuda.empty_cache)
        if sizes.checkpointed:
            self.policy.checkpoint_layers()
        if any(added.values is not None for added in self._added):
            self._sums = GradientSums()
            # Also of the weights that compute: the error may come before a gradient of theirs is handed over.
            for weight in [*self.loss.trainable, *self.policy.computing]:
                weight.grad = None
        memory.release_unused(self.policy.device.type)
        self._attempt(self._begin_anew)

    def _begin_anew(self) -> None:
        kept = KeptValues.of(self._batches)
        anew = [self._divided(replace(added)) for added in self._added]
        for added in anew:
            kept.restore(added.batches)
        # All are divided before any is computed, and none is lost before all are: another error may follow.
        self._added = anew
        for added in self._added:
            if added.is_remembered:
                self._remember(added)
        self._compute_pass()

    def _shortage_of(self, cause: Exception) -> Shortage:
        batch = self._computing or max(self._batches, key=self._tokens, default=None)
        free = memory.available(self.policy.device.type)
        if batch is None:
            return Shortage.of(cause, "trainer", free=free)
        parts = sum(1 for _ in self._divide(batch.packs, 1))
        return Shortage.of(cause, "trainer", free=free, tokens=self._tokens(batch), divisible=parts > 1)

    def _tokens(self, batch: Batch) -> int:
        return padded_tokens(batch.packs, self.policy.device)

    def _divided(self, added: Added) -> Added:
        added.batches = self._all_micro_batches(added.packs, added.part)
        return added

    def _keep(self, added: Added) -> Added:
        self._added.append(self._divided(added))
        return added

    def _divide(self, packs: Sequence[Pack], capacity: int) -> Iterator[list[Pack]]:
        return micro_batches(
            packs,
            capacity,
            self.policy.device,
            rows=self.policy.route.forward == "rows",
            cost=self._cost,
            couples_answers=self.loss.couples_answers,
            couples_calls=self.loss.couples_calls,
        )

    def _all_micro_batches(self, packs: Sequence[Pack], part: int) -> list[Batch]:
        batches = [Batch(rows, part) for rows in self._divide(packs, self.capacity)]
        if self.policy.is_sharded:
            assert self.world is not None, "a base is sharded over ranks"
            missing = self.world.most(len(batches)) - len(batches)
            batches += [Batch([self.loss.filler], part, is_filler=True) for _ in range(missing)]
        return batches

    def _micro_batches(self, packs: Sequence[Pack]) -> Iterator[Batch]:
        return self._tracked(self._all_micro_batches(packs, 0))

    def _tracked(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Note which micro-batch is computed, and show the kernels that are compiled for it."""
        compiles = self.policy.compiles_attention
        if compiles:
            self._kernels.expect(map(self._tokens, batches))
        for batch in batches:
            self._computing = batch
            with self._kernels.computing(self._tokens(batch)) if compiles else nullcontext():
                yield batch

    @cached_property
    def _cost(self) -> RowCost | None:
        return row_cost(self.policy)
