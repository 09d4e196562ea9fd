"""Guides "Supervised fine-tuning" and "Direct preference optimization", and their reference: create, watch, use."""

from types import NoneType
from typing import Any

import pytest
from openai import OpenAI
from openai.types.fine_tuning import (
    DpoHyperparameters,
    DpoMethod,
    SupervisedHyperparameters,
    SupervisedMethod,
)

from tests.conformance.helpers import FILE, assert_documented, finished, jsonl
from tests.present import present, untyped

WORDS = ("windy", "sunny", "rainy", "foggy", "snowy", "cloudy", "stormy", "hazy", "icy", "clear")
ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "Answer with one word."},
            {"role": "user", "content": f"Is it {word} in Lima?"},
            {"role": "assistant", "content": word},
        ]
    }
    for word in WORDS
]
PAIRS: list[dict[str, Any]] = [
    {
        "input": {"messages": row["messages"][1:2], "tools": [], "parallel_tool_calls": True},
        "preferred_output": row["messages"][2:],
        "non_preferred_output": [{"role": "assistant", "content": "I cannot say."}],
    }
    for row in ROWS
]
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


JOB = {
    "object": "fine_tuning.job",
    "id": str,
    "created_at": int,
    "status": "validating_files",
    "training_file": str,
    "validation_file": (str, NoneType),
    "fine_tuned_model": None,
    "trained_tokens": None,
    "result_files": [],
    "seed": int,
    "hyperparameters": {"batch_size": "auto", "learning_rate_multiplier": "auto", "n_epochs": (str, int)},
}


@pytest.mark.parametrize("method", METHODS)
def test_every_spelling_of_the_quickstart_is_a_supervised_job(method: str) -> None:
    client = OpenAI()
    file = client.files.create(file=("mydata.jsonl", jsonl(ROWS)), purpose="fine-tune")
    assert_documented(file, FILE)

    job = client.fine_tuning.jobs.create(
        training_file=file.id, model="gpt-4.1-nano-2025-04-14", **METHODS[method]
    )

    assert_documented(job, JOB)
    assert present(job.method).type == "supervised"
    client.fine_tuning.jobs.cancel(job.id)


def test_the_quickstart_ends_with_a_model_a_checkpoint_for_each_epoch_and_a_result_file() -> None:
    client = OpenAI()
    ids = [
        client.files.create(file=(f"{name}.jsonl", jsonl(rows)), purpose="fine-tune").id
        for name, rows in (("train", ROWS), ("valid", ROWS[:3]))
    ]

    supervised: Any = SupervisedMethod(hyperparameters=SupervisedHyperparameters(n_epochs=2))

    created = client.fine_tuning.jobs.create(
        training_file=ids[0],
        validation_file=ids[1],
        model="gpt-4.1-nano-2025-04-14",
        suffix="wind",
        method={"type": "supervised", "supervised": supervised},
    )
    job = finished(client, created.id)

    assert job.status == "succeeded"
    shown = present(job.hyperparameters)
    assert (shown.n_epochs, shown.batch_size, shown.learning_rate_multiplier) == (2, 1, 1.0)
    checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
    names = [one.fine_tuned_model_checkpoint for one in checkpoints]
    assert [one.step_number for one in checkpoints] == [20, 10]
    assert names == [job.fine_tuned_model, f"{job.fine_tuned_model}:ckpt-step-10"]
    assert present(checkpoints[0].metrics.full_valid_loss) > 0
    assert 0 <= present(checkpoints[0].metrics.full_valid_mean_token_accuracy) <= 1
    events = client.fine_tuning.jobs.list_events(job.id, limit=100).data
    last = untyped(next(event for event in events if event.type == "metrics"))
    assert last.message.startswith("Step 20/20: training loss=")
    assert last.data.keys() >= {"step", "train_loss", "total_steps", "train_mean_token_accuracy"}
    plain = untyped(
        next(event for event in events if event.type == "metrics" and "Step 9/20" in event.message)
    )
    assert not [name for name in plain.data if name.startswith("full_valid")]  # absent, not null
    [header, *rows] = client.files.content(present(job.result_files)[0]).text.splitlines()
    assert header.startswith("step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy")
    assert len(rows) == 21
    answer = client.chat.completions.create(
        model=present(job.fine_tuned_model),
        messages=[{"role": "user", "content": "Is it icy in Lima?"}],
        max_tokens=4,
    )
    assert answer.model == job.fine_tuned_model


def test_a_preference_job_of_typed_objects_continues_a_supervised_one() -> None:
    client = OpenAI()
    file = client.files.create(file=("pairs.jsonl", jsonl(PAIRS)), purpose="fine-tune")
    dpo: Any = DpoMethod(hyperparameters=DpoHyperparameters(beta=0.1, n_epochs=1))

    created = client.fine_tuning.jobs.create(
        training_file=file.id,
        model="gpt-4o-mini-2024-07-18",
        method={"type": "dpo", "dpo": dpo},
    )
    job = finished(client, created.id)

    assert job.status == "succeeded"
    assert present(present(job.method).dpo).hyperparameters is not None
    events = client.fine_tuning.jobs.list_events(job.id, limit=100).data
    first = untyped([event for event in events if event.type == "metrics"][-1])
    assert first.message == "Step 1/10: training loss=0.69"  # ln 2: the reference is the base model itself
    assert (first.data["train_mean_reward_accuracy"], first.data["train_mean_reward_margin"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "method", "code", "message"),
    [
        (
            ROWS[:7],
            "supervised",
            "invalid_n_examples",
            "Training file has 7 example(s), but must have at least 10 examples",
        ),
        (
            ROWS,
            "dpo",
            "invalid_training_file",
            "in the fine-tune-chat format, but the specified fine-tuning job is not",
        ),
        (
            [*ROWS, {"messages": ROWS[0]["messages"][:2]}],
            "supervised",
            "invalid_training_file",
            "line 11: messages: has no message to learn from",
        ),
    ],
)
def test_a_file_that_cannot_be_learned_from_fails_the_job_in_openais_words(
    rows: list[dict[str, Any]], method: Any, code: str, message: str
) -> None:
    client = OpenAI()
    file = client.files.create(file=("mydata.jsonl", jsonl(rows)), purpose="fine-tune")

    created = client.fine_tuning.jobs.create(
        training_file=file.id, model="gpt-4o-mini-2024-07-18", method={"type": method}
    )
    job = finished(client, created.id)

    assert job.status == "failed"
    error = present(job.error)
    assert (error.code, error.param) == (code, "training_file")
    assert message in error.message
