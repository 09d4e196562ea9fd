"""A second project's key must not tell a row of the first from one that was never there."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.database.tables import (
    Checkpoint,
    CheckpointPermission,
    Preview,
    RolloutPage,
    StepMetric,
    TunedModel,
)
from core.evals import batches
from tests.api.conftest import GRADER, House
from tests.api.test_rollouts import row, store

pytestmark = pytest.mark.both_databases

UPLOAD = {"filename": "a", "mime_type": "text/jsonl", "purpose": "fine-tune", "bytes": 2}
ENDPOINT = {"name": "a", "url": "https://8.8.8.8/", "event_types": ["fine_tuning.job.succeeded"]}
CASE = {"sample": {"output_text": "4"}, "item": {"answer": "4"}, "expect": 1}
# What a route that takes a body must be sent to get as far as looking for the row.
BODIES = {
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_1"]},
    "/v1/fine_tuning/jobs/{job_id}/budget": {"budget": None},
    "/v1/regraft/files/{file_id}/profile": {},
    "/v1/fine_tuning/checkpoints/{checkpoint}/permissions": {"project_ids": ["proj_1"]},
    "/v1/evals/{eval_id}": {"name": "b"},
    "/v1/evals/{eval_id}/runs": {"data_source": {"type": "jsonl", "source": {"type": "file_id", "id": "f"}}},
    "/v1/regraft/jobs/{job_id}/regrade": {"grader": GRADER},
    "/v1/regraft/graders/{grader_name}/cases": {"cases": [CASE]},
    "/v1/regraft/graders/{grader_name}/check": {"grader": GRADER},
    "/v1/webhook_endpoints/{webhook_endpoint_id}": {"name": "b"},
    "/v1/webhook_endpoints/{webhook_endpoint_id}/test": {"event_type": "fine_tuning.job.succeeded"},
}


def mixture(file_id: str) -> dict[str, Any]:
    return {"name": "m", "mix": {"files": [{"file": file_id}]}}


@pytest.fixture
def rows(house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]) -> dict[str, str]:
    """One row of everything that has an id, by the name the id has in a path."""
    both = {"type": "multi", "name": "both", "graders": {"says": GRADER}, "calculate_output": "says"}
    job = create_job(metadata={"team": "a"}, reinforcement={"grader": both})
    api.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel")  # or the stream of its events would have no end
    house.blobs.put_bytes("rollouts.jsonl", json.dumps({"score": 1.0}).encode())
    nothing = {"text": "4", "logprob": None, "advantage": None, "gap": None}
    store(house, job["id"], 2, rows=[row(2, "train", 0, 0, has_tokens=True, tokens=[nothing])])
    with house.database.write() as session:
        for split in ("train", "valid"):
            session.add(
                RolloutPage(
                    job_id=job["id"], step=1, split=split, epoch=1, blob_key="rollouts.jsonl", samples=1
                )
            )
        session.add(StepMetric(job_id=job["id"], step=1, epoch=1, data={}))
        model = TunedModel(
            name="ft:tiny:default::1", project_id=house.project.id, job_id=job["id"], base_model="tiny"
        )
        model.checkpoint_id = "ftckpt_1"
        session.add(model)
        permission = CheckpointPermission(model=model.name, project_id=house.project.id)
        session.add(permission)
        session.flush()
        permission_id = permission.id
        preview = Preview(
            project_id=house.project.id, request={"model": "tiny", "answers_of": None}, parts={}
        )
        preview.training_sha256, preview.lease_expires_at = "", 0.0
        preview.progress = {"phase": "loading", "of": 4, "sampled": 0, "graded": 0}
        session.add(preview)
        session.flush()
        preview_id = preview.id
        session.add(
            Checkpoint(
                id="ftckpt_1", job_id=job["id"], step=1, epoch=1, blob_prefix="checkpoint", valid_reward=1.0
            )
        )
        batch = batches.new(
            house.project.id,
            batches.Checked(total=1, model="tiny"),
            metadata=None,
            endpoint="/v1/responses",
            input_file_id=job["training_file"],
            completion_window="24h",
            output_expires_after=None,
        )
        session.add(batch)
        batch_id = batch.id
    house.blobs.put_bytes("checkpoint/manifest.json", json.dumps({"format": 1, "files": []}).encode())
    secret = job["id"].removeprefix("ftjob-")
    grader = api.post("/v1/regraft/graders", json={"name": "close", "grader": GRADER}).json()
    cases = api.post("/v1/regraft/graders/close/cases", json={"cases": [CASE]}).json()["data"]
    api.post("/v1/regraft/aliases", json={"name": "production", "model": "tiny"})
    return {
        "alias": "production",
        "batch_id": batch_id,
        "other_job_id": create_job()["id"],
        "job_id": job["id"],
        "eval_id": f"eval_{secret}",
        "run_id": f"evalrun_{secret}_1",
        "output_item_id": f"outputitem_{secret}_1_0_0",
        "file_id": job["training_file"],
        "model": "ft:tiny:default::1",
        "checkpoint": "ft:tiny:default::1",
        "permission_id": permission_id,
        "project_id": house.project.id,
        "key_id": house.key_id(),
        "webhook_endpoint_id": api.post("/v1/webhook_endpoints", json=ENDPOINT).json()["id"],
        "upload_id": api.post("/v1/uploads", json=UPLOAD).json()["id"],
        "pipeline_id": api.post(
            "/v1/regraft/pipelines", json={"stages": [mixture(job["training_file"])]}
        ).json()["id"],
        "preview_id": preview_id,
        "rollout_id": "rollout_2_t_0_0",
        "checkpoint_id": "ftckpt_1",
        "delivery_id": "wh_1",
        "grader_name": "close",
        "version": grader["version"],
        "case_id": cases[0]["id"],
        "regrade_id": api.post(
            f"/v1/regraft/jobs/{job['id']}/regrade", json={"grader": GRADER | {"reference": "4"}}
        ).json()["id"],
    }


def routes_with_an_id(house: House) -> list[tuple[str, str]]:
    paths = house.app.openapi()["paths"]
    return [(method, path) for path, operations in paths.items() if "{" in path for method in operations]


def fill(path: str, rows: dict[str, str]) -> str:
    queries = {"rollouts": "?step=1", "compare": "?runs={run_id},{run_id}", "what-if": "?formula=says"}
    if path == "/v1/regraft/jobs/{job_id}/compare":
        return (path + "?other={other_job_id}").format(**rows)
    return (path + queries.get(path.rpartition("/")[2], "")).format(**rows)


def test_what_belongs_to_another_does_not_exist(house: House, rows: dict[str, str]) -> None:
    theirs = house.client(house.other_key)

    answers = {
        (method, path): theirs.request(method, fill(path, rows), json=BODIES.get(path))
        for method, path in routes_with_an_id(house)
    }

    assert len(answers) >= 29
    assert {route: answer.status_code for route, answer in answers.items()} == dict.fromkeys(answers, 404)


def test_the_answer_is_the_same_as_for_what_never_was(house: House, rows: dict[str, str]) -> None:
    theirs = house.client(house.other_key)

    for method, path in routes_with_an_id(house):
        unknown = {name: "x" * len(value) for name, value in rows.items()}
        foreign_answer = theirs.request(method, fill(path, rows), json=BODIES.get(path)).text
        for name, value in rows.items():
            foreign_answer = foreign_answer.replace(value, unknown[name])
        assert foreign_answer == theirs.request(method, fill(path, unknown), json=BODIES.get(path)).text


def test_the_same_routes_work_for_the_owner(house: House, api: TestClient, rows: dict[str, str]) -> None:
    """Or the tests above would pass on a service that finds nothing at all."""
    reading = [(method, path) for method, path in routes_with_an_id(house) if method == "get"]

    assert {path: api.request(method, fill(path, rows)).status_code for method, path in reading} == {
        path: 200 for _, path in reading
    }


@pytest.mark.parametrize(
    "url",
    [
        "/v1/files",
        "/v1/evals",
        "/v1/fine_tuning/jobs",
        "/v1/fine_tuning/jobs?metadata[team]=a",
        "/v1/regraft/previews",
        "/v1/regraft/graders",
        "/v1/regraft/aliases",
    ],
)
def test_lists_hold_nothing_of_anothers(house: House, rows: dict[str, str], url: str) -> None:
    assert house.client(house.other_key).get(url).json()["data"] == []


def test_the_models_listed_are_the_base_models_only(house: House, rows: dict[str, str]) -> None:
    listed = house.client(house.other_key).get("/v1/models").json()["data"]

    assert [model["id"] for model in listed] == ["tiny", "org/large", "o4-mini-2025-04-16"]


@pytest.mark.parametrize("url", ["/v1/files", "/v1/fine_tuning/jobs"])
def test_anothers_id_is_no_cursor_either(house: House, rows: dict[str, str], url: str) -> None:
    after = rows["file_id" if url.endswith("files") else "job_id"]

    assert house.client(house.other_key).get(url, params={"after": after}).status_code == 400


def test_anothers_files_cannot_be_trained_on(
    house: House, rows: dict[str, str], job_request: Callable[..., dict[str, Any]]
) -> None:
    answer = house.client(house.other_key).post("/v1/fine_tuning/jobs", json=job_request())

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "training_file")
    assert answer.json()["error"]["message"].startswith("No such File object")


def test_a_key_of_another_project_is_not_found_under_ones_own(house: House, rows: dict[str, str]) -> None:
    theirs = house.client(house.other_key)
    mine = theirs.get("/v1/organization/audit_logs").json()["data"][0]["project"]["id"]
    path = f"/v1/organization/projects/{mine}/api_keys/{rows['key_id']}"

    answers = [theirs.get(path), theirs.delete(path), theirs.post(f"{path}/rotate")]

    assert [answer.status_code for answer in answers] == [404] * 3
    assert house.client(house.key).get("/v1/files").status_code == 200


def test_the_log_and_the_keys_of_a_project_are_its_own(
    house: House, api: TestClient, rows: dict[str, str]
) -> None:
    logged = house.client(house.other_key).get("/v1/organization/audit_logs").json()["data"]

    assert [entry["type"] for entry in logged] == ["api_key.created"]
    assert {entry["project"]["id"] for entry in logged} != {house.project.id}
