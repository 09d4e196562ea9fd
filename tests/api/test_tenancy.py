"""A second project's key must not tell a row of the first from one that was never there."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from core import passports
from core.database.engine import Database, Work
from core.database.migrate import upgrade
from core.database.tables import (
    Checkpoint,
    CheckpointPermission,
    GraderAudit,
    Job,
    Preview,
    StepMetric,
    TunedModel,
)
from core.evals import batches
from core.results import evals
from core.results.passport import KEY_FILE
from core.tenancy import keys
from core.tenancy.keys import Scope
from tests.api.conftest import GRADER, OF_EPISODES, House, created_job, open_house, request_of
from tests.api.test_rollouts import row, store
from tests.rollout_pages import sample, store_page

UPLOAD = {"filename": "a", "mime_type": "text/jsonl", "purpose": "fine-tune", "bytes": 2}
ENDPOINT = {"name": "a", "url": "https://8.8.8.8/", "event_types": ["fine_tuning.job.succeeded"]}
CASE = {"sample": {"output_text": "4"}, "item": {"answer": "4"}, "expect": 1}
NEW_EVAL = {
    "data_source_config": {"type": "custom", "item_schema": {"type": "object"}},
    "testing_criteria": [GRADER | {"input": "{{item.answer}}"}],
}
NAMES = {
    "alias",
    "grader_name",
    "version",
    "rollout_id",
    "other_job_id",
}  # no ids, or ids of a kind that is there
PROMPT = {"type": "template", "template": [{"role": "user", "content": "a"}]}
ROWS = {"type": "file_content", "content": [{"item": {"answer": "4"}}]}
# What an operation that takes a body must be sent to get as far as looking for the row.
BODIES = {
    ("post", "/v1/uploads/{upload_id}/complete"): {"part_ids": ["part_1"]},
    ("post", "/v1/fine_tuning/jobs/{job_id}/budget"): {"budget": None},
    ("post", "/v1/regraft/files/{file_id}/profile"): {},
    ("post", "/v1/fine_tuning/checkpoints/{checkpoint}/permissions"): {"project_ids": ["proj_1"]},
    ("post", "/v1/evals/{eval_id}"): {"name": "b"},
    ("post", "/v1/evals/{eval_id}/runs"): {
        "data_source": {"type": "jsonl", "source": {"type": "file_id", "id": "f"}}
    },
    ("post", "/v1/regraft/jobs/{job_id}/regrade"): {"grader": GRADER},
    ("post", "/v1/regraft/jobs/{job_id}/episodes/lease"): {},
    ("post", "/v1/regraft/graders/{grader_name}/cases"): {"cases": [CASE]},
    ("post", "/v1/regraft/graders/{grader_name}/check"): {"grader": GRADER},
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}"): {"name": "b"},
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}/test"): {"event_type": "fine_tuning.job.succeeded"},
}


def mixture(file_id: str) -> dict[str, Any]:
    return {"name": "m", "mix": {"files": [{"file": file_id}]}}


@pytest.fixture(params=["sqlite", "postgres"], scope="module")
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """On either database one service for all tests whose second project only looks."""
    folder = tmp_path_factory.mktemp("house")
    if request.param == "sqlite":
        file = shutil.copy(request.getfixturevalue("migrated_sqlite"), folder / "regraft.db")
        url = f"sqlite:///{file}"
    else:
        url = request.getfixturevalue("postgres").new_database()
        upgrade(url)
    database = Database(url)
    with open_house(database, folder) as house:
        yield house
    database.close()


@pytest.fixture(scope="module")
def rows(house: House) -> dict[str, str]:
    return settle(house)


@pytest.fixture
def own_house(request: pytest.FixtureRequest, database_kind: str, tmp_path: Path) -> Iterator[House]:
    with open_house(request.getfixturevalue(f"{database_kind}_database"), tmp_path) as house:
        yield house


def settle(house: House) -> dict[str, str]:
    """Add a row of everything that has an id to the first project; return the ids by their names in a path."""
    api = house.client(house.key)
    both = {"type": "multi", "name": "both", "graders": {"says": GRADER}, "calculate_output": "says"}
    job = created_job(api, request_of(api, {"grader": both}, metadata={"team": "a"}))
    api.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel")  # or the stream of its events would have no end
    nothing = {"text": "4", "logprob": None, "advantage": None, "gap": None}
    store(house, job["id"], 2, rows=[row(2, "train", 0, 0, has_tokens=True, tokens=[nothing])])
    with house.database.write() as session:
        for split in ("train", "valid"):
            samples = [sample(0, 0, line=1, score=1.0, output_text="4", prompt_tokens=1, completion_tokens=1)]
            page = store_page(house.blobs, job["id"], 1, split, samples)
            page.summary = evals.summary(samples, evals.criteria(both))
            session.add(page)
        session.add(StepMetric(job_id=job["id"], step=1, epoch=1, data={}))
        model = TunedModel(
            name="ft:tiny:default::1", project_id=house.project.id, job_id=job["id"], base_model="tiny"
        )
        model.checkpoint_id = "ftckpt_1"
        session.add(model)
        session.query(Job).where(Job.id == job["id"]).one().fine_tuned_model = model.name
        permission = CheckpointPermission(model=model.name, project_id=house.project.id)
        session.add(permission)
        session.flush()
        permission_id = permission.id
        preview = Preview(
            project_id=house.project.id, request={"model": "tiny", "answers_of": None}, parts={}
        )
        preview.training_sha256, preview.lease_expires_at = "", 0.0
        preview.progress = {"phase": "loading", "of": 4, "sampled": 0, "graded": 0}
        audit = GraderAudit(project_id=house.project.id, request={}, version="", behavior_sha256="")
        audit.training_sha256, audit.lease_expires_at, audit.progress = "", 0.0, {"of": 4, "graded": 0}
        session.add_all([preview, audit])
        session.flush()
        preview_id, audit_id = preview.id, audit.id
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
    (house.folder / KEY_FILE).write_text(passports.new_key())
    house.blobs.put_bytes("checkpoint/manifest.json", json.dumps({"format": 1, "files": []}).encode())
    secret = job["id"].removeprefix("ftjob-")
    grader = api.post("/v1/regraft/graders", json={"name": "close", "grader": GRADER}).json()
    cases = api.post("/v1/regraft/graders/close/cases", json={"cases": [CASE]}).json()["data"]
    api.post("/v1/regraft/aliases", json={"name": "production", "model": "tiny"})
    made = api.post("/v1/evals", json=NEW_EVAL).json()["id"]
    run = api.post(f"/v1/evals/{made}/runs", json={"data_source": {"type": "jsonl", "source": ROWS}}).json()
    return {
        "created_eval_id": made,
        "created_run_id": run["id"],
        "alias": "production",
        "batch_id": batch_id,
        "other_job_id": created_job(api, request_of(api))["id"],
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
        "audit_id": audit_id,
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
    return [
        (method, path)
        for path, operations in paths.items()
        if "{" in path and not path.startswith(OF_EPISODES)
        for method in operations
    ]


def fill(path: str, rows: dict[str, str]) -> str:
    queries = {"rollouts": "?step=1", "compare": "?runs={run_id},{run_id}", "what-if": "?formula=says"}
    if path == "/v1/regraft/jobs/{job_id}/compare":
        return (path + "?other={other_job_id}").format(**rows)
    return (path + queries.get(path.rpartition("/")[2], "")).format(**rows)


def unknown(value: str) -> str:
    """An id of the same form that was never given to anything."""
    if re.fullmatch("[0-9a-f]{64}", value):
        return "0" * 64
    other_random = hashlib.sha256(value.encode()).hexdigest()
    random = re.sub(r"[A-Za-z0-9]{20,}", lambda part: other_random[: len(part[0])], value)
    other = re.sub(r"\d", "9", random)
    return "x" * len(value) if other == value else other


def answer(client: TestClient, ids: Mapping[str, str], method: str, url: str, **sent: Any) -> tuple[int, str]:
    """Status and text of an answer, without the ids that were sent and what differs by chance."""
    received = client.request(method, url, **sent)
    text = received.text
    for value in sorted(set(ids.values()), key=len, reverse=True):
        text = text.replace(value, "ID")
    text = re.sub(r"(_at\":) ?\d+", r"\1 0", text)
    return received.status_code, re.sub(r"(eval|evalrun)_[A-Za-z0-9]{24}", r"\1_NEW", text)


def key_of_the_other(house: House, scope: Scope) -> str:
    with house.database.write() as session:
        _, project = keys.authenticate(session, house.other_key)
        return keys.create_key(Work(session), project, scope, scope=scope).token


def rows_of(client: TestClient, house: House) -> dict[str, str]:
    """Rows of the second project, by the name that their ids have in a path."""
    files = [
        client.post("/v1/files", data={"purpose": purpose}, files={"file": ("a.jsonl", content)}).json()["id"]
        for purpose, content in (("fine-tune", b"{}"), ("fine-tune", b'{"a": 1}'))
    ]
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    job = client.post(
        "/v1/fine_tuning/jobs",
        json={"model": "tiny", "method": method, "training_file": files[0], "validation_file": files[1]},
    ).json()
    client.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel")  # or the stream of its events would have no end
    client.post("/v1/regraft/graders", json={"name": "mine", "grader": GRADER | {"reference": "4"}})
    client.post("/v1/regraft/aliases", json={"name": "mine", "model": "tiny"})
    made = client.post("/v1/evals", json=NEW_EVAL).json()
    with house.database.read() as session:
        project_id = keys.authenticate(session, house.other_key)[1].id
    return {
        "file_id": files[0],
        "job_id": job["id"],
        "eval_id": made["id"],
        "grader_name": "mine",
        "alias": "mine",
        "project_id": project_id,
        "upload_id": client.post("/v1/uploads", json=UPLOAD).json()["id"],
        "webhook_endpoint_id": client.post("/v1/webhook_endpoints", json=ENDPOINT).json()["id"],
        "pipeline_id": client.post("/v1/regraft/pipelines", json={"stages": [mixture(files[0])]}).json()[
            "id"
        ],
    }


def queries(house: House, own: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The text parameters of all routes whose ids in the path the second project has. Streams have no end."""
    for path, operations in house.app.openapi()["paths"].items():
        if "get" not in operations or path == "/v1/regraft/stream":
            continue
        if set(re.findall(r"{(\w+)}", path)) <= own.keys():
            for parameter in operations["get"].get("parameters", ()):
                if parameter["in"] == "query" and "string" in str(parameter["schema"]):
                    yield path, parameter["name"]


def bodies(ids: Mapping[str, str], own: Mapping[str, str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Requests of the second project that name these ids, one place at a time, beside its own: method, path, body."""
    for path, body in posted(ids, own):
        yield "post", path, body


def posted(ids: Mapping[str, str], own: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    grader = {"type": "stored", "name": ids["grader_name"]}
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    job = {
        "model": "tiny",
        "method": method,
        "training_file": own["file_id"],
        "validation_file": own["file_id"],
    }
    for path in (
        "/v1/fine_tuning/jobs",
        "/v1/regraft/jobs/validate",
        "/v1/regraft/estimate",
        "/v1/regraft/previews",
    ):
        yield path, job | {"training_file": ids["file_id"]}
        yield path, job | {"validation_file": ids["file_id"]}
        yield path, job | {"model": ids["model"]}
        yield path, job | {"model": ids["alias"]}
        yield path, job | {"method": {"type": "reinforcement", "reinforcement": {"grader": grader}}}
        for teacher in (ids["model"], ids["job_id"]):
            distillation = {"hyperparameters": {"teacher": teacher}}
            yield path, job | {"method": {"type": "distillation", "distillation": distillation}}
    yield "/v1/regraft/graders/audit", {"grader": GRADER, "training_file": ids["file_id"]}
    yield "/v1/regraft/graders/audit", {"grader": grader, "training_file": own["file_id"]}
    for name in ("model", "alias"):
        chat = {"model": ids[name], "messages": [{"role": "user", "content": "a"}]}
        yield "/v1/chat/completions", chat
        yield "/v1/completions", {"model": ids[name], "prompt": "a"}
        yield "/v1/responses", {"model": ids[name], "input": "a"}
        yield "/v1/responses/input_tokens", {"model": ids[name], "input": "a"}
        yield "/v1/regraft/files/{file_id}/profile", {"method": "reinforcement", "model": ids[name]}
        yield "/v1/regraft/aliases", {"name": "new", "model": ids[name]}
        sampled = {"type": "completions", "model": ids[name], "input_messages": PROMPT, "source": ROWS}
        yield "/v1/evals/{eval_id}/runs", {"data_source": sampled}
        judge = {"type": "score_model", "name": "a", "model": ids[name], "input": chat["messages"]}
        yield "/v1/fine_tuning/alpha/graders/validate", {"grader": judge}
    yield "/v1/responses", {"model": "tiny", "input": "a", "previous_response_id": ids["job_id"]}
    yield "/v1/responses/input_tokens", {"model": "tiny", "input": "a", "previous_response_id": ids["job_id"]}
    profile = {"method": "reinforcement", "validation_file": ids["file_id"]}
    yield "/v1/regraft/files/{file_id}/profile", profile
    batch = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    yield "/v1/batches", batch | {"input_file_id": ids["file_id"]}
    yield "/v1/regraft/graders", {"name": "new", "grader": grader}
    yield "/v1/fine_tuning/alpha/graders/validate", {"grader": grader}
    yield "/v1/fine_tuning/alpha/graders/run", {"grader": grader, "model_sample": "a"}
    yield "/v1/regraft/jobs/{job_id}/regrade", {"grader": grader}
    yield "/v1/evals", NEW_EVAL | {"testing_criteria": [grader]}
    file = {"type": "jsonl", "source": {"type": "file_id", "id": ids["file_id"]}}
    yield "/v1/evals/{eval_id}/runs", {"data_source": file}
    for stage in (mixture(ids["file_id"]), {"name": "j", "job": job | {"training_file": ids["file_id"]}}):
        yield "/v1/regraft/pipelines", {"stages": [stage]}
    yield "/v1/uploads/{upload_id}/complete", {"part_ids": [ids["upload_id"]]}
    yield "/v1/fine_tuning/checkpoints/" + ids["model"] + "/permissions", {"project_ids": [ids["project_id"]]}
    case = CASE | {"rollout_id": ids["rollout_id"], "job_id": ids["job_id"]}
    yield "/v1/regraft/graders/{grader_name}/cases", {"cases": [case]}
    yield "/v1/regraft/graders/{grader_name}/check", {"version": ids["version"]}
    run = {"status": "completed", "data_source": {"type": "jsonl"}}
    yield "/v1/regraft/evals/import", {"eval": NEW_EVAL, "runs": [{"run": run, "items_file": ids["file_id"]}]}
    yield "/v1/regraft/evals/import", {"eval": NEW_EVAL | {"id": ids["created_eval_id"]}}
    yield "/v1/regraft/evals/import", {"eval": NEW_EVAL | {"id": ids["eval_id"]}}
    yield (
        "/v1/regraft/evals/import",
        {"eval": NEW_EVAL, "runs": [{"run": run | {"id": ids["created_run_id"]}}]},
    )


def test_what_belongs_to_another_does_not_exist(house: House, rows: dict[str, str]) -> None:
    theirs = house.client(house.other_key)

    answers = {
        (method, path): theirs.request(method, fill(path, rows), json=BODIES.get((method, path)))
        for method, path in routes_with_an_id(house)
    }

    assert len(answers) >= 29
    assert {route: answer.status_code for route, answer in answers.items()} == dict.fromkeys(answers, 404)


@pytest.mark.parametrize("scope", ["read", "write", "admin"])
def test_the_answer_is_the_same_as_for_what_never_was(
    house: House, rows: dict[str, str], scope: Scope
) -> None:
    theirs = house.client(key_of_the_other(house, scope))
    never = {name: unknown(value) for name, value in rows.items()}

    for method, path in routes_with_an_id(house):
        foreign, absent = (
            answer(theirs, ids, method, fill(path, ids), json=BODIES.get((method, path)))
            for ids in (rows, never)
        )
        assert foreign == absent, (method, path)
        assert foreign[0] in (404, 403), (method, path)


@pytest.mark.parametrize("database_kind", ["postgres"])  # it is the stricter one
def test_foreign_ids_in_queries_are_answered_as_ids_that_never_were(own_house: House) -> None:
    rows = settle(own_house)
    theirs = own_house.client(own_house.other_key)
    own = rows_of(theirs, own_house)
    ids = {value for kind, value in rows.items() if kind not in NAMES}
    tried = 0

    def answered(path: str, name: str, sent: str) -> Any:
        return answer(theirs, {"id": sent}, "get", path.format(**own), params={name: sent})

    for path, name in queries(own_house, own):
        of_no_kind = answered(path, name, unknown(min(ids)))
        for value in ids:
            foreign = answered(path, name, value)
            # Most routes answer alike for ids of all kinds, so the twin of this one is rarely needed.
            same = foreign == of_no_kind or foreign == answered(path, name, unknown(value))
            assert same, (path, name, value, foreign)
            tried += 1

    assert tried > 500


@pytest.mark.both_databases
def test_foreign_ids_in_bodies_are_answered_as_ids_that_never_were(own_house: House) -> None:
    rows = settle(own_house)
    theirs = own_house.client(own_house.other_key)
    own = rows_of(theirs, own_house)
    never = {name: unknown(value) for name, value in rows.items()}

    foreign, absent = (
        [
            answer(theirs, ids, method, path.format(**own), json=body)
            for method, path, body in bodies(ids, own)
        ]
        for ids in (rows, never)
    )

    assert foreign == absent
    paths = [path for _, path, _ in bodies(rows, own)]
    accepted = {path for path, (status, _) in zip(paths, foreign, strict=True) if status < 400}
    assert accepted <= {"/v1/regraft/evals/import"}, "which keeps ids that are free in its own project"


# Operations with a JSON body that names nothing of a project.
WITHOUT_IDS = {
    ("post", "/v1/uploads"): "sizes and names",
    ("post", "/v1/fine_tuning/jobs/{job_id}/budget"): "a budget",
    ("post", "/v1/evals/{eval_id}"): "a name and metadata",
    ("post", "/v1/regraft/pipelines/{pipeline_id}/clone"): "stages of the pipeline itself",
    ("post", "/v1/webhook_endpoints"): "types of events",
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}"): "types of events",
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret"): "nothing",
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}/test"): "types of events",
    ("post", "/v1/organization/projects/{project_id}/api_keys"): "a name and a scope",
    ("post", "/v1/organization/projects/{project_id}/api_keys/{key_id}/rotate"): "a time",
    ("post", "/v1/regraft/session"): "a key, which is looked up in all projects",
    ("post", "/v1/regraft/jobs/{job_id}/episodes/lease"): "numbers",
    ("post", "/v1/regraft/episodes/{episode_id}/v1/chat/completions"): "messages",
    ("post", "/v1/regraft/episodes/{episode_id}/v1/responses"): "messages",
    ("post", "/v1/regraft/episodes/{episode_id}/complete"): "a reward",
}


def test_every_operation_with_a_body_is_tried_with_foreign_ids_or_takes_none(
    house: House, rows: dict[str, str]
) -> None:
    permissions = "/v1/fine_tuning/checkpoints/{checkpoint}/permissions"
    of_a_model = fill(permissions, {"checkpoint": rows["model"]})
    tried = {(method, permissions if path == of_a_model else path) for method, path, _ in bodies(rows, rows)}
    with_body = {
        (method, path)
        for path, operations in house.app.openapi()["paths"].items()
        for method, operation in operations.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }

    assert with_body - tried == WITHOUT_IDS.keys()
    assert tried <= with_body, "an operation that does not exist"


def test_foreign_ids_in_headers_are_answered_as_ids_that_never_were(
    house: House, rows: dict[str, str]
) -> None:
    theirs = house.client(house.other_key)
    named = {"OpenAI-Organization": house.project.organization_id, "OpenAI-Project": house.project.id}
    no_id = dict.fromkeys([*rows, "episode_id"], "x")

    for path, operations in house.app.openapi()["paths"].items():
        for method, operation in operations.items():
            if "security" not in operation:
                continue
            for header, value in named.items():
                foreign, absent = (
                    answer(theirs, {"id": sent}, method, fill(path, no_id), headers={header: sent})
                    for sent in (value, unknown(value))
                )
                assert foreign == absent, (method, path, header)
                assert foreign[0] == 401, (method, path, header)


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
        "/v1/regraft/grader_audits",
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

    assert {entry["type"] for entry in logged} == {"api_key.created"}
    assert {entry["project"]["id"] for entry in logged} != {house.project.id}
