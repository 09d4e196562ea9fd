"""The run's handle on the process of one vLLM engine: its start, its messages, and how it was lost."""

import contextlib
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from textwrap import shorten
from typing import Any

from worker.rollout.samplers.engine import environment
from worker.rollout.samplers.wire import (
    Abort,
    AdapterBytes,
    Asleep,
    EngineConfig,
    EngineReady,
    Failed,
    FallAsleep,
    Finished,
    LoadWeights,
    NotApplied,
    ReplaceAdapter,
    Request,
    SampleBatch,
    Stepped,
    WakeUp,
    WhichApply,
)

# Loading a large model from a slow disk and capturing its graphs takes minutes without any message.
LOADING_PATIENCE = 1800.0


class EngineLost(Exception):
    """The engine died, hung or failed; the message says which."""


class EngineUnusable(EngineLost):
    """The engine failed with an error of a kind that lasts: it does not compute the model, if it never has."""


class EngineProcess:
    """One engine. Converts all its errors to EngineLost."""

    def __init__(self, config: EngineConfig, patience: float, *, replaces: bool = False) -> None:
        """Start it without waiting for it. `replaces`: another one was lost in its place."""
        self.patience = patience
        self.replaces = replaces
        self.version = 0  # of the adapter or the weights it has
        self.requests: dict[str, Request] = {}  # unfinished, by id
        self.is_ready = False
        self.is_asleep = False
        self._is_loading = True
        self._heard = time.monotonic()
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
        self.connection = Connection(ours.detach())
        self.connection.send(config)

    @property
    def owes_message(self) -> bool:
        return bool(self.requests) or not self.is_ready

    @property
    def seconds_left(self) -> float:
        """Until its silence is too long."""
        return self._heard + self._limit - time.monotonic()

    @property
    def _limit(self) -> float:
        return LOADING_PATIENCE if self._is_loading else self.patience

    def not_applied(self, tensors: tuple[str, ...]) -> tuple[str, ...]:
        """Those of these adapter tensors that vLLM would ignore. The engine is idle."""
        self._heard = time.monotonic()
        self._send(WhichApply(tensors))
        reply = self._message()
        assert isinstance(reply, NotApplied)
        return reply.tensors

    def run(self, requests: Sequence[Request], adapter: AdapterBytes | None) -> None:
        """Sample these besides what it samples already. `adapter`: if it does not have the current one."""
        if not self.owes_message:
            self._heard = time.monotonic()
        self.requests |= {request.id: request for request in requests}
        self._send(SampleBatch(adapter, tuple(requests)))

    def load(self, files: Sequence[str]) -> None:
        """Have the idle engine load the model's weights from these files; it is ready again after its reply."""
        self.is_ready, self._is_loading = False, True
        self._heard = time.monotonic()
        self._send(LoadWeights(tuple(files)))

    def replace(self, adapter: AdapterBytes) -> None:
        """Have its answers continue with this adapter."""
        self._send(ReplaceAdapter(adapter))

    def abort(self) -> None:
        """Forget all requests; the engine is ready again after its reply."""
        self.requests.clear()
        self.is_ready = False
        self._heard = time.monotonic()
        self._send(Abort())

    def fall_asleep(self) -> None:
        """Have it forget all requests and sleep. `wait_until_asleep` has to follow."""
        self.requests.clear()
        self._heard = time.monotonic()
        self._send(FallAsleep())

    def wait_until_asleep(self) -> None:
        """Wait for it, also if it has not started yet: an engine that loads its weights later would take memory."""
        while not isinstance(message := self._message(), Asleep):
            self._is_loading &= not isinstance(message, EngineReady)
        self.is_ready, self.is_asleep = False, True

    def wake_up(self) -> None:
        """It is ready again after its reply. It gets the adapter or the weights anew, whatever vLLM keeps of them."""
        self.is_asleep, self.version = False, 0
        self._heard = time.monotonic()
        self._send(WakeUp())

    def receive(self) -> tuple[Finished, ...]:
        """Take the next message: the answers that ended in a step, or that the engine is ready."""
        message = self._message()
        if isinstance(message, EngineReady):
            self.is_ready, self._is_loading = True, False
            return ()
        assert isinstance(message, Stepped)
        if not self.is_ready:
            return ()  # of aborted requests
        for answer in message.finished:
            del self.requests[answer.id]
        return message.finished

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
        self.connection.close()

    def _send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except (OSError, EOFError) as cause:
            raise self._lost(cause, self.patience) from cause

    def _message(self) -> Any:
        try:
            if not self.connection.poll(max(0.0, self.seconds_left)):
                raise TimeoutError
            message = self.connection.recv()
        except (OSError, EOFError) as cause:
            raise self._lost(cause, self._limit) from cause
        self._heard = time.monotonic()
        if isinstance(message, Failed):
            reason = shorten(
                message.reason, 400, placeholder=" ..."
            )  # vLLM lists all architectures that it knows
            kind = EngineUnusable if message.lasting else EngineLost
            raise kind(f"the vLLM engine failed: {reason}")
        return message

    def _lost(self, cause: Exception, limit: float) -> EngineLost:
        if isinstance(cause, TimeoutError | BlockingIOError):  # the latter: the limit of the socket
            return EngineLost(f"the vLLM engine sent no heartbeat for {limit:.0f} s")
        # Its end of the socket is closed, so it has ended or is about to.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=10)
        self.child.kill()  # has no effect on one that has ended
        status = self.child.wait()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return EngineLost(f"the vLLM engine's process exited: {how}")


def next_to_receive(engines: Sequence[EngineProcess]) -> list[EngineProcess]:
    """Wait until engines that owe a message have sent one, were closed or have been silent for too long."""
    silent = min((engine.seconds_left for engine in engines), default=0.0)
    readable = wait([engine.connection for engine in engines], max(0.0, silent))
    return [engine for engine in engines if engine.connection in readable or engine.seconds_left <= 0]
