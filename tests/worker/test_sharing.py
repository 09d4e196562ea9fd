"""Several jobs on one base model: their results, their memory, and that each ends by itself."""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from select import select as select_ready
from typing import Any, NoReturn

import pytest
from sqlalchemy import delete, select, update

from core.claims import Claim
from core.database.engine import Work
from core.database.tables import Attempt as AttemptRow
from core.database.tables import Checkpoint, Event, Job
from core.jobs import lifecycle
from core.settings import Settings
from tests import factories
from tests.hyperparameters import in_groups
from tests.present import present
from tests.worker.conftest import Bench
from worker import process
from worker.attempt import Attempt
from worker.child import run_claim
from worker.sharing.base import RunsAlone
from worker.sharing.turns import GONE
from worker.supervisor.sharing import why_alone
from worker.supervisor.supervisor import Supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jobs share a base model on Linux only")

TEXTS = ["say yes", "what colour is it now please tell me the name", "tell me a number", "say cat"]


@pytest.fixture
def environment(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = tmp_path / "models.toml"
    registry.write_text(
        f'[models.tiny]\npath = "{tiny_model}"\ndtype = "float32"\ncontext = 128\nsampler = "transformers"\n'
    )
    for name, value in {"models_file": registry, "data_dir": tmp_path, "torch_threads": 1}.items():
        monkeypatch.setenv(f"REGRAFT_{name.upper()}", str(value))


def queue_jobs(bench: Bench, *changes: dict[str, Any]) -> list[str]:
    """Queue jobs of two steps in place of the bench's own, and return their ids."""
    rows = [{"messages": [{"role": "user", "content": text}], "answer": "yes no"} for text in TEXTS]
    grader = {"type": "text_similarity", "name": "near", "input": "{{sample.output_text}}"}
    grader |= {"reference": "{{item.answer}}", "evaluation_metric": "fuzzy_match"}
    advanced = {"group_size": 8, "max_completion_tokens": 8}
    asked = {"batch_size": 4, "n_epochs": 3, "eval_interval": 1, "advanced": in_groups(advanced)}
    body = {"grader": grader, "hyperparameters": asked, "response_format": None}
    with bench.database.write() as session:
        session.execute(delete(Job))
        bench.add_files(session, bench.blobs, rows)
        files = {"training_file": "file-a", "validation_file": "file-b", "method": "reinforcement"}
        jobs = [factories.job(session, bench.project, **files | {"body": body} | one) for one in changes]
        return [job.id for job in jobs]


def adapter(bench: Bench, job_id: str) -> bytes:
    """The weights of the job's last checkpoint."""
    newest = select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step.desc()).limit(1)
    with bench.database.read() as session:
        prefix = session.scalars(newest).one().blob_prefix
    return bench.blobs.read(f"{prefix}/adapter_model.safetensors")


def train_alone(bench: Bench) -> None:
    """Run the next job in this process, with a base model of its own."""
    with bench.database.write() as session:
        claim = lifecycle.claim(session, gpu_class="cpu", owner="alone", lease_seconds=600)
    assert claim is not None
    attempt = Attempt.begin(claim, bench.database, bench.blobs, patience_seconds=0)
    bench.run_job(Settings(), attempt=attempt)


def child_command(progress: Path) -> list[str]:
    return [sys.executable, "-m", "tests.worker.sharing_child", str(os.getpid()), str(progress)]


@pytest.mark.slow  # starts child processes, which load torch
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("environment")
def test_two_jobs_at_once_have_the_results_of_running_alone_although_one_of_them_is_killed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed one resumes from its checkpoint. The other one does not notice."""
    *twins, killed, other = queue_jobs(
        bench, {"seed": 5}, {"seed": 8}, {"seed": 5, "suffix": "killed"}, {"seed": 8}
    )
    for _ in twins:
        train_alone(bench)
    monkeypatch.setenv("REGRAFT_JOBS_PER_WORKER", "2")

    supervisor, runs = Supervisor(Settings(), bench.database, bench.blobs, child_command), 0
    while runs < 3:  # nothing waits during the back-off of the killed one, if the other one has ended before
        runs += supervisor.run_waiting()

    with bench.database.read() as session:
        shared = AttemptRow.job_id.in_([killed, other])
        attempts = session.scalars(select(AttemptRow).where(shared).order_by(AttemptRow.started_at)).all()
        jobs = {job.id: job for job in session.scalars(select(Job)).all()}
    assert [(one.job_id, one.outcome) for one in attempts[:2]] == [(killed, "crashed"), (other, "succeeded")]
    assert attempts[1].started_at < present(attempts[0].ended_at), "they ran at the same time"
    assert (jobs[killed].status, jobs[other].status) == ("succeeded", "succeeded")
    assert jobs[other].failures == 0
    for one, twin in zip([killed, other], twins, strict=True):
        assert adapter(bench, one) == adapter(bench, twin)


def hold_nothing(listener: int, model: str) -> list[str]:
    """The command of a process that holds no base model."""
    return [sys.executable, "-c", "import signal; signal.pause()"]


class Children:
    """Runs that say which job they were given, and wait for SIGTERM. At SIGUSR1 they do not fit beside others."""

    def __init__(self, folder: Path) -> None:
        self.fifo = folder / "claims"
        os.mkfifo(self.fifo)
        # Without a buffer, in which a second line would be hidden from `select`.
        self._reader = os.fdopen(os.open(self.fifo, os.O_RDWR), "rb", buffering=0)
        self.pids: dict[str, int] = {}

    def __call__(self, progress: Path) -> list[str]:
        source = f"""
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *a: sys.exit({process.DRAINED}))
signal.signal(signal.SIGUSR1, lambda *a: [sys.stderr.write("no room"), sys.exit({process.ALONE})])
line = sys.stdin.readline()
with open({str(self.fifo)!r}, "w") as fifo:
    fifo.write(f"{{os.getpid()}} {{line}}")
signal.pause()
"""
        return [sys.executable, "-c", source]

    def next(self) -> tuple[str, str]:
        """The id of the next job that is started, and the folder of what it shares; "" if it runs alone."""
        assert select_ready([self._reader], [], [], 60)[0], "no other job was started"
        pid, job_id, _, *folder = self._reader.readline().decode().rstrip("\n").split(" ", 3)
        self.newest = self.pids[job_id] = int(pid)
        return job_id, "".join(folder)

    def another(self) -> bool:
        """Whether a further job is started within a second."""
        return bool(select_ready([self._reader], [], [], 1)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_worker_runs_as_many_jobs_on_a_base_as_it_may_and_each_ends_by_itself(
    bench: Bench, tmp_path: Path
) -> None:
    jobs = queue_jobs(bench, {}, {}, {})
    children = Children(tmp_path)
    settings = Settings(jobs_per_worker=2, reconcile_seconds=0.05)
    supervisor = Supervisor(settings, bench.database, bench.blobs, children, hold_nothing)
    worker = threading.Thread(target=supervisor.run_waiting)
    worker.start()

    (first, folder), (second, same_folder) = children.next(), children.next()
    assert {first, second} == set(jobs[:2])
    assert folder == same_folder and Path(folder).is_dir()
    with bench.database.write() as session:
        lifecycle.cancel(Work(session), session.scalars(select(Job).where(Job.id == first)).one())
    assert children.next() == (jobs[2], folder)
    supervisor.stop()
    worker.join(60)

    with bench.database.read() as session:
        found = {job.id: (job.status, job.failures) for job in session.scalars(select(Job))}
    assert found == {first: ("cancelled", 0), second: ("queued", 0), jobs[2]: ("queued", 0)}
    assert not Path(folder).exists()


class HeldLogs(Supervisor):
    """A supervisor that does not finish storing the logs of its runs before `may_end` is set."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log_seconds = 3600.0
        self.may_end = threading.Event()

    def _keep(self, claim: Claim, said: str) -> None:
        assert self.may_end.wait(60)


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_job_that_is_claimed_again_during_the_end_of_its_earlier_attempt_counts_as_running(
    bench: Bench, tmp_path: Path
) -> None:
    drained, other, *later = queue_jobs(bench, {}, {}, {}, {})
    set_status(bench, "paused", later)
    children = Children(tmp_path)
    settings = Settings(jobs_per_worker=3, reconcile_seconds=0.05)
    supervisor = HeldLogs(settings, bench.database, bench.blobs, children, hold_nothing)
    worker = threading.Thread(target=supervisor.run_waiting)
    worker.start()
    assert {children.next()[0], children.next()[0]} == {drained, other}

    os.kill(children.pids[drained], signal.SIGTERM)
    assert children.next()[0] == drained
    supervisor.may_end.set()
    set_status(bench, "queued", later)

    assert children.next()[0] == later[0]
    assert not children.another(), "a fourth job was started"
    supervisor.stop()
    worker.join(60)


def set_status(bench: Bench, status: str, jobs: Sequence[str]) -> None:
    with bench.database.write() as session:
        session.execute(update(Job).where(Job.id.in_(jobs)).values(status=status))


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_job_whose_device_cannot_be_shared_runs_alone(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Paths of Unix sockets have at most 107 bytes, and TMPDIR may be longer."""
    [job] = queue_jobs(bench, {})
    children = Children(tmp_path)
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    supervisor = Supervisor(Settings(jobs_per_worker=2), bench.database, bench.blobs, children, hold_nothing)
    worker = threading.Thread(target=supervisor.run_waiting)
    worker.start()

    assert children.next() == (job, "")
    supervisor.stop()
    worker.join(60)

    assert f"{job} runs alone: its device cannot be shared: AF_UNIX path too long" in caplog.text
    assert list(deep.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_job_that_does_not_fit_beside_others_runs_alone_at_no_cost(bench: Bench, tmp_path: Path) -> None:
    [large] = queue_jobs(bench, {})
    children = Children(tmp_path)
    settings = Settings(jobs_per_worker=2)
    supervisor = Supervisor(settings, bench.database, bench.blobs, children, hold_nothing)
    worker = threading.Thread(target=supervisor.run_waiting)
    worker.start()

    assert children.next()[1]
    os.kill(children.newest, signal.SIGUSR1)
    assert children.next() == (large, "")
    supervisor.stop()
    worker.join(60)

    with bench.database.read() as session:
        outcomes = [one.outcome for one in lifecycle.attempts(session, large)]
        events = session.scalars(select(Event.message).where(Event.job_id == large)).all()
        failures = session.scalars(select(Job.failures).where(Job.id == large)).one()
    assert outcomes == ["put_off", "drained"]
    assert failures == 0
    assert "Fine-tuning job will run alone on its worker: no room" in events


def test_a_run_that_does_not_fit_beside_others_tells_its_supervisor_why(
    bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    progress = tmp_path / "progress"
    progress.touch()

    scratch: list[Path] = []

    def assemble_nothing(*arguments: Any) -> NoReturn:
        scratch.extend(one for one in arguments if isinstance(one, Path))
        raise RunsAlone("no room")

    status = run_claim(
        f"{bench.claim.job_id} {bench.claim.epoch}\n",
        Settings(data_dir=tmp_path),
        assemble_nothing,
        progress,
        lambda: False,
    )

    assert status == process.ALONE
    [folder] = scratch
    assert folder.parent.name.startswith("regraft-run-") and not folder.parent.exists()
    assert "no room" in capfd.readouterr().err


def test_a_run_whose_worker_gives_no_turns_fails_without_a_traceback(
    bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    progress = tmp_path / "progress"
    progress.touch()

    def assemble_nothing(*arguments: Any) -> NoReturn:
        raise AssertionError("it has no turns")

    line = f"{bench.claim.job_id} {bench.claim.epoch} {tmp_path / 'nothing'}\n"
    status = run_claim(line, Settings(data_dir=tmp_path), assemble_nothing, progress, lambda: False)

    assert status == process.FAILED
    assert capfd.readouterr().err == f"{GONE}\n"


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_job_on_another_base_starts_when_the_others_have_ended(bench: Bench, tmp_path: Path) -> None:
    """No later job on their base is started before it, or it might never be."""
    registry = tmp_path / "models.toml"
    registry.write_text(registry.read_text() + registry.read_text().replace("models.tiny", "models.other"))
    jobs = queue_jobs(bench, {}, {"model": "other"}, {})
    children = Children(tmp_path)
    settings = Settings(jobs_per_worker=3, reconcile_seconds=0.05)
    supervisor = Supervisor(settings, bench.database, bench.blobs, children, hold_nothing)
    worker = threading.Thread(target=supervisor.run_waiting)
    worker.start()

    started = []
    for _ in jobs:
        started.append(children.next())
        with bench.database.write() as session:
            lifecycle.cancel(
                Work(session), session.scalars(select(Job).where(Job.id == started[-1][0])).one()
            )
    worker.join(60)

    assert [job_id for job_id, _ in started] == jobs
    assert len({folder for _, folder in started}) == 3


def offered(bench: Bench, **changes: Any) -> Job:
    [job_id] = queue_jobs(bench, changes)
    with bench.database.read() as session:
        return session.scalars(select(Job).where(Job.id == job_id)).one()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"ranks": 2}, "REGRAFT_RANKS is 2"),
        ({"nodes": 2, "rendezvous": "a:1"}, "REGRAFT_NODES is 2"),
        ({"sampling_gpus": 1}, "REGRAFT_SAMPLING_GPUS is 1"),
        ({"sampler": "vllm"}, "a vLLM engine of the job"),
        ({"sampler": "vllm", "samplers": {"tiny": ["http://a"]}, "samplers_key": "k"}, None),
    ],
)
def test_a_job_that_needs_more_than_its_part_of_a_device_runs_alone(
    bench: Bench, settings: dict[str, Any], reason: str | None
) -> None:
    found = why_alone(offered(bench), Settings(**settings))

    assert found is None if reason is None else reason in str(found)


@pytest.mark.usefixtures("environment")
def test_a_job_that_samples_nothing_shares_the_device_whatever_the_sampler(bench: Bench) -> None:
    job = offered(bench, method="supervised", body={"hyperparameters": {}})

    assert why_alone(job, Settings(sampler="vllm")) is None


@pytest.mark.usefixtures("environment")
def test_a_job_that_trains_all_weights_runs_alone(bench: Bench) -> None:
    job = offered(bench, body={"hyperparameters": {"advanced": {"train": "full"}}})

    assert "it trains all weights" in str(why_alone(job, Settings()))


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("mode", ["on_policy", "logits"])
def test_a_job_with_a_teacher_runs_alone(bench: Bench, mode: str) -> None:
    job = offered(bench, method="distillation", body={"mode": mode})

    assert "second model" in str(why_alone(job, Settings()))
