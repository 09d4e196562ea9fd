"""Cookbook "Reinforcement fine-tuning for conversational reasoning": a job from the client's own typed objects."""

from pathlib import Path

import pytest
from openai import OpenAI
from openai.types.fine_tuning import ReinforcementHyperparameters, ReinforcementMethod
from openai.types.graders import ScoreModelGrader

from tests.conformance.conftest import Judge
from tests.conformance.helpers import FINISHED_JOB, JOB, assert_documented, finished, jsonl
from tests.present import untyped

ROWS = [{"messages": [{"role": "user", "content": f"I feel {how}."}]} for how in ("cold", "warm", "tired")]
PROMPT = "Conversation:\n{{item.messages}}\nAgent reply:\n{{sample.output_text}}\nReturn a number."


@pytest.mark.slow
def test_typed_objects_make_a_job(tmp_path: Path, judge: Judge) -> None:
    client = OpenAI()
    train_path, val_path = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    train_path.write_bytes(jsonl(ROWS))
    val_path.write_bytes(jsonl(ROWS[:1]))
    with train_path.open("rb") as train, val_path.open("rb") as val:
        training_file = client.files.create(file=train, purpose="fine-tune")
        validation_file = client.files.create(file=val, purpose="fine-tune")

    job = client.fine_tuning.jobs.create(
        training_file=training_file.id,
        validation_file=validation_file.id,
        model="o4-mini-2025-04-16",
        method=untyped(
            {
                "type": "reinforcement",
                "reinforcement": ReinforcementMethod(
                    grader=ScoreModelGrader(
                        name="score_health",
                        type="score_model",
                        input=[{"role": "user", "type": "message", "content": PROMPT}],
                        model="o4-mini-2025-04-16",
                        sampling_params={"reasoning_effort": "low"},
                    ),
                    hyperparameters=ReinforcementHyperparameters(
                        reasoning_effort="medium", n_epochs=5, batch_size=4
                    ),
                ),
            }
        ),
        seed=42,
    )
    retrieved_job = client.fine_tuning.jobs.retrieve(job.id)
    assert_documented(retrieved_job, JOB | {"seed": 42})
    done = finished(client, job.id)

    assert_documented(done, FINISHED_JOB)
    assert done.method.reinforcement.grader.name == "score_health"
    asked = [one for one in judge.requests if one["messages"][-1]["content"].startswith("Conversation:")]
    assert asked[-1]["reasoning_effort"] == "low"
    assert '"content":"I feel ' in asked[-1]["messages"][-1]["content"].replace('": "', '":"')
