"""Getting webhooks to where they should go: retries, many workers, crashes, and giving up."""

import asyncio
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from sqlalchemy import select

from core.database.engine import Database, Work
from core.database.tables import Project, WebhookDelivery, WebhookEndpoint
from core.jobs import lifecycle
from core.outbound import webhooks
from core.outbound.http import Outgoing
from core.settings import Settings
from core.step_metrics import StepMetrics
from core.storage.store import FolderBlobs
from tests import factories
from tests.fakes import crash_at
from tests.hooks import Receiver
from tests.present import present, untyped
from tests.worker.conftest import Bench
from worker.supervisor import deliveries
from worker.supervisor.deliveries import Deliveries, DeliveryResult, back_off
from worker.supervisor.reconciler import Reconciler

both_databases = pytest.mark.both_databases  # for claims and what else depends on SQL; the rest is about HTTP

HOUR = 3600


class Clock:
    """Shows what it is set to; what is written meanwhile has the real time."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def database(request: pytest.FixtureRequest, database_kind: str) -> Database:
    database: Database = request.getfixturevalue(f"{database_kind}_database")
    return database


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sender(database: Database, clock: Clock) -> Deliveries:
    return Deliveries(database, Outgoing(("127.0.0.1",), timeout_s=30), clock=clock, jitter=lambda: 1.0)


@pytest.fixture
def project(database: Database) -> Project:
    with database.write() as session:
        return factories.project(session)


def listen(database: Database, project: Project, url: str) -> WebhookEndpoint:
    with database.write() as session:
        return webhooks.create(
            session,
            project,
            name="hook",
            url=url,
            event_types=["fine_tuning.job.cancelled"],
            thresholds=None,
        )


def happen(database: Database, project: Project, times: int = 1) -> None:
    """A job is cancelled."""
    with database.write() as session:
        for _ in range(times):
            lifecycle.cancel(Work(session), factories.job(session, project))


def rows(database: Database) -> Sequence[WebhookDelivery]:
    with database.read() as session:
        return session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.seq)).all()


def row(database: Database) -> WebhookDelivery:
    [only] = rows(database)
    return only


def deliver_due(sender: Deliveries) -> None:
    """Everything that is due, one after the other."""
    while claimed := sender.claim():
        sender.deliver(claimed)


# Arriving.


@both_databases
def test_what_arrives_is_what_openais_client_unwraps(
    database: Database, project: Project, sender: Deliveries
) -> None:
    with Receiver([204]) as receiver:
        endpoint = listen(database, project, f"{receiver.url}/hook")
        happen(database, project)
        deliver_due(sender)

    [received] = receiver.received
    event = OpenAI(api_key="unused").webhooks.unwrap(received.body, received.headers, secret=endpoint.secret)
    delivery = row(database)
    assert (received.path, event.type) == ("/hook", "fine_tuning.job.cancelled")
    assert untyped(event.data).id == delivery.job_id
    assert received.headers["webhook-id"] == delivery.id
    assert (delivery.settled, delivery.attempts, delivery.last_status) == (True, 1, 204)
    assert delivery.delivered_at is not None


@both_databases
def test_an_event_that_arrived_is_not_sent_again(
    database: Database, project: Project, sender: Deliveries, clock: Clock
) -> None:
    with Receiver() as receiver:
        listen(database, project, receiver.url)
        happen(database, project)
        deliver_due(sender)
        clock.now += 100 * HOUR
        deliver_due(sender)

    assert len(receiver.received) == 1


# Trying again.


def test_the_waits_grow_from_five_seconds_to_four_hours() -> None:
    assert [back_off(attempts) for attempts in (1, 2, 3, 4)] == [5.0, 10.0, 20.0, 40.0]
    assert back_off(13) == back_off(10_000) == 4 * HOUR


def test_no_two_endpoints_that_fail_together_come_back_together(database: Database) -> None:
    jitter = Deliveries(database, Outgoing()).jitter

    waits = {jitter() for _ in range(100)}

    assert len(waits) == 100 and min(waits) >= 0.75 and max(waits) <= 1.25


@pytest.mark.parametrize("status", [301, 302, 307, 400, 404, 410, 429, 500, 503])
def test_every_other_status_is_tried_again_later_and_not_before(
    database: Database, project: Project, sender: Deliveries, clock: Clock, status: int
) -> None:
    with Receiver([status, 200]) as receiver:
        listen(database, project, receiver.url)
        happen(database, project)
        deliver_due(sender)
        failed = row(database)
        clock.now += 4.9
        deliver_due(sender)
        early = len(receiver.received)
        clock.now += 0.2
        deliver_due(sender)

    assert (failed.settled, failed.last_status) == (False, status)
    assert failed.last_error == f"the endpoint answered {status}"
    assert (early, len(receiver.received)) == (1, 2)
    assert row(database).settled and row(database).last_error is None


def test_a_retry_has_the_same_id_and_body_and_a_signature_of_its_own_time(
    database: Database, project: Project, sender: Deliveries, clock: Clock
) -> None:
    with Receiver([500, 200]) as receiver:
        listen(database, project, receiver.url)
        happen(database, project)
        deliver_due(sender)
        clock.now += 60
        deliver_due(sender)

    first, second = receiver.received
    assert first.body == second.body
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    waited = int(second.headers["webhook-timestamp"]) - int(first.headers["webhook-timestamp"])
    assert waited == 60
    assert first.headers["webhook-signature"] != second.headers["webhook-signature"]


@pytest.mark.slow
def test_an_endpoint_that_hangs_or_is_not_there_is_tried_again(
    database: Database, project: Project, clock: Clock
) -> None:
    impatient = Deliveries(database, Outgoing(("127.0.0.1",), timeout_s=0.2), clock=clock)
    with Receiver([0]) as receiver:
        listen(database, project, receiver.url)
        happen(database, project)
        deliver_due(impatient)
        hung = row(database)
    clock.now += HOUR
    deliver_due(impatient)  # nobody listens there any more

    assert (hung.settled, hung.last_status, hung.last_error) == (
        False,
        None,
        "no response within 0.2 seconds",
    )
    gone = row(database)
    assert (gone.settled, gone.attempts) == (False, 2)
    assert gone.last_error not in (None, hung.last_error)


@both_databases
@pytest.mark.slow
def test_it_is_given_up_72_hours_after_the_event_and_not_before(
    database: Database, project: Project, sender: Deliveries, clock: Clock
) -> None:
    with Receiver([500]) as receiver:
        listen(database, project, receiver.url)
        happen(database, project)
        created = row(database).created_at
        clock.now = created + 0.5
        tried = []
        while not row(database).settled:
            deliver_due(sender)
            tried.append(clock.now - created)
            clock.now = row(database).next_attempt_at

    assert tried[:4] == pytest.approx([0.5, 5.5, 15.5, 35.5])
    assert tried[-1] == pytest.approx(72 * HOUR)
    assert 25 < len(receiver.received) == len(tried) < 40
    assert max(later - earlier for earlier, later in pairwise(tried)) <= 4 * HOUR
    delivery = row(database)
    assert (delivery.delivered_at, delivery.last_error) == (None, "the endpoint answered 500")


def test_after_days_without_any_worker_it_is_still_tried_once(
    database: Database, project: Project, sender: Deliveries, clock: Clock
) -> None:
    with Receiver() as receiver:
        listen(database, project, receiver.url)
        happen(database, project)
        clock.now += 100 * HOUR
        deliver_due(sender)

    assert len(receiver.received) == 1 and row(database).delivered_at is not None


def test_a_name_that_points_to_a_private_address_by_now_is_sent_nothing(
    database: Database, project: Project, clock: Clock
) -> None:
    with Receiver() as receiver:
        listen(database, project, f"http://hooks.example:{receiver.port}/")
        happen(database, project)
        outgoing = Outgoing(resolve=lambda host: ["127.0.0.1"])
        deliver_due(Deliveries(database, outgoing, clock=clock))

    assert receiver.received == []
    assert "not on the public internet" in present(row(database).last_error)


class Broken(Outgoing):
    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> int:
        raise RuntimeError("a mistake of ours")


def test_a_mistake_of_ours_is_an_attempt_like_any_other(
    database: Database, project: Project, clock: Clock
) -> None:
    listen(database, project, "https://hooks.example/")
    happen(database, project)

    deliver_due(Deliveries(database, Broken(), clock=clock))

    delivery = row(database)
    assert (delivery.settled, delivery.attempts) == (False, 1)
    assert delivery.last_error is not None
    assert "a mistake of ours" in delivery.last_error


# Endpoints that change.


@both_databases
def test_a_deleted_endpoint_is_sent_nothing_more(
    database: Database, project: Project, sender: Deliveries, clock: Clock
) -> None:
    with Receiver([500]) as receiver:
        endpoint = listen(database, project, receiver.url)
        happen(database, project)
        deliver_due(sender)
        with database.write() as session:
            webhooks.delete(session, session.get_one(WebhookEndpoint, endpoint.seq))
        clock.now += HOUR
        deliver_due(sender)

    assert len(receiver.received) == 1
    assert (row(database).settled, row(database).last_error) == (True, "the endpoint was deleted")


@both_databases
def test_an_event_that_was_written_just_as_its_endpoint_went_is_settled(
    database: Database, project: Project, sender: Deliveries
) -> None:
    happen(database, project)
    with database.write() as session:
        session.add(WebhookDelivery(endpoint_id="whep_gone", job_id="ftjob-1", type="t", body="{}"))

    deliver_due(sender)

    assert (row(database).settled, row(database).last_error) == (True, "the endpoint was deleted")


@both_databases
def test_a_new_url_gets_what_is_still_to_be_sent(
    database: Database, project: Project, sender: Deliveries, clock: Clock
) -> None:
    with Receiver([500]) as old, Receiver() as new:
        endpoint = listen(database, project, old.url)
        happen(database, project)
        deliver_due(sender)
        with database.write() as session:
            moved = session.get_one(WebhookEndpoint, endpoint.seq)
            webhooks.change(session, moved, {"url": new.url})
        clock.now += HOUR
        deliver_due(sender)

    assert (len(old.received), new.ids) == (1, old.ids)


# Many at once, and crashes.


@both_databases
def test_each_delivery_is_taken_by_one_of_many_workers(database: Database, project: Project) -> None:
    listen(database, project, "https://hooks.example/")
    happen(database, project, times=12)
    senders = [Deliveries(database, Outgoing()) for _ in range(4)]
    start = threading.Barrier(4)

    def take_all(sender: Any) -> list[Any]:
        start.wait()
        taken = []
        misses = 0
        while misses < 3:  # on PostgreSQL what another is just taking is passed over
            claimed = sender.claim()
            misses = 0 if claimed else misses + 1
            taken += [claimed.delivery.id] if claimed else []
        return taken

    with ThreadPoolExecutor(4) as pool:
        taken = [one for ids in pool.map(take_all, senders) for one in ids]

    assert len(taken) == 12 and len(set(taken)) == 12


@both_databases
def test_a_crash_between_sending_and_writing_it_down_sends_the_same_id_again(
    database: Database, project: Project, sender: Deliveries, clock: Clock
) -> None:
    with Receiver() as receiver:
        listen(database, project, receiver.url)
        happen(database, project)
        assert sender.send(present(sender.claim())).delivered  # and then the power goes
        meanwhile = sender.claim()
        clock.now += deliveries.LEASE_SECONDS + 1
        deliver_due(sender)

    assert meanwhile is None
    assert receiver.ids == [row(database).id] * 2
    assert (row(database).settled, row(database).attempts) == (True, 2)


@both_databases
def test_a_slow_attempt_that_failed_does_not_undo_the_one_that_arrived(
    database: Database, project: Project, sender: Deliveries, clock: Clock
) -> None:
    with Receiver() as receiver:
        listen(database, project, receiver.url)
        happen(database, project)
        slow = sender.claim()
        clock.now += deliveries.LEASE_SECONDS + 1
        deliver_due(sender)
        assert slow is not None
        sender.settle(slow, DeliveryResult(error="no answer"))

    assert row(database).delivered_at is not None and row(database).last_error is None


@both_databases
def test_an_endpoint_that_hangs_holds_up_no_other(database: Database, project: Project) -> None:
    stop = threading.Event()
    with Receiver([0]) as hanging, Receiver() as healthy:
        listen(database, project, hanging.url)
        listen(database, project, healthy.url)
        happen(database, project, times=deliveries.AT_ONCE + 2)
        # More for the one that hangs than there are attempts at once, and all of it is due before the rest.
        with database.write() as session:
            for delivery in session.scalars(select(WebhookDelivery)):
                delivery.next_attempt_at = float(delivery.seq % 2 == 0)
        sender = Deliveries(database, Outgoing(("127.0.0.1",), timeout_s=30))
        thread = threading.Thread(target=sender.run_until, args=[stop])
        thread.start()
        deadline = time.monotonic() + 60
        while len(healthy.received) < deliveries.AT_ONCE + 2 and time.monotonic() < deadline:
            stop.wait(0.01)
        hung = len(hanging.received)
        stop.set()
        hanging.hang_up()  # so that the thread need not wait for the timeout
        thread.join()

    assert len(set(healthy.ids)) == len(healthy.ids) == deliveries.AT_ONCE + 2
    assert hung <= 2


def test_a_database_that_is_away_for_a_moment_does_not_end_deliveries(
    database: Database, project: Project
) -> None:
    stop = threading.Event()

    class Hiccup(Deliveries):
        calls = 0

        def claim(self, **options: Iterable[str]) -> deliveries.Claimed | None:
            self.calls += 1
            if self.calls == 1:
                raise OSError("connection reset")
            return super().claim(**options)

    hiccup = Hiccup(database, Outgoing(("127.0.0.1",)), poll_seconds=0.01)
    with Receiver() as receiver:
        listen(database, project, receiver.url)
        happen(database, project)
        thread = threading.Thread(target=hiccup.run_until, args=[stop])
        thread.start()
        deadline = time.monotonic() + 60
        while not receiver.received and time.monotonic() < deadline:
            stop.wait(0.01)
        stop.set()
        thread.join()

    assert len(receiver.received) == 1 and row(database).settled


# Thresholds of a real run.


@pytest.mark.slow
def test_a_run_tells_of_each_threshold_once_though_it_repeats_the_step_that_reached_it(bench: Bench) -> None:
    with bench.database.write() as session:
        webhooks.create(
            session,
            bench.project,
            name="hook",
            url="https://hooks.example/",
            event_types=[webhooks.THRESHOLD_REACHED, "fine_tuning.job.succeeded"],
            thresholds={"share_of_steps": 0.3},
        )
    run = bench.run(n_epochs=2)
    run.before_step = crash_at(4)
    with pytest.raises(RuntimeError):
        asyncio.run(run.train())
    before = [json.loads(one.body)["data"] for one in rows(bench.database)]
    bench.again()
    resumed = bench.run(n_epochs=2)
    asyncio.run(resumed.train())

    repeated = [call.step for call in resumed.experience.sampler.calls if call.group_size == 4]
    assert before == [{"id": bench.claim.job_id, "threshold": "share_of_steps", "value": 0.375, "step": 3}]
    assert 3 in repeated  # or this would prove nothing
    told = [json.loads(one.body)["data"].get("threshold") for one in rows(bench.database)]
    assert told == ["share_of_steps", None]


# Forgetting.


@both_databases
def test_what_was_settled_is_kept_for_a_month(
    database: Database, project: Project, sender: Deliveries, clock: Clock
) -> None:
    with Receiver() as receiver:
        listen(database, project, receiver.url)
        happen(database, project)
        deliver_due(sender)

    clock.now += 29.9 * 86400
    deliveries.remove_old(database, clock)
    kept = len(rows(database))
    clock.now += 0.2 * 86400
    deliveries.remove_old(database, clock)

    assert (kept, rows(database)) == (1, [])


def test_what_an_unfinished_job_told_is_kept_so_that_it_is_not_told_again(
    database: Database, project: Project, clock: Clock
) -> None:
    with database.write() as session:
        webhooks.create(
            session,
            project,
            name="hook",
            url="https://hooks.example/",
            event_types=[webhooks.THRESHOLD_REACHED],
            thresholds={"share_of_steps": 0.5},
        )
        job = factories.job(session, project, status="paused")
        webhooks.emit_thresholds(job, StepMetrics(step=5, total_steps=10))
    with database.write() as session:
        [delivery] = session.scalars(select(WebhookDelivery))
        delivery.settled = True

    clock.now += 60 * 86400
    deliveries.remove_old(database, clock)

    assert [one.job_id for one in rows(database)] == [job.id]


def test_the_reconciler_forgets_old_deliveries(database: Database, project: Project, tmp_path: Path) -> None:
    with database.write() as session:
        job = factories.job(session, project, status="cancelled")
        for age in (31, 29):
            at = int(time.time()) - age * 86400
            session.add(
                WebhookDelivery(
                    endpoint_id="whep_1",
                    job_id=job.id,
                    type="t",
                    body="{}",
                    created_at=at,
                    next_attempt_at=at,
                    settled=True,
                )
            )

    Reconciler(
        Settings(data_dir=tmp_path), database, FolderBlobs(tmp_path), lambda *wake: True
    ).old_deliveries()

    assert len(rows(database)) == 1
