"""Middleware for every request: OpenAI's headers and crashes.

Plain ASGI, because Starlette's BaseHTTPMiddleware puts a queue between an endpoint and its streams.
"""

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.json_responses import JSON
from core.errors import InsufficientStorage, ServiceError, Unavailable
from core.outages import Resource, outage
from core.storage.disk import count_refusal
from core.telemetry import logs

log = logging.getLogger(__name__)

_CALLERS_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RequestHeaders:
    """Sets the request id and duration headers, and turns a crash into a 500 in the common error shape."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(Headers(scope=scope))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        answering = False

        async def send_with_headers(message: Message) -> None:
            nonlocal answering
            if message["type"] == "http.response.start":
                answering = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str(round((time.perf_counter() - started) * 1000))
                headers["openai-version"] = "2020-10-01"
                headers["x-content-type-options"] = "nosniff"  # no browser takes a download for a page
                if organization_id := state.get("organization_id"):
                    headers["openai-organization"] = organization_id
                headers.update(state.get("answer_headers", {}))
            await send(message)

        with logs.bound(request_id=request_id):
            try:
                await self.app(scope, receive, send_with_headers)
            except Exception as cause:
                error = _crash(cause, scope, request_id)
                if answering:
                    raise  # too late for another status: the server closes the connection
                answer = JSON(error.envelope(), error.status_code, dict(error.headers))
                await answer(scope, receive, send_with_headers)


def of_outage(cause: BaseException) -> ServiceError | None:
    """The answer during an outage; None: the error is no outage."""
    resource = outage(cause)
    if (
        resource is None or resource is Resource.NETWORK
    ):  # an error of Python's own sockets: a mistake of the service
        return None
    log.error("the %s cannot be used: %r", resource, cause, exc_info=cause)
    count_refusal(resource)
    if resource is Resource.DISK:
        return InsufficientStorage()
    return Unavailable(f"The service cannot use its {resource} now. Try again in a moment.")


def _crash(cause: Exception, scope: Scope, request_id: str) -> ServiceError:
    """The error for an unexpected exception. Any library may raise one that means an outage."""
    if (unavailable := of_outage(cause)) is not None:
        return unavailable
    log.error("request failed: %s %s", scope["method"], scope["path"], exc_info=cause)
    return ServiceError(
        f"The server had an error while processing your request. The request ID is {request_id}."
    )


def _request_id(headers: Headers) -> str:
    request_id = headers.get("x-request-id", "")
    return request_id if _CALLERS_ID.fullmatch(request_id) else f"req_{secrets.token_hex(16)}"
