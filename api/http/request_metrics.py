"""Request latency by route: plain ASGI, as in api/http/middleware.py, and the outermost middleware."""

import logging
import time

from prometheus_client import Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.telemetry import logs, tracing
from core.telemetry.metrics import COUNTED

log = logging.getLogger(__name__)

PROBES = frozenset({"/healthz", "/readyz"})
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
REQUESTS = Histogram(
    "regraft_http_request_seconds",
    "Seconds from the arrival of a request to the first byte of its response.",
    ("route", "method", "status"),
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=COUNTED,
)


class Measured:
    """Observes each response when it starts: the duration of a stream or download depends on the client."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                later = "retry-after" in Headers(raw=message.get("headers", []))
                self._record_request(scope, message["status"], later, time.perf_counter() - started)
            await send(message)

        with tracing.request(scope["method"], Headers(scope=scope)):
            await self.app(scope, receive, timed)

    def _record_request(self, scope: Scope, status: int, later: bool, seconds: float) -> None:
        route = route_of(scope)
        tracing.answered(scope["method"], route, status, scope.get("state", {}).get("request_id", ""))
        # A model that is being loaded is no error: its 503 is counted apart.
        counted = "later" if status == 503 and later else f"{status // 100}xx"
        REQUESTS.labels(route, method_of(scope), counted).observe(seconds)
        if route not in PROBES:
            fields = logs.extra(route=route, status=status, ms=round(1000 * seconds))
            log.info("%s %s", scope["method"], scope["path"], extra=fields)


def route_of(scope: Scope) -> str:
    """The route's template, such as /v1/files/{file_id}; "none" for unknown paths, which would be unbounded labels."""
    return getattr(scope.get("route"), "path", "none")


def method_of(scope: Scope) -> str:
    """The HTTP method; unknown ones are unbounded labels, too."""
    method: str = scope["method"]
    return method if method in METHODS else "other"
