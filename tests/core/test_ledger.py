"""The ledger of steps and of jobs, from recorded metrics."""

import csv
import io
from collections.abc import Mapping
from typing import Any

import pytest

from core.database.engine import Database
from core.jobs.budgets import Price
from core.results import ledger
from core.results.ledger import Ledger, divided, of_step, percents
from core.step_metrics import PhaseSeconds, StepMetrics
from tests import factories

FREE = Price(None, "USD")


def step(tokens: Mapping[str, int] | None = None, number: int = 1, **measured: Any) -> StepMetrics:
    """A step with these tokens by bucket; the seconds of its phases are in `phases`."""
    phases = measured.pop("phases", {})
    total = {"full_iteration": sum(phases.values())}
    counts = {f"{bucket}_tokens": count for bucket, count in (tokens or {}).items()}
    return StepMetrics(step=number, **counts, **measured, timing={"step": phases | total})


def seconds(measured: StepMetrics) -> dict[str, float]:
    return {bucket: time / 1e6 for bucket, time in of_step(measured).gpu_time.items()}


@pytest.mark.parametrize(
    ("total", "weights"),
    [(10, {"a": 1, "b": 1, "c": 1}), (7, {"a": 5, "b": 0, "c": 2}), (0, {"a": 3}), (2, {"a": 10**9, "b": 1})],
)
def test_what_is_divided_adds_up_and_each_part_is_within_one_of_its_share(
    total: int, weights: dict[str, int]
) -> None:
    parts = divided(total, weights)

    assert sum(parts.values()) == total
    whole = sum(weights.values())
    assert all(abs(parts[name] - total * weight / whole) < 1 for name, weight in weights.items())


def test_percentages_of_one_digit_add_up_to_100() -> None:
    assert percents({"a": 1, "b": 1, "c": 1}) == {"a": 33.4, "b": 33.3, "c": 33.3}
    assert percents({"a": 0, "b": 0}) == {"a": 0.0, "b": 0.0}


def test_sampling_time_is_divided_by_tokens_and_the_update_taught() -> None:
    measured = step(
        {"learned": 30, "zero_variance": 60, "truncated": 10},
        phases={"sampling": 12.0, "grading": 3.0, "training": 4.0, "eval": 5.0, "waiting": 100.0},
        weight_sync_seconds=2.0,
    )

    assert seconds(measured) == {
        "learned": 3.0 + 4.0,
        "zero_variance": 6.0,
        "truncated": 1.0,
        "grader_wait": 3.0,
        "weight_sync": 2.0,
        "validation": 5.0,
    }


def test_the_time_of_an_update_that_changed_nothing_has_its_own_bucket() -> None:
    phases = {"sampling": 2.0, "training": 3.0}

    assert seconds(step({"not_updated": 5, "ungraded": 5}, phases=phases)) == {
        "not_updated": 4.0,
        "ungraded": 1.0,
    }


def test_without_a_gradient_the_time_of_the_step_is_that_of_its_answers() -> None:
    phases = {"sampling": 2.0, "training": 1.0}

    assert seconds(step({"zero_variance": 1, "resampled": 2}, phases=phases)) == {
        "zero_variance": 1.0,
        "resampled": 2.0,
    }


def test_gpus_that_only_sample_are_idle_during_the_update_and_the_others_before_it() -> None:
    split: dict[str, Any] = {"gpus": 9, "sampling_gpus": 2, "learning_gpus": 6}  # and one that does neither
    phases = {"sampling": 10.0, "training": 4.0, "grading": 1.0}

    assert seconds(step({"learned": 1}, phases=phases, **split)) == {
        "learned": 2 * 10.0 + 6 * 4.0,
        "grader_wait": 9.0,
        "idle": 6 * 10.0 + 2 * 4.0 + 14.0,
    }


@pytest.mark.parametrize(("ahead", "busy"), [(3.0, 3.0), (50.0, 6.0)])
def test_gpus_that_sample_ahead_work_during_the_update(ahead: float, busy: float) -> None:
    """At most in the time of the step, which has 2 seconds of waiting and 4 of the update."""
    split: dict[str, Any] = {"gpus": 2, "sampling_gpus": 1, "learning_gpus": 1, "ahead_seconds": ahead}

    found = seconds(step({"learned": 1}, phases={"sampling": 2.0, "training": 4.0}, **split))

    assert (found["learned"], found["idle"]) == (4.0 + busy, 2.0 + 6.0 - busy)


def test_sampling_without_any_token_is_idle() -> None:
    """Such as of episodes that were discarded before the first answer."""
    assert seconds(step({"discarded_episodes": 0}, phases={"sampling": 2.0})) == {"idle": 2.0}


@pytest.mark.parametrize("phase", sorted(PhaseSeconds.model_fields.keys() - {"full_iteration"}))
def test_every_phase_of_a_step_is_in_the_ledger(phase: str) -> None:
    """All but the one that does not count as GPU-seconds, so that both have the same total."""
    measured = step({"learned": 1}, phases={phase: 1.5}, gpus=3)

    assert sum(seconds(measured).values()) == measured.gpu_seconds


def test_the_step_of_rows_of_a_file_has_what_it_learned_and_its_validation() -> None:
    measured = step({"learned": 100}, trained_tokens=100, phases={"training": 3.0, "eval": 1.0})

    assert of_step(measured).tokens == {"learned": 100}
    assert seconds(measured) == {"learned": 3.0, "validation": 1.0}


def test_a_job_is_the_sum_of_its_steps_and_of_the_tokens_that_were_sampled_for_none() -> None:
    phases = {"sampling": 1 / 3, "training": 1 / 7, "eval": 0.1}
    steps = [
        of_step(step({"learned": 7, "zero_variance": 4, "forced": 1}, number, phases=phases))
        for number in (1, 2, 3)
    ]

    job = Ledger(steps, unused=5)

    assert job.tokens["learned"] == 21
    assert job.tokens["unused"] == 5
    assert sum(job.tokens.values()) == 3 * 12 + 5
    assert sum(job.gpu_time.values()) == sum(sum(one.gpu_time.values()) for one in steps)
    assert (
        round(sum(percents(job.tokens).values()), 6) == round(sum(percents(job.gpu_time).values()), 6) == 100
    )


def test_the_csv_has_each_amount_once() -> None:
    steps = [of_step(step({"learned": 3, "ungraded": 1}, 1, phases={"sampling": 4.0, "eval": 1.0}))]

    rows = list(csv.DictReader(io.StringIO(ledger.to_csv(Ledger(steps, unused=2), Price(0.5, "EUR")))))

    found = [(row["step"], row["bucket"], int(row["tokens"]), float(row["gpu_seconds"])) for row in rows]
    assert found == [
        ("1", "learned", 3, 3.0),
        ("1", "ungraded", 1, 1.0),
        ("1", "validation", 0, 1.0),
        ("", "unused", 2, 0.0),
    ]
    assert {row["currency"] for row in rows} == {"EUR"}
    assert sum(float(row["cost"]) for row in rows) == 2.5
    assert ledger.to_csv(Ledger(steps), FREE).splitlines()[1] == "1,learned,3,3.0,,"


@pytest.mark.both_databases
def test_a_step_that_is_repeated_counts_once(database: Database) -> None:
    with database.write() as session:
        job = factories.job(session, factories.project(session), usage={"unused_tokens": 9})
        for tokens in (5, 6):
            factories.step(session, job, 1, learned_tokens=tokens)

        found = ledger.of_job(session, job)

    assert [one.tokens for one in found.steps] == [{"learned": 6}]
    assert (found.tokens["learned"], found.tokens["unused"]) == (6, 9)
