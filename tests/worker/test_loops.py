"""No thread ends for good while its process lives: what it depends on may fail, and it tries again."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from core.settings import Settings
from tests.worker.conftest import Bench
from worker.members.member import Member
from worker.serve.launcher import InferenceServer
from worker.supervise.killed import KernelMemory
from worker.supervise.lease import LeaseKeeper
from worker.supervise.reporter import Reporter
from worker.supervise.telemetry import Gpus

WAIT = "import signal; signal.pause()"


class FailsOnce:
    """Raises at the first call, and then does what it is for."""

    def __init__(self, cause: Exception, call: Callable[..., Any]) -> None:
        self.cause, self.call = cause, call
        self.calls, self.done = 0, threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise self.cause
        try:
            return self.call(*args, **options)
        finally:
            self.done.set()


NO_MEMORY = OSError(12, "Cannot allocate memory")


def test_a_member_whose_launcher_cannot_be_started_tries_again() -> None:
    def command() -> Sequence[str]:
        return [sys.executable, "-c", WAIT]

    starting = FailsOnce(NO_MEMORY, command)
    member = Member(starting)
    member.start()
    try:
        assert starting.done.wait(60)
        assert member.thread.is_alive()
    finally:
        member.stop()
        member.thread.join(60)
    assert not member.thread.is_alive()


def test_an_inference_process_that_cannot_be_started_is_started_for_the_same_request_later() -> None:
    def start(command: Sequence[str], environment: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", WAIT], env=environment, **options)

    starting = FailsOnce(NO_MEMORY, start)
    listening = socket.create_server(("127.0.0.1", 0))
    server = InferenceServer(listening, restart_after_s=0.01, start_process=starting)
    server.start()
    try:
        with socket.create_connection(listening.getsockname()):
            assert starting.done.wait(60)
    finally:
        server.stop()


class OneGpu(Gpus):
    """Its driver fails at the first reading."""

    def __init__(self, read: FailsOnce) -> None:
        super().__init__()
        self.read = read  # type: ignore[method-assign]


def test_a_worker_whose_gpu_driver_fails_once_reports_itself_later(bench: Bench) -> None:
    read = FailsOnce(RuntimeError("NVML: unknown error"), list)
    settings = Settings(data_dir=bench.tmp_path)
    reporter = Reporter(
        settings, bench.database, "worker-1", OneGpu(read), KernelMemory(), every_seconds=0.01
    )
    stop, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=reporter.run_until, args=[stop, ended])
    thread.start()
    try:
        assert read.done.wait(60)
    finally:
        ended.set()
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def test_a_lease_is_renewed_after_a_renewal_that_failed(bench: Bench) -> None:
    renew = FailsOnce(RuntimeError("can't start new thread"), lambda *args: True)
    with LeaseKeeper(bench.database, bench.claim, 0.04, heartbeat=renew):
        assert renew.done.wait(60)
