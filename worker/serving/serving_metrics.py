"""Prometheus metrics of the inference server."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import httpx
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from core.telemetry.metrics import COUNTED

SCRAPE_SECONDS = 5.0
OF_VLLM = "vllm:"  # begins the names of its metrics
Result = Literal["answered", "refused", "not_ready", "failed", "left"]

REQUESTS = Counter(
    "regraft_inference_requests",
    "Requests by result; left: the client disconnected first.",
    ("result",),
    registry=COUNTED,
)
for _result in Result.__args__:  # type: ignore[attr-defined]
    REQUESTS.labels(_result)
FIRST_TOKEN_SECONDS = Histogram(
    "regraft_inference_first_token_seconds",
    "Time from a request's arrival to its first token, including the time to load the model.",
    buckets=(0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=COUNTED,
)
TOKENS = Counter(
    "regraft_inference_tokens",
    "Tokens processed, by kind: prompt or completion.",
    ("model", "kind"),
    registry=COUNTED,
)
UNDER_WAY = Gauge("regraft_inference_answers", "Completions in flight.", registry=COUNTED)
LOAD_SECONDS = Histogram(
    "regraft_inference_load_seconds",
    "Time to load a model, or to fetch an adapter or the weights of a whole model from the blob store.",
    ("what",),
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
    registry=COUNTED,
)


class Tally:
    """Metrics of one request. `model` is a name from the registry: client input must not become a label."""

    def __init__(self, arrived: float, model: str, answers: int) -> None:
        self._arrived, self._started = arrived, time.perf_counter()
        self._answers = answers
        self._read, self._written = TOKENS.labels(model, "prompt"), TOKENS.labels(model, "completion")
        self._counts = (0, 0)
        self._has_begun = False
        UNDER_WAY.inc(answers)

    def counted(self, prompt_tokens: int, completion_tokens: int) -> None:
        """The tokens so far."""
        read, written = self._counts
        self._read.inc(max(0, prompt_tokens - read))
        self._written.inc(max(0, completion_tokens - written))
        self._counts = max(read, prompt_tokens), max(written, completion_tokens)

    def first_token_after(self, seconds: float | None) -> None:
        """The first token was written this long after the request was ready for its model; None: now."""
        if not self._has_begun:
            self._has_begun = True
            now = time.perf_counter() if seconds is None else self._started + seconds
            FIRST_TOKEN_SECONDS.observe(now - self._arrived)

    def ended(self, result: Result) -> None:
        UNDER_WAY.dec(self._answers)
        REQUESTS.labels(result).inc()


def refused(status: int) -> None:
    """Count a request that was refused."""
    REQUESTS.labels("not_ready" if status == 503 else "failed" if status >= 500 else "refused").inc()


def left() -> None:
    """Count a client that disconnected before its request started."""
    REQUESTS.labels("left").inc()


_ENGINES: dict[Path, None] = {}  # the sockets of this process's engines


@contextmanager
def of_engine(socket: Path) -> Iterator[None]:
    """Report the metrics of the engine at this socket during the context."""
    _ENGINES[socket] = None
    try:
        yield
    finally:
        del _ENGINES[socket]


class VllmMetrics:
    """Collects vLLM's own metrics from the engines of this process. Their samples differ by the model's name."""

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for socket in [*_ENGINES]:
            for family in _metrics_at(socket):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()


def _metrics_at(socket: Path) -> Iterable[Metric]:
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=SCRAPE_SECONDS) as client:
            text = client.get("http://engine/metrics").text
    except httpx.TransportError:
        return []  # it is about to be replaced
    return [family for family in text_string_to_metric_families(text) if family.name.startswith(OF_VLLM)]


class OwnVllmMetrics:
    """Collects the metrics that vLLM's server in this process writes into the library's default registry."""

    def collect(self) -> Iterator[Metric]:
        for family in REGISTRY.collect():
            if family.name.startswith(OF_VLLM):
                yield family


@contextmanager
def loading(what: Literal["model", "adapter", "weights"]) -> Iterator[None]:
    """Record the duration of a load, unless it fails."""
    started = time.perf_counter()
    yield
    LOAD_SECONDS.labels(what).observe(time.perf_counter() - started)
