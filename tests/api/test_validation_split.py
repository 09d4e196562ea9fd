"""A job's validation_split: files made of its training file, once."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select
from starlette.testclient import TestClient

from core.database.tables import Event, File
from tests.api.conftest import House

JOBS = "/v1/fine_tuning/jobs"
Upload = Callable[..., str]
JobRequest = Callable[..., dict[str, Any]]


def rows(number: int, **answer: Any) -> bytes:
    lines = [
        {"messages": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} | answer for n in range(number)
    ]
    return "\n".join(json.dumps(line) for line in lines).encode()


def content(api: TestClient, file_id: str) -> list[Any]:
    text = api.get(f"/v1/files/{file_id}/content").text
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.both_databases
def test_a_job_gets_a_validation_file_out_of_its_training_file(
    api: TestClient, house: House, job_request: JobRequest, upload: Upload
) -> None:
    source = upload(rows(40))
    asked = job_request(training_file=source, validation_split=0.25) | {"validation_file": None}
    job = api.post(JOBS, json=asked).json()

    training, validation = content(api, job["training_file"]), content(api, job["validation_file"])
    assert (len(training), len(validation)) == (30, 10)
    assert sorted((*training, *validation), key=lambda row: int(row["answer"])) == content(api, source)
    names = {one["id"]: one["filename"] for one in api.get("/v1/files").json()["data"]}
    assert names[job["training_file"]].endswith(".0.75.train.jsonl")
    assert names[job["validation_file"]].endswith(".0.25.valid.jsonl")
    with house.database.read() as session:
        said = session.scalars(select(Event.message).where(Event.job_id == job["id"])).all()
    assert f"Divided {source} into these files by validation_split" in said


def test_the_same_split_is_the_same_files(
    api: TestClient, house: House, job_request: JobRequest, upload: Upload
) -> None:
    asked = job_request(training_file=upload(rows(40)), validation_split=0.25) | {"validation_file": None}
    headers = {"Idempotency-Key": "k"}
    first, replayed, second = (
        api.post(JOBS, json=asked, headers=one).json() for one in (headers, headers, {})
    )

    assert replayed["id"] == first["id"] != second["id"]
    assert {(job["training_file"], job["validation_file"]) for job in (first, replayed, second)} == {
        (first["training_file"], first["validation_file"])
    }
    with house.database.read() as session:
        known = set(session.scalars(select(File.blob_key)))
    stored = {entry for entry in house.blobs.list("projects/") if "/files/" in entry}
    assert stored == known, "contents without a file are left behind"


def test_a_supervised_job_may_split(api: TestClient, upload: Upload) -> None:
    line = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    lines = [
        line | {"messages": [{"role": "user", "content": str(n)}, line["messages"][1]]} for n in range(20)
    ]
    source = upload("\n".join(map(json.dumps, lines)).encode())
    job = api.post(JOBS, json={"model": "tiny", "training_file": source, "validation_split": 0.1}).json()

    assert len(content(api, job["validation_file"])) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"validation_split": 0.6}, "validation_split"),
        ({"validation_split": 0}, "validation_split"),
        ({"validation_split": 0.1, "validation_file": "file-1"}, "validation_file"),
        ({"validation_split": 0.1, "training_file": "file-none"}, "training_file"),
    ],
)
def test_what_cannot_be_split_is_refused(
    api: TestClient, job_request: JobRequest, fields: dict[str, Any], param: str
) -> None:
    answer = api.post(JOBS, json=job_request() | {"validation_file": None} | fields)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_broken_line_of_the_file_is_named(api: TestClient, job_request: JobRequest, upload: Upload) -> None:
    source = upload(rows(3) + b"\nnot json")
    answer = api.post(
        JOBS, json=job_request(training_file=source, validation_split=0.5) | {"validation_file": None}
    )

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        400,
        "training_file",
        "invalid_training_file",
    )
    assert "line 4" in error["message"]


def test_a_job_may_validate_on_its_training_file_with_a_warning(
    api: TestClient, job_request: JobRequest, upload: Upload
) -> None:
    source = upload(rows(4))
    asked = job_request(training_file=source, validation_file=source)

    job = api.post(JOBS, json=asked).json()
    answer = api.post("/v1/regraft/jobs/validate", json={"job": asked}).json()

    assert (job["training_file"], job["validation_file"]) == (source, source)
    assert answer["warnings"] == [
        "The validation file is the training file, so validation proves nothing about new prompts."
    ]


def test_an_estimate_counts_the_rows_of_both_sides(
    api: TestClient, job_request: JobRequest, upload: Upload
) -> None:
    asked = job_request(training_file=upload(rows(40)), validation_split=0.25) | {"validation_file": None}
    made = api.post("/v1/regraft/estimate", json=asked)

    assert made.status_code == 200, made.text
    assert (made.json()["training_rows"], made.json()["validation_rows"]) == (30, 10)
    assert len(api.get("/v1/files").json()["data"]) == 3, "an estimate makes no files"


def test_files_that_are_not_used_are_not_kept(
    api: TestClient, house: House, job_request: JobRequest, upload: Upload
) -> None:
    source = upload(rows(40))
    upload(rows(41))  # a store without any content would count as another one
    with house.database.read() as session:
        key = session.scalar(select(File.blob_key).where(File.id == source))
    assert key is not None
    house.blobs.delete(key)
    answer = api.post(
        JOBS, json=job_request(training_file=source, validation_split=0.25) | {"validation_file": None}
    )

    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "file_damaged")
    with house.database.read() as session:
        known = set(session.scalars(select(File.blob_key)))
    assert {entry for entry in house.blobs.list("projects/") if "/files/" in entry} == known - {key}


def test_a_split_that_leaves_too_few_rows_is_refused_before_there_is_a_job(
    api: TestClient, upload: Upload
) -> None:
    lines = [
        {"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "yes"}]}
        for n in range(11)
    ]
    source = upload("\n".join(json.dumps(line) for line in lines).encode())

    answer = api.post(JOBS, json={"model": "tiny", "training_file": source, "validation_split": 0.3})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        400,
        "validation_split",
        "invalid_n_examples",
    )
    assert "leaves 8 of 11 rows" in error["message"]
    assert api.get(JOBS).json()["data"] == []
