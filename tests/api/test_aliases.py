"""Names that a project gives to models."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.database.tables import CheckpointPermission, Job, TunedModel
from core.registry import Registry
from tests.api.conftest import GRADER, House

PATH = "/v1/regraft/aliases"
FIRST, SECOND = "ft:tiny:acme::1", "ft:tiny:acme::2"
EVAL = {
    "data_source_config": {
        "type": "custom",
        "item_schema": {"type": "object"},
        "include_sample_schema": True,
    },
    "testing_criteria": [GRADER],
}

pytestmark = pytest.mark.both_databases


@pytest.fixture(autouse=True)
def tuned(house: House) -> None:
    with house.database.write() as session:
        for name in (FIRST, SECOND):
            model = TunedModel(name=name, project_id=house.project.id, job_id="ftjob-1", base_model="tiny")
            model.checkpoint_id = "ftckpt_1"
            session.add(model)


@pytest.fixture
def promote(api: TestClient) -> Callable[..., dict[str, Any]]:
    def promote(model: str, name: str = "production") -> dict[str, Any]:
        answer = api.post(PATH, json={"name": name, "model": model})
        assert answer.status_code == 200, answer.text
        alias: dict[str, Any] = answer.json()
        return alias

    return promote


def models(alias: dict[str, Any]) -> tuple[str, str | None]:
    return alias["model"], alias["previous_model"]


def test_an_alias_is_pointed_at_a_model_and_then_at_another(
    api: TestClient, promote: Callable[..., dict[str, Any]]
) -> None:
    first = promote(FIRST)
    second = promote(SECOND)

    assert (models(first), models(second)) == ((FIRST, None), (SECOND, FIRST))
    assert first["id"] == second["id"]
    assert api.get(f"{PATH}/production").json() == second
    assert api.get(PATH).json()["data"] == [second]


def test_pointing_it_at_its_own_model_changes_nothing(promote: Callable[..., dict[str, Any]]) -> None:
    promote(FIRST)
    second = promote(SECOND)

    assert promote(SECOND) == second


def test_a_rollback_restores_the_previous_model_and_another_one_undoes_it(
    api: TestClient, promote: Callable[..., dict[str, Any]]
) -> None:
    promote(FIRST)
    promote(SECOND)

    back = [api.post(f"{PATH}/production/rollback").json() for _ in range(2)]

    assert [models(one) for one in back] == [(FIRST, SECOND), (SECOND, FIRST)]


def test_a_rollback_without_a_previous_model_is_refused(
    api: TestClient, promote: Callable[..., dict[str, Any]]
) -> None:
    promote(FIRST)

    answer = api.post(f"{PATH}/production/rollback")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "alias")
    assert "'production' has no previous model" in answer.json()["error"]["message"]


def test_a_rollback_to_a_deleted_model_is_refused_and_changes_nothing(
    api: TestClient, promote: Callable[..., dict[str, Any]]
) -> None:
    promote(FIRST)
    promote(SECOND)
    api.delete(f"/v1/models/{FIRST}")

    answer = api.post(f"{PATH}/production/rollback")

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert api.get(f"{PATH}/production").json()["model"] == SECOND


def test_a_model_in_use_is_not_deleted(api: TestClient, promote: Callable[..., dict[str, Any]]) -> None:
    promote(FIRST)

    refused = api.delete(f"/v1/models/{FIRST}")
    api.delete(f"{PATH}/production")

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_in_use")
    assert "The alias 'production' points at" in refused.json()["error"]["message"]
    assert api.delete(f"/v1/models/{FIRST}").status_code == 200
    assert api.get(f"{PATH}/production").json()["error"]["code"] == "alias_not_found"


def test_an_alias_may_point_at_a_base_model_and_then_follows_its_alias_in_the_registry(
    promote: Callable[..., dict[str, Any]],
) -> None:
    assert promote("o4-mini-2025-04-16")["model"] == "tiny"


def test_an_alias_is_listed_among_the_models_and_is_not_deleted_there(
    api: TestClient, promote: Callable[..., dict[str, Any]]
) -> None:
    promote(FIRST)

    listed = {model["id"]: model for model in api.get("/v1/models").json()["data"]}
    deleted = api.delete("/v1/models/production")

    assert (listed["production"]["kind"], listed["production"]["root"]) == ("alias", FIRST)
    assert api.get("/v1/models/production").json() == listed["production"]
    assert deleted.status_code == 400
    assert "/v1/regraft/aliases/production" in deleted.json()["error"]["message"]


@pytest.mark.parametrize("name", ["tiny", "o4-mini-2025-04-16", "ft:x", "org/large", "", "a" * 65])
def test_a_name_that_is_or_looks_like_a_model_is_refused(api: TestClient, name: str) -> None:
    answer = api.post(PATH, json={"name": name, "model": FIRST})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "name")


def test_an_alias_does_not_point_at_an_alias(api: TestClient, promote: Callable[..., dict[str, Any]]) -> None:
    promote(FIRST)

    refused = api.post(PATH, json={"name": "other", "model": "production"})

    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
    assert f"'production' is an alias, which points at '{FIRST}'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("model", ["ft:tiny:acme::9", "production"])
def test_an_alias_points_at_models_only(
    api: TestClient, promote: Callable[..., dict[str, Any]], model: str
) -> None:
    promote(FIRST)

    answer = api.post(PATH, json={"name": "other", "model": model})

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_reward_model_gets_no_alias(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()
    with house.database.write() as session:
        session.query(Job).update({"method": "reward_model"})
        session.query(TunedModel).filter_by(name=FIRST).update({"job_id": job["id"]})

    answer = api.post(PATH, json={"name": "production", "model": FIRST})

    assert "is a reward model" in answer.json()["error"]["message"]


def test_a_shared_model_gets_an_alias_of_each_project(
    house: House, promote: Callable[..., dict[str, Any]]
) -> None:
    theirs = house.client(house.other_key)
    before = theirs.post(PATH, json={"name": "production", "model": FIRST})
    other = theirs.get("/v1/organization/audit_logs").json()["data"][0]["project"]["id"]
    with house.database.write() as session:
        session.add(CheckpointPermission(model=FIRST, project_id=other))

    shared = theirs.post(PATH, json={"name": "production", "model": FIRST}).json()
    mine = promote(SECOND)

    assert before.status_code == 404
    assert (shared["model"], mine["model"]) == (FIRST, SECOND)
    assert [one["model"] for one in theirs.get(PATH).json()["data"]] == [FIRST]


def test_a_pipeline_names_the_model_itself(
    api: TestClient, promote: Callable[..., dict[str, Any]], upload: Callable[..., str]
) -> None:
    promote(FIRST)
    stage = {"name": "answers", "sample": {"file": upload(), "model": "production"}}

    answer = api.post("/v1/regraft/pipelines", json={"stages": [stage]})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stages[0].sample.model")
    assert f"name the model '{FIRST}'" in answer.json()["error"]["message"]


def test_an_eval_run_names_the_model_itself(api: TestClient, promote: Callable[..., dict[str, Any]]) -> None:
    promote(FIRST)
    made = api.post("/v1/evals", json=EVAL).json()
    source = {
        "type": "completions",
        "model": "production",
        "source": {"type": "file_content", "content": [{"item": {"answer": "4"}}]},
        "input_messages": {"type": "template", "template": [{"role": "user", "content": "4?"}]},
    }

    answer = api.post(f"/v1/evals/{made['id']}/runs", json={"data_source": source})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "data_source.model")
    assert f"name the model '{FIRST}'" in answer.json()["error"]["message"]


def test_a_job_names_the_model_itself(
    api: TestClient, promote: Callable[..., dict[str, Any]], job_request: Callable[..., dict[str, Any]]
) -> None:
    promote(FIRST)

    answer = api.post("/v1/fine_tuning/jobs", json=job_request(model="production"))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert f"'production' is an alias, whose model may change: name the model '{FIRST}'." in answer.text


def test_the_audit_log_has_who_pointed_it_at_what_and_when(
    house: House, api: TestClient, promote: Callable[..., dict[str, Any]]
) -> None:
    promote(FIRST)
    promote(SECOND)
    promote(SECOND)  # changes nothing
    api.post(f"{PATH}/production/rollback")
    api.delete(f"{PATH}/production")

    logged = api.get("/v1/organization/audit_logs").json()["data"]

    changes = [entry for entry in reversed(logged) if entry["type"].startswith("model_alias")]
    assert [(entry["type"], entry["data"]) for entry in changes] == [
        ("model_alias.changed", {"from": None, "to": FIRST}),
        ("model_alias.changed", {"from": FIRST, "to": SECOND}),
        ("model_alias.changed", {"from": SECOND, "to": FIRST}),
        ("model_alias.deleted", {"from": FIRST}),
    ]
    assert {entry["target"] for entry in changes} == {"production"}
    assert {entry["actor"]["api_key"]["id"] for entry in changes} == {house.key_id()}


def test_the_history_of_an_alias_outlives_it_and_is_that_of_its_project(
    house: House, api: TestClient, promote: Callable[..., dict[str, Any]]
) -> None:
    promote(FIRST)
    promote(SECOND)
    promote(FIRST, "other")
    api.delete(f"{PATH}/production")

    newest = api.get(f"{PATH}/production/history", params={"limit": 2}).json()
    older = api.get(f"{PATH}/production/history", params={"after": newest["data"][-1]["id"]}).json()

    shown = [(one["name"], one["previous_model"], one["model"]) for one in newest["data"] + older["data"]]
    assert shown == [
        ("production", SECOND, None),
        ("production", FIRST, SECOND),
        ("production", None, FIRST),
    ]
    assert (newest["has_more"], older["has_more"]) == (True, False)
    assert {one["changed_by"] for one in newest["data"]} == {house.key_id()}
    theirs = house.client(house.other_key).get(f"{PATH}/production/history")
    assert (theirs.status_code, theirs.json()["error"]["code"]) == (404, "alias_not_found")


def test_requests_at_once_leave_the_alias_as_the_last_entry_of_the_audit_log_says(
    api: TestClient, promote: Callable[..., dict[str, Any]]
) -> None:
    for round_ in range(5):
        name = f"production-{round_}"
        promote(FIRST, name)
        with ThreadPoolExecutor() as threads:
            deletions = [threads.submit(api.delete, f"{PATH}/{name}") for _ in range(3)]
            point = threads.submit(api.post, PATH, json={"name": name, "model": SECOND})
            answers = [one.result() for one in (*deletions, point)]

        assert {answer.status_code for answer in answers} <= {200, 404}
        log = api.get("/v1/organization/audit_logs", params={"limit": 20}).json()["data"]
        [last, *_] = [entry for entry in log if entry["target"] == name]
        assert api.get(f"{PATH}/{name}").json().get("model") == last["data"].get("to")


def test_an_alias_that_the_registry_hides_is_listed_once_and_says_so(
    api: TestClient, house: House, promote: Callable[..., dict[str, Any]]
) -> None:
    promote(FIRST, "small")
    assert api.get(f"{PATH}/small").json()["hidden"] is False
    service = house.app.state.service
    registry = Registry(models={**service.registry.models, "small": service.registry.models["tiny"]})
    house.app.state.service = replace(service, registries=registry)

    listed = [one for one in api.get("/v1/models").json()["data"] if one["id"] == "small"]

    assert [(one["kind"], one["root"]) for one in listed] == [("base", "small")]
    assert api.get(f"{PATH}/small").json()["hidden"] is True
    assert [one["hidden"] for one in api.get(PATH).json()["data"]] == [True]
    assert api.delete(f"{PATH}/small").status_code == 200


@pytest.mark.parametrize(
    ("name", "taken"), [("TINY", "the model 'tiny'"), ("Production", "the alias 'production'")]
)
def test_a_name_that_differs_by_case_only_is_refused(
    name: str, taken: str, api: TestClient, promote: Callable[..., dict[str, Any]]
) -> None:
    promote(FIRST, "production")

    refused = api.post(PATH, json={"name": name, "model": SECOND})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
    assert f"'{name}' differs from {taken} by case only" in refused.json()["error"]["message"]
    assert [one["name"] for one in api.get(PATH).json()["data"]] == ["production"]
