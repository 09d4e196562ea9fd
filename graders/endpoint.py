"""endpoint: the user's web server returns the score."""

from __future__ import annotations

import ipaddress
import json
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import httpx

from core.masking import hide_in_error, secrets_of
from core.outbound.http import Outgoing, UrlNotAllowed, host_of, is_address, matches, parse, resolve_host
from graders.calls import CallRetryPolicy, NoAnswer, RateLimit, ServerAway, post, quoted_reply
from graders.template import quoted
from graders.types import ErrorKind, Grade, Item, Sample, StepScore, is_score, steps_of, too_large

MAX_PAYLOAD = 1_000_000  # bytes
TIMEOUT_S = 600.0

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)?")
_OURS = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "expect",
        "host",
        "te",
        "transfer-encoding",
        "upgrade",
    }
)


def checked_url(url: str) -> str:
    """Return the URL. Raises ValueError unless it is https, or http to this machine."""
    if re.search(r"[\s\x00-\x1f]", url):
        raise ValueError("expected a URL that starts with https://")
    try:
        parsed = parse(url)
    except UrlNotAllowed as refused:
        raise ValueError(str(refused)) from None
    if parsed.scheme == "http" and not _is_loopback(host_of(parsed)):
        raise ValueError("expected https; http is for servers on this machine only")
    return url


def checked_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers. Raises ValueError for invalid and reserved ones, without quoting their secret values."""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _OURS:
            raise ValueError(f"{quoted(name)} cannot be set")
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"the value of {quoted(name)} must be printable ASCII without spaces around it")
    return headers


def url_problem(url: str, endpoints: Endpoints | None, callers: str) -> str:
    """The reason why this installation does not call the URL; "" if it does. `callers` begins the sentence."""
    if endpoints is None:
        return (
            f"{callers} are not enabled on this server: the operator must list the hosts that they may call "
            "([endpoints] in REGRAFT_GRADERS_FILE)."
        )
    if not endpoints.allow(url):
        return f"This server may call endpoints on {', '.join(endpoints.hosts)} only."
    return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Endpoints:
    """The operator's allow-list for endpoint graders, and their HTTP client.

    Args:
        hosts: Allowed host names and addresses, compared with the host in the URL; `*` matches any run of characters.
            Names must resolve to public addresses; an address, or `localhost`, listed without `*` may be private.
        private_hosts: Those of `hosts` that may resolve to private addresses; `*` matches any run of characters.
    """

    hosts: tuple[str, ...]
    patience: CallRetryPolicy = field(default_factory=CallRetryPolicy)
    private_hosts: tuple[str, ...] = ()
    resolve: Callable[[str], Sequence[str]] = resolve_host
    new_trace_id: Callable[[], str] = lambda: f"trace_{uuid.uuid4()}"
    timeout_s: float = TIMEOUT_S
    clock: Callable[[], float] = time.monotonic

    def allow(self, url: str) -> bool:
        """Return whether the host of a URL is on the allow-list. Names are resolved and checked only on each call."""
        host = host_of(parse(url))
        if not matches(host, self.hosts):
            return False
        if is_address(host):
            try:
                replace(self._outgoing(), resolve=lambda address: [address]).check(url)
            except UrlNotAllowed:
                return False
        return True

    def connect(self) -> httpx.AsyncClient:
        """Create a client that checks the resolved addresses at each call."""
        return self._outgoing().client()

    def _outgoing(self) -> Outgoing:
        own = tuple(host for host in self.hosts if host == "localhost" or is_address(host))
        setting = "private_hosts of [endpoints] in the file that REGRAFT_GRADERS_FILE names"
        return Outgoing((*own, *self.private_hosts), self.resolve, setting=setting)


@dataclass(frozen=True)
class Endpoint:
    """POSTs {"sample", "item", "trace_id"} and reads {"score": number}, and "steps" if present.

    An unreachable server or an error status is a server_error (after the retries of `endpoints.patience`); a request
    that is too large or a response without a score is an internal_error. Each call opens its own connection, so a
    grader may be used from any event loop.
    """

    name: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    endpoints: Endpoints
    pace: RateLimit
    type: ClassVar[str] = "endpoint"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        payload = {
            "sample": sample.as_namespace(),
            "item": item,
            "trace_id": sample.trace_id or self.endpoints.new_trace_id(),
        }
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
            return Grade(
                None, f"no answer: {hide_in_error(str(silence))}", ErrorKind.endpoint_grader_server_error
            )
        except ServerAway as away:
            raise ServerAway(
                f"The endpoint of the grader {self.name} is unavailable: {hide_in_error(str(away))}"
            ) from None
        if not answer.ok:
            reason = f"HTTP {answer.status}: {self._quoted(answer.text)}"
            return Grade(None, reason, ErrorKind.endpoint_grader_server_error)
        score = _score(answer.text)
        if score is None:
            return _unusable(f'expected {{"score": number}}, got {self._quoted(answer.text)}')
        if not is_score(score):
            return _unusable(f"the endpoint {too_large(score)}")
        try:
            steps = _steps(answer.text, sample)
        except ValueError as wrong:
            return _unusable(f"its steps cannot be used: {wrong}")
        return Grade(score, f"the endpoint returned {score:g}", steps=steps)

    def _quoted(self, answer: str) -> str:
        """The answer of the server for readers of the job, who may not see the secrets that the server was sent."""
        return quoted_reply(answer, *self.headers.values(), *secrets_of(self.url))


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
