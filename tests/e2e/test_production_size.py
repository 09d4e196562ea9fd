"""The same code on PostgreSQL, Redis and S3: API and worker in processes of their own."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import regraft
from openai.types.fine_tuning.fine_tuning_job import FineTuningJob
from sqlalchemy import select

from core.database.engine import Database
from core.database.tables import Job
from core.storage import orphans
from core.storage.store import S3Blobs
from tests.e2e.conftest import ROOT, Server, wait_until_ready
from tests.e2e.test_openai_client import VALID, create, method, until, upload, wait
from tests.present import untyped
from tests.servers import Postgres, SeaweedFS, reserve_port

KEYS = {
    "AWS_ACCESS_KEY_ID": SeaweedFS.access_key,
    "AWS_SECRET_ACCESS_KEY": SeaweedFS.secret_key,
    "REGRAFT_S3_REGION": "us-east-1",
}


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture(scope="module")
def production(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    database_url: str,
    redis_url: str,
    seaweed: SeaweedFS,
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """An API and a worker, started as an operator would."""
    folder = tmp_path_factory.mktemp("production")
    seaweed.client.create_bucket(Bucket="regraft")
    registry = folder / "models.toml"
    registry.write_text(f'[models.tiny]\npath = "{tiny_model}"\ndtype = "float32"\ncontext = 128\n')
    port = reserve_port()
    environment = (
        os.environ
        | KEYS
        | {
            "REGRAFT_DATA_DIR": str(folder),
            "REGRAFT_DATABASE_URL": database_url,
            "REGRAFT_BROKER_URL": redis_url,
            "REGRAFT_BLOB_URL": "s3://regraft/all",
            "REGRAFT_S3_ENDPOINT_URL": seaweed.endpoint,
            "REGRAFT_MODELS_FILE": str(registry),
            "REGRAFT_PORT": str(port),
            "PYTHONFAULTHANDLER": "1",
            "REGRAFT_TORCH_THREADS": "1",
            # Long, so that only Celery's own messages can be what gets the job going.
            "REGRAFT_RECONCILE_SECONDS": "3600",
        }
    )

    def start(command: str) -> subprocess.Popen[bytes]:
        with (folder / f"{command}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "worker.cli", command],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
            )

    api = start("api")
    server = Server(api, port, folder)
    (folder / "server.log").symlink_to("api.log")  # which `wait_until_ready` quotes if the API does not start
    wait_until_ready(server)
    worker = start("worker")
    yield server, worker
    for process, name in ((worker, "worker"), (api, "api")):
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(150)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler writes where each thread is to the log
            status = process.wait(60)
        assert status == 0, (folder / f"{name}.log").read_text()[-10_000:]


@pytest.fixture(scope="module")
def finished(production: tuple[Server, subprocess.Popen[bytes]]) -> FineTuningJob:
    client = production[0].client()
    return wait(client, create(client, method=method(n_epochs=2)))


def test_a_job_runs_from_upload_to_model(
    production: tuple[Server, subprocess.Popen[bytes]], seaweed: SeaweedFS, finished: FineTuningJob
) -> None:
    job = finished
    client = production[0].client()

    assert job.status == "succeeded"
    assert client.files.content(job.result_files[0]).text.startswith("step,")
    assert [m["step"] for m in regraft.metrics(client, job.id)] == list(range(5))
    keys = [o["Key"] for o in seaweed.client.list_objects_v2(Bucket="regraft")["Contents"]]
    assert any(key.startswith("all/projects/") and key.endswith("adapter_model.safetensors") for key in keys)


def test_a_job_is_paused_resumed_and_cancelled(production: tuple[Server, subprocess.Popen[bytes]]) -> None:
    """The reconciler sleeps: each of these must itself wake or stop the worker, through Redis and PostgreSQL."""
    server, _ = production
    client = server.client()
    job = create(client, method=method(n_epochs=50, batch_size=1))

    def status() -> str:
        return client.fine_tuning.jobs.retrieve(job.id).status

    assert until(lambda: len(regraft.metrics(client, job.id)) > 2, 90)
    assert untyped(client.fine_tuning.jobs.pause(job.id)).status == "pausing"
    assert until(lambda: status() == "paused", 90)
    done = len(regraft.metrics(client, job.id))

    assert client.fine_tuning.jobs.resume(job.id).status == "queued"
    assert until(lambda: len(regraft.metrics(client, job.id)) > done, 90)
    said = [event.message for event in client.fine_tuning.jobs.list_events(job.id, limit=100)]
    assert said.count("Fine-tuning job paused") == said.count("Fine-tuning job resumed") == 1

    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    steps = [metrics["step"] for metrics in regraft.metrics(client, job.id)]
    assert steps == list(range(len(steps)))
    after = wait(client, create(client, method=method(n_epochs=1)))
    assert after.status == "succeeded", "the worker is free again"


def test_a_request_under_a_key_is_answered_once(production: tuple[Server, subprocess.Popen[bytes]]) -> None:
    server, _ = production
    client = server.client()
    keyed: dict[str, Any] = {"extra_headers": {"Idempotency-Key": "one"}}
    files = {"train": upload(client).id, "valid": upload(client, VALID).id}

    first = create(client, **files, **keyed)
    second = create(client, **files, **keyed)

    assert second.id == first.id
    client.fine_tuning.jobs.cancel(first.id)


def test_where_adapters_lie_is_not_told_to_tenants(
    production: tuple[Server, subprocess.Popen[bytes]], finished: FineTuningJob
) -> None:
    client = production[0].client()

    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(finished.id))

    assert checkpoints
    assert all(untyped(one).adapter is None for one in checkpoints)


def test_a_file_in_parts_crosses_the_store_whole(production: tuple[Server, subprocess.Popen[bytes]]) -> None:
    server, _ = production
    client = server.client()
    content = b'{"a": "%s"}\n' % os.urandom(10 << 20).hex().encode()

    upload = client.uploads.upload_file_chunked(
        file=content,
        filename="large.jsonl",
        bytes=len(content),
        mime_type="text/jsonl",
        purpose="fine-tune",
        part_size=9 << 20,
        md5=hashlib.md5(content).hexdigest(),
    )

    assert upload.status == "completed"
    assert upload.file is not None
    assert client.files.content(upload.file.id).read() == content


def test_when_the_work_is_done_every_blob_has_a_row(
    finished: FineTuningJob, database_url: str, seaweed: SeaweedFS
) -> None:
    """Of all that these tests have made, as if it were old, a sweep would remove nothing.

    But for what a run had just written when it found that its job was cancelled: that is what sweeps are for.
    """
    assert finished.status == "succeeded"
    database = Database(database_url)
    store = S3Blobs("regraft", "all", client=seaweed.client)

    found = list(chain.from_iterable(orphans.find(database, store, older_than=time.time() + 60)))
    with database.read() as session:
        cancelled = session.scalars(select(Job.id).where(Job.status == "cancelled")).all()
    database.close()

    assert [
        blob.key for blob in found if not any(f"/jobs/{job_id}/" in blob.key for job_id in cancelled)
    ] == []
    assert len(list(store.list("projects/"))) > 5
