"""No thread ends for good while its process lives: what it depends on may fail, and it tries again."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from api.http.grader_loop import GraderLoop
from api.resources.batch_requests import prepare_request
from core.claims import Claim
from core.jobs.queue import WakeUps
from core.settings import Settings
from graders.backends import Backends
from tests.threads import no_free_thread
from tests.worker.conftest import Bench
from worker.evals.runner import RUNS_AT_ONCE, EvalRunner
from worker.lease import LeaseKeeper
from worker.members.member import Member
from worker.serving.launcher import InferenceServer
from worker.supervisor.killed import KernelMemory
from worker.supervisor.reporter import Reporter
from worker.supervisor.turn_server import TurnServer
from worker.telemetry import Gpus

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


def waiting_launcher(progress: Path) -> Sequence[str]:
    return [sys.executable, "-c", WAIT]


def test_a_launcher_that_gives_no_sign_of_life_is_killed_and_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    second = threading.Event()

    def command(progress: Path) -> Sequence[str]:
        if "no sign of life for 0 s" in caplog.text:
            second.set()
        return waiting_launcher(progress)

    member = Member(0.0, command, pause_seconds=0.0)
    member.start()
    try:
        assert second.wait(60)
    finally:
        member.stop()
        member.thread.join(60)
    assert not member.thread.is_alive()


def test_a_member_whose_launcher_cannot_be_started_tries_again() -> None:
    starting = FailsOnce(NO_MEMORY, waiting_launcher)
    member = Member(600.0, starting)
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


class Immortal(subprocess.Popen[bytes]):
    """A process inside a driver that hangs: it ends at no signal."""

    def kill(self) -> None:
        pass


def test_an_inference_process_that_does_not_end_delays_no_shutdown() -> None:
    started = threading.Event()
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str], environment: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        processes.append(Immortal([sys.executable, "-c", WAIT], env=environment, **options))
        started.set()
        return processes[0]

    listening = socket.create_server(("127.0.0.1", 0))
    server = InferenceServer(listening, start_process=start)
    server.start()
    with socket.create_connection(listening.getsockname()):
        assert started.wait(60)
        stopping = threading.Thread(target=server.stop, daemon=True)
        stopping.start()
        stopping.join(60)
    try:
        assert not stopping.is_alive()
    finally:
        processes[0].terminate()


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


class CountsClaims(EvalRunner):
    """Looks for runs and finds none."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(
            Settings(data_dir=bench.tmp_path),
            bench.database,
            bench.blobs,
            Backends.none(),
            "worker-1",
            prepare_request,
        )
        self.looked = threading.Event()

    def claim(self) -> Claim | None:
        self.looked.set()
        return None


def test_eval_runs_start_again_once_the_system_has_a_free_thread(bench: Bench) -> None:
    runner = CountsClaims(bench)

    with no_free_thread():
        for _ in range(RUNS_AT_ONCE + 1):
            runner.wake()
    runner.wake()

    assert runner.looked.wait(60)
    runner.stop()


def test_wake_ups_leave_once_the_system_has_a_free_thread() -> None:
    sent: Queue[tuple[str, str]] = Queue()

    def send(task: str, queue: str, about: str = "") -> bool:
        sent.put((task, queue))
        return True

    wake_up = WakeUps(send)

    with no_free_thread():
        assert not wake_up("run", "gpu.cpu")
    assert wake_up("validate", "default")

    assert [sent.get(timeout=60) for _ in range(2)] == [("run", "gpu.cpu"), ("validate", "default")]


def test_graders_run_once_the_system_has_a_free_thread() -> None:
    async def grade() -> float:
        return 1.0

    async def grades() -> float:
        loop = GraderLoop()
        with no_free_thread(), pytest.raises(RuntimeError, match="can't start new thread"):
            await loop.run(grade())
        try:
            return await asyncio.wait_for(loop.run(grade()), 60)
        finally:
            loop.close()

    assert asyncio.run(grades()) == 1.0


def test_a_server_of_turns_that_gets_no_thread_says_so_as_one_that_gets_no_socket(tmp_path: Path) -> None:
    with no_free_thread(), pytest.raises(OSError, match="can't start new thread"):
        TurnServer(tmp_path / "turns")
