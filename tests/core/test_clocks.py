"""This machine's clock is a day ahead of the database's, which other machines agree with."""

import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.orm import Session

from core.database.engine import Database, earliest_now
from core.database.pages import KEEP_PAST_CURSORS_SECONDS as PAST
from core.database.tables import (
    AuditEntry,
    Eval,
    File,
    IdempotentRequest,
    PastCursor,
    Preview,
    RolloutPage,
    Table,
    Upload,
)
from core.evals import batches, lifecycle
from core.results import background
from core.settings import Settings
from core.storage.store import FolderBlobs
from tests import factories
from worker.supervisor.reconciler import Reconciler
from worker.supervisor.retention import DAY, HOUR


@pytest.fixture
def behind(sqlite_database: Database) -> Database:
    """SQLite asks the clock of its machine by `julianday`; this one is a day behind."""
    sqlite_database.engine.dispose()

    @event.listens_for(sqlite_database.engine, "connect")
    def on_connect(connection: Any, record: Any) -> None:
        connection.create_function(
            "julianday", 1, lambda now: (time.time() - DAY) / DAY + 2440587.5, deterministic=False
        )

    return sqlite_database


def theirs(session: Session) -> int:
    """The time by the clock of the database."""
    return round(earliest_now(session))


def preview_of(project_id: str, lease_expires_at: float) -> Preview:
    return Preview(
        project_id=project_id,
        request={},
        parts={},
        training_sha256="0" * 64,
        progress={},
        lease_expires_at=lease_expires_at,
    )


def test_the_earlier_of_both_clocks_decides_what_is_old(behind: Database) -> None:
    with behind.read() as session:
        assert earliest_now(session) == pytest.approx(time.time() - DAY, abs=HOUR)


def test_a_machine_whose_clock_is_ahead_deletes_nothing_early(behind: Database, tmp_path: Path) -> None:
    with behind.write() as session:
        project, now = factories.project(session), theirs(session)
        job = factories.job(session, project, status="succeeded", finished_at=now)
        rows = [
            Upload(
                project_id=project.id,
                filename="rows.jsonl",
                purpose="fine-tune",
                mime_type="application/jsonl",
                bytes=1,
                expires_at=now + HOUR,
            ),
            RolloutPage(
                job_id=job.id, step=1, split="train", epoch=1, blob_key="page", samples=1, total=1, bytes=1
            ),
            AuditEntry(created_at=now, actor="operator", action="a", target="t"),
            IdempotentRequest(
                project_id=project.id, key="k", fingerprint="f", status_code=200, answer={}, created_at=now
            ),
            preview_of(project.id, now + HOUR),
            PastCursor(id="file-x", owner=project.id, seq=1, deleted_at=now - PAST + HOUR),
            Eval(
                project_id=project.id,
                name="e",
                data_source_config={},
                testing_criteria=[],
                deleted_at=now - PAST + HOUR,
            ),
        ]
        session.add_all(rows)
        factories.file(session, project, created_at=now, expires_at=now + HOUR)
        kinds: list[type[Table]] = [*{type(row) for row in rows}, File]
    settings = Settings(
        data_dir=tmp_path,
        keep_rollouts_days=0.5,
        keep_checkpoints_days=0.5,
        keep_files_days=0.5,
        keep_audit_days=0.5,
    )
    before = counted(behind, kinds)

    Reconciler(settings, behind, FolderBlobs(tmp_path / "blobs"), lambda *wake: True).run_once()

    assert counted(behind, kinds) == before
    with behind.read() as session:
        assert session.scalars(select(Upload.status)).one() == "pending"
        assert session.scalars(select(File.deleted_at)).all() == [None] * before["files"]


def test_a_machine_whose_clock_is_ahead_ends_no_batch_early(behind: Database) -> None:
    with behind.write() as session:
        batch = batches.new(
            factories.project(session).id,
            batches.Checked(total=1, model="tiny"),
            metadata=None,
            endpoint="/v1/responses",
            input_file_id="file-x",
            completion_window="24h",
            output_expires_after=None,
        )
        batch.created_at = theirs(session) - round(HOUR)
        session.add(batch)
        session.flush()

        lifecycle.expire_batches(session, batches.WINDOW_SECONDS)

        assert (batch.status, batch.error) == ("queued", None)


def counted(database: Database, kinds: list[type[Table]]) -> dict[str, int]:
    with database.read() as session:
        return {
            kind.__tablename__: session.scalars(select(func.count()).select_from(kind)).one()
            for kind in kinds
        }


@pytest.mark.parametrize(
    ("seconds", "status"), [(20.0, "in_progress"), (-1.0, "failed"), (2 * HOUR, "failed")]
)
def test_a_preview_lives_as_long_as_its_lease_by_the_clock_of_the_database(
    behind: Database, seconds: float, status: str
) -> None:
    """Not by that of the process which shows it. A lease of two hours is from before that clock was set back."""
    with behind.write() as session:
        preview = preview_of(factories.project(session).id, theirs(session) + seconds)
        session.add(preview)
        session.flush()

        assert background.status_of(preview) == status
