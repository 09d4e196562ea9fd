"""Batches: the requests of a file, answered in the background, with OpenAI's client."""

import asyncio
import json
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI, RateLimitError
from openai.types import Batch
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from sqlalchemy import delete

from core.claims import MAX_BACK_OFF
from core.database.tables import EvalJournal, EvalPage, EvalRun, Project, WebhookDelivery
from core.evals import batches, lifecycle
from core.evals.items import MAX_ROWS
from core.evals.rows import EvalRow
from core.outbound import webhooks
from core.retry import RetryPolicy
from tests.evals.conftest import House
from worker.evals.record import Record
from worker.supervisor.reconciler import MAX_ITEM_TRIES, Reconciler

CHAT: Any = "/v1/chat/completions"
RESPONSES: Any = "/v1/responses"
Line = dict[str, Any]


def chat_line(number: int, **body: Any) -> Line:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": f"q{number}"}]} | body
    return {"custom_id": f"row-{number}", "method": "POST", "url": CHAT, "body": asked}


def response_line(number: int, **body: Any) -> Line:
    asked = {"model": "tiny", "input": f"q{number}"} | body
    return {"custom_id": f"row-{number}", "method": "POST", "url": RESPONSES, "body": asked}


def upload(client: OpenAI, lines: list[Line], purpose: Any = "batch") -> str:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose=purpose).id


def create(client: OpenAI, lines: list[Line], endpoint: Any = CHAT, **more: Any) -> Batch:
    file = upload(client, lines)
    return client.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h", **more)


def read(client: OpenAI, file_id: str | None) -> list[Line]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def reconcile(house: House) -> None:
    Reconciler(
        house.settings, house.database, house.blobs, lambda task, queue, about="": True
    ).files_of_batches()


def test_the_chat_completions_of_a_file_are_in_the_output_file(house: House, client: OpenAI) -> None:
    batch = create(client, [chat_line(number) for number in range(3)], metadata={"team": "a"})
    assert (batch.status, batch.model, batch.metadata) == ("validating", "tiny", {"team": "a"})

    assert house.work() == 1

    done = client.batches.retrieve(batch.id)
    assert (done.status, done.error_file_id, done.errors) == ("completed", None, None)
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 3, "completed": 3, "failed": 0}
    lines = read(client, done.output_file_id)
    assert [line["custom_id"] for line in lines] == ["row-0", "row-1", "row-2"]
    assert [line["error"] for line in lines] == [None] * 3
    answers = [ChatCompletion.model_validate(line["response"]["body"]) for line in lines]
    assert [answer.choices[0].message.content for answer in answers] == ["q0", "q1", "q2"]
    file = client.files.retrieve(str(done.output_file_id))
    assert (file.purpose, file.expires_at) == ("batch_output", None)


def test_the_responses_of_a_file_have_the_shape_of_the_endpoint(house: House, client: OpenAI) -> None:
    batch = create(client, [response_line(1, instructions="Repeat.")], RESPONSES)

    house.work()

    [line] = read(client, client.batches.retrieve(batch.id).output_file_id)
    answer = Response.model_validate(line["response"]["body"])
    assert (answer.output_text, answer.instructions, answer.status) == ("q1", "Repeat.", "completed")
    assert house.model.requests[0]["messages"][0] == {"role": "system", "content": "Repeat."}


@pytest.mark.parametrize(("path", "line"), [(CHAT, chat_line(1)), (RESPONSES, response_line(1))])
def test_the_endpoint_and_the_urls_may_lack_the_version_as_azures_examples_do(
    house: House, client: OpenAI, path: str, line: Line
) -> None:
    short = path.removeprefix("/v1")
    batch = create(client, [line | {"url": short}, line | {"custom_id": "b"}], short)

    house.work()

    done = client.batches.retrieve(batch.id)
    assert (done.status, done.endpoint) == ("completed", path)
    assert [one["custom_id"] for one in read(client, done.output_file_id)] == ["row-1", "b"]


def test_parameters_reach_the_model_as_from_the_endpoint(house: House, client: OpenAI) -> None:
    create(client, [chat_line(1, temperature=0.5, max_tokens=7, user="someone")])

    house.work()

    [sent] = house.model.requests
    assert (sent["temperature"], sent["max_tokens"], sent["model"]) == (0.5, 7, "tiny")
    assert sent["regraft"]["base_model"] == "tiny"
    assert "user" not in sent


def test_refused_requests_are_in_the_error_file_and_the_others_are_answered(
    house: House, client: OpenAI
) -> None:
    house.model.fails.add("q2")
    batch = create(
        client, [chat_line(1), chat_line(2), chat_line(3, temperature=9), chat_line(4, stream=True)]
    )

    house.work()

    done = client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 4, "completed": 1, "failed": 3}
    assert [line["custom_id"] for line in read(client, done.output_file_id)] == ["row-1"]
    failed = {line["custom_id"]: line["response"] for line in read(client, done.error_file_id)}
    assert [failed[name]["status_code"] for name in ("row-2", "row-3", "row-4")] == [400] * 3
    assert failed["row-2"]["body"]["error"]["message"] == "no"
    assert failed["row-3"]["body"]["error"]["param"] == "temperature"
    assert failed["row-4"]["body"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("lines", "code", "line"),
    [
        ([chat_line(1), {"custom_id": "b"}], "missing_required_parameter", 2),
        ([chat_line(1), chat_line(1)], "duplicate_custom_id", 2),
        ([chat_line(1), chat_line(2, model="other")], "mismatched_model", 2),
        ([chat_line(1) | {"method": "GET"}], "invalid_method", 1),
        ([response_line(1)], "mismatched_url", 1),
        ([chat_line(1) | {"custom_id": 7}], "invalid_custom_id", 1),
        ([chat_line(1) | {"body": []}], "invalid_type", 1),
        ([chat_line(1, model=None)], "missing_required_parameter", 1),
        ([chat_line(1, model="nobody")], "model_not_found", None),
        ([chat_line(1, model="no\0body")], "model_not_found", None),
        ([chat_line(1, model="n" * 600)], "missing_required_parameter", 1),
    ],
)
def test_an_invalid_input_file_fails_the_batch_and_names_the_line(
    client: OpenAI, house: House, lines: list[Line], code: str, line: int | None
) -> None:
    batch = create(client, lines)

    assert (batch.status, batch.output_file_id, batch.finalizing_at) == ("failed", None, None)
    assert batch.failed_at is not None
    assert batch.errors is not None and batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, line)]
    assert house.work() == 0


def test_a_line_that_is_no_json_fails_the_batch(client: OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", b"{]\n"), purpose="batch")

    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

    assert batch.errors is not None and batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == ["invalid_json_line"]


def test_a_batch_reads_files_of_its_purpose_only(client: OpenAI, house: House) -> None:
    theirs = upload(house.openai(house.other_key), [chat_line(1)])
    for file, reason in ((upload(client, [chat_line(1)], "evals"), "purpose"), (theirs, "No such File")):
        with pytest.raises(BadRequestError, match=reason) as refused:
            client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        assert refused.value.param == "input_file_id"


def test_batches_are_listed_newest_first_and_a_projects_own(house: House, client: OpenAI) -> None:
    made = [create(client, [chat_line(number)]).id for number in range(3)]
    theirs = house.openai(house.other_key)

    assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
    assert list(theirs.batches.list()) == []
    for call in (theirs.batches.retrieve, theirs.batches.cancel):
        with pytest.raises(NotFoundError, match="No such batch"):
            call(made[0])
    with pytest.raises(BadRequestError):
        theirs.batches.list(after=made[0])


def test_a_repeated_request_with_its_key_creates_one_batch(house: House, client: OpenAI) -> None:
    file = upload(client, [chat_line(1)])
    headers = {"Idempotency-Key": "once"}

    made = [
        client.batches.create(
            input_file_id=file, endpoint=CHAT, completion_window="24h", extra_headers=headers
        ).id
        for _ in range(2)
    ]

    assert made[0] == made[1]
    assert len(list(client.batches.list())) == 1


def test_a_queue_that_is_full_refuses_a_batch(house: House, client: OpenAI) -> None:
    house.limit(queued_eval_runs=1)
    create(client, [chat_line(1)])

    with pytest.raises(RateLimitError, match="queued_eval_runs"):
        create(client, [chat_line(2)])


def test_a_file_with_too_many_requests_fails_its_batch() -> None:
    lines = [EvalRow(number, chat_line(number)) for number in range(1, MAX_ROWS + 2)]

    checked = batches.check(lines)

    assert [error["code"] for error in checked.errors] == ["too_many_requests"]


def test_a_batch_that_is_cancelled_keeps_the_answers_so_far(house: House, client: OpenAI) -> None:
    batch = create(client, [chat_line(number) for number in range(3)])
    answered(house, batch.id, 1)

    assert client.batches.cancel(batch.id).status == "cancelling"
    reconcile(house)

    done = client.batches.retrieve(batch.id)
    assert done.status == "cancelled"
    assert [line["custom_id"] for line in read(client, done.output_file_id)] == ["row-0"]
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_that_has_ended_is_not_cancelled(house: House, client: OpenAI) -> None:
    batch = create(client, [chat_line(1)])
    house.work()

    with pytest.raises(BadRequestError, match=f"The batch {batch.id} is already completed"):
        client.batches.cancel(batch.id)


def test_a_batch_whose_answers_are_lost_stops_no_other_and_fails(house: House, client: OpenAI) -> None:
    lost, whole = (create(client, [chat_line(number) for number in range(2)]) for _ in range(2))
    for batch in (lost, whole):
        answered(house, batch.id, 1)
        client.batches.cancel(batch.id)
    with house.database.write() as session:
        for table in (EvalPage, EvalJournal):
            session.execute(delete(table).where(table.run_id == lost.id))
    moment = 0.0
    reconciler = Reconciler(
        house.settings, house.database, house.blobs, lambda *wake: True, clock=lambda: moment
    )

    reconciler.files_of_batches()
    after_one = [client.batches.retrieve(batch.id).status for batch in (lost, whole)]
    for _ in range(MAX_ITEM_TRIES):
        moment += MAX_BACK_OFF
        reconciler.files_of_batches()

    assert after_one == ["cancelling", "cancelled"]
    failed = client.batches.retrieve(lost.id)
    assert (failed.status, failed.output_file_id) == ("failed", None)


def test_a_batch_ends_with_its_completion_window(house: House, client: OpenAI) -> None:
    batch = create(client, [chat_line(number) for number in range(3)])
    answered(house, batch.id, 1)

    with house.database.write() as session:
        lifecycle.expire_batches(session, batches.WINDOW_SECONDS)
        assert session.query(EvalRun).one().status != "canceled"
        lifecycle.expire_batches(session, -1)
    reconcile(house)

    done = client.batches.retrieve(batch.id)
    assert done.status == "expired"
    assert done.errors is not None and done.errors.data is not None
    assert [error.code for error in done.errors.data] == ["batch_expired"]
    assert [line["custom_id"] for line in read(client, done.output_file_id)] == ["row-0"]
    unexecuted = read(client, done.error_file_id)
    assert [line["custom_id"] for line in unexecuted] == ["row-1", "row-2"]
    error = {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }
    number = batch.id.removeprefix("batch_")
    assert unexecuted[0] == {
        "id": f"batch_req_{number}_2",
        "custom_id": "row-1",
        "response": None,
        "error": error,
    }


def test_a_resumed_batch_asks_only_for_what_it_lacks(house: House, client: OpenAI) -> None:
    batch = create(client, [chat_line(number) for number in range(4)])
    answered(house, batch.id, 2)

    house.work()

    assert house.model.asked == {"q2": 1, "q3": 1}
    done = client.batches.retrieve(batch.id)
    assert [line["custom_id"] for line in read(client, done.output_file_id)] == [
        f"row-{number}" for number in range(4)
    ]


def test_the_files_replace_the_items_and_are_written_once(house: House, client: OpenAI) -> None:
    batch = create(client, [chat_line(number) for number in range(200)])
    house.work()
    reconcile(house)
    batches.write_files(house.database, house.blobs, batch.id)

    with house.database.read() as session:
        assert session.query(EvalPage).count() == session.query(EvalJournal).count() == 0
    assert len(list(client.files.list(purpose="batch_output"))) == 1
    assert len(read(client, client.batches.retrieve(batch.id).output_file_id)) == 200


def test_output_files_expire_as_the_request_says(house: House, client: OpenAI) -> None:
    batch = create(client, [chat_line(1)], output_expires_after={"anchor": "created_at", "seconds": 3600})
    house.work()

    file = client.files.retrieve(str(client.batches.retrieve(batch.id).output_file_id))

    assert file.expires_at is not None
    assert abs(file.expires_at - file.created_at - 3600) <= 60


def test_subscribers_hear_of_a_batch_once_its_files_are_written(house: House, client: OpenAI) -> None:
    with house.database.write() as session:
        webhooks.create(
            session,
            session.get_one(Project, house.project.id),
            name="ci",
            url="https://example.com",
            event_types=[
                "batch.completed",
                "batch.cancelled",
                "batch.failed",
                "eval.run.succeeded",
                "eval.run.canceled",
            ],
            thresholds=None,
        )
    done = create(client, [chat_line(1)]).id
    house.work()
    cancelled = create(client, [chat_line(1)]).id
    client.batches.cancel(cancelled)

    assert [body["data"]["id"] for body in deliveries(house)] == [done]
    reconcile(house)
    assert [(body["type"], body["data"]["id"]) for body in deliveries(house)] == [
        ("batch.completed", done),
        ("batch.cancelled", cancelled),
    ]
    invalid = create(client, [chat_line(1) | {"method": "GET"}]).id
    assert [(body["type"], body["data"]["id"]) for body in deliveries(house)][2:] == [
        ("batch.failed", invalid)
    ]


def deliveries(house: House) -> list[Line]:
    with house.database.read() as session:
        return [json.loads(one.body) for one in session.query(WebhookDelivery).order_by(WebhookDelivery.seq)]


def test_a_batch_is_no_eval(house: House, client: OpenAI) -> None:
    batch = create(client, [chat_line(1)])

    assert list(client.evals.list()) == []
    with pytest.raises(NotFoundError):
        client.evals.runs.retrieve(batch.id, eval_id=batches.owner(house.project.id))


def answered(house: House, batch_id: str, count: int) -> None:
    """A worker answers the first requests and is then stopped, so that the batch waits for another one."""
    claim = house.runner().claim()
    assert claim is not None

    async def work() -> None:
        retry = RetryPolicy(1.0, lambda *about: None)
        record = Record(house.database, house.blobs, claim, house.settings.default_limits, retry)
        with house.database.read() as session:
            record.load(session, house.row(batch_id))
        for line in range(1, count + 1):
            record.finish(
                {
                    "id": f"batch_req_{line}",
                    "line": line,
                    "datasource_item_id": line,
                    "status": "pass",
                    "created_at": 1,
                    "datasource_item": {"custom_id": f"row-{line - 1}"},
                    "results": [],
                    "sample": {"status_code": 200, "request_id": "req_1", "body": {}},
                },
                15,
            )
        await record.flush()

    asyncio.run(work())
    with lifecycle.fenced(house.database, claim) as (session, run):
        lifecycle.release(session, run)
