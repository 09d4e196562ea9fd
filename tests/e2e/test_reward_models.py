"""A reward model learns a preference from pairs, and a reinforcement job learns from it, with the official client."""

from pathlib import Path
from typing import Any

import openai
import pytest
import regraft
from openai.types.fine_tuning import FineTuningJob
from regraft.jobs import verdict_of

from tests.e2e.test_offline_jobs import COLORS, train
from tests.present import present, untyped

ASKS = ("say", "tell me", "please", "now", "what is", "name")
PAIRS: list[dict[str, Any]] = [
    {
        "input": {"messages": [{"role": "user", "content": f"{ask} {word}"}]},
        "preferred_output": [{"role": "assistant", "content": color}],
        "non_preferred_output": [{"role": "assistant", "content": other}],
    }
    for ask in ASKS
    for word, color, other in zip(("cat", "dog", "bird"), COLORS, ("one", "north", "milk"), strict=True)
]
PROMPTS: list[dict[str, Any]] = [{"messages": row["input"]["messages"]} for row in PAIRS]


def asked(kind: str, **hyperparameters: Any) -> Any:
    return {"type": kind, kind: {"hyperparameters": hyperparameters}}


@pytest.fixture(scope="module")
def learned(server: Any) -> FineTuningJob:
    fast = {"optimizer": {"learning_rate": 0.01}}
    method = asked("reward_model", n_epochs=10, batch_size=6, advanced=fast)
    return train(server.client(), PAIRS, model="tiny", method=method, suffix="judge")


def reinforced(client: openai.OpenAI, model: str | None, **advanced: Any) -> FineTuningJob:
    method = asked(
        "reinforcement",
        n_epochs=6,
        batch_size=6,
        advanced={
            "sampling": {"group_size": 8, "max_completion_tokens": 3},
            "optimizer": {"learning_rate": 0.01},
        }
        | advanced,
    )
    method["reinforcement"]["grader"] = {"type": "reward_model", "name": "judge", "model": model}
    return train(client, PROMPTS, model="tiny", method=method)


def test_a_reward_model_tells_the_preferred_answers(client: openai.OpenAI, learned: FineTuningJob) -> None:
    last = regraft.metrics(client, learned.id)[-1]

    assert learned.status == "succeeded"
    assert untyped(learned).method.type == "reward_model"
    assert last["full_valid_mean_reward_accuracy"] == 1.0
    listed = {model.id: untyped(model).kind for model in client.models.list()}
    assert listed[present(learned.fine_tuned_model)] == "reward_model"
    assert listed["tiny"] == "base"


def test_a_policy_learns_what_the_reward_model_prefers(client: openai.OpenAI, learned: FineTuningJob) -> None:
    job = reinforced(client, learned.fine_tuned_model)

    steps = regraft.metrics(client, job.id)
    assert job.status == "succeeded", job.error
    assert steps[-1]["full_valid_mean_reward"] > steps[0]["full_valid_mean_reward"] + 0.5
    assert present(verdict_of(job)).outcome == "improved"


def test_scored_answers_are_learned_in_their_own_unit(client: openai.OpenAI) -> None:
    rows = [
        {"messages": [*row["input"]["messages"], row[name][0]], "score": score}
        for row in PAIRS
        for name, score in (("preferred_output", 5.0), ("non_preferred_output", 1.0))
    ]
    fast = {"optimizer": {"learning_rate": 0.01}}
    method = asked("reward_model", n_epochs=10, batch_size=6, advanced=fast)

    judge = train(client, rows, model="tiny", method=method)
    job = reinforced(client, judge.fine_tuned_model)

    assert regraft.metrics(client, judge.id)[-1]["full_valid_loss"] < 0.2
    rewards = [
        step["full_valid_mean_reward"]
        for step in regraft.metrics(client, job.id)[1:]
        if "full_valid_mean_reward" in step
    ]
    assert job.status == "succeeded" and 1.0 < rewards[-1] < 6.5


def test_a_process_reward_model_supervises_steps(client: openai.OpenAI) -> None:
    rows = [
        {"messages": [*row["input"]["messages"], row[name][0]], "step_labels": [label]}
        for row in PAIRS
        for name, label in (("preferred_output", 1), ("non_preferred_output", 0))
    ]
    fast = {"optimizer": {"learning_rate": 0.01}}
    method = asked("reward_model", n_epochs=10, batch_size=6, advanced=fast)

    judge = train(client, rows, model="tiny", method=method)
    job = reinforced(client, judge.fine_tuned_model, loss={"type": "grpo", "supervision": "process"})

    last = regraft.metrics(client, judge.id)[-1]
    assert last["full_valid_mean_reward_accuracy"] == 1.0 and "full_valid_mean_token_accuracy" not in last
    measured = [step.get("full_valid_mean_reward") for step in regraft.metrics(client, job.id)]
    rewards = [reward for reward in measured if reward is not None]
    assert job.status == "succeeded", job.error
    assert rewards[-1] > rewards[0] and 0.0 <= rewards[-1] <= 1.0


def test_a_reward_model_of_pairs_gives_no_steps(client: openai.OpenAI, learned: FineTuningJob) -> None:
    with pytest.raises(openai.BadRequestError, match="learned from rows without step_labels"):
        reinforced(client, learned.fine_tuned_model, loss={"type": "grpo", "supervision": "process"})


def test_a_reward_model_is_trained_further(client: openai.OpenAI, learned: FineTuningJob) -> None:
    child = train(client, PAIRS, model=learned.fine_tuned_model, method=asked("reward_model", n_epochs=1))

    parents, childs = (regraft.metrics(client, job.id) for job in (learned, child))
    for name in ("full_valid_loss", "full_valid_mean_reward_margin"):
        assert childs[0][name] == parents[-1][name]


def test_a_reward_model_gives_no_answers(client: openai.OpenAI, learned: FineTuningJob) -> None:
    model = present(learned.fine_tuned_model)
    with pytest.raises(openai.BadRequestError, match="is a reward model: it scores answers") as chat:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "say red"}])
    with pytest.raises(openai.BadRequestError, match="is a reward model"):
        client.responses.create(model=model, input="say red")
    with pytest.raises(openai.BadRequestError, match="is a reward model") as start:
        train(client, PROMPTS, model=model, method=asked("supervised"))

    assert chat.value.param == start.value.param == "model"


@pytest.mark.parametrize("model", ["tiny", "ft:tiny:nobody::none"])
def test_a_grader_needs_a_reward_model_of_the_project(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        reinforced(client, model)

    assert refused.value.status_code in (400, 404)
    assert refused.value.body is not None
    assert untyped(refused.value).param == "method.reinforcement.grader.model"


def test_a_reward_model_needs_the_weights_of_the_policy_to_itself(
    client: openai.OpenAI, learned: FineTuningJob
) -> None:
    with pytest.raises(openai.BadRequestError, match="needs the schedule on_policy without overlap"):
        reinforced(client, learned.fine_tuned_model, schedule={"type": "on_policy", "overlap": True})


def test_outside_of_a_job_the_grader_is_refused_by_name(
    client: openai.OpenAI, learned: FineTuningJob
) -> None:
    grader = {"type": "reward_model", "name": "judge", "model": learned.fine_tuned_model}
    with pytest.raises(openai.BadRequestError, match="scores answers in reinforcement jobs only"):
        client.fine_tuning.alpha.graders.run(grader=grader, model_sample="red")  # type: ignore[arg-type]

    valid = client.fine_tuning.alpha.graders.validate(grader=grader)  # type: ignore[arg-type]
    assert untyped(valid).grader.model == learned.fine_tuned_model


def test_files_with_pairs_and_scores_are_refused(client: openai.OpenAI) -> None:
    scored = [
        {"messages": [*row["input"]["messages"], row["preferred_output"][0]], "score": 1.0} for row in PAIRS
    ]

    job = train(client, [*PAIRS, *scored], model="tiny", method=asked("reward_model"))

    assert job.status == "failed"
    assert "has rows with pairs and with scores; use one kind" in present(present(job.error).message)


def test_the_export_names_what_it_is(client: openai.OpenAI, learned: FineTuningJob, tmp_path: Path) -> None:
    with regraft.Regraft(base_url=str(client.base_url), api_key=client.api_key) as ours:
        folder = ours.checkpoints.download(learned.id, to=tmp_path / "model")

    card = (folder / "README.md").read_text()
    assert "AutoModelForSequenceClassification" in card and "pipeline_tag: text-classification" in card
    assert (folder / "reward_model.json").exists()
