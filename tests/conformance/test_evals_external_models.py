"""Guide "Evaluate external models", and reference "Evals": outputs of other models, graded as they are."""

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.conformance.helpers import poll
from tests.e2e.conftest import Server

pytestmark = pytest.mark.slow

PYTHON = """
from rapidfuzz import fuzz

def grade(sample, item):
    return fuzz.WRatio(sample["output_text"], item["reference_answer"]) / 100.0
"""
ROWS = [
    {
        "item": {"reference_answer": "fuzzy wuzzy had no hair"},
        "sample": {"output_text": "fuzzy wuzzy had no hair"},
    },
    {"item": {"reference_answer": "fuzzy wuzzy was a bear"}, "sample": {"output_text": "the cat sat"}},
]


def source() -> Any:
    return {"type": "jsonl", "source": {"type": "file_content", "content": ROWS}}


def create(client: openai.OpenAI | AsyncOpenAI) -> Any:
    return client.evals.create(
        name="external",
        data_source_config={
            "type": "custom",
            "item_schema": {"type": "object", "properties": {"reference_answer": {"type": "string"}}},
            "include_sample_schema": True,
        },
        testing_criteria=[
            {
                "type": "python",
                "name": "fuzzy",
                "source": PYTHON,
                "image_tag": "2025-05-08",
                "pass_threshold": 0.8,
            },
            {
                "type": "text_similarity",
                "name": "similar",
                "input": "{{sample.output_text}}",
                "reference": "{{item.reference_answer}}",
                "evaluation_metric": "fuzzy_match",
                "pass_threshold": 0.8,
            },
        ],
    )


def test_outputs_are_graded_as_they_are(service: Server) -> None:
    client = openai.OpenAI()
    made = create(client)
    run: Any = client.evals.runs.create(made.id, name="theirs", data_source=source())

    run = poll(
        lambda: client.evals.runs.retrieve(run.id, eval_id=made.id),
        lambda run: run.status == "completed",
    )

    assert run.result_counts.model_dump() == {"total": 2, "passed": 1, "failed": 1, "errored": 0}
    [failed] = client.evals.runs.output_items.list(run.id, eval_id=made.id, status="fail").data
    assert failed.datasource_item == ROWS[1]["item"]
    assert {result.name: result.passed for result in failed.results} == {"fuzzy": False, "similar": False}


def test_an_eval_is_updated_and_deleted_with_its_run(service: Server) -> None:
    client = openai.OpenAI()
    made = create(client)
    run = client.evals.runs.create(made.id, data_source=source())

    assert client.evals.update(made.id, name="renamed", metadata={"k": "v"}).name == "renamed"
    assert client.evals.runs.delete(run.id, eval_id=made.id).to_dict() == {
        "object": "eval.run.deleted",
        "deleted": True,
        "run_id": run.id,
    }
    assert client.evals.delete(made.id).to_dict() == {
        "object": "eval.deleted",
        "deleted": True,
        "eval_id": made.id,
    }
    with pytest.raises(openai.NotFoundError):
        client.evals.retrieve(made.id)


async def _cancelled() -> Any:
    async with AsyncOpenAI() as client:
        made = await create(client)
        run: Any = await client.evals.runs.create(made.id, data_source=source())
        try:
            run = await client.evals.runs.cancel(run.id, eval_id=made.id)
        except openai.BadRequestError as too_late:
            assert too_late.code == "invalid_run_state"
            return "completed"
        return run.status


def test_the_async_client_cancels(service: Server) -> None:
    assert asyncio.run(_cancelled()) in ("canceled", "completed")
