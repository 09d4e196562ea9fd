"""Episodes of a job: the tools that answers call, or the user's own agent; and the functions that its rows have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.jobs.params import TOOLS_PARAM
from core.storage.datasets import Example

MAX_STEPS = 1_000  # policy calls of an episode
DEFAULT_STEPS = 10


Function = Mapping[str, Any]
"""In OpenAI's format."""


def _python_function(tool: Mapping[str, Any]) -> Function:
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {
        "type": "function",
        "function": {"name": tool["name"], **described, "parameters": tool["parameters"]},
    }


# From the kind of a tool to the functions whose schemas it brings along. Those of an HTTP tool are in the rows.
_FUNCTIONS: Mapping[str, Callable[[Mapping[str, Any]], Sequence[Function]]] = {
    "http": lambda tool: (),
    "mcp": lambda tool: tool.get("functions", ()),  # read when the job is created
    "python": lambda tool: [_python_function(tool)],
}


def kind_of(tool: Mapping[str, Any]) -> str:
    """The kind of a tool in a job. One without a type is Azure's, of the kind http."""
    return str(tool.get("type", "http"))


def functions_of(body: Mapping[str, Any]) -> list[Function]:
    """The functions whose schemas the tools of a job bring along, for all rows."""
    return [function for tool in body.get("tools") or () for function in _FUNCTIONS[kind_of(tool)](tool)]


def has_tools(body: Mapping[str, Any]) -> bool:
    """Whether calls of functions are executed; else they are graded only."""
    return bool(body.get("tools"))


def names_of(body: Mapping[str, Any]) -> list[str]:
    """The names of the functions that a job's tools execute."""
    of_rows = [tool["name"] for tool in body.get("tools") or () if kind_of(tool) == "http"]
    return [*of_rows, *(function["function"]["name"] for function in functions_of(body))]


def with_functions(body: Mapping[str, Any], rows: Sequence[Example]) -> list[Example]:
    """The rows of a job with the functions of its tools behind their own."""
    added = functions_of(body)
    if not added:
        return list(rows)
    return [replace(row, item={**row.item, "tools": [*row.tools, *added]}) for row in rows]


def is_played_by_agent(body: Mapping[str, Any]) -> bool:
    """Whether the user's own agent plays the episodes of the job."""
    return body.get("environment") is not None


def has_episodes(body: Mapping[str, Any]) -> bool:
    return has_tools(body) or is_played_by_agent(body)


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
    for number, tool in enumerate(body.get("tools") or ()):
        if kind_of(tool) == "http" and (name := tool["name"]) not in known:
            return (
                f"{TOOLS_PARAM}[{number}].name",
                f"The job has the tool '{name}', and no row of the training file has its schema in 'tools'.",
            )
    return None


def unknown_function(body: Mapping[str, Any], rows: Functions) -> str | None:
    """The problem of the first function of a row that no tool of the job executes, or that one brings along itself.

    None also without tools.
    """
    executed, own = set(names_of(body)), {tool["function"]["name"] for tool in functions_of(body)}
    for line, functions in rows if has_tools(body) else ():
        for name in (tool["function"]["name"] for tool in functions):
            if name in own:
                return (
                    f"Line {line} has the function '{name}', whose schema comes from {TOOLS_PARAM}. Remove it from the "
                    "row."
                )
            if name not in executed:
                return (
                    f"Line {line} has the function '{name}', and the job has no tool of this name. Add it to "
                    f"{TOOLS_PARAM}, or remove it from the row."
                )
    return None
