"""Rewrites the URLs of Azure's clients.

`AzureOpenAI(azure_endpoint=..., api_version=...)` of the `openai` package sends /openai/files?api-version=..., and for
answers /openai/deployments/{model}/chat/completions and .../completions. Azure's v1 API has /openai/v1/files. All map
to the routes below /v1; `api-version` is ignored.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.http.deps import CurrentCaller, CurrentProject, ServiceDep
from api.http.errors import SENT_PATH
from api.resources import completions
from api.resources.chat import ChatCreate, Inference, create_chat_completion, described
from api.resources.completions import CompletionCreate, create_completion
from core.errors import NoEmbeddingModel

PREFIX, DEPLOYMENTS = "/openai/", "/openai/deployments/"

# Hidden from the OpenAPI document, which lists each route once.
router = APIRouter(include_in_schema=False)


class AzurePaths:
    """Rewrites Azure's paths to those of this API before any other middleware reads the path."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := rewritten(scope["path"])) is not None:
            scope = {**scope, "path": path, "raw_path": path.encode(), SENT_PATH: scope["path"]}
        await self.app(scope, receive, send)


def rewritten(path: str) -> str | None:
    """The path below /v1 for one of Azure's; None for any other path, or a deployment's (see the router)."""
    if not path.startswith(PREFIX) or path.startswith(DEPLOYMENTS):
        return None
    return "/v1/" + path.removeprefix(PREFIX).removeprefix("v1/")


class DeploymentChat(ChatCreate):
    """A chat completion whose model is the deployment in the path; the one in the body is ignored, as by Azure."""

    model: str = ""


class DeploymentCompletion(CompletionCreate):
    """A text completion whose model is the deployment in the path."""

    model: str = ""


async def _described(
    deployment: str, body: DeploymentChat, project: CurrentProject, service: ServiceDep, upstream: Inference
) -> dict[str, Any]:
    return await described(body.model_copy(update={"model": deployment}), project, service, upstream)


@router.post(DEPLOYMENTS + "{deployment:path}/chat/completions")
async def create_deployment_chat_completion(
    request: Request, body: Annotated[dict[str, Any], Depends(_described)], upstream: Inference
) -> Response:
    """Create a chat completion with the model of the deployment: a base model, an alias, or a tuned model."""
    return await create_chat_completion(request, body, upstream)


async def _completion_described(
    deployment: str,
    body: DeploymentCompletion,
    project: CurrentProject,
    service: ServiceDep,
    upstream: Inference,
) -> dict[str, Any]:
    return await completions.described(
        body.model_copy(update={"model": deployment}), project, service, upstream
    )


@router.post(DEPLOYMENTS + "{deployment:path}/completions")
async def create_deployment_completion(
    request: Request, body: Annotated[dict[str, Any], Depends(_completion_described)], upstream: Inference
) -> Response:
    """Create a text completion with the model of the deployment."""
    return await create_completion(request, body, upstream)


@router.post(DEPLOYMENTS + "{deployment:path}/embeddings")
async def create_deployment_embedding(deployment: str, caller: CurrentCaller) -> None:
    """Reject the request as /v1/embeddings does."""
    raise NoEmbeddingModel(deployment)
