"""Rate limits: requests per minute and project, as a token bucket.

The bucket starts full with a minute's worth of tokens, so short bursts pass; each request takes one token, and one is
added every 60 / requests_per_minute seconds.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # installed with the production extra only
    from redis import Redis

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TakenToken:
    """The result of taking one token: whether it was available, and the fill level now."""

    allowed: bool
    tokens: float
    per_minute: int

    @property
    def retry_after(self) -> int:
        """Whole seconds until the next request is allowed, at least one."""
        return max(1, math.ceil((1 - self.tokens) * 60 / self.per_minute))

    def headers(self) -> dict[str, str]:
        """OpenAI's rate limit headers; `reset` is when the bucket will be full."""
        full = (self.per_minute - self.tokens) * 60 / self.per_minute
        return {
            "x-ratelimit-limit-requests": str(self.per_minute),
            "x-ratelimit-remaining-requests": str(math.floor(self.tokens)),
            "x-ratelimit-reset-requests": duration(full),
        }


class Rates(Protocol):
    def take(self, project_id: str, per_minute: int) -> TakenToken:
        """Take one token from the project's bucket if available."""


class LocalRates:
    """Buckets of one process: the embedded default."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens, and the time of that count

    def take(self, project_id: str, per_minute: int) -> TakenToken:
        with self._lock:
            now = self._clock()
            tokens, then = self._buckets.get(project_id, (float(per_minute), now))
            tokens = min(per_minute, tokens + (now - then) * per_minute / 60)
            allowed = tokens >= 1
            tokens -= allowed
            self._buckets[project_id] = tokens, now
        return TakenToken(allowed, tokens, per_minute)


class RedisRates:
    """Buckets shared by all API processes, by the clock of Redis.

    If Redis does not respond, requests pass and a warning is logged: availability matters more than the limit. Redis is
    then skipped for `PAUSE_S` seconds, so that not every request waits for it.
    """

    PAUSE_S = 10.0
    # Reading, refilling and taking must be atomic, or two processes could take the same token.
    SCRIPT = """
        local most, now = tonumber(ARGV[1]), redis.call('TIME')
        now = now[1] + now[2] / 1000000
        local kept = redis.call('HMGET', KEYS[1], 'tokens', 'at')
        local tokens = tonumber(kept[1]) or most
        tokens = math.min(most, tokens + math.max(0, now - (tonumber(kept[2]) or now)) * most / 60)
        local allowed = 0
        if tokens >= 1 then allowed, tokens = 1, tokens - 1 end
        redis.call('HSET', KEYS[1], 'tokens', string.format('%.6f', tokens), 'at', string.format('%.6f', now))
        redis.call('EXPIRE', KEYS[1], 120)
        return {allowed, string.format('%.6f', tokens)}
    """

    def __init__(self, redis: "Redis", clock: Callable[[], float] = time.monotonic) -> None:
        self._take = redis.register_script(self.SCRIPT)
        self._clock = clock
        self._asked_again_at = 0.0

    @classmethod
    def at(cls, url: str, clock: Callable[[], float] = time.monotonic) -> "RedisRates":
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        # On the path of every request, so none may wait for an unavailable Redis: no retries, and a timeout of 0.1 s.
        patience = {"socket_timeout": 0.1, "socket_connect_timeout": 0.1, "retry": Retry(NoBackoff(), 0)}
        return cls(Redis.from_url(url, **patience), clock)

    def take(self, project_id: str, per_minute: int) -> TakenToken:
        from redis import RedisError

        if self._clock() >= self._asked_again_at:
            try:
                allowed, tokens = self._take(keys=[f"regraft:rate:{project_id}"], args=[per_minute])
                return TakenToken(bool(allowed), float(tokens), per_minute)
            except RedisError as cause:
                log.warning("Redis does not answer (%s): requests are not limited meanwhile", cause)
                self._asked_again_at = self._clock() + self.PAUSE_S
        return TakenToken(True, float(per_minute), per_minute)


def open_rates(broker_url: str) -> Rates:
    """Shared buckets if the broker is Redis, otherwise local ones."""
    if not broker_url.startswith(("redis://", "rediss://")):
        return LocalRates()
    return RedisRates.at(broker_url)


def duration(seconds: float) -> str:
    """As OpenAI writes it, in whole seconds, rounded up: 1s, 6m0s."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
