"""`tools` and `environment` in `method.reinforcement` of a job. Their checks are in tool_checks.py."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from core.chat import ToolName
from core.errors import InvalidParameter, UnsupportedValue
from core.jobs.params import TOOLS_PARAM
from core.jobs.tools import MAX_STEPS
from core.storage.message_rows import MAX_TOOLS
from core.strict import StrictModel, only
from graders.endpoint import checked_headers, checked_url
from graders.spec import MAX_HEADERS, Source
from graders.template import quoted

_OURS = "idempotency-key"


def _without_ours(headers: dict[str, str]) -> dict[str, str]:
    if any(name.lower() == _OURS for name in headers):
        raise ValueError(f"'{_OURS}' cannot be set: it has the id of the call")
    return checked_headers(headers)


class _FunctionSpec(StrictModel):
    """A tool that has one function."""

    def to_row(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)


class HttpToolSpec(_FunctionSpec):
    """A tool on the user's web server. The headers are secrets, which responses mask."""

    name: ToolName
    server_url: Annotated[str, AfterValidator(checked_url)] = Field(repr=False)
    headers: (
        Annotated[dict[str, str], Field(max_length=MAX_HEADERS), AfterValidator(_without_ours)] | None
    ) = Field(default=None, repr=False)


def _without_protocol(headers: dict[str, str]) -> dict[str, str]:
    for name in headers:
        if name.lower() == "accept" or name.lower().startswith("mcp-"):
            raise ValueError(f"{quoted(name)} cannot be set: it belongs to MCP")
    return _without_ours(headers)


def _not_of_a_request(value: Any) -> None:
    """The functions are read from the server: those in a request have no effect."""


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
        BeforeValidator(_not_of_a_request),
        Field(
            description="The functions of the server in OpenAI's format, as they were read when the job was created. "
            "A value in a request has no effect."
        ),
    ] = None

    def to_row(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude={"require_approval"})


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


class PythonToolSpec(_FunctionSpec):
    """A tool whose source runs in the sandbox of python graders: `def call(arguments, item, state)`."""

    type: Literal["python"]
    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any], Field(description="The JSON schema of the arguments.")]
    source: Source


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


def repeated(name: str) -> str:
    """The message for a name that an earlier tool has."""
    return f"Invalid value for '{TOOLS_PARAM}': the name '{name}' is already in the list."


def _distinct(tools: list[ToolSpec]) -> list[ToolSpec]:
    seen = set[tuple[str, str]]()
    for number, tool in enumerate(tools):
        key = "server_label" if isinstance(tool, McpToolSpec) else "name"
        name = str(getattr(tool, key))
        if (key, name) in seen:
            param = f"{TOOLS_PARAM}[{number}].{key}"
            raise InvalidParameter(repeated(name), param=param, code="invalid_value")
        seen.add((key, name))
    return tools


def _none_for_empty(value: Any) -> Any:
    return None if value == [] else value


JobTools = Annotated[
    Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS), AfterValidator(_distinct)] | None,
    BeforeValidator(_none_for_empty),
]
EpisodeSteps = Annotated[int, Field(ge=1, le=MAX_STEPS, description="Calls of the policy in an episode.")]
