"""Sampling with vLLM: continuous batching and paged attention, in processes beside the trainer's.

The engines are a job's own, which are its child processes, or members of a fleet, which serve all jobs on one base
model. Both are reached in the same way (worker/engine/client.py), and each answer is the same from either.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, TypeVar, Union

from core.units import GIB
from worker.engine import launch
from worker.engine.client import SILENCE_SECONDS, EngineLost
from worker.engine.options import EngineConfig
from worker.engine.protocol import (
    AnswerFrame,
    AnswerRequest,
    GroupRequest,
    VersionStart,
    pack_ids,
    unpack_ids,
    unpack_logprobs,
)
from worker.model import token_constraints
from worker.model.engine_sizes import EngineShare, EngineSizes
from worker.model.meta_policy import UnloadedPolicy
from worker.model.policy import Policy
from worker.model.token_constraints import rollout_of
from worker.progress import PROGRESS
from worker.refusals import first_error
from worker.sampling import Answer, SampledTurns, Sampling
from worker.sampling.fleet import FleetConfig, FleetEngines
from worker.sampling.own import LowerEngine, OwnEngines, StartEngine
from worker.sampling.placement import ONE_ENGINE, Placement
from worker.sampling.pool import EnginePool, EngineSource
from worker.sampling.weight_sync import WEIGHT_SYNC
from worker.sampling.weights import (
    AdapterStore,
    SentAdapter,
    StoredAdapter,
    Tensors,
    Weights,
    leave_out,
)
from worker.types import Prompt, Rollout

T = TypeVar("T")

OnLeftOut = Callable[[Policy, Sequence[str]], None]
Item = Union[Answer, "End"]  # of what a session yields
Put = Callable[[Answer], None]
Work = Callable[[Callable[[Item], None]], Coroutine[Any, Any, None]]


class LoopThread:
    """An event loop in its own thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call(self, function: Callable[[], object]) -> None:
        """Call it there, without waiting."""
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        self.call(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(frozen=True)
class End:
    """The end of a session. `error`: why it has ended early."""

    error: BaseException | None


@dataclass
class Session:
    """A part of the run in which engines sample from a policy, and from its updates."""

    policy: Policy
    sampling: Sampling
    pool: EnginePool
    tasks: asyncio.TaskGroup
    steps: int  # that the policy has learned from
    steps_of: dict[int, int] = field(default_factory=dict)  # by version of the weights
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)

    def rollout(self, answer: AnswerFrame) -> Rollout:
        ids_T, logprobs_T = unpack_ids(answer.ids), unpack_logprobs(answer.logprobs)
        rollout = rollout_of(self.policy, ids_T, logprobs_T, self.sampling)
        if self.sampling.policy_steps is None:
            return rollout
        return replace(rollout, policy_steps_T=steps_of_tokens(answer.versions, self.steps_of, len(ids_T)))

    async def update(self, tensors: Tensors) -> None:
        """Have engines with answers in flight continue with this adapter."""
        async with self.updating:
            weights = self.pool.weights
            assert isinstance(weights, SentAdapter), "only answers of a job's own engines continue"
            await asyncio.to_thread(weights.replace, self.policy, tensors)
            self.steps += 1
            self.steps_of[weights.version] = self.steps
            for engine in self.pool.engines.ready:
                if engine.unfinished:
                    try:
                        await self.pool.deliver(engine)
                    except EngineLost as cause:
                        await self.pool.engines.lose(engine, cause)


def steps_of_tokens(
    versions: Sequence[VersionStart], steps_of: Mapping[int, int], tokens: int
) -> tuple[int, ...]:
    """For each token of an answer: the steps that its policy had learned from."""
    ends = [first for _, first in versions[1:]] + [tokens]
    return tuple(
        steps_of[version]
        for (version, first), end in zip(versions, ends, strict=True)
        for _ in range(first, end)
    )


class VllmTurns:
    """Implements SampledTurns in a session. Its methods but `next` are called in the sampler's loop."""

    def __init__(self, thread: LoopThread, sampling: Sampling) -> None:
        self.opened: Future[None] = Future()
        self.closed: Future[None] = Future()
        self._thread, self._sampling = thread, sampling
        self._session: Session | None = None
        self._ids = count()
        self._wanted: dict[Future[Rollout], asyncio.Task[None]] = {}

    async def next(self, prompt: Prompt, member: int) -> Rollout:
        rollout: Future[Rollout] = Future()
        self._thread.call(partial(self._ask, prompt, member, rollout))
        return await asyncio.wrap_future(rollout)

    async def serve(self, session: Session, put: Callable[[Answer], None]) -> None:
        self._session = session
        self.opened.set_result(None)
        await asyncio.Event().wait()  # until it is cancelled

    def ended(self, item: Item) -> None:
        """The session has ended, for whatever reason."""
        error = item.error if isinstance(item, End) and item.error else RuntimeError("the sampler has ended")
        self._session = None
        futures: list[Future[Any]] = [self.opened, *self._wanted]
        for future in futures:
            if not future.done():
                future.set_exception(error)
        self.closed.set_result(None)

    def _ask(self, prompt: Prompt, member: int, rollout: Future[Rollout]) -> None:
        session = self._session
        if session is None:
            rollout.set_exception(RuntimeError("the context of these turns has ended"))
            return
        answer = AnswerRequest(
            str(next(self._ids)),
            self._sampling.turn_seed(prompt, member),
            self._sampling.max_completion_tokens,
        )
        group = group_of(session.policy, self._sampling, prompt, (answer,))

        def put(answer: AnswerFrame) -> None:
            if rollout.set_running_or_notify_cancel():
                rollout.set_result(session.rollout(answer))

        task = session.tasks.create_task(session.pool.sample(group, put))
        self._wanted[rollout] = task
        rollout.add_done_callback(lambda done: self._thread.call(partial(self._forget, done)))

    def _forget(self, rollout: Future[Rollout]) -> None:
        task = self._wanted.pop(rollout)
        if rollout.cancelled():
            task.cancel()


class VllmSampler:
    """Implements worker.sampling.TurnSampler over a Policy.

    It has its own thread, which starts the engines and sends all requests to them.
    """

    def __init__(
        self,
        policy: Policy,
        engines: EngineSource,
        weights: Weights,
        *,
        on_left_out: OnLeftOut = lambda policy, modules: None,
    ) -> None:
        """Start the engines without waiting for them.

        Args:
            policy: an UnloadedPolicy samples the base model, until `use` has a loaded one.
            on_left_out: receives a loaded policy, before it learns, and its layers that the engines put no adapter on.
                The policy does not train them: the answers would be those of another model.
        """
        self.policy = policy
        self.engines, self.weights = engines, weights
        self.on_left_out = on_left_out
        self._left_out: Sequence[str] = ()  # adapter tensors that the engines ignore
        self._newer: deque[Tensors] = deque(maxlen=1)  # the adapter to continue with
        self._lock = threading.Lock()  # a policy may be loaded while answers are sampled
        self._running: asyncio.Task[None] | None = None
        self._session: Session | None = None
        self._thread = LoopThread("sampler")
        self._thread.run(engines.start())

    def use(self, policy: Policy) -> None:
        """Sample from this policy, which has been loaded meanwhile and has not learned yet. In any thread."""
        with self._lock:
            self.policy = policy
            self._leave_out()

    def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        """Yield the answers.

        Raises:
            EngineLost: an own engine was lost too often.
            NoMember: no member of the fleet has answered for too long.
            SamplerUnusable: the engines do not do what the job needs.
        """
        return self._stream(self._groups(prompts_P, sampling))

    def answers(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> Iterator[Answer]:
        """The same without an event loop: each answer as it ends, of the policy as it is at this call."""
        return self._iterate(self._groups(prompts_P, sampling))

    @asynccontextmanager
    async def turns(self, sampling: Sampling) -> AsyncIterator[SampledTurns]:
        turns = VllmTurns(self._thread, sampling)
        self._newer.clear()
        tensors = self.weights.current(self.policy)
        end = self._begin(partial(self._in_session, tensors, sampling, turns.serve), turns.ended)
        try:
            await asyncio.wrap_future(turns.opened)
            yield turns
        finally:
            end()
            await asyncio.wrap_future(turns.closed)

    def update_in_flight(self) -> None:
        """Have the answers in flight continue with the policy as it is at this call. May come from another thread.

        Tokens that an engine has sampled before it gets the adapter keep their log-probabilities.
        """
        self._newer.append(self.policy.adapter())
        self._thread.call(self._update)

    def sleep(self) -> None:
        """Have all engines release their GPUs' memory, and wait for that. The next `sample` wakes them.

        Raises:
            EngineLost, SamplerUnusable: as `answers` does.
        """
        self._thread.run(self._sleep())

    @property
    def has_own_engines(self) -> bool:
        return isinstance(self.engines, OwnEngines)

    def resize(self, share: EngineShare, *, sleeps: bool) -> None:
        """End the job's own engines. Those that the next `sample` starts have this memory."""
        self._thread.run(self._resize(share, sleeps))

    def close(self) -> None:
        """End the job's own engines."""
        self._thread.run(self._close())
        self._thread.close()
        self.weights.close()

    def _groups(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> Work:
        policy = self.policy
        groups = [group_of_prompt(policy, sampling, *placed) for placed in enumerate(prompts_P)]

        async def work(session: Session, put: Callable[[Answer], None]) -> None:
            def put_answer(answer: AnswerFrame) -> None:
                place, member = map(int, answer.id.split("/"))
                put(Answer(place, member, session.rollout(answer)))

            # The largest first, so that the loads end up even.
            for group in sorted(groups, key=attrgetter("tokens"), reverse=True):
                session.tasks.create_task(session.pool.sample(group, put_answer))

        # Read here and not by the first `next` of the answers: the trainer may be changing the adapter by then.
        self._newer.clear()
        return partial(self._in_session, self.weights.current(policy), sampling, work)

    async def _in_session(
        self,
        tensors: Tensors,
        sampling: Sampling,
        work: Callable[[Session, Put], Coroutine[Any, Any, None]],
        put: Put,
    ) -> None:
        """Do the work while engines sample from the weights, in place of any other work."""
        await self._leave()
        WEIGHT_SYNC.begin()
        self._running = asyncio.current_task()
        pool = EnginePool(self.engines, self.weights)
        try:
            async with asyncio.TaskGroup() as watching:
                watch = watching.create_task(pool.watch(tuple(tensors)))
                with self._start():
                    await pool.some_ready()
                policy = await asyncio.to_thread(self._publish, tensors, pool.left_out)
                async with asyncio.TaskGroup() as tasks:
                    steps = sampling.policy_steps or 0
                    session = Session(policy, sampling, pool, tasks, steps, {self.weights.version: steps})
                    self._session = session
                    self._update()
                    await work(session, put)
                watch.cancel()
        except BaseExceptionGroup as several:
            raise first_error(several) from None
        finally:
            self._session = None

    def _start(self) -> AbstractContextManager[None]:
        """Report during the context that the job waits for its first engine, which takes minutes for a large model."""
        return nullcontext() if self.engines.has_answered else PROGRESS.phase("starting the sampler")

    def _publish(self, tensors: Tensors, left_out: Sequence[str]) -> Policy:
        with self._lock:
            self._left_out = left_out
            self._leave_out()
            policy = self.policy
        self.weights.publish(policy, tensors)
        return policy

    def _leave_out(self) -> None:
        if not self._left_out:
            return
        policy, own = self.policy, self.policy.adapter()
        # Without weights it is not known which layers have a gradient, so an UnloadedPolicy may have more.
        tensors = [name for name in self._left_out if name in own]
        is_loaded = not isinstance(policy, UnloadedPolicy)
        leave_out(policy, tensors, partial(self.on_left_out, policy) if is_loaded else lambda modules: None)

    def _update(self) -> None:
        """Begin to continue with a newer adapter, if there is one."""
        if self._session is not None and self._newer:
            self._session.tasks.create_task(self._session.update(self._newer.popleft()))

    async def _leave(self) -> None:
        """End what is sampled for a reader that has left."""
        running = self._running
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait([running])

    async def _sleep(self) -> None:
        await self._leave()
        await self.engines.sleep()

    async def _resize(self, share: EngineShare, sleeps: bool) -> None:
        assert isinstance(self.engines, OwnEngines), "a fleet has its own memory"
        await self._leave()
        await self.engines.resize(share, sleeps)

    async def _close(self) -> None:
        await self._leave()
        await self.engines.close()

    def _begin(self, work: Work, put: Callable[[Item], None]) -> Callable[[], None]:
        """Begin the work. Returns what ends it; `put` receives End at last."""
        tasks: list[asyncio.Task[None]] = []

        def ended(task: asyncio.Task[None]) -> None:
            left = RuntimeError("the sampler has begun something else")
            put(End(left if task.cancelled() else task.exception()))

        def begin() -> None:
            tasks.append(asyncio.get_running_loop().create_task(work(put)))
            tasks[0].add_done_callback(ended)

        self._thread.call(begin)
        return lambda: self._thread.call(lambda: tasks[0].cancel())

    def _iterate(self, work: Work) -> Iterator[Answer]:
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        end = self._begin(work, items.put)
        item: Item | None = None
        try:
            while not isinstance(item := items.get(), End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            end()
            while not isinstance(item, End):
                item = items.get()

    async def _stream(self, work: Work) -> AsyncIterator[Answer]:
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()

        def put(item: Item) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        end = self._begin(work, put)
        item: Item | None = None
        try:
            while not isinstance(item := await items.get(), End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            end()
            while not isinstance(item, End):
                item = await items.get()


def group_of_prompt(policy: Policy, sampling: Sampling, place: int, prompt: Prompt) -> GroupRequest:
    """All answers to the prompt at this place."""
    answers = (
        AnswerRequest(f"{place}/{member}", sampling.seed(prompt, member), sampling.max_completion_tokens)
        for member in range(sampling.group_size)
    )
    return group_of(policy, sampling, prompt, tuple(answers))


def group_of(
    policy: Policy, sampling: Sampling, prompt: Prompt, answers: tuple[AnswerRequest, ...]
) -> GroupRequest:
    schema = sampling.response_schema
    return GroupRequest(
        adapter="",
        prompt=pack_ids(prompt.ids),
        answers=answers,
        temperature=sampling.temperature,
        stop_ids=tuple(sorted(policy.stop_ids)),
        # A schema as a grammar too: what a member adds to schemas is for the calls of tools.
        grammar=token_constraints.grammar_of(policy.reasoning, sampling)
        or (f"start: %json {schema}" if schema else ""),
    )


def with_own_engines(
    policy: Policy,
    *,
    weights: Weights | None = None,
    placement: Placement = ONE_ENGINE,
    sizes: EngineSizes | None = None,
    kv_cache_bytes: int = GIB,
    threads: int = 0,
    sleeps: bool = False,
    continues: bool = False,
    patience: float = SILENCE_SECONDS,
    max_restarts: int = 2,
    lower: LowerEngine | None = None,
    start_engine: StartEngine = launch.start_of_job,
    on_restart: Callable[[str], None] = lambda reason: None,
    on_left_out: OnLeftOut = lambda policy, modules: None,
) -> VllmSampler:
    """A sampler that starts its own engines.

    Args:
        weights: default: the policy's adapter.
        sizes: default: the smallest, with the model's context. vLLM refuses to start if `kv_cache_bytes`, which each
            process of an engine has, does not hold one sequence of the context.
        sleeps, continues: `sleep` and `update_in_flight` are going to be called.
        patience: an engine that sends no message for as many seconds has hung.
        lower, start_engine: as OwnEngines says.
        max_restarts: of each engine, in one `sample`; `on_restart` receives the reason.
    """
    config = replace(
        _config_of(policy, sizes or EngineSizes(policy.context), kv_cache_bytes),
        threads=threads,
        tensor_parallel=placement.tensor_parallel,
        sleeps=sleeps,
        continues=continues,
    )
    engines = OwnEngines(
        config,
        placement.gpus_E,
        patience=patience,
        max_restarts=max_restarts,
        on_restart=on_restart,
        lower=lower,
        start_engine=start_engine,
    )
    return VllmSampler(policy, engines, weights or SentAdapter(), on_left_out=on_left_out)


def _config_of(policy: Policy, sizes: EngineSizes, kv_cache_bytes: int) -> EngineConfig:
    """Of an engine for the model and the adapter of a policy, or for its weights."""
    return EngineConfig(
        source=str(policy.source),
        dtype=str(policy.model.dtype).removeprefix("torch."),
        device=policy.device.type,
        sizes=sizes,
        rank=policy.model.peft_config["default"].r if policy.has_base else 0,
        kv_cache_bytes=kv_cache_bytes,
        threads=0,
        experts=policy.expert_rank > 0,
    )


def with_fleet(
    policy: Policy,
    config: FleetConfig,
    store: AdapterStore,
    *,
    on_lost: Callable[[str], None] = lambda reason: None,
    on_left_out: OnLeftOut = lambda policy, modules: None,
) -> VllmSampler:
    """A sampler that asks a fleet. Connects to nothing yet."""
    return VllmSampler(policy, FleetEngines(config, on_lost), StoredAdapter(store), on_left_out=on_left_out)
