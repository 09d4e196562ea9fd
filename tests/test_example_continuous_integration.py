"""The workflow and the tasks in examples/continuous_integration have commands that there are."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from regraft.cli import main, parser

FOLDER = Path(__file__).parents[1] / "examples/continuous_integration"
WORKFLOW: dict[Any, Any] = yaml.safe_load((FOLDER / "evals_gate.yml").read_text())
TASKS: dict[str, Any] = json.loads((FOLDER / "tasks.json").read_text())
BAD_ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def commands_of_workflow() -> Iterator[list[str]]:
    for step in WORKFLOW["jobs"]["gate"]["steps"]:
        for line in step.get("run", "").splitlines():
            if line.strip().startswith("regraft "):
                yield shlex.split(line.split(" > ")[0])[1:]


def test_the_commands_of_the_workflow_are_the_clients() -> None:
    parsed = [parser.build().parse_args(command) for command in commands_of_workflow()]

    assert len(parsed) == 3


def test_the_workflow_sets_each_variable_that_its_commands_read() -> None:
    job = WORKFLOW["jobs"]["gate"]
    script = "\n".join(step.get("run", "") for step in job["steps"])
    read = set(re.findall(r"\$(\w+)", script)) - set(re.findall(r"^\s*(\w+)=\$", script, re.MULTILINE))

    assert read | {"REGRAFT_BASE_URL", "REGRAFT_API_KEY"} == job["env"].keys()


@pytest.mark.parametrize("task", TASKS["tasks"], ids=lambda task: task["label"])
def test_the_arguments_of_a_task_are_the_clients(task: dict[str, Any]) -> None:
    values = {f"${{input:{one['id']}}}": one.get("default", "name") for one in TASKS["inputs"]}

    arguments = [values.get(argument, argument) for argument in task["args"]]

    assert task["command"] == "regraft"
    assert not [argument for argument in arguments if argument.startswith("${input:")]
    parser.build().parse_args(arguments)


def test_the_editor_finds_the_line_of_a_problem_in_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text(BAD_ROW)
    pattern = TASKS["tasks"][1]["problemMatcher"]["pattern"]["regexp"]

    main(["validate", "bad.jsonl"])

    found = re.search(pattern, capsys.readouterr().out, re.MULTILINE)
    assert found is not None
    assert found.groups()[:2] == ("bad.jsonl", "1")
