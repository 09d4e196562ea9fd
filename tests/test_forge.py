"""The files for the forge and the pages beside them name commands, folders and versions that exist."""

import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
KINDS = [kind["directory"] for kind in PYPROJECT["tool"]["towncrier"]["type"]]
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


def test_each_job_with_all_tests_has_the_pooler_that_they_would_be_skipped_without() -> None:
    commands = [step.get("run", "") for workflow in WORKFLOWS for step in steps(workflow)]
    before = [first for first, second in pairwise(commands) if second.startswith("make test-part")]

    assert before
    assert set(before) == {"make pgbouncer"}


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


FRAGMENTS = [path for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]


def test_the_first_version_has_a_page_and_no_fragments() -> None:
    """Nothing was released that it could have changed or mended."""
    assert FRAGMENTS == [] or PYPROJECT["project"]["version"] != "0.1.0"


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.name)
def test_a_fragment_of_the_changelog_has_a_kind_and_a_sentence(fragment: Path) -> None:
    assert re.fullmatch(rf"(\d+|\+[a-z0-9-]+)\.({'|'.join(KINDS)})\.md", fragment.name)
    text = fragment.read_text()
    assert text.strip().endswith((".", ")"))
    assert not text.startswith(("-", "*", "#"))


def test_the_kinds_of_fragments_are_those_that_their_page_names() -> None:
    page = (ROOT / "changelog.d/README.md").read_text()
    [listed] = re.findall(r"KIND is ([^.]*)\.", page, flags=re.DOTALL)

    assert re.findall(r"`(\w+)`", listed) == KINDS


def test_the_chart_has_the_version_of_the_packages() -> None:
    chart = loaded(ROOT / "helm/regraft/Chart.yaml")

    assert {chart["version"], chart["appVersion"]} == {PYPROJECT["project"]["version"]}


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "RELEASE.md", "CHANGELOG.md", "SECURITY.md"]
)
def test_links_and_targets_of_the_root_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text()

    links = {link.split("#")[0] for link in re.findall(r"\]\(([^):]+)\)", text)} - {""}
    assert links or page == "RELEASE.md"
    assert {link for link in links if not (ROOT / link).exists()} == set()
    assert set(re.findall(r"\bmake ([a-z][a-z-]+)(?= *[`(]|  | [A-Z]+=)", text)) <= TARGETS


def test_the_first_pages_are_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
