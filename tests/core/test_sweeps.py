"""The settings of a sweep, when a job of it has lost, and which one is the best."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from core.errors import InvalidRequest
from core.pipelines import sweeps
from core.pipelines.sweeps import Candidate, Scores

HYPERPARAMETERS = ("method", "reinforcement", "hyperparameters")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("seed", ("seed",)),
        ("model", ("model",)),
        ("batch_size", (*HYPERPARAMETERS, "batch_size")),
        ("learning_rate", (*HYPERPARAMETERS, "advanced", "optimizer", "learning_rate")),
        ("optimizer.learning_rate", (*HYPERPARAMETERS, "advanced", "optimizer", "learning_rate")),
        ("kl.weight", (*HYPERPARAMETERS, "advanced", "kl", "weight")),
    ],
)
def test_a_setting_has_its_place_in_the_request_by_its_short_or_its_full_name(
    name: str, place: tuple[str, ...]
) -> None:
    assert sweeps.path_of(name) == place


def test_an_unknown_setting_is_refused_with_the_similar_one() -> None:
    with pytest.raises(InvalidRequest, match=r"no setting 'learning_rates'. Did you mean 'learning_rate'\?"):
        sweeps.path_of("learning_rates")
    with pytest.raises(InvalidRequest, match="no setting 'training_file'"):
        sweeps.path_of("training_file")


def test_every_combination_is_a_job_and_leaves_the_request_as_it_was() -> None:
    job = {"model": "tiny", "method": {"type": "reinforcement", "reinforcement": {"grader": {}}}}

    settings = sweeps.combinations({"seed": [1, 2], "kl.weight": [0.0, 0.1]})
    made = [sweeps.with_settings(job, one) for one in settings]

    assert settings == [
        {"seed": 1, "kl.weight": 0.0},
        {"seed": 1, "kl.weight": 0.1},
        {"seed": 2, "kl.weight": 0.0},
        {"seed": 2, "kl.weight": 0.1},
    ]
    assert made[3] == {
        "model": "tiny",
        "seed": 2,
        "method": {
            "type": "reinforcement",
            "reinforcement": {"grader": {}, "hyperparameters": {"advanced": {"kl": {"weight": 0.1}}}},
        },
    }
    assert job == {"model": "tiny", "method": {"type": "reinforcement", "reinforcement": {"grader": {}}}}


def candidate(rate: float, validations: Mapping[int, Scores]) -> Candidate:
    return Candidate({"learning_rate": rate}, [*validations], validations.__getitem__)


def test_a_job_has_lost_when_another_is_certainly_better_at_the_last_step_that_both_validated() -> None:
    rows = 60
    good = candidate(1e-4, {5: [0.0] * rows, 10: [1.0] * 40 + [0.0] * 20, 15: [1.0] * rows})
    bad = candidate(1e-2, {5: [1.0] * rows, 10: [0.0] * rows})

    reason = sweeps.beaten(bad, [good], jobs=2)

    assert reason is not None
    assert reason.startswith(
        "learning_rate 0.0001 is better at step 10: by 0.667 on 60 validation rows, at least by"
    )
    assert sweeps.beaten(good, [bad], jobs=2) is None


def test_no_job_has_lost_without_a_step_or_a_graded_row_that_both_have() -> None:
    good = candidate(1e-4, {10: [1.0] * 60})

    assert sweeps.beaten(candidate(1e-2, {}), [good], jobs=2) is None
    assert sweeps.beaten(candidate(1e-2, {5: [0.0] * 60}), [good], jobs=2) is None
    assert sweeps.beaten(candidate(1e-2, {10: [None] * 60}), [good], jobs=2) is None


def test_validations_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        sweeps.beaten(candidate(1e-2, {5: [1.0]}), [candidate(1e-4, {5: []})], jobs=2)


def test_a_few_rows_are_no_reason_to_stop() -> None:
    good, bad = candidate(1e-4, {10: [1.0] * 29}), candidate(1e-2, {10: [0.0] * 29})

    assert sweeps.beaten(bad, [good], jobs=2) is None


def of_equal_jobs(dice: random.Random, jobs: int, rows: int, looks: int) -> list[dict[int, list[float]]]:
    """Right or wrong answers of jobs that are all the same, at each of their validations."""
    return [
        {step: [float(dice.random() < 0.5) for _ in range(rows)] for step in range(1, looks + 1)}
        for _ in range(jobs)
    ]


def test_jobs_without_a_difference_are_stopped_in_no_more_sweeps_than_stated() -> None:
    """400 sweeps of 4 equal jobs with 10 looks; the level is 5 %, so 38 or more have a probability below 0.1 %."""
    dice, wrong, jobs, rows, looks = random.Random(7), 0, 4, 40, 10
    for _ in range(400):
        scores = of_equal_jobs(dice, jobs, rows, looks)
        wrong += any(
            _is_any_beaten([{at: one[at] for at in range(1, step + 1)} for one in scores], jobs)
            for step in range(1, looks + 1)
        )

    assert wrong < 38


def _is_any_beaten(scores: Sequence[Mapping[int, Scores]], jobs: int) -> bool:
    candidates = [candidate(float(number), one) for number, one in enumerate(scores)]
    return any(
        sweeps.beaten(one, [other for other in candidates if other is not one], jobs) for one in candidates
    )


def test_the_best_job_is_named_with_those_that_do_not_differ_from_it() -> None:
    best, close, bad = [1.0] * 40, [1.0] * 38 + [0.0] * 2, [0.0] * 40
    settings: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2}, {"seed": 3}]

    ranks = sweeps.ranked([close, best, bad], [1, 1, 1], jobs=3)

    assert [rank.reward for rank in ranks] == [0.95, 1.0, 0.0]
    assert [rank.is_worse for rank in ranks] == [False, False, True]
    assert sweeps.best_of(ranks) == 1
    assert sweeps.conclusion(settings, ranks) == (
        "No difference beyond chance between seed 2 and seed 1: the model is that of seed 2."
    )
    assert (
        sweeps.conclusion(settings[1:], ranks[1:])
        == "seed 2 is better than every other one that was compared."
    )


def test_only_rows_that_are_graded_in_all_jobs_are_compared() -> None:
    ranks = sweeps.ranked([[1.0, None, 0.0, 1.0], [0.0, 1.0, None, 1.0]], [1, 1], jobs=2)

    assert [rank.reward for rank in ranks] == [1.0, 0.5]
    assert ranks[1].difference == 0.5


def test_equal_jobs_are_no_difference_and_the_first_is_taken() -> None:
    ranks = sweeps.ranked([[0.5] * 30, [0.5] * 30], [1, 1], jobs=2)

    assert sweeps.best_of(ranks) == 0
    assert sweeps.conclusion([{"seed": 1}, {"seed": 2}], ranks) == (
        "No difference beyond chance between seed 1 and seed 2: the model is that of seed 1."
    )


def test_jobs_without_a_common_graded_row_cannot_be_compared() -> None:
    ranks = sweeps.ranked([[None, 1.0], [1.0, None]], [1, 1], jobs=2)

    assert sweeps.best_of(ranks) == 0
    assert sweeps.conclusion([{"seed": 1}, {"seed": 2}], ranks).startswith(
        "No validation row is graded in all jobs"
    )


def test_a_few_rows_are_no_difference_but_too_few_to_tell() -> None:
    ranks = sweeps.ranked([[1.0] * 5, [0.0] * 5], [1, 1], jobs=2)

    assert sweeps.conclusion([{"seed": 1}, {"seed": 2}], ranks) == (
        "5 validation rows are too few to tell: the model is that of seed 1, with the highest mean."
    )


@pytest.mark.parametrize("validations_J", [[1, 10], [1, 40], [4, 20]])
def test_the_best_of_many_validations_is_not_better_than_an_equal_job(validations_J: list[int]) -> None:
    """400 sweeps of 2 equal jobs that deliver their best validations; 38 or more have a probability below 0.1 %."""
    dice, wrong = random.Random(5), 0
    for _ in range(400):
        scores = of_equal_jobs(dice, 2, 100, max(validations_J))
        delivered = [
            max((one[step] for step in range(1, count + 1)), key=sum)
            for one, count in zip(scores, validations_J, strict=True)
        ]
        wrong += any(rank.is_worse for rank in sweeps.ranked(delivered, validations_J, jobs=2))

    assert wrong < 38


def test_two_names_of_one_setting_are_found() -> None:
    assert sweeps.setting_named_twice(["learning_rate", "seed", "optimizer.learning_rate"]) == (
        "optimizer.learning_rate"
    )
    assert sweeps.setting_named_twice(["learning_rate", "seed", "train"]) is None
