from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from core.database.tables import CheckpointPermission, Job, Project, TunedModel
from core.model_checks import ModelCheck, ModelChecks, source_of
from core.model_memory import ModelMemories, ModelMemory
from core.registry import BaseModelEntry
from tests import factories
from tests.api.conftest import House

NAME = "ft:org/large:default:mine:abcd1234:ckpt-step-5"


@pytest.fixture
def tuned(house: House) -> str:
    with house.database.write() as session:
        model = TunedModel(name=NAME, project_id=house.project.id, job_id="ftjob-1", base_model="org/large")
        model.checkpoint_id = "ftckpt_1"
        session.add(model)
    return NAME


@pytest.mark.both_databases
def test_base_models_and_the_projects_own_are_listed(api: TestClient, house: House, tuned: str) -> None:
    listed = api.get("/v1/models").json()

    assert listed["object"] == "list"
    assert [(model["id"], model["owned_by"]) for model in listed["data"]] == [
        ("tiny", "regraft"),
        ("org/large", "regraft"),
        ("o4-mini-2025-04-16", "regraft"),
        (tuned, house.project.organization_id),
    ]


@pytest.mark.parametrize("quoted", [str, lambda name: quote(name, safe="")], ids=["raw", "escaped"])
@pytest.mark.parametrize("name", ["tiny", "org/large", NAME])
@pytest.mark.both_databases
def test_any_name_can_be_looked_up(
    api: TestClient, tuned: str, name: str, quoted: type[str] | Callable[..., Any]
) -> None:
    assert api.get(f"/v1/models/{quoted(name)}").json()["id"] == name


def test_an_alias_names_the_model_it_leads_to(api: TestClient) -> None:
    model = api.get("/v1/models/o4-mini-2025-04-16").json()

    assert (model["id"], model["root"]) == ("o4-mini-2025-04-16", "tiny")


def test_an_alias_cannot_be_deleted(api: TestClient) -> None:
    assert api.delete("/v1/models/o4-mini-2025-04-16").status_code == 400


@pytest.mark.both_databases
def test_a_tuned_model_names_its_base(api: TestClient, tuned: str) -> None:
    model = api.get(f"/v1/models/{tuned}").json()

    assert (model["root"], model["parent"]) == ("org/large", "org/large")


@pytest.mark.both_databases
def test_a_model_that_was_trained_further_names_the_model_it_started_from_and_its_base(
    api: TestClient, house: House, tuned: str
) -> None:
    parent = {"model": tuned, "job_id": "ftjob-1", "step": 5, "checkpoint_id": "ftckpt_1"}
    further = "ft:org/large:default:mine:ffff0000"
    with house.database.write() as session:
        job = factories.job(session, house.project, model="org/large", parent=parent)
        session.add(
            TunedModel(
                name=further,
                project_id=house.project.id,
                job_id=job.id,
                base_model="org/large",
                checkpoint_id="ftckpt_2",
            )
        )
        other = session.query(Project).where(Project.id != house.project.id).one()
        session.add(CheckpointPermission(model=further, project_id=other.id))
    foreign = {"Authorization": f"Bearer {house.other_key}"}

    model = api.get(f"/v1/models/{further}").json()

    assert (model["root"], model["parent"]) == ("org/large", tuned)
    assert {one["id"]: one["parent"] for one in api.get("/v1/models").json()["data"] if one["parent"]} == {
        tuned: "org/large",
        further: tuned,
    }
    assert api.get(f"/v1/models/{further}", headers=foreign).json()["parent"] == "org/large"


def test_an_unknown_model_is_answered_with_those_there_are(api: TestClient, tuned: str) -> None:
    answer = api.get("/v1/models/gpt-9")

    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert f"{tuned}, o4-mini-2025-04-16, org/large, tiny" in error["message"]


@pytest.mark.both_databases
def test_a_misspelled_model_is_answered_with_the_nearest_of_the_project(
    api: TestClient, house: House, tuned: str
) -> None:
    api.post("/v1/regraft/aliases", json={"name": "production", "model": tuned})
    with house.database.write() as session:
        for number in range(30):
            name = f"ft:tiny:default::{number}"
            session.add(
                TunedModel(
                    name=name, project_id=house.project.id, job_id="j", base_model="tiny", checkpoint_id="c"
                )
            )

    said = [
        api.get("/v1/models/prodution").json()["error"]["message"],
        api.post(
            "/v1/chat/completions",
            json={"model": "prodution", "messages": [{"role": "user", "content": "hi"}]},
        ).json()["error"]["message"],
    ]

    assert said[0] == said[1]
    assert "Available: production, " in said[0]
    assert said[0].endswith(" and 30 more (GET /v1/models lists all).")


@pytest.mark.both_databases
def test_a_deleted_model_is_gone(api: TestClient, tuned: str) -> None:
    assert api.delete(f"/v1/models/{tuned}").json() == {"id": tuned, "object": "model", "deleted": True}
    assert api.get(f"/v1/models/{tuned}").status_code == 404
    assert api.delete(f"/v1/models/{tuned}").status_code == 404


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("distillation", {"teacher": {"model": NAME}}),
        (
            "reinforcement",
            {"grader": {"graders": {"a": {"type": "reward_model", "name": "a", "model": NAME}}}},
        ),
    ],
)
def test_a_model_that_an_unfinished_job_needs_is_kept(
    api: TestClient, house: House, tuned: str, method: str, body: dict[str, Any]
) -> None:
    with house.database.write() as session:
        job = factories.job(session, house.project, method=method, body=body, status="paused")
        job_id = job.id

    refused = api.delete(f"/v1/models/{tuned}").json()["error"]

    assert refused["code"] == "model_in_use"
    assert job_id in refused["message"]
    with house.database.write() as session:
        session.get_one(Job, job.seq).status = "cancelled"
    assert api.delete(f"/v1/models/{tuned}").json()["deleted"]


def test_a_base_model_cannot_be_deleted(api: TestClient) -> None:
    answer = api.delete("/v1/models/org/large")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


def test_what_is_known_of_a_base_model_is_null_until_a_worker_has_tried_it(
    api: TestClient, house: House
) -> None:
    listed = api.get("/v1/regraft/models").json()

    assert listed["object"] == "list"
    assert {model["id"] for model in listed["data"]} == set(house.app.state.service.registry.models)
    for model in listed["data"]:
        assert (model["object"], model["context"] > 0) == ("regraft.model", True)
        assert model["forward"] is model["checked_at"] is model["adapted_share"] is None


def test_the_memory_that_a_worker_has_estimated_is_shown(api: TestClient, house: House) -> None:
    service = house.app.state.service
    memory = ModelMemory(gpu_class="h200", gpu_gib=80.0, needed_gib=31.5, problem=None)
    ModelMemories(service.settings.model_cache).keep(service.registry.get("org/large"), memory)

    shown = {model["id"]: model["memory"] for model in api.get("/v1/regraft/models").json()["data"]}

    assert shown == {"tiny": None, "org/large": memory.model_dump()}


def test_a_damaged_estimate_of_memory_is_ignored(api: TestClient, house: House) -> None:
    service = house.app.state.service
    memories = ModelMemories(service.settings.model_cache)
    memory = ModelMemory(gpu_class="h200", gpu_gib=80.0, needed_gib=31.5, problem=None)
    memories.keep(service.registry.get("org/large"), memory)
    [file] = (service.settings.model_cache / "memory").iterdir()
    file.write_text("{")

    assert {model["memory"] for model in api.get("/v1/regraft/models").json()["data"]} == {None}


def test_what_a_worker_has_found_is_shown(api: TestClient, house: House) -> None:
    [(name, entry), *_] = house.app.state.service.registry.models.items()
    found = {
        "forward": "rows",
        "decode": "forked",
        "largest_difference": 1e-6,
        "adapted_modules": 12,
        "adapted_share": 0.5,
        "adapted_by_kind": {"attention": {"modules": 12, "share": 0.5}},
        "checked_at": 1_700_000_000,
        "versions": {"regraft-server": version("regraft-server")},
        "template": {
            "end_of_turn": "<|im_end|>",
            "end_of_turn_added": True,
            "generation_prompt": False,
            "question": True,
            "question_end": True,
            "header": True,
            "history": True,
            "order": True,
            "full_text": True,
            "random": False,
            "answer": True,
            "system_role": "ignored",
            "alternation": False,
            "tools": False,
            "definitions": False,
            "calls": False,
            "results": False,
            "parallel_calls": False,
            "text_beside_calls": False,
            "messages_with_tools": True,
            "thoughts": False,
            "date": True,
        },
    }
    checks = ModelChecks(house.app.state.service.settings.model_cache)
    checks.keep(check_of(entry, found, key="new"))
    checks.keep(
        check_of(entry, found | {"forward": "packed", "decode": "shared", "checked_at": 1}, key="old")
    )

    shown = next(model for model in api.get("/v1/regraft/models").json()["data"] if model["id"] == name)

    assert {field: shown[field] for field in found} == found
    assert shown["outdated"] is False

    checks.keep(check_of(entry, found | {"versions": {"regraft-server": "0.0.1"}}, key="new"))
    shown = next(model for model in api.get("/v1/regraft/models").json()["data"] if model["id"] == name)
    assert (shown["outdated"], shown["versions"]) == (True, {"regraft-server": "0.0.1"})


def check_of(
    entry: BaseModelEntry, found: dict[str, Any], key: str, reasons: bool | None = False
) -> ModelCheck:
    route = {
        "forward": found["forward"],
        "decode": found["decode"] or "shared",
        "blocks": False,
        "eager": False,
    }
    gap = {"part": "a part", "largest": 1e-6, "mean": 1e-7, "share": 0, "prompt": 40}
    verdict = {"route": route, "gaps": [gap], "instead": "", "checked_at": 0}
    model = {"source": source_of(entry), "dtype": entry.dtype, "context": entry.context}
    return ModelCheck(key=key, **model, **found, reasons=reasons, verdict=verdict)
