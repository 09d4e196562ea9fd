"""README of OpenAI's client for Node: the same flow from JavaScript."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.helpers import (
    CHECKPOINT,
    EVENT,
    FILE,
    FINISHED_JOB,
    GRADER_RUN,
    JOB,
    MODEL,
    NEW_JOB,
    NUMBER,
    RESPONSE,
    UPLOAD,
    assert_documented,
    starts,
)

VERSION = "7.57.0"
SCRIPTS = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, environment: None) -> Callable[..., Any]:
    """Runs a script of ./node with the client installed beside it; returns the JSON that it prints."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"openai@{VERSION}"]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=120)
    if installed.returncode:
        pytest.skip(f"npm cannot install openai@{VERSION}: {installed.stderr.strip()[-200:]}")

    def run(script: Any) -> Any:
        shutil.copy(SCRIPTS / script, folder)
        command = ["node", str(folder / script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ.copy())
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.slow
def test_the_whole_flow(run: Callable[..., Any]) -> None:
    answers = run("flow.mjs")

    assert_documented(answers["file"], FILE)
    assert_documented(answers["files"], [FILE])
    assert_documented(answers["upload"], UPLOAD | {"status": "completed", "file": FILE})
    assert_documented(answers["run"], GRADER_RUN)
    assert answers["run"]["reward"] == 1.0
    assert_documented(answers["created"], NEW_JOB)
    assert_documented(answers["jobs"], [JOB])
    assert_documented(answers["job"], FINISHED_JOB)
    assert_documented(answers["events"], [EVENT])
    assert answers["events"][-1]["message"] == f"Created fine-tuning job: {answers['job']['id']}"
    assert_documented(answers["checkpoints"], [CHECKPOINT])
    assert_documented(answers["model"], MODEL)
    assert answers["content"].startswith("step,")
    assert_documented(
        answers["deleted"], {"id": answers["job"]["fine_tuned_model"], "object": "model", "deleted": True}
    )


@pytest.mark.slow
def test_errors_headers_and_webhooks(run: Callable[..., Any]) -> None:
    answers = run("errors.mjs")

    assert answers["unknown"] == {
        "class": "NotFoundError",
        "status": 404,
        "code": "fine_tune_not_found",
        "param": "fine_tune_id",
        "type": "invalid_request_error",
    }
    assert (answers["refused"]["class"], answers["refused"]["param"]) == ("BadRequestError", "grader.type")
    assert_documented(answers["requestId"], starts("req_"))
    assert answers["event"]["type"] == "fine_tuning.job.succeeded"


@pytest.mark.slow
def test_responses_and_their_stream(run: Callable[..., Any], inference: None) -> None:
    answers = run("responses.mjs")

    assert_documented(answers["response"], RESPONSE)
    assert answers["text"] == answers["response"]["output"][0]["content"][0]["text"]
    assert (answers["events"][0], answers["events"][-1]) == ("response.created", "response.completed")
    assert_documented(answers["final"], RESPONSE)
    assert answers["refused"] == {"status": 400, "code": "unsupported_parameter", "param": "tools[0]"}


@pytest.mark.slow
def test_the_whole_surface_of_evals(run: Callable[..., Any]) -> None:
    answers = run("evals.mjs")

    made, done = answers["created"], answers["done"]
    documented = {
        "id": starts("eval_"),
        "object": "eval",
        "name": str,
        "created_at": int,
        "data_source_config": {"type": "custom", "schema": dict},
        "testing_criteria": [{"type": "string_check", "name": "exact"}],
        "metadata": dict,
    }
    assert_documented(made, documented | {"name": "colors", "metadata": {"from": "node"}})
    assert answers["retrieved"] == made
    assert_documented(answers["updated"], documented | {"name": "colours", "metadata": {"from": "js"}})
    assert_documented(answers["evals"], [{"id": starts("eval_"), "object": "eval", "created_at": int}])
    assert answers["evals"][0]["id"] == made["id"]
    run_shape = {
        "id": starts("evalrun_"),
        "object": "eval.run",
        "eval_id": made["id"],
        "created_at": int,
        "report_url": starts("http"),
        "error": None,
    }
    assert_documented(
        answers["run"], run_shape | {"status": "queued", "name": "first", "metadata": {"n": "1"}}
    )
    assert_documented(
        done,
        run_shape
        | {
            "status": "completed",
            "result_counts": {"total": 3, "errored": 0, "failed": 2, "passed": 1},
            "per_testing_criteria_results": [{"testing_criteria": "exact", "passed": 1, "failed": 2}],
            "per_model_usage": [],
        },
    )
    assert_documented(answers["canceled"], run_shape | {"status": "canceled"})
    assert answers["runs"] == [done["id"], answers["canceled"]["id"]]
    assert answers["completed"] == [done["id"]]
    item = {
        "id": starts("outputitem_"),
        "object": "eval.run.output_item",
        "run_id": done["id"],
        "eval_id": made["id"],
        "created_at": int,
        "status": str,
        "datasource_item_id": int,
        "datasource_item": {"answer": "red"},
        "results": [{"name": "exact", "passed": bool, "score": NUMBER}],
        "sample": {"output": [{"role": "assistant", "content": str}]},
    }
    assert_documented(answers["items"], [item])
    assert [one["status"] for one in answers["items"]] == ["pass", "fail", "fail"]
    assert answers["failed"] == 2
    assert answers["item"] == answers["items"][0]
    assert answers["deletedRun"] == {"object": "eval.run.deleted", "deleted": True, "run_id": done["id"]}
    assert answers["deleted"] == {"object": "eval.deleted", "deleted": True, "eval_id": made["id"]}
    assert answers["gone"] == {"class": "NotFoundError", "status": 404}
