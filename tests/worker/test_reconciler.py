"""What the reconciler puts right, pass by pass."""

import asyncio

import pytest

from core import jobs
from core.db import Work
from core.models import File, Job, now
from core.settings import Settings
from worker.reconciler import Reconciler


@pytest.fixture
def sent():
    return []


@pytest.fixture
def reconciler(bench, sent):
    return Reconciler(
        Settings(data_dir=bench.tmp_path), bench.database, bench.blobs, lambda *wake: sent.append(wake)
    )


def test_the_job_of_a_silent_worker_waits_again(bench, reconciler):
    with bench.database.write() as session:
        assert jobs.heartbeat(session, bench.claim, -1.0)

    reconciler.run_once()

    job = bench.job()
    assert (job.status, job.failures) == ("queued", 1)


def test_a_waiting_job_that_nobody_took_is_announced_again_but_not_at_every_pass(bench, reconciler, sent):
    with jobs.fenced(bench.database, bench.claim) as (session, job):
        jobs.release(session, job)

    reconciler.run_once()
    reconciler.run_once()

    assert sent == [("regraft.run_next", "gpu.cpu")]


def test_a_cancelled_job_gets_its_result_file(bench, reconciler):
    run = bench.run()
    run.stop_requested = lambda: run.trainer.updates == 2
    asyncio.run(run.train())
    with bench.database.write() as session:
        jobs.cancel(Work(session), session.get_one(Job, bench.job().seq))

    reconciler.run_once()

    job = bench.job()
    assert job.result_file is not None
    assert job.usage["trained_tokens"] == 2 * 2 * 8


def test_a_deleted_file_stays_while_an_unfinished_job_reads_it(bench, reconciler):
    file = stored_file(bench, deleted_at=now())
    with bench.database.write() as session:
        session.get_one(Job, bench.job().seq).training_file = file.id

    reconciler.run_once()
    assert list(bench.blobs.list("files/")) == ["files/x"]

    with bench.database.write() as session:
        jobs.cancel(Work(session), session.get_one(Job, bench.job().seq))
    reconciler.run_once()
    assert list(bench.blobs.list("files/")) == []
    with bench.database.read() as session:
        assert session.query(File).count() == 0


def test_an_expired_file_goes_and_one_that_is_kept_stays(bench, reconciler):
    stored_file(bench, expires_at=now() - 1)
    stored_file(bench, key="files/kept")

    reconciler.run_once()

    assert list(bench.blobs.list("files/")) == ["files/kept"]


def test_a_pass_that_fails_does_not_stop_the_others(bench, reconciler, sent):
    with jobs.fenced(bench.database, bench.claim) as (session, job):
        jobs.release(session, job)

    def broken():
        raise RuntimeError("no such table")

    reconciler.expired_leases = broken
    reconciler.run_once()

    assert sent == [("regraft.run_next", "gpu.cpu")]


def stored_file(bench, key="files/x", **columns):
    info = bench.blobs.put_bytes(key, b"{}\n")
    file = File(
        project_id=bench.project.id,
        filename="x.jsonl",
        purpose="fine-tune",
        bytes=info.size,
        sha256=info.sha256,
        blob_key=info.key,
        **columns,
    )
    with bench.database.write() as session:
        session.add(file)
    return file
