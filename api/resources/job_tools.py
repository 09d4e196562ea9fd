"""`tools` and `environment` in `method.reinforcement` of a job, and the checks of jobs that have one of them."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, PrivateAttr, Tag

from api.http.masks import refuse_masks
from core.chat import ToolName
from core.errors import InvalidParameter, InvalidRequest, NotReady, UnsupportedValue
from core.jobs.params import TOOLS_PARAM
from core.jobs.tools import MAX_STEPS
from core.storage.message_rows import MAX_TOOLS, Problem, tool_problems
from core.strict import StrictModel, only
from graders.backends import Backends
from graders.calls import CallRetryPolicy
from graders.endpoint import Endpoints, checked_headers, checked_url, url_problem
from graders.environments.catalog import find
from graders.sandbox.entries import CALL
from graders.sandbox.pool import SandboxFailed, SandboxUnavailable, refusal, shared
from graders.spec import MAX_HEADERS, Source
from graders.template import quoted
from graders.tools.mcp import functions_of
from graders.tools.mcp_wire import McpGone, McpRefused, McpServer, McpWire

# The client waits for the job.
AT_CREATE = CallRetryPolicy(retries=1, retries_after_silence=0)
AT_CREATE_S = 10.0

_OURS = "idempotency-key"


def _without_ours(headers: dict[str, str]) -> dict[str, str]:
    if any(name.lower() == _OURS for name in headers):
        raise ValueError(f"'{_OURS}' cannot be set: it has the id of the call")
    return checked_headers(headers)


class HttpToolSpec(StrictModel):
    """A tool on the user's web server. The headers are secrets, which responses mask."""

    name: ToolName
    server_url: Annotated[str, AfterValidator(checked_url)] = Field(repr=False)
    headers: (
        Annotated[dict[str, str], Field(max_length=MAX_HEADERS), AfterValidator(_without_ours)] | None
    ) = Field(default=None, repr=False)

    def to_row(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)


def _without_protocol(headers: dict[str, str]) -> dict[str, str]:
    for name in headers:
        if name.lower() == "accept" or name.lower().startswith("mcp-"):
            raise ValueError(f"{quoted(name)} cannot be set: it belongs to MCP")
    return _without_ours(headers)


class McpToolSpec(StrictModel):
    """The tools of an MCP server, in the form of OpenAI's Responses. The headers are secrets, which responses mask."""

    type: Literal["mcp"]
    server_label: ToolName
    server_url: Annotated[str, AfterValidator(checked_url)] = Field(repr=False)
    headers: (
        Annotated[dict[str, str], Field(max_length=MAX_HEADERS), AfterValidator(_without_protocol)] | None
    ) = Field(default=None, repr=False)
    allowed_tools: (
        Annotated[
            list[str],
            Field(min_length=1, max_length=MAX_TOOLS, description="Their names; null: all of the server."),
        ]
        | None
    ) = None
    require_approval: Annotated[Literal["never"] | None, only("never")] = None
    functions: Annotated[
        list[dict[str, Any]] | None,
        Field(
            description="The functions of the server in OpenAI's format, as they were read when the job was created. "
            "A value in a request has no effect."
        ),
    ] = None

    _read: list[dict[str, Any]] | None = PrivateAttr(default=None)  # `functions` of the server

    def to_row(self) -> dict[str, Any]:
        row = self.model_dump(mode="json", exclude_none=True, exclude={"require_approval", "functions"})
        return row if self._read is None else row | {"functions": self._read}

    def has_functions(self, read: list[dict[str, Any]]) -> None:
        """Note the functions that were read from the server."""
        self._read = read


MAX_LEASE_S = 86_400


class AgentEnvironment(StrictModel):
    """The user's own agent plays the episodes (docs/howto/own-agent.md)."""

    type: Annotated[Literal["client"], only("client")]
    timeout_s: Annotated[
        int,
        Field(
            ge=1, le=MAX_LEASE_S, description="In which the agent completes an episode, from its lease on."
        ),
    ] = 1800


class PythonToolSpec(StrictModel):
    """A tool whose source runs in the sandbox of python graders: `def call(arguments, item, state)`."""

    type: Literal["python"]
    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any], Field(description="The JSON schema of the arguments.")]
    source: Source

    def to_row(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)


def _kind(tool: Any) -> str:
    """The kind of a tool in a request. Azure's have no type."""
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return kind if kind in KINDS else "http"


def _known(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise UnsupportedValue(f"tools of type {quoted(kind)} are not supported. Supported: {known}")
    return tool


KINDS = ("mcp", "python")
ToolSpec = Annotated[
    Annotated[HttpToolSpec, Tag("http")]
    | Annotated[McpToolSpec, Tag("mcp")]
    | Annotated[PythonToolSpec, Tag("python")],
    Discriminator(_kind),
    BeforeValidator(_known),
]


def _repeated(name: str) -> str:
    return f"Invalid value for '{TOOLS_PARAM}': the name '{name}' is already in the list."


def _distinct(tools: list[ToolSpec]) -> list[ToolSpec]:
    seen = set[tuple[str, str]]()
    for number, tool in enumerate(tools):
        key = "server_label" if isinstance(tool, McpToolSpec) else "name"
        name = str(getattr(tool, key))
        if (key, name) in seen:
            param = f"{TOOLS_PARAM}[{number}].{key}"
            raise InvalidParameter(_repeated(name), param=param, code="invalid_value")
        seen.add((key, name))
    return tools


def _none_for_empty(value: Any) -> Any:
    return None if value == [] else value


JobTools = Annotated[
    Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS), AfterValidator(_distinct)] | None,
    BeforeValidator(_none_for_empty),
]
EpisodeSteps = Annotated[int, Field(ge=1, le=MAX_STEPS, description="Calls of the policy in an episode.")]


async def refuse_unusable_tools(tools: Sequence[ToolSpec], backends: Backends, owner: str) -> None:
    """Check the tools of a job against this installation, and read the functions of MCP servers into them.

    Args:
        owner: the project, whose processes compile the sources of python tools.

    Raises:
        InvalidRequest: a tool has the mask of a secret or a server that is not called here, a source does not
            compile, or a server cannot be called or has functions that a model cannot have.
    """
    taken = {tool.name for tool in tools if not isinstance(tool, McpToolSpec)}
    for number, tool in enumerate(tools):
        param = f"{TOOLS_PARAM}[{number}]"
        refuse_masks(tool.to_row(), param)
        if isinstance(tool, PythonToolSpec):
            await _refuse_source(tool, param, backends, owner)
            continue
        if problem := url_problem(tool.server_url, backends.endpoints, "Tools"):
            raise InvalidRequest(problem, param=f"{param}.server_url")
        if isinstance(tool, McpToolSpec):
            assert backends.endpoints is not None, "or there was a problem"
            functions = await _functions(tool, param, backends.endpoints)
            tool.has_functions(functions)
            for name in (function["function"]["name"] for function in functions):
                if name in taken:
                    raise InvalidRequest(_repeated(name), param=param, code="invalid_value")
                taken.add(name)


async def _refuse_source(tool: PythonToolSpec, param: str, backends: Backends, owner: str) -> None:
    """Raise InvalidRequest for a python tool that this installation cannot run."""
    if unsafe := await asyncio.to_thread(refusal):
        message = f"This server cannot run python tools safely: {unsafe}"
        raise InvalidRequest(message, param=f"{param}.type")
    environment = find(backends.environments)
    try:
        error = await asyncio.wrap_future(shared().compile_error(tool.source, environment, owner, CALL))
    except (SandboxUnavailable, SandboxFailed) as cause:
        raise NotReady(f"The source of the tool '{tool.name}' could not be checked: {cause}") from None
    if error:
        message = f"Invalid value for '{param}.source': {error}."
        raise InvalidRequest(message, param=f"{param}.source", code="invalid_value")


async def _functions(tool: McpToolSpec, param: str, endpoints: Endpoints) -> list[dict[str, Any]]:
    """The functions of the server, in OpenAI's format."""
    wire = McpWire(McpServer.of(tool.to_row()), endpoints, patience=AT_CREATE, timeout_s=AT_CREATE_S)
    try:
        session = await wire.open()
        try:
            listed = await wire.tools(session)
        finally:
            await wire.close(session)
    except (McpGone, McpRefused) as cause:
        message = f"The tools of the MCP server '{tool.server_label}' could not be read: {cause}"
        raise InvalidRequest(message, param=f"{param}.server_url") from None
    names = {one.get("name") for one in listed}
    for name in tool.allowed_tools or ():
        if name not in names:
            message = f"The MCP server '{tool.server_label}' has no tool {quoted(name)}."
            raise InvalidRequest(message, param=f"{param}.allowed_tools")
    functions = functions_of(listed, tool.allowed_tools)
    if not functions:
        message = f"The MCP server '{tool.server_label}' has no tools."
        raise InvalidRequest(message, param=f"{param}.server_url")
    for path, problem in (*tool_problems({"tools": functions}), *_schema_problems(functions)):
        message = (
            f"The MCP server '{tool.server_label}' has tools that a model cannot have: {path} {problem}. Leave such "
            "tools out with 'allowed_tools'."
        )
        raise InvalidRequest(message, param=f"{param}.allowed_tools")
    return functions


def _schema_problems(functions: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    """Yield a problem for each function whose arguments need headers of the request, which are not sent."""
    for number, function in enumerate(functions):
        if '"x-mcp-header"' in json.dumps(function["function"]["parameters"]):
            yield f"tools[{number}].function.parameters", "has x-mcp-header, which is not supported"
