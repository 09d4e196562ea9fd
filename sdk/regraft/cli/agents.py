"""The commands of agents."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from regraft.agents import Agent, Played, run
from regraft.cli.output import answer
from regraft.cli.shared import DONE, NO, Refused, connect


def agents_run(arguments: argparse.Namespace) -> int:
    """Exit code 1: the job failed or was cancelled."""
    function = function_of(arguments.function)
    played = run(arguments.job_id, function, arguments.concurrency, client=connect())
    answer(arguments, vars(played), lambda: _text(played))
    return DONE if played.job_status in ("succeeded", "paused") else NO


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
