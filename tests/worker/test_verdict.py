"""The paired comparison of two validations: numbers that can be checked by hand, and a simulation of its coverage."""

import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from regraft.types import Verdict as ShownVerdict

from core.jobs.verdict import NOT_HELD_OUT, Verdict
from graders.types import ErrorKind, Grade
from tests.present import present, untyped
from worker.recording.verdict import (
    MIN_ROWS,
    RewardComparison,
    bootstrap_interval,
    compare,
    row_scores,
    standard_error,
)
from worker.types import Group, Prompt, Rollout


def compared(base: Sequence[float | None], tuned: Sequence[float | None]) -> RewardComparison:
    """The comparison of scores of which both sides have some."""
    comparison = compare(base, tuned)
    assert comparison is not None
    return comparison


def test_wins_losses_ties_and_means_are_of_pairs() -> None:
    found = compared([0.0, 0.5, 1.0, 0.25, 0.25, 0.25], [1.0, 0.5, 0.5, 0.25, 0.25, 0.25])

    assert (found.wins, found.losses, found.ties, found.ungraded) == (1, 1, 4, 0)
    assert found.base_reward == pytest.approx(2.25 / 6)
    assert found.tuned_reward == pytest.approx(2.75 / 6)
    assert found.difference == pytest.approx(0.5 / 6)
    assert present(found.low) < present(found.difference) < present(found.high)
    assert found.outcome == "no_difference"


def test_a_row_that_either_side_could_not_grade_is_left_out_of_both_means() -> None:
    found = compared([0.0, None, 1.0, 0.0], [0.5, 1.0, None, 0.5])

    assert (found.ungraded, found.wins, found.base_reward, found.tuned_reward) == (2, 2, 0.0, 0.5)


def test_a_model_that_lost_every_row_is_worse_and_one_that_won_every_row_is_improved() -> None:
    good, bad = [0.6] * MIN_ROWS, [0.0] * MIN_ROWS

    assert compared(good, bad).verdict(2).outcome == "worse"
    assert compared(bad, good).verdict(2).outcome == "improved"


def test_identical_scores_are_no_difference_with_an_interval_of_zero_width() -> None:
    found = compared([0.3] * 9, [0.3] * 9)

    assert (found.outcome, found.difference, found.low, found.high, found.ties) == (
        "no_difference",
        0,
        0,
        0,
        9,
    )


@pytest.mark.parametrize("rows", range(1, MIN_ROWS))
def test_too_few_rows_have_no_interval_and_decide_nothing(rows: int) -> None:
    verdict = compared([0.0] * rows, [1.0] * rows).verdict(1)

    assert (verdict.ci_low, verdict.ci_high, verdict.outcome) == (None, None, "too_few")
    assert verdict.sentence().endswith(": too few rows to tell.")
    assert "too few rows for a 95 % interval" in verdict.sentence()
    assert "nan" not in str(verdict.to_row()).lower()


def test_without_a_row_that_both_could_grade_there_is_no_comparison() -> None:
    assert compare([None, 1.0], [1.0, None]) is None


def test_scores_that_differ_by_rounding_are_ties() -> None:
    found = compared([0.1 + 0.2] * 6, [0.3] * 6)

    assert (found.ties, found.difference, found.outcome) == (6, 0.0, "no_difference")


def test_validations_of_different_files_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare([0.0, 1.0], [0.0])


def test_the_same_validations_give_the_same_interval() -> None:
    base = [random.Random(0).random() for _ in range(40)]
    tuned = [random.Random(1).random() for _ in range(40)]

    assert compared(base, tuned) == compared(base, tuned)


def test_the_interval_is_that_of_the_t_distribution_where_the_differences_are_normal() -> None:
    draw = random.Random(4)
    values = [draw.gauss(0.1, 0.3) for _ in range(200)]

    low, high = bootstrap_interval(values)

    half = 1.972 * statistics.stdev(values) / 200**0.5  # t for 199 degrees of freedom
    assert low == pytest.approx(statistics.fmean(values) - half, abs=0.005)
    assert high == pytest.approx(statistics.fmean(values) + half, abs=0.005)


@pytest.mark.parametrize("rows", [12, 42])
def test_95_of_100_intervals_hold_the_true_difference(rows: int) -> None:
    """Differences of -1, 0 and 1 with mean 0.2, as of a grader that knows right and wrong."""
    draw, holds = random.Random(7), 0
    for _ in range(400):
        low, high = bootstrap_interval(draw.choices([-1.0, 0.0, 1.0], [1, 6, 3], k=rows), resamples=1000)
        holds += low <= 0.2 <= high

    assert 0.92 <= holds / 400 <= 0.98


def test_models_that_do_not_differ_are_rarely_told_apart() -> None:
    draw, told = random.Random(8), 0
    for _ in range(400):
        low, high = bootstrap_interval(draw.choices([-1.0, 0.0, 1.0], [1, 4, 1], k=30), resamples=1000)
        told += low > 0 or high < 0

    assert told / 400 <= 0.08


def test_a_row_with_several_answers_is_one_score() -> None:
    groups = [group([1.0, 0.0, 1.0, 0.0]), group([None, 0.4]), group([None])]

    assert row_scores(groups) == [0.5, 0.4, None]


def test_the_standard_error_is_over_rows_and_not_over_answers() -> None:
    """Two rows of a hundred equal answers each say no more about new rows than two rows of one answer."""
    assert standard_error(row_scores([group([1.0] * 100), group([0.0] * 100)])) == pytest.approx(0.5)
    assert standard_error([0.0, None, 1.0]) == pytest.approx(0.5)
    assert standard_error([0.7]) is None
    assert standard_error([0.7, 0.7]) == 0.0


def test_the_sentence_has_every_number() -> None:
    verdict = Verdict("improved", 0.62, 0.77, 0.15, 0.04, 0.25, 5, 0, 37, 42, 1, 14)

    assert verdict.sentence() == (
        "Compared with the base model on 42 validation rows (1 more could not be graded): 0.62 -> 0.77, difference "
        "+0.15 (95 % interval 0.04 to 0.25), 5 wins, 0 losses, 37 ties: improved."
    )
    assert Verdict.read(verdict.to_row()) == verdict


def test_a_verdict_on_the_training_file_says_that_it_proves_nothing() -> None:
    verdict = compared([0.0] * 8, [1.0] * 8).verdict(2, held_out=False)

    assert verdict.sentence().endswith(
        ": improved. The validation file is the training file, so validation proves nothing about new prompts."
    )
    assert Verdict.read(verdict.to_row()) == verdict
    assert str(ShownVerdict(**verdict.to_row())).endswith("ties in 8 rows). " + NOT_HELD_OUT)


class TestADamagedModel:
    def test_is_worse_with_an_interval_that_stays_honest(self) -> None:
        verdict = compared([0.7] * 3 + [0.476] * 5, [0.0] * 3 + [0.476] * 5).verdict(2, "truncation")

        assert (verdict.outcome, verdict.ground, verdict.ci_high) == ("worse", "truncation", 0.0)
        assert verdict.ci_low == pytest.approx(-0.52, abs=0.02)
        assert verdict.sentence().endswith(
            "0 wins, 3 losses, 5 ties: worse, for it is lower and the run shows damage (truncation)."
        )
        assert Verdict.read(verdict.to_row()) == verdict

    def test_is_not_worse_for_a_small_drop_or_more_wins_than_losses(self) -> None:
        base = [0.0, 1.0] * 15

        assert compared(base, [0.0, 1.0] * 14 + [0.0, 0.0]).verdict(2, "kl_jump").outcome == "no_difference"
        assert compared([0.2] * 6 + [1.0], [0.3] * 6 + [0.0]).verdict(2, "kl_jump").outcome == "no_difference"

    def test_that_scores_higher_is_what_its_interval_says(self) -> None:
        assert compared([0.0] * 6, [1.0] * 6).verdict(2, "kl_jump").outcome == "improved"
        assert compared([0.5] * 6, [0.5] * 6).verdict(2, "kl_jump").outcome == "no_difference"

    def test_is_judged_on_the_scale_of_its_grader(self) -> None:
        small = compared([0.0, 10.0] * 10, [0.0, 10.0] * 9 + [0.0, 9.0]).verdict(2, "kl_jump")

        assert (small.difference, small.outcome) == untyped((pytest.approx(-0.05), "no_difference"))

    def test_has_no_other_ground_where_the_interval_decides(self) -> None:
        verdict = compared([0.6] * 8, [0.1] * 8).verdict(2, "collapse")

        assert (verdict.outcome, verdict.ground) == ("worse", None)


def test_a_lower_mean_without_damage_is_not_significantly_different() -> None:
    few, many = compared([0.51] * 3, [0.5, 0.5, 0.49]), compared([0.5] * 9, [0.5] * 8 + [0.4])

    assert many.verdict(2).sentence().endswith(": not significantly different.")
    assert few.verdict(2).sentence().endswith(": too few rows to tell.")


def group(scores: list[Any]) -> Group:
    rollouts = tuple(Rollout((1,), (-0.5,), "", "stop") for _ in scores)
    grades = (Grade(None, "?", ErrorKind.other_error) if score is None else Grade(score) for score in scores)
    return Group(Prompt(1, (1,), {}), rollouts, tuple(grades))
