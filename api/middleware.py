"""What surrounds every request, whatever answers it: OpenAI's headers, crashes, bodies too large to hold.

Plain ASGI, because Starlette's BaseHTTPMiddleware would put a queue between an endpoint and its streams.
"""

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core import logs
from core.errors import ServiceError

log = logging.getLogger(__name__)

_CALLERS_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RequestHeaders:
    """Names the request, times it, and answers 500 in the right shape when the application crashes."""

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
                if organization_id := state.get("organization_id"):
                    headers["openai-organization"] = organization_id
                headers.update(state.get("answer_headers", {}))
            await send(message)

        with logs.bound(request_id=request_id):
            try:
                await self.app(scope, receive, send_with_headers)
            except Exception:
                log.exception("request failed: %s %s", scope["method"], scope["path"])
                if answering:
                    raise  # too late for another answer: the server cuts the connection, and the client notices
                message = (
                    f"The server had an error while processing your request. The request ID is {request_id}."
                )
                answer = JSONResponse(ServiceError(message).envelope(), status_code=500)
                await answer(scope, receive, send_with_headers)


class BodyLimit:
    """No body is held in memory beyond `most_bytes`, and none is left half read.

    A request whose whole path matches `streamed` reads its body in pieces and has a limit of its own.
    """

    def __init__(
        self, app: ASGIApp, *, most_bytes: int, streamed: re.Pattern[str], most_drained: int
    ) -> None:
        self.app = app
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

        async def counted() -> Message:
            nonlocal unread, received
            message = await receive()
            unread = unread and message.get("more_body", False)
            received += len(message.get("body", b""))
            if limited and received > self.most_bytes:
                # The one exception that FastAPI lets out of its reading of the body.
                raise HTTPException(413, f"The request body is larger than {self.most_bytes} bytes.")
            return message

        async def send_after_reading(message: Message) -> None:
            nonlocal unread
            # A client that is still sending when the connection closes may never see why. So read on a while.
            budget = self.most_drained
            while unread and budget > 0:
                rest = await receive()
                unread = rest.get("more_body", False)
                budget -= len(rest.get("body", b""))
            unread = False
            await send(message)

        await self.app(scope, counted, send_after_reading)


def _request_id(headers: Headers) -> str:
    asked = headers.get("x-request-id", "")
    return asked if _CALLERS_ID.fullmatch(asked) else f"req_{secrets.token_hex(16)}"
