"""README of the client, pagination; reference, lists: pages by hand and by themselves, and a cursor that is gone."""

from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.fine_tuning.fine_tuning_job import FineTuningJob

from tests.conformance.data import EXACT, TEST, TRAIN
from tests.conformance.helpers import EVENT, FILE, JOB, assert_documented
from tests.e2e.conftest import Server
from tests.present import present, untyped


@pytest.fixture(scope="module")
def files(environment: None) -> list[Any]:
    client = OpenAI()
    return [client.files.create(file=(f"{n}.jsonl", TRAIN), purpose="fine-tune").id for n in range(5)]


@pytest.fixture(scope="module")
def jobs(environment: None, files: list[Any]) -> list[Any]:
    client = OpenAI()
    test = client.files.create(file=("test.jsonl", TEST), purpose="fine-tune").id
    method: Any = {
        "type": "reinforcement",
        "reinforcement": {"grader": EXACT, "hyperparameters": {"n_epochs": 1, "batch_size": 2}},
    }
    jobs = [
        client.fine_tuning.jobs.create(
            model="o4-mini-2025-04-16",
            training_file=files[0],
            validation_file=test,
            method=method,
            metadata={"number": str(n), "suite": "pages"},
        )
        for n in range(4)
    ]
    for job in jobs:
        client.fine_tuning.jobs.cancel(job.id)
    return [job.id for job in jobs]


def test_files_come_in_pages_newest_first(files: list[Any]) -> None:
    client = OpenAI()

    page = client.files.list(limit=2)
    listed = [file.id for file in client.files.list(limit=2)]
    upwards = [file.id for file in client.files.list(limit=2, order="asc")]

    assert_documented(
        page,
        {"object": "list", "data": [FILE], "has_more": True, "first_id": listed[0], "last_id": listed[1]},
    )
    ours = [file_id for file_id in listed if file_id in files]
    assert ours == list(reversed(files))
    assert upwards == list(reversed(listed))
    assert len(set(listed)) == len(listed)


def test_pages_are_turned_by_hand(files: list[Any]) -> None:
    first = OpenAI().files.list(limit=2)

    assert first.has_next_page()
    assert present(first.next_page_info()).params == {"after": first.data[-1].id}
    second = first.get_next_page()
    assert {file.id for file in first.data}.isdisjoint(file.id for file in second.data)


def test_jobs_come_in_pages_and_by_metadata(jobs: list[Any]) -> None:
    client = OpenAI()

    page = client.fine_tuning.jobs.list(limit=2)
    listed = [job.id for job in client.fine_tuning.jobs.list(limit=2)]
    tagged = [job.id for job in client.fine_tuning.jobs.list(metadata={"suite": "pages", "number": "2"})]

    assert_documented(page, {"object": "list", "data": [JOB], "has_more": True})
    assert [job_id for job_id in listed if job_id in jobs] == list(reversed(jobs))
    assert tagged == [jobs[2]]


@pytest.mark.slow
def test_events_and_checkpoints_come_in_pages(trained: FineTuningJob) -> None:
    client = OpenAI()

    events = list(client.fine_tuning.jobs.list_events(trained.id, limit=2))
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(trained.id, limit=1))
    page = client.fine_tuning.jobs.list_events(trained.id, limit=3)

    assert_documented(page, {"object": "list", "data": [EVENT], "has_more": True})
    assert [event.id for event in events][:3] == [event.id for event in page.data]
    assert events[-1].message == f"Created fine-tuning job: {trained.id}"
    assert len({event.id for event in events}) == len(events) > 5
    assert len({checkpoint.id for checkpoint in checkpoints}) == len(checkpoints) == 2


def test_a_cursor_whose_item_was_deleted_goes_on_where_it_was(files: list[Any]) -> None:
    client = OpenAI()
    made = [client.files.create(file=(f"c{n}", TRAIN), purpose="fine-tune").id for n in range(3)]
    client.files.delete(made[1])

    rest = [file.id for file in client.files.list(after=made[1], limit=100)]

    assert rest[0] == made[0]
    assert made[2] not in rest


def test_a_cursor_that_never_was_is_refused() -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        OpenAI().files.list(after="file-neverneverneverneverne")

    assert refused.value.param == "after"


@pytest.mark.parametrize("base", ["", "/"])
def test_a_base_url_ends_with_a_slash_or_not(service: Server, base: str) -> None:
    client = OpenAI(base_url=service.base_url + base)

    assert untyped(client.files.list(limit=1)).object == "list"


def test_a_list_without_anything_is_a_list(service: Server) -> None:
    answer = httpx.get(
        f"{service.base_url}/fine_tuning/jobs?metadata%5Bk%5D=nothing-has-this",
        headers={"Authorization": f"Bearer {service.key}"},
    )

    assert_documented(answer.json(), {"object": "list", "data": lambda data: data == [], "has_more": False})
