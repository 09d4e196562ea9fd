"""What is deleted after its time, and what never is."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import delete, select

from core.database.engine import Work
from core.database.tables import (
    AuditEntry,
    Checkpoint,
    File,
    Job,
    Preview,
    Project,
    RolloutPage,
    TunedModel,
    Upload,
    UploadPart,
)
from core.jobs import lifecycle
from core.settings import Settings
from core.storage.store import FolderBlobs
from tests import factories
from tests.worker.conftest import Bench
from worker.supervisor.item_failures import ItemFailures
from worker.supervisor.reconciler import Reconciler
from worker.supervisor.retention import DAY, Retention


@pytest.fixture
def keep(bench: Bench) -> Callable[..., Retention]:
    """A retention with these settings; its clock stands still."""

    def keep(**settings: Any) -> Retention:
        configured = Settings(data_dir=bench.tmp_path, **settings)
        return Retention(configured, bench.database, bench.blobs, clock=lambda: 0.0)

    return keep


def finish(bench: Bench, *, days_ago: float, status: str = "succeeded") -> None:
    """As if the job had ended then."""
    with bench.database.write() as session:
        job = session.get_one(Job, bench.job().seq)
        job.status, job.finished_at = status, int(time.time() - days_ago * DAY)


def count(bench: Bench, table: type[Any]) -> int:
    with bench.database.read() as session:
        return session.query(table).count()


def keys(bench: Bench, part: str = "") -> list[Any]:
    return [key for key in bench.blobs.list("projects/") if part in key]


def add_page(bench: Bench, step: int = 1) -> str:
    job = bench.job()
    key = f"projects/{job.project_id}/jobs/{job.id}/attempts/1/rollouts/train-{step:06d}.parquet"
    bench.blobs.put_bytes(key, b"{}\n")
    with bench.database.write() as session:
        session.add(
            RolloutPage(
                job_id=job.id, step=step, split="train", epoch=1, blob_key=key, samples=1, total=1, bytes=3
            )
        )
    return key


def add_checkpoint(bench: Bench, step: int = 1, *, named: bool = False) -> str:
    job = bench.job()
    prefix = f"projects/{job.project_id}/jobs/{job.id}/attempts/1/checkpoints/step-{step:06d}"
    for name in ("adapter", "manifest.json"):
        bench.blobs.put_bytes(f"{prefix}/{name}", b"x")
    with bench.database.write() as session:
        checkpoint = Checkpoint(job_id=job.id, step=step, epoch=1, blob_prefix=prefix)
        session.add(checkpoint)
        session.flush()
        if named:
            session.add(
                TunedModel(
                    name=f"ft:{step}",
                    project_id=job.project_id,
                    job_id=job.id,
                    checkpoint_id=checkpoint.id,
                    base_model=job.model,
                )
            )
    return prefix


def add_file(bench: Bench, *, days_old: int, **columns: Any) -> File:
    row = File(
        project_id=bench.project.id,
        filename="x.jsonl",
        purpose="fine-tune",
        bytes=1,
        sha256="0" * 64,
        blob_key="",
        created_at=int(time.time() - days_old * DAY),
        **columns,
    )
    with bench.database.write() as session:
        session.add(row)
        session.flush()
        row.blob_key = f"projects/{row.project_id}/files/{row.id}"
    bench.blobs.put_bytes(row.blob_key, b"x")
    return row


def reconcile(bench: Bench, **settings: Any) -> None:
    Reconciler(
        Settings(data_dir=bench.tmp_path, **settings), bench.database, bench.blobs, lambda *wake: True
    ).run_once()


# Kept for ever, unless the operator says otherwise


def test_without_a_policy_nothing_goes(bench: Bench) -> None:
    add_page(bench), add_checkpoint(bench), add_file(bench, days_old=10_000)
    finish(bench, days_ago=10_000)
    before = keys(bench)

    reconcile(bench)

    assert keys(bench) == before
    assert len(before) == 4


# Rollouts


@pytest.mark.parametrize(("days_ago", "left"), [(29, 1), (31, 0)])
@pytest.mark.parametrize("status", ["succeeded", "failed", "cancelled"])
def test_rollouts_go_a_while_after_their_job_has_ended(
    bench: Bench, keep: Callable[..., Retention], days_ago: int, left: int, status: str
) -> None:
    add_page(bench)
    finish(bench, days_ago=days_ago, status=status)

    keep(keep_rollouts_days=30).policies()

    assert (count(bench, RolloutPage), len(keys(bench, "rollouts"))) == (left, left)


def test_rollouts_of_a_job_that_goes_on_stay(bench: Bench, keep: Callable[..., Retention]) -> None:
    """However old: a paused job was started long ago and is not at its end."""
    add_page(bench)
    with bench.database.write() as session:
        session.get_one(Job, bench.job().seq).created_at = 0

    keep(keep_rollouts_days=1).policies()

    assert (count(bench, RolloutPage), len(keys(bench, "rollouts"))) == (1, 1)


@pytest.mark.parametrize(("days_ago", "left"), [(29, 1), (31, 0)])
@pytest.mark.parametrize("status", ["completed", "failed", "canceled", "in_progress"])
def test_previews_go_with_the_retention_of_rollouts(
    bench: Bench, keep: Callable[..., Retention], days_ago: int, left: int, status: str
) -> None:
    """Also one that lost its process and never ended."""
    ended = int(time.time()) - days_ago * 86400
    with bench.database.write() as session:
        preview = Preview(project_id=bench.job().project_id, request={}, parts={}, progress={}, status=status)
        preview.training_sha256, preview.lease_expires_at = "", float(ended)
        preview.finished_at = None if status == "in_progress" else ended
        session.add(preview)

    keep(keep_rollouts_days=30).policies()

    assert count(bench, Preview) == left


def test_only_what_has_a_policy_goes(bench: Bench, keep: Callable[..., Retention]) -> None:
    add_page(bench), add_checkpoint(bench), add_file(bench, days_old=100)
    finish(bench, days_ago=100)

    keep(keep_rollouts_days=1).policies()

    assert keys(bench, "rollouts") == []
    assert len(keys(bench)) == 3


def test_many_pages_go_in_several_turns_and_then_there_is_a_pause(
    bench: Bench, keep: Callable[..., Retention]
) -> None:
    for step in range(4):
        add_page(bench, step)
    finish(bench, days_ago=2)
    retention = keep(keep_rollouts_days=1)
    retention.pages_at_once = 3

    lefts = []
    for _ in range(2):
        retention.policies()
        lefts.append((count(bench, RolloutPage), len(keys(bench))))
    add_page(bench)
    retention.policies()  # the clock stands still: within the same minute

    assert lefts == [(1, 1), (0, 0)]
    assert count(bench, RolloutPage) == 1


def test_when_the_store_fails_there_is_no_row_left_that_promises_what_may_be_gone(
    bench: Bench, keep: Callable[..., Retention]
) -> None:
    add_page(bench)
    finish(bench, days_ago=2)

    class Unreachable(FolderBlobs):
        def delete(self, key: str) -> None:
            raise TimeoutError(key)

    retention = keep(keep_rollouts_days=1)
    retention.blobs = Unreachable(bench.tmp_path / "blobs")
    with pytest.raises(TimeoutError):
        retention.policies()

    assert count(bench, RolloutPage) == 0
    assert len(keys(bench, "rollouts")) == 1  # litter, for the sweep


# Checkpoints


def test_checkpoints_go_unless_a_models_name_leads_to_them(
    bench: Bench, keep: Callable[..., Retention]
) -> None:
    add_checkpoint(bench, 1)
    named = add_checkpoint(bench, 2, named=True)
    finish(bench, days_ago=31)

    keep(keep_checkpoints_days=30).policies()

    assert keys(bench) == [f"{named}/adapter", f"{named}/manifest.json"]
    assert count(bench, Checkpoint) == 1


def test_a_checkpoint_goes_once_its_models_name_was_deleted(
    bench: Bench, keep: Callable[..., Retention]
) -> None:
    add_checkpoint(bench, 2, named=True)
    finish(bench, days_ago=31)
    retention = keep(keep_checkpoints_days=30)
    retention.policies()
    assert count(bench, Checkpoint) == 1

    with bench.database.write() as session:
        session.query(TunedModel).delete()
    keep(keep_checkpoints_days=30).policies()

    assert (count(bench, Checkpoint), keys(bench)) == (0, [])


@pytest.mark.parametrize(("status", "left"), [("queued", 1), ("paused", 1), ("succeeded", 0)])
def test_a_checkpoint_from_which_an_unfinished_job_starts_stays_without_its_name(
    bench: Bench, keep: Callable[..., Retention], status: str, left: int
) -> None:
    prefix = add_checkpoint(bench)
    finish(bench, days_ago=31)
    with bench.database.write() as session:
        checkpoint = session.query(Checkpoint).one()
        parent = {
            "model": "ft:1",
            "job_id": checkpoint.job_id,
            "step": 1,
            "checkpoint_id": checkpoint.id,
            "blob_prefix": prefix,
            "settings": {},
        }
        project = session.get_one(Project, bench.project.id)
        factories.job(session, project, status=status, parent=parent)

    keep(keep_checkpoints_days=30).policies()

    assert (count(bench, Checkpoint), len(keys(bench))) == (left, 2 * left)


@pytest.mark.parametrize("status", ["running", "queued", "pausing", "paused", "validating_files"])
def test_what_an_unfinished_job_could_resume_from_stays(
    bench: Bench, keep: Callable[..., Retention], status: str
) -> None:
    add_checkpoint(bench)
    with bench.database.write() as session:
        job = session.get_one(Job, bench.job().seq)
        job.status, job.created_at, job.started_at = status, 0, 0

    keep(keep_checkpoints_days=1).policies()

    assert (count(bench, Checkpoint), len(keys(bench))) == (1, 2)


def test_a_checkpoint_of_a_job_that_ended_lately_stays(bench: Bench, keep: Callable[..., Retention]) -> None:
    add_checkpoint(bench)
    finish(bench, days_ago=0.5)

    keep(keep_checkpoints_days=1).policies()

    assert (count(bench, Checkpoint), len(keys(bench))) == (1, 2)


@pytest.mark.slow
def test_the_model_of_a_real_job_survives_everything(bench: Bench, keep: Callable[..., Retention]) -> None:
    """A whole run, and then the shortest policies: what its names lead to can still be loaded."""
    job = bench.train()
    finish(bench, days_ago=2)

    reconcile(bench, keep_rollouts_days=1, keep_checkpoints_days=1, keep_files_days=1)

    with bench.database.read() as session:
        models = session.query(TunedModel).all()
        prefixes = [
            session.query(Checkpoint).where(Checkpoint.id == model.checkpoint_id).one().blob_prefix
            for model in models
        ]
    assert job.fine_tuned_model in {model.name for model in models}
    for prefix in prefixes:
        assert bench.blobs.read(f"{prefix}/manifest.json")
    assert keys(bench, "rollouts") == []


# The audit log


@pytest.mark.parametrize(("settings", "left"), [({}, [1, 364]), ({"keep_audit_days": 0}, [1, 364, 366, 900])])
def test_entries_of_the_audit_log_go_after_a_year(
    bench: Bench, keep: Callable[..., Retention], settings: dict[str, Any], left: list[int]
) -> None:
    now = int(time.time())
    with bench.database.write() as session:
        session.execute(delete(AuditEntry))
        for days_ago in (900, 366, 364, 1):
            created_at = now - round(days_ago * DAY)
            session.add(
                AuditEntry(actor="a", action="a", target=f"{days_ago} days ago", created_at=created_at)
            )
            session.flush()

    keep(**settings).policies()

    with bench.database.read() as session:
        targets = session.scalars(select(AuditEntry.target).order_by(AuditEntry.seq.desc())).all()
    assert targets == [f"{days_ago} days ago" for days_ago in left]


# Files


def test_files_go_after_their_time_and_younger_ones_stay(bench: Bench) -> None:
    add_file(bench, days_old=31)
    young = add_file(bench, days_old=29)

    reconcile(bench, keep_files_days=30)

    assert keys(bench, "files/") == [young.blob_key]
    assert count(bench, File) == 1


@pytest.mark.parametrize("column", ["training_file", "validation_file"])
def test_a_file_that_an_unfinished_job_reads_stays_until_that_ends(bench: Bench, column: str) -> None:
    file = add_file(bench, days_old=31)
    with bench.database.write() as session:
        setattr(session.get_one(Job, bench.job().seq), column, file.id)

    reconcile(bench, keep_files_days=30)
    with bench.database.read() as session:
        assert session.query(File).one().deleted_at is None
    with bench.database.write() as session:
        lifecycle.cancel(Work(session), session.get_one(Job, bench.job().seq))
    reconcile(bench, keep_files_days=30)

    assert keys(bench, "files/") == []


# Uploads


def test_an_upload_expires_and_its_parts_go_but_not_those_of_a_pending_one(bench: Bench) -> None:
    late, early = add_upload(bench, -1), add_upload(bench, 3600)

    reconcile(bench)

    with bench.database.read() as session:
        states = {row.id: row.status for row in session.query(Upload)}
        [part] = session.query(UploadPart).all()
    assert states == {late: "expired", early: "pending"}
    assert (part.upload_id, keys(bench)) == (early, [part.blob_key])


def test_parts_that_a_crash_left_of_a_completed_upload_go(bench: Bench) -> None:
    upload_id = add_upload(bench, 3600)
    with bench.database.write() as session:
        session.query(Upload).where(Upload.id == upload_id).update({"status": "completed"})

    reconcile(bench)

    assert (count(bench, UploadPart), keys(bench)) == (0, [])


def test_failures_of_items_that_are_gone_are_forgotten() -> None:
    failures = ItemFailures(lambda: 0.0)
    for item in ("a", "a", "b"):
        failures.add(item)

    failures.forget_all_but(["a"])

    assert failures.waiting() == ["a"]
    assert (failures.add("a"), failures.add("b")) == (3, 1)


def add_upload(bench: Bench, seconds_left: int) -> str:
    upload = Upload(
        project_id=bench.project.id,
        filename="x",
        purpose="fine-tune",
        mime_type="text/jsonl",
        bytes=1,
        expires_at=int(time.time()) + seconds_left,
    )
    with bench.database.write() as session:
        session.add(upload)
        session.flush()
        key = f"projects/{bench.project.id}/uploads/{upload.id}/part_{upload.seq}"
        part = UploadPart(id=f"part_{upload.seq}", upload_id=upload.id, bytes=1, blob_key=key)
        session.add(part)
    bench.blobs.put_bytes(key, b"x")
    return upload.id
