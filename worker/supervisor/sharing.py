"""Jobs that share this worker's device: which may, the process that holds their base model, and their turns."""

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from core.database.tables import Job
from core.jobs import full, methods
from core.jobs.devices import expected_device
from core.registry import Registry, sampler_of
from core.results.lineage import Parent
from core.settings import Settings
from worker import forking, process
from worker.packages import vllm_version
from worker.sharing.base import OWN_ENGINE
from worker.supervisor.turn_server import TurnServer

Hold = Callable[[int, str], Sequence[str]]


def hold_command(listener: int, model: str) -> Sequence[str]:
    """Return the command of the process that holds a base model and listens at this file descriptor."""
    return [sys.executable, "-m", "worker.sharing.holder", str(os.getpid()), str(listener), model]


class SharedDevice:
    """What jobs on one base model share from the first of them to the end of the last one."""

    def __init__(self, model: str, command: Hold = hold_command) -> None:
        self.model = model
        self._command = command
        self.is_stuck = False  # after the end: whether the process that held the base has not ended

    def __enter__(self) -> Self:
        """Raises OSError: the sockets or the process cannot be created. Nothing of them remains."""
        with contextlib.ExitStack() as opened:
            self.folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="regraft-")))
            places = process.DeviceSockets(self.folder)
            opened.callback(TurnServer(places.turns).close)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(places.base))
                listener.listen()
                self._base = forking.start(
                    self._command(listener.fileno(), self.model),
                    process.quiet_environment(),
                    pass_fds=[listener.fileno()],
                )
            opened.callback(self._end_base)
            self._opened = opened.pop_all()
        # This process no longer listens there, so once the other one has ended, jobs are refused and do not wait.
        return self

    @property
    def is_open(self) -> bool:
        """Whether more jobs may come: not without the process that holds the base."""
        return self._base.poll() is None

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def _end_base(self) -> None:
        self.is_stuck = not forking.kill(self._base)


def never(settings: Settings) -> str | None:
    """Return why no job of this worker shares its device. None: some may."""
    if sys.platform != "linux":
        return "jobs share a base model on Linux only"
    for name in ("ranks", "nodes"):
        if (number := getattr(settings, name)) > 1:
            return f"REGRAFT_{name.upper()} is {number}, and jobs share a device with one rank only"
    if settings.sampling_gpus:
        return f"REGRAFT_SAMPLING_GPUS is {settings.sampling_gpus}, and jobs share one GPU only"
    return None


def why_alone(job: Job, settings: Settings) -> str | None:
    """Return why the job does not share the device. None: it does, unless it has not enough memory beside others.

    Raises:
        InvalidRegistry: the models file is invalid.
        ModelNotFound: the job's model is no longer in it.
    """
    if reason := never(settings):
        return reason
    if job.method == "distillation":
        return "jobs with the method distillation may have a second model in memory"
    parent = Parent.of(job)
    if full.is_full(job) or (parent is not None and parent.is_whole):
        return "it trains all weights, or starts from a model whose weights were all trained"
    if methods.variant(job.method, job.body) in methods.OFFLINE:
        return None
    registry = Registry.load(settings.models_file)
    if registry.resolve(job.model) in settings.samplers:  # a fleet samples
        return None
    device = expected_device(settings)
    override = settings.of_class(settings.gpu_class).sampler
    sampler = sampler_of(registry.get(job.model), override, device, vllm_installed=vllm_version() is not None)
    return OWN_ENGINE if sampler == "vllm" else None
