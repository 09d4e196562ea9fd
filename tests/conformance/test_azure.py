"""Azure's how-to "Reinforcement fine-tuning": its client, its paths and header, its spellings."""

from typing import Any

import httpx
import openai
import pytest
from openai import AzureOpenAI, OpenAI

from tests.conformance.data import EXACT, TEST, TRAIN
from tests.conformance.helpers import (
    CHAT,
    CHECKPOINT,
    ERROR,
    EVENT,
    FILE,
    FINISHED_JOB,
    MODEL,
    NEW_JOB,
    assert_documented,
    finished,
    jsonl,
)
from tests.e2e.conftest import Server
from tests.present import untyped

API_VERSION = "2025-04-01-preview"
METHOD: Any = {
    "type": "reinforcement",
    "reinforcement": {
        "hyperparameters": {
            "eval_interval": 5,
            "eval_samples": 2,
            "reasoning_effort": "medium",
            "n_epochs": 1,
            "batch_size": 4,
            "learning_rate_multiplier": 2,
        },
        "grader": {
            "name": "color_model_grader",
            "type": "score_model",
            "model": "o3-mini",
            "input": [
                {"role": "developer", "content": "Grade a color."},
                {"role": "user", "content": "color={{item.reference_answer}} output={{sample.output_text}}"},
            ],
            "pass_threshold": 5,
            "range": [0.0, 5.0],
        },
    },
}

USER = {"role": "user", "content": "Color?"}
ROWS: Any = [
    {"messages": [USER], "tools": [], "reference_answer": "red"},
    {
        "messages": [USER, {"role": "assistant", "content": "Red.", "refusal": None}, USER],
        "reference_answer": "blue",
    },
]


@pytest.fixture
def endpoint(service: Server) -> str:
    return service.base_url.removesuffix("/v1")


@pytest.fixture
def client(service: Server, endpoint: str) -> AzureOpenAI:
    return AzureOpenAI(
        azure_endpoint=endpoint, api_key=service.key, api_version=API_VERSION, timeout=120, max_retries=0
    )


@pytest.mark.slow
def test_azures_client_makes_a_job_and_calls_its_model(client: AzureOpenAI, inference: None) -> None:
    train = client.files.create(file=("train.jsonl", b"\xef\xbb\xbf" + jsonl(ROWS)), purpose="fine-tune")
    valid = client.files.create(file=("valid.jsonl", TEST), purpose="fine-tune")
    assert_documented(train, FILE)
    assert client.files.wait_for_processing(valid.id).status == "processed"

    created = client.fine_tuning.jobs.create(
        model="o4-mini-2025-04-16",
        training_file=train.id,
        validation_file=valid.id,
        suffix="colors.v1",
        method=METHOD,
        extra_body={"trainingType": "GlobalStandard"},
    )
    assert_documented(created, NEW_JOB)
    job = finished(client, created.id)

    assert_documented(job, FINISHED_JOB)
    for event in client.fine_tuning.jobs.list_events(job.id, limit=10):
        assert_documented(event, EVENT)
    for checkpoint in client.fine_tuning.jobs.checkpoints.list(job.id):
        assert_documented(checkpoint, CHECKPOINT)
    assert job.id in [one.id for one in client.fine_tuning.jobs.list(limit=5).data]
    assert "step" in client.files.content(job.result_files[0]).text
    assert_documented(client.models.retrieve(job.fine_tuned_model), MODEL)
    completion = client.chat.completions.create(
        model=job.fine_tuned_model, messages=[{"role": "user", "content": "Color?"}], max_completion_tokens=8
    )
    assert_documented(completion, CHAT)


def test_the_key_goes_in_azures_header(service: Server, endpoint: str) -> None:
    headers = {"api-key": service.key}
    url = f"{endpoint}/openai/files?api-version={API_VERSION}"

    listed = httpx.get(url, headers=headers)
    wrong = httpx.get(url, headers={"api-key": "rg-wrong"})
    on_openais_paths = httpx.get(f"{service.base_url}/models", headers=headers)

    assert listed.status_code == 200 and listed.json()["object"] == "list"
    assert wrong.status_code == 401
    assert_documented(wrong.json(), ERROR)
    assert on_openais_paths.status_code == 200


def test_the_newer_paths_work_with_openais_client(service: Server, endpoint: str) -> None:
    client = OpenAI(base_url=f"{endpoint}/openai/v1/", api_key=service.key)

    assert "o4-mini-2025-04-16" in [model.id for model in client.models.list()]
    assert client.fine_tuning.alpha.graders.validate(grader=EXACT).to_dict() == {"grader": EXACT}


@pytest.mark.parametrize("training_type", ["Standard", "GlobalStandard", "globalStandard", "developerTier"])
def test_every_training_type_is_accepted(client: AzureOpenAI, training_type: str) -> None:
    files = [client.files.create(file=("rows.jsonl", rows), purpose="fine-tune").id for rows in (TRAIN, TEST)]

    job = client.fine_tuning.jobs.create(
        model="o4-mini-2025-04-16",
        training_file=files[0],
        validation_file=files[1],
        suffix="a suffix with blanks",
        method={"type": "reinforcement", "reinforcement": {"grader": EXACT}},
        extra_body={"trainingType": training_type},
    )
    client.fine_tuning.jobs.cancel(job.id)

    assert_documented(job, NEW_JOB)


def test_the_page_s_graders_are_valid(client: AzureOpenAI) -> None:
    similar = {
        "name": "text_similarity_sample_grader",
        "type": "text_similarity",
        "input": "{{item.reference_answer}}",
        "reference": "{{sample.output_text}}",
        "evaluation_metric": "fuzzy_match",
    }
    fields = {
        "name": "sample_multi_grader",
        "type": "multi",
        "graders": {
            "text": similar
            | {"name": "text", "input": "{{sample.output_json.text}}", "reference": "{{item.text}}"},
            "clause": {
                "name": "clause",
                "type": "string_check",
                "input": "{{sample.output_json.clause}}",
                "operation": "eq",
                "reference": "{{item.clause}}",
            },
        },
        "calculate_output": "0.5 * text + 0.5 * clause",
        "invalid_grade": 0.0,
    }

    for grader in (similar, fields):
        validated = client.fine_tuning.alpha.graders.validate(grader=untyped(grader))
        assert validated.to_dict(warnings=False) == {"grader": grader}


def test_an_unknown_job_is_openais_404(client: AzureOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.fine_tuning.jobs.retrieve("ftjob-0123456789abcdef0123456789abcdef")

    assert unknown.value.code == "fine_tune_not_found"
