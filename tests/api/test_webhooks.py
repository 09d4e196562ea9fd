"""Webhook endpoints as OpenAI's client manages them, and what then arrives."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import uvicorn
from fastapi import FastAPI
from openai import OpenAI
from openai._exceptions import BadRequestError
from openai.types.webhooks.webhook_endpoint_with_secret import WebhookEndpointWithSecret

from api.app import create_app
from core.database.tables import Job, Project, WebhookDelivery
from core.outbound import webhooks
from core.outbound.http import Outgoing
from core.registry import Registry
from core.settings import Settings
from graders.backends import Backends
from tests import factories
from tests.api.conftest import House
from tests.hooks import Receiver
from tests.present import present, untyped
from worker.supervisor.deliveries import Deliveries

SUCCEEDED: Any = "fine_tuning.job.succeeded"
PUBLIC = "https://8.8.8.8/hook"  # an address, so that nobody needs to ask a name server


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def address(house: House) -> Iterator[str]:
    settings = Settings(data_dir=house.folder, webhook_private_hosts="127.0.0.1, *.internal")
    parts = settings, house.database, house.blobs, Registry(models={}), Backends.none()
    with serving(create_app(*parts, lambda *wake: True)) as address:
        yield address


@pytest.fixture
def client(house: House, address: str) -> OpenAI:
    return OpenAI(base_url=address, api_key=house.key, max_retries=0)


@pytest.fixture
def other(house: House, address: str) -> OpenAI:
    return OpenAI(base_url=address, api_key=house.other_key, max_retries=0)


def create(
    client: OpenAI,
    url: str = PUBLIC,
    event_types: Sequence[Any] = (SUCCEEDED,),
    name: str = "hook",
    **extra: Any,
) -> WebhookEndpointWithSecret:
    return client.webhooks.create(name=name, url=url, event_types=list(event_types), extra_body=extra or None)


def refused(call: Callable[..., Any], *args: OpenAI | str, **kwargs: Any) -> BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        call(*args, **kwargs)
    return caught.value


def deliver(house: House) -> None:
    sender = Deliveries(house.database, Outgoing(("127.0.0.1",)))
    while claimed := sender.claim():
        sender.deliver(claimed)


# Managing.


@pytest.mark.both_databases
def test_the_secret_is_shown_when_the_endpoint_is_made_and_never_again(client: OpenAI) -> None:
    made = create(client, name="ours")

    found = client.webhooks.retrieve(made.id)
    shown = made.to_dict()
    secret: Any = shown.pop("signing_secret")
    assert shown == found.to_dict()
    assert (found.object, found.name, found.url) == ("webhook_endpoint", "ours", PUBLIC)
    assert found.event_types == [SUCCEEDED]
    assert found.signing_secret_hint == f"whsec_...{secret[-4:]}"
    for answer in (found, client.webhooks.list()):
        assert secret not in answer.to_json()


@pytest.mark.both_databases
def test_the_list_is_newest_first_and_names_its_ends(client: OpenAI) -> None:
    ids = [create(client, name=name).id for name in "abc"][::-1]

    page = client.webhooks.list(limit=2)

    assert [one.id for one in page.data] == ids[:2]
    assert (untyped(page).first_id, untyped(page).last_id, page.has_more) == (ids[0], ids[1], True)
    assert [one.id for one in page] == ids  # the client asks for the rest


@pytest.mark.both_databases
def test_an_update_changes_what_is_named_and_nothing_else(client: OpenAI) -> None:
    made = create(client)

    changed = client.webhooks.update(
        made.id, name="new", event_types=["fine_tuning.job.failed", "fine_tuning.job.failed"]
    )

    assert (changed.name, changed.url) == ("new", PUBLIC)
    assert changed.event_types == ["fine_tuning.job.failed"]
    assert changed.signing_secret_hint == made.signing_secret_hint
    assert client.webhooks.retrieve(made.id).to_dict() == changed.to_dict()


def test_an_update_that_changes_nothing_does_not_count_as_one(client: OpenAI, house: House) -> None:
    made = create(client)
    with house.database.write() as session:
        webhooks.get(session, house.project.id, made.id).updated_at = 1

    unchanged = client.webhooks.update(made.id, name="hook", url=PUBLIC, event_types=[SUCCEEDED])
    changed = client.webhooks.update(made.id, name="other")

    assert unchanged.updated_at == 1
    assert present(changed.updated_at) >= made.created_at


@pytest.mark.both_databases
def test_a_deleted_endpoint_is_gone(client: OpenAI) -> None:
    made = create(client)

    gone = client.webhooks.delete(made.id)

    assert gone.to_dict() == {"id": made.id, "object": "webhook_endpoint.deleted", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.webhooks.retrieve(made.id)


@pytest.mark.both_databases
def test_another_projects_endpoint_does_not_exist(client: OpenAI, other: OpenAI) -> None:
    made = create(client)

    for call in (
        lambda: other.webhooks.retrieve(made.id),
        lambda: other.webhooks.update(made.id, name="mine"),
        lambda: other.webhooks.delete(made.id),
        lambda: other.webhooks.rotate_secret(made.id),
        lambda: other.webhooks.test(made.id, event_type=SUCCEEDED),
    ):
        with pytest.raises(openai.NotFoundError, match="No such webhook endpoint"):
            call()
    assert other.webhooks.list().data == []
    assert client.webhooks.retrieve(made.id).name == "hook"


def test_without_a_key_there_is_nothing(address: str) -> None:
    stranger = OpenAI(base_url=address, api_key="sk-wrong", max_retries=0)

    for call in (stranger.webhooks.list, stranger.webhooks.event_types.list):
        with pytest.raises(openai.AuthenticationError):
            call()


def test_the_event_types_are_those_that_are_sent(client: OpenAI) -> None:
    types = client.webhooks.event_types.list().data

    assert types == [
        "fine_tuning.job.succeeded",
        "fine_tuning.job.failed",
        "fine_tuning.job.cancelled",
        "fine_tuning.job.paused",
        "fine_tuning.job.resumed",
        "fine_tuning.job.threshold_reached",
        "eval.run.succeeded",
        "eval.run.failed",
        "eval.run.canceled",
        "batch.completed",
        "batch.failed",
        "batch.cancelled",
        "batch.expired",
        "pipeline.succeeded",
        "pipeline.failed",
        "pipeline.cancelled",
    ]


@pytest.mark.parametrize("event_type", ["response.completed", "nonsense"])
def test_an_event_that_is_never_sent_is_refused_with_those_that_are(client: OpenAI, event_type: Any) -> None:
    error = refused(create, client, event_types=[SUCCEEDED, event_type])

    assert error.param == "event_types[1]"
    assert event_type in error.message
    assert all(known in error.message for known in client.webhooks.event_types.list().data)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"event_types": []}, "event_types"),
        ({"name": ""}, "name"),
        ({"url": "ftp://8.8.8.8/"}, "url"),
        ({"url": "hooks"}, "url"),
        ({"url": "http://xn--/"}, "url"),
        ({"url": "http://xn--a/"}, "url"),
        ({"secret": "whsec_mine"}, "secret"),
        ({"thresholds": {"share_of_steps": 0.5}}, "thresholds"),
        ({"thresholds": {"share_of_steps": 2}}, "thresholds.share_of_steps"),
        ({"thresholds": {"train_loss": 1}}, "thresholds.train_loss"),
        ({"event_types": ["fine_tuning.job.threshold_reached"]}, "thresholds"),
    ],
)
def test_a_mistake_is_named(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    assert refused(create, client, **fields).param == param
    assert client.webhooks.list().data == []


@pytest.mark.parametrize(
    "url", ["http://localhost/", "http://10.0.0.1/", "https://169.254.169.254/latest", "http://[::1]/"]
)
def test_a_private_address_is_refused_when_it_is_given(client: OpenAI, url: str) -> None:
    made = create(client)

    for call in (lambda: create(client, url), lambda: client.webhooks.update(made.id, url=url)):
        error = refused(call)
        assert error.param == "url" and "REGRAFT_WEBHOOK_PRIVATE_HOSTS" in error.message
        assert not error.message.endswith("..")
    assert client.webhooks.retrieve(made.id).url == PUBLIC


@pytest.mark.both_databases
def test_there_are_at_most_twenty(client: OpenAI) -> None:
    for _ in range(20):
        create(client)

    error = refused(create, client)

    assert error.code == "too_many_webhook_endpoints"


def test_thresholds_come_and_go_with_their_event(client: OpenAI) -> None:
    reached = "fine_tuning.job.threshold_reached"
    made = create(client, event_types=[reached], thresholds={"full_valid_mean_reward": 0.8})

    more = client.webhooks.update(made.id, extra_body={"thresholds": {"gpu_seconds": 60}})
    none = client.webhooks.update(made.id, event_types=[SUCCEEDED], extra_body={"thresholds": None})

    assert untyped(made).thresholds == {"full_valid_mean_reward": 0.8}
    assert untyped(more).thresholds == {"gpu_seconds": 60}
    assert (untyped(none).thresholds, none.event_types) == (None, [SUCCEEDED])


# Arriving.


@pytest.mark.both_databases
def test_a_cancelled_job_reaches_whoever_asked_and_the_client_unwraps_it(
    client: OpenAI, house: House
) -> None:
    with Receiver() as receiver:
        endpoint = create(client, receiver.url, ["fine_tuning.job.cancelled"])
        with house.database.write() as session:
            job = factories.job(session, session.get_one(Project, house.project.id)).id
        client.fine_tuning.jobs.cancel(job)
        deliver(house)

    [received] = receiver.received
    event = client.webhooks.unwrap(received.body, received.headers, secret=endpoint.signing_secret)
    assert type(event).__name__ == "FineTuningJobCancelledWebhookEvent"
    assert (event.object, event.type, untyped(event.data).id) == ("event", "fine_tuning.job.cancelled", job)
    assert not any(house.key in value for value in received.headers.values())
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(
            received.body.replace(job.encode(), b"ftjob-x"),
            received.headers,
            secret=endpoint.signing_secret,
        )


@pytest.mark.both_databases
def test_deliveries_are_listed_by_state_and_sent_again(client: OpenAI, house: House) -> None:
    with Receiver() as receiver:
        endpoint = create(client, receiver.url, ["fine_tuning.job.cancelled"])
        path = f"/webhook_endpoints/{endpoint.id}/deliveries"
        for _ in range(2):
            with house.database.write() as session:
                job = factories.job(session, session.get_one(Project, house.project.id)).id
            client.fine_tuning.jobs.cancel(job)
        waiting = untyped(client.get(path, cast_to=object))
        deliver(house)
        deliver(house)
        arrived = untyped(client.get(f"{path}?state=delivered", cast_to=object))
        with house.database.write() as session:
            given_up = session.query(WebhookDelivery).order_by(WebhookDelivery.seq.desc()).first()
            assert given_up is not None
            given_up.delivered_at, given_up.last_status, given_up.last_error = None, 500, "it answered 500"
        [failed] = untyped(client.get(f"{path}?state=failed", cast_to=object))["data"]
        again = untyped(client.post(f"{path}/{failed['id']}/redeliver", cast_to=object))
        deliver(house)

    assert [one["state"] for one in waiting["data"]] == ["pending", "pending"]
    assert waiting["data"][0]["event"]["data"] == {"id": job}
    assert [one["attempts"] for one in arrived["data"]] == [1, 1]
    assert (failed["state"], failed["last_status"], failed["last_error"]) == (
        "failed",
        500,
        "it answered 500",
    )
    assert (again["state"], again["id"]) == ("pending", failed["id"])
    ids = [one.headers["webhook-id"] for one in receiver.received]
    assert ids == [waiting["data"][1]["id"], failed["id"], failed["id"]]
    newest = untyped(client.get(f"{path}?limit=1", cast_to=object))
    assert newest["has_more"]
    older = untyped(client.get(f"{path}?after={newest['last_id']}", cast_to=object))
    assert [one["id"] for one in [*newest["data"], *older["data"]]] == [one["id"] for one in waiting["data"]]


def test_a_delivery_of_another_endpoint_is_not_sent_again(client: OpenAI, house: House) -> None:
    mine, theirs = create(client, name="mine"), create(client, name="theirs")
    with house.database.write() as session:
        delivery = WebhookDelivery(endpoint_id=theirs.id, job_id="ftjob-1", type="t", body="{}")
        session.add(delivery)
        session.flush()
        its_id = delivery.id

    with pytest.raises(openai.NotFoundError):
        client.post(f"/webhook_endpoints/{mine.id}/deliveries/{its_id}/redeliver", cast_to=object)


@pytest.mark.both_databases
def test_a_pause_and_a_resume_reach_whoever_asked(client: OpenAI, house: House) -> None:
    with Receiver() as receiver:
        endpoint = create(client, receiver.url, ["fine_tuning.job.paused", "fine_tuning.job.resumed"])
        with house.database.write() as session:
            job = factories.job(session, session.get_one(Project, house.project.id)).id
        client.fine_tuning.jobs.pause(job)
        client.fine_tuning.jobs.resume(job)
        deliver(house)

    events = [
        client.webhooks.unwrap(one.body, one.headers, secret=endpoint.signing_secret)
        for one in receiver.received
    ]
    assert [event.type for event in events] == ["fine_tuning.job.paused", "fine_tuning.job.resumed"]


def test_a_request_that_is_refused_tells_nobody(client: OpenAI, house: House) -> None:
    create(client, event_types=["fine_tuning.job.resumed"])
    with house.database.write() as session:
        job = factories.job(session, session.get_one(Project, house.project.id)).id

    refused(client.fine_tuning.jobs.resume, job)

    with house.database.read() as session:
        assert session.query(Job).count() == 1
        assert session.query(WebhookDelivery).count() == 0


@pytest.mark.both_databases
def test_after_a_rotation_both_secrets_verify_until_the_old_one_is_dropped(
    client: OpenAI, house: House
) -> None:
    with Receiver() as receiver:
        made = create(client, receiver.url)
        kept = client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
        client.webhooks.test(made.id, event_type=SUCCEEDED)
        dropped = client.webhooks.rotate_secret(made.id)
        client.webhooks.test(made.id, event_type=SUCCEEDED)

    both, one = receiver.received
    for secret in (made.signing_secret, kept.signing_secret):
        assert client.webhooks.unwrap(both.body, both.headers, secret=secret).type == SUCCEEDED
    assert client.webhooks.unwrap(one.body, one.headers, secret=dropped.signing_secret)
    for secret in (made.signing_secret, kept.signing_secret):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(one.body, one.headers, secret=secret)


# Trying it out.


@pytest.mark.parametrize("event_type", webhooks.EVENT_TYPES)
def test_a_test_sends_a_signed_event_of_that_type_at_once(client: OpenAI, event_type: Any) -> None:
    with Receiver([202]) as receiver:
        made = create(client, receiver.url)
        result = client.webhooks.test(made.id, event_type=event_type)

    assert result.to_dict() == {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": made.id,
        "event_type": event_type,
        "status_code": 202,
        "success": True,
    }
    [received] = receiver.received
    event = client.webhooks.unwrap(received.body, received.headers, secret=made.signing_secret)
    assert event.type == event_type
    assert set(json.loads(received.body)) == {"object", "id", "type", "created_at", "data"}


def test_a_test_reports_a_refusal_and_does_not_try_again(client: OpenAI, house: House) -> None:
    with Receiver([500]) as receiver:
        made = create(client, receiver.url)
        result = client.webhooks.test(made.id, event_type=SUCCEEDED)
        deliver(house)

    assert (result.status_code, len(receiver.received)) == (500, 1)


def test_a_test_of_an_endpoint_that_is_not_there_says_so(client: OpenAI) -> None:
    with Receiver() as receiver:
        made = create(client, receiver.url)

    error = refused(client.webhooks.test, made.id, event_type=SUCCEEDED)

    assert error.code == "webhook_endpoint_unreachable"


def test_a_test_of_an_event_that_does_not_exist_is_refused(client: OpenAI) -> None:
    error = refused(client.webhooks.test, create(client).id, event_type="response.completed")

    assert error.param == "event_type"
