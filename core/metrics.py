"""Numbers for Prometheus: what a process counts itself, and where they are read.

A label's values come from our code, or from what the operator configures (GPU classes): never from a request, a
job or a project, since each new value is another time series for as long as Prometheus remembers.
"""

import logging
from collections.abc import Iterable, Iterator
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

log = logging.getLogger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody reads

# What this process counts as it goes. Not the library's own registry: vLLM writes into that one.
COUNTED = CollectorRegistry()


class Collector(Protocol):
    """Knows its numbers when it is asked for them, at each scrape."""

    def collect(self) -> Iterable[Metric]: ...


@contextmanager
def served(host: str, port: int, collectors: Iterable[Collector] = ()) -> Iterator[None]:
    """Answer `GET /metrics` at a port of its own: it asks for no key, so it must not be where users are. 0: nowhere."""
    if not port:
        yield
        return
    registry = CollectorRegistry(auto_describe=False)
    for one in (COUNTED, *collectors):
        registry.register(one)
    for kind in (ProcessCollector, PlatformCollector, GCCollector):
        kind(registry=registry)
    server, thread = start_http_server(port, host, registry)
    log.info("metrics at http://%s:%d/metrics", host, port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
