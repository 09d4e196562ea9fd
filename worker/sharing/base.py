"""The base model of a job that shares it: kept by a process of the worker (worker/sharing/holder.py) for several jobs.

Nothing here imports torch before a model is loaded.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from core import fingerprint
from core.registry import BaseModelEntry
from worker import process
from worker.device_work import DEVICE_WORK
from worker.sharing.turns import DeviceTurns, SharedClock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN_ENGINE = "a vLLM engine of the job samples its answers, with another copy of the weights"
ENDED = "the process that holds the base model has ended"


class RunsAlone(Exception):
    """The job cannot run beside others on this worker; the message says why. It can run alone."""


class BaseLost(Exception):
    """The process that holds the base model has failed, or has ended."""


@dataclass(frozen=True)
class Offer:
    """Describes what the process holds. Sent before the weights are loaded."""

    entry: BaseModelEntry
    files: str  # a hash of the model's folder; empty for a hub id
    free: int  # bytes that were free before anything was loaded


class SharedBase:
    """A connection to the process that holds the base. `jobs` is how many may share it."""

    def __init__(self, address: Path, jobs: int) -> None:
        self._address = address
        self.jobs = jobs

    @cached_property
    def offer(self) -> Offer:
        offer: Offer = self._receive()
        return offer

    def refuse_other(self, entry: BaseModelEntry, source: Path | str) -> None:
        """Check that the process holds this model of the registry, as `source` has it now.

        Raises:
            RunsAlone: the registry or the model's files have changed since it was started.
            BaseLost: it has failed or ended.
            Refusal, ModelUnavailable: it could not find the model.
        """
        files = fingerprint.of_folder(source) if isinstance(source, Path) else ""
        if (entry, files) != (self.offer.entry, self.offer.files):
            raise RunsAlone("the base model has changed since the other jobs were started")

    def memory(self, weight_bytes: int) -> int:
        """Bytes for one job, the weights included: its part of what they leave is the same whatever runs beside it.

        Raises:
            BaseLost: the process has ended.
        """
        return weight_bytes + max(0, self.offer.free - weight_bytes) // self.jobs

    def load(self) -> "PreTrainedModel":
        """The model, once the process has loaded it. Call it once, after the offer has been looked at.

        Raises:
            RunsAlone: the model cannot be shared.
            BaseLost: the process has failed or ended.
            Refusal, ModelUnavailable: as worker.model.policy.load_weights.
        """
        from worker.sharing.image import opened

        described = self._receive()
        if not described.file_bytes:
            # The weights are gone from the GPU when that process is.
            threading.Thread(target=self._end_with_base, name="base", daemon=True).start()
            return opened(described, None)
        file = recv_handle(self._connection)
        try:
            return opened(described, file)
        finally:
            os.close(file)

    @cached_property
    def _connection(self) -> Connection:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(str(self._address))
        except OSError as cause:
            raise BaseLost(ENDED) from cause
        return Connection(client.detach())

    def _receive(self) -> Any:
        """Return what the process sends next; raise it if it is an error."""
        try:
            received = self._connection.recv()
        except (EOFError, ConnectionError) as cause:
            raise BaseLost(ENDED) from cause
        if isinstance(received, Exception):
            raise received
        return received

    def _end_with_base(self) -> NoReturn:
        with contextlib.suppress(EOFError, OSError):
            self._connection.recv_bytes()  # nothing more is sent
        print(ENDED, file=sys.stderr, flush=True)  # noqa: T201 - what the supervisor quotes
        os._exit(process.FAILED)


@dataclass(frozen=True)
class DeviceShare:
    """A job's part of a device that other jobs use, too: their base model, and turns to compute."""

    base: SharedBase
    turns: DeviceTurns

    @classmethod
    def join(cls, places: process.DeviceSockets, jobs: int, beat: Callable[[], None]) -> Self:
        """Connect to the worker. From now on this process computes in its turns only.

        Args:
            jobs: how many may share the base.
            beat: called from time to time while the process waits for its turn.

        Raises:
            TurnsLost: the worker does not listen.
        """
        turns = DeviceTurns(places.turns, beat)
        DEVICE_WORK.guard_with(turns)
        return cls(SharedBase(places.base, jobs), turns)

    def load(self) -> "PreTrainedModel":
        """As `SharedBase.load`. The job offers its turn to others before each forward pass of the model."""
        model = self.base.load()
        self.turns.offer_before_each_forward(model)
        if model.device.type == "cuda":
            import torch

            self.turns.synchronize_with(torch.cuda.synchronize)
        return model

    def clock(self) -> SharedClock:
        return SharedClock(self.turns)
