"""Runs the commands of the table (regraft.cli.parser). Results go to stdout, everything else to stderr."""

import argparse
import getpass
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import openai

from regraft import config
from regraft.cli import (
    agents,
    coding_agents,
    evals,
    files,
    graders,
    jobs,
    models,
    passports,
    pipelines,
    results,
    service,
)
from regraft.cli.failures import Failure, failure_of
from regraft.cli.output import answer, page_of, plain, say, table, when
from regraft.cli.shared import DONE, INTERRUPTED, Refused, connect
from regraft.cli.table import Command
from regraft.errors import NotARegraftServer
from regraft.sync.client import Regraft


def run(arguments: argparse.Namespace) -> int:
    """Run the command of the arguments; errors become a line on stderr and an exit code."""
    as_json = arguments.output == "json"
    try:
        code = function_of(arguments.command)(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except EOFError:  # Ctrl-D at a prompt
        say("")
        return INTERRUPTED
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        _complain(as_json, failure)
        return failure.exit_code


def _complain(as_json: bool, failure: Failure) -> None:
    fields = {name: getattr(failure, name) for name in ("message", "code", "param", "request_id")}
    if as_json:
        say(json.dumps({"error": fields}, ensure_ascii=False))
        return
    details = ", ".join(part for part in (failure.code, failure.param, failure.request_id) if part)
    say(f"regraft: {failure.message}{f' ({details})' if details else ''}")


def login(arguments: argparse.Namespace) -> int:
    url = arguments.base_url or os.environ.get("REGRAFT_BASE_URL")
    if url is None:
        if not sys.stdin.isatty():
            raise Refused("No server: set --base-url URL or REGRAFT_BASE_URL.")
        url = input("Server [http://127.0.0.1:8000]: ").strip() or "http://127.0.0.1:8000"
    # Never an argument: other users can read command lines.
    key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip() or os.environ.get("REGRAFT_API_KEY", "")
    if not key:
        raise Refused("No API key on stdin.")
    chosen = config.Login(config.normal(url), key)
    count = _models_of(chosen)
    path = config.save(chosen)
    shown = {"base_url": chosen.base_url, "config": str(path), "models": count}
    return answer(
        arguments, shown, lambda: f"Logged in to {chosen.base_url} ({count} models); saved in {path}"
    )


def _models_of(login: config.Login) -> int:
    """The number of models. Login verifies with this request that the server is a regraft server."""
    try:
        listed = Regraft(base_url=login.base_url, api_key=login.api_key).models.list()
    except openai.NotFoundError as error:
        raise NotARegraftServer(
            f"{login.base_url} does not answer as a regraft server: it has no models"
        ) from error
    if listed.object != "list":
        raise NotARegraftServer(f"{login.base_url} does not answer as a regraft server: it lists no models")
    return len(listed.data)


def _fields(value: Any) -> str:
    shown = {key: one for key, one in plain(value).items() if one is not None}
    width = max(map(len, shown))
    return "\n".join(f"{key:<{width}}  {one}" for key, one in shown.items())


TEXTS: Mapping[str, Callable[[Any], str]] = {
    "alias": models.alias_text,
    "fields": _fields,
    "pipeline": pipelines.text_of,
    "preview": jobs.preview_text,
}


def function_of(command: Command) -> Callable[[argparse.Namespace], int]:
    """The function that runs a command of the table."""
    if command.columns or command.text:
        return partial(_listed if command.columns else _called, command)
    homes = (
        sys.modules[__name__], agents, coding_agents, evals, files, graders, jobs, models, passports, pipelines,
        results, service,
    )  # fmt: skip
    found: Callable[[argparse.Namespace], int] = next(
        getattr(home, command.run) for home in homes if hasattr(home, command.run)
    )
    return found


def _called(command: Command, arguments: argparse.Namespace) -> int:
    ids = [getattr(arguments, name) for name in command.ids]
    result = attrgetter(command.call)(connect())(*ids)
    if result is None:
        result = {"id": ids[0], "deleted": True}
    text = TEXTS.get(command.text) or (lambda result: command.text.format_map(plain(result)))
    return answer(arguments, result, lambda: text(result))


def _listed(command: Command, arguments: argparse.Namespace) -> int:
    limit = getattr(arguments, "limit", None)
    page = command.limit if limit is None else page_of(limit)
    ids = [getattr(arguments, name) for name in command.ids]
    items = attrgetter(command.call)(connect())(*ids, **({} if page is None else {"limit": page}))
    listed = list(islice(items, limit))
    columns = command.columns or {}
    rows = [[_cell(item, cell) for cell in columns.values()] for item in listed]
    return answer(arguments, listed, lambda: table(list(columns), rows))


def _cell(item: Any, cell: str | Callable[[Any], object]) -> object:
    if callable(cell):
        return cell(item)
    value = getattr(item, cell)
    return when(value) if cell.endswith("_at") else value
