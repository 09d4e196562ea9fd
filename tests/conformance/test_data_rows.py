"""Reference, reinforcement input; guide, prepare your dataset: rows as users have them."""

from typing import Any

import pytest
from openai import OpenAI

from tests.conformance.data import EXACT, TEST
from tests.conformance.helpers import FINISHED_JOB, assert_documented, finished, jsonl
from tests.present import untyped

USER = {"role": "user", "content": "Color?"}
ROWS = {
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "turns": {"messages": [USER, {"role": "assistant", "content": "Red.", "weight": 0}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Color?"}]}]},
    "nested item": {"messages": [USER], "more": {"deep": [1, 2.5, None, True]}},
    "parallel": {"messages": [USER], "parallel_tool_calls": True},
}


def train(client: OpenAI, content: bytes) -> Any:
    files = [
        client.files.create(file=("rows.jsonl", rows), purpose="fine-tune").id for rows in (content, TEST)
    ]
    job = client.fine_tuning.jobs.create(
        model="o4-mini-2025-04-16",
        training_file=files[0],
        validation_file=files[1],
        method={
            "type": "reinforcement",
            "reinforcement": {"grader": EXACT, "hyperparameters": {"n_epochs": 1}},
        },
    )
    return finished(client, job.id)


@pytest.mark.slow
def test_every_documented_row_is_trained_on() -> None:
    rows = jsonl(row | untyped({"reference_answer": "red"}) for row in ROWS.values())

    assert_documented(train(OpenAI(), rows.replace(b"\n", b"\r\n")), FINISHED_JOB)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not json\n", "line 1"),
        (jsonl([{"messages": [USER], "reference_answer": "x"}, {"messages": []}]), "line 2"),
        (jsonl([{"messages": [USER, {"role": "assistant", "content": "Red."}]}]), "line 1"),
        (jsonl([{"messages": [USER]}]), "item.reference_answer"),
    ],
    ids=["no json", "no messages", "assistant last", "field of the grader"],
)
def test_a_bad_file_fails_the_job_with_its_line(content: bytes, said: str) -> None:
    job = train(OpenAI(), content)

    assert job.status == "failed"
    assert job.error.param == "training_file"
    assert job.error.code == "invalid_training_file"
    assert said in job.error.message
