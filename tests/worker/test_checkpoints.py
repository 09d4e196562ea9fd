"""A checkpoint is there when its manifest is, and that is written last, once."""

import asyncio
import errno
import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from core.database.engine import Database, Work
from core.database.tables import ModelAlias, TunedModel
from core.errors import ModelNotFound
from core.jobs import lifecycle
from core.outages import Resource, outage
from core.registry import Registry
from core.results import model_aliases
from core.results.lineage import Parent
from core.retry import RetryPolicy
from core.storage.disk import NoRoom
from core.storage.fsck import of_checkpoint
from core.storage.manifests import EARLIER
from core.storage.store import BlobExists, BlobInfo, FolderBlobs, StoreEmpty
from tests.present import untyped
from tests.worker.conftest import Bench, claimed_job
from worker.recording.checkpoints import JobCheckpoints, model_name
from worker.refusals import NotEnoughDisk
from worker.run import RunOutcome


class Weights:
    """Saves and loads what it was given."""

    def __init__(self, **files: Any) -> None:
        self.files = files

    def save(self, folder: Path) -> None:
        for name, data in self.files.items():
            (folder / name).write_bytes(data)

    def load(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}


class Recording(FolderBlobs):
    """Notes what is put, and with what condition."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.puts: list[Any] = []

    def put_stream(self, key: str, chunks: Iterable[bytes], *, if_absent: bool = False) -> BlobInfo:
        self.puts.append((key.rpartition("/")[2], if_absent))
        return super().put_stream(key, chunks, if_absent=if_absent)


@pytest.fixture
def checkpoints(bench: Bench) -> JobCheckpoints:
    blobs = Recording(bench.tmp_path / "blobs")
    return JobCheckpoints(bench.attempt(blobs=blobs), bench.tmp_path)


def save(checkpoints: JobCheckpoints, weights: Weights, step: int = 2) -> None:
    checkpoints.save(weights, step=step, valid_reward=None, metrics={})


def test_the_manifest_is_put_last_and_only_where_there_is_none(checkpoints: JobCheckpoints) -> None:
    save(checkpoints, Weights(adapter=b"a", zeros=b"z"))

    assert untyped(checkpoints.blobs).puts == [("adapter", False), ("zeros", False), ("manifest.json", True)]


def manifest_of(checkpoints: JobCheckpoints) -> str:
    [key] = [key for key in checkpoints.blobs.list("projects/") if key.endswith("manifest.json")]
    return key


def test_a_manifest_that_is_there_already_and_says_the_same_is_fine(
    bench: Bench, checkpoints: JobCheckpoints
) -> None:
    """The attempt wrote it, and could not say so: the database was away."""
    key = written_without_row(bench, checkpoints, Weights(adapter=b"a"))
    before = checkpoints.blobs.read(key)

    save(checkpoints, Weights(adapter=b"a"))

    restored = Weights()
    assert checkpoints.restore(restored) == 2
    assert restored.files == {"adapter": b"a"}
    assert checkpoints.blobs.read(key) == before


def test_a_manifest_that_says_something_else_is_not_overruled(
    bench: Bench, checkpoints: JobCheckpoints
) -> None:
    key = written_without_row(bench, checkpoints, Weights(adapter=b"a"))

    with pytest.raises(BlobExists):
        save(checkpoints, Weights(adapter=b"b"))

    assert bench.checkpoints() == []
    assert json.loads(checkpoints.blobs.read(key))["files"][0]["bytes"] == 1


def written_without_row(bench: Bench, checkpoints: JobCheckpoints, weights: Weights) -> str:
    save(checkpoints, weights)
    with bench.database.write() as session:
        for row in bench.checkpoints():
            session.delete(session.merge(row))
    return manifest_of(checkpoints)


def test_a_store_that_fails_before_the_manifest_leaves_no_checkpoint(
    bench: Bench, checkpoints: JobCheckpoints
) -> None:
    class Full(Recording):
        def put_stream(self, key: str, chunks: Iterable[bytes], *, if_absent: bool = False) -> BlobInfo:
            if key.endswith("zeros"):
                raise OSError("no space left")
            return super().put_stream(key, chunks, if_absent=if_absent)

    checkpoints.blobs = Full(bench.tmp_path / "blobs")
    with pytest.raises(OSError, match="no space left"):
        save(checkpoints, Weights(adapter=b"a", zeros=b"z"))

    assert bench.checkpoints() == []
    assert [key.rpartition("/")[2] for key in checkpoints.blobs.list("projects/")] == ["adapter"]


@pytest.fixture
def three(bench: Bench, checkpoints: JobCheckpoints) -> Callable[..., None]:
    """Three checkpoints, all kept since they were validated; `damage(step, file, change)` damages one of them."""
    for step in (1, 2, 3):
        weights = Weights(adapter=b"a%d" % step, state=b"s%d" % step)
        checkpoints.save(weights, step=step, valid_reward=0.5, metrics={"step": step})

    def damage(step: int, file: Path, change: Any) -> None:
        [row] = [row for row in bench.checkpoints() if row.step == step]
        key = f"{row.blob_prefix}/{file}"
        if change is None:
            checkpoints.blobs.delete(key)
        else:
            checkpoints.blobs.put_bytes(key, change(checkpoints.blobs.read(key)))

    return damage


DAMAGE = {
    "a flipped bit": ("state", lambda data: bytes([data[0] ^ 1]) + data[1:]),
    "a file that is cut short": ("adapter", lambda data: data[:-1]),
    "a file that is gone": ("state", None),
    "a manifest that is gone": ("manifest.json", None),
    "a manifest that is cut short": ("manifest.json", lambda data: data[:-9]),
    "a manifest of zeros": ("manifest.json", lambda data: bytes(len(data))),
    "a manifest with another hash": (
        "manifest.json",
        lambda data: data.replace(b'"sha256": "', b'"sha256": "0'),
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_job_resumes_from_the_newest_whole_checkpoint(
    bench: Bench, checkpoints: JobCheckpoints, three: Callable[..., None], what: str
) -> None:
    file, change = DAMAGE[what]
    [newest] = [row for row in bench.checkpoints() if row.step == 3]
    three(3, file, change)

    restored = Weights()
    step = checkpoints.restore(restored)

    assert (step, restored.files) == (2, {"adapter": b"a2", "state": b"s2"})
    [warning] = bench.events("warn")
    assert warning.startswith(f"Checkpoint damaged: of step 3 ({newest.id}): ")
    assert "resumes from step 2" in warning
    assert "projects/" not in warning  # keys of the store are the operator's
    assert [row.step for row in bench.checkpoints()] == [1, 2]


def earlier_of(checkpoints: JobCheckpoints) -> str:
    return manifest_of(checkpoints).replace("manifest.json", EARLIER)


def with_earlier(data: bytes = b"e") -> Weights:
    return Weights(**{"adapter": b"a", EARLIER: data})


def test_only_a_run_that_resumes_reads_the_adapters_of_earlier_policies(
    bench: Bench, checkpoints: JobCheckpoints
) -> None:
    save(checkpoints, with_earlier())
    manifest = json.loads(checkpoints.blobs.read(manifest_of(checkpoints)))
    folder = bench.tmp_path / "downloaded"
    folder.mkdir()

    checkpoints.download(bench.checkpoints()[0].blob_prefix, folder)
    restored = Weights()
    checkpoints.restore(restored)

    assert [file["name"] for file in manifest["files"]] == ["adapter"]
    assert [file["name"] for file in manifest["resume_files"]] == [EARLIER]
    assert [path.name for path in folder.iterdir()] == ["adapter"]
    assert restored.files == with_earlier().files
    assert bench.events("warn") == []


def test_damaged_adapters_of_earlier_policies_are_damage_of_the_checkpoint(
    bench: Bench, checkpoints: JobCheckpoints
) -> None:
    save(checkpoints, with_earlier())
    checkpoints.blobs.put_bytes(earlier_of(checkpoints), b"other")

    assert checkpoints.restore(Weights()) == 0

    assert f"{EARLIER} is not the stored content" in bench.events("warn")[0]


def test_after_the_end_of_a_job_they_are_not_kept(bench: Bench, checkpoints: JobCheckpoints) -> None:
    save(checkpoints, with_earlier())

    checkpoints.delete_resume_files()
    checkpoints.delete_resume_files()  # a process that ends before the job's last status does it again

    assert earlier_of(checkpoints) not in checkpoints.blobs.list("projects/")
    [row] = bench.checkpoints()
    assert [found for found in of_checkpoint(checkpoints.blobs, row) if found] == [], "no fault of the store"
    restored = Weights()
    assert checkpoints.restore(restored) == 2
    assert restored.files == {"adapter": b"a"}
    assert f"The checkpoint's {EARLIER} is missing" in bench.events("warn")[0]


def test_the_step_of_a_damaged_checkpoint_is_stored_again_under_its_name(
    bench: Bench, checkpoints: JobCheckpoints, three: Callable[..., None]
) -> None:
    three(3, *DAMAGE["a flipped bit"])
    bench.again()
    checkpoints = JobCheckpoints(bench.attempt(blobs=checkpoints.blobs), bench.tmp_path)
    checkpoints.restore(Weights())

    checkpoints.save(Weights(adapter=b"new"), step=3, valid_reward=0.5, metrics={})

    restored = Weights()
    assert checkpoints.restore(restored) == 3
    assert restored.files == {"adapter": b"new"}
    with bench.database.read() as session:
        names = [model.name for model in session.query(TunedModel)]
    assert sum(name.endswith(":ckpt-step-3") for name in names) == 1


def test_without_a_whole_checkpoint_the_job_starts_from_its_first_step_and_says_so(
    bench: Bench, checkpoints: JobCheckpoints, three: Callable[..., None]
) -> None:
    for step in (1, 2, 3):
        three(step, *DAMAGE["a file that is gone"])

    restored = Weights(untouched=b"base")

    assert checkpoints.restore(restored) == 0
    assert restored.files == {"untouched": b"base"}
    [warning] = bench.events("warn")
    assert "restarts from its first step" in warning
    assert warning.count("state is missing") == 3
    assert bench.checkpoints() == []


def test_a_job_that_trains_a_tuned_model_further_starts_from_it_again_without_a_whole_checkpoint(
    bench: Bench, three: Callable[..., None]
) -> None:
    """The tuned model is loaded before checkpoints are, and only for a job that has none: in the next attempt."""
    for step in (1, 2, 3):
        three(step, *DAMAGE["a file that is gone"])
    with lifecycle.fenced(bench.database, bench.claim) as (_, job):
        job.parent = Parent("ft:tiny", "ftjob-first", 4, "ckpt", "first/step-000004", settings={}).to_row()

    assert asyncio.run(bench.run().train()) is RunOutcome.INTERRUPTED
    assert bench.steps() == []
    assert bench.checkpoints() == []
    assert "restarts from its first step" in bench.events("warn")[0]

    bench.again()
    assert bench.train().status == "succeeded"


@pytest.mark.parametrize("left", [[], ["projects/p/jobs/j/attempts/2/log.txt"]], ids=["empty", "only a log"])
def test_an_empty_store_is_waited_for_and_no_checkpoint_is_withdrawn(
    bench: Bench, checkpoints: JobCheckpoints, three: Callable[..., None], left: list[str]
) -> None:
    """Another bucket, or a folder that is not mounted. Attempts that failed there have left their logs."""
    right, wrong = checkpoints.blobs, FolderBlobs(bench.tmp_path / "not mounted")
    for key in left:
        wrong.put_bytes(key, b"")
    checkpoints.blobs = wrong

    with pytest.raises(StoreEmpty, match="is it the right one"):
        checkpoints.restore(Weights())
    assert [row.step for row in bench.checkpoints()] == [1, 2, 3]

    def mount(seconds: float) -> None:
        checkpoints.blobs = right

    incidents: list[Any] = []
    checkpoints.attempt = bench.attempt(retry=RetryPolicy(600, incidents.append, wait=mount))
    assert checkpoints.restore(Weights()) == 3
    assert [row.step for row in bench.checkpoints()] == [1, 2, 3]
    [incident] = incidents
    assert "The blob store is empty; is it the right one?" in incident


def test_a_sector_that_the_disk_cannot_read_is_damage(
    bench: Bench, checkpoints: JobCheckpoints, three: Callable[..., None]
) -> None:
    class Failing(Recording):
        def download(self, key: str, path: Path, *, sha256: str | None = None) -> None:
            if "step-000003" in key:
                raise OSError(errno.EIO, "Input/output error")
            super().download(key, path, sha256=sha256)

    checkpoints.blobs = Failing(bench.tmp_path / "blobs")

    assert checkpoints.restore(Weights()) == 2
    [warning] = bench.events("warn")
    assert "adapter cannot be read (I/O error). The job resumes" in warning


@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_is_damaged_ends_as_one_that_was_not_interrupted(bench: Bench) -> None:
    """What was recorded after the whole checkpoint is done again, once."""
    run = bench.run(n_epochs=2, eval_interval=1)
    run.stop_requested = lambda: run.experience.trainer.updates == 3
    asyncio.run(run.train())
    newest = bench.checkpoints()[-1]
    key = next(key for key in bench.blobs.list(newest.blob_prefix) if not key.endswith("manifest.json"))
    bench.blobs.put_bytes(key, b"rot")
    bench.again()

    resumed = bench.run(n_epochs=2, eval_interval=1)
    asyncio.run(resumed.train())

    assert bench.job().status == "succeeded"
    assert [step["step"] for step in bench.steps()] == list(range(9))
    assert resumed.experience.trainer.updates == 8
    assert sum("resumes from step 2" in message for message in bench.events("warn")) == 1


@pytest.mark.parametrize(
    ("suffix", "segment"),
    [
        ("desk v1.2", "desk-v1-2"),
        ("colours_2", "colours_2"),
        ("..", ""),
        ("ü/ß", ""),
        ("a:b/c", "a-b-c"),
        (None, ""),
    ],
)
def test_a_suffix_is_one_plain_segment_of_the_models_name(
    bench: Bench, suffix: str | None, segment: str
) -> None:
    job = bench.job()
    job.suffix = suffix

    with bench.database.read() as session:
        name = model_name(session, job)

    assert name.split(":")[3] == segment
    assert len(name.split(":")) == 5


@pytest.fixture
def either(request: pytest.FixtureRequest, database_kind: str, tmp_path: Path) -> Bench:
    """A claimed job on SQLite or PostgreSQL."""
    database: Database = request.getfixturevalue(f"{database_kind}_database")
    return claimed_job(database, tmp_path)


def checkpoints_of(bench: Bench) -> JobCheckpoints:
    return JobCheckpoints(bench.attempt(), bench.tmp_path)


def with_three_better_ones(bench: Bench) -> str:
    """Checkpoints of which the end of step 8 retires the first. Returns its model's name."""
    for step, reward in ((2, 0.1), (4, 0.5), (6, 0.6)):
        checkpoints_of(bench).save(Weights(adapter=b"a"), step=step, valid_reward=reward, metrics={})
    with bench.database.read() as session:
        return model_name(session, bench.job()) + ":ckpt-step-2"


def end_step_8(bench: Bench) -> None:
    checkpoints_of(bench).save(Weights(adapter=b"a"), step=8, valid_reward=0.7, metrics={})


def promote(bench: Bench, model: str) -> None:
    with bench.database.write() as session:
        model_aliases.promote(Work(session), bench.project.id, "production", model, Registry(models={}))


def is_lock(statement: str) -> bool:
    """Of a project on PostgreSQL; SQLite locks the whole database as a transaction begins."""
    return statement == "BEGIN IMMEDIATE" or ("projects" in statement and "FOR NO KEY UPDATE" in statement)


def when(bench: Bench, thread: str, is_it: Callable[[str], bool], then: Callable[[], object]) -> None:
    """Call `then` in the thread with this name, before it executes such a statement."""

    def before(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        if threading.current_thread().name.startswith(thread) and is_it(statement):
            then()

    event.listen(bench.database.engine, "before_cursor_execute", before)


def started(threads: ThreadPoolExecutor, act: Callable[[], None], reached: threading.Event) -> Future[None]:
    """Act in a thread. Returns as it is about to wait, which sets `reached`, or has ended without."""
    acting = threads.submit(act)
    acting.add_done_callback(lambda _: reached.set())
    assert reached.wait(60)
    return acting


def until_blocked(bench: Bench, acting: Future[None]) -> None:
    """Return once the thread waits for a lock of the other one, or has ended without one."""
    if bench.database.engine.dialect.name == "sqlite":
        return  # its BEGIN IMMEDIATE waits outside of any table
    waiting = text(
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    )
    while not acting.done():
        with bench.database.read() as session:
            if session.scalar(waiting):
                return


@pytest.mark.both_databases
def test_a_checkpoint_is_kept_whose_promotion_has_begun_before_the_end_of_a_later_one(either: Bench) -> None:
    """The end of step 8 waits for the promotion, and then sees its alias."""
    model, waits = with_three_better_ones(either), threading.Event()
    when(either, "ending", is_lock, waits.set)

    with ThreadPoolExecutor(1, thread_name_prefix="ending") as threads:
        with either.database.write() as session:
            model_aliases.promote(Work(session), either.project.id, "production", model, Registry(models={}))
            ending = started(threads, lambda: end_step_8(either), waits)
            until_blocked(either, ending)
            assert not ending.done()
        ending.result()

    assert [one.step for one in either.checkpoints()] == [2, 4, 6, 8]
    with either.database.read() as session:
        assert session.query(TunedModel).filter_by(name=model).count() == 1


@pytest.mark.both_databases
def test_a_checkpoint_whose_end_has_begun_is_not_promoted_any_more(either: Bench) -> None:
    """The promotion waits for the end of step 8, and then finds no such model."""
    model, deletes, waits, goes_on = (
        with_three_better_ones(either),
        *(threading.Event() for _ in range(3)),
    )

    def pause() -> None:
        deletes.set()
        assert goes_on.wait(60)

    when(either, "ending", lambda statement: statement.startswith("DELETE FROM checkpoints"), pause)
    when(either, "promoting", is_lock, waits.set)

    with (
        ThreadPoolExecutor(1, thread_name_prefix="ending") as threads,
        ThreadPoolExecutor(1, thread_name_prefix="promoting") as others,
    ):
        ending = started(threads, lambda: end_step_8(either), deletes)
        promoting = started(others, lambda: promote(either, model), waits)
        until_blocked(either, promoting)
        is_too_early = promoting.done()
        goes_on.set()
        ending.result()

    assert not is_too_early
    with pytest.raises(ModelNotFound):
        promoting.result()
    assert [one.step for one in either.checkpoints()] == [4, 6, 8]
    with either.database.read() as session:
        assert session.query(ModelAlias).count() == 0


class FullDisk(FolderBlobs):
    """Downloads to a disk that is full."""

    def download(self, key: str, path: Path, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_a_download_that_its_disk_has_no_room_for_now_is_waited_for_and_a_larger_one_is_refused(
    bench: Bench, checkpoints: JobCheckpoints
) -> None:
    save(checkpoints, Weights(adapter=b"a" * 1000))
    key = manifest_of(checkpoints)
    prefix = key.removesuffix("/manifest.json")
    full = JobCheckpoints(bench.attempt(blobs=FullDisk(bench.tmp_path / "blobs")), bench.tmp_path)

    with pytest.raises(NoRoom, match=r"Files of 0\.0 GiB do not fit .* set TMPDIR to a larger disk") as now:
        full.download(prefix, bench.tmp_path)
    assert outage(now.value) is Resource.DISK
    assert str(bench.tmp_path) not in str(now.value)

    manifest = json.loads(bench.blobs.read(key))
    manifest["files"][0]["bytes"] = 10**18
    bench.blobs.put_bytes(key, json.dumps(manifest).encode())
    with pytest.raises(NotEnoughDisk, match=r"Files of 931322574\.6 GiB do not fit on the worker's disk of"):
        full.download(prefix, bench.tmp_path)
