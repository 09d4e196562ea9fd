"""What becomes of a job when its run ends, well or badly. The runs here are one-line child processes."""

import errno
import os
import select as selecting
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from core.claims import Claim
from core.database.engine import Database, Work
from core.database.tables import Job
from core.jobs import lifecycle, run_logs
from core.jobs.lifecycle import MAX_CRASH_MESSAGE
from core.settings import Settings
from core.storage.store import BlobInfo, FolderBlobs
from tests import factories
from tests.descriptors import no_free_descriptor
from tests.present import present
from tests.worker.conftest import Bench
from tests.worker.kernel import FakeKernel
from worker import forking, process
from worker.forking import ForkServer
from worker.supervisor.supervisor import MAX_GPU_FAILURES, REST_SECONDS, RunProgress, Supervisor

pytestmark = pytest.mark.slow  # starts child processes

WAIT = (
    "import signal, sys; signal.signal(15, lambda *a: sys.exit(75)); print('up', flush=True); signal.pause()"
)


class Child:
    """A command that runs a line of Python, and tells the test when the child is up."""

    def __init__(self, tmp_path: Path, source: Any) -> None:
        self.started = threading.Event()
        self.pids: list[Any] = []
        self.fifo = tmp_path / "pid"
        os.mkfifo(self.fifo)
        self.source = (
            f"import os; f = open({str(self.fifo)!r}, 'w'); f.write(str(os.getpid())); f.close()\n{source}"
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        while True:
            with self.fifo.open() as pipe:
                self.pids.append(int(pipe.read()))
                self.started.set()

    def __call__(self, progress: Any) -> list[Any]:
        self.progress = progress
        return [sys.executable, "-c", self.source]


class StopsAfterOne(Supervisor):
    """A job that was drained is claimed again by the same loop; one round is what these tests look at."""

    def _finish(self, *args: Any) -> None:
        super()._finish(*args)
        self.stop()


@pytest.fixture
def supervise(bench: Bench, tmp_path: Path) -> Callable[..., tuple[Supervisor, Child]]:
    """Queue the bench's job again, and supervise children of the given source."""
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.release(session, job)

    def make(source: Any, kind: type[Supervisor] = Supervisor, **settings: Any) -> tuple[Supervisor, Child]:
        child = Child(tmp_path, source)
        options: dict[str, Any] = {"data_dir": tmp_path, "max_failures": 1, "lease_seconds": 8.0} | settings
        return kind(Settings(**options), bench.database, bench.blobs, child), child

    return make


def test_a_drained_run_is_queued_again_at_no_cost(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    supervisor, _ = supervise("import sys; sys.exit(75)", StopsAfterOne)

    supervisor.run_waiting()

    job = bench.job()
    assert (job.status, job.failures) == ("queued", 0)


def test_a_run_that_is_rolled_back_is_queued_again_at_no_cost_and_says_why(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    supervisor, _ = supervise("import sys; sys.exit(83)", StopsAfterOne)

    supervisor.run_waiting()

    job = bench.job()
    assert (job.status, job.failures) == ("queued", 0)
    assert (
        bench.events()[-1] == "Fine-tuning job returned to an earlier checkpoint, moving job to queued state"
    )


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return FakeKernel(tmp_path / "kernel")


def test_what_a_run_said_is_kept_for_its_job_and_not_in_the_event_of_its_crash(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    supervisor, _ = supervise("import sys; sys.stderr.write('a' * 300_000 + 'b' * 1000); sys.exit(1)")

    supervisor.run_waiting()

    job = bench.job()
    log = bench.blobs.read(run_logs.key(job.project_id, job.id, job.epoch)).decode()
    assert len(log) == run_logs.MAX_BYTES and log.endswith("ab" + "b" * 999)
    [told] = bench.events("warn")
    assert len(told) == MAX_CRASH_MESSAGE
    assert told.endswith(f"a…. Log: GET /v1/regraft/jobs/{job.id}/logs")


class Reader(FolderBlobs):
    """Keeps each version of a log, and tells the run once the first has come."""

    def __init__(self, folder: Path, told: Path) -> None:
        super().__init__(folder)
        self.told = os.open(told, os.O_RDWR)  # which waits for no reader
        self.versions: list[Any] = []

    def put_bytes(self, key: str, data: bytes, **options: bool) -> BlobInfo:
        self.versions.append(data.decode())
        os.write(self.told, b"go on\n")
        return super().put_bytes(key, data, **options)


def test_the_log_of_a_run_can_be_read_while_it_runs(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]], tmp_path: Path
) -> None:
    """This one continues only after its beginning was read."""
    told = tmp_path / "told"
    os.mkfifo(told)
    source = f"say = __import__('sys').stderr.write; say('begun\\n'); open({str(told)!r}).readline(); say('done\\n')"
    supervisor, _ = supervise(source, hang_seconds=30.0)
    supervisor.blobs = Reader(bench.tmp_path / "blobs", told)
    supervisor.log_seconds = 0.01

    supervisor.run_waiting()

    assert supervisor.blobs.versions[0] == "begun\n"
    assert supervisor.blobs.versions[-1] == "begun\ndone\n"


class NoStore:
    def put_bytes(self, key: str, data: bytes) -> NoReturn:
        raise OSError("no space left")


def test_a_log_that_cannot_be_kept_harms_nobody(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    supervisor, _ = supervise("import sys; sys.exit('the cause')")
    supervisor.blobs = NoStore()

    assert supervisor.run_waiting() == 1
    assert "the cause" in bench.events("warn")[-1]


def test_a_crash_is_counted_and_tried_again_later_with_its_last_words(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    supervisor, _ = supervise("raise MemoryError('CUDA out of memory')")

    assert supervisor.run_waiting() == 1  # the back-off keeps it from being claimed again at once

    job = bench.job()
    assert (job.status, job.failures) == ("queued", 1)
    assert bench.events("warn") == [
        "Fine-tuning job interrupted: the run exited with status 1: MemoryError: CUDA out of memory. "
        f"Log: GET /v1/regraft/jobs/{job.id}/logs"
    ]


BARS = """
import os, sys
sys.stdin.readline()  # the claim: the counters of before are read by then
for step in range(50):
    sys.stderr.write(f"\\rLoading weights: {step}%|\\x1b[32m{'#' * step}\\x1b[0m")
sys.stderr.write("\\n")
os.kill(os.getpid(), 9)
"""


def test_a_run_that_the_kernel_killed_is_out_of_memory_in_one_short_line(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]], kernel: FakeKernel
) -> None:
    """It is really killed; that the kernel did it for lack of memory is what the fake files say."""
    log = kernel.group / "memory.events"
    supervisor, _ = supervise(
        BARS.replace("os.kill", f"open({str(log)!r}, 'w').write('oom_kill 1'); os.kill")
    )
    supervisor.memory = kernel.memory()

    supervisor.run_waiting()

    job = bench.job()
    [told] = bench.events("warn")
    assert told == (
        "Fine-tuning job interrupted: out of memory: the kernel killed the run; peak 9.50 GiB of 10.00 GiB. "
        f"Log: GET /v1/regraft/jobs/{job.id}/logs"
    )
    stored = bench.blobs.read(run_logs.key(job.project_id, job.id, job.epoch)).decode()
    assert stored == f"Loading weights: 49%|{'#' * 49}\n"


def test_a_run_is_told_to_draw_no_progress_bars(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")  # the operator wants these
    names = "TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"
    supervisor, _ = supervise(f"import os, sys; sys.exit(' '.join(os.environ[n] for n in {names}))")

    supervisor.run_waiting()

    assert "status 1: 1 0." in bench.events("warn")[-1]


def test_too_many_crashes_fail_the_job(bench: Bench, supervise: Callable[..., tuple[Any, Child]]) -> None:
    supervisor, _ = supervise("import os; os.kill(os.getpid(), 9)", max_failures=0)

    supervisor.run_waiting()

    job = bench.job()
    assert job.status == "failed"
    assert job.error is not None
    assert job.error["code"] == "internal_error"
    assert "killed (SIGKILL)" in job.error["message"]
    assert len(job.error["message"]) <= MAX_CRASH_MESSAGE


def test_a_run_that_claims_success_without_having_written_it_is_a_crash(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    supervisor, _ = supervise("")

    supervisor.run_waiting()

    assert bench.job().failures == 1


def test_a_cancel_ends_the_child(bench: Bench, supervise: Callable[..., tuple[Any, Child]]) -> None:
    supervisor, child = supervise(WAIT)
    worker = threading.Thread(target=supervisor.run_waiting)
    worker.start()
    assert child.started.wait(60)

    with bench.database.write() as session:
        lifecycle.cancel(Work(session), present(session.get(Job, bench.job().seq)))
    worker.join(60)

    assert not worker.is_alive()
    assert not alive(child.pids[0])
    assert bench.job().status == "cancelled"


def test_a_database_that_is_away_for_a_moment_costs_nothing(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]], tmp_path: Path
) -> None:
    """The run continues, and its end is recorded once the database is available again."""
    release = tmp_path / "release"
    os.mkfifo(release)
    source = f"open({str(release)!r}).read(); sys = __import__('sys'); sys.exit(75)"
    supervisor, child = supervise(source, StopsAfterOne)
    database, missed = supervisor.database, threading.Event()

    class Away:
        """Stands in for a database that refuses connections."""

        def read(self) -> NoReturn:
            missed.set()
            raise OperationalError("SELECT 1", {}, ConnectionRefusedError("connection refused"))

        write = read

    worker = threading.Thread(target=supervisor.run_waiting)
    worker.start()
    assert child.started.wait(60)
    supervisor.database = Away()
    assert missed.wait(60)
    supervisor.database = database
    release.write_text("")
    worker.join(60)

    assert (bench.job().status, bench.job().failures) == ("queued", 0)


def test_stopping_drains_the_child(bench: Bench, supervise: Callable[..., tuple[Any, Child]]) -> None:
    supervisor, child = supervise(WAIT)
    worker = threading.Thread(target=supervisor.run_waiting)
    worker.start()
    assert child.started.wait(60)

    supervisor.stop()
    worker.join(60)

    job = bench.job()
    assert not worker.is_alive()
    assert (job.status, job.failures) == ("queued", 0)
    assert "interrupted at a checkpoint" in bench.events()[-1]


def test_a_child_that_does_not_drain_in_time_is_killed_and_its_job_waits(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    supervisor, child = supervise(
        "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()", drain_seconds=0
    )
    worker = threading.Thread(target=supervisor.run_waiting)
    worker.start()
    assert child.started.wait(60)

    supervisor.stop()
    worker.join(60)

    assert not alive(child.pids[0])
    assert (bench.job().status, bench.job().failures) == ("queued", 0)


def test_a_child_that_is_drained_before_it_knows_what_that_means_costs_nothing(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    supervisor, child = supervise("import signal; signal.pause()")
    worker = threading.Thread(target=supervisor.run_waiting)
    worker.start()
    assert child.started.wait(60)

    supervisor.stop()
    worker.join(60)

    assert (bench.job().status, bench.job().failures) == ("queued", 0)


def test_a_run_that_gets_nowhere_is_killed_and_tried_again(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    supervisor, child = supervise("import signal; signal.pause()", hang_seconds=0.2)

    assert supervisor.run_waiting() == 1

    assert not alive(child.pids[0])
    assert bench.job().failures == 1
    assert "made no progress for 0.2 s (REGRAFT_HANG_SECONDS)" in bench.events("warn")[-1]


class HungDriver(ForkServer):
    """Its processes are inside a driver that hangs: they end at no signal, so their end is never reported."""

    def __init__(self) -> None:
        super().__init__()
        self.controls: list[socket.socket] = []

    def send(self, files: Sequence[int]) -> None:
        group = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
        )
        control = socket.socket(fileno=os.dup(files[1]))
        control.send(f"pid {group.pid}".encode())
        self.controls.append(control)


@pytest.mark.skipif(not forking.FORKS, reason="processes are not forked here")
def test_a_run_that_survives_its_kill_is_recorded_and_its_worker_claims_no_other_job(bench: Bench) -> None:
    """No signal ends a process inside a hung driver. Only the start of another worker can find the GPU usable."""
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.release(session, job)
        factories.job(session, bench.project)
    settings = Settings(data_dir=bench.tmp_path, hang_seconds=0.2)
    supervisor = Supervisor(
        settings,
        bench.database,
        bench.blobs,
        lambda progress: [sys.executable, "-m", "worker.child"],
        fork_server=HungDriver(),
    )

    assert supervisor.run_waiting() == 1

    assert supervisor.has_lost_device
    assert bench.job().failures == 1
    assert "was killed: its process does not end, as in a driver that hangs" in bench.events("warn")[-1]


def test_progress_is_seen_by_our_own_clock_whatever_that_of_the_file_says(tmp_path: Path) -> None:
    now = [0.0]
    file = tmp_path / "progress"
    file.touch()
    progress = RunProgress(file, lambda: now[0])

    now[0] = 50.0
    assert progress.still_for() == 50.0
    os.utime(file, (0, 0))  # half a century ago
    assert progress.still_for() == 0.0
    now[0] = 60.0
    assert progress.still_for() == 10.0


def test_a_worker_without_a_free_descriptor_has_no_news_of_its_run(tmp_path: Path) -> None:
    """And watches it on: the next reading has the news."""
    now, file = [0.0], tmp_path / "progress"
    file.touch()
    process.now_of(file).write_text('{"phase": "sampling"}')
    progress = RunProgress(file, lambda: now[0])
    now[0] += 2.0

    with no_free_descriptor():
        assert progress.news() is None
    assert progress.news() == {"phase": "sampling"}


def test_what_a_child_started_ends_with_it(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]], tmp_path: Path
) -> None:
    source = f"""
import subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open({str(tmp_path / "grandchild")!r}, "w").write(str(grandchild.pid))
sys.exit(1)
"""
    supervisor, _ = supervise(source)

    supervisor.run_waiting()

    assert not alive(int((tmp_path / "grandchild").read_text()))


def test_a_run_whose_parent_is_not_the_one_it_was_given_ends_at_once() -> None:
    code = "from worker import process; process.die_with_parent(1); print('still here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == process.DRAINED
    assert done.stdout == ""


def test_a_run_dies_with_its_supervisor(tmp_path: Path) -> None:
    """kill -9 of the supervisor leaves no run behind (Linux)."""
    run = """
import os, signal
from worker import process
process.die_with_parent(os.getppid())
print(os.getpid(), flush=True)
signal.pause()
"""
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {run!r}]).wait()"
    supervisor = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())

    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()

    assert supervisor.stdout.read() == ""  # returns when the run, too, has closed the pipe: when it is dead
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether the process outlives the next ten seconds; returns as soon as it is known to be dead."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not selecting.select([handle], [], [], 10)[0]
    finally:
        os.close(handle)


class Scarce(ForkServer):
    """A machine on which no process can be forked, or which has no file descriptor left, as for a minute."""

    def __init__(self, cause: OSError | None) -> None:
        super().__init__("tests.worker.unforkable")
        self.cause = cause

    def send(self, files: Sequence[int]) -> None:
        if self.cause is not None:
            raise self.cause
        super().send(files)


@pytest.mark.skipif(not forking.FORKS, reason="processes are not forked here")
@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (None, "Resource temporarily unavailable"),  # as the fork server meets it
    ],
    ids=["descriptors", "processes"],
)
def test_a_worker_that_cannot_start_a_process_queues_the_job_again_at_no_cost(
    bench: Bench, missing: OSError | None, said: str
) -> None:
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.release(session, job)
    command = [sys.executable, "-m", "worker.child"]
    settings = Settings(data_dir=bench.tmp_path)
    supervisor = StopsAfterOne(
        settings, bench.database, bench.blobs, lambda progress: command, fork_server=Scarce(missing)
    )

    supervisor.run_waiting()

    job = bench.job()
    assert (job.status, job.failures) == ("queued", 0)
    [waits] = bench.events("warn")
    assert waits.startswith("Fine-tuning job waits: its worker cannot start it: ")
    assert said in waits


def test_a_worker_that_cannot_follow_the_log_of_a_run_leaves_no_process_behind(
    bench: Bench, tmp_path: Path
) -> None:
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.release(session, job)
    child = Child(tmp_path, WAIT)

    def follow_log(*options: Any) -> NoReturn:
        assert child.started.wait(30)
        raise OSError(errno.EMFILE, "Too many open files")

    supervisor = StopsAfterOne(
        Settings(data_dir=tmp_path), bench.database, bench.blobs, child, follow_log=follow_log
    )

    supervisor.run_waiting()

    [pid] = child.pids
    assert not Path(f"/proc/{pid}").exists()
    assert (bench.job().status, bench.job().failures) == ("queued", 0)
    assert "Too many open files" in bench.events("warn")[0]


def test_a_job_that_its_worker_cannot_start_leaves_the_next_turn_to_another(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    """The worker rests. If that job were due by then, it would again be the oldest one, for ever."""
    exits = (
        f"import sys; sys.exit({process.UNSTARTED} if {bench.claim.job_id!r} in sys.stdin.readline() else 1)"
    )
    supervisor, _ = supervise(exits, Rested, max_failures=0)
    with bench.database.write() as session:
        other = factories.job(session, bench.project).id

    supervisor.run_waiting()
    supervisor.rest()
    with bench.database.write() as session:  # so much time has passed
        session.execute(update(Job).values(next_run_at=Job.next_run_at - REST_SECONDS))
    supervisor.run_waiting()

    with bench.database.read() as session:
        assert session.scalars(select(Job.status).where(Job.id == other)).one() == "failed"
    assert (bench.job().status, bench.job().failures) == ("queued", 0)


@pytest.mark.parametrize(
    ("status", "claimed"), [(process.RESTS, 1), (process.GPU_UNUSABLE, 1), (process.PUT_OFF, 3)]
)
def test_a_worker_whose_machine_can_run_no_job_leaves_the_queue_to_others(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]], status: int, claimed: int
) -> None:
    """Unless the job needs what other jobs do not, such as an environment of its grader."""
    supervisor, _ = supervise(f"import sys; sys.exit({status})", Rested, max_failures=0)
    with bench.database.write() as session:
        for _ in range(2):
            factories.job(session, bench.project)

    assert supervisor.run_waiting() == claimed


def test_a_worker_ends_after_some_jobs_in_a_row_that_could_not_use_its_gpu(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    supervisor, _ = supervise(f"import sys; sys.exit({process.GPU_UNUSABLE})", Rested, max_failures=0)
    with bench.database.write() as session:
        for _ in range(MAX_GPU_FAILURES):
            factories.job(session, bench.project)

    claimed = 0
    while not supervisor.has_lost_device:
        claimed += supervisor.run_waiting()
        supervisor.rest()

    assert claimed == MAX_GPU_FAILURES
    assert supervisor.run_waiting() == 0


class Rested(Supervisor):
    """A supervisor whose rest can be passed at once."""

    def __init__(self, settings: Settings, database: Database, blobs: FolderBlobs, child: Child) -> None:
        super().__init__(settings, database, blobs, child, clock=lambda: self.now)
        self.now = 0.0

    def rest(self) -> None:
        self.now += REST_SECONDS


class Renewing(StopsAfterOne):
    """Notes when it renews the lease, by a clock that each query of a slow database advances. Stops at the third."""

    def __init__(self, settings: Settings, database: Database, blobs: FolderBlobs, child: Child) -> None:
        super().__init__(settings, database, blobs, child, clock=lambda: self.now)
        self.now, self.renewed = 0.0, list[float]()

    def _is_ours(self, claim: Claim, renew: bool) -> bool:
        if renew:
            self.renewed.append(self.now)
        if len(self.renewed) == 3:
            self.stop()
        self.now += 2.5
        return super()._is_ours(claim, renew)


def test_a_lease_is_renewed_in_time_when_the_database_answers_slowly(
    supervise: Callable[..., tuple[Any, Child]],
) -> None:
    supervisor, _ = supervise(WAIT, Renewing, lease_seconds=8.0)

    supervisor.run_waiting()

    assert supervisor.renewed == [2.5, 5.0, 7.5]


def test_a_drain_ends_in_time_when_the_database_answers_slowly(
    bench: Bench, supervise: Callable[..., tuple[Any, Child]]
) -> None:
    ignores = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
    supervisor, _ = supervise(ignores, Renewing, lease_seconds=8.0, drain_seconds=5.0)

    supervisor.run_waiting()

    assert supervisor.now <= 7.5 + 5.0 + 2.5
    assert bench.job().status == "queued"
