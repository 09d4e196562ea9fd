"""README of the client: raw and streaming responses, request ids, headers, errors by class, retries."""

import httpx
import openai
import pytest
from openai import OpenAI

from tests.conformance.data import EXACT
from tests.conformance.helpers import ERROR, assert_documented
from tests.e2e.conftest import Server
from tests.present import present, untyped


def test_a_raw_response_has_headers_and_parses() -> None:
    response = OpenAI().models.with_raw_response.list()

    assert response.status_code == 200
    assert response.headers["x-request-id"].startswith("req_")
    assert response.headers["openai-version"] == "2020-10-01"
    assert int(response.headers["openai-processing-ms"]) >= 0
    assert response.headers["openai-organization"]
    assert response.parse().data


def test_a_streaming_response_is_read_line_by_line() -> None:
    with OpenAI().fine_tuning.jobs.with_streaming_response.list() as response:
        assert response.headers["content-type"] == "application/json"
        assert "".join(response.iter_lines()).startswith("{")


def test_every_object_and_error_carries_its_request_id() -> None:
    client = OpenAI()

    assert present(client.models.retrieve("o4-mini-2025-04-16")._request_id).startswith("req_")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.fine_tuning.jobs.retrieve("ftjob-abc123")
    assert unknown.value.request_id is not None
    assert unknown.value.request_id.startswith("req_")


def test_an_unknown_job_has_the_recorded_answer() -> None:
    client = OpenAI()
    jobs = client.fine_tuning.jobs
    expected = {
        "message": "Could not find fine tune: ftjob-abc123",
        "type": "invalid_request_error",
        "param": "fine_tune_id",
        "code": "fine_tune_not_found",
    }

    for call in (
        jobs.retrieve,
        jobs.cancel,
        jobs.pause,
        jobs.resume,
        jobs.list_events,
        jobs.checkpoints.list,
    ):
        with pytest.raises(openai.NotFoundError) as unknown:
            call("ftjob-abc123")
        assert unknown.value.body == expected


def test_an_unknown_model_has_the_recorded_answer() -> None:
    client = OpenAI()

    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("ft:123")
    assert (
        untyped(unknown.value.body).pop("message").startswith("The model 'ft:123' does not exist")
    )  # and which do
    assert unknown.value.body == {
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="ft:123", messages=[{"role": "user", "content": "Hi"}])
    assert unknown.value.code == "model_not_found"


def test_a_wrong_key_is_an_authentication_error() -> None:
    for key in ("sk-wrong", "rg-wrong"):
        with pytest.raises(openai.AuthenticationError) as refused:
            OpenAI(api_key=key).models.list()
        assert refused.value.code == "invalid_api_key"
        assert refused.value.type == "invalid_request_error"
        assert refused.value.message.startswith("Error code: 401 - Incorrect API key provided: ")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nothing", None, 404),
        ("PUT", "/files", None, 405),
        ("POST", "/fine_tuning/jobs", b"{not json", 400),
        ("POST", "/fine_tuning/jobs", b"[]", 400),
        ("POST", "/fine_tuning/jobs", b"", 400),
        ("POST", "/files", b"no form", 400),
    ],
)
def test_every_refusal_is_in_the_envelope(
    service: Server, method: str, path: str, body: bytes | None, status: int
) -> None:
    response = httpx.request(
        method,
        service.base_url + path,
        content=body,
        headers={"Authorization": f"Bearer {service.key}", "Content-Type": "application/json"},
    )

    assert response.status_code == status, response.text
    assert_documented(response.json(), ERROR)
    assert response.headers["x-request-id"].startswith("req_")


def test_a_call_in_the_wrong_state_is_not_tried_again() -> None:
    client = OpenAI()
    files = [
        client.files.create(file=(name, b'{"messages": [{"role": "user", "content": "x"}], "reference_answer": "x"}'), purpose="fine-tune").id  # noqa: E501 - one call, as it is documented
        for name in ("a", "b")
    ]  # fmt: skip
    job = client.fine_tuning.jobs.create(
        model="o4-mini-2025-04-16",
        training_file=files[0],
        validation_file=files[1],
        method={"type": "reinforcement", "reinforcement": {"grader": EXACT}},
    )
    client.fine_tuning.jobs.cancel(job.id)

    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"  # again, without an error
    for call in (client.fine_tuning.jobs.pause, client.fine_tuning.jobs.resume):
        with pytest.raises(openai.BadRequestError) as refused:
            call(job.id)
        assert refused.value.type == "invalid_request_error"
