"""Every command of `regraft-server` and its arguments.

Imports nothing but the standard library, so that `--help` is instant. The module of a command is imported once that
command has been chosen.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """The command cannot run with these arguments or settings. Printed below the usage line; the exit status is 2."""


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


@dataclass(frozen=True)
class Command:
    """One line of `regraft-server --help`.

    `handler` is "module:function". The function takes the parsed arguments and returns the exit status; it raises
    UsageError for arguments or settings that it cannot work with. A command with sub-commands adds them in `arguments`.
    """

    name: str
    summary: str
    handler: str
    arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments


class Version(argparse.Action):
    """`--version`. Reads the version of the installed package only when it is asked for."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from importlib.metadata import version  # 30 ms, which --help need not wait for

        print(f"regraft-server {version('regraft-server')}")
        parser.exit()


def build() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="regraft-server", description="Self-hosted reinforcement fine-tuning."
    )
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        added = commands.add_parser(command.name, help=command.summary, description=f"{command.summary}.")
        added.set_defaults(handler=command.handler)
        command.arguments(added)
    return parser


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Import the chosen command's handler and call it. Returns the exit status."""
    module, function = arguments.handler.split(":")
    handler: Callable[[argparse.Namespace], int] = getattr(import_module(module), function)
    try:
        return handler(arguments)
    except UsageError as wrong:
        parser.error(str(wrong))


def _inference(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8100)


def _migrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schema-only", action="store_true", help="leave the first key to the API's start")


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="a checkpoint's id, a tuned model's name, or a job's id")
    parser.add_argument("-o", "--output", type=Path, required=True, help="an empty folder, or a new one")
    parser.add_argument("--merged", action="store_true", help="a whole model instead of an adapter")


def _environments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    build = actions.add_parser("build", help="install one in REGRAFT_GRADER_ENVIRONMENTS, unless it is there")
    build.add_argument("tag", nargs="?", help="the image_tag; default: that of graders that name none")
    build.add_argument(
        "--nltk-data", type=Path, metavar="FOLDER", help="NLTK data to add, as NLTK lays it out"
    )


def _sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older-than-hours", type=float, help="instead of REGRAFT_ORPHAN_HOURS; at least 1")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be deleted")


def _fsck(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a line of JSON for each finding")


def _admin(parser: argparse.ArgumentParser) -> None:
    """Nouns and their verbs; worker/cli/admin.py has the function of each."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="for programs")
    one_project = argparse.ArgumentParser(add_help=False)
    one_project.add_argument("--project", metavar="ID", help="not needed where there is only one")
    nouns = parser.add_subparsers(dest="noun", required=True)

    def verbs(noun: str, help: str) -> Callable[..., argparse.ArgumentParser]:
        parsers = nouns.add_parser(noun, help=help).add_subparsers(dest="verb", required=True)

        def add(name: str, help: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
            added: argparse.ArgumentParser = parsers.add_parser(name, help=help, parents=[common, *parents])
            return added

        return add

    org = verbs("org", "organisations")
    org("create", "make an organisation").add_argument("name")
    org("list", "all organisations")
    rename = org("rename", "from now on; models keep the name they were given")
    rename.add_argument("id")
    rename.add_argument("name")

    project = verbs("project", "projects of organisations")
    create = project("create", "make a project")
    create.add_argument("name")
    create.add_argument("--org", metavar="ID", help="not needed where there is only one")
    project("list", "all projects").add_argument("--org", metavar="ID")
    rename = project("rename", "give a project another name")
    rename.add_argument("id")
    rename.add_argument("name")
    project("archive", "refuse its keys and cancel its jobs").add_argument("id")
    limits = project("limits", "show what a project may use at most, or change it")
    limits.add_argument("id")
    limits.add_argument(
        "--set", metavar="NAME=VALUE", nargs="+", default=[], help="without it the names and values are shown"
    )
    limits.add_argument("--unset", metavar="NAME", nargs="+", default=[], help="revert to the default")

    key = verbs("key", "API keys of projects")
    create = key("create", "make a key, and print it this once", one_project)
    create.add_argument("--name", default="cli")
    create.add_argument("--scope", choices=SCOPES, default="admin")
    create.add_argument("--owner", default="", help="the person it is made for")
    create.add_argument("--expires-in-days", type=_days, metavar="DAYS")
    key("list", "a project's keys, including revoked and expired ones", one_project)
    rotate = key("rotate", "make a new key in the place of an old one")
    rotate.add_argument("id")
    rotate.add_argument(
        "--grace-hours", type=float, default=0, metavar="HOURS", help="keep the old key valid for HOURS"
    )
    key("revoke", "refuse a key from now on").add_argument("id")

    nouns.add_parser("usage", help="what a project uses of its limits", parents=[common, one_project])
    log = nouns.add_parser("audit", help="who changed what, newest first", parents=[common])
    log.add_argument("--project", metavar="ID", help="of this project only")
    log.add_argument("--limit", type=int, default=50)


def _days(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days, at least 1")
    return int(text)


SCOPES = ("read", "write", "admin")  # core.keys.SCOPES, which comes with SQLAlchemy; a test keeps them equal

COMMANDS = (
    Command("up", "run the API, a worker and the reconciler in one process", "worker.cli.service:up"),
    Command("api", "run the HTTP API alone (needs REGRAFT_BROKER_URL)", "worker.cli.service:api"),
    Command(
        "worker", "run a worker and its reconciler (needs REGRAFT_BROKER_URL)", "worker.cli.service:worker"
    ),
    Command(
        "member",
        "help with the runs of another machine's worker (needs REGRAFT_LEADER)",
        "worker.cli.service:member",
    ),
    Command(
        "migrate",
        "migrate the database to this version, and create the first key",
        "worker.cli.service:migrate",
        _migrate,
    ),
    Command(
        "inference",
        "run the inference server alone (needs REGRAFT_INFERENCE_KEY)",
        "worker.cli.service:inference",
        _inference,
    ),
    Command("export", "write a checkpoint as a folder", "worker.cli.service:export", _export),
    Command(
        "admin",
        "manage organisations, projects, API keys and limits; show usage and the audit log",
        "worker.cli.admin:main",
        _admin,
    ),
    Command(
        "environments",
        "build the packages that python graders run with (docs/graders.md)",
        "worker.cli.environments:main",
        _environments,
    ),
    Command(
        "fsck", "read every blob against its hash (docs/storage.md)", "worker.cli.service:check_blobs", _fsck
    ),
    Command(
        "sweep", "delete blobs that nothing refers to (docs/storage.md)", "worker.cli.service:sweep", _sweep
    ),
)
