"""The files for the forge name commands, folders and versions that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(workflow)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_of_the_makefile_and_nothing_else(workflow: Path) -> None:
    commands = [step["run"] for step in steps(workflow) if "run" in step]

    assert commands
    assert {command.split()[0] for command in commands} == {"make"}
    assert {command.split()[1] for command in commands} <= TARGETS


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_have_a_version(workflow: Path) -> None:
    assert all(
        re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in steps(workflow) if "uses" in step
    )


def test_hooks_are_commands_of_make_check() -> None:
    checks = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    hooks = [hook for repo in loaded(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]

    assert hooks
    assert all(hook["entry"] in checks for hook in hooks)


def test_updates_are_looked_for_where_pins_are() -> None:
    folders = {update["directory"] for update in loaded(ROOT / ".github/dependabot.yml")["updates"]}

    assert folders == {"/constraints", "/console", "/"}
    assert all((ROOT / folder.strip("/")).is_dir() for folder in folders)
