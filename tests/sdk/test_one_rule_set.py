"""`regraft validate`, `regraft migrate-from-openai` and creating the job come to the same verdict on the same files."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from regraft import InvalidDataset, Regraft
from regraft.cli import main
from regraft.requests import JobRequest, read_job
from regraft.resources.jobs import validate_local

from tests.sdk.conftest import GRADER, ROWS, House

RFT = "o4-mini-2025-04-16"
# As the guide prints it: no name on any grader, a reasoning effort, a schema.
GUIDES = {
    "type": "multi",
    "graders": {
        "exact": {key: value for key, value in GRADER.items() if key != "name"},
        "close": {
            "type": "text_similarity",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
            "evaluation_metric": "fuzzy_match",
            "pass_threshold": 0.8,
        },
    },
    "calculate_output": "0.5 * exact + 0.5 * close",
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


def job(
    grader: dict[str, Any] = GRADER, inside: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    reinforcement = {"grader": grader} | (inside or {})
    return {"model": RFT, "method": {"type": "reinforcement", "reinforcement": reinforcement}} | fields


def efforts(**values: Any) -> dict[str, Any]:
    return {"hyperparameters": values}


GOOD = {
    "the guide's job": job(GUIDES, efforts(reasoning_effort="medium") | {"response_format": FORMAT}),
    "a job of Azure's": job(trainingType="globalStandard", inside={"tools": [], "max_episode_steps": None}),
    "a grader of tools": job(GRADER | {"input": "{{sample.output_tools[0].function.name}}"}),
    "a suffix with a blank": job(suffix="my desk v1.2"),
    "a model of this server": job(model="tiny", seed=7, metadata={"team": "a"}),
}
BAD: dict[str, Any] = {
    "a preference job with a beta of 3": {
        "model": RFT,
        "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 3}}},
    },
    "a formula with an unknown name": job(GUIDES | {"calculate_output": "exact + far"}),
    "a template that does not parse": job(GRADER | {"input": "{{sample.nothing}}"}),
    "an unknown grader": job(GRADER | {"type": "vibes"}),
    "a judge that nobody named": job(
        {"type": "score_model", "name": "j", "model": "gpt-4o", "input": [{"role": "user", "content": "x"}]}
    ),
    "epochs out of bounds": job(inside=efforts(n_epochs=51)),
    "an unknown effort": job(inside=efforts(reasoning_effort="extreme")),
    "a schema that is none": job(inside={"response_format": FORMAT | {"json_schema": {"name": "x"}}}),
    "an unknown integration": job(integrations=[{"type": "wandb", "wandb": {"project": "p"}}]),
    "a seed that is text": job(seed="7"),
}
LINES = {"train.jsonl": ROWS, "valid.jsonl": ROWS[:2]}


@pytest.fixture
def desk(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the datasets, for a command line that is logged in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGRAFT_BASE_URL", house.base_url)
    monkeypatch.setenv("REGRAFT_API_KEY", house.key)
    for name, rows in LINES.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def created(house: House, spec: Any) -> bool:
    with OpenAI(base_url=house.base_url, api_key=house.key, max_retries=0) as client:
        ids = {
            field: client.files.create(file=Path(name), purpose="fine-tune").id
            for field, name in (("training_file", "train.jsonl"), ("validation_file", "valid.jsonl"))
        }
        try:
            client.post("/fine_tuning/jobs", body=spec | ids, cast_to=object)
        except openai.APIStatusError:
            return False
    return True


def validated(desk: Path, spec: dict[str, Any]) -> bool:
    files = {"training_file": "train.jsonl", "validation_file": "valid.jsonl"}
    (desk / "job.json").write_text(json.dumps(spec | files))
    return main(["validate", "job.json"]) == 0


def migrated(desk: Path, spec: Any) -> bool:
    (desk / "openai.json").write_text(
        json.dumps(spec | {"training_file": "file-1", "validation_file": "file-2"})
    )
    return main(["migrate-from-openai", "openai.json", "-o", "job.toml"]) == 0


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD.keys())
def test_a_good_job_is_good_for_all_three(desk: Path, house: House, spec: dict[str, Any]) -> None:
    assert [created(house, spec), validated(desk, spec), migrated(desk, spec)] == [True] * 3
    assert main(["validate", "job.toml"]) == 0


@pytest.mark.parametrize("spec", BAD.values(), ids=BAD.keys())
def test_a_bad_job_is_bad_for_all_three(desk: Path, house: House, spec: Any) -> None:
    assert [created(house, spec), validated(desk, spec), migrated(desk, spec)] == [False] * 3


CONVERSATION = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {
    "input": {"messages": [{"role": "user", "content": "a"}]},
    "preferred_output": [{"role": "assistant", "content": "b"}],
    "non_preferred_output": [{"role": "assistant", "content": "c"}],
}
OFFLINE: dict[str, tuple[dict[str, Any], Any]] = {
    "a supervised job": ({"model": RFT, "method": {"type": "supervised"}}, CONVERSATION),
    "the supervised quickstart": ({"model": RFT}, CONVERSATION),
    "a preference job": (
        {"model": RFT, "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.1}}}},
        PAIR,
    ),
}


@pytest.mark.parametrize(("spec", "row"), OFFLINE.values(), ids=OFFLINE.keys())
def test_a_job_with_given_answers_is_good_for_all_three(
    desk: Path, house: House, spec: dict[str, Any], row: dict[str, Any]
) -> None:
    for name in LINES:
        (desk / name).write_text((json.dumps(row) + "\n") * 10)

    assert [created(house, spec), validated(desk, spec), migrated(desk, spec)] == [True] * 3


def test_rows_of_another_method_are_reported_with_their_lines(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "train.jsonl").write_text((json.dumps(PAIR) + "\n") * 10)
    (desk / "job.json").write_text(json.dumps({"model": RFT, "training_file": "train.jsonl"}))

    assert main(["validate", "job.json"]) == 1
    assert "train.jsonl:1: input: is not a key of this format" in capsys.readouterr().out
    assert main(["validate", "train.jsonl", "--method", "dpo"]) == 0


def test_rows_with_answers_are_those_of_distillation_by_logits(desk: Path) -> None:
    row = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
    (desk / "train.jsonl").write_text((json.dumps(row) + "\n") * 10)

    def distillation(mode: str) -> JobRequest:
        method = {"type": "distillation", "distillation": {"mode": mode, "teacher": {"model": "larger"}}}
        return read_job({"model": RFT, "method": method, "training_file": "train.jsonl"})

    validate_local(distillation("logits"))
    with pytest.raises(InvalidDataset, match="the last message must be from the user"):
        validate_local(distillation("on_policy"))


def test_the_refusal_is_the_servers(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validated(desk, BAD["a formula with an unknown name"])

    assert "job.json: method.reinforcement.grader" in capsys.readouterr().out


def test_hyperparameters_beside_a_method_are_refused_by_name_and_migration_says_that_they_are_left_out(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = job() | {"training_file": "file-1", "validation_file": "file-2"} | efforts(n_epochs=3)
    (desk / "job.json").write_text(json.dumps(both))

    for command in (["validate", "job.json"], ["jobs", "create", "-f", "job.json"]):
        assert main(command) != 0
        said = capsys.readouterr()
        assert "The top-level 'hyperparameters' is deprecated" in said.out + said.err
    assert main(["migrate-from-openai", "job.json", "-o", "job.toml"]) == 0
    assert "hyperparameters at the top level is left out" in capsys.readouterr().out


def test_a_jobs_rows_are_checked_with_it(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / "train.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')

    assert not validated(desk, job())
    assert "the grader reads {{item.answer}}" in capsys.readouterr().out


def test_a_grader_that_the_server_refuses_is_no_good_for_a_dataset(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "grader.json").write_text(json.dumps(GUIDES | {"calculate_output": "exact + far"}))

    assert main(["validate", "train.jsonl", "--grader", "grader.json"]) == 1
    assert "grader.json: grader.calculate_output" in capsys.readouterr().out


def test_without_a_server_rows_are_checked_and_the_rest_is_said_not_to_be(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGRAFT_BASE_URL", "http://127.0.0.1:1/v1")
    (desk / "grader.json").write_text(json.dumps(GRADER))

    assert main(["validate", "train.jsonl", "--grader", "grader.json"]) == 0
    assert "grader.json: the server is unavailable" in capsys.readouterr().err


def test_the_client_validates_without_uploading(client: Regraft, job_file: Path) -> None:
    answer = client.jobs.validate(job_file, set=["hyperparameters.reasoning_effort=low"])

    assert answer["model"] == "tiny"
    assert answer["method"]["reinforcement"]["grader"] == GRADER
    assert "reasoning_effort 'low' has no effect" in answer["warnings"][0]
    assert list(client.files.list()) == []


def test_the_servers_warnings_are_printed_wherever_a_job_is_checked(
    desk: Path, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_file.write_text(job_file.read_text() + "reasoning_effort = 'low'\n")

    assert main(["validate", str(job_file)]) == 0
    assert f"{job_file}: warning: reasoning_effort 'low' has no effect" in capsys.readouterr().out
    assert main(["jobs", "create", "-f", str(job_file), "--estimate"]) == 0
    assert "\nwarning: reasoning_effort 'low' has no effect" in capsys.readouterr().out


def test_a_part_that_the_formula_of_its_grader_does_not_name_is_a_warning(
    client: Regraft, job_file: Path
) -> None:
    parts = {"good": GRADER, "idle": GRADER}
    multi = {"type": "multi", "name": "both", "graders": parts, "calculate_output": "2 * good"}
    (job_file.parent / "grader.json").write_text(json.dumps(multi))

    assert client.jobs.validate(job_file)["warnings"] == [
        "the part 'idle' of the grader 'both' has no effect: calculate_output does not name it."
    ]


def test_a_secret_of_an_endpoint_is_not_in_the_answer(client: Regraft, job_file: Path) -> None:
    endpoint = {"type": "endpoint", "name": "e", "url": "https://example.org/", "headers": {"k": "secret"}}
    (job_file.parent / "grader.json").write_text(json.dumps(endpoint))

    with pytest.raises(openai.BadRequestError) as refused:  # no host is allowed here
        client.jobs.validate(job_file)
    assert "secret" not in str(refused.value)
