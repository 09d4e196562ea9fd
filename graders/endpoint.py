"""endpoint: a web server of the user's says the score."""

from __future__ import annotations

import fnmatch
import ipaddress
import json
import math
import re
import ssl
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from graders.calls import NoAnswer, Pace, Patience, post
from graders.template import quoted
from graders.types import ErrorKind, Grade, Item, Sample, StepScore, steps_of

MAX_PAYLOAD = 1_000_000  # bytes
TIMEOUT_S = 600.0

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
_OURS = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection"})


def checked_url(url: str) -> str:
    """The same URL; raise ValueError unless it is https, or http to this very machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not host or parts.scheme not in ("http", "https") or re.search(r"[\s\x00-\x1f]", url):
        raise ValueError("expected a URL that starts with https://")
    if parts.scheme == "http" and not _is_loopback(host):
        raise ValueError("expected https; http is for servers on this machine only")
    if parts.username is not None or parts.password is not None:
        raise ValueError("put secrets into 'headers', not into the URL")
    _ = parts.port  # raises ValueError if it is none
    return url


def checked_headers(headers: dict[str, str]) -> dict[str, str]:
    """The same headers; raise ValueError for what HTTP cannot carry or we set. Values are not repeated."""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _OURS:
            raise ValueError(f"{quoted(name)} cannot be set")
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"the value of {quoted(name)} must be printable ASCII")
    return headers


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # takes longer than a call, so not once a call


def _connect() -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=_tls())


@dataclass(frozen=True)
class Endpoints:
    """Leave to call endpoints, which, and how. Whoever builds graders for users decides whether to give it.

    `hosts` are names as they stand in the URL, `*` for any run of characters. A user must not reach what only
    this machine can, so that list is the operator's.
    """

    hosts: tuple[str, ...]
    patience: Patience = field(default_factory=Patience)
    connect: Callable[[], AbstractAsyncContextManager[httpx.AsyncClient]] = _connect
    new_trace_id: Callable[[], str] = lambda: f"trace_{uuid.uuid4()}"
    timeout_s: float = TIMEOUT_S
    clock: Callable[[], float] = time.monotonic

    def allow(self, url: str) -> bool:
        host = urlsplit(url).hostname or ""
        return any(fnmatch.fnmatchcase(host, pattern.lower()) for pattern in self.hosts)


@dataclass(frozen=True)
class Endpoint:
    """POSTs {"sample", "item", "trace_id"} and reads {"score": number}, and "steps" if they are there.

    A server that cannot be reached or answers with an error status is its own fault (server_error, after three
    retries if it may pass); a request too large to send or an answer without a score is ours to tell apart
    (internal_error). Each call is a connection of its own, so a grader may be used from any event loop.
    """

    name: str
    url: str
    headers: Mapping[str, str] = field(repr=False)
    endpoints: Endpoints
    pace: Pace
    type: ClassVar[str] = "endpoint"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        payload = {"sample": sample.as_namespace(), "item": item, "trace_id": self.endpoints.new_trace_id()}
        body = json.dumps(payload, default=dict, separators=(",", ":")).encode()
        if len(body) > MAX_PAYLOAD:
            return _unusable(f"the request is {len(body)} bytes, more than {MAX_PAYLOAD}")
        try:
            async with self.endpoints.connect() as client:
                answer = await post(
                    client,
                    self.url,
                    body,
                    dict(self.headers),
                    patience=self.endpoints.patience,
                    pace=self.pace,
                    timeout_s=self.endpoints.timeout_s,
                )
        except NoAnswer as silence:
            return Grade(None, f"no answer: {silence}", ErrorKind.endpoint_grader_server_error)
        if not answer.ok:
            reason = f"HTTP {answer.status}: {quoted(answer.text)}"
            return Grade(None, reason, ErrorKind.endpoint_grader_server_error)
        score = _score(answer.text)
        if score is None:
            return _unusable(f'expected {{"score": number}}, got {quoted(answer.text)}')
        try:
            steps = _steps(answer.text, sample)
        except ValueError as wrong:
            return _unusable(f"its steps cannot be used: {wrong}")
        return Grade(score, f"the endpoint says {score:g}", steps=steps)


def _steps(text: str, sample: Sample) -> tuple[StepScore, ...]:
    return steps_of(json.loads(text).get("steps", []), len(sample.output_text))


def _score(text: str) -> float | None:
    try:
        answer: Any = json.loads(text)
        score = answer["score"] if isinstance(answer, dict) else None
        number = float(score) if isinstance(score, (int, float)) and not isinstance(score, bool) else math.nan
    except (ValueError, KeyError, OverflowError, RecursionError):
        return None
    return number if math.isfinite(number) else None


def _unusable(reason: str) -> Grade:
    return Grade(None, reason, ErrorKind.endpoint_grader_internal_error)
