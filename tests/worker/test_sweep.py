"""Blobs that nothing refers to: all of them are found, and nothing else is."""

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from core.database.tables import File, RolloutPage, Upload, UploadPart
from core.jobs import lifecycle, run_logs
from core.settings import Settings
from core.storage.store import BlobEntry, BlobStore, FolderBlobs, FolderDenied, S3Blobs
from tests.servers import SeaweedFS
from tests.worker.conftest import Bench
from worker.cli import main, service
from worker.supervisor.reconciler import Reconciler
from worker.supervisor.retention import HOUR, SWEEP_SECONDS, Retention, sweep


@pytest.fixture
def base(bench: Bench) -> str:
    return f"projects/{bench.project.id}"


def put(bench: Bench, key: str, hours_old: float = 30.0, data: bytes = b"xy") -> str:
    bench.blobs.put_bytes(key, data)
    then = time.time() - hours_old * HOUR
    os.utime(bench.blobs.url(key), (then, then))
    return key


def swept(bench: Bench, hours: float = 24.0, blobs: BlobStore | None = None, **how: Any) -> list[Any]:
    batches = sweep(bench.database, blobs or bench.blobs, older_than=time.time() - hours * HOUR, **how)
    return sorted(entry.key for batch in batches for entry in batch)


def age_all(bench: Bench, hours: float = 30.0) -> None:
    for key in list(bench.blobs.list("")):
        then = time.time() - hours * HOUR
        os.utime(bench.blobs.url(key), (then, then))


def test_all_that_attempts_and_processes_can_leave_behind_is_found(bench: Bench, base: str) -> None:
    lost = [
        put(bench, f"{base}/jobs/{bench.claim.job_id}/attempts/7/checkpoints/step-000002/adapter"),
        put(bench, f"{base}/jobs/{bench.claim.job_id}/attempts/7/checkpoints/step-000004/manifest.json"),
        put(bench, f"{base}/jobs/{bench.claim.job_id}/attempts/7/rollouts/train-000001.jsonl"),
        put(bench, f"{base}/jobs/ftjob-unheardof/attempts/1/rollouts/train-000001.jsonl"),
        put(bench, f"{base}/files/file-nobody"),
        put(bench, f"{base}/uploads/upload_x/part_x"),
        put(bench, f"{base}/something/else"),
    ]

    assert swept(bench) == sorted(lost)
    assert list(bench.blobs.list("")) == []


def test_the_log_of_an_attempt_stays_as_long_as_the_attempt(bench: Bench, base: str) -> None:
    job = f"{base}/jobs/{bench.claim.job_id}/attempts"
    bench.train()
    kept = put(bench, run_logs.key(bench.project.id, bench.claim.job_id, bench.claim.epoch))
    others = [put(bench, f"{job}/99/log.txt"), put(bench, f"{job}/{bench.claim.epoch}/other.txt")]

    assert swept(bench) == sorted(others)
    assert kept in bench.blobs.list("")


def test_after_a_whole_run_there_is_nothing_to_sweep(bench: Bench) -> None:
    """Two attempts, with validation, retired checkpoints and a result file; everything is old."""
    run = bench.run()
    run.stop_requested = lambda: run.experience.trainer.updates == 2
    asyncio.run(run.train())
    bench.again()
    job = bench.train()
    assert job.status == "succeeded"
    age_all(bench)
    with bench.database.read() as session:
        pages = {page.blob_key for page in session.query(RolloutPage)}
        prefixes = tuple(f"{one.blob_prefix}/" for one in bench.checkpoints())
        files = {file.blob_key for file in session.query(File)}
    kept = {key for key in bench.blobs.list("") if key in pages | files or key.startswith(prefixes)}

    removed = swept(bench)

    # What the first attempt did beyond its last checkpoint was done again, and no row speaks of it any more.
    assert all("/attempts/1/rollouts/" in key for key in removed)
    assert set(bench.blobs.list("")) == kept
    assert pages and files and prefixes


def test_what_is_young_stays(bench: Bench, base: str) -> None:
    put(bench, f"{base}/files/file-new", hours_old=23)

    assert swept(bench) == []
    assert swept(bench, hours=22) == [f"{base}/files/file-new"]


@pytest.mark.slow
def test_what_the_attempt_at_work_writes_stays_however_old_it_is(bench: Bench, base: str) -> None:
    attempt = f"{base}/jobs/{bench.claim.job_id}/attempts"
    mine = put(bench, f"{attempt}/{bench.claim.epoch}/checkpoints/step-000002/adapter")
    lost = put(bench, f"{attempt}/0/checkpoints/step-000002/adapter")

    assert swept(bench) == [lost]
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.fail(session, job, code="x", message="x")
    assert swept(bench) == [mine]


def test_a_row_keeps_its_blob_whatever_the_blob_is_called(bench: Bench, base: str) -> None:
    key = put(bench, f"{base}/elsewhere/strange name")
    with bench.database.write() as session:
        session.add(
            File(
                project_id=bench.project.id,
                filename="x",
                purpose="fine-tune",
                bytes=2,
                sha256="0" * 64,
                blob_key=key,
            )
        )

    assert swept(bench) == []


def test_a_row_that_comes_while_the_store_is_listed_keeps_its_blob(bench: Bench, base: str) -> None:
    key = put(bench, f"{base}/files/file-late")

    class SlowListing(FolderBlobs):
        def entries(self, prefix: str) -> Iterator[BlobEntry]:
            yield from list(super().entries(prefix))
            with bench.database.write() as session:
                session.add(
                    File(
                        id="file-late",
                        project_id=bench.project.id,
                        filename="x",
                        purpose="fine-tune",
                        bytes=2,
                        sha256="0" * 64,
                        blob_key=key,
                    )
                )

    assert swept(bench, blobs=SlowListing(bench.tmp_path / "blobs")) == []


def test_parts_of_a_pending_upload_stay(bench: Bench, base: str) -> None:
    with bench.database.write() as session:
        upload = Upload(
            project_id=bench.project.id,
            filename="x",
            purpose="fine-tune",
            mime_type="x",
            bytes=2,
            expires_at=int(time.time()) + 60,
        )
        session.add(upload)
        session.flush()
        key = f"{base}/uploads/{upload.id}/part_a"
        session.add(UploadPart(id="part_a", upload_id=upload.id, bytes=2, blob_key=key))
    put(bench, key)

    assert swept(bench) == []


def test_what_is_not_ours_is_not_touched(bench: Bench) -> None:
    put(bench, "backups/database.dump")

    assert swept(bench) == []
    assert list(bench.blobs.list("")) == ["backups/database.dump"]


def test_a_dry_run_only_tells(bench: Bench, base: str) -> None:
    key = put(bench, f"{base}/files/file-nobody")

    assert swept(bench, dry_run=True) == [key]
    assert list(bench.blobs.list("")) == [key]


def test_many_are_compared_in_batches(bench: Bench, base: str) -> None:
    lost = [put(bench, f"{base}/files/file-{number}") for number in range(10)]

    batches = list(sweep(bench.database, bench.blobs, older_than=time.time() - HOUR, batch_size=3))

    assert [len(batch) for batch in batches] == [3, 3, 3, 1]
    assert sorted(entry.key for batch in batches for entry in batch) == sorted(lost)


def test_it_works_on_s3_too(bench: Bench, base: str, seaweed: SeaweedFS) -> None:
    store = S3Blobs(seaweed.new_bucket(), "all", client=seaweed.client)
    lost, kept = f"{base}/files/file-nobody", f"{base}/files/file-kept"
    for key in (lost, kept, "backups/a"):
        store.put_bytes(key, b"x")
    with bench.database.write() as session:
        session.add(
            File(
                id="file-kept",
                project_id=bench.project.id,
                filename="x",
                purpose="fine-tune",
                bytes=1,
                sha256="0" * 64,
                blob_key=kept,
            )
        )

    assert swept(bench, hours=1, blobs=store) == []
    assert swept(bench, hours=-1, blobs=store) == [lost]  # as if an hour had passed
    assert sorted(store.list("")) == ["backups/a", kept]


# The reconciler's pass


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def retention(bench: Bench, clock: Clock) -> Retention:
    return Retention(Settings(data_dir=bench.tmp_path), bench.database, bench.blobs, clock)


def test_the_reconciler_sweeps_once_an_hour(
    bench: Bench, base: str, retention: Retention, clock: Clock
) -> None:
    def left_after_a_pass() -> int:
        put(bench, f"{base}/files/file-nobody")
        retention.orphans()
        return len(list(bench.blobs.list("projects/")))

    lefts = []
    for minute in (0, 59, 61, 62, 120, 122):
        clock.now = minute * 60.0
        lefts.append(left_after_a_pass())

    assert lefts == [1, 1, 0, 1, 1, 0]


def test_a_long_sweep_goes_on_from_pass_to_pass(
    bench: Bench, base: str, retention: Retention, clock: Clock
) -> None:
    retention.sweep_batch = 1
    for number in range(3):
        put(bench, f"{base}/files/file-{number}")
    clock.now = HOUR + 1

    class Slow(FolderBlobs):
        def delete_many(self, keys: Sequence[str]) -> None:
            super().delete_many(keys)
            clock.now += SWEEP_SECONDS

    retention.blobs = Slow(bench.tmp_path / "blobs")
    lefts = []
    for _ in range(4):
        retention.orphans()
        lefts.append(len(list(bench.blobs.list("projects/"))))

    assert lefts == [2, 1, 0, 0]


def test_a_sweep_that_fails_is_tried_again_an_hour_later(
    bench: Bench, base: str, retention: Retention, clock: Clock
) -> None:
    put(bench, f"{base}/files/file-nobody")
    working = retention.blobs

    class Unreachable(FolderBlobs):
        def delete(self, key: str) -> None:
            raise TimeoutError(key)

    retention.blobs = Unreachable(bench.tmp_path / "blobs")
    clock.now = HOUR + 1
    with pytest.raises(TimeoutError):
        retention.orphans()
    retention.blobs = working
    retention.orphans()
    assert len(list(bench.blobs.list("projects/"))) == 1

    clock.now = 2 * HOUR + 2
    retention.orphans()
    assert list(bench.blobs.list("projects/")) == []


def test_every_pass_is_registered(bench: Bench) -> None:
    reconciler = Reconciler(
        Settings(data_dir=bench.tmp_path), bench.database, bench.blobs, lambda *wake: True
    )

    names = [one.__name__ for one in reconciler.passes]

    assert {"expired_uploads", "policies", "orphans", "deleted_files"} <= set(names)


# By hand


@pytest.fixture
def command(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """`regraft-server sweep …` on the bench's database and folder; returns what it printed."""
    monkeypatch.setenv("REGRAFT_DATA_DIR", str(bench.tmp_path))
    monkeypatch.setattr(
        service, "prepare", lambda settings: None
    )  # the bench made its tables without Alembic

    def command(*arguments: Any) -> list[str]:
        assert main(["sweep", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return command


def test_the_command_says_what_it_removed_and_how_much(
    bench: Bench, base: str, command: Callable[..., list[str]]
) -> None:
    lost = put(bench, f"{base}/files/file-nobody", data=b"12345")
    temporary = bench.tmp_path / "blobs" / "tmp" / ".part-old"
    temporary.write_bytes(b"half")
    os.utime(temporary, (0, 0))

    would = command("--dry-run")
    assert would == [
        f"{lost} 5",
        "Would remove 1 orphaned blobs with 5 bytes, and 1 unfinished uploads.",
    ]
    assert command() == [
        f"{lost} 5",
        "Removed 1 orphaned blobs with 5 bytes, and 1 unfinished uploads.",
    ]
    assert command()[-1].startswith("Removed 0 orphaned blobs")
    assert not temporary.exists()


def test_the_command_takes_another_age_but_none_that_could_hit_what_is_under_way(
    bench: Bench, base: str, command: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    put(bench, f"{base}/files/file-nobody", hours_old=3)
    assert command("--older-than-hours", "4")[-1].startswith("Removed 0 ")

    for refused in ("0.5", "0", "-1", "nan"):
        with pytest.raises(SystemExit):
            command(f"--older-than-hours={refused}")
        assert "must be at least 1" in capsys.readouterr().err

    assert command("--older-than-hours", "2")[-1].startswith("Removed 1 ")


class Locked(FolderBlobs):
    """Refuses to delete one blob, as a retention lock does."""

    def delete(self, key: str) -> None:
        if key.endswith("locked"):
            raise FolderDenied(errno.EPERM, "Operation not permitted")
        super().delete(key)


def test_a_blob_that_cannot_be_deleted_keeps_no_other(
    bench: Bench, base: str, retention: Retention, clock: Clock
) -> None:
    retention.blobs = Locked(bench.tmp_path / "blobs")
    for name in ("file-locked", "file-a", "file-z"):
        put(bench, f"{base}/files/{name}")
    clock.now = HOUR + 1

    retention.orphans()

    assert list(bench.blobs.list("")) == [f"{base}/files/file-locked"]


def test_a_part_that_cannot_be_deleted_keeps_no_other(bench: Bench, base: str, retention: Retention) -> None:
    retention.blobs = Locked(bench.tmp_path / "blobs")
    with bench.database.write() as session:
        for name in ("locked", "a"):
            upload = Upload(
                project_id=bench.project.id,
                filename="a",
                purpose="fine-tune",
                mime_type="x",
                bytes=1,
                expires_at=2,
                status="expired",
            )
            session.add(upload)
            session.flush()
            key = put(bench, f"{base}/uploads/{upload.id}/{name}")
            session.add(UploadPart(upload_id=upload.id, bytes=1, blob_key=key))

    retention.expired_uploads()

    with bench.database.read() as session:
        [left] = session.query(UploadPart)
    assert left.blob_key.endswith("/locked")
    assert list(bench.blobs.list("")) == [left.blob_key]
