"""Middleware for every request: OpenAI's headers, crashes, and bodies that are too large or too slow.

Plain ASGI, because Starlette's BaseHTTPMiddleware puts a queue between an endpoint and its streams.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
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


class TooSlow(HTTPException):
    """The client stopped sending the announced body, or sends it too slowly."""

    def __init__(self, least: int, window_s: float) -> None:
        super().__init__(
            408,
            f"The request body arrives too slowly: fewer than {least} bytes a second for {window_s:g} s.",
            # The rest of the body would be read as the next request.
            {"connection": "close"},
        )


class MinimumRate:
    """Minimum rate of a client: `least` bytes per second in each `window_s` seconds of waiting for it.

    Time in which the server does not read, because of a slow disk or a concurrency limit, does not count.
    """

    def __init__(self, least: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._least, self._window_s, self._clock = least, window_s, clock
        self._waited, self._received = 0.0, 0

    async def keep(self, receive: Receive) -> Message:
        """Receive the next piece of the body. Raises TooSlow."""
        if not self._least:
            return await receive()
        began = self._clock()
        try:
            async with asyncio.timeout(max(0.0, self._window_s - self._waited)):
                message = await receive()
        except TimeoutError:
            message = {"type": "http.request", "body": b"", "more_body": True}
            if not self._enough():
                raise TooSlow(self._least, self._window_s) from None
            self._waited, self._received = 0.0, 0
            return message
        self._waited += self._clock() - began
        self._received += len(message.get("body", b""))
        if self._waited >= self._window_s:
            if not self._enough():
                raise TooSlow(self._least, self._window_s)
            self._waited, self._received = 0.0, 0
        return message

    def _enough(self) -> bool:
        return self._received >= self._least * self._window_s


class BodyLimit:
    """Rejects bodies beyond `most_bytes` or below the minimum rate, and drains what a rejected client still sends.

    A request whose whole path matches `streamed` reads its body in pieces and has its own limit.

    Args:
        least_rate: Minimum bytes per second, on average over `window_s`; 0: none.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        most_bytes: int,
        streamed: re.Pattern[str],
        most_drained: int,
        least_rate: int = 0,
        window_s: float = 30.0,
    ) -> None:
        self.app = app
        self.least_rate, self.window_s = least_rate, window_s
        self.most_bytes = most_bytes
        self.streamed = streamed
        self.most_drained = most_drained

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        limited = not self.streamed.fullmatch(scope["path"])
        received = 0
        pace = MinimumRate(self.least_rate, self.window_s)

        async def next_piece() -> Message:
            nonlocal unread
            if not unread:
                return await receive()
            try:
                return await pace.keep(receive)
            except TooSlow:
                unread = False  # reading stopped
                raise

        async def counted() -> Message:
            nonlocal unread, received
            message = await next_piece()
            unread = unread and message.get("more_body", False)
            received += len(message.get("body", b""))
            if limited and received > self.most_bytes:
                # The only exception class that FastAPI's body parsing re-raises.
                raise HTTPException(413, f"The request body is larger than {self.most_bytes} bytes.")
            return message

        async def send_after_reading(message: Message) -> None:
            nonlocal unread
            # A client that is still sending when the connection closes may never read the response, so drain for a
            # while.
            budget = self.most_drained
            while unread and budget > 0:
                try:
                    rest = await next_piece()
                except TooSlow:
                    break
                unread = rest.get("more_body", False)
                budget -= len(rest.get("body", b""))
            unread = False
            await send(message)

        await self.app(scope, counted, send_after_reading)


def of_outage(cause: BaseException) -> ServiceError | None:
    """The answer during an outage; None: the error is no outage."""
    if isinstance(cause, ConnectionError | TimeoutError):
        return None  # Python's own may come from anywhere; those of the stores have other classes
    resource = outage(cause)
    if resource is None:
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
