"""The commands of agents."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from regraft.agent_trials import Trial, try_agent
from regraft.agents import Agent, Played, run
from regraft.cli.output import answer, shortened, table
from regraft.cli.shared import DONE, NO, WIDE, Refused, connect, number


def agents_run(arguments: argparse.Namespace) -> int:
    """Exit code 1: the job failed or was cancelled."""
    function = function_of(arguments.function)
    played = run(arguments.job_id, function, arguments.concurrency, client=connect())
    answer(arguments, vars(played), lambda: _text(played))
    return DONE if played.job_status in ("succeeded", "paused") else NO


def agents_try(arguments: argparse.Namespace) -> int:
    """Exit code 1: the function has raised an error."""
    function, client = function_of(arguments.function), connect()
    rows = [{}] if arguments.rows is None else _rows(arguments.rows, arguments.limit)
    trials = list(try_agent(function, arguments.model, rows, client=client))
    answer(arguments, [vars(one) for one in trials], lambda: _table(trials))
    return NO if any(one.error for one in trials) else DONE


def _rows(path: str, limit: int) -> list[dict[str, Any]]:
    """The first rows of a file; a limit of 0 means all. Raises Refused: a line is not a JSON object."""
    if limit < 0:
        raise Refused(f"--limit is {limit}, and the least is 0, which means all rows.")
    rows = []
    with Path(path).open("rb") as lines:
        for number, line in enumerate(islice((one for one in lines if one.strip()), limit or None), 1):
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError) as cause:
                raise Refused(f"Row {number} of {path} is not JSON: {cause}.") from cause
            if not isinstance(row, dict):
                raise Refused(f"Row {number} of {path} is not a JSON object.")
            rows.append(row)
    return rows


def _table(trials: Sequence[Trial]) -> str:
    head = ("reward", "turns", "tokens read", "tokens written", "branches", "seconds", "error")
    return table(
        head,
        [
            (
                number(one.reward),
                one.turns,
                one.prompt_tokens,
                one.completion_tokens,
                one.branches,
                f"{one.seconds:.1f}",
                shortened(one.error, WIDE),
            )
            for one in trials
        ],
    )


def _text(played: Played) -> str:
    return f"{played.ready} episode(s) played, {played.failed} failed; the job is {played.job_status}"


def function_of(name: str) -> Agent:
    """The function MODULE:FUNCTION, of a module in the working directory or one that is installed.

    Raises:
        Refused: there is none.
    """
    module, colon, function = name.partition(":")
    if not module or not colon or not function:
        raise Refused(f"'{name}' is not MODULE:FUNCTION, such as agent:play.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(import_module(module), function, None)
    except ModuleNotFoundError as missing:
        raise Refused(f"The module '{module}' cannot be imported: {missing}.") from missing
    if not callable(found):
        raise Refused(f"The module '{module}' has no function '{function}'.")
    agent: Agent = found
    return agent
