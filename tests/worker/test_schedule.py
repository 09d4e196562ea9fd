"""The steps after which a run validates and saves: `Schedule` in worker/types.py."""

from core.jobs.remaining import RemainingSteps
from worker.types import Schedule

SAMPLED = Schedule(total_steps=7, validate_every=3)
ROWS = Schedule(total_steps=12, validate_every=6, partial_every=4, epoch_steps=6)


def test_a_run_that_samples_saves_exactly_where_it_validates_and_validates_its_last_step() -> None:
    validated = [step for step in range(8) if SAMPLED.is_validated(step)]

    assert validated == [0, 3, 6, 7]
    assert validated == [step for step in range(8) if SAMPLED.is_saved(step)]
    assert not any(map(SAMPLED.ends_epoch, range(8)))


def test_a_run_on_rows_validates_some_of_them_between_its_epochs() -> None:
    steps = range(13)

    assert [step for step in steps if ROWS.is_validated(step)] == [0, 6, 12]
    assert [step for step in steps if ROWS.is_partly_validated(step)] == [4, 8, 12], "never before step 1"
    assert [step for step in steps if ROWS.is_measured(step)] == [0, 4, 6, 8, 12]


def test_without_validation_rows_the_checkpoints_are_the_same_and_nothing_is_validated() -> None:
    without = Schedule(total_steps=12, validate_every=None, partial_every=4, epoch_steps=6)

    assert list(map(without.is_saved, range(1, 13))) == list(map(ROWS.is_saved, range(1, 13)))
    assert not any(map(without.is_measured, range(13)))


def test_remaining_steps_are_counted_by_whether_all_rows_are_validated_after_them() -> None:
    assert SAMPLED.remaining(2) == RemainingSteps(plain=2, validated=3, next_is_validated=True)
    assert SAMPLED.remaining(7) == RemainingSteps(plain=0, validated=0, next_is_validated=False)
    assert SAMPLED.remaining(3, is_last=True) == RemainingSteps(0, 0, False), "it is stopped early"
