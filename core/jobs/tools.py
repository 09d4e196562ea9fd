"""Episodes of a job: the tools that answers call, or the user's own agent; and the functions that its rows have."""

from collections.abc import Mapping, Sequence
from typing import Any

from core.jobs.params import TOOLS_PARAM

MAX_STEPS = 1_000  # policy calls of an episode
DEFAULT_STEPS = 10


def names_of(body: Mapping[str, Any]) -> list[str]:
    """The names of a job's tools; empty: calls of functions are graded, and not executed."""
    return [tool["name"] for tool in body.get("tools") or ()]


def is_played_by_agent(body: Mapping[str, Any]) -> bool:
    """Whether the user's own agent plays the episodes of the job."""
    return body.get("environment") is not None


def has_episodes(body: Mapping[str, Any]) -> bool:
    return bool(names_of(body)) or is_played_by_agent(body)


def steps_of(body: Mapping[str, Any]) -> int:
    """`max_episode_steps` of a job: the calls of the policy in an episode."""
    return int(body.get("max_episode_steps") or DEFAULT_STEPS) if has_episodes(body) else 1


Functions = Sequence[tuple[int, Sequence[Mapping[str, Any]]]]
"""The line and `tools` of each row of a file."""


def tools_mismatch(body: Mapping[str, Any], train: Functions, valid: Functions) -> tuple[str, str] | None:
    """The first function of a row that no tool of the job executes, or tool of which no training row has the schema.

    Returns:
        The `param` and the problem. None: there is none, or the job has no tools.
    """
    for param, rows in (("training_file", train), ("validation_file", valid)):
        if (problem := unknown_function(body, rows)) is not None:
            return param, problem
    known = {tool["function"]["name"] for _, functions in train for tool in functions}
    for number, name in enumerate(names_of(body)):
        if name not in known:
            return (
                f"{TOOLS_PARAM}[{number}].name",
                f"The job has the tool '{name}', and no row of the training file has its schema in 'tools'.",
            )
    return None


def unknown_function(body: Mapping[str, Any], rows: Functions) -> str | None:
    """The problem of the first function of a row that no tool of the job executes; None also without tools."""
    tools = names_of(body)
    for line, functions in rows if tools else ():
        if unknown := [name for tool in functions if (name := tool["function"]["name"]) not in tools]:
            return (
                f"Line {line} has the function '{unknown[0]}', and the job has no tool of this name. Add it to "
                f"{TOOLS_PARAM}, or remove it from the row."
            )
    return None
