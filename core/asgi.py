"""Rules of every HTTP server of the service: the size and pace of request bodies, clients that leave, shutdown."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import NotReady

T = TypeVar("T")

RETRY_AFTER = 1  # seconds; for requests that a shutdown cuts
# Headers of server-sent events. The second one is for nginx, which would collect events into blocks.
UNBUFFERED = {"cache-control": "no-store", "x-accel-buffering": "no"}
END_OF_EVENTS = b"data: [DONE]\n\n"  # of OpenAI's streams


def sent_event(data: bytes, *, kind: str = "", event_id: str = "") -> bytes:
    """A server-sent event with JSON on one line, and the name and id that clients see."""
    names = [(b"id", event_id), (b"event", kind)]
    lines = [b"%s: %s\n" % (field, value.encode()) for field, value in names if value]
    return b"".join([*lines, b"data: ", data, b"\n\n"])


def json_event(body: dict[str, Any]) -> bytes:
    """A server-sent event of an inference server, whose texts are those of tokens."""
    return sent_event(json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())


async def received_data(parts: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """The data of the server-sent events that are complete with each part of a response."""
    unread = b""
    async for part in parts:
        *events, unread = (unread + part).split(b"\n\n")
        yield [event.removeprefix(b"data: ") for event in events if event.startswith(b"data: ")]


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


class CutRequests:
    """Answers 503 with Retry-After to a cancelled request without a response; uvicorn would send a bare 500.

    uvicorn cancels requests only at the end of its shutdown.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        responding = False

        async def noted(message: Message) -> None:
            nonlocal responding
            responding = responding or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            if scope["type"] != "http" or responding:
                raise
            error = NotReady("This server is shutting down. Retry the request.", retry_after=RETRY_AFTER)
            await JSONResponse(error.envelope(), error.status_code, dict(error.headers))(scope, receive, send)


async def until_gone(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; if the client disconnects first, cancel it and return None.

    `receive` is that of an ASGI request whose body has been read.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
