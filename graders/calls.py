"""HTTP calls with retries, a rate limit, and bounded response size and time."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import httpx

from core.masking import hide_in_error, mask_values
from core.outbound.http import NoAddress, UrlNotAllowed, is_away, is_passing
from graders.deadline import standing_still
from graders.template import quoted

MAX_ANSWER = 1_000_000  # bytes, unless a caller says more
MAX_WAIT_S = 60.0  # upper bound of Retry-After
CONNECT_S = 10.0  # a host that is down or behind a firewall drops packets
_MAX_DOUBLINGS = 16
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class Reply:
    status: int
    text: str
    retry_after: str | None = None
    is_utf8: bool = True  # False: bytes that are not have been replaced in `text`
    headers: Mapping[str, str] = field(default_factory=dict)  # their names do not distinguish case

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_loading(self) -> bool:
        """Whether the server says that it can answer later: 503 with Retry-After."""
        return self.status == 503 and self.retry_after is not None


class NoAnswer(Exception):
    """The client could not reach the server or could not read the response."""


class AnswerTooLong(NoAnswer):
    """The server answered with more bytes than were allowed. A retry does not help."""


class ServerAway(ConnectionError):
    """The server was away for as long as the caller waits: the work must be repeated, and no sample is at fault."""


@dataclass(frozen=True)
class CallRetryPolicy:
    """Number of retries, and the clock."""

    retries: int = 3
    # How long to wait for a server that is unavailable, in all; then ServerAway. None: that is a failure as any other.
    away_seconds: float | None = None
    # Counted apart; None: as any other failure.
    retries_while_loading: int | None = None
    retries_after_silence: int | None = None  # after an attempt that took all of its time
    first_wait_s: float = 0.5
    sleep: Sleep = asyncio.sleep
    jitter: Callable[[], float] = random.random
    wall_clock: Callable[[], float] = time.time

    def wait_s(self, attempt: int, retry_after: str | None) -> float:
        """Return the pause before the next attempt: Retry-After, or else exponential backoff with jitter of 50 %."""
        asked = _seconds(retry_after, self.wall_clock()) if retry_after else None
        wait = (
            self.first_wait_s * 2 ** min(attempt, _MAX_DOUBLINGS) * (0.5 + self.jitter())
            if asked is None
            else asked
        )
        return min(wait, MAX_WAIT_S)


@dataclass
class RateLimit:
    """A rate limit: calls start at most `per_second` times a second, evenly spaced."""

    per_second: float | None
    sleep: Sleep = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    _next: float = field(default=-math.inf, init=False)

    async def turn(self) -> None:
        if self.per_second is None:
            return
        now = self.clock()
        start = max(now, self._next)
        self._next = start + 1 / self.per_second
        if start > now:
            with standing_still():
                await self.sleep(start - now)


async def post(
    client: httpx.AsyncClient,
    url: str,
    body: bytes,
    headers: dict[str, str],
    *,
    patience: CallRetryPolicy,
    pace: RateLimit,
    timeout_s: float,
    max_bytes: int = MAX_ANSWER,
    is_ours: bool = False,
) -> Reply:
    """Return the server's last response. Redirects are not followed.

    Args:
        timeout_s: Limit of each attempt, from its start to the last byte of the response.
        max_bytes: Limit of the response.
        is_ours: Whether to wait for a server that does not accept the key, as while its operator rotates the key, or
            that does not know the model: its models file may be older than the one that knows it.

    Raises:
        NoAnswer: No attempt got a response, or the client rejected the address, which is not retried.
        AnswerTooLong: as NoAnswer, which is not retried either.
        ServerAway: the server was away for `patience.away_seconds`.
    """
    tries = _Tries(patience)
    while True:
        await pace.turn()
        answer: Reply | None = None
        failure, silent, away = "", False, False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await _post_once(client, url, body, headers, timeout_s, max_bytes)
        except TimeoutError:
            silent = True
            failure = f"no response within {timeout_s:g} seconds"
        except httpx.LocalProtocolError:
            raise NoAnswer(
                "a header cannot be sent"
            ) from None  # its error quotes the value, which is a secret
        except (httpx.HTTPError, NoAddress) as error:
            failure, away = str(error) or type(error).__name__, _is_outage(error)
        except (UrlNotAllowed, httpx.InvalidURL, UnicodeError) as refused:
            raise NoAnswer(str(refused)) from refused
        if answer is not None and is_ours and (lacking := _lacking(answer)):
            failure, away = lacking, True
        elif answer is not None and not _is_passing(answer.status):
            return answer
        pause = tries.pause(answer, failure, silent=silent, away=away)
        if pause is not None:
            await patience.sleep(pause)
        elif answer is not None:
            return answer
        else:
            raise NoAnswer(failure)


class _Tries:
    """Counts the failures of one call, each kind by itself."""

    def __init__(self, patience: CallRetryPolicy) -> None:
        self._patience = patience
        self._failures = self._loading = self._silences = self._aways = 0
        self._waited = 0.0  # for a server that is unavailable

    def pause(self, answer: Reply | None, failure: str, *, silent: bool, away: bool) -> float | None:
        """The seconds until the next attempt, after a response or a failure; None: there is none.

        Raises:
            ServerAway: the server has been away for too long.
        """
        patience = self._patience
        retry_after = None if answer is None else answer.retry_after
        if answer is not None and (is_away(answer.status) or answer.status == 429):
            failure, away = f"HTTP {answer.status}", True
        if away and patience.away_seconds is not None:
            pause = patience.wait_s(self._aways, retry_after)
            self._aways += 1
            self._waited += pause
            if self._waited > patience.away_seconds:
                raise ServerAway(failure)
            return pause
        if answer is not None and answer.is_loading and patience.retries_while_loading is not None:
            self._loading += 1
            again = self._loading <= patience.retries_while_loading
        elif silent and patience.retries_after_silence is not None:
            self._silences += 1
            again = self._silences <= patience.retries_after_silence
        else:
            self._failures += 1
            again = self._failures <= patience.retries
        return patience.wait_s(max(0, self._failures - 1), retry_after) if again else None


async def _post_once(
    client: httpx.AsyncClient,
    url: str,
    body: bytes,
    headers: dict[str, str],
    timeout_s: float,
    max_bytes: int,
) -> Reply:
    # A compressed response of a megabyte can expand to a gigabyte, so compression is neither requested nor accepted.
    sent = {**headers, "content-type": "application/json", "accept-encoding": "identity"}
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s / 2, CONNECT_S))  # ends before the attempt does
    async with client.stream(
        "POST", url, content=body, headers=sent, timeout=timeout, follow_redirects=False
    ) as response:
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise NoAnswer(
                f"the answer is compressed ({quoted(encoding)}), although the request did not allow it"
            )
        read = bytearray()
        async for chunk in response.aiter_raw():
            read += chunk
            if len(read) > max_bytes:
                if not (200 <= response.status_code < 300 or 400 <= response.status_code < 500):
                    break  # the status is what counts
                raise AnswerTooLong(f"the answer is longer than {max_bytes} bytes")
        try:
            text, is_utf8 = read.decode(), True
        except UnicodeDecodeError:
            text, is_utf8 = read.decode(errors="replace"), False
        return Reply(
            response.status_code, text, response.headers.get("retry-after"), is_utf8, response.headers
        )


def unknown_model(status: int, text: str) -> str | None:
    """The message of an inference server that does not know the model; None: it does."""
    if status != 404:
        return None
    try:
        error = json.loads(text)["error"]
        return str(error["message"]) if error["code"] == "model_not_found" else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def _lacking(answer: Reply) -> str:
    """Why our own server cannot answer before its operator has changed a file; empty: it can."""
    return "HTTP 401" if answer.status == 401 else unknown_model(answer.status, answer.text) or ""


def quoted_reply(text: str, *keys: str) -> str:
    """Quote what a server answered, for readers of the job: without secrets, such as the keys that it was sent."""
    return quoted(hide_in_error(mask_values(text[:2000], keys)), 300)


def _is_passing(status: int) -> bool:
    return status == 409 or is_passing(status)  # 409: OpenAI's client retries it, too


def _is_outage(error: httpx.HTTPError | NoAddress) -> bool:
    """Whether there was no connection, or it broke. A name that does not exist may be a mistake of the user."""
    if isinstance(error, NoAddress):
        cause = error.__cause__
        return isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_AGAIN
    return isinstance(error, httpx.NetworkError | httpx.ConnectTimeout | httpx.RemoteProtocolError)


def _seconds(retry_after: str, now: float) -> float | None:
    """Parse Retry-After, which is a number of seconds or a date."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - now
        except (ValueError, OverflowError):  # a year or an offset of many digits
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
