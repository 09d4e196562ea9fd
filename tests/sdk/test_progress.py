from typing import Any

from openai.types.graders import ScoreModelGrader
from regraft.progress import Marks, Progress, axis_of, described, sparkline


def step(number: int, reward: float, **more: Any) -> dict[str, Any]:
    return {"step": number, "total_steps": 10, "train_mean_reward": reward, **more}


def test_the_axis_of_a_sparkline_is_fixed_so_that_noise_is_not_drawn_as_full_swings() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([0.59, 0.62, 0.60], 10) == "▅▅▅"
    assert sparkline([2.0, 3.0], 10, axis=(1.0, 5.0)) == "▃▅"


def test_rewards_outside_the_axis_widen_it() -> None:
    assert sparkline([-3.0, 1.0], 10, Marks.plain().blocks) == "_#"
    assert sparkline([0.0, 4.0], 10) == "▁█"


def test_the_axis_is_the_range_of_a_grader_that_has_one() -> None:
    assert axis_of({"type": "score_model", "range": [1, 7]}) == (1.0, 7.0)
    assert axis_of(ScoreModelGrader.construct(type="score_model", range=[0, 10])) == (0.0, 10.0)
    assert axis_of({"type": "string_check"}) == axis_of(None) == (0.0, 1.0)


def test_a_validation_has_its_standard_error() -> None:
    metrics = {"full_valid_mean_reward": 0.62, "full_valid_stderr": 0.05}

    assert described(metrics) == ["valid 0.62 ±0.05"]
    assert described(metrics, Marks.plain()) == ["valid 0.62 +-0.05"]
    assert described({"full_valid_mean_reward": 0.62, "full_valid_stderr": None}) == ["valid 0.62"]
    assert described({"train_loss": 1.5, "full_valid_loss": 2.0}) == ["train loss 1.50", "valid loss 2.00"]


def test_many_values_are_averaged_into_the_width() -> None:
    assert sparkline([0.0] * 50 + [1.0] * 50, 4) == "▁▁██"
    assert len(sparkline([float(n) for n in range(1000)], 24)) == 24


def test_a_run_that_goes_on_from_a_checkpoint_does_its_steps_again() -> None:
    progress = Progress()
    for metrics in (step(1, 0.1), step(2, 0.9), step(3, 0.9), step(2, 0.2)):
        progress.add(metrics)

    assert progress.rewards == [0.1, 0.2]
    assert "step  2/10" in progress.line()


def test_the_base_models_validation_is_no_training_reward() -> None:
    progress = Progress(status="running")
    progress.add({"step": 0, "total_steps": 10, "full_valid_mean_reward": 0.3})

    assert progress.rewards == []
    assert progress.line(bar=4) == "running  step  0/10 ░░░░  valid 0.30"


def test_before_the_first_step_there_is_the_status() -> None:
    assert Progress(status="queued").line() == "queued"


def test_a_line_says_what_happens_inside_of_the_step() -> None:
    now = {"step": 0, "phase": "validation", "done": 3, "of": 16, "since": 1700000000}
    progress = Progress(status="running", now=now)
    assert progress.line() == "running  0: validation 3/16"

    progress.add({"step": 0, "total_steps": 10, "full_valid_mean_reward": 0.3})
    progress.now = {"step": 1, "phase": "training", "done": None, "of": None, "since": 1700000000}
    assert progress.line(bar=4) == "running  step  0/10 ░░░░  1: training  valid 0.30"


def test_a_run_that_has_ended_does_nothing_inside_of_a_step() -> None:
    """The last phase may be told after the last step."""
    now = {"step": 10, "phase": "training", "done": None, "of": None, "since": 1700000000}
    progress = Progress(status="succeeded")
    progress.add({"step": 10, "total_steps": 10, "train_mean_reward": 0.3, "full_valid_mean_reward": 0.2})
    progress.now = now

    assert progress.line(bar=4) == "succeeded  step 10/10 ████  train 0.30"
