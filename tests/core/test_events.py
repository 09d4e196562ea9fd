import pytest
from sqlalchemy.orm import Session

from core.claims import Claim
from core.database.engine import Database
from core.errors import InvalidRequest
from core.jobs import events
from core.step_metrics import StepMetrics

pytestmark = pytest.mark.both_databases


FIRST, SECOND = Claim("ftjob-1", 1, "first"), Claim("ftjob-1", 2, "second")


def test_an_event_has_all_that_the_api_shows(session: Session) -> None:
    event = events.append(session, "ftjob-1", "Step 1/2", level="warn", type="metrics", data={"step": 1})

    assert event.id.startswith("ftevent-")
    assert event.created_at > 0
    assert (event.level, event.type, event.message, event.data) == (
        "warn",
        "metrics",
        "Step 1/2",
        {"step": 1},
    )


def test_a_plain_message_has_empty_data(session: Session) -> None:
    assert events.append(session, "ftjob-1", "hello").data == {}


def test_events_are_read_newest_first_in_the_order_of_appending(session: Session) -> None:
    for number in range(5):
        events.append(session, "ftjob-1", f"{number}")
        events.append(session, "ftjob-2", "somebody else's")

    first = events.page(session, "ftjob-1", limit=2)
    second = events.page(session, "ftjob-1", after=first.items[-1].id, limit=3)

    assert [event.message for event in first.items] == ["4", "3"]
    assert [event.message for event in second.items] == ["2", "1", "0"]
    assert (first.has_more, second.has_more) == (True, False)


def test_another_jobs_event_is_no_place_to_read_on_from(session: Session) -> None:
    theirs = events.append(session, "ftjob-2", "theirs")

    with pytest.raises(InvalidRequest):
        events.page(session, "ftjob-1", after=theirs.id, limit=2)


def test_a_message_that_the_database_cannot_hold_is_kept_as_far_as_possible(database: Database) -> None:
    with database.write() as session:
        events.append(session, "ftjob-1", "the model said \0 and \ud83d")

    with database.read() as session:
        [event] = events.page(session, "ftjob-1", limit=1).items
    assert event.message == "the model said \N{REPLACEMENT CHARACTER} and \N{REPLACEMENT CHARACTER}"


def test_steps_are_read_in_order(session: Session) -> None:
    for step in (2, 10, 1):
        events.record_step(session, FIRST, StepMetrics(step=step))

    assert [row.data for row in events.steps(session, "ftjob-1")] == [{"step": 1}, {"step": 2}, {"step": 10}]


def test_a_step_that_is_replayed_replaces_the_row_of_the_lost_attempt(database: Database) -> None:
    with database.write() as session:
        events.record_step(session, FIRST, StepMetrics(step=1, train_mean_reward=0.1))
    with database.write() as session:
        events.record_step(session, SECOND, StepMetrics(step=1, train_mean_reward=0.2))

    with database.read() as session:
        [row] = events.steps(session, "ftjob-1")
    assert (row.epoch, row.data) == (2, {"step": 1, "train_mean_reward": 0.2})


def test_steps_beyond_a_checkpoint_can_be_forgotten(session: Session) -> None:
    for step in range(4):
        events.record_step(session, FIRST, StepMetrics(step=step))
    events.record_step(session, Claim("ftjob-2", 1, "other"), StepMetrics(step=3))

    events.discard_steps_after(session, "ftjob-1", 1)

    assert [row.step for row in events.steps(session, "ftjob-1")] == [0, 1]
    assert [row.step for row in events.steps(session, "ftjob-2")] == [3]
