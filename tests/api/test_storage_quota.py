"""The storage quota on every route that stores, read from the OpenAPI document so that no new one is forgotten."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from httpx2 import Response
from sqlalchemy import func, select
from starlette.testclient import TestClient

from api.app import create_app
from core.database.tables import (
    Eval,
    EvalJournal,
    EvalPage,
    EvalRun,
    File,
    GoldenCase,
    GraderAudit,
    GraderVersion,
    Job,
    Pipeline,
    Preview,
    RolloutPage,
    StoredGrader,
    Table,
    Upload,
    UploadPart,
    WebhookDelivery,
)
from core.outbound import webhooks
from core.registry import Registry
from core.settings import Settings
from core.tenancy import tenants
from graders.backends import Backends
from tests import factories
from tests.api.conftest import ALIASES, GRADER, MODELS, OF_EPISODES, House
from tests.api.test_any_text import EXAMPLES, TUNED, Operation, Walk, furnished
from tests.api.test_chat import served
from tests.api.test_responses import USAGE
from tests.api.test_rollouts import row, store
from tests.api.test_sessions import browser

CONTENT = (
    Eval,
    EvalJournal,
    EvalPage,
    EvalRun,
    File,
    GoldenCase,
    GraderAudit,
    GraderVersion,
    Job,
    Pipeline,
    Preview,
    RolloutPage,
    StoredGrader,
    Upload,
    UploadPart,
)
BY_OPERATORS = "operators create them, or the service"
BY_A_RUN = "rows of a few kilobytes that the run of a job writes"
OF_A_REQUEST = "a row of bounded size, which is deleted after a while"
OF_EACH_PROJECT = "one of a few hundred bytes for each project"
BY_ADMINISTRATORS = "administrators only, a few hundred bytes each"
FEW = "a project has a bounded number of them"
NO_CONTENT = {
    "organizations": BY_OPERATORS,
    "projects": BY_OPERATORS,
    "project_turns": "one of a project",
    "workers": BY_OPERATORS,
    "memory_limits": BY_OPERATORS,
    "scrub_rounds": BY_OPERATORS,
    "project_usage": "one of a project and a day",
    "model_usage": "one of a project, a model and a day",
    "job_attempts": BY_A_RUN,
    "episode_servers": BY_A_RUN,
    "events": BY_A_RUN,
    "step_metrics": BY_A_RUN,
    "checkpoints": BY_A_RUN,
    "tuned_models": BY_A_RUN,
    "api_keys": BY_ADMINISTRATORS,
    "checkpoint_permissions": OF_EACH_PROJECT,
    "model_aliases": FEW,
    "webhook_endpoints": FEW,
    "console_sessions": "a key has a bounded number of them",
    "audit_entries": OF_A_REQUEST,
    "idempotent_requests": OF_A_REQUEST,
    "past_cursors": OF_A_REQUEST,
    "webhook_deliveries": OF_A_REQUEST,
}

# Routes that store nothing, or rows of a bounded size and number, each with the reason.
ONLY_READS = "it stores nothing"
CHANGES = "it changes a row that is there"
ANNOUNCED = "the announced size of the upload counts already"
NOT_STORING = {
    ("post", "/v1/uploads/{upload_id}/parts"): ANNOUNCED,
    ("post", "/v1/uploads/{upload_id}/complete"): ANNOUNCED,
    ("post", "/v1/uploads/{upload_id}/cancel"): CHANGES,
    ("post", "/v1/fine_tuning/jobs/{job_id}/cancel"): CHANGES,
    ("post", "/v1/fine_tuning/jobs/{job_id}/pause"): CHANGES,
    ("post", "/v1/fine_tuning/jobs/{job_id}/resume"): CHANGES,
    ("post", "/v1/fine_tuning/jobs/{job_id}/budget"): CHANGES,
    ("post", "/v1/fine_tuning/checkpoints/{checkpoint}/permissions"): OF_EACH_PROJECT,
    ("post", "/v1/regraft/estimate"): ONLY_READS,
    ("post", "/v1/regraft/previews/{preview_id}/cancel"): CHANGES,
    ("post", "/v1/regraft/aliases"): FEW,
    ("post", "/v1/regraft/aliases/{alias}/rollback"): CHANGES,
    ("post", "/v1/regraft/files/{file_id}/profile"): ONLY_READS,
    ("post", "/v1/chat/completions"): ONLY_READS,
    ("post", "/v1/completions"): ONLY_READS,
    ("post", "/v1/responses"): ONLY_READS,
    ("post", "/v1/fine_tuning/alpha/graders/validate"): ONLY_READS,
    ("post", "/v1/fine_tuning/alpha/graders/run"): ONLY_READS,
    ("post", "/v1/regraft/graders/{grader_name}/check"): ONLY_READS,
    ("post", "/v1/regraft/jobs/{job_id}/regrades/{regrade_id}/cancel"): CHANGES,
    ("post", "/v1/regraft/grader_audits/{audit_id}/cancel"): CHANGES,
    ("post", "/v1/responses/input_tokens"): ONLY_READS,
    ("post", "/v1/batches/{batch_id}/cancel"): CHANGES,
    ("post", "/v1/evals/{eval_id}"): CHANGES,
    ("post", "/v1/evals/{eval_id}/runs/{run_id}/cancel"): CHANGES,
    ("post", "/v1/regraft/pipelines/{pipeline_id}/cancel"): CHANGES,
    ("post", "/v1/regraft/pipelines/{pipeline_id}/pause"): CHANGES,
    ("post", "/v1/regraft/pipelines/{pipeline_id}/resume"): CHANGES,
    ("post", "/v1/regraft/pipelines/{pipeline_id}/retry"): CHANGES,
    ("post", "/v1/webhook_endpoints"): FEW,
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}"): CHANGES,
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret"): CHANGES,
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}/test"): OF_A_REQUEST,
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}/deliveries/{delivery_id}/redeliver"): CHANGES,
    ("post", "/v1/organization/projects/{project_id}/api_keys"): BY_ADMINISTRATORS,
    ("post", "/v1/organization/projects/{project_id}/api_keys/{key_id}/rotate"): CHANGES,
    ("post", "/v1/regraft/session"): FEW,
    ("post", "/v1/regraft/jobs/validate"): ONLY_READS,
    ("post", "/v1/regraft/jobs/{job_id}/episodes/lease"): ONLY_READS,
}
ITEM = {"id": "item", "status": "pass", "datasource_item": {}, "results": []}
CONFIG = {"type": "custom", "item_schema": {"type": "object", "properties": {"answer": {"type": "string"}}}}
CRITERION = GRADER | {"input": "{{item.answer}}"}


@pytest.fixture
def storing(
    house: House,
    api: TestClient,
    upload: Callable[..., str],
    create_job: Callable[..., dict[str, Any]],
    job_request: Callable[..., dict[str, Any]],
) -> dict[Operation, dict[str, Any]]:
    """A valid request for each operation that stores; `url` is the path with its ids."""
    job = create_job()
    store(house, job["id"], 2, rows=[row(2, "train", 0, 0)])
    api.post("/v1/regraft/graders", json={"name": "close", "grader": GRADER})
    made = api.post("/v1/evals", json={"data_source_config": CONFIG, "testing_criteria": [CRITERION]}).json()
    items = upload(json.dumps(ITEM).encode())
    file, other = (
        upload(json.dumps({"messages": [{"role": "user", "content": text}], "answer": "4"}).encode())
        for text in ("2 + 2?", "1 + 3?")
    )
    stage = {"name": "m", "mix": {"files": [{"file": file}]}}
    pipeline = api.post("/v1/regraft/pipelines", json={"stages": [stage]}).json()["id"]
    rows = {"type": "file_content", "content": [{"item": {"answer": "4"}}]}
    case = {"sample": {"output_text": "4"}, "item": {"answer": "4"}, "expect": 1}
    body = {"model": "tiny", "input": "2 + 2?"}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    announced = {"filename": "a", "mime_type": "text/jsonl", "purpose": "fine-tune", "bytes": 2}
    preview = job_request() | {"training_file": file, "validation_file": other}
    return {
        ("post", "/v1/files"): {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", b"new")}},
        ("post", "/v1/uploads"): {"json": announced},
        ("post", "/v1/fine_tuning/jobs"): {"json": job_request()},
        ("post", "/v1/regraft/previews"): {"json": preview},
        ("post", "/v1/regraft/graders/audit"): {"json": {"grader": GRADER, "training_file": file}},
        ("post", "/v1/regraft/graders"): {"json": {"name": "new", "grader": GRADER}},
        ("post", "/v1/regraft/graders/{grader_name}/cases"): {
            "url": "/v1/regraft/graders/close/cases",
            "json": {"cases": [case]},
        },
        ("post", "/v1/regraft/jobs/{job_id}/regrade"): {
            "url": f"/v1/regraft/jobs/{job['id']}/regrade",
            "json": {"grader": GRADER | {"reference": "4"}},
        },
        ("post", "/v1/batches"): {
            "json": {
                "input_file_id": upload(json.dumps(request).encode(), purpose="batch"),
                "endpoint": "/v1/responses",
                "completion_window": "24h",
            }
        },
        ("post", "/v1/evals"): {"json": {"data_source_config": CONFIG, "testing_criteria": [CRITERION]}},
        ("post", "/v1/evals/{eval_id}/runs"): {
            "url": f"/v1/evals/{made['id']}/runs",
            "json": {"data_source": {"type": "jsonl", "source": rows}},
        },
        ("post", "/v1/regraft/evals/import"): {
            "json": {
                "eval": {"data_source_config": CONFIG, "testing_criteria": [CRITERION]},
                "runs": [
                    {"run": {"status": "completed", "data_source": {"type": "jsonl"}}, "items_file": items}
                ],
            }
        },
        ("post", "/v1/regraft/pipelines"): {"json": {"stages": [stage]}},
        ("post", "/v1/regraft/pipelines/{pipeline_id}/clone"): {
            "url": f"/v1/regraft/pipelines/{pipeline}/clone",
            "json": {},
        },
    }


def sending(house: House) -> Iterator[Operation]:
    """The operations that are sent something. The run of a job keeps what is sent to its episodes."""
    for path, operations in house.app.openapi()["paths"].items():
        for method, operation in operations.items():
            sends = method in ("post", "put", "patch") or "requestBody" in operation
            if sends and not path.startswith(OF_EPISODES):
                yield method, path


def stored(house: House) -> dict[str, Any]:
    with house.database.read() as session:
        rows = {
            table.__tablename__: session.scalar(select(func.count()).select_from(table)) for table in CONTENT
        }
    return rows | {"blobs": sorted(house.blobs.list(""))}


def test_every_table_is_watched_or_has_no_content() -> None:
    watched = {table.__tablename__ for table in CONTENT}

    assert not watched & NO_CONTENT.keys()
    assert {table.name for table in Table.metadata.sorted_tables} == watched | NO_CONTENT.keys()


def test_every_operation_is_known_to_store_or_not_to(
    house: House, storing: dict[Operation, dict[str, Any]]
) -> None:
    assert not storing.keys() & NOT_STORING.keys()
    assert set(sending(house)) == storing.keys() | NOT_STORING.keys()


def answering() -> FastAPI:
    """An inference server that always says the same, and a receiver of webhooks."""
    app = FastAPI()

    @app.get("/healthz")
    async def healthy() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/hook")
    async def receive() -> None:
        pass

    @app.post("/v1/chat/completions")
    async def chat() -> dict[str, Any]:
        message = {"role": "assistant", "content": "4", "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return {"choices": [choice], "usage": USAGE}

    @app.post("/v1/completions")
    async def complete() -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": "4", "finish_reason": "stop"}], "usage": USAGE}

    return app


@pytest.fixture
def inference() -> Iterator[str]:
    yield from served(answering())


def in_order(operations: Iterable[Operation]) -> list[Operation]:
    """What cancels comes after what needs a row that is not cancelled; what retries needs one that is."""
    ends = ("/cancel", "/retry")
    return sorted(
        operations, key=lambda one: next((n for n, end in enumerate(ends, 1) if one[1].endswith(end)), 0)
    )


def sent(api: TestClient, operation: Operation, request: dict[str, Any]) -> Response:
    """The answer to a request of `storing`."""
    method, path = operation
    return api.request(method, **{"url": path} | request)


def test_routes_that_store_nothing_leave_content_and_blobs_as_they_are(
    house: House, api: TestClient, inference: str
) -> None:
    """Or a new route could be listed as one that only reads, and store. All requests succeed."""
    known = furnished(house, api, EXAMPLES).known
    settings = Settings(
        data_dir=house.folder,
        inference_url=f"{inference}/v1",
        inference_key="between us",
        webhook_private_hosts="127.0.0.1",
    )
    parts = settings, house.database, house.blobs, Registry(models=MODELS, aliases=ALIASES), Backends.none()
    house = replace(house, app=create_app(*parts, lambda *wake: True))
    walk = Walk(house.client(house.key), known)
    known["batch_id"] = walk.send(
        "post", "/v1/batches", json=walk.named(EXAMPLES["post", "/v1/batches"][0])
    ).json()["id"]
    walk.send("post", "/v1/regraft/aliases", json={"name": known["alias"], "model": TUNED})
    with house.database.write() as session:
        body = webhooks.event_body("fine_tuning.job.failed", {"id": known["job_id"]})
        delivery = WebhookDelivery(
            endpoint_id=known["webhook_endpoint_id"],
            job_id=known["job_id"],
            type="t",
            body=body,
            settled=True,
        )
        session.add(delivery)
        agents = {"grader": GRADER, "hyperparameters": {}, "environment": {"type": "client", "timeout_s": 60}}
        queued = factories.job(session, house.project, status="queued", body=agents).id
        session.flush()
        known["delivery_id"] = delivery.id
    bodies = {operation: walk.named(example) for operation, (example, _) in EXAMPLES.items()} | {
        ("post", "/v1/regraft/session"): {"api_key": house.key},
        ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}"): {"url": f"{inference}/hook"},
        ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}/test"): {
            "event_type": "fine_tuning.job.succeeded"
        },
    }

    grown: list[Operation] = []
    refused: dict[Operation, str] = {}
    for operation in in_order(one for one, reason in NOT_STORING.items() if reason != ANNOUNCED):
        method, path = operation
        before = stored(house)
        client = browser(house) if path == "/v1/regraft/session" else walk.api
        of_queued = path.startswith("/v1/fine_tuning/jobs/") or path.endswith("/lease")
        own = {"job_id": queued} if of_queued else {}
        answer = client.request(method, path.format_map(known | own), json=bodies.get(operation, {}))
        refused |= {} if answer.is_success else {operation: answer.text}
        grown += [operation] if stored(house) != before else []

    assert refused == {}
    assert grown == []


@pytest.mark.both_databases
def test_a_project_whose_storage_is_used_up_stores_nothing_more(
    house: House, api: TestClient, storing: dict[Operation, dict[str, Any]]
) -> None:
    with house.database.read() as session:
        used = tenants.stored_bytes(session, house.project.id)
    house.limit(storage_bytes=used)
    before, begun = stored(house), len(house.blobs.begun)

    answers = {operation: sent(api, operation, request) for operation, request in storing.items()}

    said = {
        operation: (answer.status_code, (answer.json().get("error") or {}).get("code"))
        for operation, answer in answers.items()
    }
    assert said == dict.fromkeys(answers, (429, "insufficient_quota"))
    assert all("limit storage_bytes" in answer.text for answer in answers.values())
    assert stored(house) == before
    assert len(house.blobs.begun) <= begun + 1, "only a form's file, whose size no header announces"


def test_the_same_requests_are_accepted_where_there_is_room(
    house: House, api: TestClient, storing: dict[Operation, dict[str, Any]]
) -> None:
    """Or the test above would pass on requests that are refused for another reason."""
    answers = {operation: sent(api, operation, request) for operation, request in storing.items()}

    refused = {one: answer.text for one, answer in answers.items() if answer.status_code not in (200, 201)}
    assert list(refused) == [("post", "/v1/regraft/previews")]
    assert "inference" in refused["post", "/v1/regraft/previews"]
