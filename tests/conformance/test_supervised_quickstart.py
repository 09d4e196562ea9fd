"""Guide "Supervised fine-tuning", and its reference: this service does not offer the method, and says so at once."""

from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.fine_tuning import SupervisedHyperparameters, SupervisedMethod

from tests.conformance.helpers import FILE, assert_documented, jsonl

ROW = {
    "messages": [
        {"role": "user", "content": "Is it windy in Lima?"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "call_id",
                    "type": "function",
                    "function": {"name": "get_wind", "arguments": '{"place": "Lima"}'},
                }
            ],
        },
    ],
    "parallel_tool_calls": False,
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_wind",
                "description": "Tell the wind",
                "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
            },
        }
    ],
}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "bare": {"method": {"type": "supervised"}},
    "plain": {"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}},
    "typed": {
        "method": {
            "type": "supervised",
            "supervised": SupervisedMethod(hyperparameters=SupervisedHyperparameters(n_epochs=2)),
        }
    },
    "deprecated": {"hyperparameters": {"n_epochs": 2}},
}


@pytest.mark.parametrize("validation", [False, True], ids=["one file", "two files"])
@pytest.mark.parametrize("method", METHODS)
def test_every_spelling_of_the_quickstart_gets_the_same_answer(method: str, validation: bool) -> None:
    client = OpenAI()
    file = client.files.create(file=("mydata.jsonl", jsonl([ROW] * 10)), purpose="fine-tune")
    assert_documented(file, FILE)
    more: dict[str, Any] = {"validation_file": file.id} if validation else {}

    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.jobs.create(
            training_file=file.id, model="gpt-4.1-nano-2025-04-14", **METHODS[method], **more
        )

    error = refused.value
    assert (error.param, error.type) == ("method.type", "invalid_request_error")
    assert "supervised" in error.message
    assert "reinforcement" in error.message  # what is offered


def test_preference_optimization_gets_the_same_answer_by_its_name() -> None:
    client = OpenAI()
    file = client.files.create(file=("mydata.jsonl", jsonl([ROW])), purpose="fine-tune")

    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.jobs.create(
            training_file=file.id,
            model="gpt-4o-mini-2024-07-18",
            method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.1}}},
        )

    assert refused.value.param == "method.type"
    assert "dpo" in refused.value.message
