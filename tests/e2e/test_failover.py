"""PostgreSQL fails over to a standby while a job, an eval run and a pipeline run."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import regraft

from tests.e2e.conftest import start_server
from tests.e2e.test_offline_jobs import ROWS
from tests.e2e.test_openai_client import QUESTIONS, create
from tests.e2e.test_pipelines import learn, uploaded
from tests.servers import Postgres, ReplicatedPostgres

pytestmark = pytest.mark.slow

PATIENCE = 600.0


@pytest.fixture
def replicated(postgres: Postgres) -> Iterator[ReplicatedPostgres]:
    pair = postgres.new_pair()
    yield pair
    pair.stop()


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def evaluate(client: regraft.Regraft) -> tuple[str, str]:
    """Start an eval run, and return the ids of the eval and of the run."""
    schema: Any = {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]}
    criterion: Any = {
        "type": "string_check",
        "name": "says",
        "input": "{{sample.output_text}}",
        "reference": "yes",
        "operation": "ilike",
    }
    made = client.evals.create(
        data_source_config={"type": "custom", "item_schema": schema, "include_sample_schema": True},
        testing_criteria=[criterion],
    )
    prompt: Any = {"type": "template", "template": [{"role": "user", "content": "{{item.question}}"}]}
    rows: Any = [{"item": {"question": question}} for question in QUESTIONS * 20]
    run = client.evals.runs.create(
        made.id,
        data_source={
            "type": "completions",
            "model": "tiny",
            "source": {"type": "file_content", "content": rows},
            "input_messages": prompt,
            "sampling_params": {"max_completion_tokens": 3},
        },
    )
    return made.id, run.id


@pytest.mark.timeout(1800)
def test_a_job_an_eval_run_and_a_pipeline_survive_a_failover_of_the_database(
    replicated: ReplicatedPostgres, tiny_model: Path, tmp_path: Path
) -> None:
    server = start_server(tmp_path, tiny_model, REGRAFT_DATABASE_URL=replicated.url)
    try:
        client = regraft.Regraft(base_url=server.base_url, api_key=server.key, max_retries=20)
        rows = uploaded(client, ROWS)
        stages = [
            {"name": "first", "job": learn(rows)},
            {"name": "mixed", "mix": {"files": [{"file": rows, "weight": 2}]}},
            {"name": "second", "job": learn("{{stages.mixed.file}}", model="{{stages.first.model}}")},
        ]
        job = create(client)
        pipeline = client.pipelines.create(stages=stages)
        wait_until(lambda: len(regraft.metrics(client, job.id)) > 1)
        eval_id, run_id = evaluate(client)

        replicated.fail_over()

        wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).finished_at is not None)
        done = client.pipelines.wait(pipeline.id)
        final = ("completed", "failed", "canceled")
        wait_until(lambda: client.evals.runs.retrieve(run_id, eval_id=eval_id).status in final)
        finished = client.fine_tuning.jobs.retrieve(job.id)
        run = client.evals.runs.retrieve(run_id, eval_id=eval_id)
        steps = [metric["step"] for metric in regraft.metrics(client, job.id)]
    finally:
        server.stop()

    assert (finished.status, done.status, run.status) == ("succeeded", "succeeded", "completed")
    assert run.result_counts.total == 20 * len(QUESTIONS) and run.result_counts.errored == 0
    assert len(set(steps)) == len(steps)
