"""Prometheus metrics of a process, and the server that exposes them.

Label values come from our code, or from the operator's configuration (GPU classes), never from a request, a job or a
project: each new value is another time series that Prometheus stores.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.addresses import HostPort
from core.connections import connection_options
from core.settings import Settings

log = logging.getLogger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series

# Metrics of this process. Not the library's default registry: vLLM writes into that one.
COUNTED = CollectorRegistry()


class MetricsCollector(Protocol):
    """Computes its metrics at each scrape."""

    def collect(self) -> Iterable[Metric]: ...


@contextmanager
def served(
    listening: socket.socket | None, settings: Settings, collectors: Iterable[MetricsCollector] = ()
) -> Iterator[Callable[[MetricsCollector], None]]:
    """Serve `GET /metrics` at this bound socket, not at the API's, because it is unauthenticated. None: off.

    Yields a function that adds a collector, for those that exist only after the port is known to be free.
    """
    registry = CollectorRegistry(auto_describe=False)
    for collector in (COUNTED, *collectors):
        registry.register(collector)
    if listening is None:
        yield registry.register
        return
    for kind in (ProcessCollector, PlatformCollector, GCCollector):
        kind(registry=registry)
    config = uvicorn.Config(
        application(registry),
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=1,
        **connection_options(settings),
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="metrics", daemon=True)
    listening.listen()
    thread.start()
    log.info("metrics at http://%s/metrics", HostPort(*listening.getsockname()[:2]))
    try:
        yield registry.register
    finally:
        server.should_exit = True
        thread.join()


def application(registry: CollectorRegistry) -> Starlette:
    """`GET /metrics`, in the format that the client accepts. Collectors run in threads: some read the database."""

    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return Starlette(routes=[Route("/metrics", metrics)], middleware=[Middleware(GZipMiddleware)])
