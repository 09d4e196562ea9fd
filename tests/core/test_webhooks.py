"""Who is told of what, in which transaction, and how it is signed."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from sqlalchemy import select
from sqlalchemy.orm import Session

from core.claims import Claim
from core.database.engine import Database, Work
from core.database.tables import Job, Pipeline, Project, WebhookDelivery, WebhookEndpoint
from core.errors import InvalidRequest, WebhookEndpointNotFound
from core.jobs import lifecycle
from core.outbound import webhooks
from core.pipelines import lifecycle as pipelines
from core.step_metrics import StepMetrics
from tests import factories
from tests.present import present


def listen(
    session: Session, project: Project, *event_types: str, thresholds: dict[str, Any] | None = None
) -> WebhookEndpoint:
    return webhooks.create(
        session,
        project,
        name="hook",
        url="https://hooks.example/1",
        event_types=event_types or ["fine_tuning.job.succeeded"],
        thresholds=thresholds,
    )


def deliveries(session: Session) -> Sequence[WebhookDelivery]:
    return session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.seq)).all()


def told(session: Session) -> list[Any]:
    return [delivery.type.removeprefix("fine_tuning.job.") for delivery in deliveries(session)]


def everything(session: Session, project: Project) -> WebhookEndpoint:
    return listen(session, project, *(t for t in webhooks.EVENT_TYPES if t != webhooks.THRESHOLD_REACHED))


# Of what.


@pytest.mark.both_databases
def test_a_job_that_succeeds_is_told_of(session: Session, project: Project) -> None:
    endpoint = listen(session, project)
    job = factories.job(session, project, status="running")

    lifecycle.succeed(session, job, fine_tuned_model="ft:tiny")

    [delivery] = deliveries(session)
    assert (delivery.endpoint_id, delivery.job_id, delivery.settled) == (endpoint.id, job.id, False)
    event = json.loads(delivery.body)
    assert event.pop("id").startswith("evt_")
    assert abs(event.pop("created_at") - delivery.created_at) <= 1
    assert event == {"object": "event", "type": "fine_tuning.job.succeeded", "data": {"id": job.id}}


def test_a_job_that_fails_is_told_of(session: Session, project: Project) -> None:
    everything(session, project)

    lifecycle.fail(session, factories.job(session, project, status="running"), code="x", message="no")

    assert told(session) == ["failed"]


@pytest.mark.both_databases
def test_a_second_cancel_tells_nobody_anything_new(session: Session, project: Project) -> None:
    everything(session, project)
    job = factories.job(session, project)

    lifecycle.cancel(Work(session), job)
    lifecycle.cancel(Work(session), job)

    assert told(session) == ["cancelled"]


def pipeline(session: Session, project: Project, *statuses: str) -> Pipeline:
    stages = [
        {"name": f"s{number}", "kind": "job", "spec": {}, "after": [], "status": status}
        for number, status in enumerate(statuses)
    ]
    made = Pipeline(project_id=project.id, name="r1", stages=stages, actor="key_1")
    pipelines.create(Work(session), made)
    return made


@pytest.mark.both_databases
@pytest.mark.parametrize(
    ("statuses", "event", "more"),
    [
        (["succeeded", "succeeded"], "pipeline.succeeded", {}),
        (["succeeded", "failed"], "pipeline.failed", {"failed_stages": ["s1"]}),
    ],
)
def test_a_pipeline_that_ends_is_told_of_with_its_failed_stages(
    session: Session, project: Project, statuses: list[str], event: str, more: dict[str, Any]
) -> None:
    everything(session, project)
    made = pipeline(session, project, *statuses)

    pipelines.settle(Work(session), made)

    [delivery] = deliveries(session)
    body = json.loads(delivery.body)
    assert (body["type"], body["data"]) == (event, {"id": made.id} | more)


def test_a_pipeline_that_is_cancelled_twice_is_told_of_once_and_a_running_one_not_at_all(
    session: Session, project: Project
) -> None:
    everything(session, project)
    made = pipeline(session, project, "running")

    pipelines.settle(Work(session), made)
    assert told(session) == []

    pipelines.cancel(Work(session), made)
    pipelines.cancel(Work(session), made)
    assert told(session) == ["pipeline.cancelled"]


def test_pausing_a_waiting_job_and_resuming_it_are_told_of(session: Session, project: Project) -> None:
    everything(session, project)
    job = factories.job(session, project)

    lifecycle.pause(Work(session), job)
    lifecycle.resume(Work(session), job)

    assert told(session) == ["paused", "resumed"]


def test_a_running_job_is_paused_when_its_run_has_stopped_and_not_before(
    session: Session, project: Project
) -> None:
    everything(session, project)
    job = factories.job(session, project, status="running")

    lifecycle.pause(Work(session), job)
    before = told(session)
    lifecycle.release(session, job)

    assert (before, told(session)) == ([], ["paused"])


def test_a_worker_that_dies_or_drains_is_nothing_to_tell_of(session: Session, project: Project) -> None:
    everything(session, project)

    lifecycle.crashed(
        session, factories.job(session, project, status="running"), reason="killed", max_failures=3
    )
    lifecycle.release(session, factories.job(session, project, status="running"))

    assert told(session) == []


def test_a_job_given_up_after_many_crashes_is_told_of_as_failed(session: Session, project: Project) -> None:
    everything(session, project)

    lifecycle.crashed(
        session, factories.job(session, project, status="running"), reason="killed", max_failures=0
    )

    assert told(session) == ["failed"]


def test_files_that_are_refused_are_told_of_as_a_failed_job(session: Session, project: Project) -> None:
    everything(session, project)
    job = factories.job(session, project, status="validating_files")

    lifecycle.fail(session, job, code="invalid_training_file", message="line 3")

    assert told(session) == ["failed"]


# Whom.


def test_every_endpoint_that_asks_is_told_of_the_same_event(session: Session, project: Project) -> None:
    listen(session, project, "fine_tuning.job.failed")
    endpoints = [listen(session, project), listen(session, project)]

    lifecycle.succeed(session, factories.job(session, project, status="running"), fine_tuned_model="ft:tiny")

    first, second = deliveries(session)
    assert [first.endpoint_id, second.endpoint_id] == [endpoint.id for endpoint in endpoints]
    assert first.body == second.body and first.id != second.id


def test_another_projects_endpoint_hears_nothing(session: Session, project: Project) -> None:
    listen(session, factories.project(session))

    lifecycle.succeed(session, factories.job(session, project, status="running"), fine_tuned_model="ft:tiny")

    assert deliveries(session) == []


@pytest.mark.both_databases
def test_a_change_that_is_rolled_back_was_never_told_of(database: Database) -> None:
    with database.write() as session:
        project = factories.project(session)
        listen(session, project)
        job = factories.job(session, project, status="running")
    claim = Claim(job.id, job.epoch, "worker")

    def succeed_and_crash() -> None:
        with lifecycle.fenced(database, claim) as (session, held):
            lifecycle.succeed(session, held, fine_tuned_model="ft:tiny")
            assert len(deliveries(session)) == 1
            raise RuntimeError("the machine went away before the commit")

    with pytest.raises(RuntimeError, match="went away"):
        succeed_and_crash()

    with database.read() as session:
        assert deliveries(session) == []
        assert session.scalars(select(Job.status)).one() == "running"


# Thresholds.


def watch(session: Session, project: Project, **thresholds: Any) -> WebhookEndpoint:
    return listen(session, project, webhooks.THRESHOLD_REACHED, thresholds=thresholds)


def reached(session: Session) -> list[Any]:
    return [json.loads(delivery.body)["data"] for delivery in deliveries(session)]


def step(number: int, reward: float | None = None) -> StepMetrics:
    return StepMetrics(step=number, total_steps=10, full_valid_mean_reward=reward)


@pytest.mark.both_databases
def test_a_threshold_is_told_of_once_and_by_the_first_step_that_reaches_it(
    session: Session, project: Project
) -> None:
    watch(session, project, full_valid_mean_reward=0.8)
    job = factories.job(session, project, status="running")

    for number, reward in enumerate([0.2, None, 0.79, 0.85, 0.7, 0.9]):
        webhooks.emit_thresholds(job, step(number, reward))

    assert reached(session) == [
        {"id": job.id, "threshold": "full_valid_mean_reward", "value": 0.85, "step": 3}
    ]


@pytest.mark.both_databases
def test_a_step_that_is_repeated_after_a_crash_does_not_tell_again(
    session: Session, project: Project
) -> None:
    watch(session, project, share_of_steps=0.5)
    job = factories.job(session, project, status="running")

    for number in (4, 5, 6, 4, 5, 6):
        webhooks.emit_thresholds(job, step(number))

    assert [data["step"] for data in reached(session)] == [5]


def test_each_job_and_each_threshold_is_told_of_by_itself(session: Session, project: Project) -> None:
    watch(session, project, share_of_steps=0.1, gpu_seconds=60)
    first = factories.job(session, project, status="running", gpu_seconds=61.5)
    second = factories.job(session, project, status="running")

    for job in (first, second):
        webhooks.emit_thresholds(job, step(1))

    assert [(data["id"], data["threshold"], data["value"]) for data in reached(session)] == [
        (first.id, "share_of_steps", 0.1),
        (first.id, "gpu_seconds", 61.5),
        (second.id, "share_of_steps", 0.1),
    ]


@pytest.mark.parametrize(
    ("event_types", "thresholds"),
    [(["fine_tuning.job.failed"], {"gpu_seconds": 1}), ([webhooks.THRESHOLD_REACHED], None)],
)
def test_a_threshold_without_its_event_or_the_other_way_round_is_refused(
    session: Session, project: Project, event_types: list[str], thresholds: dict[str, int] | None
) -> None:
    with pytest.raises(InvalidRequest, match="must be given together"):
        listen(session, project, *event_types, thresholds=thresholds)


# Endpoints.


@pytest.mark.both_databases
def test_a_project_has_at_most_twenty_endpoints(session: Session, project: Project) -> None:
    for _ in range(20):
        listen(session, project)

    with pytest.raises(InvalidRequest, match="at most 20"):
        listen(session, project)

    listen(session, factories.project(session))  # another project has room of its own


@pytest.mark.both_databases
def test_deleting_an_endpoint_ends_what_waits_for_it(session: Session, project: Project) -> None:
    endpoint, other = listen(session, project), listen(session, project)
    lifecycle.succeed(session, factories.job(session, project, status="running"), fine_tuned_model="ft:tiny")

    webhooks.delete(session, endpoint)

    states = {d.endpoint_id: (d.settled, d.last_error) for d in deliveries(session)}
    assert states == {endpoint.id: (True, "the endpoint was deleted"), other.id: (False, None)}
    with pytest.raises(WebhookEndpointNotFound):
        webhooks.get(session, project.id, endpoint.id)


# Signatures, judged by OpenAI's client.


CLIENT = OpenAI(api_key="unused")
BODY = (
    '{"object":"event","id":"evt_1","type":"fine_tuning.job.paused","created_at":1,"data":{"id":"ftjob-1"}}'
)


def unwrapped(headers: dict[str, str], secret: str, body: str = BODY) -> Any:
    return CLIENT.webhooks.unwrap(body, headers, secret=secret)


def signed(endpoint: WebhookEndpoint, at: int | None) -> dict[str, str]:
    assert at is not None
    return webhooks.headers(endpoint, "wh_1", BODY, at)


@pytest.fixture
def endpoint(session: Session, project: Project) -> WebhookEndpoint:
    return listen(session, project)


@pytest.fixture
def at(endpoint: WebhookEndpoint) -> int:
    return endpoint.created_at


def test_openais_client_reads_what_we_sign(endpoint: WebhookEndpoint, at: int) -> None:
    event = unwrapped(signed(endpoint, at), endpoint.secret)

    assert (event.type, event.data.id) == ("fine_tuning.job.paused", "ftjob-1")


def test_a_body_id_or_time_that_was_tampered_with_is_refused(endpoint: WebhookEndpoint, at: int) -> None:
    headers = signed(endpoint, at)

    for changed, body in [
        (headers, BODY.replace("ftjob-1", "ftjob-2")),
        (headers | {"webhook-id": "wh_2"}, BODY),
        (headers | {"webhook-timestamp": str(at + 1)}, BODY),
    ]:
        with pytest.raises(InvalidWebhookSignatureError):
            unwrapped(changed, endpoint.secret, body)


def test_a_rotated_secret_takes_the_old_ones_place_at_once(endpoint: WebhookEndpoint, at: int) -> None:
    old = endpoint.secret

    webhooks.rotate_secret(endpoint, keep_old=False)

    assert unwrapped(signed(endpoint, at), endpoint.secret).id == "evt_1"
    with pytest.raises(InvalidWebhookSignatureError):
        unwrapped(signed(endpoint, at), old)


def test_an_old_secret_that_is_kept_signs_too_for_24_hours(endpoint: WebhookEndpoint, at: int) -> None:
    old = endpoint.secret

    webhooks.rotate_secret(endpoint, keep_old=True)

    for secret in (old, endpoint.secret):
        assert unwrapped(signed(endpoint, at), secret).id == "evt_1"
    later = signed(endpoint, endpoint.old_secret_until)
    assert present(endpoint.old_secret_until) - at in range(24 * 3600, 24 * 3600 + 60)
    assert len(later["webhook-signature"].split()) == 1


def test_every_endpoint_has_a_secret_of_its_own(session: Session, project: Project) -> None:
    secrets = {listen(session, project).secret for _ in range(3)}

    assert len(secrets) == 3
    assert {endpoint.secret for endpoint in session.scalars(select(WebhookEndpoint))} == secrets
