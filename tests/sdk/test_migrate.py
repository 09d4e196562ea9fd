import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from regraft.cli import main
from regraft.migrate import migrate, toml
from regraft.requests import InvalidRequestFile, read_job

from api.resources.job_body import JobCreate
from tests.present import present
from tests.sdk.conftest import GRADER

SOURCE = """import re

def grade(sample, item):
    return float(re.search(r'\\d+', sample["output_text"]) is not None)
"""
PYTHON = {"type": "python", "name": "py", "source": SOURCE, "image_tag": "2025-05-08"}
JUDGE = {
    "type": "score_model",
    "name": "j",
    "model": "o3-mini-2025-01-31",
    "input": [{"role": "user", "content": "{{sample.output_text}}"}],
    "range": [0, 1],
}
OPENAIS: dict[str, Any] = {
    "object": "fine_tuning.job",
    "id": "ftjob-QRLPhli5Hi1Yzoe1ODNRrnhH",
    "model": "o4-mini-2025-04-16",
    "training_file": "file-a",
    "validation_file": "file-b",
    "seed": 42,
    "status": "succeeded",
    "user_provided_suffix": "my desk!",
    "metadata": {"team": "a b"},
    "integrations": [
        {"type": "wandb", "wandb": {"project": "p", "entity": None, "tags": ["a"], "run_id": "ftjob-Q"}}
    ],
    "method": {
        "type": "reinforcement",
        "reinforcement": {
            "grader": {
                "type": "multi",
                "name": "m",
                "graders": {"py": PYTHON, "judge": JUDGE, "exact": GRADER},
                "calculate_output": "0.5 * py + 0.5 * judge",
            },
            "hyperparameters": {
                "reasoning_effort": "medium",
                "n_epochs": "auto",
                "batch_size": 16,
                "learning_rate_multiplier": 1.5,
                "eval_samples": None,
            },
            "response_format": None,
            "tools": [{"name": "search", "server_url": "https://tools.example.com/search"}],
        },
    },
}


def test_the_job_file_is_a_job_here(tmp_path: Path) -> None:
    result = migrate(OPENAIS, model="tiny")
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text("{}")
    (tmp_path / "job.toml").write_text(result.text)

    job = read_job(tmp_path / "job.toml")

    body = job.with_ids({"training_file": "file-1", "validation_file": "file-2"})
    created = JobCreate.model_validate(body)
    assert created.method_body()["grader"] == OPENAIS["method"]["reinforcement"]["grader"]
    assert created.reinforcement("This test").hyperparameters.batch_size == 16
    assert created.method_body()["tools"] == OPENAIS["method"]["reinforcement"]["tools"]
    assert (created.model, created.seed, created.suffix) == ("tiny", 42, "my desk!")
    assert created.metadata == {"team": "a b"}
    [only] = present(created.integrations)
    assert only.model_dump(exclude_none=True) == {"type": "wandb", "wandb": {"project": "p", "tags": ["a"]}}


def test_python_keeps_its_lines() -> None:
    assert f"source = '''\n{SOURCE}'''" in migrate(OPENAIS).text


def test_it_says_what_is_to_do_first() -> None:
    result = migrate(OPENAIS)

    assert [one.split(":")[0] for one in result.to_do] == [
        "model",
        "training_file",
        "validation_file",
        "grader.graders.judge.model",
    ]
    assert result.text.startswith("# To do: model: o4-mini-2025-04-16 is OpenAI's.")
    assert migrate(OPENAIS, model="tiny").to_do == result.to_do[1:]


def test_it_says_what_differs() -> None:
    told = "\n".join(migrate(OPENAIS).differs)

    for word in (
        "reasoning_effort: medium",
        "n_epochs is as many",
        "learning_rate_multiplier scales",
        "W&B runs use the account",
        "'my desk!' appears as 'my-desk'",
        "grader.graders.py: python",
        "base64",
    ):
        assert word in told
    assert "batch_size is" not in told


def test_a_cosine_and_an_endpoint_need_a_hand() -> None:
    graders = {
        "type": "multi",
        "name": "m",
        "graders": [
            {"type": "text_similarity", "name": "c", "evaluation_metric": "cosine"},
            {"type": "endpoint", "name": "e", "url": "https://x"},
        ],
    }
    params = {"model": "o4-mini", "method": {"type": "reinforcement", "reinforcement": {"grader": graders}}}

    told = migrate(params, model="tiny").to_do

    assert told[0].startswith("training_file: not set")
    assert told[2].startswith("grader.graders.0.evaluation_metric: cosine")
    assert told[3].startswith("grader.graders.1: the operator of the server")


@pytest.mark.parametrize(
    "params",
    [{"method": {"type": "vibes"}}, {"method": {"type": "reinforcement", "reinforcement": {}}}],
)
def test_what_lacks_a_method_or_a_grader_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestFile):
        migrate(params)


@pytest.mark.parametrize(
    ("params", "method"),
    [
        (
            {"training_file": "file-1", "hyperparameters": {"n_epochs": 2}},
            {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}},
        ),
        (
            {"training_file": "file-1", "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}},
            {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}},
        ),
    ],
)
def test_jobs_that_learn_from_given_answers_need_one_file(
    params: dict[str, Any], method: dict[str, Any]
) -> None:
    made = migrate({"model": "gpt-4o-mini"} | params, model="tiny")

    assert made.body == {"model": "tiny", "method": method}
    assert [line.split(":")[0] for line in made.to_do] == ["training_file"]
    assert "validation_file" not in made.text


def test_the_command_writes_the_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "openai.json", tmp_path / "job.toml"
    source.write_text(json.dumps(OPENAIS))

    assert main(["migrate-from-openai", str(source), "-o", str(target)]) == 0
    assert capsys.readouterr().out.startswith(f"Wrote {target}\nTo do:\n  - model: ")
    assert main(["migrate-from-openai", str(source), "-o", str(target)]) == 2
    assert "already exists" in capsys.readouterr().err


VALUES = st.recursive(
    st.text() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(), VALUES, max_size=4))
@pytest.mark.slow
def test_any_table_is_read_back_as_it_was(table: Any) -> None:
    assert tomllib.loads(toml(table)) == table
