"""/v1/webhook_endpoints: subscriptions to events of jobs."""

import json
from functools import partial
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, Field

from api.http.deps import CurrentProject, ReadSession, Service, ServiceDep, UnitOfWork
from api.http.masks import refuse_masks
from api.http.shapes import After, Body, Deleted, EndedListing, Limit, clamped, ends
from core.database.ids import new_id
from core.database.tables import Project, WebhookDelivery, WebhookEndpoint, now
from core.errors import InvalidRequest
from core.masking import hide_in_error, hide_secrets
from core.outbound import webhooks
from core.outbound.http import Outgoing, Unreachable, UrlNotAllowed
from core.outbound.webhooks import DeliveryState
from core.strict import StrictModel

router = APIRouter(tags=["Webhooks"])


def _known(event_type: str) -> str:
    if event_type not in webhooks.EVENT_TYPES:
        raise ValueError(
            f"'{event_type[:100]}' is not an event type. Available: {', '.join(webhooks.EVENT_TYPES)}"
        )
    return event_type


NoNul = r"^[^\x00]*$"
EventType = Annotated[str, AfterValidator(_known)]
# The first unknown one is reported. Complaints of a whole body of them would take a gigabyte.
EventTypes = Annotated[list[EventType], Field(min_length=1, max_length=100, fail_fast=True)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=NoNul)]
Url = Annotated[str, Field(max_length=2048, pattern=r"^[^\s\x00]*$")]


class Thresholds(StrictModel):
    """Each threshold fires at most once per job, when a step reaches or passes it."""

    full_valid_mean_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    share_of_steps: Annotated[float, Field(gt=0, le=1)] | None = None
    gpu_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def set_thresholds(self) -> dict[str, float]:
        return self.model_dump(exclude_none=True)


class WebhookEndpointCreate(Body):
    name: Name
    url: Url
    event_types: EventTypes
    thresholds: Thresholds | None = None


class WebhookEndpointUpdate(Body):
    """Omitted fields keep their values."""

    name: Name | None = None
    url: Url | None = None
    event_types: EventTypes | None = None
    thresholds: Thresholds | None = None  # an explicit null removes them all

    def changes(self) -> dict[str, Any]:
        sent = {
            field: getattr(self, field)
            for field in ("name", "url", "event_types")
            if getattr(self, field) is not None
        }
        if "thresholds" in self.model_fields_set:
            sent["thresholds"] = (self.thresholds.set_thresholds() or None) if self.thresholds else None
        return sent


class RotateSecret(Body):
    keep_old_secret_active_for_24_hours: bool = False


class WebhookEndpointTest(Body):
    event_type: EventType


class WebhookEndpointOut(BaseModel):
    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: list[str]
    thresholds: dict[str, float] | None
    signing_secret_hint: str

    @classmethod
    def of(cls, endpoint: WebhookEndpoint) -> "WebhookEndpointOut":
        return cls(**_endpoint_fields(endpoint))


class WebhookEndpointWithSecret(WebhookEndpointOut):
    signing_secret: str

    @classmethod
    def of(cls, endpoint: WebhookEndpoint) -> "WebhookEndpointWithSecret":
        return cls(**_endpoint_fields(endpoint), signing_secret=endpoint.secret)


class WebhookEndpointTestOut(BaseModel):
    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: Literal[True] = True  # the endpoint responded; see status_code


class WebhookDeliveryOut(BaseModel):
    """An event for one endpoint. `id` is the webhook-id, the same in each attempt."""

    id: str
    object: Literal["webhook_endpoint.delivery"] = "webhook_endpoint.delivery"
    type: str
    created_at: int
    state: Annotated[DeliveryState, Field(description="failed: given up.")]
    attempts: int
    next_attempt_at: Annotated[int | None, Field(description="Unix time, while it is pending.")]
    delivered_at: int | None
    last_status: Annotated[int | None, Field(description="HTTP status of the last attempt.")]
    last_error: str | None
    event: dict[str, Any]

    @classmethod
    def of(cls, delivery: WebhookDelivery) -> "WebhookDeliveryOut":
        state = webhooks.state_of(delivery)
        return cls(
            id=delivery.id,
            type=delivery.type,
            created_at=delivery.created_at,
            state=state,
            attempts=delivery.attempts,
            next_attempt_at=max(int(delivery.next_attempt_at), delivery.created_at)
            if state == "pending"
            else None,
            delivered_at=delivery.delivered_at,
            last_status=delivery.last_status,
            last_error=hide_in_error(delivery.last_error),
            event=json.loads(delivery.body),
        )


class EventTypeList(BaseModel):
    object: Literal["list"] = "list"
    data: list[str]


def _endpoint_fields(endpoint: WebhookEndpoint) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "created_at": endpoint.created_at,
        "updated_at": endpoint.updated_at,
        "name": endpoint.name,
        "url": hide_secrets(endpoint.url),
        "event_types": endpoint.event_types,
        "thresholds": endpoint.thresholds,
        "signing_secret_hint": f"whsec_...{endpoint.secret[-4:]}",
    }


@router.post("/webhook_endpoints")
async def create_webhook_endpoint(
    body: WebhookEndpointCreate, project: CurrentProject, service: ServiceDep, uow: UnitOfWork
) -> WebhookEndpointWithSecret:
    """Create a webhook endpoint. The signing secret is shown only in this response."""
    await _check_url(service, project, body.url)

    def create() -> WebhookEndpointWithSecret:
        with uow() as work:
            endpoint = webhooks.create(
                work.session,
                project,
                name=body.name,
                url=body.url,
                event_types=body.event_types,
                thresholds=body.thresholds.set_thresholds() if body.thresholds else None,
            )
            about = {"name": endpoint.name, "event_types": endpoint.event_types}
            work.record("webhook_endpoint.created", endpoint.id, about)
        return WebhookEndpointWithSecret.of(endpoint)

    return await to_thread.run_sync(create)


@router.get("/webhook_endpoints")
def list_webhook_endpoints(
    project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> EndedListing[WebhookEndpointOut]:
    """List the project's endpoints, newest first."""
    page = webhooks.page(session, project.id, after=after, limit=clamped(limit))
    data = [WebhookEndpointOut.of(endpoint) for endpoint in page.items]
    return EndedListing(data=data, has_more=page.has_more, **ends(page))


@router.get("/webhook_endpoints/{webhook_endpoint_id}")
def retrieve_webhook_endpoint(
    webhook_endpoint_id: str, project: CurrentProject, session: ReadSession
) -> WebhookEndpointOut:
    """Retrieve a webhook endpoint."""
    return WebhookEndpointOut.of(webhooks.get(session, project.id, webhook_endpoint_id))


@router.post("/webhook_endpoints/{webhook_endpoint_id}")
async def update_webhook_endpoint(
    webhook_endpoint_id: str,
    body: WebhookEndpointUpdate,
    project: CurrentProject,
    service: ServiceDep,
    uow: UnitOfWork,
) -> WebhookEndpointOut:
    """Update a webhook endpoint."""
    if body.url is not None:
        await _check_url(service, project, body.url)

    def update() -> WebhookEndpointOut:
        with uow() as work:
            endpoint = webhooks.get(work.session, project.id, webhook_endpoint_id)
            webhooks.change(work.session, endpoint, body.changes())
            # The names only: a URL often contains a secret.
            work.record("webhook_endpoint.updated", endpoint.id, {"changed": sorted(body.changes())})
        return WebhookEndpointOut.of(endpoint)

    return await to_thread.run_sync(update)


@router.delete("/webhook_endpoints/{webhook_endpoint_id}")
def delete_webhook_endpoint(webhook_endpoint_id: str, project: CurrentProject, uow: UnitOfWork) -> Deleted:
    """Delete a webhook endpoint and its pending deliveries."""
    with uow() as work:
        webhooks.delete(work.session, webhooks.get(work.session, project.id, webhook_endpoint_id))
        work.record("webhook_endpoint.deleted", webhook_endpoint_id)
    return Deleted(id=webhook_endpoint_id, object="webhook_endpoint.deleted")


@router.post("/webhook_endpoints/{webhook_endpoint_id}/rotate_secret")
def rotate_webhook_secret(
    webhook_endpoint_id: str, project: CurrentProject, uow: UnitOfWork, body: RotateSecret | None = None
) -> WebhookEndpointWithSecret:
    """Rotate the signing secret, at once or with an overlap of a day."""
    keep_old = body is not None and body.keep_old_secret_active_for_24_hours
    with uow() as work:
        endpoint = webhooks.get(work.session, project.id, webhook_endpoint_id)
        webhooks.rotate_secret(endpoint, keep_old=keep_old)
        work.record("webhook_endpoint.secret_rotated", endpoint.id, {"kept_for_24_hours": keep_old})
    return WebhookEndpointWithSecret.of(endpoint)


# async, because it waits for an external server and must not occupy a thread of the shared pool.
@router.post("/webhook_endpoints/{webhook_endpoint_id}/test")
async def test_webhook_endpoint(
    webhook_endpoint_id: str, body: WebhookEndpointTest, project: CurrentProject, service: ServiceDep
) -> WebhookEndpointTestOut:
    """Send one sample event now and return the endpoint's response."""
    endpoint = await to_thread.run_sync(partial(_endpoint, service, project.id, webhook_endpoint_id))
    sample = webhooks.sample_body(body.event_type)
    headers = webhooks.headers(endpoint, new_id("wh_"), sample, now())
    try:
        status = await _outgoing(service).post(endpoint.url, sample.encode(), headers)
    except (UrlNotAllowed, Unreachable) as problem:
        message = f"The endpoint could not be reached: {hide_in_error(str(problem))}."
        # 400, not 502: OpenAI's client would retry a 502.
        raise InvalidRequest(message, code="webhook_endpoint_unreachable") from None
    return WebhookEndpointTestOut(
        webhook_endpoint_id=endpoint.id, event_type=body.event_type, status_code=status
    )


@router.get("/webhook_endpoints/{webhook_endpoint_id}/deliveries")
def list_webhook_deliveries(
    webhook_endpoint_id: str,
    project: CurrentProject,
    session: ReadSession,
    state: Annotated[DeliveryState | None, Query(description="failed: given up.")] = None,
    after: After = None,
    limit: Limit = 20,
) -> EndedListing[WebhookDeliveryOut]:
    """List the events for an endpoint of the last 30 days, newest first."""
    endpoint = webhooks.get(session, project.id, webhook_endpoint_id)
    page = webhooks.deliveries(session, endpoint, state=state, after=after, limit=clamped(limit))
    data = [WebhookDeliveryOut.of(delivery) for delivery in page.items]
    return EndedListing(data=data, has_more=page.has_more, **ends(page))


@router.post("/webhook_endpoints/{webhook_endpoint_id}/deliveries/{delivery_id}/redeliver")
def redeliver_webhook(
    webhook_endpoint_id: str, delivery_id: str, project: CurrentProject, uow: UnitOfWork
) -> WebhookDeliveryOut:
    """Send an event again, with the same id and body. More than 72 hours after the event it is tried once."""
    with uow() as work:
        endpoint = webhooks.get(work.session, project.id, webhook_endpoint_id)
        delivery = webhooks.redeliver(work.session, endpoint, delivery_id)
        work.record("webhook_endpoint.redelivered", endpoint.id, {"delivery": delivery.id})
        return WebhookDeliveryOut.of(delivery)


@router.get("/webhook_event_types")
def list_webhook_event_types(project: CurrentProject) -> EventTypeList:
    """List the event types."""
    return EventTypeList(data=list(webhooks.EVENT_TYPES))


async def _check_url(service: Service, project: Project, url: str) -> None:
    """Check the address in a thread; projects take turns, because their name servers decide how long it takes."""
    refuse_masks(url, "url")
    check = partial(webhooks.check_url, _outgoing(service), url)
    await service.admission.address_checks.in_thread(project.id, check)


def _endpoint(service: Service, project_id: str, endpoint_id: str) -> WebhookEndpoint:
    with service.database.read() as session:
        return webhooks.get(session, project_id, endpoint_id)


def _outgoing(service: Service) -> Outgoing:
    return Outgoing(service.settings.private_hosts)
