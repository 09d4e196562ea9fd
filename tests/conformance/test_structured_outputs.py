"""Structured outputs: a job's `response_format` in both documented spellings, and chat's."""

import json
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.conformance.data import SIMILAR, TEST, TRAIN
from tests.conformance.helpers import NEW_JOB, assert_documented
from tests.present import present, untyped

SCHEMA = {
    "type": "object",
    "properties": {
        "solution": {"type": "string", "title": "solution"},
        "final_answer": {"type": "string", "title": "final_answer"},
    },
    "required": ["solution", "final_answer"],
    "additionalProperties": False,
}
NESTED: Any = {"type": "json_schema", "json_schema": {"name": "puzzles", "strict": True, "schema": SCHEMA}}
FLAT = {"type": "json_schema", "name": "puzzles", "schema": SCHEMA, "strict": True}  # as Azure's page has it


@pytest.mark.parametrize("response_format", [NESTED, FLAT], ids=["nested", "flat"])
def test_a_job_takes_both_spellings_and_shows_the_nested_one(response_format: dict[str, Any]) -> None:
    client = OpenAI()
    files = [client.files.create(file=("rows.jsonl", rows), purpose="fine-tune").id for rows in (TRAIN, TEST)]
    grader = SIMILAR | {"input": "{{sample.output_json.final_answer}}"}

    job = client.fine_tuning.jobs.create(
        model="o4-mini-2025-04-16",
        training_file=files[0],
        validation_file=files[1],
        method=untyped(
            {
                "type": "reinforcement",
                "reinforcement": {"grader": grader, "response_format": response_format},
            }
        ),
    )
    client.fine_tuning.jobs.cancel(job.id)

    assert_documented(job, NEW_JOB)
    assert untyped(job.to_dict()["method"])["reinforcement"]["response_format"] == NESTED


class Guess(BaseModel):
    sure: bool
    color: str


@pytest.mark.slow
def test_the_client_parses_an_answer_into_a_class(inference: None) -> None:
    completion = OpenAI(timeout=120).chat.completions.parse(
        model="o4-mini-2025-04-16",
        messages=[{"role": "user", "content": "Which color?"}],
        response_format=Guess,
        max_completion_tokens=120,
    )

    assert isinstance(completion.choices[0].message.parsed, Guess)


@pytest.mark.slow
def test_a_plain_schema_holds_an_answer_too(inference: None) -> None:
    completion = OpenAI(timeout=120).chat.completions.create(
        model="o4-mini-2025-04-16",
        messages=[{"role": "user", "content": "Solve it."}],
        response_format=NESTED,
        max_completion_tokens=120,
    )

    assert json.loads(present(completion.choices[0].message.content)).keys() == {"solution", "final_answer"}
