"""Send the webhook deliveries queued by core/outbound/webhooks.py, with retries for 72 hours.

Any number of processes may send at once. A process claims a delivery by moving its next attempt past the longest
possible duration of this one. If the process dies, another one makes the next attempt under the same id.
"""

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from sqlalchemy import ColumnElement, case, delete, select, update
from sqlalchemy.orm import Session, aliased

from core.claims import bound_time
from core.database.engine import Database, db_now
from core.database.states import JOB
from core.database.tables import Job, WebhookDelivery, WebhookEndpoint
from core.masking import hide_in_error
from core.outbound import webhooks
from core.outbound.http import Outgoing, Unreachable, UrlNotAllowed
from core.retry import RetryPolicy
from worker.telemetry import WEBHOOK_ATTEMPTS

log = logging.getLogger(__name__)

AT_ONCE = 4
POLL_SECONDS = 1.0
# An attempt takes at most 10 seconds, unless a name server does not respond.
LEASE_SECONDS = 120.0
FIRST_RETRY, MAX_RETRY = 5.0, 4 * 3600.0
MAX_DOUBLINGS = 12  # from FIRST_RETRY to MAX_RETRY
MIN_JITTER, MAX_JITTER = 0.75, 1.25
GIVE_UP_AFTER = 72 * 3600.0
RETENTION_SECONDS = 30 * 86400.0


def back_off(attempts: int) -> float:
    """Return the seconds to wait after `attempts` failures: 5, 10, 20, ... up to four hours."""
    return min(FIRST_RETRY * 2.0 ** min(attempts - 1, MAX_DOUBLINGS), MAX_RETRY)


@dataclass(frozen=True)
class Claimed:
    """A delivery claimed until `LEASE_SECONDS` after `at`. No endpoint: it was deleted."""

    delivery: WebhookDelivery
    endpoint: WebhookEndpoint | None
    at: float


@dataclass(frozen=True)
class DeliveryResult:
    """The response status, or the error."""

    status: int | None = None
    error: str | None = None

    @property
    def delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class Deliveries:
    """Sends webhooks. `clock` is Unix time, by default the database's, because many machines compare it."""

    def __init__(
        self,
        database: Database,
        outgoing: Outgoing,
        *,
        clock: Callable[[], ColumnElement[float] | float] = db_now,
        jitter: Callable[[], float] = lambda: random.uniform(MIN_JITTER, MAX_JITTER),
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.database = database
        self.outgoing = outgoing
        self.clock = clock
        self.jitter = jitter
        self.poll_seconds = poll_seconds
        self._stopping = threading.Event()

    def run_until(self, stop: threading.Event) -> None:
        """Send due deliveries, `AT_ONCE` at a time and one per endpoint, so that a slow endpoint delays no other."""
        self._stopping = stop
        busy: dict[Future[None], str] = {}
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="delivery") as pool:
            while not stop.is_set():
                try:
                    while len(busy) < AT_ONCE and (claimed := self.claim(except_for=busy.values())):
                        busy[pool.submit(self.deliver, claimed)] = claimed.delivery.endpoint_id
                except Exception:
                    log.exception("could not query due webhook deliveries; retrying")
                if not busy:
                    stop.wait(self.poll_seconds)
                for done in wait(busy, self.poll_seconds, FIRST_COMPLETED).done:
                    del busy[done]
                    if cause := done.exception():
                        log.error("a webhook delivery failed; retrying", exc_info=cause)

    def claim(self, *, except_for: Iterable[str] = ()) -> Claimed | None:
        """Claim the delivery that has been due for longest, except for these endpoints. None: nothing is due."""
        candidate = aliased(WebhookDelivery)
        due = (
            select(candidate.seq)
            .where(
                candidate.settled.is_(False),
                candidate.next_attempt_at <= self.clock(),
                candidate.endpoint_id.not_in(list(except_for)),
            )
            .order_by(candidate.next_attempt_at, candidate.seq)
            .limit(1)
        )
        with self.database.read() as session:  # avoids a write transaction every second
            if session.scalar(due) is None:
                return None
        take = (
            update(WebhookDelivery)
            .where(WebhookDelivery.seq == due.with_for_update(skip_locked=True).scalar_subquery())
            .values(attempts=WebhookDelivery.attempts + 1, next_attempt_at=self.clock() + LEASE_SECONDS)
            .returning(WebhookDelivery)
            .execution_options(synchronize_session=False)
        )
        with self.database.write() as session:
            delivery = session.scalar(take)
            if delivery is None:
                return None
            of_it = WebhookEndpoint.id == delivery.endpoint_id
            endpoint = session.scalar(select(WebhookEndpoint).where(of_it))
        return Claimed(delivery, endpoint, delivery.next_attempt_at - LEASE_SECONDS)

    def deliver(self, claimed: Claimed) -> None:
        """Make one attempt and record its outcome, which is not lost in a short outage: it would be sent again."""
        outcome = self.send(claimed)
        retry = RetryPolicy(LEASE_SECONDS / 2, log.warning, wait=self._stopping.wait)
        retry(partial(self.settle, claimed, outcome))

    def send(self, claimed: Claimed) -> DeliveryResult:
        """Send one attempt. The body and id are the same each time; the signature has the current time."""
        if claimed.endpoint is None:
            return DeliveryResult(error="the endpoint was deleted")
        delivery = claimed.delivery
        headers = webhooks.headers(claimed.endpoint, delivery.id, delivery.body, int(claimed.at))
        try:
            status = asyncio.run(self.outgoing.post(claimed.endpoint.url, delivery.body.encode(), headers))
        except (UrlNotAllowed, Unreachable) as problem:
            return DeliveryResult(error=hide_in_error(str(problem)))
        except Exception as surprise:  # without an outcome it would be retried forever
            log.exception("sending webhook %s failed", delivery.id)
            return DeliveryResult(error=hide_in_error(repr(surprise)))
        return DeliveryResult(status)

    def settle(self, claimed: Claimed, outcome: DeliveryResult) -> None:
        """Mark the delivery as done, or schedule the next attempt, up to 72 hours after the event."""
        delivery = claimed.delivery
        error = outcome.error
        if error is None and not outcome.delivered:
            error = f"the endpoint answered {outcome.status}"
        change = update(WebhookDelivery).where(WebhookDelivery.seq == delivery.seq)
        change = change.values(last_status=outcome.status, last_error=error)
        result = "delivered"
        if outcome.delivered:
            change = change.values(settled=True, delivered_at=int(claimed.at))
        else:
            # Another attempt may have succeeded if this one took longer than its lease.
            change = change.where(
                WebhookDelivery.settled.is_(False), WebhookDelivery.attempts == delivery.attempts
            )
            end = delivery.created_at + GIVE_UP_AFTER
            if claimed.endpoint is None or claimed.at >= end:
                result, change = "given_up", change.values(settled=True)
                log.warning("gave up on webhook %s to %s: %s", delivery.id, delivery.endpoint_id, error)
            else:
                again = claimed.at + back_off(delivery.attempts) * self.jitter()
                result, change = "failed", change.values(next_attempt_at=min(again, end))
        with self.database.write() as session:
            session.execute(change)
        WEBHOOK_ATTEMPTS.labels(result).inc()


def bound_times(session: Session) -> None:
    """As of jobs (core/jobs/lifecycle.py): no attempt is later than its back-off allows."""
    longest = {
        attempts: max(LEASE_SECONDS, MAX_JITTER * back_off(attempts))
        for attempts in range(1, MAX_DOUBLINGS + 1)
    }
    seconds = case(longest, value=WebhookDelivery.attempts, else_=MAX_JITTER * MAX_RETRY)
    bound_time(session, WebhookDelivery.next_attempt_at, seconds)


def remove_old(database: Database, clock: Callable[[], ColumnElement[float] | float] = db_now) -> None:
    """Delete deliveries settled 30 days ago, except of unfinished jobs, whose thresholds fire only once."""
    unfinished = (
        select(Job.seq).where(Job.id == WebhookDelivery.job_id, Job.status.not_in(JOB.final)).exists()
    )
    old = (
        select(WebhookDelivery.seq)
        .where(
            WebhookDelivery.settled.is_(True),
            WebhookDelivery.next_attempt_at < clock() - RETENTION_SECONDS,  # indexed
            WebhookDelivery.created_at
            < clock() - RETENTION_SECONDS,  # deleted deliveries were never attempted
            ~unfinished,
        )
        .limit(1000)
    )
    with database.read() as session:
        seqs = session.scalars(old).all()
    if seqs:
        with database.write() as session:
            session.execute(delete(WebhookDelivery).where(WebhookDelivery.seq.in_(seqs)))
