"""Every call an RFT user makes, with the official client, against a live server that really trains."""

import asyncio
import csv
import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import regraft
from openai import AsyncOpenAI
from openai.types.file_object import FileObject
from openai.types.fine_tuning.fine_tuning_job import FineTuningJob
from openai.types.fine_tuning.fine_tuning_job_event import FineTuningJobEvent

from tests.e2e.conftest import POLL_SECONDS, Server, jsonl, start_server
from tests.echo import echoes_of
from tests.graders.servers import serving, verdict
from tests.hyperparameters import in_groups
from tests.present import present, untyped
from tests.tiny import make_byte_model, make_tiny_model

GRADER: Any = {
    "type": "multi",
    "name": "m",
    "graders": {
        "says": {
            "type": "string_check",
            "name": "says",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
            "operation": "ilike",
        },
        "close": {
            "type": "text_similarity",
            "name": "close",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
            "evaluation_metric": "fuzzy_match",
        },
    },
    "calculate_output": "0.5*says+0.5*close",
}
HYPERPARAMETERS = {
    "batch_size": 4,
    "n_epochs": 6,
    "eval_interval": 4,
    "advanced": {
        "sampling": {"group_size": 16, "max_completion_tokens": 3},
        "optimizer": {"learning_rate": 0.02},
        "lora": {"rank": 8},
        "evaluation": {"temperature": 1.0},
    },
}
QUESTIONS = [
    "say yes",
    "say it",
    "tell me now",
    "is it a cat",
    "is it red",
    "what is it",
    "please",
    "say the word",
]
TRAIN = [{"messages": [{"role": "user", "content": q}], "answer": "yes"} for q in QUESTIONS]
VALID = [{"messages": [{"role": "user", "content": q}], "answer": "yes"} for q in ("tell me", "is it green")]


def upload(
    client: openai.OpenAI, rows: list[dict[str, Sequence[Any]]] = TRAIN, name: str = "train.jsonl"
) -> FileObject:
    return client.files.create(file=(name, jsonl(rows)), purpose="fine-tune")


def create(
    client: openai.OpenAI, train: str | None = None, valid: str | None = None, **changes: Any
) -> FineTuningJob:
    arguments: dict[str, Any] = {
        "model": "tiny",
        "training_file": train or upload(client).id,
        "validation_file": valid or upload(client, VALID, "valid.jsonl").id,
        "seed": 1,
        "method": {
            "type": "reinforcement",
            "reinforcement": {"grader": GRADER, "hyperparameters": HYPERPARAMETERS},
        },
    }
    return client.fine_tuning.jobs.create(**arguments | changes)


def wait(client: openai.OpenAI, job: FineTuningJob) -> FineTuningJob:
    for _ in regraft.events(client, job.id, poll_seconds=POLL_SECONDS):
        pass
    return client.fine_tuning.jobs.retrieve(job.id)


JUDGES_AND_TEACHERS = """
[judges.wise]
base_url = "{address}/v1"

[judges.local]
model = "judge"
explains = false

[models.large]
base_url = "{address}/v1"

[endpoints]
hosts = ["127.0.0.1"]
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of others: an endpoint that grades, a judge, and a teacher. Yields its address."""
    echo = echoes_of(make_tiny_model(tmp_path_factory.mktemp("teacher"), layers=3, seed=5))

    def answer(path: str, asked: Any) -> tuple[int, str]:
        if path == "/score":
            right = asked["item"]["answer"] in asked["sample"]["output_text"]
            return 200, json.dumps({"score": float(right)})
        if path == "/v1/completions":
            return echo(path, asked)
        reply = verdict(len(asked["messages"][0]["content"]) % 7 / 7)
        return reply.status, reply.body

    with serving(answer) as address:
        yield address


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, elsewhere: str) -> Iterator[Server]:
    """The service of all tests here but one: with each kind of judge and teacher that an operator can name."""
    folder = tmp_path_factory.mktemp("openai-client")
    (folder / "graders.toml").write_text(JUDGES_AND_TEACHERS.format(address=elsewhere))
    server = start_server(
        folder / "data",
        tiny_model,
        judge=make_byte_model(folder / "bytes"),
        REGRAFT_GRADERS_FILE=str(folder / "graders.toml"),
    )
    yield server
    server.stop()
    assert until(lambda: not processes_of(server.folder))


@pytest.fixture(scope="module")
def finished(server: Server) -> FineTuningJob:
    """One job from upload to model, shared by the tests that look at what it left."""
    client = server.client()
    client.fine_tuning.alpha.graders.validate(grader=GRADER)
    job = create(client, suffix="demo", metadata={"k": "v"})
    return wait(client, job)


def delivered_reward(steps: list[dict[str, Any]]) -> float:
    """The validation reward of the checkpoint that the job delivers: its best, which need not be the last."""
    measured: list[float | None] = [step.get("full_valid_mean_reward") for step in steps]
    return max(reward for reward in measured if reward is not None)


def test_the_job_succeeds_and_its_reward_rises(client: openai.OpenAI, finished: FineTuningJob) -> None:
    steps = regraft.metrics(client, finished.id)

    assert finished.status == "succeeded"
    assert finished.error is None
    assert delivered_reward(steps) > steps[0]["full_valid_mean_reward"] + 0.3


@pytest.mark.parametrize(
    "loss", [{"type": "reinforce_plus_plus"}, {"type": "ppo", "gae_lambda": 1.0}], ids=str
)
def test_losses_with_rewards_of_tokens_raise_the_reward_as_well(
    client: openai.OpenAI, loss: dict[str, Any]
) -> None:
    hyperparameters = HYPERPARAMETERS | {
        "advanced": in_groups({"loss": loss, "kl": 0.01} | untyped(HYPERPARAMETERS["advanced"]))
    }
    method = {
        "type": "reinforcement",
        "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters},
    }
    job = create(client, method=method)

    finished = wait(client, job)

    steps = regraft.metrics(client, job.id)
    shown = untyped(finished.to_dict()["method"])["reinforcement"]["hyperparameters"]["advanced"]["loss"]
    assert finished.status == "succeeded"
    assert shown["type"] == loss["type"]
    assert delivered_reward(steps) > steps[0]["full_valid_mean_reward"] + 0.3
    assert (steps[-1]["explained_variance"] is not None) == (loss["type"] == "ppo")


def test_auto_and_asked_hyperparameters_are_shown_resolved(finished: FineTuningJob) -> None:
    shown = untyped(finished.to_dict()["method"])["reinforcement"]["hyperparameters"]

    assert shown["n_epochs"] == 6
    assert shown["eval_samples"] == 1
    assert shown["advanced"]["optimizer"]["learning_rate"] == 0.02
    assert shown["advanced"]["loss"]["type"] == "dapo"


def test_the_events_tell_the_story_in_openais_words(client: openai.OpenAI, finished: FineTuningJob) -> None:
    events = list(client.fine_tuning.jobs.list_events(finished.id, limit=5))  # several pages

    messages = [event.message for event in reversed(events)]
    assert messages[0] == f"Created fine-tuning job: {finished.id}"
    assert messages[1] == (
        f"Validating training file: {finished.training_file} and validation file: {finished.validation_file}"
    )
    assert messages[2:4] == ["Files validated, moving job to queued state", "Fine-tuning job started"]
    assert messages[-1] == "The job has successfully completed"
    assert len({event.id for event in events}) == len(events)
    metrics = [event.data for event in events if event.type == "metrics"]
    assert {untyped(m)["step"] for m in metrics} == set(range(13))


def test_checkpoints_are_the_best_and_callable_by_name(
    client: openai.OpenAI, finished: FineTuningJob
) -> None:
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(finished.id))

    assert [c.step_number for c in checkpoints] == [12, 8, 4]
    assert all(c.fine_tuned_model_checkpoint.endswith(f":ckpt-step-{c.step_number}") for c in checkpoints)
    assert untyped(checkpoints[0].metrics).full_valid_mean_reward > 0
    for checkpoint in checkpoints:
        assert client.models.retrieve(checkpoint.fine_tuned_model_checkpoint).id
    assert finished.fine_tuned_model in [model.id for model in client.models.list()]


def test_the_adapter_of_a_checkpoint_loads_with_peft(
    client: openai.OpenAI, finished: FineTuningJob, tiny_model: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    checkpoint = next(iter(client.fine_tuning.jobs.checkpoints.list(finished.id)))

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model), untyped(checkpoint).adapter
    )

    assert model.peft_config["default"].r == 8


def test_the_result_file_is_plain_csv(client: openai.OpenAI, finished: FineTuningJob) -> None:
    text = client.files.content(finished.result_files[0]).text

    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["step"] for row in rows] == [str(n) for n in range(13)]


def test_graded_answers_can_be_read(client: openai.OpenAI, finished: FineTuningJob) -> None:
    answers = regraft.rollouts(client, finished.id, step=1, split="train")

    assert len(answers) == 4 * 16
    assert all(a["score"] is not None and a["sub_scores"].keys() == {"says", "close"} for a in answers)


def test_validations_are_runs_of_the_jobs_eval(client: openai.OpenAI, finished: FineTuningJob) -> None:
    """From the job to the grade of one answer, as OpenAI's client walks there."""
    eval_ = client.evals.retrieve(untyped(finished).eval_id)
    runs = list(client.evals.runs.list(eval_.id, order="asc", limit=2))  # several pages
    items = {
        run.id: list(client.evals.runs.output_items.list(run.id, eval_id=eval_.id, limit=1)) for run in runs
    }
    item = items[runs[-1].id][0]

    assert (eval_.name, [one.name for one in eval_.testing_criteria]) == (
        "demo",
        ["m", "says", "close"],
    )
    assert [run.name for run in runs] == ["Step 0", "Step 4", "Step 8", "Step 12"]
    assert all(run.result_counts.total == len(VALID) == len(items[run.id]) for run in runs)
    assert runs[-1].result_counts.passed > runs[0].result_counts.passed
    assert {one.datasource_item["answer"] for one in items[runs[0].id]} == {"yes"}
    assert [result.name for result in item.results] == ["m", "says", "close"]
    assert present(item.sample.output[0].content).count("yes") >= 1
    again = client.evals.runs.output_items.retrieve(item.id, eval_id=eval_.id, run_id=runs[-1].id)
    assert (again.id, again.results[0].score) == (item.id, item.results[0].score)
    with pytest.raises(openai.APIStatusError) as refused:
        client.evals.runs.cancel(runs[0].id, eval_id=eval_.id)
    assert refused.value.status_code == 405


def test_a_grader_runs_on_a_sample(client: openai.OpenAI) -> None:
    result = client.fine_tuning.alpha.graders.run(grader=GRADER, model_sample="yes", item={"answer": "yes"})

    assert result.reward == 1.0
    assert not result.metadata.errors.other_error
    assert len(result.metadata.errors.to_dict()) == 24


JUDGE = {
    "type": "score_model",
    "name": "j",
    "model": "gpt-4o",
    "input": [{"role": "user", "content": "How good is this? {{sample.output_text}}"}],
}
PYTHON: Any = {
    "type": "python",
    "name": "counts",
    "source": "def grade(sample, item):\n    words = sample['output_text'].split()\n"
    "    print(words)\n    return words.count(item['answer']) / max(1, len(words))\n",
}


def test_a_python_grader_runs_on_a_sample_and_trains_a_job(client: openai.OpenAI) -> None:
    result = client.fine_tuning.alpha.graders.run(
        grader=PYTHON, model_sample="yes no", item={"answer": "yes"}
    )
    assert result.reward == 0.5

    job = wait(client, create(client, method=method(PYTHON, n_epochs=1)))

    answers = regraft.rollouts(client, job.id, step=1, split="train")
    assert job.status == "succeeded"
    assert all(a["score"] is not None for a in answers)
    assert all(a["output"] == f"{a['output_text'].split()}\n" for a in answers)


def test_a_python_grader_that_raises_fails_the_job_with_its_traceback(client: openai.OpenAI) -> None:
    broken = PYTHON | {"source": "def grade(sample, item):\n    return 1 / 0\n"}

    job = wait(client, create(client, method=method(broken, n_epochs=4)))

    assert job.status == "failed"
    assert job.error is not None
    assert job.error.code == "grader_failed"
    assert "ZeroDivisionError" in job.error.message


def test_a_grader_that_this_server_cannot_run_is_refused_at_create(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, method=method(JUDGE))

    assert refused.value.param == "method.reinforcement.grader.model"


def test_judges_and_endpoints_that_the_operator_named_train_a_job(
    client: openai.OpenAI, elsewhere: str
) -> None:
    """Their tokens are counted, and what is secret is in no answer of the service."""
    judge = JUDGE | {"model": "wise"}
    mine = {"type": "endpoint", "name": "mine", "url": f"{elsewhere}/score", "headers": {"X-Api-Key": "hush"}}
    both = {"type": "multi", "name": "both", "graders": {"judge": judge, "mine": mine}}
    grader = both | {"calculate_output": "0.5 * judge + 0.5 * mine"}

    job = wait(client, create(client, method=method(grader, n_epochs=1)))

    events = [event.to_json() for event in client.fine_tuning.jobs.list_events(job.id)]
    assert job.status == "succeeded", job.error
    assert "hush" not in job.model_dump_json(warnings=False) + "".join(events)
    shown = untyped(job.to_dict()["method"])["reinforcement"]["grader"]
    assert shown["graders"]["mine"]["headers"] == {"X-Api-Key": "***"}
    tokens = untyped(job.to_dict()["usage_metrics"])["model_grader_tokens"]["wise"]
    assert tokens["prompt_tokens"] == 2 * tokens["completion_tokens"] > 0
    used = regraft.metrics(client, job.id)[1]["usage"]["graders"][0]
    assert (used["name"], used["model"]) == ("j", "wise")
    assert used["train_prompt_tokens_count"] > 0


def test_a_model_on_a_server_that_the_operator_named_teaches_a_student(client: openai.OpenAI) -> None:
    hyperparameters: dict[str, Any] = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 40}
    hyperparameters |= {"advanced": {"sampling": {"max_completion_tokens": 4}}}
    distillation = {"teacher": {"model": "large"}, "hyperparameters": hyperparameters}

    job = wait(client, create(client, method={"type": "distillation", "distillation": distillation}))

    steps = regraft.metrics(client, job.id)
    assert job.status == "succeeded", job.error
    assert steps[-1]["full_valid_teacher_kl"] < steps[0]["full_valid_teacher_kl"]
    tokens = untyped(job.to_dict()["usage_metrics"])["model_grader_tokens"]["large"]
    assert tokens["prompt_tokens"] > tokens["completion_tokens"] > 0


def test_a_model_of_the_registry_judges_a_job(client: openai.OpenAI, server: Server) -> None:
    """Without any server elsewhere: the service starts one for it, and again when it dies."""
    label = JUDGE | {"type": "label_model", "name": "label", "model": "local", "labels": ["good", "bad"]}
    grader: Any = {"type": "multi", "name": "m", "calculate_output": "label"}
    grader["graders"] = {"label": label | {"passing_labels": ["good"]}}
    run = client.fine_tuning.alpha.graders.run
    assert until(lambda: run(grader=grader, model_sample="hello", item={}).metadata.sampled_model_name)
    for pid in processes_of(server.folder):
        if Path(f"/proc/{pid}/comm").read_text() == "worker.serving\n":
            os.kill(pid, signal.SIGKILL)

    job = wait(client, create(client, method=method(grader, n_epochs=1)))

    assert job.status == "succeeded", job.error
    assert {one["score"] for one in regraft.rollouts(client, job.id, step=2, split="train")} <= {0.0, 1.0}


def test_a_job_learns_answers_that_are_held_to_a_schema(client: openai.OpenAI) -> None:
    """What it writes is always JSON of the schema; what it learns is what to put into it."""
    schema = {"type": "object", "properties": {"label": {"enum": ["yes", "no"]}}, "required": ["label"]}
    right = {"type": "string_check", "name": "right", "operation": "eq"}
    method = {
        "grader": right | {"input": "{{sample.output_json.label}}", "reference": "{{item.answer}}"},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema | {"additionalProperties": False}},
        },
        "hyperparameters": HYPERPARAMETERS
        | {
            "n_epochs": 4,
            "advanced": in_groups(HYPERPARAMETERS["advanced"] | untyped({"max_completion_tokens": 24})),
        },
    }
    job = create(client, model="judge", method={"type": "reinforcement", "reinforcement": method})

    job = wait(client, job)

    steps = regraft.metrics(client, job.id)
    answers = regraft.rollouts(client, job.id, step=steps[-1]["step"], split="train")
    assert job.status == "succeeded", job.error
    assert {answer["output_text"] for answer in answers} <= {'{"label": "yes"}', '{"label": "no"}'}
    assert steps[-1]["full_valid_mean_reward"] == 1.0
    assert steps[1]["train_mean_reward"] < 0.9
    assert all(step["logprob_gap"] < 1e-4 for step in steps[1:] if step["logprob_gap"] is not None)


def test_a_job_with_bad_data_fails_with_its_lines(client: openai.OpenAI) -> None:
    bad = client.files.create(file=("bad.jsonl", b'{"messages": []}\nnot json\n'), purpose="fine-tune")

    job = wait(client, create(client, train=bad.id))

    assert job.status == "failed"
    assert job.error is not None
    assert job.error.param == "training_file"
    assert "line 1" in job.error.message
    assert "line 2" in job.error.message


def test_a_cancel_acts_at_once_and_keeps_what_was_measured(client: openai.OpenAI) -> None:
    job = create(client)
    for event in regraft.events(client, job.id, poll_seconds=POLL_SECONDS):
        if event.type == "metrics":
            break

    cancelled = client.fine_tuning.jobs.cancel(job.id)

    assert cancelled.status == "cancelled"
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    assert until(lambda: client.fine_tuning.jobs.retrieve(job.id).result_files)


def test_what_is_wrong_with_a_request_is_said(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        create(client, model="gpt-9")
    assert unknown.value.code == "model_not_found"
    assert "tiny" in unknown.value.message

    with pytest.raises(openai.BadRequestError) as typo:
        create(
            client,
            method={
                "type": "reinforcement",
                "reinforcement": {"grader": GRADER, "hyperparameters": {"n_epoch": 1}},
            },
        )
    assert typo.value.param == "method.reinforcement.hyperparameters.n_epoch"
    assert typo.value.code == "unknown_parameter"
    assert typo.value.request_id is not None
    assert typo.value.request_id.startswith("req_")


def test_a_wrong_key_is_refused(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        server.client(api_key="rg-wrong").models.list()

    assert refused.value.code == "invalid_api_key"


def test_a_tuned_model_can_be_deleted_and_a_base_model_not(client: openai.OpenAI) -> None:
    job = wait(client, create(client, method=method(n_epochs=1)))

    assert job.fine_tuned_model is not None
    assert client.models.delete(job.fine_tuned_model).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(job.fine_tuned_model)
    with pytest.raises(openai.BadRequestError):
        client.models.delete("tiny")


def test_the_async_client_does_the_same(server: Server) -> None:
    async def whole_job() -> tuple[FineTuningJob, list[FineTuningJobEvent]]:
        async with AsyncOpenAI(base_url=server.base_url, api_key=server.key) as client:
            train = await client.files.create(file=("a.jsonl", jsonl(TRAIN)), purpose="fine-tune")
            valid = await client.files.create(file=("b.jsonl", jsonl(VALID)), purpose="fine-tune")
            assert (await client.files.wait_for_processing(train.id)).status == "processed"
            job = await client.fine_tuning.jobs.create(
                model="tiny", training_file=train.id, validation_file=valid.id, method=method(n_epochs=1)
            )
            while (job := await client.fine_tuning.jobs.retrieve(job.id)).status not in regraft.FINAL:
                await asyncio.sleep(0.2)
            events = [event async for event in client.fine_tuning.jobs.list_events(job.id, limit=3)]
            return job, events

    job, events = asyncio.run(whole_job())

    assert job.status == "succeeded"
    assert events[0].message == "The job has successfully completed"


def test_one_ctrl_c_ends_everything_and_the_job_goes_on_at_the_next_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    """The run is checkpointed, no process is left, and the same job finishes after a restart."""
    folder = tmp_path / "data"
    server = start_server(folder, tiny_model)
    client = server.client()
    job = create(client, method=method(n_epochs=20, eval_interval=10))  # long enough to be interrupted
    for event in regraft.events(client, job.id, poll_seconds=0.1):
        if event.type == "metrics" and untyped(event.data)["step"] >= 1:
            break

    status = server.stop()

    assert status == 0, (folder / "server.log").read_text()
    # The process that its children were forked from ends when the last of them has.
    assert until(lambda: not processes_of(folder))

    server = start_server(folder, tiny_model)
    try:
        client = server.client()
        done = wait(client, job)
        steps = [m["step"] for m in regraft.metrics(client, job.id)]
        messages = [e.message for e in client.fine_tuning.jobs.list_events(job.id)]
    finally:
        server.stop()
    assert done.status == "succeeded"
    assert steps == list(range(41))
    assert any(m.startswith("Resuming from the checkpoint of step") for m in messages)


def method(grader: dict[str, Any] = GRADER, **hyperparameters: Any) -> Any:
    merged = HYPERPARAMETERS | hyperparameters
    return {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": merged}}


def until(condition: Callable[..., Any], seconds: float = 60.0) -> Any:
    """Ask until the answer is true; the server is another process, so there is nothing to wait on."""
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return result


def processes_of(folder: Path) -> list[int]:
    """Live processes that were started with this data folder in their environment."""
    needle = f"REGRAFT_DATA_DIR={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
    return found
