"""Items of runs after their retention, and what a full project stores."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from openai import NotFoundError, OpenAI, RateLimitError
from sqlalchemy import Text, cast, func, select, update

from core.database.tables import EvalJournal, EvalPage, EvalRun
from core.evals import items
from core.storage import fsck, orphans
from core.tenancy import tenants
from tests.evals.conftest import EXACT, House, completions
from tests.present import untyped
from worker.supervisor.retention import DAY, Retention


def keep(house: House, days: int | None) -> None:
    settings = house.settings.model_copy(update={"keep_rollouts_days": days})
    Retention(settings, house.database, house.blobs, clock=lambda: 0.0).policies()


def end(house: House, run_id: str, *, days_ago: int) -> None:
    """As if the run had ended then."""
    with house.database.write() as session:
        at = int(time.time() - days_ago * DAY)
        session.execute(update(EvalRun).where(EvalRun.id == run_id).values(finished_at=at))


def count(house: House, table: type[EvalJournal | EvalPage]) -> int:
    with house.database.read() as session:
        return session.query(table).count()


def blobs(house: House, run_id: str) -> list[Any]:
    return [entry.key for entry in house.blobs.entries("projects/") if run_id in entry.key]


def findings(house: House) -> list[Any]:
    """What fsck and the sweep say."""
    lost = [entry for batch in orphans.find(house.database, house.blobs, older_than=2e12) for entry in batch]
    return [*fsck.damaged(house.database, house.blobs), *lost]


@pytest.mark.both_databases
def test_a_run_loses_its_items_after_the_retention_of_rollouts_and_keeps_its_counts(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    made = new_eval()
    old, young = (client.evals.runs.create(made.id, data_source=completions(3)).id for _ in range(2))
    house.work()
    end(house, old, days_ago=31)
    end(house, young, days_ago=29)

    keep(house, 30)

    run = client.evals.runs.retrieve(old, eval_id=made.id)
    assert (run.status, run.result_counts.passed, untyped(run).pass_rate) == ("completed", 3, 1.0)
    assert untyped(run.data_source.source).content == []
    assert client.evals.runs.output_items.list(old, eval_id=made.id).data == []
    assert blobs(house, old) == []
    assert len(client.evals.runs.output_items.list(young, eval_id=made.id).data) == 3
    assert len(untyped(client.evals.runs.retrieve(young, eval_id=made.id).data_source.source).content) == 3
    assert findings(house) == []


def test_without_a_retention_items_stay_for_ever(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    run = client.evals.runs.create(new_eval().id, data_source=completions(3)).id
    house.work()
    end(house, run, days_ago=10_000)

    keep(house, None)

    assert len(blobs(house, run)) == 1


def test_unfinished_runs_keep_what_they_have(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(3)).id
    house.runner().claim()
    with house.database.write() as session:
        session.execute(update(EvalRun).values(created_at=0, started_at=0))
        session.add(EvalJournal(run_id=run, line=1, data={"sample": {}, "grades": {}}))

    keep(house, 1)

    assert count(house, EvalJournal) == 1
    assert len(untyped(client.evals.runs.retrieve(run, eval_id=made.id).data_source.source).content) == 3


def test_the_journal_of_a_run_that_failed_goes_with_its_pages(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    budget = {"budget": {"judge_calls": 1, "tokens": 300}}
    run = client.evals.runs.create(made.id, data_source=completions(200), extra_body=budget).id
    house.work()
    assert count(house, EvalJournal) == 20
    end(house, run, days_ago=2)

    keep(house, 1)

    assert count(house, EvalJournal) == 0
    assert client.evals.runs.retrieve(run, eval_id=made.id).result_counts.passed == 20


def test_deleting_an_eval_leaves_neither_blobs_nor_rows_of_items(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    for budget in (None, {"tokens": 30}):
        client.evals.runs.create(
            made.id, data_source=completions(5), extra_body=budget and {"budget": budget}
        )
    house.work()
    assert (count(house, EvalPage), count(house, EvalJournal)) == (1, 2)

    client.evals.delete(made.id)

    assert (count(house, EvalPage), count(house, EvalJournal)) == (0, 0)
    assert [entry.key for entry in house.blobs.entries("projects/")] == []


@pytest.mark.both_databases
def test_items_of_a_run_that_ended_in_the_middle_of_a_block_count_as_storage(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    run = client.evals.runs.create(
        new_eval().id, data_source=completions(5), extra_body={"budget": {"tokens": 30}}
    ).id
    house.work()

    assert count(house, EvalJournal) == 2
    with house.database.read() as session:
        assert tenants.stored_bytes(session, house.project.id) > house.row(run).content_bytes + 200


def test_rows_count_with_the_bytes_that_they_are_stored_with(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    source = completions(1)
    source["source"]["content"][0]["item"]["question"] = "你" * 1000
    run = client.evals.runs.create(new_eval().id, data_source=source).id

    with house.database.read() as session:
        stored = session.scalars(select(func.length(cast(EvalRun.content, Text)))).one()
    assert house.row(run).content_bytes == stored > 6000


def test_fsck_finds_the_damage_of_a_page_and_nothing_in_a_whole_one(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    run = client.evals.runs.create(new_eval().id, data_source=completions(3)).id
    house.work()
    assert findings(house) == []
    [key] = blobs(house, run)
    house.blobs.put_bytes(key, b"else")

    [found] = fsck.damaged(house.database, house.blobs)

    assert (found.problem, found.key, found.owner) == ("damaged", key, f"{run} page 0")


@pytest.mark.both_databases
def test_a_run_fails_once_the_storage_of_its_project_is_used_up_and_keeps_its_items(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    made = new_eval(EXACT)
    run = client.evals.runs.create(made.id, data_source=completions(5 * items.BLOCK_ROWS)).id
    house.limit(storage_bytes=house.row(run).content_bytes + 1)
    house.work()

    failed = client.evals.runs.retrieve(run, eval_id=made.id)
    assert (failed.status, failed.error.code) == ("failed", "insufficient_quota")
    assert "storage_bytes" in failed.error.message
    assert items.BLOCK_ROWS <= failed.result_counts.total < 5 * items.BLOCK_ROWS
    listed = list(client.evals.runs.output_items.list(run, eval_id=made.id, limit=100))
    assert len(listed) == failed.result_counts.total
    with pytest.raises(RateLimitError, match="storage_bytes"):
        client.evals.runs.create(made.id, data_source=completions(1))
    client.evals.runs.delete(run, eval_id=made.id)
    assert client.evals.runs.create(made.id, data_source=completions(1)).status == "queued"


def test_a_run_whose_last_page_fills_the_storage_completes(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(3)).id
    house.limit(storage_bytes=house.row(run).content_bytes + 1)
    house.work()

    assert client.evals.runs.retrieve(run, eval_id=made.id).status == "completed"


def test_an_item_of_a_deleted_page_is_not_found(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(3)).id
    house.work()
    [first, *_] = client.evals.runs.output_items.list(run, eval_id=made.id).data
    end(house, run, days_ago=2)
    keep(house, 1)

    with pytest.raises(NotFoundError):
        client.evals.runs.output_items.retrieve(first.id, eval_id=made.id, run_id=run)
