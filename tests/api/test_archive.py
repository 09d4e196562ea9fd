"""The archive of a checkpoint is the same bytes again while nothing has changed, so a broken download resumes."""

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from core.database.tables import Checkpoint, TunedModel
from tests.api.conftest import House

WEIGHTS = os.urandom(3000)


@pytest.fixture
def checkpoint(house: House, create_job: Callable[..., dict[str, Any]]) -> Checkpoint:
    names = ("adapter_model.safetensors", "tokenizer.json")
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    files = [{"name": name, "bytes": len(WEIGHTS), "sha256": sha256} for name in names]
    for name in names:
        house.blobs.put_bytes(f"step-1/{name}", WEIGHTS)
    house.blobs.put_bytes("step-1/manifest.json", json.dumps({"format": 1, "files": files}).encode())
    with house.database.write() as session:
        made = Checkpoint(job_id=create_job()["id"], step=1, epoch=1, blob_prefix="step-1")
        session.add(made)
        session.flush()
        session.expunge(made)
    return made


@pytest.fixture
def url(checkpoint: Checkpoint) -> str:
    return f"/v1/regraft/checkpoints/{checkpoint.id}/archive"


@pytest.mark.parametrize(
    ("start", "end"),
    [
        pytest.param(0, 1, id="a header"),
        pytest.param(700, 4500, id="over the end of the first file"),
        pytest.param(5000, None, id="the rest"),
    ],
)
def test_a_part_of_an_archive_can_be_downloaded(
    api: TestClient, url: str, start: int, end: int | None
) -> None:
    whole = api.get(url)
    last = "" if end is None else end - 1

    part = api.get(url, headers={"range": f"bytes={start}-{last}", "if-range": whole.headers["etag"]})

    assert (whole.status_code, whole.headers["accept-ranges"]) == (200, "bytes")
    assert (part.status_code, part.content) == (206, whole.content[start:end])
    assert part.headers["content-range"].endswith(f"/{len(whole.content)}")


@pytest.mark.parametrize(
    ("asked", "missing"),
    [("0-3583", "tokenizer.json"), ("4096-", "adapter_model.safetensors")],
    ids=["the first file", "all behind it"],
)
def test_a_part_reads_no_file_that_it_has_nothing_of(
    house: House, api: TestClient, url: str, asked: str, missing: str
) -> None:
    """A download that broke near its end does not read gigabytes again."""
    whole = api.get(url)
    house.blobs.delete(f"step-1/{missing}")

    part = api.get(url, headers={"range": f"bytes={asked}", "if-range": whole.headers["etag"]})

    first, _, last = asked.partition("-")
    assert part.status_code == 206
    assert part.content == whole.content[int(first) : int(last) + 1 if last else None]
    assert api.get(url).status_code == 410


def test_a_part_of_a_changed_archive_is_not_sent(
    house: House, api: TestClient, url: str, checkpoint: Checkpoint
) -> None:
    """Its model card names the model, which had no name at first."""
    before = api.get(url)
    with house.database.write() as session:
        named = TunedModel(
            name="ft:small:new",
            project_id=house.project.id,
            job_id=checkpoint.job_id,
            checkpoint_id=checkpoint.id,
            base_model="tiny",
        )
        session.add(named)

    after = api.get(url, headers={"range": "bytes=700-", "if-range": before.headers["etag"]})

    assert after.status_code == 200
    assert after.headers["etag"] != before.headers["etag"]
    assert b"ft:small:new" in after.content


def test_a_part_beyond_the_end_of_an_archive_is_refused(api: TestClient, url: str) -> None:
    answer = api.get(url, headers={"range": "bytes=99999999-"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (416, "range_not_satisfiable")


@pytest.mark.parametrize(
    "path", ["rollouts/download", "rollouts/download?format=parquet", "logs", "ledger/download"]
)
def test_what_is_made_while_it_is_sent_says_that_it_has_no_parts(
    api: TestClient, create_job: Callable[..., dict[str, Any]], path: str
) -> None:
    """The samples and logs of a job that runs are others at the next request."""
    answer = api.get(f"/v1/regraft/jobs/{create_job()['id']}/{path}", headers={"range": "bytes=0-1"})

    assert (answer.status_code, answer.headers["accept-ranges"]) == (200, "none")
