"""Checks of a job's tools against this installation, and the functions that are read from MCP servers."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from api.http.deps import Service
from api.http.large_bodies import body_is_read
from api.http.masks import refuse_masks
from api.http.schema_checks import in_turn
from api.resources.graders import compiling
from api.resources.job_tools import HttpToolSpec, McpToolSpec, PythonToolSpec, ToolSpec, repeated
from core.database.tables import Project
from core.errors import InvalidRequest, ServiceError, Unavailable
from core.jobs import tools as job_tools
from core.jobs.params import TOOLS_PARAM
from core.storage.datasets import is_nested_too_deeply
from core.storage.message_rows import Problem, tool_problems
from graders.calls import CallRetryPolicy
from graders.checks import item_schema_problem
from graders.endpoint import Endpoints, url_problem
from graders.hazards.pool import HazardFailed
from graders.sandbox.entries import CALL
from graders.sandbox.pool import refusal
from graders.template import quoted
from graders.tools.mcp import functions_of
from graders.tools.mcp_wire import McpGone, McpRefused, McpUnusable, McpWire
from graders.tools.server import ToolServer

# The client waits for the job.
AT_CREATE = CallRetryPolicy(retries=1, retries_after_silence=0)
REQUEST_S = 10.0
# Every row of the job has the functions, every prompt, and every preview.
MAX_FUNCTION_BYTES = 256 << 10
# Of a schema. A row that has it around may have 100 (core/storage/datasets.py).
MAX_SCHEMA_LEVELS = 64


async def usable_tools(tools: Sequence[ToolSpec], service: Service, project: Project) -> list[ToolSpec]:
    """Check the tools of a job against this installation.

    Returns:
        The tools, those of MCP servers with the functions that were read from them.

    Raises:
        InvalidRequest: a tool has the mask of a secret or a server that is not called here, a source does not
            compile, or a server refuses requests or has functions that a model cannot have.
        Unavailable: a server cannot be reached, or the sandbox.
        GraderEnvironmentMissing: the environment of python tools is not built on this server.
    """
    body_is_read()
    for number, tool in enumerate(tools):
        _refuse_spec(tool, f"{TOOLS_PARAM}[{number}]", service)
    read = await _with_functions(tools, service)
    _refuse_repeated(read)
    _refuse_large(read)
    await in_turn(partial(_refuse_schemas, read), service, project)
    for number, tool in enumerate(read):
        if isinstance(tool, PythonToolSpec):
            await _refuse_source(tool, f"{TOOLS_PARAM}[{number}]", service, project)
    return read


def _refuse_spec(tool: ToolSpec, param: str, service: Service) -> None:
    """Raise InvalidRequest for a tool that is refused before anything is sent or compiled."""
    if isinstance(tool, PythonToolSpec) and is_nested_too_deeply(tool.parameters, MAX_SCHEMA_LEVELS):
        message = f"Invalid value for '{param}.parameters': it {_too_deep()}."
        raise InvalidRequest(message, param=f"{param}.parameters", code="invalid_value")
    refuse_masks(tool.to_row(), param)
    if isinstance(tool, HttpToolSpec | McpToolSpec) and (
        problem := url_problem(tool.server_url, service.backends.endpoints, "Tools")
    ):
        raise InvalidRequest(problem, param=f"{param}.server_url")


async def _with_functions(tools: Sequence[ToolSpec], service: Service) -> list[ToolSpec]:
    """The tools, those of MCP servers with their functions."""
    read: list[ToolSpec] = []
    endpoints, seconds = service.backends.endpoints, service.tool_servers_seconds
    try:
        async with asyncio.timeout(seconds) as limit:
            for number, tool in enumerate(tools):
                if isinstance(tool, McpToolSpec):
                    assert endpoints is not None, "or there was a problem"
                    functions = await _functions(tool, f"{TOOLS_PARAM}[{number}]", endpoints)
                    tool = tool.model_copy(update={"functions": functions})
                read.append(tool)
    except TimeoutError:
        if not limit.expired():
            raise
        raise Unavailable(
            f"The tools of the job's MCP servers could not be read within {seconds:g} seconds."
        ) from None
    return read


async def _functions(tool: McpToolSpec, param: str, endpoints: Endpoints) -> list[dict[str, Any]]:
    """The functions of the server, in OpenAI's format."""
    listed = await _listed(tool, param, endpoints)
    names = {one["name"] for one in listed}
    for name in tool.allowed_tools or ():
        if name not in names:
            message = f"The MCP server '{tool.server_label}' has no tool {quoted(name)}."
            raise InvalidRequest(message, param=f"{param}.allowed_tools")
    functions = functions_of(listed, tool.allowed_tools)
    if not functions:
        message = f"The MCP server '{tool.server_label}' has no tools."
        raise InvalidRequest(message, param=f"{param}.server_url")
    for path, problem in _problems(functions):
        raise _unusable(tool, param, f"{path} {problem}")
    return functions


async def _listed(tool: McpToolSpec, param: str, endpoints: Endpoints) -> list[dict[str, Any]]:
    """The tools of the server, as it lists them."""
    wire = McpWire(ToolServer.of(tool.to_row()), endpoints, patience=AT_CREATE, timeout_s=REQUEST_S)
    unread = f"The tools of the MCP server '{tool.server_label}' could not be read"
    try:
        session = await wire.open()
        try:
            return await wire.tools(session)
        finally:
            await wire.close(session)
    except (McpUnusable, McpRefused) as cause:
        raise InvalidRequest(f"{unread}: {cause}", param=f"{param}.server_url") from None
    except McpGone as cause:
        raise Unavailable(f"{unread}: {cause}", param=f"{param}.server_url") from None


def _unusable(tool: McpToolSpec, param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"The MCP server '{tool.server_label}' has tools that a model cannot have: {problem}. Leave such tools out "
        "with 'allowed_tools'.",
        param=f"{param}.allowed_tools",
    )


def _problems(functions: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    """Yield the problems of the functions of a server."""
    for number, function in enumerate(functions):
        if problem := _not_storable(function):
            yield f"tools[{number}].function", problem
            return
    yield from tool_problems({"tools": functions})
    for number, function in enumerate(functions):
        if '"x-mcp-header"' in json.dumps(function["function"]["parameters"]):
            yield f"tools[{number}].function.parameters", "has x-mcp-header, which is not supported"


def _not_storable(function: Mapping[str, Any]) -> str:
    """The reason why a function cannot be stored and shown as it is; "" if it can."""
    # The levels of the schema have those of the function around them.
    if is_nested_too_deeply(function, MAX_SCHEMA_LEVELS + 2):
        return _too_deep()
    try:
        json.dumps(function, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "has a lone surrogate, which is no character"
    except ValueError:
        return "has a number that is none in JSON"
    return ""


def _too_deep() -> str:
    return f"nests objects and arrays in more than {MAX_SCHEMA_LEVELS} levels"


def _refuse_repeated(tools: Sequence[ToolSpec]) -> None:
    """Raise InvalidRequest for a function of an MCP server whose name another tool has."""
    taken = {tool.name for tool in tools if not isinstance(tool, McpToolSpec)}
    for number, tool in enumerate(tools):
        for function in tool.functions or () if isinstance(tool, McpToolSpec) else ():
            name = function["function"]["name"]
            if name in taken:
                param = f"{TOOLS_PARAM}[{number}]"
                raise InvalidRequest(repeated(name), param=param, code="invalid_value")
            taken.add(name)


def _refuse_large(tools: Sequence[ToolSpec]) -> None:
    functions = job_tools.functions_of({"tools": [tool.to_row() for tool in tools]})
    size = len(json.dumps(functions, ensure_ascii=False).encode())
    if size > MAX_FUNCTION_BYTES:
        raise InvalidRequest(
            f"The functions of the job's tools are {size:,} bytes of JSON, at most {MAX_FUNCTION_BYTES:,} are "
            "supported. Leave tools out, of an MCP server with 'allowed_tools'.",
            param=TOOLS_PARAM,
        )


def _refuse_schemas(tools: Sequence[ToolSpec]) -> None:
    """Raise InvalidRequest for the first schema with which no call could be checked. Runs in a thread."""
    for number, tool in enumerate(tools):
        param = f"{TOOLS_PARAM}[{number}]"
        for function in job_tools.functions_of({"tools": [tool.to_row()]}):
            try:
                problem = item_schema_problem(function["function"]["parameters"])
            except HazardFailed as broken:
                raise ServiceError(f"The schema of a tool could not be checked: {broken}") from broken
            if problem and isinstance(tool, McpToolSpec):
                raise _unusable(tool, param, f"the schema of {function['function']['name']} {problem}")
            if problem:
                message = f"Invalid value for '{param}.parameters': it {problem}."
                raise InvalidRequest(message, param=f"{param}.parameters", code="invalid_value")


async def _refuse_source(tool: PythonToolSpec, param: str, service: Service, project: Project) -> None:
    """Raise an error for a python tool that this installation cannot run. Compiling it counts as a grader run."""
    if unsafe := await asyncio.to_thread(refusal):
        message = f"This server cannot run python tools safely: {unsafe}"
        raise InvalidRequest(message, param=f"{param}.type")
    async with compiling(service, project):
        await service.backends.compile_source(tool.source, f"{param}.source", project.id, entry=CALL)
