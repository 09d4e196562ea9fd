import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from regraft.requests import InvalidRequestFile, read_grader, read_job, read_lines, refuse_masked, set_path
from regraft.resources.graders import read_cases
from regraft.resources.stored_graders import golden_cases

from tests.sdk.conftest import GRADER


def test_paths_are_beside_the_file_and_ids_stay(job_file: Path) -> None:
    text = job_file.read_text().replace('"valid.jsonl"', '"file-abc"')
    job_file.write_text(text)

    job = read_job(job_file)

    assert job.uploads == {"training_file": job_file.parent / "train.jsonl"}
    assert job.body == {
        "model": "tiny",
        "seed": 7,
        "validation_file": "file-abc",
        "method": {
            "type": "reinforcement",
            "reinforcement": {"grader": GRADER, "hyperparameters": {"n_epochs": 3}},
        },
    }


def test_what_is_set_on_the_command_line_is_beside_the_caller(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.jsonl").write_text("{}")
    (tmp_path / "g.py").write_text("def grade(sample, item):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)

    job = read_job(job_file, ["training_file=other.jsonl", "grader=g.py", "validation_file=file-x"])

    assert job.uploads == {"training_file": tmp_path / "other.jsonl"}
    assert job.body["method"]["reinforcement"]["grader"]["type"] == "python"
    assert job.body["validation_file"] == "file-x"


@pytest.mark.parametrize(
    ("name", "text"),
    [("job.json", '{"model": "tiny"}'), ("job.toml", 'model = "tiny"'), ("job.yaml", "model: tiny")],
)
def test_a_job_may_begin_with_a_byte_order_mark(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, "utf-8-sig")

    assert read_job(tmp_path / name).body == {"model": "tiny"}


def test_openais_own_shape_is_taken_as_it_is() -> None:
    asked = {
        "model": "tiny",
        "training_file": "file-a",
        "validation_file": "file-b",
        "method": {"type": "reinforcement", "reinforcement": {"grader": GRADER}},
    }

    assert read_job(asked).body == asked


def test_the_callers_request_is_left_alone() -> None:
    asked = {"training_file": "file-a", "hyperparameters": {"n_epochs": 1}}

    read_job(asked, ["hyperparameters.n_epochs=2"])

    assert asked["hyperparameters"] == {"n_epochs": 1}


def test_yaml_is_read_where_pyyaml_is_and_named_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "job.yaml"
    path.write_text("model: tiny\nhyperparameters: {n_epochs: 2}\n")

    assert read_job(path).body["model"] == "tiny"
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InvalidRequestFile, match="pip install pyyaml"):
        read_job(path)


def test_a_grader_comes_from_code_a_spec_or_a_job_file(tmp_path: Path, job_file: Path) -> None:
    code = tmp_path / "polite.py"
    code.write_text("def grade(sample, item):\n    return 1.0\n")

    assert read_grader(code) == {"type": "python", "name": "polite", "source": code.read_text()}
    assert read_grader(job_file.parent / "grader.json") == GRADER
    assert read_grader(job_file) == GRADER


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("n_epochs", "field=value"),
        ("=1", "field=value"),
        ("model.name=1", "model is not a table"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(assignment: str, problem: str) -> None:
    with pytest.raises(InvalidRequestFile, match=problem):
        set_path({"model": "tiny"}, assignment)


def test_values_are_json_or_text() -> None:
    body: dict[str, Any] = {}
    for assignment in ("seed=1", "suffix=desk", "metadata.team=a", 'response_format={"type": "json_schema"}'):
        set_path(body, assignment)

    assert body == {
        "seed": 1,
        "suffix": "desk",
        "metadata": {"team": "a"},
        "method": {"reinforcement": {"response_format": {"type": "json_schema"}}},
    }


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("job.toml", "model = ", "job.toml: "),
        ("job.json", "[1]", "expected a table"),
        ("job.ini", "a=1", r"\.toml, \.json or \.yaml"),
        (
            "job.toml",
            'training_file = "none.jsonl"',
            r"job\.toml: training_file: no such file: .*none\.jsonl",
        ),
        ("job.toml", 'training_file = "."', r"job\.toml: training_file: .* is a folder; name a file"),
        ("job.toml", 'grader = "none.py"', r"none\.py does not exist"),
        (
            "job.toml",
            "grader = {}\n[method.reinforcement]\ngrader = {}",
            "at the top level and in the method",
        ),
    ],
)
def test_a_file_that_is_no_job_is_named_with_its_mistake(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(InvalidRequestFile, match=problem):
        read_job(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.json", '{"method": {"type": "dpo", "type": "supervised"}}'),
        ("job.yaml", "method: {type: dpo, type: supervised}"),
        ("job.toml", 'method = {type = "dpo", type = "supervised"}'),
    ],
)
def test_a_key_that_a_file_has_twice_is_named(tmp_path: Path, name: str, text: str) -> None:
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(InvalidRequestFile, match=rf"{name}: .*type|duplicate"):
        read_job(path)


def test_a_key_beside_a_merged_mapping_of_yaml_is_no_duplicate(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "job.yaml"
    path.write_text("base: &base {model: tiny, seed: 1}\nmetadata: {<<: *base, seed: 2}\n")

    assert read_job(path).body["metadata"] == {"model": "tiny", "seed": 2}


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [" + ", ".join(["text"] * 100) + "]\n"
        + "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 100)}]\n" for old, new in ("ab", "bc", "cd")),
        "a: &a [*a]\n",
    ],
    ids=["of aliases", "of itself"],
)  # fmt: skip
def test_aliases_of_yaml_that_multiply_are_refused(tmp_path: Path, text: str) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "job.yaml"
    path.write_text(text)

    with pytest.raises(InvalidRequestFile, match=r"job\.yaml: its aliases repeat"):
        read_job(path)


@pytest.mark.parametrize("name", ["job.json", "grader.py", "model.safetensors"])
def test_a_file_that_is_too_large_to_be_a_grader_or_a_job_is_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 43)  # more than fits into memory

    with pytest.raises(InvalidRequestFile, match=f"{name}: (has more than 1 MiB|expected a file that ends)"):
        read_grader(path)


def test_a_file_that_is_too_large_to_be_cases_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text('{"sample": "1"}\n')
    with path.open("r+b") as file:
        file.truncate(1 << 43)

    with pytest.raises(InvalidRequestFile, match="has more than 64 MiB"):
        read_cases(path)


@pytest.mark.parametrize("value", ["5", "[1]", "true"])
def test_a_grader_that_is_neither_a_table_nor_a_path_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"grader = {value}\n")

    with pytest.raises(InvalidRequestFile, match="A grader is a table or the path of a file"):
        read_grader(path)


def test_a_job_file_is_no_grader_of_a_job_file(tmp_path: Path) -> None:
    path = tmp_path / "self.json"
    path.write_text('{"grader": "self.json"}')

    with pytest.raises(InvalidRequestFile, match="this is a job file"):
        read_grader(path)


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"headers": {"key": "***"}}, "headers.key"),
        ({"url": "https://a.example/grade?v=1&token=***"}, "url"),
    ],
)
def test_masks_are_found_wherever_they_are(part: dict[str, Any], where: str) -> None:
    body = {"suffix": "***", "method": {"reinforcement": {"grader": {"graders": {"e": part}}}}}

    with pytest.raises(InvalidRequestFile, match=rf"not show grader\.graders\.e\.{re.escape(where)}: "):
        refuse_masked(json.loads(json.dumps(body)))


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (
            {"method": {"type": "dpo"}},
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 2}}}},
        ),
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": {"batch_size": 4}}}},
            {
                "method": {
                    "type": "supervised",
                    "supervised": {"hyperparameters": {"batch_size": 4, "n_epochs": 2}},
                }
            },
        ),
        ({"model": "tiny"}, {"model": "tiny", "hyperparameters": {"n_epochs": 2}}),
    ],
    ids=["dpo", "supervised", "no method"],
)
def test_a_hyperparameter_is_that_of_the_jobs_method(body: dict[str, Any], changed: dict[str, Any]) -> None:
    assert read_job(body, ["hyperparameters.n_epochs=2"]).body == changed


def test_a_file_of_golden_cases_that_is_not_jsonl_is_named(tmp_path: Path) -> None:
    table = tmp_path / "cases.csv"
    table.write_text("item,sample\n1,2\n")

    with pytest.raises(
        InvalidRequestFile, match=r"cases.csv is not JSONL: the file is CSV with the columns item, "
    ):
        list(read_lines(table))


@pytest.mark.parametrize("read", [read_cases, golden_cases])
def test_all_lines_of_a_file_of_cases_that_are_none_are_named(
    tmp_path: Path, read: Callable[[Path], list[Any]]
) -> None:
    cases = tmp_path / "cases.jsonl"
    good = '{"sample": "a", "expect": 1}'
    cases.write_text("\n".join([good, "{", "3", good, '{"expect": 1}']))

    with pytest.raises(InvalidRequestFile) as refused:
        read(cases)

    said = str(refused.value).splitlines()
    assert [line.split(": ")[1] for line in said] == ["line 2", "line 3", "line 5"]
    cases.write_text("3\n" * 30)
    with pytest.raises(InvalidRequestFile, match=r"line 20: .*\nand 10 more$"):
        read(cases)
