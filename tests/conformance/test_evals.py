"""Guide "Reinforcement fine-tuning", evals integration: a job's validations are runs of its eval."""

from types import NoneType

import openai
import pytest
from openai import OpenAI
from openai.types.fine_tuning.fine_tuning_job import FineTuningJob

from tests.conformance.helpers import NUMBER, assert_documented, starts
from tests.present import untyped

pytestmark = pytest.mark.slow

EVAL = {
    "id": starts("eval_"),
    "object": "eval",
    "name": str,
    "created_at": int,
    "data_source_config": {"type": "custom", "schema": dict},
    "testing_criteria": [{"type": str, "name": str}],
    "metadata": (dict, NoneType),
}
RUN = {
    "id": starts("evalrun_"),
    "object": "eval.run",
    "eval_id": starts("eval_"),
    "status": "completed",
    "model": str,
    "name": starts("Step "),
    "created_at": int,
    "report_url": starts("http"),
    "result_counts": {"total": int, "errored": int, "failed": int, "passed": int},
    "per_model_usage": [
        {
            "model_name": str,
            "invocation_count": int,
            "prompt_tokens": int,
            "completion_tokens": int,
            "total_tokens": int,
            "cached_tokens": int,
        }
    ],
    "per_testing_criteria_results": [{"testing_criteria": str, "passed": int, "failed": int}],
    "data_source": {"type": "jsonl", "source": {"type": "file_id", "id": starts("file-")}},
    "error": None,
    "metadata": (dict, NoneType),
}
ITEM = {
    "id": starts("outputitem_"),
    "object": "eval.run.output_item",
    "run_id": starts("evalrun_"),
    "eval_id": starts("eval_"),
    "created_at": int,
    "status": lambda value: value in ("pass", "fail"),
    "datasource_item_id": int,
    "datasource_item": {"messages": list, "reference_answer": str},
    "results": [{"name": str, "passed": bool, "score": NUMBER, "type": str}],
    "sample": {
        "input": [{"role": str, "content": str}],
        "output": [{"role": "assistant", "content": str}],
        "finish_reason": str,
        "model": str,
        "usage": {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int, "cached_tokens": int},
        "error": None,
        "temperature": NUMBER,
        "max_completion_tokens": int,
        "top_p": NUMBER,
        "seed": int,
    },
}


def test_the_job_names_its_eval(trained: FineTuningJob) -> None:
    client = OpenAI()

    found = client.evals.retrieve(untyped(trained).eval_id)

    assert_documented(found, EVAL)
    assert found.id in [one.id for one in client.evals.list(order="desc", limit=5)]


def test_every_validation_is_a_run(trained: FineTuningJob) -> None:
    client = OpenAI()

    runs = list(client.evals.runs.list(untyped(trained).eval_id, order="asc", limit=1))  # a page each

    for run in runs:
        assert_documented(run, RUN)
        assert run.result_counts.total == 2
        assert client.evals.runs.retrieve(run.id, eval_id=untyped(trained).eval_id).id == run.id
    assert [run.name for run in runs] == [f"Step {n}" for n in range(len(runs))] and len(runs) == 3
    assert list(client.evals.runs.list(untyped(trained).eval_id, status="failed")) == []


def test_every_answer_is_an_item_with_the_grade_of_every_grader(trained: FineTuningJob) -> None:
    client = OpenAI()
    run = next(iter(client.evals.runs.list(untyped(trained).eval_id, order="desc")))

    items = list(client.evals.runs.output_items.list(run.id, eval_id=untyped(trained).eval_id, limit=1))

    for item in items:
        assert_documented(item, ITEM)
        assert [result.name for result in item.results] == ["both", "exact", "similar"]
        again = client.evals.runs.output_items.retrieve(
            item.id, eval_id=untyped(trained).eval_id, run_id=run.id
        )
        assert again.to_dict() == item.to_dict()
    assert len(items) == 2
    failed = list(
        client.evals.runs.output_items.list(run.id, eval_id=untyped(trained).eval_id, status="fail")
    )
    assert {item.id for item in failed} == {item.id for item in items if item.status == "fail"}


def test_an_unknown_eval_is_not_found() -> None:
    with pytest.raises(openai.NotFoundError):
        OpenAI().evals.retrieve("eval_0123456789abcdef")
