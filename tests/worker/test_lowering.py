"""An out-of-memory error is an answer: what is lowered, and that the step then has the same gradient."""

import asyncio
import copy
import queue
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore
from torch.utils._python_dispatch import TorchDispatchMode

from core.database.tables import Event, Job, MemoryLimit
from tests.fakes import RecordingTrainer, learn
from tests.present import present, untyped
from tests.worker.conftest import Bench
from tests.worker.test_memory import LLAMA_8B, llama_shape
from tests.worker.test_training import asked, relative_difference
from tests.worker.test_updates import MIXED, sampled
from worker import process
from worker.attempt import Attempt
from worker.child import status_of
from worker.engine.client import EngineLost
from worker.engine.options import EngineConfig
from worker.model import memory
from worker.model.engine_sizes import EngineShare, EngineSizes
from worker.model.lowering import PlanSizes, SizeBounds, SizeLimits, Update, allowed, fitted, limited, lowered
from worker.model.memory import DeviceMemory
from worker.model.policy import Base, Policy
from worker.model.sizing import Estimate, MemoryPlan, Workload
from worker.model.targets import LinearLayer
from worker.out_of_memory import FirstAnswer, LostPass, OutOfDeviceMemory, Shortage, is_out_of_memory, lacking
from worker.prepare.run_memory import RunMemory, room_to_sleep
from worker.recording import plan_record
from worker.recording.plan_record import PlanRecord
from worker.refusals import LoweredForNextAttempt, MemoryTaken, NotEnoughMemory
from worker.run import RunOutcome
from worker.sampling.own import OwnEngine, OwnEngines
from worker.sharing.base import RunsAlone
from worker.training.contributions import contribution_of
from worker.training.distributed import carry_out, gradient_of
from worker.training.gradient import LocalGradient
from worker.training.loss import Batch, StepValues
from worker.training.policy_loss import PolicyLoss
from worker.training.world import World

GIB = 2**30
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 40.00 GiB memory in use."
)
SIZES = PlanSizes(token_budget=2048, cache_bytes=8 * GIB, sleeps=False, checkpointed=False)


@contextmanager
def device_of(policy: Policy, tokens: int) -> Iterator[None]:
    """A device whose memory suffices for micro-batches of so many tokens, with padding."""

    def refuse(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments[0].numel() > tokens:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    hook = policy.causal.get_input_embeddings().register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def address_space(room: int) -> Iterator[None]:
    """Let this process map at most `room` further bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@dataclass
class Steps:
    """Lowers the sizes of a run that has no engine."""

    sizes: PlanSizes = SIZES
    shortages: list[Shortage] = field(default_factory=list)

    def fit(self, free: int) -> PlanSizes | None:
        return None

    def lower(self, shortage: Shortage) -> PlanSizes:
        self.shortages.append(shortage)
        smaller = lowered(self.sizes, shortage, SizeBounds(8 * GIB, is_beside=False, may_sleep=False))
        if smaller is None:
            raise OutOfDeviceMemory(shortage)
        self.sizes = smaller
        return smaller


def longest(groups: Sequence[Any]) -> int:
    """Tokens of the largest micro-batch that cannot be divided."""
    return max(
        len(group.prompt.ids) + len(rollout.output_ids_T) - 1
        for group in groups
        for rollout in group.rollouts_G
    )


class FullAtConcatenation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A device with no room for the values of a micro-batch that is put together from others."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.cat.default:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return func(*args, **(kwargs or {}))


def normalize_one(loss: PolicyLoss, batches: Sequence[Batch], mean: float, std: float) -> None:
    loss.normalize(batches[:1], mean, std)
    raise torch.OutOfMemoryError(OUT_OF_MEMORY)


HYPERPARAMETERS: list[dict[str, Any]] = [
    {"loss": "grpo"},
    {"loss": "gspo", "updates_per_batch": 2},
    {"loss": "dapo", "updates_per_batch": 2, "mini_batches": 2, "kl": 0.1},
    {"loss": "reinforce_plus_plus"},
    {"loss": "ppo", "updates_per_batch": 2},
]


class TestTheGradient:
    @pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS, ids=lambda one: str(one["loss"]))
    def test_of_a_step_that_ran_out_of_memory_is_that_of_one_that_did_not(
        self, make_policy: Callable[..., Policy], hyperparameters: dict[str, Any]
    ) -> None:
        policy = make_policy(moved=True)
        groups, settings = sampled(policy, MIXED), asked(hyperparameters)
        plain = RecordingTrainer(policy, settings, token_budget=4096)
        learn(plain, groups)
        lower = Steps()
        trainer = RecordingTrainer(policy, settings, token_budget=4096, memory=lower)

        with device_of(policy, longest(groups)):
            update = learn(trainer, groups)

        assert lower.shortages and lower.sizes.token_budget < 2048
        assert not lower.sizes.checkpointed
        assert update.trained_sequences
        assert len(trainer.gradients) == len(plain.gradients)
        for ours, expected in zip(trainer.gradients, plain.gradients, strict=True):
            assert relative_difference(ours, expected) < 1e-5

    def test_is_complete_after_errors_of_the_kernel_in_a_process_with_little_memory(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        """No error is made up here: this process may map few further bytes, and torch's allocator fails."""
        policy = make_policy(moved=True)
        groups, settings = sampled(policy, MIXED), asked({"loss": "grpo"})
        plain = RecordingTrainer(policy, settings, token_budget=4096)
        learn(plain, groups)
        lower = Steps()
        trainer = RecordingTrainer(policy, settings, token_budget=4096, memory=lower)
        room = 2 * GIB
        each = room // 2 // longest(groups)  # the other half is for what else is mapped meanwhile

        def take(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            torch.empty(arguments[0].numel() * each, dtype=torch.uint8)  # mapped, and never touched

        hook = policy.causal.get_input_embeddings().register_forward_pre_hook(take)
        with address_space(room):
            update = learn(trainer, groups)
        hook.remove()

        assert lower.shortages and all(one.wanted and one.divisible for one in lower.shortages)
        assert lower.sizes.token_budget < 2048
        assert update.trained_sequences
        for ours, expected in zip(trainer.gradients, plain.gradients, strict=True):
            assert relative_difference(ours, expected) < 1e-5

    @pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS[1:3], ids=lambda one: str(one["loss"]))
    def test_keeps_every_answer_however_often_the_micro_batches_are_halved(
        self, make_policy: Callable[..., Policy], hyperparameters: dict[str, Any]
    ) -> None:
        policy = make_policy(moved=True)
        groups, settings = sampled(policy, MIXED[:1] * 5), asked(hyperparameters)
        plain = RecordingTrainer(policy, settings, token_budget=4096)
        learn(plain, groups)
        lower = Steps()
        trainer = RecordingTrainer(policy, settings, token_budget=4096, memory=lower)

        with device_of(policy, longest(groups)):
            learn(trainer, groups)

        assert len(lower.shortages) > 1
        for ours, expected in zip(trainer.gradients, plain.gradients, strict=True):
            assert relative_difference(ours, expected) < 1e-5

    def test_has_advantages_that_were_normalized_once(self, make_policy: Callable[..., Policy]) -> None:
        """The first micro-batch has room for its normalized advantages, and the second has none."""
        policy = make_policy(moved=True)
        groups, settings = sampled(policy, MIXED), asked({"loss": "reinforce_plus_plus"})
        packs = [present(contribution_of(group, settings, policy.text).pack) for group in groups]
        found = []
        for fails in (False, True):
            loss = PolicyLoss(policy, settings)
            gradient = LocalGradient(loss, token_budget=longest(groups))
            gradient.remember(packs, 0)
            gradient.of_micro_batches(PolicyLoss.reward_tokens, settings.kl)
            if fails:
                with pytest.raises(OutOfDeviceMemory):
                    gradient.of_micro_batches(normalize_one, 0.5, 2.0)
                gradient.resize(SIZES)
            gradient.of_micro_batches(PolicyLoss.normalize, 0.5, 2.0)
            gradient.repeat(StepValues())
            gradient.collect()
            found.append([present(one.grad) for one in policy.trainable])
            for one in policy.trainable:
                one.grad = None

        assert relative_difference(*found) < 1e-5

    def test_loses_no_pack_when_the_error_comes_while_they_are_divided_again(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        policy = make_policy(moved=True)
        groups, settings = sampled(policy, MIXED), asked({"loss": "gspo", "updates_per_batch": 2})
        packs = [present(contribution_of(group, settings, policy.text).pack) for group in groups]
        gradient = LocalGradient(PolicyLoss(policy, settings), token_budget=4096)
        gradient.add(packs, StepValues())
        tokens = gradient.collect().tokens

        with FullAtConcatenation():  # type: ignore[no-untyped-call]
            gradient.resize(replace(SIZES, token_budget=longest(groups)))
        assert gradient.shortage is not None
        gradient.resize(replace(SIZES, token_budget=longest(groups)))
        gradient.repeat(StepValues())

        assert gradient.collect().tokens == tokens

    def test_keeps_no_part_of_what_was_added_up_before_the_error(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        """Groups of unequal length: the first micro-batches fit, and a later one does not."""
        policy = make_policy(moved=True)
        groups, settings = sampled(policy, MIXED), asked({"loss": "grpo", "overlap": True})
        plain = RecordingTrainer(policy, settings, token_budget=1)
        learn(plain, groups)
        lower = Steps(PlanSizes(1, 0, sleeps=False, checkpointed=False))
        trainer = RecordingTrainer(policy, settings, token_budget=1, memory=lower)

        with device_of(policy, longest(groups) - 1), pytest.raises(OutOfDeviceMemory):
            learn(trainer, groups)

        assert [one.divisible for one in lower.shortages] == [False, False]
        assert lower.sizes.checkpointed

    def test_gives_its_memory_back_once_after_the_step_before_smaller_engines_start(
        self, make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        released: list[str] = []
        monkeypatch.setattr(memory, "release_unused", released.append)
        gradient = LocalGradient(PolicyLoss(make_policy(), asked({"loss": "grpo"})), token_budget=4096)
        at_ends = []
        for cache in (8 * GIB, 4 * GIB, 4 * GIB):
            gradient.resize(replace(SIZES, cache_bytes=cache))
            for _ in range(2):
                released.clear()
                gradient.end()
                at_ends.append(len(released))

        assert at_ends == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(OUT_OF_MEMORY),
        MemoryError(),
        RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:119"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        RuntimeError("CUDA out of memory occurred when warming up sampler with 256 dummy requests."),
        ValueError("Free memory on device cuda:0 (3.5/79.1 GiB) on startup is less than desired"),
        "OutOfMemoryError: CUDA out of memory.",
    ],
    ids=lambda error: str(error)[:30],
)
def test_errors_of_torch_of_cuda_and_of_vllm_are_out_of_memory_errors(error: Exception | str) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("out of range"),
        OSError(12, ""),
        # The cache is too small for one sequence. A smaller one would not help.
        ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ],
)
def test_other_errors_are_none(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("error", "of_gpu_run", "of_cpu_run"),
    [
        (torch.OutOfMemoryError(OUT_OF_MEMORY), "cuda", "cpu"),
        (MemoryError(), "cpu", "cpu"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            "cpu",
            "cpu",
        ),
        ("MemoryError: ", "cpu", "cpu"),
        (ValueError("out of range"), None, None),
    ],
    ids=lambda error: str(error)[:30],
)
def test_memory_that_lacks_is_main_memory_if_it_is_not_that_of_the_runs_device(
    error: Exception | str, of_gpu_run: str | None, of_cpu_run: str | None
) -> None:
    assert (lacking(error, "cuda"), lacking(error, "cpu")) == (of_gpu_run, of_cpu_run)


class OnGpu(Policy):
    """Says that it computes on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def test_a_lack_of_main_memory_makes_no_micro_batch_of_a_gpu_smaller(tiny_base: Base) -> None:
    policy = OnGpu(copy.deepcopy(tiny_base), rank=4, alpha=8, seed=0)
    gradient = LocalGradient(PolicyLoss(policy, asked({"loss": "grpo"})), token_budget=4096)

    def compute(loss: PolicyLoss, batches: Iterator[Batch]) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        gradient.of_packs(compute, [])
    assert gradient.shortage is None


def test_the_numbers_are_those_of_the_error() -> None:
    of_torch = Shortage.of(torch.OutOfMemoryError(OUT_OF_MEMORY), "trainer", free=1)
    of_vllm = Shortage.of(
        "ValueError: Free memory on device cuda:0 (3.5/79.1 GiB) on startup is less", "sampler"
    )

    assert (of_torch.wanted, of_torch.free) == (2.5 * GIB, 1.25 * GIB)
    assert (of_vllm.wanted, of_vllm.free) == (None, 3.5 * GIB)
    assert Shortage.of(RuntimeError("CUDA error: out of memory"), "trainer", free=7).free == 7


def answers(shortage: Shortage, bounds: SizeBounds, sizes: PlanSizes = SIZES) -> list[PlanSizes]:
    """What is lowered while nothing suffices."""
    found: list[PlanSizes] = []
    while (smaller := lowered(sizes, shortage, bounds)) is not None:
        sizes = smaller
        found.append(smaller)
    return found


COLOCATED = SizeBounds(2 * GIB, is_beside=True, may_sleep=True)


class TestWhatIsLowered:
    def test_is_what_did_not_fit_first_then_the_engine_then_its_memory_then_time(self) -> None:
        fits_if_divided = Shortage("trainer", "", tokens=1024, divisible=True)
        whole = Shortage("trainer", "", tokens=1024)

        assert lowered(SIZES, fits_if_divided, COLOCATED) == PlanSizes(512, 8 * GIB, False, False)
        assert answers(whole, COLOCATED) == [
            PlanSizes(2048, 4 * GIB, False, False),
            PlanSizes(2048, 2 * GIB, False, False),
            PlanSizes(2048, 2 * GIB, True, False),
            PlanSizes(2048, 2 * GIB, True, True),
        ]

    def test_is_no_budget_that_is_one_token_already(self) -> None:
        divisible = Shortage("trainer", "", tokens=26, divisible=True)
        smallest = PlanSizes(1, 0, sleeps=False, checkpointed=True)

        assert lowered(smallest, divisible, SizeBounds(0, False, False)) is None

    def test_of_an_engine_that_does_not_fit_are_its_buffers_before_its_cache(self) -> None:
        large = replace(SIZES, has_smallest_engine=False)
        small = replace(large, has_smallest_engine=True)

        assert answers(Shortage("sampler", ""), COLOCATED, large)[:3] == [
            small,
            replace(small, cache_bytes=4 * GIB),
            replace(small, cache_bytes=2 * GIB),
        ]

    def test_an_engine_whose_cache_is_less_than_its_context_needs_has_the_exact_context(self) -> None:
        large = replace(SIZES, has_smallest_engine=False)
        rounded = replace(COLOCATED, context_cache=3 * GIB)

        first, second, *_ = answers(Shortage("trainer", ""), rounded, large)

        assert (first.cache_bytes, first.has_smallest_engine) == (4 * GIB, False)
        assert (second.cache_bytes, second.has_smallest_engine) == (2 * GIB, True)

    def test_of_an_engine_that_does_not_fit_is_its_cache(self) -> None:
        assert lowered(SIZES, Shortage("sampler", ""), COLOCATED) == PlanSizes(2048, 4 * GIB, False, False)

    def test_is_not_the_cache_of_an_engine_that_has_its_own_device_or_sleeps(self) -> None:
        whole = Shortage("trainer", "", tokens=1024)
        apart, asleep = SizeBounds(GIB, is_beside=False, may_sleep=False), PlanSizes(64, 8 * GIB, True, False)

        assert answers(whole, apart) == [PlanSizes(2048, 8 * GIB, False, True)]
        assert answers(whole, COLOCATED, asleep) == [PlanSizes(64, 8 * GIB, True, True)]


def test_a_job_begins_with_no_limit_of_another_one_that_is_outside_of_its_own_bounds() -> None:
    """That one had shorter answers, or sampled nothing while it learned."""
    limits = SizeLimits(1024, GIB, sleeps=True, checkpointed=True)

    assert allowed(limits, COLOCATED) == replace(limits, cache_bytes=2 * GIB)
    assert allowed(limits, replace(COLOCATED, may_sleep=False)) == replace(
        limits, cache_bytes=2 * GIB, sleeps=False
    )
    assert allowed(SizeLimits(), COLOCATED) == SizeLimits()


def test_a_job_begins_with_a_cache_that_is_too_small_for_a_rounded_context() -> None:
    found = allowed(SizeLimits(cache_bytes=4 * GIB), replace(COLOCATED, context_cache=5 * GIB))

    assert (found.cache_bytes, found.has_smallest_engine) == (4 * GIB, True)


def test_a_plan_within_limits_has_engines_of_the_smallest_sizes() -> None:
    engine = EngineSizes(3072, 1024, 8192, longest=2100)
    estimate = Estimate(2, 16 * GIB, 0, GIB, 0, GIB, 8 * GIB, 4 * GIB, buffers=GIB)
    plan = MemoryPlan(2048, 8 * GIB, checkpointed=False, estimate=estimate, engine=engine)

    lower = limited(plan, SizeLimits(has_smallest_engine=True))

    assert (lower.engine, lower.estimate.buffers) == (EngineSizes(2100, longest=2100), 0)
    assert PlanSizes.of(lower).has_smallest_engine and not PlanSizes.of(plan).has_smallest_engine


def test_an_engine_sleeps_only_if_main_memory_has_room_for_its_weights() -> None:
    """Pinned memory takes up to twice as much."""
    shape = replace(llama_shape(*LLAMA_8B), parameters=4, adaptable=(LinearLayer("q_proj", "attention", 3),))
    base = untyped(SimpleNamespace(shape=shape, engines=SimpleNamespace(engines=2, tensor_parallel=1)))
    work = Workload(rank=9, prompt=1, completion=1, in_flight=2)

    weights, adapter = 4 * 2, 16 * 3 * 2  # of a rank between 8 and 16, vLLM allocates 16
    least = 2 * 2 * (weights + adapter)
    assert [room_to_sleep(base, work, free) for free in (least - 1, least)] == [False, True]


def device(taken: int) -> DeviceMemory:
    """80 GiB, of which this process uses 40."""
    return DeviceMemory(lambda kind: 40 * GIB - taken, lambda kind: 80 * GIB, lambda kind: 40 * GIB)


RECORD = PlanRecord(
    "cuda",
    "H100",
    "vllm, rank 16, 1024 tokens",
    SIZES,
    COLOCATED,
    engine_bytes=10 * GIB,
    measured_bytes=20 * GIB,
)
UPDATE = Update(token_budget=2048, most=8192, activations=8 * GIB, attention=GIB, rest=3 * GIB)
WHOLE = Shortage("trainer", "CUDA out of memory", wanted=3 * GIB, free=GIB, tokens=1024)


def run_memory_of(
    attempt: Attempt, memory: DeviceMemory, *, record: PlanRecord = RECORD, engines_rest: bool = True
) -> RunMemory:
    """The memory of a run whose sizes are those of the record."""
    return RunMemory(
        attempt, record, engines_rest=engines_rest, update=UPDATE, engine=EngineSizes(2048), device=memory
    )


DIVISIBLE = replace(WHOLE, divisible=True)


class TestTheMeasuredUpdate:
    @pytest.mark.parametrize(
        ("free", "tokens"),
        [(70, 8192), (16, 2048), (15.9, 1920), (8, 128)],
        ids=["most", "as planned", "less", "none"],
    )
    def test_has_the_largest_micro_batches_that_leave_a_twentieth_of_the_device(
        self, free: float, tokens: int
    ) -> None:
        needed, sizes = fitted(SIZES, UPDATE, int(free * GIB), 80 * GIB)

        assert sizes == replace(SIZES, token_budget=tokens)
        assert tokens == 128 or needed <= (free - 4) * GIB

    def test_of_a_job_that_resumes_needs_no_memory_for_the_moments_that_are_loaded(self) -> None:
        estimate = Estimate(
            copies=1,
            weights=8 * GIB,
            adapter=0,
            activations=GIB,
            attention=0,
            head=0,
            cache=0,
            margin=0,
            optimizer=16 * GIB,
        )
        plan = MemoryPlan(2048, 0, checkpointed=False, estimate=estimate)

        first, resumed = (Update.of(plan, 8192, has_moments=loaded) for loaded in (False, True))

        assert first.needs(2048) - resumed.needs(2048) == 8 * GIB, "two of four tensors"

    def test_is_recorded_with_both_numbers_and_begins_the_first_computation(
        self, bench: Bench, make_policy: Callable[..., Policy]
    ) -> None:
        run_memory = run_memory_of(bench.attempt(), device(10 * GIB))

        assert run_memory.fit(15 * GIB) == replace(SIZES, token_budget=1792) == run_memory.sizes

        row = bench.job().memory
        assert row is not None and row["measured_bytes"] == 15 * GIB
        assert row["needed_bytes"] == UPDATE.needs(1792)
        with bench.database.read() as session:
            message = session.query(Event).order_by(Event.seq.desc()).first()
        assert message is not None and message.message == (
            "15.0 GiB are free for the update, which needs 10.8 GiB with micro-batches of 1792 tokens; 2048 were "
            "planned."
        )

    def test_is_that_of_the_gradient_before_it_computes_anything(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        policy = make_policy(moved=True)

        class Measured(Steps):
            def fit(self, free: int) -> PlanSizes:
                assert free > 0
                return replace(self.sizes, token_budget=64)

        gradient = gradient_of(PolicyLoss(policy, asked({"loss": "grpo"})), 4096, None, memory=Measured())
        before = gradient.capacity
        gradient.add([], StepValues())

        assert (before, gradient.capacity) == (4096, 64)


class Engines:
    """A sampler that records the sizes that its engines get."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def resize(self, share: EngineShare, *, sleeps: bool) -> None:
        self.told.append((share.cache_bytes // GIB, sleeps))

    def sleep(self) -> None:
        self.told.append("sleep")


def events_of(bench: Bench) -> Sequence[Event]:
    """With the numbers of a shortage."""
    with bench.database.read() as session:
        found = session.query(Event).order_by(Event.seq).all()
    return [event for event in found if "out_of_memory" in (event.data or {})]


class TestTheRecord:
    def test_lets_the_next_attempt_and_the_next_job_begin_there(self, bench: Bench) -> None:
        run_memory = run_memory_of(bench.attempt(), device(10 * GIB))
        engines = Engines()
        run_memory.use(engines)

        after = run_memory.lower(WHOLE)

        assert (after.cache_bytes, engines.told) == (4 * GIB, [(4, False)])
        assert plan_record.limits_of(bench.attempt(), "H100", RECORD.workload) == SizeLimits(
            cache_bytes=4 * GIB
        )
        with bench.database.write() as session:
            session.query(Job).one().memory = None
        assert plan_record.limits_of(bench.attempt(), "H100", RECORD.workload) == SizeLimits(
            cache_bytes=4 * GIB
        )
        assert plan_record.limits_of(bench.attempt(), "A100", RECORD.workload) == SizeLimits()

    def test_has_the_numbers_in_an_event(self, bench: Bench) -> None:
        run_memory = run_memory_of(bench.attempt(), device(10 * GIB))
        run_memory.use(Engines())

        run_memory.lower(WHOLE)

        with bench.database.read() as session:
            event = session.query(Event).order_by(Event.seq.desc()).first()
        assert event is not None
        assert event.message == (
            "Out of memory in the trainer (3.00 GiB wanted, 1.00 GiB free, a micro-batch of 1024 tokens). The KV cache "
            "has 4.00 GiB now, not 8.00."
        )
        numbers = event.data["out_of_memory"]
        assert (numbers["wanted_bytes"], numbers["free_bytes"]) == (3 * GIB, GIB)
        assert (numbers["before"]["cache_bytes"], numbers["after"]["cache_bytes"]) == (8 * GIB, 4 * GIB)

    def test_forgets_a_shortage_that_other_processes_made(self, bench: Bench) -> None:
        run_memory = run_memory_of(bench.attempt(), device(30 * GIB))
        run_memory.use(Engines())

        assert run_memory.lower(WHOLE).cache_bytes == 4 * GIB
        assert plan_record.limits_of(bench.attempt(), "H100", RECORD.workload) == SizeLimits()

    @pytest.mark.parametrize(
        ("record", "shortage"),
        [
            (replace(RECORD, sizes=replace(SIZES, sleeps=True, checkpointed=True)), DIVISIBLE),
            (RECORD, Shortage("sampler", "Free memory on device cuda:0 (40/80 GiB) on startup is less")),
        ],
        ids=["asleep", "ended"],
    )
    def test_counts_no_memory_of_an_engine_that_has_none(
        self, bench: Bench, record: PlanRecord, shortage: Shortage
    ) -> None:
        plan_record.begin(bench.attempt(), record)

        after = plan_record.lower(bench.attempt(), record, shortage, device(9 * GIB))

        assert after.sizes != record.sizes and after.lowered == SizeLimits()
        assert plan_record.limits_of(bench.attempt(), "H100", RECORD.workload) == SizeLimits()

    @pytest.mark.parametrize(
        "record",
        [replace(RECORD, devices=2), replace(RECORD, measured_bytes=None)],
        ids=["on one of several devices", "before the engine has started"],
    )
    def test_of_a_shortage_that_others_may_have_made_is_only_of_the_job(
        self, bench: Bench, record: PlanRecord
    ) -> None:
        after = plan_record.lower(bench.attempt(), record, WHOLE, device(10 * GIB))

        assert plan_record.limits_of(bench.attempt(), "H100", RECORD.workload) == after.lowered
        with bench.database.write() as session:
            session.query(Job).one().memory = None
        assert plan_record.limits_of(bench.attempt(), "H100", RECORD.workload) == SizeLimits()

    def test_has_only_what_was_lowered_by_any_job(self, bench: Bench) -> None:
        """The other parts of this job were small for a reason of its own."""
        small = replace(RECORD, sizes=replace(SIZES, cache_bytes=3 * GIB))
        plan_record.lower(bench.attempt(), small, DIVISIBLE, device(10 * GIB))
        plan_record.lower(bench.attempt(), RECORD, WHOLE, device(10 * GIB))

        with bench.database.write() as session:
            session.query(Job).one().memory = None

        known = plan_record.limits_of(bench.attempt(), "H100", RECORD.workload)
        assert known == SizeLimits(token_budget=512, cache_bytes=4 * GIB)
        assert PlanSizes(8192, 2 * GIB, False, False).within(known) == PlanSizes(512, 2 * GIB, False, False)

    def test_of_a_model_counts_for_a_week(self, bench: Bench) -> None:
        plan_record.lower(bench.attempt(), RECORD, WHOLE, device(10 * GIB))
        with bench.database.write() as session:
            session.query(Job).one().memory = None
            session.query(MemoryLimit).one().updated_at -= 7 * 24 * 3600 + 60

        assert plan_record.limits_of(bench.attempt(), "H100", RECORD.workload) == SizeLimits()

    def test_takes_no_process_that_starts_meanwhile_for_the_engine(self, bench: Bench) -> None:
        taken = [0]
        memory = DeviceMemory(lambda kind: 40 * GIB - taken[0], lambda kind: 80 * GIB, lambda kind: 40 * GIB)
        run_memory = run_memory_of(bench.attempt(), memory)
        taken[0] = 30 * GIB

        run_memory.fit(20 * GIB)

        row = present(bench.job().memory)
        assert row["engine_bytes"] == 11 * GIB

    def test_ends_with_the_figures_and_remedies_when_nothing_is_left(self, bench: Bench) -> None:
        least = replace(RECORD, sizes=PlanSizes(64, 2 * GIB, sleeps=True, checkpointed=True))
        ours, others = (
            run_memory_of(bench.attempt(), device(taken * GIB), record=least) for taken in (2, 30)
        )

        with pytest.raises(
            NotEnoughMemory, match=r"3\.00 GiB wanted.*micro-batches of 64 tokens.*Choose a smaller"
        ):
            ours.lower(WHOLE)
        with pytest.raises(MemoryTaken):
            others.lower(WHOLE)

    def test_ends_the_attempt_if_the_engines_are_sampling(self, bench: Bench) -> None:
        run_memory = run_memory_of(bench.attempt(), device(0), engines_rest=False)
        run_memory.use(Engines())

        with pytest.raises(LoweredForNextAttempt):
            run_memory.lower(WHOLE)

        lowered_sizes = plan_record.limits_of(bench.attempt(), "H100", RECORD.workload)
        assert lowered_sizes.cache_bytes == 4 * GIB

    def test_of_an_engine_lowers_its_cache_until_the_attempt_has_to_end(self, bench: Bench) -> None:
        run_memory = run_memory_of(bench.attempt(), device(0))

        shares = [run_memory.lower_engine(Shortage("sampler", "")) for _ in range(2)]
        assert [share.cache_bytes // GIB for share in shares] == [4, 2]
        with pytest.raises(LoweredForNextAttempt):
            run_memory.lower_engine(Shortage("sampler", ""))
        assert run_memory.sizes.sleeps

    def test_has_the_engines_sleep_before_a_step_once_the_sizes_say_so(self, bench: Bench) -> None:
        run_memory = run_memory_of(
            bench.attempt(), device(0), record=replace(RECORD, sizes=replace(SIZES, cache_bytes=2 * GIB))
        )
        engines = Engines()
        run_memory.use(engines)

        run_memory.before_step()
        run_memory.lower(WHOLE)
        run_memory.before_step()

        assert engines.told == [(2, True), "sleep"]

    def test_an_error_after_which_the_attempt_cannot_go_on_lowers_the_next_one(self, bench: Bench) -> None:
        plan_record.begin(
            bench.attempt(), replace(RECORD, device="cpu", bounds=replace(COLOCATED, is_beside=False))
        )

        def run() -> RunOutcome:
            with plan_record.lowering_for_next_attempt(bench.attempt(), device(0)):
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)

        assert status_of(bench.attempt(), run) == process.PUT_OFF
        job = bench.job()
        assert (job.status, job.failures) == ("queued", 0)
        assert job.memory is not None and job.memory["sizes"]["sleeps"]

    def test_is_lowered_once_when_all_ranks_of_a_pass_run_out_of_memory(self, bench: Bench) -> None:
        """Rank 0 has its own error, and hears of another rank's in a thread."""

        class Waits(Exception):
            """Stands for the end of the process by the first thread."""

        def wait() -> None:
            raise Waits

        attempt = bench.attempt(first_answer=FirstAnswer(wait))
        plan_record.begin(attempt, RECORD)
        for error, ends in ((LostPass(WHOLE), LoweredForNextAttempt), (OutOfDeviceMemory(WHOLE), Waits)):
            with pytest.raises(ends), plan_record.lowering_for_next_attempt(attempt, device(0)):
                raise error

        row = present(bench.job().memory)
        assert row["sizes"]["cache_bytes"] == 4 * GIB
        assert [event.message[:13] for event in events_of(bench)] == ["Out of memory"]

    @pytest.mark.parametrize(
        ("device_name", "error", "words", "wanted"),
        [
            (
                "cuda",
                RuntimeError(
                    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes."
                ),
                ", not of the GPU's",
                "8.00 GiB wanted, ",
            ),
            ("cpu", MemoryError(), "", ""),
        ],
    )
    def test_a_lack_of_main_memory_lowers_nothing_and_has_its_own_remedy(
        self,
        bench: Bench,
        device_name: str,
        error: Exception,
        words: str,
        wanted: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        plan_record.begin(bench.attempt(), replace(RECORD, device=device_name))

        def run() -> RunOutcome:
            with plan_record.lowering_for_next_attempt(bench.attempt(), device(0)):
                raise error

        assert status_of(bench.attempt(), run) == process.FAILED
        assert present(bench.job().memory)["sizes"] == SIZES.to_row()
        message = capsys.readouterr().err
        assert message.startswith(
            f"Out of main memory{words} ({wanted}40.00 GiB free). Give the worker's machine"
        )

    @pytest.mark.parametrize("is_shared", [False, True], ids=["of another process", "of another job"])
    def test_an_attempt_that_would_begin_with_the_same_sizes_waits_until_the_memory_is_free(
        self, bench: Bench, is_shared: bool
    ) -> None:
        attempt = replace(bench.attempt(), shared=untyped(object()) if is_shared else None)
        memory = device(0 if is_shared else 30 * GIB)
        plan_record.begin(attempt, RECORD)
        run_memory = run_memory_of(attempt, memory, engines_rest=False)
        waits = RunsAlone if is_shared else MemoryTaken

        with pytest.raises(waits):
            run_memory.lower(WHOLE)
        with pytest.raises(waits), plan_record.lowering_for_next_attempt(attempt, memory):
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

        assert plan_record.limits_of(attempt, "H100", RECORD.workload) == SizeLimits()

    @pytest.mark.parametrize("answer", [MemoryTaken("cuda"), NotEnoughMemory("for the weights")])
    def test_an_answer_to_such_an_error_is_not_answered_again(self, bench: Bench, answer: Exception) -> None:
        with pytest.raises(type(answer)), plan_record.lowering_for_next_attempt(bench.attempt()):
            raise answer from torch.OutOfMemoryError(OUT_OF_MEMORY)

        assert bench.job().memory is None


class Ranks:
    """The two ranks of a run as threads. A rank that waits for one that never comes fails after a while."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.shared: dict[int, Any] = {}
        self.orders: queue.Queue[Any] = queue.Queue()


@dataclass
class ThreadWorld:
    """Stands in for World, of one of two threads."""

    ranks: Ranks
    rank: int
    size: int = 2

    def giving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def give(self, orders_R: Sequence[Any]) -> None:
        self.ranks.orders.put(orders_R[1])

    def _exchange(self, value: Any) -> list[Any]:
        self.ranks.shared[self.rank] = value
        self.ranks.barrier.wait()
        values = [self.ranks.shared[rank] for rank in range(self.size)]
        self.ranks.barrier.wait()
        return values

    def gather(self, value: Any) -> list[Any]:
        values = self._exchange(value)
        return values if self.rank == 0 else []

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        [first, _] = self._exchange([one.detach().clone() for one in tensors])
        with torch.no_grad():
            for tensor, value in zip(tensors, first, strict=True):
                tensor.copy_(value)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        both = self._exchange([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        for parameter, one, other in zip(parameters, *both, strict=True):
            parameter.grad = one + other if self.rank == 0 else None


@pytest.mark.parametrize("small", [0, 1])
def test_ranks_lower_their_sizes_together_whichever_of_them_ran_out_of_memory(
    make_policy: Callable[..., Policy], small: int
) -> None:
    settings, policies = asked({"loss": "grpo"}), [make_policy(moved=True) for _ in range(3)]
    groups = sampled(policies[0], MIXED)
    packs = [present(contribution_of(group, settings, policies[0].text).pack) for group in groups]
    losses = [PolicyLoss(policy, settings) for policy in policies]
    expected = gradient_of(losses[2], 4096, None)
    expected.add(packs, StepValues())
    sums = expected.collect()
    ranks, lower = Ranks(), Steps()
    follower = LocalGradient(losses[1], token_budget=4096, world=untyped(ThreadWorld(ranks, 1)))

    def follow() -> None:
        while (order := ranks.orders.get()) is not None:
            carry_out(order, follower, untyped(ThreadWorld(ranks, 1)))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    gradient = gradient_of(losses[0], 4096, untyped(ThreadWorld(ranks, 0)), memory=lower)
    with device_of(policies[small], longest(groups)):
        gradient.add(packs, StepValues())
        together = gradient.collect()
    ranks.orders.put(None)
    thread.join(60)

    assert not thread.is_alive() and lower.shortages
    assert gradient.capacity == 2 * follower.capacity == 2 * lower.sizes.token_budget
    assert together.tokens == sums.tokens
    assert together.entropy == pytest.approx(sums.entropy, rel=1e-4)
    ours, theirs = ([present(p.grad) for p in loss.trainable] for loss in (losses[0], losses[2]))
    assert relative_difference(ours, theirs) < 1e-5


class Sharded(Policy):
    """Says that its base is sharded."""

    @property
    def is_sharded(self) -> bool:
        return True


@dataclass
class BusyWorld:
    """A world whose other ranks are in the middle of a pass: it notes the orders that they get."""

    orders: list[Any] = field(default_factory=list)
    rank: int = 0
    size: int = 2

    def giving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def give(self, orders_R: Sequence[Any]) -> None:
        self.orders.append(orders_R[1])

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        return

    def most(self, number: int) -> int:
        return number


def test_rank_0_gives_no_order_to_ranks_that_wait_in_the_pass_of_a_sharded_base(tiny_base: Base) -> None:
    policy = Sharded(copy.deepcopy(tiny_base), rank=4, alpha=8, seed=0)
    settings, lower, world = asked({"loss": "grpo"}), Steps(), BusyWorld()
    packs = [present(contribution_of(group, settings, policy.text).pack) for group in sampled(policy, MIXED)]
    gradient = gradient_of(PolicyLoss(policy, settings), 4096, untyped(world), memory=lower)

    with device_of(policy, 1), pytest.raises(LostPass):
        gradient.measure(packs, StepValues())

    assert lower.shortages == [], "the next attempt begins with lower sizes"
    methods = [getattr(order, "method", None) for order in world.orders]
    assert methods == [LocalGradient.free, None, LocalGradient.measure]


def test_rank_0_hears_of_a_rank_that_left_an_operation_of_all_ranks(tmp_path: Path) -> None:
    """Rank 0 may be in that operation, and would wait for the rank until the limit."""
    first, second = (World(rank, 2, 2, rank, FileStore(str(tmp_path / "store"), 2)) for rank in range(2))
    heard: queue.Queue[Shortage] = queue.Queue()
    first.watch_ranks(heard.put, lambda mistake: None)

    second.report(WHOLE)

    assert heard.get(timeout=60) == WHOLE


class LostEngine(OwnEngine):
    """An engine without a process."""

    async def reason(self, cause: EngineLost) -> str:
        return str(cause)

    async def end(self) -> None:
        return


def test_engines_that_ran_out_of_memory_are_replaced_by_ones_with_the_sizes_that_were_lowered_once() -> None:
    asked: list[Shortage] = []

    def lower(shortage: Shortage) -> EngineShare:
        asked.append(shortage)
        return EngineShare(8 * GIB, EngineSizes(16, sequences=64))

    config = EngineConfig("", "bfloat16", "cuda", EngineSizes(16), 8, 8 * GIB, 0)
    engines = OwnEngines(
        config, [(), ()], patience=600.0, max_restarts=0, on_restart=untyped(asked.append), lower=lower
    )

    async def lose() -> None:
        nothing = untyped(None)
        for number in range(2):
            engines.by_number[number] = LostEngine(
                "one",
                nothing,
                child=nothing,
                number=number,
                folder=ExitStack(),
                replaces=False,
                share=EngineShare(8 * GIB, EngineSizes(16)),
            )
        cause = EngineLost(f"OutOfMemoryError: {OUT_OF_MEMORY}")
        await asyncio.gather(*(engines.lose(one, cause) for one in [*engines.by_number.values()]))

    asyncio.run(lose())

    assert [(one.place, one.wanted) for one in asked] == [("sampler", 2.5 * GIB)]
    assert engines.config == replace(config, sizes=EngineSizes(16, sequences=64))
    assert engines.by_number == {}, "the next ones start with it"
