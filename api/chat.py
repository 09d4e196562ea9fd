"""/v1/chat/completions: base models, and the project's tuned models and checkpoints.

The API says which weights a name stands for, at this moment and in this project, and hands the request to the inference
server. The answer's bytes go through as they come: what the client does not read is not asked for, and a client that
leaves takes its request along.
"""

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import httpx
from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BeforeValidator, ValidationInfo
from starlette.types import Receive, Scope, Send

from api.deps import CurrentProject, Parts, Service
from api.document import refusals
from api.errors import AsciiJSON
from api.schemas import refuse_unusable_schema
from api.wire import Body
from core import tracing, tuned
from core.blobs import BlobNotFound, BlobStore
from core.chat import Adapter, Chat, Served
from core.errors import InvalidParameter, InvalidRequest, ModelNotFound, NotReady, ServiceError
from core.hangup import until_gone
from core.models import Checkpoint, Project
from core.response_format import ResponseFormat
from core.settings import Settings

router = APIRouter(prefix="/chat/completions", tags=["Chat"])

START_PATIENCE = 30.0  # in which the inference process has to be there; it takes about ten seconds to start
RECENTLY = 30.0  # what answered so long ago is taken to be there still
# Reading has the patience of OpenAI's client; the rest is about a server that is near.
TIMEOUT = httpx.Timeout(connect=5.0, read=600.0, write=60.0, pool=None)
MANIFESTS_REMEMBERED = 4096


def _default_only(value: Any, info: ValidationInfo) -> None:
    """Accept only values that ask for nothing; reject anything else by name."""
    if value not in (None, 0, [], {}, "auto", "none", "default"):
        name = str(info.field_name)
        message = f"Unsupported parameter: '{name}' is not supported by this server; leave it out."
        raise InvalidParameter(message, param=name, code="unsupported_parameter")


def _text_only(value: Any) -> None:
    if value not in (None, ["text"]):
        raise ValueError("this server writes text only")


Unsupported = Annotated[None, BeforeValidator(_default_only)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
Verbosity = Literal["low", "medium", "high"] | None


class Generation(Body):
    """Parameters that are accepted without effect on the answer, in every API that a model answers in."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class ChatCreate(Chat, Generation):
    """What OpenAI's client may send: honoured, refused by name, or without effect on the answer."""

    model_config = Chat.model_config

    frequency_penalty: Unsupported = None
    presence_penalty: Unsupported = None
    logit_bias: Unsupported = None
    tools: Unsupported = None
    tool_choice: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    moderation: Unsupported = None
    modalities: Annotated[None, BeforeValidator(_text_only)] = None

    # Without effect, as in a job (core/methods.py): the model reasons as it does.
    reasoning_effort: ReasoningEffort = None
    verbosity: Verbosity = None

    def forwarded(self, served: Served) -> dict[str, Any]:
        """The request as the inference server takes it."""
        asked = self.model_dump(mode="json", by_alias=True, exclude_none=True, include=set(Chat.model_fields))
        return asked | {"regraft": served.to_wire()}


class Upstream:
    """The inference server, as one process of the API knows it. Belongs to one event loop."""

    def __init__(self, settings: Settings, *, patience: float = START_PATIENCE) -> None:
        self.url = settings.inference_url.rstrip("/")
        self.patience = patience
        # Uncompressed: the bytes go through as they are, and a proxy on the way must not pack them.
        self.headers = {"authorization": f"Bearer {settings.inference_key}", "accept-encoding": "identity"}
        self._heard_at = float("-inf")
        self._manifests: OrderedDict[str, str] = OrderedDict()
        self._client: httpx.AsyncClient | None = None

    @property
    def client(self) -> httpx.AsyncClient:
        """Made when it is first used, in the event loop that it then belongs to."""
        if self._client is None:
            self._client = self._connected()
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _connected(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=self.headers,
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # a proxy for the world outside is not meant for the machine next door
        )

    async def send(self, body: dict[str, Any]) -> httpx.Response:
        """The answer, of which only the head has been read.

        Raises:
            InvalidRequest: this installation has none.
            NotReady: the inference server is not there, or not yet.
            ServiceError: it is there and does not answer.
        """
        if not self.url:
            raise InvalidRequest(
                "This server has no inference server: its operator names one in REGRAFT_INFERENCE_URL.",
                code="serving_not_configured",
            )
        await self._wait_until_there()
        for last in (False, True):
            url = f"{self.url}/chat/completions"
            request = self.client.build_request("POST", url, json=body, headers=tracing.outgoing())
            try:
                answer = await self.client.send(request, stream=True)
            except httpx.TransportError as cause:
                self._heard_at = float("-inf")
                if isinstance(cause, httpx.ReadTimeout):
                    seconds = request.extensions["timeout"]["read"]
                    raise ServiceError(f"The model has not answered for {seconds:g} s.") from cause
                # A connection that was kept may have ended with an idle process; a new one finds its successor.
                if last or isinstance(cause, httpx.TimeoutException):
                    raise _not_there(cause) from cause
            else:
                self._heard_at = time.monotonic()
                return answer
        raise AssertionError("the second try returns or raises")

    async def _wait_until_there(self) -> None:
        if time.monotonic() - self._heard_at < RECENTLY:
            return
        try:
            # The patience is for a process that starts behind a socket which is there; one that is not is told at once.
            timeout = httpx.Timeout(self.patience, connect=TIMEOUT.connect)
            answer = await self.client.get(f"{self.url.removesuffix('/v1')}/healthz", timeout=timeout)
        except httpx.TransportError as cause:
            raise _not_there(cause) from cause
        if answer.status_code != 200:
            raise _not_there()
        self._heard_at = time.monotonic()

    def adapter(self, blobs: BlobStore, checkpoint: Checkpoint) -> Adapter:
        """Its weights by the hash of their manifest. A checkpoint that is made again is another row: it has another id.

        Raises:
            BlobNotFound: they are not in the blob store any more.
        """
        found = self._manifests.get(checkpoint.id)
        if found is None:
            manifest = blobs.read(f"{checkpoint.blob_prefix}/manifest.json")
            found = self._manifests[checkpoint.id] = hashlib.sha256(manifest).hexdigest()
            if len(self._manifests) > MANIFESTS_REMEMBERED:
                self._manifests.popitem(last=False)
        return Adapter(prefix=checkpoint.blob_prefix, manifest_sha256=found)


def _not_there(cause: httpx.TransportError | None = None) -> NotReady:
    if isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
        message = (
            "Nothing answers at the inference server's address: it is not running, or not yet. Ask again."
        )
    else:
        message = "The inference server is starting; ask again."
    return NotReady(message, retry_after=5)


async def _upstream(request: Request) -> Upstream:
    upstream: Upstream = request.app.state.upstream
    return upstream


Inference = Annotated[Upstream, Depends(_upstream)]


async def described(
    body: ChatCreate, project: CurrentProject, service: Parts, upstream: Inference
) -> dict[str, Any]:
    """The request with the weights that its model stands for."""
    if isinstance(body.response_format, ResponseFormat):
        await refuse_unusable_schema(body.response_format, "response_format", service, project)
    return await to_thread.run_sync(_with_weights, body, project, service, upstream)


def _with_weights(body: ChatCreate, project: Project, service: Service, upstream: Upstream) -> dict[str, Any]:
    """In a thread: it asks the database and the blob store."""
    base = service.registry.resolve(body.model)
    if base in service.registry.models:
        # OpenAI's answers name the snapshot that an alias leads to.
        return body.model_copy(update={"model": base}).forwarded(Served(base_model=base))
    with service.database.read() as session:
        model = tuned.find(session, project.id, body.model)
        checkpoint = None if model is None else tuned.checkpoint_of(session, model)
        if model is None or checkpoint is None:
            made = [other.name for other in tuned.models(session, project.id)]
            raise ModelNotFound(body.model, [*service.registry.names, *made])
    try:
        adapter = upstream.adapter(service.blobs, checkpoint)
    except BlobNotFound:
        raise ModelNotFound(body.model, service.registry.names) from None
    return body.forwarded(Served(base_model=model.base_model, adapter=adapter))


ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "A chat completion, or its chunks.", "content": {"text/event-stream": {}}}
}


@router.post("", responses=ANSWERS | refusals(404, 503))
async def create_chat_completion(
    request: Request, chat: Annotated[dict[str, Any], Depends(described)], upstream: Inference
) -> Response:
    """Answer a chat, in one piece or as server-sent events."""
    answer = await until_gone(request.receive, upstream.send(chat))
    if answer is None:
        return Response(status_code=499)
    if answer.status_code == 200 and _is(answer, "text/event-stream") and chat.get("stream"):
        return PassedOn(answer)
    content = await until_gone(request.receive, whole(answer))
    if content is None:
        return Response(status_code=499)
    kept = {name: answer.headers[name] for name in ("retry-after",) if name in answer.headers}
    return Response(content, answer.status_code, kept, answer.headers.get("content-type"))


async def whole(answer: httpx.Response) -> bytes:
    """The body of an answer, which is then closed.

    Raises:
        ServiceError: it breaks off, or is none of an inference server that knows the API.
        NotReady: something in between, a proxy, does not reach the inference server.
    """
    try:
        content = await answer.aread()
    except httpx.TransportError as cause:
        raise ServiceError("The inference server broke off its answer.") from cause
    finally:
        await answer.aclose()
    if answer.status_code == 401:
        raise ServiceError("The inference server does not take the key in REGRAFT_INFERENCE_KEY.")
    if not (_is(answer, "application/json") if answer.status_code == 200 else _is_error(content)):
        raise _of_something_else(answer.status_code)
    return content


def _is(answer: httpx.Response, media_type: str) -> bool:
    return str(answer.headers.get("content-type", "")).startswith(media_type)


def _is_error(content: bytes) -> bool:
    """Whether it has OpenAI's shape, which our inference server gives to all of them."""
    try:
        error = json.loads(content)["error"]
        return isinstance(error["message"], str) and "code" in error
    except (ValueError, TypeError, LookupError):
        return False


def _of_something_else(status: int) -> ServiceError:
    """What it says itself is a page for people, or about another program; our clients could not read it."""
    if status in (502, 503, 504):
        return NotReady(
            f"The proxy could not reach the inference server (status {status}); ask again.",
            retry_after=5,
        )
    return ServiceError(
        f"The inference server answered with status {status} and not as one does: "
        "REGRAFT_INFERENCE_URL may name something else, or lack its /v1."
    )


class PassedOn(StreamingResponse):
    """The events of another server's answer, read as fast as the client takes them; both end together.

    Args:
        events: made of the answer; None: its bytes as they are.
    """

    def __init__(self, answer: httpx.Response, events: AsyncGenerator[bytes, None] | None = None) -> None:
        self.answer = answer
        super().__init__(
            events or _events(answer), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.answer.aclose()


async def _events(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    try:
        async for part in answer.aiter_raw():
            yield part
    except httpx.TransportError:  # too late for a status; clients raise at an event that is an error
        error = ServiceError("The inference server broke off its answer.")
        yield b"data: " + AsciiJSON(error.envelope()).body + b"\n\n"
