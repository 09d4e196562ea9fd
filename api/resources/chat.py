"""/v1/chat/completions: base models, and the project's tuned models and checkpoints.

The API resolves a name to weights for this project and forwards the request to the inference server. The bytes of the
response are relayed as the client reads them, and a client that disconnects aborts the request.
"""

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any, Literal, Protocol, Self

import httpx
from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BeforeValidator, ValidationInfo
from starlette.types import Receive, Scope, Send

from api.http.deps import CurrentProject, Service, ServiceDep
from api.http.json_responses import encode
from api.http.openapi import refusals
from api.http.schema_checks import refuse_unusable_schemas
from api.http.shapes import Body
from core.asgi import UNBUFFERED, sent_event, until_gone
from core.chat import Adapter, Chat, Served
from core.database.tables import Checkpoint, Project
from core.errors import AliasTargetNotFound, InvalidParameter, InvalidRequest, ModelNotFound, ServiceError
from core.inference import InferenceNotReady, address_of, is_error, is_unreached, not_served
from core.response_format import ResponseFormat, response_schema
from core.results import model_aliases, tuned_models
from core.settings import Settings
from core.storage.store import BlobNotFound, BlobStore
from core.telemetry import tracing
from core.tool_schemas import InvalidToolSchema, schema_of_calls
from graders import complaints

router = APIRouter(prefix="/chat/completions", tags=["Chat"])

START_PATIENCE = 30.0  # for the inference process to start, which takes about ten seconds
RECENTLY = 30.0  # the server counts as available for this long after its last response
# The read timeout of OpenAI's client; the other timeouts assume a server on the same network.
TIMEOUT = httpx.Timeout(connect=5.0, read=600.0, write=60.0, pool=None)
ADAPTERS_REMEMBERED = 4096
CHAT, COMPLETIONS = "chat/completions", "completions"


def _default_only(value: Any, info: ValidationInfo) -> None:
    """Accept only no-op values; reject anything else by name."""
    if value not in (None, 0, [], {}, "auto", "none", "default"):
        _null_only(value, info)


def _null_only(value: Any, info: ValidationInfo) -> None:
    """Reject a parameter of which every value, also an empty one, asks for something."""
    if value is not None:
        name = str(info.field_name)
        message = f"Unsupported parameter: '{name}' is not supported by this server; leave it out."
        raise InvalidParameter(message, param=name, code="unsupported_parameter")


def _text_only(value: Any) -> None:
    if value not in (None, ["text"]):
        raise ValueError("this server generates text only")


Unsupported = Annotated[None, BeforeValidator(_default_only)]
Verbosity = Literal["low", "medium", "high"] | None


class Generation(Body):
    """Parameters that every generation endpoint accepts and ignores."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class ChatCreate(Chat, Generation):
    """The parameters that OpenAI's client may send: honored, rejected by name, or ignored."""

    model_config = Chat.model_config

    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Annotated[None, BeforeValidator(_null_only)] = None  # {} searches with the defaults
    moderation: Unsupported = None
    modalities: Annotated[None, BeforeValidator(_text_only)] = None

    verbosity: Verbosity = None  # ignored

    def forwarded(self, served: Served) -> dict[str, Any]:
        """The request body for the inference server."""
        return forwarded(self, set(Chat.model_fields), served)

    @property
    def schemas(self) -> Iterator[tuple[str, str]]:
        """The schemas that an answer is held to, in the format of the samplers, with their parameters."""
        if isinstance(self.response_format, ResponseFormat):
            yield (
                "response_format.json_schema.schema",
                response_schema(self.response_format.json_schema.schema_),
            )
        if self.tool_choice not in (None, "none", "auto"):
            for number, tool in enumerate(self.tools or ()):
                if tool.function.parameters:
                    yield f"tools[{number}].function.parameters", response_schema(tool.function.parameters)
        if self.tool_choice == "required":
            yield "tools", self._schema_of_calls()

    def _schema_of_calls(self) -> str:
        try:
            return schema_of_calls(self.tools or (), parallel=self.parallel_tool_calls is not False)
        except InvalidToolSchema as cause:
            mistake = complaints.invalid_value(cause.param, f"{cause}.")
            raise InvalidRequest(mistake.message, param=mistake.param, code=mistake.code) from None


def forwarded(request: Body, fields: set[str], served: Served) -> dict[str, Any]:
    """The request body for the inference server: without what asks for nothing, which an older one may not know."""
    return meaningful(request, fields) | {"regraft": served.to_wire()}


def meaningful(request: Body, fields: set[str]) -> dict[str, Any]:
    """The fields of a request that ask for something."""
    body = request.model_dump(mode="json", by_alias=True, exclude_none=True, include=fields)
    return {name: value for name, value in body.items() if value not in ([], {})}


class Upstream:
    """The connections of one API process to the inference servers. Belongs to one event loop."""

    def __init__(self, settings: Settings, *, timeout: httpx.Timeout = TIMEOUT) -> None:
        self.url = settings.inference_url
        self.patience = START_PATIENCE
        self.timeout = timeout
        # Uncompressed: the bytes are relayed unchanged, so no proxy may compress them.
        self.headers = {"authorization": f"Bearer {settings.inference_key}", "accept-encoding": "identity"}
        self._heard_at: dict[str, float] = {}
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()
        self._client: httpx.AsyncClient | None = None

    @property
    def client(self) -> httpx.AsyncClient:
        """Created on first use, in the event loop that it then belongs to."""
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
            timeout=self.timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # a proxy for external hosts must not receive this
        )

    async def send(self, body: dict[str, Any], route: str = CHAT) -> httpx.Response:
        """Send a request and return the response once its headers have arrived.

        Raises:
            InvalidRequest: this installation has no inference server for the base model.
            InferenceNotReady: the inference server is not reachable yet.
            ServiceError: the inference server does not respond.
        """
        base_model = body["regraft"]["base_model"]
        server = address_of(self.url, base_model)
        if not server:
            raise not_served(base_model)
        await self._wait_until_there(server)
        for last in (False, True):
            url = f"{server}/{route}"
            request = self.client.build_request("POST", url, json=body, headers=tracing.outgoing())
            try:
                answer = await self.client.send(request, stream=True)
            except httpx.TransportError as cause:
                self._heard_at.pop(server, None)
                if isinstance(cause, httpx.ReadTimeout):
                    seconds = request.extensions["timeout"]["read"]
                    raise ServiceError(f"The model has not answered for {seconds:g} s.") from cause
                # A pooled connection may have closed with an idle process; a new connection reaches its successor.
                if last or isinstance(cause, httpx.TimeoutException):
                    raise _not_there(cause) from cause
            else:
                self._heard_at[server] = time.monotonic()
                return answer
        raise AssertionError("the second try returns or raises")

    async def _wait_until_there(self, server: str) -> None:
        if time.monotonic() - self._heard_at.get(server, float("-inf")) < RECENTLY:
            return
        try:
            # Wait only while a socket accepts connections for a process that starts; otherwise fail at once.
            timeout = httpx.Timeout(self.patience, connect=self.timeout.connect)
            answer = await self.client.get(f"{server.removesuffix('/v1')}/healthz", timeout=timeout)
        except httpx.TransportError as cause:
            raise _not_there(cause) from cause
        if answer.status_code != 200:
            raise _not_there()
        self._heard_at[server] = time.monotonic()

    def adapter(self, blobs: BlobStore, checkpoint: Checkpoint) -> Adapter:
        """The adapter by the hash of its manifest. A recreated checkpoint is another row with another id.

        Raises:
            BlobNotFound: the manifest is no longer in the blob store.
        """
        adapter = self._adapters.get(checkpoint.id)
        if adapter is None:
            manifest = blobs.read(f"{checkpoint.blob_prefix}/manifest.json")
            adapter = self._adapters[checkpoint.id] = Adapter.of(checkpoint.blob_prefix, manifest)
            if len(self._adapters) > ADAPTERS_REMEMBERED:
                self._adapters.popitem(last=False)
        return adapter


def _not_there(cause: httpx.TransportError | None = None) -> InferenceNotReady:
    if isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
        message = (
            "The inference server does not accept connections: it is not running or is starting. Try again."
        )
    else:
        message = "The inference server is starting; try again."
    return InferenceNotReady(message, retry_after=5)


async def _upstream(request: Request) -> Upstream:
    upstream: Upstream = request.app.state.upstream
    return upstream


Inference = Annotated[Upstream, Depends(_upstream)]


async def described(
    body: ChatCreate, project: CurrentProject, service: ServiceDep, upstream: Inference
) -> dict[str, Any]:
    """The request with the weights that its model name resolves to."""
    await refuse_unusable_schemas(tuple(body.schemas), service, project)
    return await to_thread.run_sync(with_weights, body, project, service, upstream)


class Generating(Protocol):
    """A request for an answer of a model."""

    @property
    def model(self) -> str: ...
    def model_copy(self, *, update: dict[str, Any]) -> Self: ...
    def forwarded(self, served: Served) -> dict[str, Any]: ...


def with_weights(body: Generating, project: Project, service: Service, upstream: Upstream) -> dict[str, Any]:
    """The request with the weights of its model. Blocks: it reads the database and the blob store."""
    base = service.registry.resolve(body.model)
    if base in service.registry.models:
        # OpenAI's responses name the snapshot of an alias.
        return body.model_copy(update={"model": base}).forwarded(Served(base_model=base))
    with service.database.read() as session:
        name = model_aliases.resolve(session, project.id, body.model)
        if (base := service.registry.resolve(name)) in service.registry.models:
            return body.model_copy(update={"model": base}).forwarded(Served(base_model=base))
        model = tuned_models.find(session, project.id, name)
        checkpoint = None if model is None else tuned_models.checkpoint_of(session, model)
        if model is None or checkpoint is None:
            if name != body.model:
                raise AliasTargetNotFound(body.model, name)
            names = model_aliases.callable_names(session, project.id, service.registry)
            raise ModelNotFound(body.model, names)
        if tuned_models.is_reward_model(session, model):
            raise tuned_models.only_scores(name, "model")
    try:
        adapter = upstream.adapter(service.blobs, checkpoint)
    except BlobNotFound:
        raise ModelNotFound(name, service.registry.names) from None
    served = Served(base_model=model.base_model, adapter=adapter)
    return body.model_copy(update={"model": name}).forwarded(served)


ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "A chat completion, or its chunks.", "content": {"text/event-stream": {}}}
}


@router.post("", responses=ANSWERS | refusals(404, 503))
async def create_chat_completion(
    request: Request, chat: Annotated[dict[str, Any], Depends(described)], upstream: Inference
) -> Response:
    """Create a chat completion, in one piece or as server-sent events."""
    return await passed_on(request, chat, upstream, CHAT)


async def passed_on(request: Request, body: dict[str, Any], upstream: Upstream, route: str) -> Response:
    """The response of the inference server."""
    answer = await until_gone(request.receive, upstream.send(body, route))
    if answer is None:
        return Response(status_code=499)
    if answer.status_code == 200 and _is(answer, "text/event-stream") and body.get("stream"):
        return PassedOn(answer)
    content = await until_gone(request.receive, read_response(answer))
    if content is None:
        return Response(status_code=499)
    kept = {name: answer.headers[name] for name in ("retry-after",) if name in answer.headers}
    return Response(content, answer.status_code, kept, answer.headers.get("content-type"))


async def read_response(answer: httpx.Response) -> bytes:
    """Read the body of a response and close it.

    Raises:
        ServiceError: the response is truncated, or did not come from an inference server that knows this API.
        InferenceNotReady: a proxy could not reach the inference server, or this one does not accept our key.
    """
    try:
        content = await answer.aread()
    except httpx.TransportError as cause:
        raise ServiceError(
            "The inference server closed the connection before its response was complete."
        ) from cause
    finally:
        await answer.aclose()
    if answer.status_code == 401:
        raise InferenceNotReady(
            "The inference server does not accept the key in REGRAFT_INFERENCE_KEY; try again.", retry_after=5
        )
    if not (_is(answer, "application/json") if answer.status_code == 200 else is_error(content)):
        raise _of_something_else(answer.status_code, content)
    return content


def _is(answer: httpx.Response, media_type: str) -> bool:
    return str(answer.headers.get("content-type", "")).startswith(media_type)


def _of_something_else(status: int, content: bytes) -> ServiceError:
    """The error for a response of another program, whose body our clients could not parse."""
    if is_unreached(status, content):
        return InferenceNotReady(
            f"The proxy could not reach the inference server (status {status}); try again.",
            retry_after=5,
        )
    return ServiceError(
        f"The inference server answered with status {status} and not in OpenAI's format: "
        "REGRAFT_INFERENCE_URL may point to another server, or lack /v1."
    )


class PassedOn(StreamingResponse):
    """The events of an upstream response, read as fast as the client reads them; both close together.

    Args:
        events: Converted events; None: the bytes unchanged.
    """

    def __init__(self, answer: httpx.Response, events: AsyncGenerator[bytes, None] | None = None) -> None:
        self.answer = answer
        super().__init__(events or _events(answer), media_type="text/event-stream", headers=UNBUFFERED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.answer.aclose()


async def _events(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    try:
        async for part in answer.aiter_raw():
            yield part
    except httpx.TransportError:  # too late for a status code; clients raise on an error event
        error = ServiceError("The inference server closed the connection before its response was complete.")
        yield sent_event(encode(error.envelope()))
