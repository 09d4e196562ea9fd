"""The blob store may take minutes; a connection to the database is not held meanwhile."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.pool.base import Pool
from starlette.testclient import TestClient

from core.database.tables import Checkpoint
from core.results import evals
from core.storage.store import FolderBlobs
from tests.api.conftest import House
from tests.api.test_evals import validate
from tests.present import untyped
from tests.rollout_pages import sample, store_page

pytestmark = pytest.mark.both_databases


class Watching(FolderBlobs):
    """Notes how many connections are out of the pool whenever something is read.

    Tests clear `held` after their set-up: an upload reads an earlier file with the same content.
    """

    def watch(self, pool: Pool) -> None:
        self.pool = pool
        self.held: list[int] = []

    def open(self, key: str, **options: int) -> Iterator[bytes]:
        self.held.append(untyped(self.pool).checkedout())
        return super().open(key, **options)


@pytest.fixture
def blobs(house: House) -> Watching:
    watching = Watching(house.folder / "blobs")
    watching.watch(house.database.engine.pool)
    house.app.state.service = replace(house.app.state.service, blobs=watching)
    return watching


def test_samples_of_a_validation_are_read_without_a_connection(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]], blobs: Watching
) -> None:
    job = create_job()
    validate(house, job["id"], 2)
    items = f"/v1/evals/{job['eval_id']}/runs/{job['eval_id'].replace('eval_', 'evalrun_')}_2/output_items"
    blobs.held.clear()
    first = api.get(items).json()["data"][0]["id"]

    assert api.get(f"{items}/{first}").status_code == 200
    assert blobs.held == [0, 0]


def test_the_items_of_a_run_are_read_without_a_connection(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]], blobs: Watching
) -> None:
    job = create_job()
    page = store_page(house.blobs, job["id"], 0, "valid", [sample(0, 0)])
    page.summary = evals.summary([], evals.criteria(job["method"]["reinforcement"]["grader"]))
    with house.database.write() as session:
        session.add(page)
    [run] = api.get(f"/v1/evals/{job['eval_id']}/runs").json()["data"]
    blobs.held.clear()

    assert api.get(f"/v1/evals/{job['eval_id']}/runs/{run['id']}/output_items").status_code == 200
    assert blobs.held == [0]


def test_a_checkpoint_goes_home_without_a_connection(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]], blobs: Watching
) -> None:
    weights = b"weights"
    file = {"name": "adapter_model.safetensors", "bytes": 7, "sha256": hashlib.sha256(weights).hexdigest()}
    house.blobs.put_bytes(f"step-1/{file['name']}", weights)
    house.blobs.put_bytes("step-1/manifest.json", json.dumps({"format": 1, "files": [file]}).encode())
    job = create_job()
    with house.database.write() as session:
        checkpoint = Checkpoint(job_id=job["id"], step=1, epoch=1, blob_prefix="step-1")
        session.add(checkpoint)
        session.flush()
        url = f"/v1/regraft/checkpoints/{checkpoint.id}/archive"
    blobs.held.clear()

    answer = api.get(url)

    assert weights in answer.content
    assert answer.headers["x-content-type-options"] == "nosniff"
    # The manifest, and the weights: read once to check them, once to send them.
    assert blobs.held == [0, 0, 0]


def test_a_file_is_downloaded_without_a_connection(
    api: TestClient, upload: Callable[..., str], blobs: Watching
) -> None:
    assert api.get(f"/v1/files/{upload()}/content").status_code == 200
    assert blobs.held == [0]
