"""Measure the time to the first sample of a job with a rollout fleet, beside that of a job that starts an engine.

SmolLM2-135M in float32, whose weights and forward-pass checks take seconds on a CPU, and vLLM in both cases. Both
servers have run a job before, so verdicts are stored and compiled code is cached. `loaded_seconds` is when the worker
has loaded and checked its own model: without a fleet the first sample comes after it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from bench.models import SMOLLM2
from bench.queue import is_sampled, is_validated, when
from bench.report import report
from bench.sizes import TINY, sized
from core.database.engine import Database
from core.database.tables import Event
from core.registry import Registry
from core.settings import Settings
from tests.e2e.conftest import ROOT, Server, launch
from tests.e2e.test_openai_client import TRAIN, VALID, create, method, upload
from tests.servers import reserve_port
from tests.tiny import make_tiny_model
from worker.model.policy import source_of

JOBS = sized(3, 1)
PATIENCE = 600.0  # seconds; the first job has vLLM compile
KEY = "the-secret-of-this-fleet"
ADVANCED = {"sampling": {"group_size": 4, "max_completion_tokens": 4}, "lora": {"rank": 8}}


def main() -> None:
    # Or each process would compile vLLM again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entry = Registry.load(None).get(SMOLLM2)
        source = make_tiny_model(folder / "model") if TINY else source_of(entry, folder / "models")
        models = f'[models.tiny]\npath = "{source}"\ndtype = "float32"\ncontext = 512\n'
        alone = served(folder / "alone", models, REGRAFT_SAMPLER="vllm", REGRAFT_KV_CACHE_GIB="0.25")
        with running_fleet(folder / "fleet", models) as addresses:
            fleet = served(folder / "fleet", models, **addresses)
    report(
        "first_sample",
        {
            "with_fleet_seconds": fleet[0],
            "with_fleet_loaded_seconds": fleet[1],
            "without_fleet_seconds": alone[0],
            "without_fleet_loaded_seconds": alone[1],
            "ratio": alone[0] / fleet[0],
        },
    )


def served(folder: Path, models: str, **environment: str) -> tuple[float, float]:
    server = launch(folder, models, **environment)
    try:
        return measure(server)
    finally:
        server.stop()


@contextmanager
def running_fleet(folder: Path, models: str) -> Iterator[dict[str, str]]:
    """A fleet of one process on the server's blob store. Yields the settings of a server that uses it."""
    folder.mkdir()
    registry = folder / "fleet.toml"
    registry.write_text(models)
    address, key = f"http://127.0.0.1:{reserve_port()}", {"REGRAFT_SAMPLERS_KEY": KEY}
    sampler = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "worker.cli",
            "sampler",
            "--model",
            "tiny",
            "--port",
            address.rpartition(":")[2],
        ],
        cwd=ROOT,
        env=os.environ
        | key
        | {
            "REGRAFT_DATA_DIR": str(folder / "sampler"),
            "REGRAFT_BLOB_URL": str(folder / "blobs"),
            "REGRAFT_MODELS_FILE": str(registry),
            "REGRAFT_KV_CACHE_GIB": "0.25",
            # On a CPU vLLM computes every adapter with the rank of its slot.
            "REGRAFT_INFERENCE_MAX_LORA_RANK": str(ADVANCED["lora"]["rank"]),
        },
    )
    try:
        while sampler.poll() is None and not answers(f"{address}/health"):
            time.sleep(0.5)
        yield key | {"REGRAFT_SAMPLERS": f'{{"tiny": ["{address}"]}}'}
    finally:
        sampler.terminate()
        sampler.wait()


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address).close()
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def measure(server: Server) -> tuple[float, float]:
    """Median seconds from a job's validation to its first graded sample, and to its loaded model."""
    client = server.client()
    train, valid = upload(client, TRAIN).id, upload(client, VALID).id
    database = Database(Settings(data_dir=server.folder).database)
    found = []
    for number in range(JOBS + 1):
        how = method(n_epochs=1, batch_size=4, advanced=ADVANCED)
        job = create(client, train, valid, method=how)
        when(database, is_validated, job.id)
        start = time.perf_counter()
        sampled, loaded = when_both(database, job.id)
        if number > 0:
            found.append((sampled - start, loaded - start))
        client.fine_tuning.jobs.cancel(job.id)
    database.close()
    sampled, loaded = (statistics.median(took) for took in zip(*found, strict=True))
    return sampled, loaded


def when_both(database: Database, job_id: str) -> tuple[float, float]:
    """The moments at which its first sample is recorded and its model is loaded, which come in either order."""
    with ThreadPoolExecutor(2) as both:
        sampled, loaded = (
            both.submit(when, database, reached, job_id, PATIENCE) for reached in (is_sampled, is_loaded)
        )
        return sampled.result(), loaded.result()


def is_loaded(session: Session, job_id: str) -> bool:
    checked = Event.message.startswith("The model's log-probabilities are those of transformers")
    return bool(session.scalar(select(func.count()).where(Event.job_id == job_id, checked)))


if __name__ == "__main__":
    main()
