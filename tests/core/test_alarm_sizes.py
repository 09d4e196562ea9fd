"""The warning about alarms that cannot fire in a job of this size."""

import pytest

from core.jobs import alarm_sizes
from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.statistics import sequential_low
from core.thresholds import Thresholds
from graders.build import alarms_of
from graders.spec import parse_grader
from worker.history import RECENT
from worker.recording import monitors

EXACT = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
JUDGE = {
    "type": "score_model",
    "name": "judge",
    "model": "m",
    "input": [{"role": "user", "content": "{{sample.output_text}}"}],
}
BOTH = {
    "type": "multi",
    "name": "both",
    "graders": {"exact": EXACT, "judge": JUDGE},
    "calculate_output": "exact + judge",
}


def sized(rows: int, steps: int, eval_interval: int) -> Resolved:
    asked = Hyperparameters.model_validate(
        {"batch_size": rows, "n_epochs": 1, "eval_interval": eval_interval}
    )
    resolved = resolve(asked, rows=rows, parameters=1, context=128)
    return resolved.model_copy(update={"total_steps": steps, "on_alarm": "pause"})


def test_each_alarm_is_named_with_the_size_that_would_do() -> None:
    alarms = alarms_of(parse_grader(BOTH), has_shadow=True)

    [warning] = alarm_sizes.too_small(sized(8, 9, 1), Thresholds(), alarms, 4)

    assert warning == (
        "The job is too small for some alarms, which cannot fire. shadow_divergence needs 8 validation rows with 9 "
        "validations, and there are 4; one_sided_gain needs 10 steps, and there are 9; judge_drift needs 9 validation "
        "rows with 9 validations, and there are 4; validation_falls needs 10 validation rows with 9 validations, and "
        "there are 4."
    )


def test_a_job_that_relies_on_no_alarm_has_no_warning() -> None:
    relying = sized(8, 9, 1)
    informed = relying.model_copy(update={"on_alarm": "inform"})

    assert alarm_sizes.too_small(informed, Thresholds(), ["validation_falls"], 4) == []
    assert len(alarm_sizes.too_small(relying, Thresholds(), ["validation_falls"], 4)) == 1


def test_a_job_in_which_each_alarm_can_fire_has_no_warning() -> None:
    alarms = alarms_of(parse_grader(BOTH), has_shadow=True)

    assert alarm_sizes.too_small(sized(8, 10, 1), Thresholds(), alarms, 11) == []


def test_alarms_that_the_graders_exclude_or_the_operator_has_switched_off_are_not_named() -> None:
    assert alarms_of(parse_grader(EXACT), has_shadow=False) == ["validation_falls"]
    off = Thresholds(validation_fall=None)

    assert alarm_sizes.too_small(sized(8, 9, 1), off, ["validation_falls"], 4) == []


def test_a_judge_that_would_need_more_answers_than_it_grades_again_needs_fewer_validations() -> None:
    [warning] = alarm_sizes.too_small(sized(8, 2000, 1), Thresholds(), ["judge_drift"], 1000)

    assert "17 answers with 2000 validations, grades 16 again, and needs fewer validations" in warning
    assert alarm_sizes.too_small(sized(8, 1600, 1), Thresholds(), ["judge_drift"], 1000) == []


def test_a_fall_of_validation_needs_a_second_step() -> None:
    [warning] = alarm_sizes.too_small(sized(8, 1, 1), Thresholds(), ["validation_falls"], 99)

    assert "validation_falls needs 2 steps, and there are 1" in warning
    assert alarm_sizes.too_small(sized(8, 2, 1), Thresholds(), ["validation_falls"], 99) == []


def test_one_validation_is_no_plural() -> None:
    [warning] = alarm_sizes.too_small(sized(8, 1, 1), Thresholds(), ["shadow_divergence"], 1)

    assert "with 1 validation, and" in warning


def test_a_part_without_weight_is_none_that_could_gain_or_lose() -> None:
    weightless = parse_grader(BOTH | {"calculate_output": "exact + 0 * judge"})

    assert "one_sided_gain" not in alarms_of(weightless, has_shadow=False)


@pytest.mark.parametrize("steps", [1, 4, 10, 100])
def test_the_rows_that_would_do_are_those_of_which_there_is_a_bound(steps: int) -> None:
    run = sized(8, steps, 1)
    least = next(
        rows
        for rows in range(64)
        if not alarm_sizes.too_small(run, Thresholds(), ["shadow_divergence"], rows)
    )

    assert sequential_low([1.0] * (least - 1), run.validations) is None
    assert sequential_low([1.0] * least, run.validations) == 1.0


def test_the_steps_are_two_windows_of_the_rules() -> None:
    assert alarm_sizes.STEPS == 2 * RECENT
    assert alarm_sizes.ALARMS.keys() < monitors.RULES.keys()
