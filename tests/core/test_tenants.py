from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database.engine import Database, Work
from core.database.tables import AuditEntry, Job, Preview, Project, ProjectUsage, Upload, now
from core.errors import InvalidRequest, OrganizationNotFound, ProjectNotFound, QuotaExceeded
from core.jobs import usage
from core.service.archiving import archive_project
from core.tenancy import tenants
from core.tenancy.limits import Limits
from tests import factories


def log(session: Session) -> dict[str, Any]:
    return {entry.action: entry.data for entry in session.scalars(select(AuditEntry))}


# Organisations and projects.


@pytest.mark.both_databases
def test_an_organisation_has_projects_oldest_first(work: Work) -> None:
    acme, other = (tenants.create_organization(work, name) for name in ("acme", "other"))
    first, second = (tenants.create_project(work, acme, name) for name in ("one", "two"))
    first.created_at, second.created_at = 1, 2
    tenants.create_project(work, other, "theirs")
    work.session.flush()

    assert list(tenants.projects(work.session, acme.id)) == [first, second]
    assert len(tenants.projects(work.session)) == 3


def test_new_names_are_in_the_log_beside_the_old_ones(work: Work) -> None:
    organization = tenants.create_organization(work, "acme")
    project = tenants.create_project(work, organization, "support")

    tenants.rename_organization(work, organization, "acme ltd")
    tenants.rename_project(work, project, "help")

    work.session.flush()
    assert (organization.name, project.name) == ("acme ltd", "help")
    assert log(work.session)["organization.renamed"] == {"before": "acme", "after": "acme ltd"}
    assert log(work.session)["project.renamed"] == {"before": "support", "after": "help"}


@pytest.mark.parametrize("name", ["", "   ", "x" * 65, "a\0b"])
def test_a_name_that_cannot_be_shown_is_refused(work: Work, name: str) -> None:
    with pytest.raises(InvalidRequest):
        tenants.create_organization(work, name)


def test_what_is_not_there_is_said_to_be_missing(session: Session) -> None:
    with pytest.raises(OrganizationNotFound, match="org-x"):
        tenants.get_organization(session, "org-x")
    with pytest.raises(ProjectNotFound, match="proj_x"):
        tenants.get_project(session, "proj_x")


@pytest.mark.both_databases
def test_archiving_a_project_stops_its_jobs_and_nobody_elses(work: Work, project: Project) -> None:
    statuses = ("validating_files", "queued", "running", "pausing", "paused", "succeeded")
    mine = [factories.job(work.session, project, status=status) for status in statuses]
    theirs = factories.job(work.session, factories.project(work.session))

    archive_project(work, project)
    archive_project(work, project)

    work.session.flush()
    assert [job.status for job in mine] == ["cancelled"] * 5 + ["succeeded"]
    assert theirs.status == "queued"
    assert project.archived_at is not None
    archived = select(AuditEntry).where(AuditEntry.action == "project.archived")
    assert len(work.session.scalars(archived).all()) == 1


# Limits.


@pytest.mark.both_databases
def test_a_projects_own_limit_stands_before_the_default(work: Work, project: Project) -> None:
    tenants.set_limits(work, project, Limits(queued_jobs=5))

    limits = tenants.limits(project, Limits(queued_jobs=1, running_jobs=2))

    assert limits == Limits(queued_jobs=5, running_jobs=2)


@pytest.mark.both_databases
def test_a_change_of_limits_is_logged_with_what_was_before(work: Work, project: Project) -> None:
    tenants.set_limits(work, project, Limits(queued_jobs=5))
    tenants.set_limits(work, project, Limits())

    work.session.flush()
    changes = [entry.data for entry in work.session.scalars(select(AuditEntry).order_by(AuditEntry.seq))]
    assert changes == [
        {"before": {}, "after": {"queued_jobs": 5}},
        {"before": {"queued_jobs": 5}, "after": {}},
    ]
    assert project.limits is None


@pytest.mark.parametrize("wrong", [{"jobs": 1}, {"queued_jobs": -1}, {"requests_per_minute": 0}])
def test_a_limit_that_means_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        Limits(**wrong)


@pytest.mark.both_databases
def test_one_job_more_than_may_wait_is_refused_with_the_numbers(session: Session, project: Project) -> None:
    for status in ("queued", "validating_files", "running", "paused"):
        factories.job(session, project, status=status)
    tenants.refuse_job_beyond(session, project.id, Limits(queued_jobs=2))
    factories.job(session, project)

    with pytest.raises(QuotaExceeded, match=r"queued_jobs is 2, and 2 are in use") as refused:
        tenants.refuse_job_beyond(session, project.id, Limits(queued_jobs=2))

    assert refused.value.headers == {"x-should-retry": "false"}


@pytest.mark.parametrize("limit", ["gpu_seconds_per_30_days", "grader_tokens_per_30_days"])
def test_a_job_is_refused_when_nothing_is_left_to_run_it_on(
    session: Session, project: Project, limit: str
) -> None:
    usage.add_usage(session, project.id, model="tiny", gpu_seconds=99.0, grader_tokens=99)
    limits = Limits(**{limit: 100})
    tenants.refuse_job_beyond(session, project.id, limits)
    usage.add_usage(session, project.id, model="tiny", gpu_seconds=1.0, grader_tokens=1)

    with pytest.raises(QuotaExceeded, match=rf"{limit} is 100.*, and 100.* are in use"):
        tenants.refuse_job_beyond(session, project.id, limits)


def test_another_projects_use_counts_for_nothing(session: Session, project: Project) -> None:
    theirs = factories.project(session)
    usage.add_usage(session, theirs.id, model="tiny", gpu_seconds=1e6, grader_tokens=0)
    for _ in range(3):
        factories.job(session, theirs)

    tenants.refuse_job_beyond(session, project.id, Limits(queued_jobs=1, gpu_seconds_per_30_days=1))


@pytest.mark.both_databases
def test_storage_is_what_the_files_hold_that_are_not_deleted(session: Session, project: Project) -> None:
    factories.file(session, project, bytes=60)
    factories.file(session, project, bytes=1000, deleted_at=now())
    limits = Limits(storage_bytes=100)

    tenants.refuse_file_beyond(session, project.id, limits, 40)
    assert tenants.free_storage(session, project.id, limits) == 40
    with pytest.raises(QuotaExceeded, match="storage_bytes is 100, and 60 are in use"):
        tenants.refuse_file_beyond(session, project.id, limits, 41)


@pytest.mark.both_databases
def test_previews_count_with_their_answers(session: Session, project: Project) -> None:
    session.add(
        Preview(
            project_id=project.id,
            request={"model": "tiny"},
            parts={},
            training_sha256="0" * 64,
            progress={},
            answers=[{"text": "é" * 100}],
            lease_expires_at=1.0,
        )
    )
    session.flush()

    # In ASCII an accent has six bytes. The JSON of a report that is missing may be "null".
    expected = len('{"model":"tiny"}') + len('[{"text":""}]') + 600
    assert expected <= tenants.stored_bytes(session, project.id) <= expected + 4


@pytest.mark.both_databases
def test_an_upload_that_may_still_be_completed_has_its_room_kept(session: Session, project: Project) -> None:
    about = {"project_id": project.id, "filename": "a", "purpose": "fine-tune", "mime_type": "x"}
    for bytes, status, ends in ((30, "pending", 60), (500, "pending", -1), (500, "cancelled", 60)):
        session.add(Upload(**about, bytes=bytes, status=status, expires_at=now() + ends))
    factories.file(session, project, bytes=60)

    assert tenants.stored_bytes(session, project.id) == 90


@pytest.mark.both_databases
def test_of_two_requests_at_once_the_second_sees_what_the_first_has_taken(database: Database) -> None:
    """On PostgreSQL neither would see the other's job, and both would be let in."""
    with database.write() as session:
        project = factories.project(session)
    together = Barrier(2)

    def create(number: int) -> bool:
        together.wait()
        try:
            with database.write() as session:
                factories.job(session, project)
                tenants.refuse_job_beyond(session, project.id, Limits(queued_jobs=1))
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        let_in = list(threads.map(create, range(2)))

    assert sorted(let_in) == [False, True]
    with database.read() as session:
        assert len(session.scalars(select(Job)).all()) == 1


# Usage.


@pytest.mark.both_databases
def test_usage_adds_up_within_a_day_and_over_the_last_thirty(session: Session, project: Project) -> None:
    today = now() // tenants.DAY
    for age, seconds in ((1, 10.0), (29, 100.0), (30, 1000.0)):
        session.add(ProjectUsage(project_id=project.id, day=today - age, gpu_seconds=seconds))
    session.flush()
    usage.add_usage(session, project.id, model="tiny", gpu_seconds=0.5, grader_tokens=7)
    usage.add_usage(session, project.id, model="tiny", gpu_seconds=0.5, grader_tokens=5)

    assert tenants.usage_since(session, project.id) == tenants.Usage(111.0, 12)
    assert tenants.usage_since(session, project.id, days=1) == tenants.Usage(1.0, 12)
    rows = session.scalars(select(ProjectUsage).where(ProjectUsage.day == today)).all()
    assert len(rows) == 1


def test_a_project_that_has_done_nothing_has_used_nothing(session: Session, project: Project) -> None:
    assert set(tenants.in_use(session, project.id).values()) == {0}
    assert set(tenants.in_use(session, project.id)) == set(Limits.model_fields) - {"requests_per_minute"}
