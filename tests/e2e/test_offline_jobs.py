"""Supervised and preference jobs, one after the other on one model, with the official client."""

from pathlib import Path
from typing import Any

import openai
import pytest
import regraft
from openai.types.fine_tuning import FineTuningJob
from regraft.jobs import verdict_of
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import jsonl, patient
from tests.e2e.test_openai_client import wait
from tests.hyperparameters import in_groups
from tests.present import present, untyped

COLORS = ("red", "green", "blue")
ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"{ask} {color}"},
            {"role": "assistant", "content": color},
        ]
    }
    for ask in ("say", "tell me", "please", "now")
    for color in COLORS
]
PAIRS: list[dict[str, Any]] = [
    {
        "input": {"messages": row["messages"][:1]},
        "preferred_output": row["messages"][1:],
        "non_preferred_output": [{"role": "assistant", "content": "no"}],
    }
    for row in ROWS
]


def train(client: openai.OpenAI, rows: list[dict[str, Any]], **asked: Any) -> FineTuningJob:
    file = client.files.create(file=("rows.jsonl", jsonl(rows)), purpose="fine-tune").id
    valid = client.files.create(file=("valid.jsonl", jsonl(rows[:6])), purpose="fine-tune").id
    return wait(
        client, client.fine_tuning.jobs.create(training_file=file, validation_file=valid, seed=1, **asked)
    )


@pytest.fixture(scope="module")
def supervised(server: Any) -> FineTuningJob:
    hyperparameters = {"n_epochs": 6, "batch_size": 4, "learning_rate_multiplier": 40}
    method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    return train(server.client(), ROWS, model="tiny", method=method)


def test_a_supervised_model_says_what_it_was_shown(client: openai.OpenAI, supervised: FineTuningJob) -> None:
    steps = regraft.metrics(client, supervised.id)

    assert supervised.status == "succeeded"
    assert steps[-1]["full_valid_loss"] < steps[0]["full_valid_loss"] / 2
    answer = patient(client).chat.completions.create(
        model=present(supervised.fine_tuned_model),
        messages=[{"role": "user", "content": "say blue"}],
        temperature=0,
        max_tokens=3,
    )
    assert answer.choices[0].message.content == "blue"


def test_a_job_goes_on_exactly_where_its_parent_ended(
    client: openai.OpenAI, supervised: FineTuningJob
) -> None:
    asked = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}
    child = train(client, ROWS, model=supervised.fine_tuned_model, method=asked)

    parents, childs = (regraft.metrics(client, job.id) for job in (supervised, child))
    assert child.status == "succeeded"
    assert child.model == supervised.fine_tuned_model
    assert untyped(child).lineage["job_id"] == supervised.id
    for name in ("full_valid_loss", "full_valid_mean_token_accuracy"):
        assert childs[0][name] == parents[-1][name]


def test_a_preference_job_starts_from_a_checkpoint_as_its_reference(
    client: openai.OpenAI, supervised: FineTuningJob
) -> None:
    checkpoint = client.fine_tuning.jobs.checkpoints.list(supervised.id).data[-1]
    asked = {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 4, "batch_size": 4}}}

    child = train(client, PAIRS, model=checkpoint.fine_tuned_model_checkpoint, method=asked)

    steps = regraft.metrics(client, child.id)
    assert steps[0]["full_valid_mean_reward_margin"] == 0.0
    assert steps[-1]["full_valid_mean_reward_margin"] > 0.0
    assert steps[-1]["full_valid_mean_reward_accuracy"] > 0.8


def test_a_reinforcement_job_continues_a_supervised_model(
    client: openai.OpenAI, supervised: FineTuningJob, tmp_path: Path
) -> None:
    grader = {
        "type": "string_check",
        "name": "says",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "operation": "eq",
    }
    rows: list[dict[str, Any]] = [
        {"messages": row["messages"][:1], "answer": row["messages"][1]["content"]} for row in ROWS
    ]
    hyperparameters = {
        "n_epochs": 1,
        "batch_size": 6,
        "advanced": {"sampling": {"group_size": 4, "max_completion_tokens": 3}, "kl": {"weight": 0.01}},
    }
    method = {
        "type": "reinforcement",
        "reinforcement": {"grader": grader, "hyperparameters": hyperparameters},
    }

    child = train(client, rows, model=supervised.fine_tuned_model, method=method)

    steps = regraft.metrics(client, child.id)
    assert child.status == "succeeded"
    assert steps[0]["full_valid_mean_reward"] > 0.5  # the base model hardly ever says a color
    assert steps[1]["kl"] == pytest.approx(0.0, abs=1e-6)

    # Its step 0 is the model that it started from, and is called so.
    events = [one.message for one in client.fine_tuning.jobs.list_events(child.id, limit=100).data]
    verdict = present(verdict_of(child))
    assert verdict.start == supervised.fine_tuned_model
    assert any(one.startswith(f"Starts from {supervised.fine_tuned_model} (step 18 of ") for one in events)
    assert any(f"Compared with {supervised.fine_tuned_model} on 6 validation rows" in one for one in events)
    assert not any("base model" in one for one in events)
    with regraft.Regraft(base_url=str(client.base_url), api_key=client.api_key) as ours:
        card = (ours.checkpoints.download(child.id, to=tmp_path / "model") / "README.md").read_text()
    assert f"step 0 is `{supervised.fine_tuned_model}`" in card


def test_all_weights_are_trained_served_downloaded_and_trained_further(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    """A supervised job, its model in a chat and in plain transformers, and a reinforcement job that continues it."""
    advanced = {"train": "full", "optimizer": {"learning_rate": 3e-3}}
    asked = {"n_epochs": 6, "batch_size": 4, "advanced": in_groups(advanced)}
    method = {"type": "supervised", "supervised": {"hyperparameters": asked}}
    job = train(client, ROWS, model="tiny", method=method)
    steps = regraft.metrics(client, job.id)
    events = [one.message for one in client.fine_tuning.jobs.list_events(job.id, limit=100).data]
    assert job.status == "succeeded"
    assert steps[-1]["full_valid_loss"] < steps[0]["full_valid_loss"] / 2
    assert any("All 81,728 parameters are trained." in one for one in events)

    chat = [{"role": "user", "content": "say blue"}]
    said = patient(client).chat.completions.create(
        model=present(job.fine_tuned_model),
        messages=untyped(chat),
        temperature=0,
        max_tokens=3,
        logprobs=True,
    )
    assert said.choices[0].message.content == "blue"
    base = patient(client).chat.completions.create(
        model="tiny", messages=untyped(chat), temperature=0, max_tokens=3
    )
    assert base.choices[0].message.content != "blue"  # its own weights have not changed

    with regraft.Regraft(base_url=str(client.base_url), api_key=client.api_key) as ours:
        folder = ours.checkpoints.download(job.id, to=tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    likeliest = model(ids).logits[0, -1].log_softmax(-1).max().item()
    assert present(present(said.choices[0].logprobs).content)[0].logprob == pytest.approx(likeliest, abs=1e-4)
    card = (folder / "README.md").read_text()
    assert "`tiny` with all weights trained by supervised fine-tuning" in card
    assert "library_name: transformers" in card and "lora" not in card.split("---")[1]
    assert not {"trainer.pt", "adapter_config.json"} & {path.name for path in folder.iterdir()}

    reinforcement = {
        "grader": {
            "type": "string_check", "name": "says", "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}", "operation": "eq",
        },
        "hyperparameters": {
            "n_epochs": 1,
            "batch_size": 6,
            "advanced": {
                "train": "full",
                "sampling": {"group_size": 4, "max_completion_tokens": 3},
                "kl": {"weight": 0.01},
            },
        },
    }  # fmt: skip
    rows = [{"messages": row["messages"][:1], "answer": row["messages"][1]["content"]} for row in ROWS]
    method = {"type": "reinforcement", "reinforcement": reinforcement}
    child = train(client, rows, model=job.fine_tuned_model, method=method)
    measured = regraft.metrics(client, child.id)
    assert child.status == "succeeded"
    assert untyped(child).lineage["job_id"] == job.id
    assert measured[0]["full_valid_mean_reward"] > 0.5  # the base model hardly ever says a color
    assert measured[1]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert measured[1]["logprob_gap"] < 1e-4
    answer = patient(client).chat.completions.create(
        model=present(child.fine_tuned_model), messages=untyped(chat), temperature=0, max_tokens=3
    )
    assert answer.choices[0].message.content == "blue"


LABELED: list[dict[str, Any]] = [
    {"input": row["input"], "output": row[name], "label": name == "preferred_output"}
    for row in PAIRS
    for name in ("preferred_output", "non_preferred_output")
]


def preferring(**loss: Any) -> Any:
    hyperparameters = {"n_epochs": 4, "batch_size": 6, "advanced": {"loss": loss}}
    return {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}


@pytest.mark.parametrize("rows", [PAIRS, LABELED], ids=["pairs", "labels"])
def test_kto_learns_from_pairs_and_from_labels(
    client: openai.OpenAI, supervised: FineTuningJob, rows: list[dict[str, Any]]
) -> None:
    child = train(client, rows, model=supervised.fine_tuned_model, method=preferring(type="kto"))

    steps = regraft.metrics(client, child.id)
    assert child.status == "succeeded", child.error
    assert steps[0]["full_valid_loss"] == pytest.approx(0.5, abs=1e-6)
    assert steps[-1]["full_valid_loss"] < 0.5
    assert steps[-1]["full_valid_mean_chosen_reward"] > steps[-1]["full_valid_mean_rejected_reward"]


def test_labels_need_the_loss_that_reads_them(client: openai.OpenAI) -> None:
    job = train(client, LABELED, model="tiny", method=preferring(type="sigmoid"))
    mixed = train(client, [*PAIRS, *LABELED], model="tiny", method=preferring(type="kto"))

    assert "need the loss kto" in present(present(job.error).message)
    assert "has rows with labels and with pairs; use one kind" in present(present(mixed.error).message)


def test_kto_needs_more_than_one_row_a_step(client: openai.OpenAI) -> None:
    alone = preferring(type="kto")
    alone["dpo"]["hyperparameters"]["batch_size"] = 1
    with pytest.raises(openai.BadRequestError, match="needs at least 2 rows a step"):
        train(client, PAIRS, model="tiny", method=alone)


def test_a_larger_rank_freezes_the_adapter_of_the_parent_and_learns_on_top_of_it(
    client: openai.OpenAI, supervised: FineTuningJob, tmp_path: Path
) -> None:
    hyperparameters = {"n_epochs": 2, "batch_size": 4, "advanced": {"lora": {"rank": 24}}}
    asked: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    other: list[dict[str, Any]] = [
        {"messages": [row["messages"][0], {"role": "assistant", "content": "please"}]} for row in ROWS
    ]

    child = train(client, other, model=supervised.fine_tuned_model, method=asked)

    assert child.status == "succeeded", child.error
    with regraft.Regraft(base_url=str(client.base_url), api_key=client.api_key) as ours:
        parts = [
            load_file(ours.checkpoints.download(job.id, to=tmp_path / job.id) / "adapter_model.safetensors")
            for job in (supervised, child)
        ]
    for name, weight in parts[0].items():
        grown = parts[1][name]
        if ".lora_A." in name:
            assert grown.shape[0] == 24 and (grown[:16] == weight).all()
        else:
            assert grown.shape[1] == 24 and (grown[:, :16] == weight).all()
            assert (grown[:, 16:] != 0).any()
    answer = patient(client).chat.completions.create(
        model=present(child.fine_tuned_model),
        messages=[{"role": "user", "content": "say blue"}],
        temperature=0,
        max_tokens=1,
    )
    assert answer.choices[0].message.content
    again = train(client, ROWS, model=child.fine_tuned_model, method={"type": "supervised"})
    assert untyped(again).method.supervised.hyperparameters.advanced["lora"] == {
        "rank": 24,
        "alpha": 48,
        "targets": "all-linear",
    }


@pytest.mark.parametrize(
    ("lora", "field", "says"),
    [
        ({"rank": 4}, "rank", "A larger rank, at the same alpha / rank"),
        ({"rank": 24, "alpha": 24}, "alpha", "needs alpha 48"),
        ({"targets": "attention"}, "targets", "A larger rank, at the same alpha / rank"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(
    client: openai.OpenAI, supervised: FineTuningJob, lora: dict[str, Any], field: str, says: str
) -> None:
    asked: Any = {"type": "supervised", "supervised": {"hyperparameters": {"advanced": {"lora": lora}}}}
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        train(client, ROWS, model=supervised.fine_tuned_model, method=asked)

    assert refused.value.param == f"method.supervised.hyperparameters.advanced.lora.{field}"


def test_the_export_has_the_losses_and_the_request(
    client: openai.OpenAI, supervised: FineTuningJob, tmp_path: Any
) -> None:
    with regraft.Regraft(base_url=str(client.base_url), api_key=client.api_key) as ours:
        folder = ours.checkpoints.download(supervised.id, to=tmp_path / "model")

    card = (folder / "README.md").read_text()
    assert "trained by supervised fine-tuning" in card
    assert "| 0 |" in card and "## Losses" in card


def test_a_student_is_distilled_from_a_tuned_model(
    client: openai.OpenAI, supervised: FineTuningJob, tmp_path: Path
) -> None:
    prompts: list[dict[str, Any]] = [{"messages": row["messages"][:1]} for row in ROWS]
    hyperparameters = {
        "n_epochs": 8,
        "batch_size": 6,
        "learning_rate_multiplier": 40,
        "eval_samples": 8,
        "advanced": {"sampling": {"group_size": 16, "max_completion_tokens": 4}},
    }
    method = {
        "type": "distillation",
        "distillation": {
            "teacher": {"model": supervised.fine_tuned_model},
            "hyperparameters": hyperparameters,
        },
    }

    student = train(client, prompts, model="tiny", method=method)

    assert student.status == "succeeded", student.error
    steps = regraft.metrics(client, student.id)
    curve = [one["full_valid_teacher_kl"] for one in steps if "full_valid_teacher_kl" in one]
    assert curve[-1] < curve[0] / 2, curve
    shown = untyped(student).method.distillation
    assert shown["mode"] == "on_policy"
    assert shown["teacher"] == {"model": supervised.fine_tuned_model}
    assert shown["hyperparameters"]["advanced"]["sampling"]["group_size"] == 16
    assert shown["hyperparameters"]["batch_size"] == 6
    assert shown["hyperparameters"]["advanced"]["lora"]["rank"] == 16
    answer = patient(client).chat.completions.create(
        model=present(student.fine_tuned_model),
        messages=[{"role": "user", "content": "say blue"}],
        temperature=0,
        max_tokens=3,
    )
    assert answer.choices[0].message.content
    with regraft.Regraft(base_url=str(client.base_url), api_key=client.api_key) as ours:
        card = (ours.checkpoints.download(student.id, to=tmp_path / "model") / "README.md").read_text()
    assert "trained by distillation from a teacher" in card


@pytest.mark.parametrize(
    ("distillation", "status", "param"),
    [
        (None, 400, "method.distillation"),
        ({}, 400, "method.distillation.teacher"),
        ({"teacher": {"model": "none"}}, 404, "method.distillation.teacher.model"),
        ({"teacher": {"url": "https://example.com"}}, 400, "method.distillation.teacher.model"),
        ({"teacher": {"model": "tiny"}, "mode": "sequence"}, 400, "method.distillation.mode"),
        ({"teacher": {"model": "tiny"}, "mode": "soft"}, 400, "method.distillation.mode"),
        (
            {"teacher": {"model": "tiny"}, "mode": "logits", "hyperparameters": {"eval_samples": 2}},
            400,
            "method.distillation.hyperparameters.eval_samples",
        ),
        (
            {"teacher": {"model": "tiny"}, "hyperparameters": {"advanced": {"loss": {"type": "grpo"}}}},
            400,
            "method.distillation.hyperparameters.advanced.loss",
        ),
    ],
    ids=["nothing", "no teacher", "unknown teacher", "endpoint", "sequence", "mode", "sampling", "loss"],
)
def test_what_distillation_does_not_do_is_refused_by_name(
    client: openai.OpenAI, distillation: Any, status: int, param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        train(client, ROWS, model="tiny", method={"type": "distillation", "distillation": distillation})

    assert refused.value.status_code == status
    assert untyped(refused.value.body)["param"] == param


def test_a_student_learns_the_probabilities_of_a_tuned_model(
    client: openai.OpenAI, supervised: FineTuningJob
) -> None:
    """Its file has answers, its loss is the forward KL, and it needs no validation file."""
    method = {
        "type": "distillation",
        "distillation": {
            "mode": "logits",
            "teacher": {"model": supervised.fine_tuned_model},
            "hyperparameters": {
                "n_epochs": 8,
                "batch_size": 6,
                "learning_rate_multiplier": 40,
                "advanced": {"loss": {"top_k": 20}},
            },
        },
    }

    student = train(client, ROWS, model="tiny", method=method)

    assert student.status == "succeeded", student.error
    steps = regraft.metrics(client, student.id)
    assert steps[-1]["full_valid_loss"] < steps[0]["full_valid_loss"] / 3
    shown = untyped(student).method.distillation
    assert shown["mode"] == "logits"
    assert shown["hyperparameters"]["batch_size"] == 6
    assert shown["hyperparameters"]["advanced"]["loss"] == {"top_k": 20, "temperature": 1.0}
    answer = patient(client).chat.completions.create(
        model=present(student.fine_tuned_model),
        messages=[{"role": "user", "content": "say blue"}],
        temperature=0,
        max_tokens=3,
    )
    assert answer.choices[0].message.content == "blue"


def test_a_file_in_another_format_has_no_probabilities_to_learn(
    client: openai.OpenAI, supervised: FineTuningJob
) -> None:
    teacher = {"model": supervised.fine_tuned_model}
    method = {"type": "distillation", "distillation": {"mode": "logits", "teacher": teacher}}
    job = train(client, PAIRS, model="tiny", method=method)

    assert "is not using 'dpo' as the training method (provided method=distillation)" in present(
        present(job.error).message
    )


def test_a_student_does_not_teach_itself(client: openai.OpenAI, supervised: FineTuningJob) -> None:
    for model in ("tiny", supervised.fine_tuned_model):
        method = {"type": "distillation", "distillation": {"teacher": {"model": model}}}
        with pytest.raises(openai.BadRequestError, match="is the model that the student starts from"):
            train(client, ROWS, model=model, method=method)


def test_a_teacher_of_another_shape_is_refused(client: openai.OpenAI, supervised: FineTuningJob) -> None:
    asked = {
        "teacher": {"model": supervised.fine_tuned_model},
        "hyperparameters": {"advanced": {"lora": {"rank": 4}}},
    }
    with pytest.raises(openai.BadRequestError, match="has another rank than the student's"):
        train(client, ROWS, model="tiny", method={"type": "distillation", "distillation": asked})
