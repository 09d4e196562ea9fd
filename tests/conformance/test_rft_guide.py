"""Guide "Reinforcement fine-tuning": from two files and the printed curl request to a model that answers."""

import csv
import io
import json
import os
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.conformance.helpers import (
    CHAT,
    CHECKPOINT,
    EVENT,
    FINISHED_JOB,
    MODEL,
    NEW_JOB,
    NUMBER,
    assert_documented,
    finished,
    jsonl,
)
from tests.present import untyped

pytestmark = pytest.mark.slow

TRAIN = [
    {
        "messages": [{"role": "user", "content": "Is there a lock?"}],
        "compliant": "yes",
        "explanation": "One.",
    },
    {"messages": [{"role": "user", "content": "Is it audited?"}], "compliant": "no", "explanation": "Never."},
    {
        "messages": [{"role": "user", "content": "Who has keys?"}],
        "compliant": "needs review",
        "explanation": "Nobody wrote that down.",
    },
]
TEST = [
    {"messages": [{"role": "user", "content": "Is it logged?"}], "compliant": "yes", "explanation": "Daily."},
    {"messages": [{"role": "user", "content": "Is it open?"}], "compliant": "no", "explanation": "Closed."},
]

# The body of the guide's curl command, key for key; the texts are ours.
REQUEST = """{
  "training_file": "TRAINING_FILE",
  "validation_file": "VALIDATION_FILE",
  "model": "o4-mini-2025-04-16",
  "method": {
    "type": "reinforcement",
    "reinforcement": {
      "grader": {
        "type": "multi",
        "graders": {
          "explanation": {
            "name": "Explanation text grader",
            "type": "score_model",
            "input": [
              {
                "role": "user",
                "type": "message",
                "content": "# Task\\n\\nScore the answer from 0 to 1.\\n\\nReference Answer: {{item.explanation}}\\nModel Answer: {{sample.output_json.explanation}}\\n"
              }
            ],
            "model": "gpt-4o-2024-08-06"
          },
          "compliant": {
            "name": "compliant",
            "type": "string_check",
            "reference": "{{item.compliant}}",
            "operation": "eq",
            "input": "{{sample.output_json.compliant}}"
          }
        },
        "calculate_output": "0.5 * compliant + 0.5 * explanation"
      },
      "response_format": {
        "type": "json_schema",
        "json_schema": {
          "name": "security_assistant",
          "strict": true,
          "schema": {
            "type": "object",
            "properties": {
              "compliant": {
                "type": "string"
              },
              "explanation": {
                "type": "string"
              }
            },
            "required": [
              "compliant",
              "explanation"
            ],
            "additionalProperties": false
          }
        }
      },
      "hyperparameters": {
        "reasoning_effort": "medium"
      }
    }
  }
}"""  # noqa: E501 - quoted as the guide has it


@pytest.fixture(scope="module")
def created(environment: None) -> httpx.Response:
    client = OpenAI()
    training = client.files.create(file=("train.jsonl", jsonl(TRAIN)), purpose="fine-tune")
    validation = client.files.create(file=("test.jsonl", jsonl(TEST)), purpose="fine-tune")
    body = REQUEST.replace("TRAINING_FILE", training.id).replace("VALIDATION_FILE", validation.id)
    return httpx.post(
        f"{os.environ['OPENAI_BASE_URL']}/fine_tuning/jobs",
        headers={
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
        content=body,
    )


@pytest.fixture(scope="module")
def job(created: httpx.Response) -> Any:
    assert created.status_code == 200, created.text
    return finished(OpenAI(), created.json()["id"])


def test_the_printed_request_is_answered_with_a_job(created: httpx.Response) -> None:
    assert created.status_code == 200, created.text
    assert_documented(created.json(), NEW_JOB)
    asked = json.loads(REQUEST)["method"]["reinforcement"]
    shown = created.json()["method"]["reinforcement"]
    assert shown["hyperparameters"]["reasoning_effort"] == "medium"
    assert shown["response_format"] == asked["response_format"]
    for key, grader in asked["grader"]["graders"].items():
        assert shown["grader"]["graders"][key] == shown["grader"]["graders"][key] | grader
    assert shown["grader"]["calculate_output"] == asked["grader"]["calculate_output"]
    assert shown["grader"]["name"]  # generated


def test_the_job_ends_with_a_model(job: Any) -> None:
    assert_documented(job, FINISHED_JOB)
    assert job.fine_tuned_model.startswith(f"ft:{job.model}:")
    assert job.trained_tokens > 0


def test_the_events_are_those_of_the_reference(job: Any) -> None:
    events = list(OpenAI().fine_tuning.jobs.list_events(fine_tuning_job_id=job.id))

    for event in events:
        assert_documented(event, EVENT)
    said = [event.message for event in reversed(events)]
    files = f"training file: {job.training_file} and validation file: {job.validation_file}"
    in_order = [
        f"Created fine-tuning job: {job.id}",
        f"Validating {files}",
        "Files validated, moving job to queued state",
        "Fine-tuning job started",
        f"New fine-tuned model created: {job.fine_tuned_model}",
        "The job has successfully completed",
    ]
    assert [message for message in said if message in in_order] == in_order
    assert said[-1] == in_order[-1]


def test_a_metrics_event_has_the_documented_payload(job: Any) -> None:
    events = list(OpenAI().fine_tuning.jobs.list_events(fine_tuning_job_id=job.id))
    metrics = [event for event in events if event.type == "metrics"]
    last = metrics[0]

    total = untyped(last.data)["total_steps"]
    rewards = untyped(last.data)["train_mean_reward"], untyped(last.data)["full_valid_mean_reward"]
    assert last.message.startswith(
        f"Step {total}/{total} , train mean reward={rewards[0]:.2f}, "
        f"full validation mean reward={rewards[1]:.2f}, full validation mean parse error="
    )
    assert [untyped(event.data)["step"] for event in reversed(metrics)] == list(range(total + 1))
    judged = {"name": "Explanation text grader", "type": "score_model", "model": "gpt-4o-2024-08-06"}
    per_grader = {"name": str, "type": str, "train_reward_mean": NUMBER, "valid_reward_mean": NUMBER}
    assert_documented(
        last.data,
        {
            "step": int,
            "train_mean_reward": NUMBER,
            "full_valid_mean_reward": NUMBER,
            "full_valid_mean_parse_error": NUMBER,
            "completion_tokens_mean": NUMBER,
            "mean_unresponsive_rewards": NUMBER,
            "model_graders_token_usage": {
                "gpt-4o-2024-08-06": {
                    f"{split}_{kind}_tokens": int
                    for split in ("train", "eval")
                    for kind in ("prompt", "cached", "completion")
                }
            },
            "usage": {"graders": [judged | dict.fromkeys(_counts("tokens"), NUMBER)]},
            "scores": {"graders": [per_grader], "train_reward_mean": NUMBER, "valid_reward_mean": NUMBER},
            "errors": {"graders": [{"name": str, "type": str, "train_other_error_count": NUMBER}]},
            "timing": {
                "step": dict.fromkeys(("eval", "sampling", "training", "full_iteration"), NUMBER),
                "graders": [{"name": str, "type": str, "train_execution_latency_mean": NUMBER}],
            },
        },
    )
    assert {one["name"] for one in untyped(last.data)["scores"]["graders"]} == {
        "Explanation text grader",
        "compliant",
    }


def _counts(unit: str) -> list[Any]:
    kinds = [f"{split}_{kind}_{unit}" for split in ("train", "valid") for kind in ("prompt", "completion")]
    return [f"{kind}_{suffix}" for kind in kinds for suffix in ("mean", "count")]


def test_an_effort_that_has_no_effect_is_an_event(job: Any) -> None:
    events = OpenAI().fine_tuning.jobs.list_events(fine_tuning_job_id=job.id)

    warnings = [event.message for event in events if event.level == "warn"]
    assert sum("reasoning_effort" in message for message in warnings) == 1


def test_the_checkpoints_are_models(job: Any) -> None:
    client = OpenAI()
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))

    steps = [checkpoint.step_number for checkpoint in checkpoints]
    assert steps == sorted(steps, reverse=True)
    assert 1 <= len(steps) <= 4  # the best three, as the guide has it, and the newest
    for checkpoint in checkpoints:
        assert_documented(checkpoint, CHECKPOINT)
        assert checkpoint.fine_tuning_job_id == job.id
        assert_documented(client.models.retrieve(checkpoint.fine_tuned_model_checkpoint), MODEL)


def test_the_result_file_holds_the_metrics_of_every_step(job: Any) -> None:
    client = OpenAI()

    file = client.files.retrieve(job.result_files[0])
    rows = list(csv.DictReader(io.StringIO(client.files.content(file.id).text)))

    assert (file.purpose, file.filename) == ("fine-tune-results", "step_metrics.csv")
    assert rows[-1].keys() >= {
        "step",
        "train_mean_reward",
        "full_valid_mean_reward",
        "completion_tokens_mean",
        "scores/graders/string_check/compliant/train_reward_mean",
        "scores/graders/string_check/compliant/valid_reward_mean",
    }


def test_the_tuned_model_answers_in_the_schema(job: Any, inference: None) -> None:
    completion = httpx.post(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        json={
            "model": job.fine_tuned_model,
            "messages": [{"role": "user", "content": "Is it safe?"}],
            "response_format": json.loads(REQUEST)["method"]["reinforcement"]["response_format"],
            "max_completion_tokens": 100,
        },
        timeout=120,
    )

    assert completion.status_code == 200, completion.text
    assert_documented(completion.json(), CHAT)
    answer = json.loads(completion.json()["choices"][0]["message"]["content"])
    assert answer.keys() == {"compliant", "explanation"}
