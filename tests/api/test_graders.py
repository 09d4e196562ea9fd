import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from anyio import to_thread
from sqlalchemy import select, update
from starlette.testclient import TestClient

from api.http.deps import Service
from api.resources import graders
from core.database.tables import Job, Project, TunedModel
from core.errors import TooManyAtOnce
from core.tenancy import tenants
from graders.backends import Backends
from graders.judge.judges import JudgeModel
from graders.types import Item, Sample
from tests.api.conftest import GRADER, House
from tests.api.test_full import tuned
from tests.graders.servers import serving, verdict
from tests.present import untyped

if TYPE_CHECKING:
    from httpx2 import Response


VALIDATE, RUN = "/v1/fine_tuning/alpha/graders/validate", "/v1/fine_tuning/alpha/graders/run"


LABEL = {
    "type": "label_model",
    "name": "tone",
    "model": "judge",
    "labels": ["polite", "rude"],
    "passing_labels": ["polite"],
    "input": [{"role": "user", "content": "{{sample.output_text}}"}],
}


@pytest.fixture
def judge(house: House) -> Iterator[None]:
    """A judge model that finds everything polite."""
    with serving(lambda path, asked: (200, verdict("polite").body)) as url:
        backends = Backends({"judge": JudgeModel(f"{url}/v1")})
        house.app.state.service = replace(house.app.state.service, all_backends=backends)
        yield


def run(
    api: TestClient, grader: dict[str, Any] = GRADER, model_sample: str = "4", **fields: Any
) -> "Response":
    return api.post(RUN, json={"grader": grader, "model_sample": model_sample} | fields)


def test_only_a_reward_model_of_the_project_is_a_valid_one(api: TestClient, house: House) -> None:
    def validated(model: str) -> "Response":
        grader = {"type": "reward_model", "name": "judge", "model": model}
        return api.post(
            VALIDATE,
            json={
                "grader": {"type": "multi", "name": "all", "graders": {"a": grader}, "calculate_output": "a"}
            },
        )

    for name, resolved in (("ft:tiny:o::tuned", {}), ("ft:tiny:o::reward", {"reward_kind": "pairs"})):
        tuned(house, name, resolved)
    with house.database.write() as session:
        job_id = select(TunedModel.job_id).where(TunedModel.name == "ft:tiny:o::reward").scalar_subquery()
        session.execute(update(Job).where(Job.id == job_id).values(method="reward_model"))

    assert validated("ft:tiny:o::reward").status_code == 200
    unknown, other = validated("ft:nope"), validated("ft:tiny:o::tuned")
    assert (unknown.status_code, other.status_code) == (404, 400)
    assert {one.json()["error"]["param"] for one in (unknown, other)} == {"grader.graders.a.model"}


@pytest.mark.both_databases
def test_a_good_grader_comes_back_normalised(api: TestClient) -> None:
    assert api.post(VALIDATE, json={"grader": GRADER}).json() == {"grader": GRADER}


@pytest.mark.parametrize("url", [VALIDATE, RUN])
@pytest.mark.parametrize(
    ("grader", "param"),
    [
        ({"type": "vibes", "name": "g"}, "grader.type"),
        (GRADER | {"colour": "red"}, "grader.colour"),
        (GRADER | {"input": "{{item.}}"}, "grader.input"),
        ("exact", "grader"),
    ],
)
def test_a_bad_grader_is_a_400_that_names_the_mistake(
    api: TestClient, url: str, grader: dict[str, str] | str, param: str
) -> None:
    answer = api.post(url, json={"grader": grader, "model_sample": "4"} if url == RUN else {"grader": grader})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_unknown_type_is_told_which_there_are(api: TestClient) -> None:
    message = api.post(VALIDATE, json={"grader": {"type": "vibes", "name": "g"}}).json()["error"]["message"]

    assert "'string_check'" in message
    assert "'multi'" in message


@pytest.mark.both_databases
def test_a_right_answer_earns_its_reward(api: TestClient) -> None:
    report = run(api, item={"answer": "4"}).json()

    assert report["reward"] == 1.0
    assert (report["metadata"]["name"], report["metadata"]["type"]) == ("exact", "string_check")
    assert not any(report["metadata"]["errors"].values())


def test_a_wrong_answer_earns_nothing_and_is_no_error(api: TestClient) -> None:
    report = run(api, item={"answer": "5"}).json()

    assert report["reward"] == 0.0
    assert not any(report["metadata"]["errors"].values())


@pytest.mark.parametrize("fields", [{}, {"item": None}, {"item": {"other": "4"}}])
def test_a_grader_that_fails_is_an_answer_too(api: TestClient, fields: dict[str, Any]) -> None:
    answer = run(api, **fields)

    assert answer.status_code == 200
    assert answer.json()["reward"] == 0.0
    assert answer.json()["metadata"]["errors"]["invalid_variable_error"] is True
    assert len(answer.json()["metadata"]["errors"]) == 24


def test_a_sample_that_is_json_can_be_read_as_such(api: TestClient) -> None:
    grader = GRADER | {"input": "{{sample.output_json.answer}}"}

    assert run(api, grader, '{"answer": "4"}', item={"answer": "4"}).json()["reward"] == 1.0
    assert run(api, grader, "four", item={"answer": "4"}).json()["metadata"]["errors"]["sample_parse_error"]


def test_the_parts_of_a_multi_grader_are_shown(api: TestClient) -> None:
    multi = {"type": "multi", "name": "m", "graders": {"a": GRADER}, "calculate_output": "0.5 * a"}

    report = run(api, multi, item={"answer": "4"}).json()

    assert (report["reward"], report["sub_rewards"]) == (0.5, {"a": 1.0})


def test_a_label_model_may_stand_alone(
    api: TestClient, judge: None, job_request: Callable[..., dict[str, Any]]
) -> None:
    validated = api.post(VALIDATE, json={"grader": LABEL})
    report = run(api, LABEL).json()
    job = api.post("/v1/fine_tuning/jobs", json=job_request(reinforcement={"grader": LABEL}))

    assert validated.json() == {"grader": LABEL}
    assert (report["reward"], report["metadata"]["type"]) == (1.0, "label_model")
    assert report["metadata"]["sampled_model_name"] == "judge"
    assert job.json()["method"]["reinforcement"]["grader"] == LABEL


def test_tokens_of_a_judge_count_and_a_project_at_its_limit_asks_no_judge(
    api: TestClient, judge: None, house: House
) -> None:
    run(api, LABEL)
    with house.database.read() as session:
        used = tenants.usage_since(session, house.project.id).grader_tokens
    house.limit(grader_tokens_per_30_days=used)

    beyond, free = run(api, LABEL), run(api, GRADER, item={"answer": "4"})

    assert used == 15
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (429, "insufficient_quota")
    assert (free.status_code, free.json()["reward"]) == (200, 1.0)


def test_a_multi_without_a_name_is_given_one(api: TestClient) -> None:
    multi = {"type": "multi", "graders": {"a": GRADER}, "calculate_output": "a"}

    name = api.post(VALIDATE, json={"grader": multi}).json()["grader"]["name"]

    assert name.startswith("grader-")
    assert run(api, multi, item={"answer": "4"}).json()["reward"] == 1.0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "grader"),
        ({"grader": GRADER}, "model_sample"),
        ({"grader": GRADER, "model_sample": 4}, "model_sample"),
        ({"grader": GRADER, "model_sample": "4", "item": []}, "item"),
        ({"grader": GRADER, "model_sample": "4", "samples": 2}, "samples"),
    ],
)
def test_a_malformed_request_is_a_400(api: TestClient, body: dict[str, Any], param: str) -> None:
    answer = api.post(RUN, json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_judge_that_fails_raises_the_contracts_flag_and_claims_no_score(
    house: House, api: TestClient
) -> None:
    """The reward of a grader that failed is 0, as OpenAI has it. What it would have scored is nowhere."""
    multi = {"type": "multi", "name": "m", "graders": {"j": LABEL, "a": GRADER}, "calculate_output": "j + a"}
    with serving(
        lambda path, asked: (404, '{"error": {"message": "gone"}}')
    ) as url:  # 500 would be asked again
        backends = Backends({"judge": JudgeModel(f"{url}/v1")})
        house.app.state.service = replace(house.app.state.service, all_backends=backends)

        answer = run(api, multi, item={"answer": "4"})

    report = answer.json()
    assert (answer.status_code, report["reward"]) == (200, 0.0)
    assert report["metadata"]["errors"]["model_grader_server_error"] is True
    assert report["metadata"]["errors"]["model_grader_server_error_details"]
    assert report["metadata"]["scores"] == {"j": None, "a": 1.0}
    assert report["sub_rewards"] == {"a": 1.0}


@pytest.mark.parametrize(
    ("grader", "field", "wrong"),
    [
        ({"type": "endpoint", "url": "https://grader.example/", "rate_limit": 0}, "rate_limit", 0),
        ({"type": "endpoint", "url": "https://grader.example/", "rate_limit": "1"}, "rate_limit", "1"),
    ],
)
def test_a_grader_and_a_job_word_the_same_mistake_in_the_same_way(
    api: TestClient,
    job_request: Callable[..., dict[str, Any]],
    grader: dict[str, Any],
    field: str,
    wrong: int | str,
) -> None:
    """A bound or a type of a grader's field is worded as that of a hyperparameter."""
    of_grader = api.post("/v1/fine_tuning/alpha/graders/validate", json={"grader": grader}).json()["error"]
    asked = {"hyperparameters": {"advanced": {"lora": {"rank": wrong}}}}
    of_job = api.post("/v1/fine_tuning/jobs", json=job_request(reinforcement=asked)).json()["error"]

    where = "method.reinforcement.hyperparameters.advanced.lora.rank"
    assert of_grader["message"].replace(f"grader.{field}", where) == of_job["message"]
    assert of_grader["code"] == of_job["code"]


class Hanging:
    """Graders that never come to an end, and what became of them."""

    name, type = "hangs", "string_check"

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.ended = 0

    @asynccontextmanager
    async def open(self, spec: Any, *, trace_id: Any = None, **more: Any) -> "AsyncIterator[Hanging]":
        yield self

    def check(self, spec: Any, param: str = "grader") -> None:
        pass

    async def grade(self, sample: Sample, item: Item) -> None:
        self.begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1


class Client:
    """One who waits for an answer until it leaves."""

    def __init__(self, service: Service, project: Project) -> None:
        self.left = asyncio.Event()
        asked = {"grader": GRADER, "model_sample": "4"}
        self.answer = asyncio.create_task(
            graders.run_grader(untyped(self), graders.GraderRun.model_validate(asked), project, service)
        )

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def leave(self) -> Any:
        self.left.set()
        return await asyncio.wait_for(self.answer, 10)


@pytest.fixture
def hanging(house: House) -> Service:
    service: Service = house.app.state.service
    return replace(service, all_backends=untyped(Hanging()))


async def begun(service: Service, count: int) -> None:
    for _ in range(count):
        assert await asyncio.to_thread(untyped(service.backends).begun.acquire, timeout=10)


def test_a_client_that_leaves_ends_its_run(house: House, hanging: Service) -> None:
    async def scene() -> None:
        client = Client(hanging, house.project)
        await begun(hanging, 1)

        answer = await client.leave()

        assert (answer.status_code, untyped(hanging.backends).ended) == (499, 1)
        assert hanging.admission.grader_runs.in_use == 0

    asyncio.run(scene())


def test_a_project_that_runs_all_it_may_holds_no_thread_and_keeps_nobody_else_waiting(
    house: House, hanging: Service
) -> None:
    """8 run and 32 wait. Beyond that it is refused, and another project's run begins at once."""

    async def scene() -> None:
        running = [Client(hanging, house.project) for _ in range(8)]
        await begun(hanging, 8)
        line = [Client(hanging, house.project) for _ in range(33)]
        # Each is checked in a thread before it stands in line, so any of them may be the last.
        [refused], _ = await asyncio.wait(
            [client.answer for client in line], timeout=60, return_when=asyncio.FIRST_COMPLETED
        )
        with pytest.raises(TooManyAtOnce):
            await refused
        line = [client for client in line if client.answer is not refused]
        others = Client(hanging, Project(id="proj_others"))
        await begun(hanging, 1)

        assert not untyped(hanging.backends).begun.acquire(blocking=False)
        assert to_thread.current_default_thread_limiter().borrowed_tokens == 0

        await line[20].leave()
        await running[0].leave()  # the next begins
        await begun(hanging, 1)
        for client in [*running, *line, others]:
            await client.leave()
        assert hanging.admission.grader_runs.in_use == 0

    asyncio.run(scene())


def test_too_many_runs_are_refused_in_openais_shape(house: House, api: TestClient) -> None:
    house.app.state.service.admission.grader_runs.places = 0
    house.app.state.service.admission.grader_runs.waiting = 0

    refused = run(api, item={"answer": "4"})

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    assert refused.json()["error"].keys() == {"message", "type", "param", "code"}
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
@pytest.mark.parametrize("path", [VALIDATE, RUN])
def test_a_source_that_does_not_compile_is_refused_with_its_line(api: TestClient, path: str) -> None:
    grader = {"type": "python", "name": "py", "source": "def grade(sample, item):\n  return ("}

    answer = api.post(path, json={"grader": grader, **({"model_sample": "4"} if path == RUN else {})})

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("grader.source", "invalid_value")
    assert "line 2: '(' was never closed" in error["message"]
