"""Pipelines on a live server: learning from the best answers of its own model, failing, and being killed."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest
import regraft

from tests.e2e.conftest import jsonl, patient, start_server
from tests.e2e.test_offline_jobs import PAIRS, ROWS
from tests.present import present

SAYS = {
    "type": "string_check",
    "name": "says",
    "input": "{{sample.output_text}}",
    "reference": "{{item.color}}",
    "operation": "eq",
}
GRADER = {"type": "multi", "name": "m", "graders": {"says": SAYS}, "calculate_output": "2 * says - 1"}


@pytest.fixture(scope="module")
def client(server: Any) -> regraft.Regraft:
    return regraft.Regraft(base_url=server.base_url, api_key=server.key)


def uploaded(client: openai.OpenAI, rows: list[dict[str, Any]]) -> str:
    return client.files.create(file=("rows.jsonl", jsonl(rows)), purpose="fine-tune").id


def learn(file: str, **fields: Any) -> dict[str, Any]:
    hyperparameters = {"n_epochs": 6, "batch_size": 4, "learning_rate_multiplier": 40}
    method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    return {"model": "tiny", "training_file": file, "seed": 1, "method": method} | fields


def test_a_pipeline_learns_from_the_best_answers_of_its_own_model(client: regraft.Regraft) -> None:
    rows = uploaded(client, ROWS)
    prompts = uploaded(client, [row | {"color": row["messages"][1]["content"]} for row in ROWS])
    sample = {
        "model": "{{stages.first.model}}",
        "file": prompts,
        "n": 3,
        "grader": GRADER,
        "sampling_params": {"max_completion_tokens": 3, "temperature": 1},
    }
    made = client.pipelines.create(
        name="rejection sampling",
        stages=[
            {"name": "first", "job": learn(rows)},
            {"name": "answers", "sample": sample},
            {"name": "best", "select": {"file": "{{stages.answers.file}}", "min_score": 1}},
            {"name": "mixed", "mix": {"files": [{"file": "{{stages.best.file}}"}, {"file": rows}]}},
            {"name": "second", "job": learn("{{stages.mixed.file}}", model="{{stages.first.model}}")},
        ],
    )

    done = client.pipelines.wait(made.id, sleep=time.sleep)

    stages = {stage.name: stage for stage in done.stages}
    assert done.status == "succeeded", [stage.error for stage in done.stages]
    assert stages["answers"].progress == {"finished": 36, "total": 36}
    samples = client.files.content(present(stages["answers"].file)).text.splitlines()
    assert stages["answers"].rows == len(samples) == 36
    best = client.files.content(present(stages["best"].file)).text.splitlines()
    assert 3 < len(best) <= len(ROWS)
    assert stages["mixed"].rows == len(best) + len(ROWS)
    answer = patient(client).chat.completions.create(
        model=present(stages["second"].model),
        messages=[{"role": "user", "content": "say red"}],
        temperature=0,
        max_tokens=3,
    )
    # Its samples are drawn anew in each run, and so are the rows of `best`.
    assert present(answer.choices[0].message.content).startswith("red")
    child = client.fine_tuning.jobs.retrieve(present(stages["second"].job_id))
    assert child.model == stages["first"].model
    assert [one.id for one in client.pipelines.list().data] == [made.id]


def test_a_failed_stage_names_the_error_of_its_job(client: regraft.Regraft) -> None:
    preferences = uploaded(client, PAIRS)
    made = client.pipelines.create(stages=[{"name": "sft", "job": learn(preferences)}])

    done = client.pipelines.wait(made.id, sleep=time.sleep)

    assert done.status == "failed"
    assert present(done.stages[0].error).code == "invalid_training_file"


def test_a_killed_server_neither_loses_nor_repeats_a_stage(tmp_path: Path, tiny_model: Path) -> None:
    server = start_server(tmp_path, tiny_model, REGRAFT_LEASE_SECONDS="6")
    client = regraft.Regraft(base_url=server.base_url, api_key=server.key)
    rows = uploaded(client, ROWS)
    stages = [
        {"name": "first", "job": learn(rows)},
        {"name": "mixed", "mix": {"files": [{"file": rows, "weight": 2}]}},
        {"name": "second", "job": learn("{{stages.mixed.file}}", model="{{stages.first.model}}")},
    ]
    made = client.pipelines.create(stages=stages)
    deadline = time.monotonic() + 60
    while client.pipelines.retrieve(made.id).stages[0].job_status != "running":
        assert time.monotonic() < deadline
        time.sleep(0.1)

    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(60)
    again = start_server(tmp_path, tiny_model, REGRAFT_LEASE_SECONDS="6")
    try:
        client = regraft.Regraft(base_url=again.base_url, api_key=again.key)
        done = client.pipelines.wait(made.id)
        jobs = [job.id for job in client.fine_tuning.jobs.list()]
    finally:
        again.stop()

    assert done.status == "succeeded"
    assert sorted(jobs) == sorted(present(stage.job_id) for stage in (done.stages[0], done.stages[2]))
    assert done.stages[1].rows == 2 * len(ROWS)
