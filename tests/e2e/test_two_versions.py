"""A rollout in the middle: the API of the version before and that of this one, on one database and one bucket.

The version before is what main had before the newest migration, so it is other code with another schema in mind. A
release without a migration is this code under another version.
"""

import os
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import ROOT, Server, wait_until_ready
from tests.e2e.test_failover import wait_until
from tests.e2e.test_openai_client import TRAIN, VALID, create, upload
from tests.servers import Postgres, reserve_port

pytestmark = pytest.mark.slow


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of the version before."""
    first, *later = sorted((ROOT / "migrations/versions").glob("[0-9]*.py"))
    if not later:
        pytest.skip(f"{first.name} is the only migration, so there is no version before")
    newest = later[-1].relative_to(ROOT)
    try:
        # Two branches may each have added a migration; what main had before it merged them has one newest.
        added = (
            git("log", "-1", "--first-parent", "-m", "--format=%H", "--diff-filter=A", "--", str(newest))
            .decode()
            .strip()
        )
        packed = git("archive", f"{added}^", "api", "core", "graders", "migrations", "worker")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"this checkout has no history from before {newest}")
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    assert not (folder / newest).exists()
    return folder


@contextmanager
def serving(code: Path | str, folder: Path, environment: dict[str, str]) -> Iterator[Server]:
    """The API of one version; it migrates the database to its own schema when it starts, if that is older."""
    port = reserve_port()
    with started("api", code, folder, environment | {"REGRAFT_PORT": str(port)}) as process:
        server = Server(process, port, folder)
        wait_until_ready(server)
        yield server


@contextmanager
def started(
    what: str, code: Path | str, folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this code, with its data and its log in the folder."""
    folder.mkdir()
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker.cli", what],
            cwd=folder,
            env=environment | {"PYTHONPATH": str(code), "REGRAFT_DATA_DIR": str(folder)},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def as_version(version: str, folder: Path) -> str:
    """A PYTHONPATH with this code under another version."""
    metadata = folder / f"regraft_server-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: regraft-server\nVersion: {version}\n")
    return f"{folder}{os.pathsep}{ROOT}"


@contextmanager
def asking(server: Server, headers: dict[str, str]) -> Iterator[Counter[int]]:
    """Ask it meanwhile, again and again. Gives how often there was which status."""
    done, statuses = threading.Event(), Counter[int]()

    def ask() -> None:
        with httpx.Client(base_url=server.base_url, headers=headers, timeout=30) as client:
            while not done.wait(0.05):
                for path in ("/files", "/fine_tuning/jobs"):
                    statuses[client.get(path).status_code] += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield statuses
    finally:
        done.set()
        thread.join()


def test_both_answer_on_the_new_schema_and_read_what_the_other_wrote(
    before: Path, postgres: Postgres, redis_url: str, tmp_path: Path
) -> None:
    models = tmp_path / "models.toml"
    models.write_text('[models.tiny]\nhub = "regraft/tiny"\n')
    environment = os.environ | {
        "REGRAFT_MODELS_FILE": str(models),
        "REGRAFT_DATABASE_URL": postgres.new_database(),
        "REGRAFT_BLOB_URL": str(tmp_path / "blobs"),
        "REGRAFT_BROKER_URL": redis_url,
    }
    with serving(before, tmp_path / "old", environment) as old:
        earlier = create(old.client())
        headers = {"Authorization": f"Bearer {old.key}"}
        with asking(old, headers) as meanwhile, serving(ROOT, tmp_path / "new", environment) as new:
            one = old.client()
            other = one.with_options(base_url=new.base_url)
            for writer, reader in ((one, other), (other, one)):
                train, valid = upload(writer, TRAIN).id, upload(writer, VALID).id
                job = create(writer, train=train, valid=valid)
                assert reader.files.content(train).read() == writer.files.content(train).read()
                assert reader.fine_tuning.jobs.retrieve(job.id).status == "validating_files"
                assert reader.fine_tuning.jobs.cancel(job.id).status == "cancelled"
                said = [
                    [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
                    for client in (one, other)
                ]
                assert said[0] == said[1] and len(said[0]) > 1
            listed = [[job.id for job in client.fine_tuning.jobs.list()] for client in (one, other)]
            assert listed[0] == listed[1] and earlier.id in listed[0] and len(listed[0]) == 3

    assert meanwhile.keys() == {200}
    assert meanwhile[200] > 10


def test_two_releases_with_one_schema_serve_together_with_one_worker(
    postgres: Postgres, redis_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models.toml"
    models.write_text(f'[models.tiny]\npath = "{tiny_model}"\ndtype = "float32"\ncontext = 128\n')
    environment = os.environ | {
        "REGRAFT_MODELS_FILE": str(models),
        "REGRAFT_DATABASE_URL": postgres.new_database(),
        "REGRAFT_BLOB_URL": str(tmp_path / "blobs"),
        "REGRAFT_BROKER_URL": redis_url,
        "REGRAFT_RECONCILE_SECONDS": "0.5",
        "REGRAFT_TORCH_THREADS": "1",
    }
    later = as_version("999.0", tmp_path / "later")
    with (
        serving(ROOT, tmp_path / "old", environment) as old,
        serving(later, tmp_path / "new", environment) as new,
        started("worker", later, tmp_path / "worker", environment) as worker,
    ):
        first = old.client()
        second = first.with_options(base_url=new.base_url)
        for writer, reader in ((first, second), (second, first)):
            job = create(writer)
            wait_until(partial(has_ended_or_validated, worker, reader, job.id))
            assert validated(writer, job.id)
            assert reader.fine_tuning.jobs.cancel(job.id).status == "cancelled"
            assert writer.fine_tuning.jobs.retrieve(job.id).status == "cancelled"
        seen = [
            httpx.get(f"{server.base_url}/regraft/workers", headers={"Authorization": f"Bearer {old.key}"})
            for server in (old, new)
        ]

    assert [[row["version"] for row in answer.json()["data"]] for answer in seen] == [["999.0"], ["999.0"]]


def validated(client: openai.OpenAI, job_id: str) -> bool:
    events = client.fine_tuning.jobs.list_events(job_id)
    return any(event.message.startswith("Files validated") for event in events)


def has_ended_or_validated(worker: subprocess.Popen[bytes], client: openai.OpenAI, job_id: str) -> bool:
    return worker.poll() is not None or validated(client, job_id)
