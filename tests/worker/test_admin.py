"""`regraft-server admin`, as an operator types it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.database.engine import Database
from core.database.tables import MemoryLimit, now
from core.errors import InvalidApiKey
from core.jobs import usage
from core.settings import Settings
from core.tenancy import keys
from core.tenancy.limits import Limits
from tests import factories
from worker.cli import admin
from worker.cli.parser import build


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, default_limits=Limits(queued_jobs=10))


@pytest.fixture
def database(sqlite_database: Database) -> Database:
    return sqlite_database


@pytest.fixture
def type_(
    settings: Settings, database: Database, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Type a command; returns its exit code, and what it printed to stdout and stderr."""

    def type_(line: str) -> tuple[int, str, str]:
        code = admin.run(build().parse_args(["admin", *line.split()]), settings)
        out, err = capsys.readouterr()
        return code, out, err

    return type_


@pytest.fixture
def ask(type_: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """The same, as a program does."""

    def ask(line: str) -> Any:
        code, out, err = type_(f"{line} --json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return ask


def test_from_nothing_to_a_key_that_works(ask: Callable[..., Any], database: Database) -> None:
    organization = ask("org create acme")
    project = ask(f"project create support --org {organization['id']}")
    made = ask("key create --scope write --owner ana --expires-in-days 30")  # there is one project only

    with database.read() as session:
        key, opened = keys.authenticate(session, made["key"])
    assert (opened.id, key.id, key.scope, key.owner) == (project["id"], made["id"], "write", "ana")
    assert [one["name"] for one in ask("org list")] == ["acme"]
    assert [one["name"] for one in ask("project list")] == ["support"]


def test_keys_are_listed_rotated_and_revoked(ask: Callable[..., Any], database: Database) -> None:
    ask("org create acme")
    ask("project create support")
    old, doomed = ask("key create --name old"), ask("key create --name doomed")

    new = ask(f"key rotate {old['id']} --grace-hours 2")
    ask(f"key revoke {doomed['id']}")

    listed = ask("key list")
    assert {one["id"]: one["state"] for one in listed} == {
        old["id"]: "active",
        new["id"]: "active",
        doomed["id"]: "revoked",
    }
    assert "key" not in listed[0]
    with database.read() as session, pytest.raises(InvalidApiKey):
        keys.authenticate(session, doomed["key"])


def test_limits_are_set_unset_and_shown_with_the_defaults(ask: Callable[..., Any]) -> None:
    ask("org create acme")
    project = ask("project create support")["id"]

    shown = ask(f"project limits {project} --set running_jobs=2 gpu_seconds_per_30_days=3600.5")
    without = ask(f"project limits {project} --unset running_jobs")

    assert (shown["running_jobs"], shown["gpu_seconds_per_30_days"], shown["queued_jobs"]) == (2, 3600.5, 10)
    assert (without["running_jobs"], without["gpu_seconds_per_30_days"]) == (None, 3600.5)
    assert ask(f"project limits {project}") == without


@pytest.mark.parametrize(
    "change", ["--set jobs=2", "--set running_jobs=many", "--set running_jobs", "--unset jobs"]
)
def test_a_limit_that_is_none_is_refused_with_those_that_are(
    type_: Callable[..., tuple[int, str, str]], ask: Callable[..., Any], change: str
) -> None:
    ask("org create acme")
    project = ask("project create support")["id"]

    code, _, err = type_(f"project limits {project} {change}")

    assert code == 1
    assert "requests_per_minute" in err


def test_usage_stands_beside_its_maximum(ask: Callable[..., Any], database: Database) -> None:
    ask("org create acme")
    project = ask("project create support")["id"]
    with database.write() as session:
        usage.add_usage(session, project, model="tiny", gpu_seconds=12.5, grader_tokens=0)

    rows = {row["limit"]: row for row in ask("usage")}

    assert rows["gpu_seconds_per_30_days"] == {
        "limit": "gpu_seconds_per_30_days",
        "used": 12.5,
        "maximum": None,
    }
    assert (rows["queued_jobs"]["used"], rows["queued_jobs"]["maximum"]) == (0, 10)


def test_a_project_has_a_queue_and_a_priority_in_kueue(
    ask: Callable[..., Any], type_: Callable[..., tuple[int, str, str]]
) -> None:
    ask("org create acme")
    project = ask("project create support")["id"]
    nothing = {"queue": None, "priority_class": None}

    assert ask(f"project kueue {project}") == nothing
    ask(f"project kueue {project} --queue team-a")
    both = ask(f"project kueue {project} --priority-class urgent")
    assert both == {"queue": "team-a", "priority_class": "urgent"} == ask(f"project kueue {project}")
    assert ask(f"project kueue {project} --queue= --priority-class=") == nothing
    status, _, said = type_(f"project kueue {project} --queue Team_A")
    assert (status, said.split(":")[0]) == (1, "queue")


def test_the_operators_changes_are_in_the_projects_log(ask: Callable[..., Any]) -> None:
    ask("org create acme")
    ask("org create others")
    organization = ask("org list")[0]["id"]
    project = ask(f"project create support --org {organization}")["id"]
    ask(f"project limits {project} --set running_jobs=1")
    ask(f"project rename {project} help")
    ask(f"key create --project {project}")
    ask(f"project archive {project}")

    mine, everything = ask(f"audit --project {project}"), ask("audit")

    assert [entry["action"] for entry in reversed(mine)] == [
        "project.created",
        "project.limits_changed",
        "project.renamed",
        "api_key.created",
        "project.archived",
    ]
    assert {entry["actor"] for entry in everything} == {"operator"}
    assert len(everything) == len(mine) + 2
    assert [entry["action"] for entry in ask("audit --limit 1")] == ["project.archived"]


def test_an_archived_project_is_not_the_one_that_is_meant(
    ask: Callable[..., Any], type_: Callable[..., tuple[int, str, str]]
) -> None:
    ask("org create acme")
    first, _ = ask("project create one"), ask("project create two")

    assert type_("key create")[0] == 1
    ask(f"project archive {first['id']}")

    assert type_("key create")[0] == 0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("org rename org-x name", "No such organization: org-x"),
        ("project create name --org org-x", "No such organization: org-x"),
        ("project list --org org-x", "No such organization: org-x"),
        ("project rename proj_x name", "No such project: proj_x"),
        ("project archive proj_x", "No such project: proj_x"),
        ("project limits proj_x", "No such project: proj_x"),
        ("key create --project proj_x", "No such project: proj_x"),
        ("key list --project proj_x", "No such project: proj_x"),
        ("key rotate key_x", "No such API key: key_x"),
        ("key revoke key_x", "No such API key: key_x"),
        ("usage --project proj_x", "No such project: proj_x"),
        ("audit --project proj_x", "No such project: proj_x"),
        ("usage", "set --project"),
        ("memory forget m --device H100", "No lowered memory sizes of the model m on H100."),
    ],
)
def test_what_is_not_there_is_named_and_the_exit_code_is_one(
    type_: Callable[..., tuple[int, str, str]], command: str, said: str
) -> None:
    code, out, err = type_(command)

    assert (code, out) == (1, "")
    assert said in err


def test_sizes_that_were_lowered_for_a_model_are_listed_while_jobs_begin_with_them_and_forgotten(
    ask: Callable[..., Any], database: Database
) -> None:
    lowered = {
        "token_budget": 512,
        "cache_bytes": None,
        "sleeps": True,
        "checkpointed": False,
        "has_smallest_engine": True,
    }
    week = 7 * 24 * 3600
    with database.write() as session:
        for device, updated in (("H100", 100), ("L4", 200), ("T4", -week - 60)):
            session.add(
                MemoryLimit(model="m", device=device, workload="w", sizes=lowered, updated_at=now() + updated)
            )

    listed = ask("memory list")
    forgotten = ask("memory forget m --device H100")

    assert [one["device"] for one in listed] == ["L4", "H100"]
    assert listed[1]["lowered"] == {"token_budget": 512, "sleeps": True, "has_smallest_engine": True}
    assert listed[1]["expires_at"] == pytest.approx(now() + week + 100, abs=60)
    assert forgotten == [listed[1]]
    assert [one["device"] for one in ask("memory list")] == ["L4"]


def test_people_get_tables(type_: Callable[..., tuple[int, str, str]], database: Database) -> None:
    with database.write() as session:
        factories.project(session, name="support")

    _, listed, _ = type_("project list")
    _, made, _ = type_("key create --name laptop")

    assert listed.splitlines()[0].split()[:2] == ["id", "name"]
    assert "support" in listed.splitlines()[1]
    assert re.search(r"^key +rg-\S{43}$", made, re.MULTILINE)
    assert type_("audit --project " + listed.splitlines()[1].split()[0])[1].count("api_key.created") == 1
