"""What the documents name exists. tests/e2e/test_cli.py runs what they show."""

import re
from pathlib import Path

import regraft
from regraft import Regraft
from regraft.cli.parser import EXIT_CODES

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = [
    command
    for page in ("cli", "migrating")
    for command in re.findall(r"^\$ (regraft .*)$", (DOCS / f"howto/{page}.md").read_text(), flags=re.M)
]


def test_there_are_commands_of_every_group() -> None:
    assert {line.split()[1] for line in SHOWN} >= {
        "login", "files", "validate", "graders", "jobs", "rollouts", "checkpoints", "models", "migrate-from-openai",
        "completion",
    }  # fmt: skip


def test_the_exit_codes_are_those_of_the_help() -> None:
    text = (DOCS / "howto/cli.md").read_text()

    for code, meaning in re.findall(r"^ *(\d+)  (.*)$", EXIT_CODES, flags=re.M):
        assert f"| {code} | {meaning} |" in text


def test_what_the_librarys_document_names_exists() -> None:
    text = (DOCS / "howto/sdk.md").read_text()
    client = Regraft(base_url="http://127.0.0.1:1", api_key="k")

    named = re.findall(r"client\.(\w+)(?:\.(\w+))?\(", text)
    assert len(named) > 8
    for resource, method in named:
        assert hasattr(getattr(client, resource), method) if method else hasattr(client, resource)
    for error in re.findall(r"`([A-Z]\w+)`", text.split("## Errors")[1].split("## Without")[0]):
        assert hasattr(regraft, error)
