"""What the inference server counts of the requests that it answers, for Prometheus."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from prometheus_client import Counter, Gauge, Histogram

from core.metrics import COUNTED

Result = Literal["answered", "refused", "not_ready", "failed", "left"]

REQUESTS = Counter(
    "regraft_inference_requests",
    "Requests by what came of them; left: the client went away first.",
    ("result",),
    registry=COUNTED,
)
for _result in Result.__args__:  # type: ignore[attr-defined]
    REQUESTS.labels(_result)
FIRST_TOKEN_SECONDS = Histogram(
    "regraft_inference_first_token_seconds",
    "From a request's arrival to the first token of an answer, loading included.",
    buckets=(0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=COUNTED,
)
TOKENS = Counter(
    "regraft_inference_tokens",
    "Tokens read (prompt) and written (completion).",
    ("model", "kind"),
    registry=COUNTED,
)
UNDER_WAY = Gauge("regraft_inference_answers", "Answers that are being written.", registry=COUNTED)
LOAD_SECONDS = Histogram(
    "regraft_inference_load_seconds",
    "How long loading took: of a base model, or of an adapter from the blob store.",
    ("what",),
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
    registry=COUNTED,
)


class Tally:
    """One request that is being answered. `model` is one of the registry's: a client's own words are no label."""

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
    """A request that was never begun."""
    REQUESTS.labels("not_ready" if status == 503 else "failed" if status >= 500 else "refused").inc()


def left() -> None:
    """A client went away before its request was begun."""
    REQUESTS.labels("left").inc()


@contextmanager
def loading(what: Literal["model", "adapter"]) -> Iterator[None]:
    """Time what is loaded meanwhile, unless that fails."""
    started = time.perf_counter()
    yield
    LOAD_SECONDS.labels(what).observe(time.perf_counter() - started)
