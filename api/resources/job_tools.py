"""`tools` and `environment` in `method.reinforcement` of a job, and the checks of jobs that have one of them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from api.http.masks import refuse_masks
from core.chat import ToolName
from core.errors import InvalidParameter, InvalidRequest
from core.jobs.params import TOOLS_PARAM
from core.jobs.tools import MAX_STEPS
from core.storage.message_rows import MAX_TOOLS
from core.strict import StrictModel, only
from graders.endpoint import Endpoints, checked_headers, checked_url, url_problem
from graders.spec import MAX_HEADERS

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


def _distinct(tools: list[HttpToolSpec]) -> list[HttpToolSpec]:
    names = [tool.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InvalidParameter(
                f"Invalid value for '{TOOLS_PARAM}': the name '{name}' is already in the list.",
                param=f"{TOOLS_PARAM}[{number}].name",
                code="invalid_value",
            )
    return tools


def _none_for_empty(value: Any) -> Any:
    return None if value == [] else value


JobTools = Annotated[
    Annotated[list[HttpToolSpec], Field(max_length=MAX_TOOLS), AfterValidator(_distinct)] | None,
    BeforeValidator(_none_for_empty),
]
EpisodeSteps = Annotated[int, Field(ge=1, le=MAX_STEPS, description="Calls of the policy in an episode.")]


def refuse_unusable_tools(tools: Sequence[HttpToolSpec], endpoints: Endpoints | None) -> None:
    """Raise InvalidRequest for a tool whose server this installation does not call, or with the mask of a secret."""
    for number, tool in enumerate(tools):
        param = f"{TOOLS_PARAM}[{number}]"
        refuse_masks(tool.to_row(), param)
        if problem := url_problem(tool.server_url, endpoints, "Tools"):
            raise InvalidRequest(problem, param=f"{param}.server_url")
