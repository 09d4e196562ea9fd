"""Models that are computed in different ways, trained through the official client."""

import json
from collections.abc import Iterator

import pytest
import regraft

from tests.e2e.conftest import Server, launch, patient
from tests.e2e.test_openai_client import create, wait
from tests.families.zoo import CONTEXT, FAMILIES
from tests.present import present, untyped
from tests.thinking import DISTILL, make_thinking_model

CHOSEN = {"Qwen 3.5": "hybrid", "Gemma 3": "window", "Qwen 3 MoE": "mixture"}
PACKED = "computes a prompt once for all its answers"
ROWS = "computes each answer in a separate row"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("families")
    tables = [
        f'[models.{CHOSEN[family.title]}]\npath = "{family.save(folder / family.model_type)}"\n'
        f'dtype = "float32"\ncontext = {CONTEXT}\n'
        for family in FAMILIES
        if family.title in CHOSEN
    ]
    thinking = make_thinking_model(folder / "thinking", DISTILL)
    tables.append(f'[models.thinking]\npath = "{thinking}"\ndtype = "float32"\ncontext = 512\n')
    server = launch(folder / "server", "".join(tables))
    yield server
    server.stop()


@pytest.mark.parametrize(("model", "forward"), [("hybrid", ROWS), ("window", PACKED), ("mixture", PACKED)])
def test_a_job_on_it_succeeds_and_says_how_it_is_computed(server: Server, model: str, forward: str) -> None:
    client = server.client()

    job = wait(client, create(client, model=model))

    assert job.status == "succeeded", job.error
    events = client.fine_tuning.jobs.list_events(job.id, limit=100).data
    [said] = [event for event in events if "are those of transformers" in event.message]
    assert forward in said.message
    metrics = [event.data for event in events if event.type == "metrics"]
    assert max(untyped(one)["logprob_gap"] for one in metrics if "logprob_gap" in untyped(one)) < 1e-4


def test_a_model_that_reasons_is_trained_on_json_after_its_thoughts_and_answers_so(server: Server) -> None:
    client = server.client()
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": ["yes", "no"]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }
    reinforcement = {
        "grader": {
            "type": "string_check",
            "name": "right",
            "input": "{{sample.output_json.answer}}",
            "reference": "{{item.answer}}",
            "operation": "eq",
        },
        "response_format": response_format,
        "hyperparameters": {
            "batch_size": 4,
            "n_epochs": 2,
            "eval_interval": 2,
            "reasoning_effort": "low",
            "advanced": {"sampling": {"group_size": 8, "max_completion_tokens": 64}},
        },
    }

    job = wait(
        client,
        create(client, model="thinking", method={"type": "reinforcement", "reinforcement": reinforcement}),
    )

    assert job.status == "succeeded", job.error
    rows = regraft.rollouts(client, job.id, step=1, split="train")
    answered = [row for row in rows if row["output_text"]]
    assert len(answered) > len(rows) / 2
    assert all(row["score"] == float(json.loads(row["output_text"])["answer"] == "yes") for row in answered)
    assert {row["score"] for row in answered} == {0.0, 1.0}
    assert any(row["output_reasoning"] for row in answered)
    steps = [step for step in regraft.metrics(client, job.id) if step["step"]]
    assert all(step["reasoning_tokens_mean"] > 0 for step in steps)

    answer = patient(client).chat.completions.create(
        model=present(job.fine_tuned_model),
        messages=[{"role": "user", "content": "say yes"}],
        response_format=untyped(response_format),
        reasoning_effort="low",
        max_completion_tokens=128,
        n=8,
    )
    # A model this small may end its turn inside a thought: such a choice has no answer.
    said = [choice.message for choice in answer.choices if choice.message.content]
    assert len(said) > 4
    assert all(json.loads(present(message.content))["answer"] in ("yes", "no") for message in said)
    assert any(untyped(message).reasoning_content for message in said)
    assert untyped(answer.usage).completion_tokens_details.reasoning_tokens > 0
