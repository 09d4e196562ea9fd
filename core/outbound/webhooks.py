"""Webhooks: subscriptions, payloads and signatures (https://www.standardwebhooks.com).

This module sends nothing. An event becomes one row per subscribed endpoint in its transaction, and
worker/supervisor/deliveries.py sends the rows.
"""

import base64
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session, object_session
from standardwebhooks import Webhook

from core.database import pages
from core.database.ids import new_id
from core.database.pages import Page
from core.database.tables import EvalRun, Job, Pipeline, Project, WebhookDelivery, WebhookEndpoint, now
from core.errors import InvalidRequest, WebhookDeliveryNotFound, WebhookEndpointNotFound
from core.outbound.http import Outgoing, UrlNotAllowed
from core.step_metrics import StepMetrics
from core.text import to_json

_STATUS_EVENTS = {
    status: f"fine_tuning.job.{status}" for status in ("succeeded", "failed", "cancelled", "paused")
}
# Their data includes the job's verdict if there is one (core/jobs/verdict.py).
_WITH_VERDICT = frozenset({_STATUS_EVENTS["succeeded"], _STATUS_EVENTS["failed"]})
RESUMED = "fine_tuning.job.resumed"
THRESHOLD_REACHED = "fine_tuning.job.threshold_reached"
_EVAL_RUN_EVENTS = {
    "completed": "eval.run.succeeded",
    "failed": "eval.run.failed",
    "canceled": "eval.run.canceled",
}
_BATCH_EVENTS = {status: f"batch.{status}" for status in ("completed", "failed", "cancelled", "expired")}
_PIPELINE_EVENTS = {status: f"pipeline.{status}" for status in ("succeeded", "failed", "cancelled")}
EVENT_TYPES = (
    *_STATUS_EVENTS.values(),
    RESUMED,
    THRESHOLD_REACHED,
    *_EVAL_RUN_EVENTS.values(),
    *_BATCH_EVENTS.values(),
    *_PIPELINE_EVENTS.values(),
)

DeliveryState = Literal["pending", "delivered", "failed"]
"""failed: given up."""

MAX_ENDPOINTS = 20
OLD_SECRET_SECONDS = 24 * 3600
USER_AGENT = "regraft/1.0 (webhooks)"


# Endpoints.


def create(
    session: Session,
    project: Project,
    *,
    name: str,
    url: str,
    event_types: Sequence[str],
    thresholds: Mapping[str, float] | None,
) -> WebhookEndpoint:
    """Create an endpoint with its own secret. `check_url` must have checked `url`."""
    # Locked, so that concurrent requests cannot exceed the maximum.
    session.scalars(select(Project.id).where(Project.id == project.id).with_for_update()).one()
    count = select(func.count()).select_from(WebhookEndpoint).where(WebhookEndpoint.project_id == project.id)
    if session.scalars(count).one() >= MAX_ENDPOINTS:
        raise InvalidRequest(
            f"A project has at most {MAX_ENDPOINTS} webhook endpoints. Delete one first.",
            code="too_many_webhook_endpoints",
        )
    endpoint = WebhookEndpoint(
        project_id=project.id,
        name=name,
        url=url,
        event_types=list(dict.fromkeys(event_types)),
        thresholds=dict(thresholds) if thresholds else None,
        secret=_new_secret(),
    )
    _refuse_idle_thresholds(endpoint)
    endpoint.created_at = endpoint.updated_at = now()
    session.add(endpoint)
    session.flush()
    return endpoint


def get(session: Session, project_id: str, endpoint_id: str) -> WebhookEndpoint:
    """Return the project's endpoint; raise WebhookEndpointNotFound also for another project's."""
    mine = WebhookEndpoint.id == endpoint_id, WebhookEndpoint.project_id == project_id
    endpoint = session.scalar(select(WebhookEndpoint).where(*mine))
    if endpoint is None:
        raise WebhookEndpointNotFound(endpoint_id)
    return endpoint


def page(session: Session, project_id: str, *, after: str | None = None, limit: int) -> Page[WebhookEndpoint]:
    """List newest first."""
    mine = select(WebhookEndpoint).where(WebhookEndpoint.project_id == project_id)
    return pages.newest_first(session, mine, WebhookEndpoint, after=after, limit=limit, owner=project_id)


def change(session: Session, endpoint: WebhookEndpoint, fields: Mapping[str, Any]) -> None:
    """Set `name`, `url`, `event_types` or `thresholds`. Pending deliveries use the new URL."""
    for field, value in fields.items():
        if field == "event_types":
            value = list(dict.fromkeys(value))
        setattr(endpoint, field, value)
    _refuse_idle_thresholds(endpoint)
    if session.is_modified(endpoint):
        endpoint.updated_at = now()


def delete(session: Session, endpoint: WebhookEndpoint) -> None:
    """Delete an endpoint and drop its pending deliveries."""
    waiting = WebhookDelivery.endpoint_id == endpoint.id, WebhookDelivery.settled.is_(False)
    session.execute(
        update(WebhookDelivery).where(*waiting).values(settled=True, last_error="the endpoint was deleted")
    )
    pages.delete_row(session, endpoint, owner=endpoint.project_id)


def deliveries(
    session: Session, endpoint: WebhookEndpoint, *, state: DeliveryState | None, after: str | None, limit: int
) -> Page[WebhookDelivery]:
    """List newest first.

    Raises:
        InvalidRequest: `after` is no delivery to this endpoint.
    """
    to_it = select(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint.id)
    wanted = to_it
    if state == "pending":
        wanted = wanted.where(WebhookDelivery.settled.is_(False))
    elif state is not None:
        arrived = WebhookDelivery.delivered_at
        wanted = wanted.where(
            WebhookDelivery.settled.is_(True),
            arrived.is_not(None) if state == "delivered" else arrived.is_(None),
        )
    return pages.newest_first(session, wanted, WebhookDelivery, after=after, limit=limit, cursors=to_it)


def state_of(delivery: WebhookDelivery) -> DeliveryState:
    if not delivery.settled:
        return "pending"
    return "failed" if delivery.delivered_at is None else "delivered"


def redeliver(session: Session, endpoint: WebhookEndpoint, delivery_id: str) -> WebhookDelivery:
    """Send an event again, soon, with the same id and body.

    Raises:
        WebhookDeliveryNotFound: the endpoint has no such delivery, or it is older than a month.
    """
    its = WebhookDelivery.id == delivery_id, WebhookDelivery.endpoint_id == endpoint.id
    found = session.scalar(select(WebhookDelivery).where(*its).with_for_update())
    if found is None:
        raise WebhookDeliveryNotFound(delivery_id)
    found.settled, found.next_attempt_at, found.delivered_at = False, 0.0, None
    session.flush()
    return found


def rotate_secret(endpoint: WebhookEndpoint, *, keep_old: bool) -> None:
    """Replace the secret. With `keep_old`, deliveries of the next 24 hours are also signed with the old one."""
    endpoint.old_secret = endpoint.secret if keep_old else None
    endpoint.old_secret_until = now() + OLD_SECRET_SECONDS if keep_old else None
    endpoint.secret = _new_secret()
    endpoint.updated_at = now()


def check_url(outgoing: Outgoing, url: str) -> None:
    """Raise InvalidRequest unless deliveries may go there. Slow (see `Outgoing.check`): not in a transaction."""
    try:
        outgoing.check(url)
    except UrlNotAllowed as refused:
        raise InvalidRequest(f"Invalid value for 'url': {refused}.", param="url") from None


def _refuse_idle_thresholds(endpoint: WebhookEndpoint) -> None:
    if bool(endpoint.thresholds) != (THRESHOLD_REACHED in endpoint.event_types):
        message = f"'thresholds' and the event type '{THRESHOLD_REACHED}' must be given together."
        raise InvalidRequest(message, param="thresholds")


def _new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


# Events.


def status_changed(job: Job) -> None:
    """Queue a delivery for each endpoint subscribed to this status."""
    if job.status in _STATUS_EVENTS:
        emit(job, _STATUS_EVENTS[job.status])


def emit(job: Job, type: str) -> None:
    """Add one delivery per subscribed endpoint of the job's project; sent after the session commits."""
    data: dict[str, Any] = {"id": job.id}
    if job.verdict is not None and type in _WITH_VERDICT:
        data["verdict"] = job.verdict
    _queue(job, type, data)


def eval_run_ended(run: EvalRun) -> None:
    """Add one delivery per endpoint that is subscribed to this final status."""
    _queue(run, _EVAL_RUN_EVENTS[run.status], {"id": run.id})


def batch_ended(batch: EvalRun, status: str) -> None:
    """Add one delivery per endpoint that is subscribed to this final status, which is OpenAI's."""
    _queue(batch, _BATCH_EVENTS[status], {"id": batch.id})


def pipeline_ended(pipeline: Pipeline) -> None:
    """Add one delivery per endpoint that is subscribed to this final status."""
    failed = [stage["name"] for stage in pipeline.stages if stage["status"] == "failed"]
    data = {"id": pipeline.id} | ({"failed_stages": failed} if pipeline.status == "failed" else {})
    _queue(pipeline, _PIPELINE_EVENTS[pipeline.status], data)


def _queue(row: Job | EvalRun | Pipeline, type: str, data: Mapping[str, Any]) -> None:
    session, body = _session_of(row), event_body(type, data)
    for endpoint in _listeners(session, row, type):
        session.add(WebhookDelivery(endpoint_id=endpoint.id, job_id=row.id, type=type, body=body))


def emit_thresholds(job: Job, step: StepMetrics) -> None:
    """Emit an event for each threshold that this step reaches, at most once per job and threshold.

    Call it inside `jobs.fenced`, whose lock serializes concurrent attempts.
    """
    session = _session_of(job)
    values = {
        "full_valid_mean_reward": step.full_valid_mean_reward,
        "share_of_steps": step.step / step.total_steps,
        "gpu_seconds": job.gpu_seconds,
    }
    for endpoint in _listeners(session, job, THRESHOLD_REACHED):
        for name, threshold in (endpoint.thresholds or {}).items():
            value = values[name]
            if value is None or value < threshold:
                continue
            # A deterministic id, so that a resumed run that reaches the threshold again finds the delivery.
            delivery_id = f"{endpoint.id} {job.id} {name} {threshold}"
            webhook_id = f"wh_{hashlib.sha256(delivery_id.encode()).hexdigest()[:32]}"
            if session.scalar(select(WebhookDelivery.seq).where(WebhookDelivery.id == webhook_id)) is None:
                data = {"id": job.id, "threshold": name, "value": value, "step": step.step}
                session.add(
                    WebhookDelivery(
                        id=webhook_id,
                        endpoint_id=endpoint.id,
                        job_id=job.id,
                        type=THRESHOLD_REACHED,
                        body=event_body(THRESHOLD_REACHED, data),
                    )
                )


def event_body(type: str, data: Mapping[str, Any]) -> str:
    """The JSON text of an event, exactly as it is signed."""
    event = {"object": "event", "id": new_id("evt_"), "type": type, "created_at": now(), "data": data}
    return to_json(event)


def sample_body(type: str) -> str:
    """A sample event of this type about a job, eval run or pipeline that does not exist."""
    ids = {"eval": "evalrun_sample", "batch": "batch_sample", "pipeline": "ftpipe-sample"}
    data: dict[str, Any] = {"id": ids.get(type.partition(".")[0], "ftjob-sample")}
    if type == _PIPELINE_EVENTS["failed"]:
        data |= {"failed_stages": ["judge"]}
    if type == THRESHOLD_REACHED:
        data |= {"threshold": "full_valid_mean_reward", "value": 0.8, "step": 10}
    return event_body(type, data)


def _session_of(row: Job | EvalRun | Pipeline) -> Session:
    session = object_session(row)
    assert session is not None, "a row is only changed inside a session"
    return session


def _listeners(session: Session, row: Job | EvalRun | Pipeline, type: str) -> list[WebhookEndpoint]:
    endpoints = session.scalars(select(WebhookEndpoint).where(WebhookEndpoint.project_id == row.project_id))
    return [endpoint for endpoint in endpoints if type in endpoint.event_types]


# Signing.


def headers(endpoint: WebhookEndpoint, webhook_id: str, body: str, at: int) -> dict[str, str]:
    """The headers of a delivery at Unix time `at`, signed with every secret that is active then."""
    keys = [endpoint.secret]
    if endpoint.old_secret is not None and at < (endpoint.old_secret_until or 0):
        keys.append(endpoint.old_secret)
    time = datetime.fromtimestamp(at, UTC)  # `sign` takes any other time zone for UTC
    return {
        "content-type": "application/json",
        "user-agent": USER_AGENT,
        "webhook-id": webhook_id,
        "webhook-timestamp": str(at),
        "webhook-signature": " ".join(Webhook(key).sign(webhook_id, time, body) for key in keys),
    }
