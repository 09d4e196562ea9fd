"""vLLM's engine as one object of this process, which the main thread steps.

A job's own engine is one process (docs/adr/0022): vLLM's own server has two or three, each of which imports vLLM.
Other threads use a `SteppedEngine` as they would use vLLM's EngineClient, so the routes are the same in both.

The calls into what vLLM does not promise to keep are here and in extension.py; tests/worker/vllm_contract.py and
test_vllm_runners.py name each of them, so that a new version fails there first.
"""

import asyncio
import logging
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from worker import process
from worker.engine.extension import ADAPTER_ID
from worker.engine.options import EngineConfig, engine_options
from worker.engine.protocol import AdapterBytes, VersionStart
from worker.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)

T = TypeVar("T")

# How vLLM says that it does not know a model, lacks a kernel for it here, or has too small a cache.
LASTING = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    NotImplementedError,
    ImportError,
    AssertionError,
)


class EngineFailed(Exception):
    """The engine has raised an error. `lasting`: another one would, too."""

    def __init__(self, reason: str, lasting: bool) -> None:
        super().__init__(reason)
        self.lasting = lasting


def failure_of(cause: Exception) -> EngineFailed:
    """A smaller cache may help where the memory did not suffice; other errors of these kinds last."""
    lasts = isinstance(cause, LASTING) and not is_out_of_memory(cause)
    return EngineFailed(f"{type(cause).__name__}: {cause}", lasts)


class SamplingEngine:
    """vLLM's engine with one adapter slot, or none, and whole weights from files. Used by one thread.

    Every request uses the slot: on a CPU a row without an adapter gets it anyway.
    """

    def __init__(self, config: EngineConfig) -> None:
        with process.importing():
            from vllm import EngineArgs
            from vllm.lora.request import LoRARequest
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.llm_engine import LLMEngine

        # The engine has to know how many tokens an answer has when the adapter is replaced.
        self._kind = RequestOutputKind.CUMULATIVE if config.continues else RequestOutputKind.FINAL_ONLY
        self._lora_request = LoRARequest
        self.vllm = LLMEngine.from_engine_args(EngineArgs(**engine_options(config)))
        self._has_adapter = config.rank > 0
        if config.device == "cpu" and self._has_adapter:
            self.vllm.collective_rpc("use_one_adapter_linear")
        if config.device == "cuda" and config.sleeps and self._has_adapter:
            self.vllm.collective_rpc("keep_copies_of_weights")
        self._namespace, self._version = "", 0
        self._tokens: dict[str, int] = {}  # of each answer in flight so far, if it may continue
        self._versions: dict[str, list[VersionStart]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.vllm.has_unfinished_requests())

    def add(self, id: str, prompt: Any, params: Any) -> None:
        params.output_kind = self._kind
        # The path is never opened, since the id is registered; it is there for the prefix cache's key.
        adapter = self._lora_request("policy", ADAPTER_ID, self._namespace) if self._has_adapter else None
        self.vllm.add_request(id, prompt, params, lora_request=adapter)
        self._tokens[id], self._versions[id] = 0, [(self._version, 0)]

    def load(self, files: tuple[str, ...], version: int) -> None:
        """Abort all answers, and load other weights."""
        self.abort_all()
        self.vllm.collective_rpc("load_policy_weights", args=(files,))
        if not self.vllm.reset_prefix_cache():  # its keys are the tokens alone
            raise RuntimeError("vLLM keeps the keys and values of the weights before these")
        self._version = version

    def put(self, adapter: AdapterBytes, version: int) -> None:
        """Replace the adapter. Answers in flight continue with it.

        Keys and values of the old one are dropped, so that vLLM computes prompts and tokens anew: the next tokens have
        the probabilities that the new adapter alone gives them.
        """
        self.vllm.collective_rpc("put_policy_adapter", args=(adapter,))
        if self._tokens:
            self.vllm.reset_prefix_cache(reset_running_requests=True)
        self._namespace, self._version = adapter.namespace, version
        for id, tokens in self._tokens.items():
            self._versions[id].append((version, tokens))

    def step(self) -> Iterator[Any]:
        """Compute a token of each answer. Yields vLLM's outputs of those that have ended, with their versions."""
        for output in self.vllm.step():
            id = output.request_id
            if output.finished:
                self._tokens.pop(id, None)
                output.versions = tuple(self._versions.pop(id, ()))
                yield output
            elif id in self._tokens:
                self._tokens[id] = len(output.outputs[0].token_ids)

    def abort(self, id: str) -> None:
        if self._tokens.pop(id, None) is not None:
            del self._versions[id]
            self.vllm.abort_request([id], internal=False)

    def abort_all(self) -> None:
        self._tokens.clear()
        self._versions.clear()
        self.vllm.abort_request(list(self.vllm.output_processor.request_states), internal=True)

    def sleep(self) -> None:
        self.abort_all()
        self.vllm.sleep(level=1)

    def wake_up(self) -> None:
        self.vllm.wake_up()


class SteppedEngine:
    """Calls to a SamplingEngine from other threads. They are done between its steps, in order."""

    def __init__(self, start: Callable[[], SamplingEngine]) -> None:
        """`start` is called by `run`."""
        self._start = start
        self._calls: queue.SimpleQueue[tuple[Callable[[SamplingEngine], Any], Future[Any]]] = (
            queue.SimpleQueue()
        )
        self._answers: dict[str, Future[Any]] = {}  # in flight

    def run(self) -> NoReturn:
        """Compute in this thread. An engine that has failed answers each call with its error, until it is killed."""
        try:
            engine = self._start()
            while True:
                self._take_calls(engine)
                for output in engine.step() if engine.busy else ():
                    answer = self._answers.pop(output.request_id, None)
                    if answer is not None and answer.set_running_or_notify_cancel():
                        answer.set_result(output)
        except Exception as cause:
            log.exception("the engine failed")
            self._fail(failure_of(cause))

    async def call(self, function: Callable[[SamplingEngine], T]) -> T:
        """Call it between two steps. Raises EngineFailed."""
        future: Future[T] = Future()
        self._calls.put((function, future))
        return await asyncio.wrap_future(future)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Sequence[Any]:
        """Call a method of all workers, as vLLM's EngineClient does."""
        results: Sequence[Any] = await self.call(lambda engine: engine.vllm.collective_rpc(method, args=args))
        return results

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        """Yield vLLM's output of the whole answer, from the current weights. Closing the iterator aborts it."""
        answer = self._answers[request_id] = Future()
        try:
            await self.call(lambda engine: engine.add(request_id, prompt, params))
            yield await asyncio.wrap_future(answer)
        finally:
            if not answer.done() or answer.cancelled():
                self._answers.pop(request_id, None)
                self._calls.put((lambda engine: engine.abort(request_id), Future()))

    def _take_calls(self, engine: SamplingEngine) -> None:
        """Do what has been called for; wait for a call if there is nothing to compute."""
        waits = not engine.busy
        while True:
            try:
                function, future = self._calls.get(block=waits)
            except queue.Empty:
                return
            waits = False
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(engine))
            except Exception as cause:
                future.set_exception(cause)

    def _fail(self, failure: EngineFailed) -> NoReturn:
        for answer in [*self._answers.values()]:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(failure)
        while True:
            _, future = self._calls.get()
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)
