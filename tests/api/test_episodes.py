"""Episodes of the user's own agent as the API has them: leases, keys, and what is refused before a run sees it."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient

from api.resources.episodes import MAX_WAITING, EpisodeRuns
from core.database.tables import Job
from core.jobs import episode_servers
from core.jobs.episode_servers import EpisodeRun, episode_id, key_of
from tests import factories
from tests.api.conftest import GRADER, House
from tests.api.test_chat import served

CHAT = {"model": "any", "messages": [{"role": "user", "content": "?"}]}
SAID = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "4",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}


class Run:
    """The run of a job, which writes down what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []
        self.refuses = ""  # the path that it refuses
        self.status = 409  # of refusals
        self.open: list[Any] = []
        self.app = FastAPI()

        @self.app.post("/{path:path}")
        async def answer(path: str, request: Request) -> Response:
            assert request.headers["authorization"].startswith("Bearer ")
            self.got.append((path, await request.json()))
            if self.refuses and path.endswith(self.refuses):
                error = {
                    "message": "over",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "episode_over",
                }
                return JSONResponse({"error": error}, self.status)
            return JSONResponse(
                {"data": self.open} if path == "lease" else SAID if path.endswith("chat") else {}
            )


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def url(run: Run) -> Iterator[str]:
    yield from served(run.app)


@pytest.fixture
def job(house: House) -> str:
    body = {"grader": GRADER, "hyperparameters": {}, "environment": {"type": "client", "timeout_s": 60}}
    with house.database.write() as session:
        return factories.job(session, house.project, status="running", body=body).id


@pytest.fixture
def secret(house: House, job: str, url: str) -> str:
    with house.database.write() as session:
        return episode_servers.publish(session, session.query(Job).where(Job.id == job).one(), url)


@pytest.fixture
def agent(house: House, job: str, secret: str) -> TestClient:
    """A client with the key of the episode 1."""
    return house.client(key_of(secret, episode_id(job, 0, 1)))


def path_of(job: str, rest: str, number: int = 1) -> str:
    return f"/v1/regraft/episodes/{episode_id(job, 0, number)}/{rest}"


CHAT_PATH, MODELS_PATH = "v1/chat/completions", "v1/models"


def test_the_key_of_an_episode_is_good_for_this_episode_only(
    house: House, api: TestClient, agent: TestClient, job: str
) -> None:
    assert agent.post(path_of(job, CHAT_PATH), json=CHAT).status_code == 200
    assert agent.get(path_of(job, MODELS_PATH)).json()["data"][0]["id"] == "tiny"

    refused = [
        agent.post(path_of(job, CHAT_PATH, number=2), json=CHAT),
        agent.post(path_of(job, "complete", number=2), json={}),
        agent.get(path_of("ftjob-absent", MODELS_PATH)),
        agent.get("/v1/files"),
        agent.post(f"/v1/regraft/jobs/{job}/episodes/lease", json={}),
        api.post(path_of(job, CHAT_PATH), json=CHAT),
        house.client().get(path_of(job, MODELS_PATH)),
    ]
    assert [answer.status_code for answer in refused] == [401] * len(refused)


def test_a_large_conversation_is_read_with_the_key_of_its_episode(
    agent: TestClient, job: str, run: Run
) -> None:
    large = {"model": "any", "messages": [{"role": "user", "content": "a" * 100_000}]}

    assert agent.post(path_of(job, CHAT_PATH), json=large).status_code == 200
    assert agent.post(path_of(job, CHAT_PATH, number=2), json=large).status_code == 401
    assert len(run.got) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"logit_bias": {"1": 2}},
        {"stop": "a"},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "none"},
    ],
)
def test_what_would_change_the_sampled_distribution_is_refused_by_its_name(
    agent: TestClient, job: str, run: Run, fields: dict[str, Any]
) -> None:
    answer = agent.post(path_of(job, CHAT_PATH), json=CHAT | fields)

    [name] = fields
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert run.got == []


def test_a_request_reaches_the_run_with_what_identifies_its_retries(
    agent: TestClient, job: str, run: Run
) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    sent = {"model": "any", "messages": [parts], "temperature": 0.2, "n": 1}
    headers = {"Idempotency-Key": "k", "X-Stainless-Retry-Count": "1"}

    answer = agent.post(path_of(job, CHAT_PATH), json=sent, headers=headers)

    assert answer.json() == SAID | {"model": "any"}
    [(path, got)] = run.got
    assert path == f"episodes/{episode_id(job, 0, 1)}/chat"
    assert got == {
        "messages": [{"role": "user", "content": "ab"}],
        "tools": [],
        "parallel": True,
        "key": "k",
        "is_retry": True,
        "sampling": {"temperature": 0.2},
    }


def test_an_answer_is_streamed_in_the_pieces_of_the_official_client(agent: TestClient, job: str) -> None:
    sent = CHAT | {"stream": True, "stream_options": {"include_usage": True}}

    lines = agent.post(path_of(job, CHAT_PATH), json=sent).text.split("\n\n")

    *events, done, end = [line.removeprefix("data: ") for line in lines]
    assert (done, end) == ("[DONE]", "")
    chunks = [json.loads(event) for event in events]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert [piece["content"] for piece in deltas if "content" in piece] == ["", "4"]
    [call] = [piece["tool_calls"] for piece in deltas if "tool_calls" in piece]
    assert call[0]["index"] == 0 and call[0]["function"]["name"] == "f"
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1] == {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "any", "choices": [],
        "usage": SAID["usage"],
    }  # fmt: skip


@pytest.mark.parametrize(("count", "is_retry"), [("0", False), ("00", False), ("x", False), ("2", True)])
def test_a_retry_of_the_official_client_is_known_by_its_number(
    agent: TestClient, job: str, run: Run, count: str, is_retry: bool
) -> None:
    agent.post(path_of(job, CHAT_PATH), json=CHAT, headers={"X-Stainless-Retry-Count": count})

    assert run.got[0][1]["is_retry"] is is_retry


@pytest.mark.parametrize("reward", ["NaN", "1e999", '"high"', "1e30", "true"])
def test_a_reward_that_is_no_number_to_train_with_is_refused(
    agent: TestClient, job: str, run: Run, reward: str
) -> None:
    body = f'{{"status": "ready", "reward": {reward}}}'

    answer = agent.post(path_of(job, "complete"), content=body, headers={"content-type": "application/json"})

    assert answer.status_code == 400
    assert run.got == []


def test_a_failed_episode_has_no_reward(agent: TestClient, job: str) -> None:
    assert agent.post(path_of(job, "complete"), json={"status": "failed", "reward": 1}).status_code == 400
    assert agent.post(path_of(job, "complete"), json={"status": "failed"}).status_code == 200


def test_what_the_run_refuses_has_the_status_of_the_run(agent: TestClient, job: str, run: Run) -> None:
    run.refuses = "chat"

    answer = agent.post(path_of(job, CHAT_PATH), json=CHAT)

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "episode_over")


@pytest.mark.parametrize(("status", "has_ended"), [(503, True), (500, False), (401, False)])
def test_a_run_that_fails_is_told_from_one_that_has_ended(
    agent: TestClient, job: str, run: Run, caplog: pytest.LogCaptureFixture, status: int, has_ended: bool
) -> None:
    run.refuses, run.status = "chat", status

    answer = agent.post(path_of(job, CHAT_PATH), json=CHAT)

    assert answer.status_code == 503
    assert ("has ended" in answer.text) == has_ended
    assert (f"with the status {status}" in caplog.text) != has_ended


def test_an_episode_of_a_job_that_has_ended_is_over(house: House, agent: TestClient, job: str) -> None:
    with house.database.write() as session:
        session.query(Job).where(Job.id == job).update({"status": "succeeded"})

    assert agent.post(path_of(job, CHAT_PATH), json=CHAT).status_code == 409
    assert agent.post(path_of(job, "complete"), json={}).status_code == 409


def publish(house: House, job: str, url: str) -> None:
    with house.database.write() as session:
        episode_servers.publish(session, session.query(Job).where(Job.id == job).one(), url)


def test_a_run_that_does_not_answer_is_asked_later(house: House, agent: TestClient, job: str) -> None:
    publish(house, job, "http://127.0.0.1:1")

    answer = agent.post(path_of(job, CHAT_PATH), json=CHAT)

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "REGRAFT_EPISODES_HOST" in answer.text


def test_an_episode_of_a_step_that_has_ended_is_over(house: House, agent: TestClient, job: str) -> None:
    publish(house, job, "")

    for path, body in ((CHAT_PATH, CHAT), ("complete", {})):
        answer = agent.post(path_of(job, path), json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "episode_over")


class Busy:
    """A run that answers nothing before it has all requests that it waits for."""

    def __init__(self, expected: int) -> None:
        self._expected, self._all = expected, asyncio.Event()
        self.waits: list[float] = []
        self.app = FastAPI()

        @self.app.post("/{path:path}")
        async def answer(path: str, request: Request) -> Response:
            self.waits.append((await request.json()).get("wait_s", 0.0))
            if len(self.waits) == self._expected:
                self._all.set()
            await self._all.wait()
            return JSONResponse({"data": []})


def test_requests_that_wait_for_episodes_do_not_hold_up_answers() -> None:
    busy = Busy(200)

    async def ask(url: str) -> None:
        runs, run = EpisodeRuns(), EpisodeRun(url, "secret")
        waiting = [runs.lease(run, 1, 60.0) for _ in range(100)]
        await asyncio.gather(*waiting, *(runs.post(run, "/chat", {}) for _ in range(100)))
        await runs.close()

    for url in served(busy.app):
        asyncio.run(asyncio.wait_for(ask(url), 60))

    assert sorted(busy.waits, reverse=True) == [60.0] * MAX_WAITING + [0.0] * (200 - MAX_WAITING)


def test_a_lease_has_the_key_of_its_episode(
    api: TestClient, agent: TestClient, job: str, secret: str, run: Run
) -> None:
    id = episode_id(job, 0, 7)
    run.open.append({
        "id": id, "trace_id": "trace_1", "split": "train", "item": {"messages": [], "digit": "7"},
        "messages": [], "tools": [], "deadline": 9,
    })  # fmt: skip

    answer = api.post(f"/v1/regraft/jobs/{job}/episodes/lease", json={"max": 1}).json()

    assert answer["job_status"] == "running"
    [found] = answer["data"]
    assert found["base_url"] == f"http://testserver/v1/regraft/episodes/{id}/v1"
    assert found["api_key"] == key_of(secret, id)
    assert found["item"]["digit"] == "7"


def test_a_job_that_does_not_sample_has_no_episodes_now(house: House, api: TestClient, job: str) -> None:
    answer = api.post(f"/v1/regraft/jobs/{job}/episodes/lease", json={})

    assert answer.json() == {"object": "list", "data": [], "job_status": "running"}


def test_a_job_without_an_agent_leases_nothing(house: House, api: TestClient) -> None:
    with house.database.write() as session:
        other = factories.job(session, house.project, status="running", body={"grader": GRADER}).id

    answer = api.post(f"/v1/regraft/jobs/{other}/episodes/lease", json={})

    assert answer.status_code == 400


def test_the_run_of_an_earlier_attempt_is_not_asked(house: House, job: str, secret: str) -> None:
    """Its port may be another program's by now."""
    with house.database.write() as session:
        session.query(Job).where(Job.id == job).update({"epoch": 5})
        found = episode_servers.of_job(session, session.query(Job).where(Job.id == job).one())

    assert found is not None
    assert found.url == ""
    assert found.secret == secret


REINFORCEMENT = {"grader": GRADER, "hyperparameters": {"batch_size": 1}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"environment": {"type": "http"}}, "environment.type"),
        ({"environment": {"type": "client", "timeout_s": 0}}, "environment.timeout_s"),
        ({"environment": {}}, "environment.type"),
        (
            {"environment": {"type": "client"}, "tools": [{"name": "f", "server_url": "https://a.b/c"}]},
            "environment",
        ),
        ({"environment": {"type": "client"}, "max_episode_steps": 0}, "max_episode_steps"),
        ({"max_episode_steps": 3}, "max_episode_steps"),
    ],
)
def test_an_environment_that_a_job_cannot_have_is_refused_by_parameter(
    api: TestClient, job_request: Any, fields: dict[str, Any], param: str
) -> None:
    request = job_request()
    request["method"]["reinforcement"] |= fields

    answer = api.post("/v1/fine_tuning/jobs", json=request)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"method.reinforcement.{param}")


def test_the_parts_of_a_grader_are_not_normalized_where_the_agent_may_give_the_reward(
    api: TestClient, job_request: Any
) -> None:
    multi = {"type": "multi", "name": "m", "graders": {"a": GRADER}, "calculate_output": "a"}
    request = job_request()
    request["method"]["reinforcement"] |= {
        "grader": multi,
        "environment": {"type": "client"},
        "hyperparameters": {"advanced": {"loss": {"type": "dapo", "advantage_scale": "each"}}},
    }

    answer = api.post("/v1/fine_tuning/jobs", json=request)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"].endswith("loss.advantage_scale")


def test_a_job_with_an_agent_shows_its_environment(api: TestClient, job_request: Any) -> None:
    request = job_request()
    request["method"]["reinforcement"] |= {"environment": {"type": "client"}}

    made = api.post("/v1/fine_tuning/jobs", json=request).json()

    shown = made["method"]["reinforcement"]
    assert shown["environment"] == {"type": "client", "timeout_s": 1800}
    assert shown["max_episode_steps"] == 10
