"""The functions of a job: those of its rows, and those that its tools bring along."""

from typing import Any

from core.jobs.tools import functions_of, names_of, tools_mismatch, with_functions
from core.storage.datasets import Example

FIND: dict[str, Any] = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
LOOKUP: dict[str, Any] = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
HTTP = {"name": "find", "server_url": "https://tools.example/find"}
MCP = {"type": "mcp", "server_label": "drawers", "functions": [LOOKUP]}
BOTH = {"tools": [HTTP, MCP]}


def test_functions_of_servers_follow_those_of_each_row() -> None:
    [row, bare] = with_functions(BOTH, [Example(1, [], {"tools": [FIND]}), Example(2, [], {"answer": "7"})])

    assert row.item["tools"] == row.tools == [FIND, LOOKUP]
    assert bare.item == {"answer": "7", "tools": [LOOKUP]}


def test_rows_of_a_job_whose_schemas_are_in_its_rows_stay_as_they_are() -> None:
    rows = [Example(1, [], {"tools": [FIND]}), Example(2, [], {})]

    assert with_functions({"tools": [HTTP]}, rows) == with_functions({}, rows) == rows


def test_a_job_executes_the_functions_of_all_its_tools() -> None:
    assert names_of(BOTH) == ["find", "lookup"]
    assert functions_of(BOTH) == [LOOKUP]


def test_only_http_tools_need_a_schema_in_a_row() -> None:
    assert tools_mismatch(BOTH, [(1, [FIND])], []) is None
    assert tools_mismatch({"tools": [MCP]}, [(1, [])], [(1, [])]) is None

    missing = tools_mismatch(BOTH, [(1, [])], [])

    assert missing is not None
    assert missing[0] == "method.reinforcement.tools[0].name"


def test_a_row_may_not_have_a_function_that_a_tool_brings_along() -> None:
    mismatch = tools_mismatch(BOTH, [(1, [FIND])], [(4, [LOOKUP])])

    assert mismatch is not None
    assert mismatch[0] == "validation_file"
    assert mismatch[1].startswith("Line 4 has the function 'lookup', whose schema comes from")
