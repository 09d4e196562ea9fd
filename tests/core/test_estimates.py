"""How long a job will take, with numbers that can be checked in one's head."""

from collections.abc import Callable
from typing import Any

import pytest

from core.database.engine import Database
from core.jobs import estimates, hyperparameters
from core.jobs.estimates import Pace, PastJobs
from core.jobs.hyperparameters import Hyperparameters
from core.jobs.remaining import RemainingSteps
from core.step_metrics import StepMetrics
from tests import factories
from tests.hyperparameters import in_groups
from tests.present import present

pytestmark = pytest.mark.both_databases


def step(number: int, seconds: float, *, validated: bool = False) -> StepMetrics:
    timing = {"step": {"full_iteration": seconds, "eval": 0.0}}
    return StepMetrics(step=number, timing=timing, **({"full_valid_mean_reward": 0.5} if validated else {}))


def pace(*steps: StepMetrics) -> Pace:
    so_far = Pace()
    for one in steps:
        so_far = so_far.after(one)
    return so_far


def asked(**fields: Any) -> Hyperparameters:
    advanced = {"advanced": in_groups(fields.pop("advanced", {}))}
    return Hyperparameters.model_validate(
        {"n_epochs": 1, "batch_size": 2, "eval_interval": 2} | fields | advanced
    )


class TestDuringTheRun:
    def test_steps_with_a_validation_count_with_their_own_mean(self) -> None:
        so_far = pace(step(0, 9.0, validated=True), step(1, 10.0), step(2, 30.0, validated=True))

        assert (
            present(so_far.remaining(RemainingSteps(plain=3, validated=2, next_is_validated=False)))[
                "expected"
            ]
            == 3 * 10 + 60
        )

    def test_a_validation_that_was_not_seen_yet_takes_what_that_of_the_base_took(self) -> None:
        so_far = pace(step(0, 9.0, validated=True), step(1, 10.0))

        assert (
            present(so_far.remaining(RemainingSteps(plain=1, validated=1, next_is_validated=True)))[
                "expected"
            ]
            == 10 + 19
        )
        assert so_far.next_step(RemainingSteps(plain=1, validated=1, next_is_validated=True)) == 19

    def test_a_plain_step_that_was_not_seen_yet_takes_a_validated_one_less_the_validation(self) -> None:
        so_far = pace(step(0, 9.0, validated=True), step(1, 29.0, validated=True))

        assert so_far.next_step(RemainingSteps(plain=1, validated=0, next_is_validated=False)) == 20

    def test_only_the_last_ten_of_a_kind_count(self) -> None:
        slow = [step(number, 100.0) for number in range(1, 11)]
        fast = [step(number, 1.0) for number in range(11, 21)]

        assert present(pace(*slow, *fast).remaining(RemainingSteps(5, 0, False)))["expected"] == 5

    def test_before_a_step_has_learned_nothing_is_claimed(self) -> None:
        so_far = pace(step(0, 9.0, validated=True))

        assert so_far.remaining(RemainingSteps(4, 1, False)) is None
        assert so_far.next_step(RemainingSteps(4, 1, False)) == 0.0

    def test_at_the_end_nothing_remains(self) -> None:
        assert pace(step(1, 3.0)).remaining(RemainingSteps(0, 0, False)) == {
            "low": 0,
            "expected": 0,
            "high": 0,
        }

    def test_one_step_says_little_and_many_alike_say_more(self) -> None:
        one = pace(step(1, 10.0)).remaining(RemainingSteps(10, 0, False))
        four = pace(*[step(n, 10.0) for n in range(1, 5)]).remaining(RemainingSteps(10, 0, False))

        assert one is not None
        assert (one["low"], one["expected"], one["high"]) == (50, 100, 150)
        assert four is not None
        assert (four["low"], four["expected"], four["high"]) == (75, 100, 125)

    def test_steps_that_differ_widen_the_range_beyond_that(self) -> None:
        uneven = pace(*[step(n, 10.0 if n % 2 else 100.0) for n in range(1, 11)])

        remaining = uneven.remaining(RemainingSteps(10, 0, False))

        assert remaining is not None
        assert (remaining["low"], remaining["expected"], remaining["high"]) == (100, 550, 1000)


class TestBeforeTheStart:
    def test_the_range_goes_from_short_answers_to_as_long_as_they_may_be(self) -> None:
        sizes = estimates.sizes(
            asked(advanced={"group_size": 4, "max_completion_tokens": 100}), rows=8, context=512
        )
        past = PastJobs(jobs=1, tokens_per_second=[10.0], answer_tokens=[20.0])

        seconds = past.seconds(sizes, train_rows=8, valid_rows=5)

        answers = 8 * 4 + 3 * 5  # four steps: validations at 0, 2 and 4
        assert seconds == {"low": answers * 2, "expected": answers * 2, "high": answers * 10}

    def test_answers_never_take_more_than_their_room(self) -> None:
        sizes = estimates.sizes(
            asked(advanced={"group_size": 4, "max_completion_tokens": 10}), rows=8, context=512
        )
        past = PastJobs(jobs=1, tokens_per_second=[10.0], answer_tokens=[500.0])

        seconds = past.seconds(sizes, train_rows=8, valid_rows=0)

        assert seconds == {"low": 32, "expected": 32, "high": 32}

    def test_speeds_that_differ_give_a_range(self) -> None:
        sizes = estimates.sizes(
            asked(advanced={"group_size": 4, "max_completion_tokens": 10}), rows=8, context=512
        )
        past = PastJobs(jobs=3, tokens_per_second=[float(n) for n in range(11)], answer_tokens=[10.0])

        seconds = past.seconds(sizes, train_rows=8, valid_rows=0)

        assert seconds == {"low": 320 / 9, "expected": 320 / 5, "high": 320 / 1}

    def test_the_sizes_are_those_that_a_run_would_resolve(self) -> None:
        run = hyperparameters.resolve(Hyperparameters(), rows=30, parameters=10**9, context=512)

        sizes = estimates.sizes(Hyperparameters(), rows=30, context=512)

        assert sizes.model_copy(update={"learning_rate": run.learning_rate}) == run


class TestHistory:
    @pytest.fixture
    def past(self, database: Database) -> Callable[..., PastJobs | None]:
        """Record steps of a job of some model; returns what is known of `tiny` on `cpu`."""

        def record(
            steps: tuple[tuple[int, float, float]] = ((40, 6.0, 2.0),), **fields: Any
        ) -> PastJobs | None:
            with database.write() as session:
                project = factories.project(session)
                job = factories.job(session, project, **{"started_at": 1} | fields)
                for number, (tokens, seconds, validation) in enumerate(steps, start=1):
                    factories.step(session, job, number, tokens=tokens, seconds=seconds, eval=validation)
            with database.read() as session:
                return estimates.history(session, model="tiny", gpu_class="cpu")

        return record

    def test_speed_is_that_of_a_step_without_its_validation(
        self, past: Callable[..., PastJobs | None]
    ) -> None:
        assert past() == PastJobs(jobs=1, tokens_per_second=[10.0], answer_tokens=[5.0])

    def test_jobs_of_other_models_and_machines_say_nothing(
        self, past: Callable[..., PastJobs | None]
    ) -> None:
        past(model="other")

        assert past(gpu_class="h200") is None

    def test_a_step_without_tokens_or_time_says_nothing(self, past: Callable[..., PastJobs | None]) -> None:
        assert past(steps=[(0, 6.0, 2.0), (40, 2.0, 2.0)]) is None

    def test_only_the_newest_jobs_are_asked(self, past: Callable[..., PastJobs | None]) -> None:
        past(steps=[(4000, 6.0, 2.0)])
        for _ in range(estimates.HISTORY_JOBS):
            told = past()

        assert told is not None
        assert told.jobs == estimates.HISTORY_JOBS
        assert set(told.tokens_per_second) == {10.0}


def test_a_quantile_lies_between_its_neighbours() -> None:
    assert estimates.quantile([3.0, 1.0], 0.5) == 2.0
    assert estimates.quantile([7.0], 0.9) == 7.0
    assert estimates.quantile([0.0, 10.0, 20.0], 0.1) == 2.0
