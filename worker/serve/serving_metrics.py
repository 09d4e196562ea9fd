"""Prometheus metrics of the inference server."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from prometheus_client import Counter, Gauge, Histogram

from core.telemetry.metrics import COUNTED

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
    "Time to load a base model, or an adapter from the blob store.",
    ("what",),
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
    registry=COUNTED,
)


class Tally:
    """Metrics of one request. `model` is a name from the registry: client input must not become a label."""

    def __init__(self, arrived: float, model: str, prompt_tokens: int, answers: int) -> None:
        self._arrived: float | None = arrived
        self._answers = answers
        self._written = TOKENS.labels(model, "completion")
        TOKENS.labels(model, "prompt").inc(prompt_tokens)
        UNDER_WAY.inc(answers)

    def wrote(self) -> None:
        """Another token."""
        self._written.inc()
        if self._arrived is not None:
            FIRST_TOKEN_SECONDS.observe(time.perf_counter() - self._arrived)
            self._arrived = None

    def ended(self, result: Result) -> None:
        UNDER_WAY.dec(self._answers)
        REQUESTS.labels(result).inc()


def refused(status: int) -> None:
    """Count a request that was refused."""
    REQUESTS.labels("not_ready" if status == 503 else "failed" if status >= 500 else "refused").inc()


def left() -> None:
    """Count a client that disconnected before its request started."""
    REQUESTS.labels("left").inc()


@contextmanager
def loading(what: Literal["model", "adapter"]) -> Iterator[None]:
    """Record the duration of a load, unless it fails."""
    started = time.perf_counter()
    yield
    LOAD_SECONDS.labels(what).observe(time.perf_counter() - started)
