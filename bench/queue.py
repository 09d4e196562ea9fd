"""Measure the time to the first sample of a job on an idle machine, by phase. The next job follows at once.

A real `regraft-server up` that has run a job before, and a tiny model, so that what is measured is the service and
not the weights. The first sample counts when it is graded and recorded: step 0, the validation of the base model.
"""

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from bench.report import report
from bench.sizes import sized
from core.database.engine import Database
from core.database.tables import Event, Job, StepMetric
from core.settings import Settings
from tests.e2e.conftest import Server, start_server
from tests.e2e.test_openai_client import TRAIN, VALID, create, method, upload, wait
from tests.tiny import make_tiny_model

JOBS = sized(5, 1)
LOOK_EVERY = 0.005
# The imports that each job would wait for if its process were not forked (worker/forking.py).
IMPORTS = "import worker.preloaded"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = start_server(folder, make_tiny_model(folder / "model"))
        try:
            figures = measure(server)
        finally:
            server.stop()
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    report("queue", figures | {"saved_imports_seconds": time.perf_counter() - start})


def measure(server: Server) -> dict[str, float]:
    """Median seconds of each phase; `create_to_first_sample_seconds` is all of them but the validation."""
    client = server.client()
    train, valid = upload(client, TRAIN).id, upload(client, VALID).id
    wait(client, create(client, train, valid, method=method(n_epochs=1)))
    database = Database(Settings(data_dir=server.folder).database)
    found = []
    for _ in range(JOBS):
        moments = [time.perf_counter()]
        job = create(client, train, valid, method=method(n_epochs=1))
        moments.append(time.perf_counter())
        for reached in (is_validated, is_claimed, is_loaded, is_sampled):
            moments.append(when(database, reached, job.id))
        found.append([after - before for before, after in itertools.pairwise(moments)])
        wait(client, job)
    database.close()
    names = ("create", "validation", "claim", "start_and_load", "first_sample")
    phases = {
        f"{name}_seconds": statistics.median(took)
        for name, took in zip(names, zip(*found, strict=True), strict=True)
    }
    totals = [sum(took) - took[names.index("validation")] for took in found]
    return {"create_to_first_sample_seconds": statistics.median(totals), **phases}


def when(
    database: Database, reached: Callable[[Session, str], bool], job_id: str, seconds: float = 60.0
) -> float:
    """The moment at which it is, to a few milliseconds."""
    for _ in range(int(seconds / LOOK_EVERY)):
        with database.read() as session:
            if reached(session, job_id):
                return time.perf_counter()
        time.sleep(LOOK_EVERY)
    raise TimeoutError(f"{job_id}: {reached.__name__} was not reached")


def is_validated(session: Session, job_id: str) -> bool:
    return session.scalar(select(Job.status).where(Job.id == job_id)) != "validating_files"


def is_claimed(session: Session, job_id: str) -> bool:
    return session.scalar(select(Job.started_at).where(Job.id == job_id)) is not None


def is_loaded(session: Session, job_id: str) -> bool:
    said = select(func.count()).where(Event.job_id == job_id, Event.message.startswith("Sampling with"))
    return bool(session.scalar(said))


def is_sampled(session: Session, job_id: str) -> bool:
    return bool(session.scalar(select(func.count()).where(StepMetric.job_id == job_id)))


if __name__ == "__main__":
    main()
