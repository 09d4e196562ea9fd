"""Large JSON bodies: read only with a valid key, and parsed a few at a time.

FastAPI reads and parses a body before any dependency runs, the one that checks the key included, and 2 MB of JSON can
become 30 MB of Python objects.
"""

import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.admission import AdmittedRequest, ConcurrencyLimit

_current: ContextVar["_Body | None"] = ContextVar("large_body", default=None)


class BodyRejected(HTTPException):
    """Carries `cause` through FastAPI's body parsing, which re-raises only HTTPException."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(500)
        self.cause = cause


class LargeBodies:
    """Checks the key before reading a body beyond `small` bytes, and bounds how many are in memory.

    A body holds a place in `arriving` from its first byte (or from byte `small` if its length was not announced), and
    one in `parsed` from its last byte. Both are released when the application waits for the client to disconnect, calls
    `body_is_read`, starts the response, or returns. There are two limits, so that slow clients do not keep others from
    having their bodies parsed.

    Args:
        streamed: Requests whose whole path matches read their body in pieces, after their key was checked.
        owner: Returns the id of the project of a request's key; raises for an invalid key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        small: int,
        streamed: re.Pattern[str],
        owner: Callable[[Request], Awaitable[str]],
        arriving: ConcurrencyLimit,
        parsed: ConcurrencyLimit,
    ) -> None:
        self.app = app
        self.small = small
        self.streamed = streamed
        self.owner = owner
        self.arriving, self.parsed = arriving, parsed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.streamed.fullmatch(scope["path"]):
            await self.app(scope, receive, send)
            return
        body = _Body(self, Request(scope), receive)

        async def send_without_place(message: Message) -> None:
            body.leave()
            await send(message)

        outer = _current.set(body)
        try:
            await self.app(scope, body.receive, send_without_place)
        finally:
            body.leave()
            _current.reset(outer)


def body_is_read() -> None:
    """Release the place of this body, for an endpoint that may wait long without watching for a disconnect."""
    body = _current.get()
    if body is not None:
        body.leave()


class _Body:
    """The body of one request. A small body needs no key check and no place."""

    def __init__(self, limits: LargeBodies, request: Request, receive: Receive) -> None:
        self._limits, self._request, self._receive = limits, request, receive
        self._announced = int(request.headers.get("content-length", "0"))
        self._received = 0
        self._is_complete = False
        self._owner: str | None = None
        self._places: list[AdmittedRequest] = []

    async def receive(self) -> Message:
        if self._is_complete:
            self.leave()
            return await self._receive()
        if self._announced > self._limits.small:
            await self._admit()
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self._limits.small:
            await self._admit()
        self._is_complete = not message.get("more_body", False)
        if self._is_complete and self._owner is not None and message["type"] == "http.request":
            self._places.append(await self._limits.parsed.enter(self._owner))
        return message

    def leave(self) -> None:
        while self._places:
            self._places.pop().leave()

    async def _admit(self) -> None:
        """Check the key and wait for a place, once. Raises Refused."""
        if self._owner is not None:
            return
        try:
            self._owner = await self._limits.owner(self._request)
            self._places.append(await self._limits.arriving.enter(self._owner))
        except Exception as cause:
            raise BodyRejected(cause) from cause
