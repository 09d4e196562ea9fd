"""The kinds of tools, and all tools of a job as one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from graders.endpoint import Endpoints
from graders.environments.catalog import find
from graders.tools.http import HttpTools
from graders.tools.mcp import McpTools
from graders.tools.protocol import ToolRequest, ToolResult, Tools
from graders.tools.python import PythonTools


@dataclass(frozen=True)
class ToolServices:
    """What this installation has for tools."""

    endpoints: Endpoints | None  # the hosts that the operator allows; None: no tool may call a server
    environments: Path  # folder of the environments of python code
    owner: str  # the project

    @property
    def allowed(self) -> Endpoints:
        """The hosts for a tool that calls a server. No job has such a tool where there are none."""
        assert self.endpoints is not None, "url_problem refuses such tools"
        return self.endpoints


class ToolsOfOneKind(Tools, Protocol):
    @property
    def names(self) -> Sequence[str]:
        """The functions that these tools execute."""
        ...


KINDS: Mapping[str, Callable[[Sequence[Mapping[str, Any]], ToolServices], ToolsOfOneKind]] = {
    "http": lambda rows, services: HttpTools(rows, services.allowed),
    "python": lambda rows, services: PythonTools(rows, find(services.environments), services.owner),
    "mcp": lambda rows, services: McpTools(rows, services.allowed),
}
"""From `type` of a tool in a job to what executes such tools. One without a type is Azure's, of the kind http."""


class ToolSet:
    """Implements Tools: all tools of a job."""

    def __init__(self, kinds: Sequence[ToolsOfOneKind]) -> None:
        self._kinds = kinds
        self._of_name = {name: tools for tools in kinds for name in tools.names}

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], services: ToolServices) -> "ToolSet":
        """`rows`: `tools` of a job, as it is stored."""
        of_kind: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            of_kind.setdefault(row.get("type", "http"), []).append(row)
        return cls([KINDS[kind](some, services) for kind, some in of_kind.items()])

    async def call(self, call: ToolRequest) -> ToolResult:
        return await self._of_name[call.name].call(call)

    async def end(self, trace_id: str) -> None:
        for tools in self._kinds:
            await tools.end(trace_id)
