"""validating_files: what a user reads when a file is wrong."""

import asyncio
import io
import json
import logging

import pytest

from core import jobs, logs, tracing
from core.blobs import CHUNK_BYTES, FolderBlobs
from core.datasets import Example
from core.db import Work
from core.models import File, Job
from core.settings import Settings
from graders.backends import Backends
from graders.spec import parse_grader
from tests.fakes import NeverGrades
from tests.worker.conftest import GRADER
from worker.validation import dry_run, validate_next

GOOD = {"messages": [{"role": "user", "content": "say red"}], "answer": "red"}


@pytest.fixture
def validate(bench, tmp_path):
    """Validate a job over two files made of the given lines; returns the job and whom to wake."""

    def run(train, valid=(GOOD,), grader=GRADER, blobs=bench.blobs):
        with bench.database.write() as session:
            ids = []
            for name, lines in (("train", train), ("valid", valid)):
                text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
                info = bench.blobs.put_bytes(f"files/{name}", text.encode())
                file = File(
                    project_id=bench.project.id,
                    filename=f"{name}.jsonl",
                    purpose="fine-tune",
                    bytes=info.size,
                    sha256=info.sha256,
                    blob_key=info.key,
                )
                session.add(file)
                session.flush()
                ids.append(file.id)
            job = session.get_one(Job, bench.job().seq)
            job.training_file, job.validation_file = ids
            job.status, job.lease_expires_at = "validating_files", None
            job.reinforcement = {**job.reinforcement, "grader": grader}
        wakes = validate_next(Settings(data_dir=tmp_path), bench.database, blobs, Backends.none(), "tester")
        return bench.job(), wakes

    return run


def test_good_files_queue_the_job_and_wake_its_workers(bench, validate):
    job, wakes = validate([GOOD, GOOD])

    assert job.status == "queued"
    assert wakes == [("regraft.run_next", "gpu.cpu")]
    assert "Files validated, moving job to queued state" in bench.events()


def test_bad_lines_fail_the_job_and_are_named(validate):
    job, wakes = validate([GOOD, "{oops", GOOD, {"messages": []}])

    assert (job.status, wakes) == ("failed", [])
    assert job.error["code"] == "invalid_training_file"
    assert job.error["param"] == "training_file"
    assert job.training_file in job.error["message"]
    assert "line 2" in job.error["message"]
    assert "line 4" in job.error["message"]


def test_the_validation_file_is_named_when_it_is_the_bad_one(validate):
    job, _ = validate([GOOD], [{"messages": [{"role": "assistant", "content": "red"}], "answer": "red"}])

    assert job.error["param"] == "validation_file"
    assert "line 1" in job.error["message"]


def test_a_field_that_the_grader_reads_must_be_in_every_row(validate):
    job, _ = validate([GOOD, {"messages": GOOD["messages"]}])

    assert "line 2: the grader reads {{item.answer}}, which this row does not have" in job.error["message"]


def test_a_grader_that_this_machine_cannot_run_fails_the_job_with_the_reason(validate):
    judge = {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user", "content": "?"}]}

    job, wakes = validate([GOOD], grader=judge)

    assert (job.status, job.error["code"], wakes) == ("failed", "invalid_grader", [])
    assert "REGRAFT_GRADERS_FILE" in job.error["message"]


def test_an_empty_file_says_so(validate):
    job, _ = validate([])

    assert "empty" in job.error["message"]


def test_a_file_deleted_in_between_fails_the_job(bench, validate):
    with bench.database.write() as session:
        job = session.get_one(Job, bench.job().seq)
        job.status, job.lease_expires_at = "validating_files", None

    validate_next(Settings(data_dir=bench.tmp_path), bench.database, bench.blobs, Backends.none(), "tester")

    assert "was deleted before it could be read" in bench.job().error["message"]


class Slow(FolderBlobs):
    """Reads for so long that the job is cancelled meanwhile."""

    def __init__(self, bench):
        super().__init__(bench.tmp_path / "blobs")
        self.bench = bench

    def open(self, key, *, chunk_size=CHUNK_BYTES):
        with self.bench.database.write() as session:
            jobs.cancel(Work(session), session.get_one(Job, self.bench.job().seq))
        return super().open(key, chunk_size=chunk_size)


def test_what_is_logged_meanwhile_says_of_which_job(bench, validate):
    stream = io.StringIO()
    handler = logs.handler("json", stream)
    log = logging.getLogger("worker.validation")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        _, wakes = validate([GOOD], blobs=Slow(bench))
    finally:
        log.removeHandler(handler)

    [line] = map(json.loads, stream.getvalue().splitlines())
    assert wakes == []
    assert line["message"].endswith("was taken away while its files were validated")
    assert line["job_id"] == bench.claim.job_id
    assert line["attempt"] == bench.claim.epoch + 1


def test_it_is_an_attempt_in_the_jobs_trace(bench, validate):
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    with tracing.exported("", "test", collector := memory.InMemorySpanExporter()):
        validate([GOOD])
    validation, attempt = collector.get_finished_spans()

    assert (validation.name, attempt.name) == ("validation", "attempt")
    assert validation.parent.span_id == attempt.context.span_id
    assert attempt.attributes["regraft.job_id"] == bench.claim.job_id


def test_nothing_to_validate_is_no_work(bench):
    assert (
        validate_next(
            Settings(data_dir=bench.tmp_path), bench.database, bench.blobs, Backends.none(), "tester"
        )
        is None
    )


def test_a_grader_that_cannot_tell_a_right_reply_from_an_empty_one_is_warned_of(bench, validate):
    # A slip: it compares the row's answer with itself.
    job, wakes = validate([GOOD, GOOD], grader=GRADER | {"input": "{{item.answer}}"})

    assert job.status == "queued"
    assert wakes
    [warning] = bench.events("warn")
    assert "the same score (1)" in warning


def test_a_grader_that_can_is_not(bench, validate):
    validate([GOOD, GOOD])

    assert bench.events("warn") == []


def test_a_grader_that_fails_on_its_own_reference_is_warned_of():
    rows = [Example(1, GOOD["messages"], GOOD)]

    warning = asyncio.run(dry_run(NeverGrades(), parse_grader(GRADER), rows))

    assert warning == "The grader failed on 2 of 2 replies that it was tried on. no opinion"
