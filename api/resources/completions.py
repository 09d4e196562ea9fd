"""/v1/completions: text without a chat template, of models that vLLM serves."""

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response
from pydantic import BeforeValidator

from api.http.deps import CurrentProject, ServiceDep
from api.http.openapi import refusals
from api.http.shapes import Body
from api.resources.chat import COMPLETIONS, Inference, Unsupported, forwarded, passed_on, with_weights
from core.chat import Served, TextCompletion

router = APIRouter(prefix="/completions", tags=["Chat"])


def _require_one(value: Any) -> None:
    if value not in (None, 1):
        raise ValueError("this server returns every answer that it samples: use n")


class CompletionCreate(TextCompletion, Body):
    """The parameters that OpenAI's client may send: honored, rejected by name, or ignored."""

    best_of: Annotated[None, BeforeValidator(_require_one)] = None
    suffix: Unsupported = None
    user: str | None = None  # ignored

    def forwarded(self, served: Served) -> dict[str, Any]:
        """The request body for the inference server."""
        return forwarded(self, set(TextCompletion.model_fields), served)


async def described(
    body: CompletionCreate, project: CurrentProject, service: ServiceDep, upstream: Inference
) -> dict[str, Any]:
    """The request with the weights that its model name resolves to."""
    return await to_thread.run_sync(with_weights, body, project, service, upstream)


ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "A completion, or its chunks.", "content": {"text/event-stream": {}}}
}


@router.post("", responses=ANSWERS | refusals(404, 503))
async def create_completion(
    request: Request, completion: Annotated[dict[str, Any], Depends(described)], upstream: Inference
) -> Response:
    """Create a text completion, in one piece or as server-sent events. Only models that vLLM serves have it."""
    return await passed_on(request, completion, upstream, COMPLETIONS)
