"""Runs survive their workers, end at once when they are cancelled, and stay within the limits of their project."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from botocore.exceptions import EndpointConnectionError
from openai import BadRequestError, OpenAI, RateLimitError
from sqlalchemy import update
from sqlalchemy.event import listen

from api.resources.batch_requests import prepare_request
from core.claims import Claim, LeaseLost
from core.database.engine import Database, Work
from core.database.tables import EvalJournal, EvalPage, EvalRun, Project, WebhookDelivery
from core.evals import items, lifecycle
from core.outbound import webhooks
from core.retry import RetryPolicy
from core.service.archiving import archive_project
from core.storage import fsck, orphans
from core.storage.store import CHUNK_BYTES, FolderBlobs
from core.tenancy import tenants
from tests.budgets import examples
from tests.evals.conftest import CONFIG, EXACT, JUDGED, House, completions, row
from tests.evals.servers import chat_server, verdict
from tests.present import present
from tests.threads import no_free_thread
from worker.evals.record import PaidCall, Record
from worker.evals.runner import EvalRunner

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
KILLS = examples(6, 20)  # each costs a start of the worker's process
ROWS = 10 * KILLS


def expire(database: Database) -> None:
    """Let the lease of every run end, as it does a minute after its worker died, and its back-off pass."""
    with database.write() as session:
        session.execute(update(EvalRun).values(lease_expires_at=0.0))
        lifecycle.expire_leases(session)
        session.execute(update(EvalRun).values(next_run_at=0.0))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_item_is_there_once_however_often_a_worker_was_killed(
    client: OpenAI, new_eval: Callable[..., Any], house: House, sqlite_database: Database, tmp_path: Path
) -> None:
    """What was paid for and recorded is not paid for again: only requests in flight at a kill are repeated."""
    pace = threading.Event()

    def slowly(said: Callable[..., Any]) -> Callable[..., Any]:
        def answer(body: Any) -> Any:
            pace.wait(0.02)  # never set: only takes time
            return said(body)

        return answer

    with (
        chat_server(slowly(lambda body: str(body["messages"][-1]["content"]))) as model,
        chat_server(slowly(lambda body: verdict("yes"))) as judge,
    ):
        made = new_eval(EXACT, JUDGED)
        run = client.evals.runs.create(made.id, data_source=completions(ROWS))
        command = [sys.executable, "-m", "tests.evals.killed_worker", str(tmp_path), model.url, judge.url]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            kills = 0
            while True:
                assert worker.stdin is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
                assert worker.stdout is not None
                child = int(worker.stdout.readline())
                before = sum(house.row(run.id).summary["counts"].values())
                if kills < KILLS:
                    while sum(house.row(run.id).summary["counts"].values()) < min(before + 1, ROWS - 10):
                        pace.wait(0.01)
                    os.kill(child, signal.SIGKILL)
                    kills += 1
                if worker.stdout.readline() == "ended\n":
                    break
                expire(house.database)
            assert worker.stdin is not None
            worker.stdin.close()

    items = list(client.evals.runs.output_items.list(run.id, eval_id=made.id, limit=100))
    assert kills == KILLS
    assert [item.datasource_item_id for item in items] == list(range(1, ROWS + 1))
    assert {item.status for item in items} == {"pass"}
    done = client.evals.runs.retrieve(run.id, eval_id=made.id)
    assert (done.status, done.result_counts.passed) == ("completed", ROWS)
    assert {one.run_model_name: one.invocation_count for one in done.per_model_usage} == {
        "tiny": ROWS,
        "judge": ROWS,
    }
    # In a quarter of a second, the time between two commits, a worker of this pace asks about 50 times.
    for server in (model, judge):
        assert server.asked.total() <= ROWS + KILLS * 60
    assert not list(fsck.damaged(house.database, house.blobs))


def test_a_resumed_run_asks_for_nothing_that_was_recorded(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    """A worker that stops hands over its samples and grades."""
    made = new_eval(EXACT, JUDGED)
    run = client.evals.runs.create(made.id, data_source=completions(20))
    runner = house.runner()
    claim = runner.claim()
    pause = threading.Event()
    thread = threading.Thread(target=runner.run, args=[claim])
    thread.start()
    while len(house.model.requests) < 6:
        pause.wait(0.01)
    runner.stop()
    thread.join()
    assert house.row(run.id).status in ("queued", "completed")
    house.work()

    done = client.evals.runs.retrieve(run.id, eval_id=made.id)
    assert done.status == "completed"
    sampled, judged = (one.invocation_count for one in done.per_model_usage)
    assert sampled == 20
    # A reply that arrives as the worker stops is counted, although its grade is lost.
    assert 20 <= judged <= len(house.judge.requests)


def test_a_worker_that_lost_its_run_writes_nothing(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(2))
    old = house.runner().claim()
    expire(house.database)
    new = house.runner().claim()

    assert new is not None
    assert old is not None
    assert new.epoch == old.epoch + 2
    assert old is not None
    with pytest.raises(LeaseLost), lifecycle.fenced(house.database, old):
        pass
    house.runner().run(old)
    assert house.row(run.id).status == "in_progress"
    house.runner().run(new)
    assert house.row(run.id).status == "completed"


def test_a_service_that_is_killed_again_and_again_is_no_failure_of_a_run(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(2))
    for _ in range(lifecycle.MAX_LOST_WORKERS):
        assert house.runner().claim() is not None
        expire(house.database)
    waiting = client.evals.runs.retrieve(run.id, eval_id=made.id)

    house.work()

    assert house.row(run.id).failures == 0
    assert (waiting.status, waiting.to_dict()["note"]) == (
        "queued",
        "The worker of the run stopped. The run is queued again and keeps its items.",
    )
    done = client.evals.runs.retrieve(run.id, eval_id=made.id)
    assert (done.status, done.to_dict()["note"]) == ("completed", None)
    assert house.row(run.id).lost_workers == 0


class AwayBlobs(FolderBlobs):
    """Fails with an error some times."""

    errors: list[Exception]

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        if self.errors:
            raise self.errors.pop()
        return super().open(key, chunk_size=chunk_size)


def test_an_outage_of_the_blob_store_is_no_failure_of_a_run(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    content = json.dumps(row(0)).encode() + b"\n"
    file = client.files.create(file=("rows.jsonl", content), purpose="evals")
    made = new_eval()
    source: Any = completions(1) | {"source": {"type": "file_id", "id": file.id}}
    run = client.evals.runs.create(made.id, data_source=source)
    blobs = AwayBlobs(Path(house.blobs.url("x")).parents[1])
    blobs.errors = [OSError(errno.EMFILE, "Too many open files"), EndpointConnectionError(endpoint_url="s3")]
    runner = EvalRunner(house.settings, house.database, blobs, house.backends, "worker/1", prepare_request)
    claim = present(runner.claim())

    runner.run(claim)

    assert blobs.errors == []
    ended = house.row(run.id)
    assert (ended.status, ended.failures, ended.note) == ("completed", 0, None)


def test_a_run_waits_for_a_models_file_that_the_operator_has_broken(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    run = client.evals.runs.create(new_eval().id, data_source=completions(1))
    models = present(house.settings.models_file)
    models.write_text("[models.tiny\n")

    assert house.work() == 1

    waiting = house.row(run.id)
    assert (waiting.status, waiting.failures) == ("queued", 0)
    assert f"The run waits: {models}" in present(waiting.note)


def test_a_worker_that_starts_shortens_no_wait_of_a_run_that_was_put_off(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    """Its first pass bounds the times of a database whose clock was set back."""
    run = client.evals.runs.create(new_eval().id, data_source=completions(1))
    present(house.settings.models_file).write_text("[models.tiny\n")
    assert house.work() == 1
    due = house.row(run.id).next_run_at

    with house.database.write() as session:
        lifecycle.bound_times(session, 60.0)

    assert house.row(run.id).next_run_at == due


def test_a_run_without_a_thread_for_its_lease_is_queued_again(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    run = client.evals.runs.create(new_eval().id, data_source=completions(1))
    runner = house.runner()
    claim = present(runner.claim())

    with no_free_thread():
        runner.run(claim)

    assert (house.row(run.id).status, house.row(run.id).failures) == ("queued", 1)


def test_a_run_waits_until_the_environment_of_its_grader_is_built(
    client: OpenAI, new_eval: Callable[..., Any], house: House, tmp_path: Path
) -> None:
    """As after an upgrade, until the operator builds the one of the new version on each machine."""
    source = "def grade(sample, item):\n    return 1\n"
    made = new_eval({"type": "python", "name": "mine", "source": source})
    run = client.evals.runs.create(made.id, data_source=completions(1))
    before = replace(house, backends=replace(house.backends, environments=tmp_path / "not built"))

    before.work()

    waiting = house.row(run.id)
    assert (waiting.status, waiting.failures) == ("queued", 0)
    assert "is not built on this server" in (waiting.note or "")

    with house.database.write() as session:
        session.execute(update(EvalRun).values(next_run_at=0.0))
    house.work()

    assert client.evals.runs.retrieve(run.id, eval_id=made.id).status == "completed"


class TestOfANameThatThisWorkerDoesNotKnowYet:
    """The API's copy of a file of the operator may be newer."""

    @pytest.fixture(params=["judge", "model", "address", "inference server"])
    def older(self, request: pytest.FixtureRequest, house: House) -> House:
        """The house with a worker that lacks this."""
        changed: dict[str, dict[str, Any]] = {
            "judge": {"backends": replace(house.backends, judges={})},
            "model": {"backends": replace(house.backends, models={})},
            "address": {"settings": house.settings.model_copy(update={"inference_url": ""})},
            "inference server": {},
        }
        return replace(house, **changed[request.param])

    @pytest.fixture
    def run(
        self, request: pytest.FixtureRequest, client: OpenAI, new_eval: Callable[..., Any], older: House
    ) -> Any:
        lacks = request.node.callspec.params["older"]
        made = new_eval(JUDGED)
        source = completions(2, model="gpt-foreign" if lacks == "model" else "tiny")
        if lacks == "inference server":
            older.model.unknown.add("tiny")
        return client.evals.runs.create(made.id, data_source=source)

    def test_the_run_waits_until_a_worker_knows_it(
        self, client: OpenAI, house: House, older: House, run: Any
    ) -> None:
        assert older.work() == 1

        waiting = house.row(run.id)
        assert (waiting.status, waiting.failures) == ("queued", 0)
        assert "a file of the operator may be older here than at the API" in present(waiting.note)
        house.model.unknown.clear()
        with house.database.write() as session:
            session.execute(update(EvalRun).values(next_run_at=0.0))
        house.work()
        done = client.evals.runs.retrieve(run.id, eval_id=run.eval_id)
        assert (done.status, done.result_counts.passed) == ("completed", 2)
        assert house.row(run.id).unknown_since is None

    def test_a_run_that_has_waited_for_too_long_fails_by_name(
        self, request: pytest.FixtureRequest, client: OpenAI, house: House, older: House, run: Any
    ) -> None:
        older.work()
        with house.database.write() as session:
            past = EvalRun.unknown_since - house.settings.patience_seconds
            session.execute(update(EvalRun).values(next_run_at=0.0, unknown_since=past))
        older.work()

        failed = house.row(run.id)
        codes = {"judge": "invalid_grader", "address": "serving_not_configured"}
        code = codes.get(request.node.callspec.params["older"], "model_not_found")
        assert (failed.status, present(failed.error)["code"]) == ("failed", code)


def test_a_run_that_ends_every_worker_fails(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(2))
    for _ in range(lifecycle.MAX_LOST_WORKERS + 1):
        assert house.runner().claim() is not None
        expire(house.database)

    failed = client.evals.runs.retrieve(run.id, eval_id=made.id)
    assert (failed.status, failed.error.code) == ("failed", "internal_error")


@pytest.mark.both_databases
def test_a_cancelled_run_ends_at_once_and_keeps_its_items(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(5))
    claim = house.runner().claim()

    canceled = client.evals.runs.cancel(run.id, eval_id=made.id)

    assert canceled.status == "canceled"
    assert claim is not None
    house.runner().run(claim)  # finds that the run is no longer its own
    assert client.evals.runs.retrieve(run.id, eval_id=made.id).result_counts.total == 0
    assert client.evals.runs.cancel(run.id, eval_id=made.id).status == "canceled"


def test_cancelling_stops_requests_within_a_second(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(2000))
    worker = threading.Thread(target=house.work)
    worker.start()
    pause = threading.Event()
    while len(house.model.requests) < 20:
        pause.wait(0.01)
    client.evals.runs.cancel(run.id, eval_id=made.id)
    worker.join(30)

    assert not worker.is_alive()
    assert len(house.model.requests) < 2000
    assert house.row(run.id).status == "canceled"


def test_a_finished_run_cannot_be_cancelled(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(1))
    house.work()

    with pytest.raises(BadRequestError, match="already completed"):
        client.evals.runs.cancel(run.id, eval_id=made.id)


@pytest.mark.both_databases
def test_projects_take_turns(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    made = new_eval()
    mine = [client.evals.runs.create(made.id, data_source=completions(1)).id for _ in range(3)]
    theirs = house.openai(house.other_key)
    other = theirs.evals.create(data_source_config=CONFIG, testing_criteria=[EXACT])
    second = theirs.evals.runs.create(other.id, data_source=completions(1)).id

    order = [present(house.runner().claim()).job_id for _ in range(4)]

    assert order == [mine[0], second, mine[1], mine[2]]


@pytest.mark.both_databases
def test_a_project_runs_and_queues_no_more_than_its_limits(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    made = new_eval()
    house.limit(running_eval_runs=1, queued_eval_runs=2)
    for _ in range(2):
        client.evals.runs.create(made.id, data_source=completions(1))

    with pytest.raises(RateLimitError, match="queued_eval_runs is 2"):
        client.evals.runs.create(made.id, data_source=completions(1))
    assert house.runner().claim() is not None
    assert house.runner().claim() is None


def test_a_run_stops_at_the_project_s_limit_of_grader_tokens(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    house.limit(grader_tokens_per_30_days=100)
    made = new_eval(JUDGED)
    run = client.evals.runs.create(made.id, data_source=completions(2000))
    house.work()

    failed = client.evals.runs.retrieve(run.id, eval_id=made.id)
    assert (failed.status, failed.error.code) == ("failed", "insufficient_quota")
    assert failed.result_counts.total < 2000
    with pytest.raises(RateLimitError):
        client.evals.runs.create(made.id, data_source=completions(1))


def test_samples_of_the_operators_models_count_as_grader_tokens(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    house.limit(grader_tokens_per_30_days=100)
    made = new_eval()
    own = client.evals.runs.create(made.id, data_source=completions(20))
    foreign = client.evals.runs.create(made.id, data_source=completions(2000, model="gpt-foreign"))
    house.work()

    assert client.evals.runs.retrieve(own.id, eval_id=made.id).status == "completed"
    failed = client.evals.runs.retrieve(foreign.id, eval_id=made.id)
    assert (failed.status, failed.error.code) == ("failed", "insufficient_quota")
    assert "grader_tokens_per_30_days" in failed.error.message
    assert failed.result_counts.total < 2000


def test_the_runs_of_an_archived_project_end(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(1))
    with house.database.write() as session:
        archive_project(Work(session), session.get_one(Project, house.project.id))

    assert house.row(run.id).status == "canceled"


def test_the_blobs_of_a_deleted_run_are_deleted_and_no_others(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    runs = [client.evals.runs.create(made.id, data_source=completions(3)).id for _ in range(2)]
    house.work()
    client.evals.runs.delete(runs[0], eval_id=made.id)

    assert [key.key for key in house.blobs.entries("projects/") if runs[0] in key.key] == []
    assert [key.key for key in house.blobs.entries("projects/") if runs[1] in key.key]
    assert [found for found in orphans.find(house.database, house.blobs, older_than=2e12) if found] == []


def test_subscribers_hear_how_a_run_ended(client: OpenAI, new_eval: Callable[..., Any], house: House) -> None:
    with house.database.write() as session:
        webhooks.create(
            session,
            session.get_one(Project, house.project.id),
            name="ci",
            url="https://example.com",
            event_types=["eval.run.succeeded", "eval.run.canceled"],
            thresholds=None,
        )
    made = new_eval()
    done = client.evals.runs.create(made.id, data_source=completions(1)).id
    house.work()
    canceled = client.evals.runs.create(made.id, data_source=completions(1)).id
    client.evals.runs.cancel(canceled, eval_id=made.id)

    with house.database.read() as session:
        bodies = [
            json.loads(one.body) for one in session.query(WebhookDelivery).order_by(WebhookDelivery.seq)
        ]
    assert [(body["type"], body["data"]["id"]) for body in bodies] == [
        ("eval.run.succeeded", done),
        ("eval.run.canceled", canceled),
    ]


@pytest.mark.both_databases
def test_calls_that_were_answered_before_the_worker_saw_the_cancellation_are_counted(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    made = new_eval(JUDGED)
    run = client.evals.runs.create(made.id, data_source=completions(2))
    record = record_of(house, house.runner().claim())
    record.paid(PaidCall("judge", {"prompt_tokens": 10, "completion_tokens": 5}, metered=True, judge=True))
    client.evals.runs.cancel(run.id, eval_id=made.id)

    for _ in range(2):
        with pytest.raises(LeaseLost):
            asyncio.run(record.flush())

    canceled = client.evals.runs.retrieve(run.id, eval_id=made.id)
    assert canceled.status == "canceled"
    assert [(one.run_model_name, one.total_tokens) for one in canceled.per_model_usage] == [("judge", 15)]
    with house.database.read() as session:
        assert tenants.usage_since(session, house.project.id).grader_tokens == 15


def test_the_calls_of_a_worker_that_lost_its_run_to_another_are_not_counted(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval(JUDGED)
    run = client.evals.runs.create(made.id, data_source=completions(2))
    record = record_of(house, house.runner().claim())
    record.paid(PaidCall("judge", {"prompt_tokens": 10, "completion_tokens": 5}, metered=True, judge=True))
    expire(house.database)

    with pytest.raises(LeaseLost):
        asyncio.run(record.flush())

    assert client.evals.runs.retrieve(run.id, eval_id=made.id).per_model_usage == []


@pytest.mark.both_databases
def test_each_grade_of_an_item_is_written_once_before_the_item(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    """A judge's prompt and reply may be long, and an eval may have 100 judges."""
    run = client.evals.runs.create(new_eval(JUDGED).id, data_source=completions(2))
    claim = house.runner().claim()
    record = record_of(house, claim)
    grades: list[dict[str, Any]] = [{"score": 1.0, "reason": f"judge {n} says"} for n in range(8)]
    written: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, *more: Any) -> None:
        if "INTO eval_journal" in statement:
            values = parameters.values() if isinstance(parameters, dict) else parameters
            written.append(str([getattr(value, "obj", value) for value in values]))  # psycopg wraps JSON

    listen(house.database.engine, "before_cursor_execute", note)
    record.sampled(1, {"error": None, "output": "sampled"}, 10)
    asyncio.run(record.flush())
    for number, grade in enumerate(grades):
        record.graded(1, number, grade, 20 + number)
        asyncio.run(record.flush())

    assert [sum(part in text for text in written) for part in ("sampled", "judge 0", "judge 7")] == [1, 1, 1]
    resumed = record_of(house, claim).entries[1]
    assert (resumed.sample, resumed.tokens) == ({"error": None, "output": "sampled"}, 27)
    assert resumed.grades == dict(enumerate(grades))
    record.finish({"line": 1, "status": "pass", "results": []}, 27)
    asyncio.run(record.flush())
    with house.database.read() as session:
        [row] = session.query(EvalJournal).where(EvalJournal.run_id == run.id)
    assert row.data["item"]["line"] == 1


class GivesUpOnce(RetryPolicy):
    """As if the database had been unavailable for longer than the patience, before the first write or after it."""

    def __init__(self, *, after: bool) -> None:
        super().__init__(1.0, print)
        self.after, self.has = after, False

    def __call__(self, do: Callable[[], T]) -> T:
        if self.has or self.after:
            done = do()
        if self.has:
            return done
        self.has = True
        raise ConnectionError("the database is unavailable")


@pytest.mark.parametrize("after", [False, True])
def test_items_of_a_commit_that_failed_are_counted_once(
    client: OpenAI, new_eval: Callable[..., Any], house: House, after: bool
) -> None:
    run = client.evals.runs.create(new_eval(JUDGED).id, data_source=completions(3)).id
    record = record_of(house, house.runner().claim(), GivesUpOnce(after=after))
    for line in (1, 2):
        record.finish(item(run, line), 10)
    record.paid(PaidCall("judge", {"prompt_tokens": 10, "completion_tokens": 5}, metered=True, judge=True))
    with pytest.raises(ConnectionError):
        asyncio.run(record.flush())
    record.finish(item(run, 3), 10)

    asyncio.run(record.flush())

    kept = house.row(run).summary
    assert kept["counts"]["pass"] == 3
    with house.database.read() as session:
        assert session.query(EvalPage).one().items == 3
        assert tenants.usage_since(session, house.project.id).grader_tokens == 15


def item(run_id: str, line: int) -> dict[str, Any]:
    return {
        "id": items.item_id(run_id, line),
        "line": line,
        "status": "pass",
        "results": [],
        "sample": {},
        "created_at": 1,
        "datasource_item": {},
        "datasource_item_id": line,
    }


def record_of(house: House, claim: Claim | None, retry: RetryPolicy | None = None) -> Record:
    assert claim is not None
    record = Record(
        house.database, house.blobs, claim, house.settings.default_limits, retry or RetryPolicy(1.0, print)
    )
    with house.database.read() as session:
        record.load(session, house.row(claim.job_id))
    return record
