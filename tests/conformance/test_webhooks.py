"""Guide "Webhooks", and the reference of endpoints: a delivery arrives and the client unwraps it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from openai.types.fine_tuning.fine_tuning_job import FineTuningJob

from tests.conformance.data import EXACT, TEST, TRAIN
from tests.conformance.helpers import assert_documented, finished, starts
from tests.present import untyped

ENDPOINT = {
    "object": "webhook_endpoint",
    "id": str,
    "created_at": int,
    "updated_at": int,
    "event_types": [str],
    "name": str,
    "url": starts("http"),
    "signing_secret_hint": str,
}
ENDED: Any = ["fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled"]


@contextmanager
def receiver(deliveries: Queue[Any]) -> Iterator[str]:
    """A web server of the user's, which keeps what it is sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            deliveries.put((body, dict(self.headers)))

        def log_message(self, *args: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/webhook"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def job(client: OpenAI) -> FineTuningJob:
    files = [client.files.create(file=("rows.jsonl", rows), purpose="fine-tune").id for rows in (TRAIN, TEST)]
    return client.fine_tuning.jobs.create(
        model="o4-mini-2025-04-16",
        training_file=files[0],
        validation_file=files[1],
        method={
            "type": "reinforcement",
            "reinforcement": {"grader": EXACT, "hyperparameters": {"n_epochs": 1}},
        },
    )


@pytest.mark.slow
def test_the_end_of_a_job_is_delivered_and_unwrapped() -> None:
    client = OpenAI()
    deliveries: Queue[Any] = Queue()
    with receiver(deliveries) as url:
        endpoint = client.webhooks.create(name="ends", url=url, event_types=ENDED)
        assert_documented(endpoint, ENDPOINT | {"signing_secret": starts("whsec_")})

        cancelled, succeeded = job(client), job(client)
        client.fine_tuning.jobs.cancel(cancelled.id)
        events = {}
        for _ in range(2):
            body, headers = deliveries.get(timeout=120)
            event = client.webhooks.unwrap(body, headers, secret=endpoint.signing_secret)
            events[untyped(event.data).id] = event
            assert headers["webhook-id"].startswith("wh_")
            assert headers["webhook-signature"].startswith("v1,")
            assert headers["content-type"] == "application/json"
        assert finished(client, succeeded.id).status == "succeeded"
        client.webhooks.delete(endpoint.id)

    for event in events.values():
        assert_documented(
            event,
            {"object": "event", "id": starts("evt_"), "type": str, "created_at": int, "data": {"id": str}},
        )
    assert events[cancelled.id].type == "fine_tuning.job.cancelled"
    assert events[succeeded.id].type == "fine_tuning.job.succeeded"


def test_a_sample_event_is_sent_at_once_and_a_changed_body_is_refused() -> None:
    client = OpenAI()
    deliveries: Queue[Any] = Queue()
    with receiver(deliveries) as url:
        endpoint = client.webhooks.create(name="try", url=url, event_types=ENDED)
        result = client.webhooks.test(endpoint.id, event_type="fine_tuning.job.succeeded")
        body, headers = deliveries.get(timeout=30)
        client.webhooks.delete(endpoint.id)

    assert_documented(
        result,
        {
            "object": "webhook_endpoint.test",
            "event_type": "fine_tuning.job.succeeded",
            "status_code": 200,
            "success": True,
            "webhook_endpoint_id": endpoint.id,
        },
    )
    mine = OpenAI(webhook_secret=endpoint.signing_secret)  # as the guide's server has it
    assert mine.webhooks.unwrap(body, headers).type == "fine_tuning.job.succeeded"
    mine.webhooks.verify_signature(body, headers)
    with pytest.raises(InvalidWebhookSignatureError):
        mine.webhooks.unwrap(body + b" ", headers)


def test_endpoints_are_listed_changed_and_deleted() -> None:
    client = OpenAI()
    made = [
        client.webhooks.create(name=f"e{n}", url="http://127.0.0.1:9/webhook", event_types=ENDED[:1])
        for n in range(3)
    ]

    listed = list(client.webhooks.list(limit=2))
    changed = client.webhooks.update(made[0].id, name="changed", event_types=ENDED)
    rotated = client.webhooks.rotate_secret(made[0].id, keep_old_secret_active_for_24_hours=True)

    assert [one.id for one in listed][:3] == [one.id for one in reversed(made)]
    assert_documented(changed, ENDPOINT | {"name": "changed", "event_types": lambda types: types == ENDED})
    assert_documented(rotated, ENDPOINT | {"signing_secret": starts("whsec_")})
    assert rotated.signing_secret != made[0].signing_secret
    assert_documented(client.webhooks.retrieve(made[1].id), ENDPOINT)
    for one in made:
        assert_documented(
            client.webhooks.delete(one.id),
            {"object": "webhook_endpoint.deleted", "id": one.id, "deleted": True},
        )
    assert set(ENDED) <= set(client.webhooks.event_types.list().data)
