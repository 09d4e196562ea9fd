"""Any text can be sent to any route, and read again: no answer is a crash, on either database.

The routes come from the OpenAPI document, so a new one that takes a body needs an example here. Every text and number
of an example is replaced, one at a time, by text that other programs fail on; then everything is read.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from httpx2 import Response
from starlette.testclient import TestClient

from api.http.json_responses import JSON
from core.database.tables import (
    Attempt,
    Checkpoint,
    EvalJournal,
    EvalRun,
    Job,
    Preview,
    TunedModel,
    WebhookDelivery,
)
from core.jobs import events, lifecycle, run_logs
from core.outbound import webhooks
from core.text import storable
from tests import factories
from tests.api.conftest import GRADER, House
from tests.api.test_rollouts import row, store
from tests.api.test_schema import DOCUMENT

Operation = tuple[str, str]
"""The method, in small letters, and the path of the OpenAPI document."""

# As JSON, which has escapes for text that UTF-8 has not.
TEXTS = {
    "a lone surrogate": '"\\ud83d"',
    "NUL": '"\\u0000"',
    "U+2028 in right-to-left text": '"\\u202e\\u05e9\\u05dc\\u2028\\u05d5\\u05dd"',
    "a megabyte": json.dumps("x" * (1 << 20)),
    "a number of 5,000 digits": "9" * 5000,
}
MULTIPART = {("post", "/v1/files"), ("post", "/v1/uploads/{upload_id}/parts")}
ROWS = b'{"messages": [{"role": "user", "content": "hello"}], "answer": "a"}\n'
TUNED = "ft:tiny:acme::12345678"

MESSAGES = [{"role": "user", "content": "hello"}]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "description": "d"}, "strict": True},
}
SMALL_JOB = {
    "model": "tiny",
    "training_file": "{file_id}",
    "validation_file": "{valid_file_id}",
    "method": {"type": "reinforcement", "reinforcement": {"grader": GRADER}},
}
JOB = SMALL_JOB | {
    "suffix": "mine",
    "metadata": {"team": "a"},
    "method": {
        "type": "reinforcement",
        "reinforcement": {"grader": GRADER, "hyperparameters": {"n_epochs": 1}, "response_format": FORMAT},
    },
}
PYTHON = {
    "type": "python",
    "name": "p",
    "source": "def grade(sample, item):\n    raise ValueError(item['a'])\n",
}
RAISES = (
    "import json\ndef grade(sample, item):\n    raise ValueError(json.loads(sample['output_text'])['a'])\n"
)
CRITERION = GRADER | {"reference": "{{item.q}}"}
EVAL = {
    "name": "eval",
    "metadata": {"team": "a"},
    "data_source_config": {"type": "custom", "item_schema": {"type": "object", "description": "d"}},
    "testing_criteria": [CRITERION | {"input": "{{item.q}}"}],
}
EVAL_RUN = {
    "name": "run",
    "metadata": {"team": "a"},
    "data_source": {
        "type": "jsonl",
        "source": {"type": "file_content", "content": [{"item": {"q": "1"}, "sample": {"output_text": "1"}}]},
    },
}
EXPORT = {
    "eval": {
        "name": "e",
        "data_source_config": {"type": "custom", "schema": {"description": "d"}},
        "testing_criteria": [CRITERION],
    },
    "runs": [
        {
            "run": {
                "name": "r",
                "status": "failed",
                "model": "m",
                "error": {"code": "c", "message": "m"},
                "data_source": {"type": "jsonl", "source": {"type": "file_id", "id": "f"}},
            },
            "items_file": "{items_file_id}",
        }
    ],
}
ENDPOINT = {"name": "w", "url": "https://8.8.8.8/hook", "event_types": ["fine_tuning.job.succeeded"]}

# A body for each operation that has one, in the order in which they need each other, and the ids in its answer.
EXAMPLES: dict[Operation, tuple[Any, dict[str, str]]] = {
    ("post", "/v1/uploads"): (
        {"filename": "a", "purpose": "fine-tune", "bytes": 3, "mime_type": "text/plain"},
        {"upload_id": "id"},
    ),
    ("post", "/v1/uploads/{upload_id}/complete"): ({"part_ids": ["{part_id}"], "md5": "d"}, {}),
    ("post", "/v1/fine_tuning/jobs"): (JOB, {"job_id": "id"}),
    ("post", "/v1/fine_tuning/jobs/{job_id}/budget"): ({"budget": {"gpu_seconds": 5}}, {}),
    ("post", "/v1/fine_tuning/checkpoints/{checkpoint}/permissions"): (
        {"project_ids": ["{project_id}"]},
        {"permission_id": "data.0.id"},
    ),
    ("post", "/v1/regraft/estimate"): (SMALL_JOB, {}),
    ("post", "/v1/regraft/previews"): (SMALL_JOB, {}),
    ("post", "/v1/regraft/graders/audit"): (
        {"grader": GRADER, "training_file": "{file_id}"},
        {"audit_id": "id"},
    ),
    ("post", "/v1/regraft/jobs/validate"): ({"job": SMALL_JOB}, {}),
    ("post", "/v1/regraft/aliases"): ({"name": "prod", "model": "tiny"}, {"alias": "name"}),
    ("post", "/v1/regraft/files/{file_id}/profile"): ({"model": "tiny", "grader": GRADER}, {}),
    ("post", "/v1/chat/completions"): (
        {"model": "tiny", "messages": MESSAGES, "metadata": {"team": "a"}},
        {},
    ),
    ("post", "/v1/completions"): ({"model": "tiny", "prompt": "a"}, {}),
    ("post", "/v1/responses"): ({"model": "tiny", "input": MESSAGES, "metadata": {"team": "a"}}, {}),
    ("post", "/v1/responses/input_tokens"): ({"model": "tiny", "input": MESSAGES}, {}),
    ("post", "/v1/fine_tuning/alpha/graders/validate"): ({"grader": GRADER}, {}),
    ("post", "/v1/fine_tuning/alpha/graders/run"): (
        {"grader": PYTHON | {"source": RAISES}, "model_sample": json.dumps({"a": "b"}), "item": {"a": "b"}},
        {},
    ),
    ("post", "/v1/regraft/graders"): (
        {"name": "close", "grader": GRADER, "note": "n"},
        {"grader_name": "name", "version": "version"},
    ),
    ("post", "/v1/regraft/graders/{grader_name}/cases"): (
        {
            "cases": [
                {
                    "sample": {"output_text": json.dumps({"a": "b"}), "output_json": {"a": "b"}},
                    "item": {"answer": "a"},
                    "expect": 1,
                    "note": "n",
                }
            ]
        },
        {"case_id": "data.0.id"},
    ),
    ("post", "/v1/regraft/graders/{grader_name}/check"): ({"grader": GRADER}, {}),
    ("post", "/v1/regraft/jobs/{job_id}/regrade"): ({"grader": GRADER, "name": "r"}, {"regrade_id": "id"}),
    ("post", "/v1/batches"): (
        {
            "input_file_id": "{batch_file_id}",
            "endpoint": "/v1/responses",
            "completion_window": "24h",
            "metadata": {"team": "a"},
        },
        {"batch_id": "id"},
    ),
    ("post", "/v1/evals"): (EVAL, {"eval_id": "id"}),
    ("post", "/v1/evals/{eval_id}"): ({"name": "eval", "metadata": {"team": "a"}}, {}),
    ("post", "/v1/evals/{eval_id}/runs"): (EVAL_RUN, {"run_id": "id"}),
    ("post", "/v1/regraft/evals/import"): (EXPORT, {}),
    ("post", "/v1/regraft/pipelines"): (
        {"name": "p", "metadata": {"team": "a"}, "stages": [{"name": "train", "job": SMALL_JOB}]},
        {"pipeline_id": "id"},
    ),
    ("post", "/v1/regraft/pipelines/{pipeline_id}/clone"): ({"name": "p", "metadata": {"team": "a"}}, {}),
    ("post", "/v1/webhook_endpoints"): (ENDPOINT, {"webhook_endpoint_id": "id"}),
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}"): (ENDPOINT, {}),
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret"): (
        {"keep_old_secret_active_for_24_hours": True},
        {},
    ),
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}/test"): ({"event_type": "x"}, {}),
    ("post", "/v1/organization/projects/{project_id}/api_keys"): (
        {"name": "k", "scope": "read", "owner": "ana"},
        {"key_id": "id"},
    ),
    ("post", "/v1/organization/projects/{project_id}/api_keys/{key_id}/rotate"): ({"grace_hours": 1}, {}),
    ("post", "/v1/regraft/session"): ({"login_token": "t"}, {}),
    ("post", "/v1/regraft/jobs/{job_id}/episodes/lease"): ({"max": 1, "wait_s": 0}, {}),
    ("post", "/v1/regraft/episodes/{episode_id}/v1/chat/completions"): (
        {"model": "tiny", "messages": MESSAGES},
        {},
    ),
    ("post", "/v1/regraft/episodes/{episode_id}/v1/responses"): ({"model": "tiny", "input": "hello"}, {}),
    ("post", "/v1/regraft/episodes/{episode_id}/complete"): ({"status": "ready", "reward": 1}, {}),
}
# Whose example is refused here, without an inference server, a browser, an agent, or an endpoint on the internet.
REFUSED = {
    ("post", "/v1/regraft/jobs/{job_id}/episodes/lease"),
    ("post", "/v1/regraft/episodes/{episode_id}/v1/chat/completions"),
    ("post", "/v1/regraft/episodes/{episode_id}/v1/responses"),
    ("post", "/v1/regraft/episodes/{episode_id}/complete"),
    ("post", "/v1/uploads/{upload_id}/complete"),
    ("post", "/v1/regraft/previews"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("post", "/v1/responses"),
    ("post", "/v1/responses/input_tokens"),
    ("post", "/v1/webhook_endpoints/{webhook_endpoint_id}/test"),
    ("post", "/v1/regraft/session"),
}


def variants(example: Any, literal: str) -> Iterator[str]:
    """The example as JSON, once for each of its texts and numbers, with the literal in its place.

    Texts that are JSON themselves also get the literal inside.
    """
    if isinstance(example, dict):
        for key, value in example.items():
            before = json.dumps({k: v for k, v in example.items() if k != key})[:-1]
            comma = ", " if len(example) > 1 else ""
            for inner in variants(value, literal):
                yield f"{before}{comma}{json.dumps(key)}: {inner}}}"
    elif isinstance(example, list):
        for number, value in enumerate(example):
            for inner in variants(value, literal):
                items = [json.dumps(item) for item in example]
                items[number] = inner
                yield f"[{', '.join(items)}]"
    elif not isinstance(example, bool | None):
        yield literal
        if isinstance(example, str) and example.startswith('{"'):
            yield from (json.dumps(inner) for inner in variants(json.loads(example), literal))


@dataclass
class Walk:
    """Sends requests, and remembers the ids of what they create."""

    api: TestClient
    known: dict[str, str]
    # The ids that were known after each creation.
    created: list[dict[str, str]] = field(default_factory=list)

    def named(self, value: Any) -> Any:
        """The value with the ids that its names stand for."""
        if isinstance(value, dict):
            return {key: self.named(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.named(inner) for inner in value]
        if isinstance(value, str) and re.fullmatch(r"{\w+}", value):
            return self.known[value[1:-1]]
        return value

    def send(self, method: str, path: str, **sent: Any) -> Response:
        """Send a request; its answer must not be a crash, and its body must be UTF-8."""
        answer = self.api.request(method, path, **sent)
        assert answer.status_code < 500, f"{method} {path}: {answer.text[:300]}"
        if answer.headers.get("content-type") == "application/json":
            content = json.loads(answer.content.decode())
            if answer.status_code == 400:
                assert not re.search("should have|should be|after validation", content["error"]["message"])
        return answer

    def send_body(self, operation: Operation, body: str, keeps: Mapping[str, str]) -> int:
        method, path = operation
        headers = {"content-type": "application/json"}
        answer = self.send(method, path.format_map(self.known), content=body, headers=headers)
        if answer.is_success and keeps:
            self.created.append(
                self.known | {name: at(answer.json(), where) for name, where in keeps.items()}
            )
        return answer.status_code

    def upload(self, name: str, content: bytes, purpose: str = "fine-tune") -> Response:
        files = {"file": (name, content)}
        return self.send("post", "/v1/files", data={"purpose": purpose}, files=files)


def at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value[int(key)] if key.isdecimal() else value[key]
    return value


@pytest.fixture
def walk(house: House, api: TestClient) -> Walk:
    """With one of everything, whose texts are plain."""
    return furnished(house, api, EXAMPLES)


def furnished(
    house: House,
    api: TestClient,
    examples: Mapping[Operation, tuple[Any, dict[str, str]]],
    *,
    grader: Mapping[str, Any] = GRADER,
) -> Walk:
    """Create one of everything: what the examples create, and a job with this grader."""
    house.app.openapi_schema = DOCUMENT
    walk = Walk(
        api,
        {
            "project_id": house.project.id,
            "model": TUNED,
            "checkpoint": TUNED,
            "part_id": "part_x",
            "rollout_id": "rollout_2_t_0_0",
            "output_item_id": "o",
            "episode_id": "episode_ftjob-x_1_1",
        },
    )
    walk.known["file_id"] = walk.upload("train.jsonl", ROWS).json()["id"]
    walk.known["valid_file_id"] = walk.upload("valid.jsonl", ROWS).json()["id"]
    item = {"id": "i", "status": "pass", "datasource_item": {"q": "1"}, "results": [{"name": "exact"}]}
    walk.known["items_file_id"] = walk.upload("i.jsonl", json.dumps(item).encode(), "evals").json()["id"]
    body = {"model": "tiny", "input": "a"}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    walk.known["batch_file_id"] = walk.upload("b.jsonl", json.dumps(request).encode(), "batch").json()["id"]
    with house.database.write() as session:
        job = factories.job(
            session, house.project, status="running", body={"grader": grader, "hyperparameters": {}}
        )
        checkpoint = Checkpoint(job_id=job.id, step=1, epoch=1, blob_prefix="a")
        preview = Preview(
            project_id=house.project.id, request={"answers_of": None}, parts={}, training_sha256="0",
            progress={"phase": "grading", "of": 1, "sampled": 1, "graded": 1}, lease_expires_at=0.0,
        )  # fmt: skip
        session.add_all([checkpoint, preview])
        session.flush()
        session.add(
            TunedModel(
                name=TUNED,
                project_id=house.project.id,
                job_id=job.id,
                checkpoint_id=checkpoint.id,
                base_model="tiny",
            )
        )
    walk.known |= {"job_id": job.id, "checkpoint_id": checkpoint.id, "preview_id": preview.id}
    store(house, job.id, 1)
    trained = walk.known["job_id"]
    for operation, (example, keeps) in examples.items():
        status = walk.send_body(operation, json.dumps(walk.named(example)), keeps)
        assert (status < 300) != (operation in REFUSED), (operation, status)
        if keeps and operation not in REFUSED:
            walk.known = walk.created[-1] | {"job_id": trained}
    walk.created.clear()
    return walk


def test_every_operation_that_takes_a_body_has_an_example() -> None:
    with_body = {
        (method, path)
        for path, found in DOCUMENT["paths"].items()
        for method, operation in found.items()
        if "requestBody" in operation
    }

    assert with_body == {*EXAMPLES, *MULTIPART}


def test_every_json_answer_of_the_api_is_of_the_class_that_can_carry_any_text(house: House) -> None:
    routes = [route for route in house.app.routes if isinstance(route, APIRoute)]

    assert {route.response_class for route in routes} == {JSON, StreamingResponse}


@pytest.mark.both_databases
@pytest.mark.parametrize("literal", TEXTS.values(), ids=TEXTS)
def test_any_text_can_be_sent_to_every_route_and_read_from_every_route(
    house: House, walk: Walk, literal: str
) -> None:
    for operation, (example, keeps) in EXAMPLES.items():
        for body in variants(walk.named(example), literal):
            walk.send_body(operation, body, keeps)
    walk.upload("train.jsonl", ROWS.replace(b'"a"', literal.encode()))
    text = json.loads(literal) if literal[0] == '"' else literal
    walk.upload(storable(text), ROWS)
    as_a_worker_writes(house, walk.known, text)

    house.app.state.service.shutdown.begin()  # ends the streams
    for path in (path for path, found in DOCUMENT["paths"].items() if "get" in found):
        names = re.findall(r"{(\w+)}", path)
        mine, *others = [tuple(known[name] for name in names) for known in [walk.known, *walk.created]]
        for values in {mine, *others}:
            url = path.format_map(dict(zip(names, values, strict=True)))
            answer = walk.send("get", url, params=walk.named(QUERIES.get(path)))
            assert answer.status_code != 404 or values != mine or path in ABSENT, (url, answer.text)


# What these routes need, and one that reads inside of a JSON column.
QUERIES = {
    "/v1/fine_tuning/jobs": {"metadata[team]": "a", "limit": 100},
    "/v1/regraft/jobs/{job_id}/rollouts/what-if": {"formula": "close"},
    "/v1/regraft/jobs/{job_id}/compare": {"other": "{job_id}"},
    "/v1/regraft/curves": {"jobs": "{job_id}"},
    "/v1/regraft/evals/{eval_id}/compare": {"runs": "{run_id}"},
}
# The files of the checkpoint, the tokens of a rollout, and the key that signs passports (tests/api/test_passports.py).
ABSENT = {
    "/v1/regraft/jobs/{job_id}/passport",
    "/v1/regraft/passport_key",
    "/v1/regraft/checkpoints/{checkpoint_id}/archive",
    "/v1/regraft/jobs/{job_id}/rollouts/{rollout_id}/tokens",
}


def as_a_worker_writes(house: House, known: Mapping[str, str], text: str) -> None:
    """Store the text wherever a run stores what models, graders and crashed processes say."""
    error = {"code": "c", "message": text, "param": text}
    answer = {
        "line": 1, "member": 0, "output_text": text, "output_reasoning": text, "finish_reason": "stop",
        "prompt_tokens": 1, "completion_tokens": 1, "score": None, "reason": text, "sub_scores": {text: None},
        "output": text, "item": {text: text}, "reasoning_tokens": 0,
        "output_tools": [{"id": text, "type": "function", "function": {"name": text, "arguments": text}}],
        "conversation": [{"role": "tool", "content": text}], "stop": "final", "trace_id": text,
    }  # fmt: skip
    item = {
        "id": "o", "line": 1, "datasource_item_id": 1, "status": "fail", "created_at": 1,
        "datasource_item": {text: text}, "results": [{"name": text, "reason": text}], "sample": {"output": text},
    }  # fmt: skip
    said = {
        "output_text": text,
        "output_tools": json.dumps(answer["output_tools"]),
        "output_tools_error": text,
        "reason": text,
        "sub_reasons": {"close": text},
        "output": text,
    }
    store(house, known["job_id"], 2, rows=[row(2, "train", 0, 0, **said)])
    house.blobs.put_bytes(run_logs.key(house.project.id, known["job_id"], 1), text.encode("utf-8", "replace"))
    with house.database.write() as session:
        job = session.query(Job).where(Job.id == known["job_id"]).one()
        session.add(Attempt(job_id=job.id, epoch=1, kind="run", worker="w", started_at=1.0, reason=text))
        events.append(session, job.id, text, level="warn", data={"reasons": [text], text: text})
        lifecycle.fail(session, job, code="c", message=text, param=text)
        endpoint = known["webhook_endpoint_id"]
        body = webhooks.event_body("fine_tuning.job.failed", {"id": text})
        session.add(
            WebhookDelivery(endpoint_id=endpoint, job_id=job.id, type="t", body=body, last_error=text)
        )
        run = session.query(EvalRun).where(EvalRun.id == known["run_id"]).one()
        run.status, run.error = "failed", error
        session.add(EvalJournal(run_id=run.id, line=1, data={"item": item}))
        preview = session.query(Preview).where(Preview.id == known["preview_id"]).one()
        preview.status, preview.error = "failed", error | {"type": "t", "status": 400}
        preview.answers = [answer]
