"""The answer to an out-of-memory error: what of a memory plan is lowered next. Pure.

In this order: the part that did not fit (micro-batches in the trainer; in the sampler its buffers, then the cache), the
engine's share, sleep of the sampler during the update, recomputation of activations. Each answer is stored with the job
and, if no other process had taken the memory, as the model's on this device.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from core.units import GIB
from worker.model.engine_sizes import SEQUENCES
from worker.model.sizing import SAFETY_SHARE, MemoryPlan, bucket, widths
from worker.out_of_memory import Shortage


@dataclass(frozen=True)
class PlanSizes:
    """The parts of a memory plan that can be lowered."""

    token_budget: int  # of a micro-batch
    cache_bytes: int
    sleeps: bool
    checkpointed: bool
    has_smallest_engine: bool = True  # beside its cache (EngineSizes.smallest)

    @classmethod
    def of(cls, plan: MemoryPlan) -> Self:
        is_smallest = plan.engine is None or plan.engine == plan.engine.smallest
        return cls(plan.token_budget, plan.cache_bytes, plan.sleeps, plan.checkpointed, is_smallest)

    @property
    def engine(self) -> tuple[int, bool, bool]:
        """The sizes with which engines start."""
        return self.cache_bytes, self.sleeps, self.has_smallest_engine

    def to_row(self) -> dict[str, Any]:
        return asdict(self)

    def within(self, limits: "SizeLimits") -> "PlanSizes":
        return PlanSizes(
            _least(self.token_budget, limits.token_budget),
            _least(self.cache_bytes, limits.cache_bytes),
            self.sleeps or limits.sleeps,
            self.checkpointed or limits.checkpointed,
            self.has_smallest_engine or limits.has_smallest_engine,
        )

    def __str__(self) -> str:
        parts = [
            f"micro-batches of {self.token_budget} tokens",
            f"a KV cache of {self.cache_bytes / GIB:.2f} GiB",
        ]
        if self.has_smallest_engine and self.cache_bytes:
            parts.append(f"at most {SEQUENCES[0]} sequences side by side")
        parts += ["sleep of the sampler during the update"] if self.sleeps else []
        parts += ["recomputation of activations"] if self.checkpointed else []
        return ", ".join(parts)


@dataclass(frozen=True)
class SizeLimits:
    """The sizes that were lowered. None or False: that part was not, so it may be larger elsewhere."""

    token_budget: int | None = None
    cache_bytes: int | None = None
    sleeps: bool = False
    checkpointed: bool = False
    has_smallest_engine: bool = False

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        return cls(**row)

    def to_row(self) -> dict[str, Any]:
        return asdict(self)

    def with_lowered(self, before: PlanSizes, after: PlanSizes) -> "SizeLimits":
        """With the part that was just lowered too."""
        tokens, cache = self.token_budget, self.cache_bytes
        if after.token_budget < before.token_budget:
            tokens = _least(after.token_budget, tokens)
        if after.cache_bytes < before.cache_bytes:
            cache = _least(after.cache_bytes, cache)
        return SizeLimits(
            tokens,
            cache,
            self.sleeps or (after.sleeps and not before.sleeps),
            self.checkpointed or (after.checkpointed and not before.checkpointed),
            self.has_smallest_engine or (after.has_smallest_engine and not before.has_smallest_engine),
        )


NOTHING_LOWERED = SizeLimits()


def _least(size: int, limit: int | None) -> int:
    return size if limit is None else min(size, limit)


def limited(plan: MemoryPlan, limits: SizeLimits) -> MemoryPlan:
    """The plan with nothing above these limits."""
    lowest = PlanSizes.of(plan).within(limits)
    if lowest == PlanSizes.of(plan):
        return plan
    share = lowest.token_budget / plan.token_budget
    engine = plan.engine
    if engine is not None:
        engine = (engine.smallest if lowest.has_smallest_engine else engine).within(lowest.cache_bytes)
    estimate = replace(
        plan.estimate,
        activations=int(plan.estimate.activations * share),
        attention=int(plan.estimate.attention * share**2),
        cache=lowest.cache_bytes,
        buffers=0 if lowest.has_smallest_engine else plan.estimate.buffers,
        sleeps=lowest.sleeps,
    )
    return replace(
        plan,
        token_budget=lowest.token_budget,
        cache_bytes=lowest.cache_bytes,
        checkpointed=lowest.checkpointed,
        estimate=estimate,
        engine=engine,
    )


@dataclass(frozen=True)
class Update:
    """The estimate of what an update needs beside all that is loaded before the first one, in bytes."""

    token_budget: int  # of the micro-batches that it is for
    most: int  # the largest token budget
    activations: int  # grows with the tokens
    attention: int  # grows with their square
    rest: int

    @classmethod
    def of(cls, plan: MemoryPlan, most: int, *, has_moments: bool = False) -> Self:
        """With `has_moments` they are loaded before, from a checkpoint."""
        found = plan.estimate
        # Of the four tensors of each weight the first update makes its gradient and, if it has none, its two moments.
        state = (found.adapter + found.optimizer) * (1 if has_moments else 3) // 4
        rest = state + found.head + (found.activations + found.head) // 10
        return cls(plan.token_budget, most, found.activations, found.attention, rest)

    def needs(self, tokens: int) -> int:
        share = tokens / self.token_budget
        return int(self.activations * share + self.attention * share**2) + self.rest


def fitted(sizes: PlanSizes, update: Update, free: int, capacity: int) -> tuple[int, PlanSizes]:
    """Return the bytes that the update needs, and the sizes with the largest micro-batches for the free bytes.

    Of all of the device, SAFETY_SHARE stays free. Without room for the smallest micro-batches the sizes have these: an
    out-of-memory error is answered then.
    """
    room = free - int(capacity * SAFETY_SHARE)
    smallest = min(sizes.token_budget, bucket(1))
    choices = [smallest, *widths(smallest, update.most), sizes.token_budget, update.most]
    fitting = [tokens for tokens in choices if tokens <= update.most and update.needs(tokens) <= room]
    tokens = max(fitting, default=smallest)
    return update.needs(tokens), replace(sizes, token_budget=tokens)


@dataclass(frozen=True)
class SizeBounds:
    """How far the sizes of a run can be lowered."""

    least_cache: int  # bytes for the longest sequence
    is_beside: bool  # an engine has the cache, on the trainer's device
    may_sleep: bool  # nothing is sampled during the update
    context_cache: int = (
        0  # bytes for one sequence of the engine's context; a smaller cache needs the smallest engine
    )


def allowed(limits: SizeLimits, bounds: SizeBounds) -> SizeLimits:
    """What of the limits, which another job may have found, a job with these bounds can begin with."""
    cache = None if limits.cache_bytes is None else max(limits.cache_bytes, bounds.least_cache)
    is_small = cache is not None and cache < bounds.context_cache
    return replace(
        limits,
        cache_bytes=cache,
        sleeps=limits.sleeps and bounds.may_sleep,
        has_smallest_engine=limits.has_smallest_engine or is_small,
    )


def lowered(sizes: PlanSizes, shortage: Shortage, bounds: SizeBounds) -> PlanSizes | None:
    """The sizes with which the work is tried again. None: nothing is left to lower."""
    half = _half(sizes, shortage)
    smaller_batches = (
        replace(sizes, token_budget=half) if shortage.divisible and half < sizes.token_budget else None
    )
    helps = shortage.place == "sampler" or (bounds.is_beside and not sizes.sleeps)
    cache = smaller_cache(sizes.cache_bytes, bounds.least_cache) if helps else None
    with_less_cache = None
    if cache is not None:
        has_smallest_engine = sizes.has_smallest_engine or cache < bounds.context_cache
        with_less_cache = replace(sizes, cache_bytes=cache, has_smallest_engine=has_smallest_engine)
    with_smallest_engine = (
        replace(sizes, has_smallest_engine=True) if helps and not sizes.has_smallest_engine else None
    )
    asleep = replace(sizes, sleeps=True) if bounds.may_sleep and not sizes.sleeps else None
    recomputed = None if sizes.checkpointed else replace(sizes, checkpointed=True)
    first = [smaller_batches, with_less_cache, with_smallest_engine]
    if shortage.place == "sampler":  # whose buffers may be larger than a whole cache
        first.reverse()
    return next((one for one in [*first, asleep, recomputed] if one is not None), None)


def smaller_cache(cache_bytes: int, least: int) -> int | None:
    """The bytes of the cache of an engine after an out-of-memory error. None: it is the least already."""
    return max(least, cache_bytes // 2) if cache_bytes > least else None


def _half(sizes: PlanSizes, shortage: Shortage) -> int:
    """Half of the micro-batch that did not fit. It may be smaller than the budget."""
    tokens = min(sizes.token_budget, shortage.tokens or sizes.token_budget)
    return max(1, tokens // 2)


def described(before: PlanSizes, after: PlanSizes, shortage: Shortage) -> str:
    """For the job's owner: what did not fit, and what was done."""
    return f"Out of memory in the {shortage.place}{numbers(shortage)}. {changed(before, after)}."


def numbers(shortage: Shortage) -> str:
    known = {"wanted": shortage.wanted, "free": shortage.free}
    parts = [f"{size / GIB:.2f} GiB {name}" for name, size in known.items() if size is not None]
    parts += [f"a micro-batch of {shortage.tokens} tokens"] if shortage.tokens else []
    return f" ({', '.join(parts)})" if parts else ""


def changed(before: PlanSizes, after: PlanSizes) -> str:
    if after.token_budget != before.token_budget:
        return f"Micro-batches have up to {after.token_budget} tokens now, not {before.token_budget}"
    if after.cache_bytes != before.cache_bytes:
        return f"The KV cache has {after.cache_bytes / GIB:.2f} GiB now, not {before.cache_bytes / GIB:.2f}"
    if after.has_smallest_engine != before.has_smallest_engine:
        return f"The sampler decodes at most {SEQUENCES[0]} sequences side by side now, in smaller steps"
    if after.sleeps != before.sleeps:
        return "The sampler sleeps during the update from now on"
    return "Activations are computed twice from now on"


def event_data(before: PlanSizes, after: PlanSizes | None, shortage: Shortage) -> dict[str, Any]:
    return {
        "out_of_memory": {
            "place": shortage.place,
            "reason": shortage.reason,
            "wanted_bytes": shortage.wanted,
            "free_bytes": shortage.free,
            "micro_batch_tokens": shortage.tokens or None,
            "before": before.to_row(),
            "after": None if after is None else after.to_row(),
        }
    }


def refusal(sizes: PlanSizes, shortage: Shortage) -> str:
    """The reason for which a job fails when nothing is left to lower."""
    return (
        f"The {shortage.place} needs more memory than the device has{numbers(shortage)}, also with the lowest sizes: "
        f"{sizes}. Choose a smaller model, max_completion_tokens or lora.rank, or a GPU with more memory. "
        f"The error: {shortage.reason}"
    )
