"""Prometheus metrics of a process, and the server that exposes them.

Label values come from our code, or from the operator's configuration (GPU classes), never from a request, a job or a
project: each new value is another time series that Prometheus stores.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.metrics_core import Metric

from core.addresses import HostPort

log = logging.getLogger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series

# Metrics of this process. Not the library's default registry: vLLM writes into that one.
COUNTED = CollectorRegistry()


class MetricsCollector(Protocol):
    """Computes its metrics at each scrape."""

    def collect(self) -> Iterable[Metric]: ...


@contextmanager
def served(
    host: str, port: int, collectors: Iterable[MetricsCollector] = ()
) -> Iterator[Callable[[MetricsCollector], None]]:
    """Serve `GET /metrics` on a separate port, because it is unauthenticated. 0: off.

    Yields a function that adds a collector, for those that exist only after the port is known to be free.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    registry = CollectorRegistry(auto_describe=False)
    for collector in (COUNTED, *collectors):
        registry.register(collector)
    if not port:
        yield registry.register
        return
    for kind in (ProcessCollector, PlatformCollector, GCCollector):
        kind(registry=registry)
    server, thread = start_http_server(port, host, registry)
    log.info("metrics at http://%s/metrics", HostPort(host, port))
    try:
        yield registry.register
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
