"""Checks of schemas and patterns: which requests take a place, and which requests they delay."""

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from api.http.schema_checks import in_turn
from graders.hazards.pool import OWNER
from tests.api.conftest import GRADER, House

if TYPE_CHECKING:
    from httpx2 import Response

ROWS = b'{"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}\n'
SCHEMA = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
PATTERN = {"type": "format", "name": "f", "input": "{{sample.output_text}}", "pattern": "a+"}
PAIR = {"type": "multi", "name": "m", "graders": {"f": PATTERN, "g": GRADER}, "calculate_output": "f + g"}

VALIDATE, RUN = "/v1/fine_tuning/alpha/graders/validate", "/v1/fine_tuning/alpha/graders/run"
JOBS, DRY_RUN = "/v1/fine_tuning/jobs", "/v1/regraft/jobs/validate"
ESTIMATE, PREVIEW = "/v1/regraft/estimate", "/v1/regraft/previews"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
DEPLOYMENT = "/openai/deployments/tiny/chat/completions"
OF_JOBS, OF_CHATS = [JOBS, DRY_RUN, ESTIMATE, PREVIEW], [CHAT, RESPONSES, DEPLOYMENT]


@pytest.fixture
def checked(house: House) -> Iterator[None]:
    """The first project has as many checks as it may have, and none may wait."""
    checks = house.app.state.service.admission.checks
    checks.waiting = 0
    places = [house.portal.call(checks.enter, house.project.id) for _ in range(checks.per_project)]
    yield
    for place in places:
        house.portal.call(place.leave)
    assert checks.in_use == 0


@pytest.fixture
def ask_for_job(
    api: TestClient, upload: Callable[..., str], job_request: Callable[..., dict[str, Any]]
) -> "Callable[..., Response]":
    def ask(url: str, **reinforcement: Any) -> "Response":
        files = {"training_file": upload(ROWS), "validation_file": upload(ROWS, name="v.jsonl")}
        job = job_request(reinforcement=reinforcement, **files)
        return api.post(url, json={"job": job} if url == DRY_RUN else job)

    return ask


def ask_for_grader(client: TestClient, url: str, grader: dict[str, Any]) -> "Response":
    sample = {"model_sample": "4", "item": {"answer": "4"}} if url == RUN else {}
    return client.post(url, json={"grader": grader} | sample)


def ask_for_answer(client: TestClient, url: str, form: dict[str, Any] | None) -> "Response":
    if url == RESPONSES:
        text = form and {"format": {"type": "json_schema", **form["json_schema"]}}
        return client.post(url, json={"model": "tiny", "input": "hello", "text": text})
    messages = [{"role": "user", "content": "hello"}]
    return client.post(url, json={"model": "tiny", "messages": messages, "response_format": form})


def is_refused(answer: "Response") -> bool:
    return (answer.status_code, answer.json().get("error", {}).get("code")) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize("grader", [PATTERN, PAIR])
@pytest.mark.parametrize("url", [VALIDATE, RUN])
def test_a_grader_with_a_pattern_takes_a_place(
    checked: None, api: TestClient, url: str, grader: dict[str, Any]
) -> None:
    assert is_refused(ask_for_grader(api, url, grader))


@pytest.mark.parametrize("url", OF_JOBS)
@pytest.mark.parametrize("asked", [{"grader": PATTERN}, {"response_format": FORM}])
def test_a_job_with_a_pattern_or_a_schema_takes_a_place(
    checked: None, ask_for_job: "Callable[..., Response]", url: str, asked: dict[str, Any]
) -> None:
    assert is_refused(ask_for_job(url, **asked))


@pytest.mark.parametrize("url", OF_CHATS)
def test_a_chat_with_a_schema_takes_a_place(checked: None, api: TestClient, url: str) -> None:
    assert is_refused(ask_for_answer(api, url, FORM))


@pytest.mark.parametrize("url", [VALIDATE, RUN])
def test_a_grader_without_a_pattern_takes_none(checked: None, api: TestClient, url: str) -> None:
    assert ask_for_grader(api, url, GRADER).status_code == 200


@pytest.mark.parametrize("url", [JOBS, DRY_RUN, ESTIMATE])
def test_a_job_without_either_takes_none(
    checked: None, ask_for_job: "Callable[..., Response]", url: str
) -> None:
    answer = ask_for_job(url)

    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("form", [None, {"type": "text"}, {"type": "json_object"}])
@pytest.mark.parametrize("url", [CHAT, DEPLOYMENT])
def test_a_chat_without_a_schema_takes_none(
    checked: None, api: TestClient, url: str, form: dict[str, str] | None
) -> None:
    assert ask_for_answer(api, url, form).json()["error"]["code"] == "serving_not_configured"


def test_a_project_that_has_all_its_checks_refuses_no_other_project_any(checked: None, house: House) -> None:
    others = house.client(house.other_key)

    assert ask_for_grader(others, RUN, PATTERN).status_code == 200
    assert ask_for_answer(others, CHAT, FORM).json()["error"]["code"] == "serving_not_configured"


def test_one_beyond_its_places_waits_for_the_next_instead_of_being_refused(
    house: House, api: TestClient
) -> None:
    checks = house.app.state.service.admission.checks
    checks.per_project = 1
    first = house.portal.call(checks.enter, house.project.id)

    async def ended_when_it_waits() -> None:
        while not checks.queued(house.project.id):
            await asyncio.sleep(0)
        first.leave()

    ending = house.portal.start_task_soon(ended_when_it_waits)

    assert ask_for_grader(api, VALIDATE, PATTERN).status_code == 200
    ending.result()


def test_what_a_check_asks_of_the_hazard_pool_has_its_project_for_an_owner(house: House) -> None:
    owners: list[str] = []

    asyncio.run(in_turn(lambda: owners.append(OWNER.get()), house.app.state.service, house.project))

    assert owners == [house.project.id]


@pytest.fixture
def full(house: House) -> Iterator[None]:
    """The first project has as many checks of addresses and reads of files as it may have, and none may wait."""
    admission = house.app.state.service.admission
    places = []
    for share in (admission.address_checks, admission.file_reads):
        share.waiting = 0
        places += [house.portal.call(share.enter, house.project.id) for _ in range(share.per_project)]
    yield
    for place in places:
        house.portal.call(place.leave)


HOOK = {"name": "h", "url": "https://8.8.8.8/", "event_types": ["fine_tuning.job.succeeded"]}


def test_checks_of_webhook_addresses_take_places_of_their_project(house: House, api: TestClient) -> None:
    """A name server that never answers would otherwise hold all threads of the process."""
    made = api.post("/v1/webhook_endpoints", json=HOOK).json()

    assert made["url"] == HOOK["url"]
    assert api.post(f"/v1/webhook_endpoints/{made['id']}", json={"url": HOOK["url"]}).status_code == 200


def test_a_project_that_has_all_its_checks_of_addresses_is_refused_alone(
    full: None, house: House, api: TestClient
) -> None:
    others = house.client(house.other_key)

    assert is_refused(api.post("/v1/webhook_endpoints", json=HOOK))
    assert others.post("/v1/webhook_endpoints", json=HOOK).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "regraft/jobs/ftjob-1/rollouts",
        "regraft/jobs/ftjob-1/rollouts/prompts",
        "regraft/jobs/ftjob-1/regrades/regrade_1/answers",
        "evals/eval_1/runs/evalrun_1/output_items",
    ],
)
def test_a_project_that_has_all_its_searches_is_refused_alone(
    house: House, api: TestClient, path: str
) -> None:
    searches = house.app.state.service.admission.searches
    searches.waiting = 0
    places = [house.portal.call(searches.enter, house.project.id) for _ in range(searches.per_project)]

    refused = api.get(f"/v1/{path}")
    allowed = house.client(house.other_key).get(f"/v1/{path}")
    for place in places:
        house.portal.call(place.leave)

    assert is_refused(refused)
    assert (allowed.status_code, searches.in_use) == (404, 0)
    assert api.get(f"/v1/{path}").status_code == 404


def test_a_project_that_reads_as_many_files_as_it_may_downloads_no_archive(
    full: None, house: House, api: TestClient
) -> None:
    others = house.client(house.other_key)
    url = "/v1/regraft/checkpoints/ftckpt_unknown/archive"

    assert is_refused(api.get(url))
    assert others.get(url).status_code == 404
