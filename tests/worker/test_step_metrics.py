"""The table of step metrics has every metric that a run records, and no other."""

import math
from dataclasses import fields

import pytest
from pydantic import ValidationError

from core.step_metrics import COLUMNS, METRICS, SECTIONS, StepMetrics
from core.text import to_json
from tests.fakes import Skill
from tests.present import untyped
from tests.worker.conftest import Bench
from worker.recording.metrics import message
from worker.recording.results import row
from worker.types import UpdateMetrics

NAMES = {metric.name for metric in METRICS}


def test_every_recorded_metric_is_in_the_table(bench: Bench) -> None:
    bench.train(skill=Skill(0.3), advanced={"group_size": 4, "resample_prompts": 2})

    recorded = set().union(*bench.steps())
    assert recorded - NAMES - SECTIONS.keys() == set()


@pytest.mark.slow
def test_every_metric_of_the_table_is_recorded_by_some_run(bench: Bench) -> None:
    bench.train(skill=Skill(0.3), eval_samples=2, advanced={"group_size": 4, "resample_prompts": 2})

    steps = bench.steps()
    first = StepMetrics.load(steps[1])
    in_a_section = {metric.name for metric in METRICS if metric.path[1:] and metric.value(first) is not None}
    of_an_update = {field.name for field in fields(UpdateMetrics)}
    of_given_answers = {
        metric.name for metric in METRICS if metric.offline and not metric.in_csv
    } - of_an_update
    of_episodes = {name for name in NAMES if name.startswith(("episode_", "tool_", "stop_"))}
    of_reasoning = {"reasoning_tokens_mean", "answer_tokens_mean", "cut_thoughts_share"}
    of_a_teacher = {"teacher_kl", "full_valid_teacher_kl"}
    of_a_shadow_or_a_judge = {
        name for name in NAMES if name.startswith(("full_valid_shadow_", "judge_drift"))
    }
    of_longer_answers = {
        name for name in NAMES if name.startswith(("length_reward_", "copied_", "repeated_"))
    }
    of_an_off_policy_run = {"ahead_seconds", "staleness", "stale_tokens_share"}
    assert NAMES - set().union(*steps) - in_a_section - of_an_update == {
        "gpus",
        "sampling_gpus",  # of a job whose GPUs are split
        "learning_gpus",
        "waiting",  # of a job that shares its device
        "same_answers_share",  # of a step with more prompts
        *of_episodes,
        *of_reasoning,
        *of_given_answers,
        *of_a_teacher,
        *of_an_off_policy_run,
        *of_a_shadow_or_a_judge,
        *of_longer_answers,
    }


def test_a_row_of_the_result_file_begins_with_the_columns_of_the_table(bench: Bench) -> None:
    bench.train()

    assert list(row(StepMetrics.load(bench.steps()[1])))[: len(COLUMNS)] == [
        metric.name for metric in COLUMNS
    ]


def test_names_are_unique_and_every_metric_is_described() -> None:
    assert len(NAMES) == len(METRICS)
    assert all(metric.description.endswith(".") for metric in METRICS)


def test_a_recorded_step_is_loaded_and_written_without_a_change(bench: Bench) -> None:
    """What was not measured stays absent, and a metric without a number stays null."""
    bench.train(skill=Skill(0.3), advanced={"group_size": 4, "resample_prompts": 2})

    assert bench.steps()[1]["logprob_gap_k1"] is None
    assert "gpus" not in bench.steps()[1]
    assert [StepMetrics.load(step).to_data() for step in bench.steps()] == bench.steps()


def test_a_step_of_another_version_is_loaded_by_what_this_one_knows() -> None:
    other = {
        "entropy": 1,
        "of_a_later_version": 2.0,
        "timing": {"step": {"full_iteration": 3, "of_a_later_version": 1.0}},
    }

    step = StepMetrics.load(other, step=7)

    assert (step.step, step.entropy, step.seconds) == (7, 1.0, 3.0)
    assert step.timing.step.model_fields_set == {"full_iteration"}


def test_a_misspelled_metric_is_an_error_where_it_is_measured() -> None:
    with pytest.raises(ValidationError):
        untyped(StepMetrics)(step=1, entropi=0.5)


def test_the_event_of_a_step_has_its_rewards_or_its_kl_to_the_teacher() -> None:
    """A job that learns from a teacher has rewards too, but no grader that gave them."""
    graded = StepMetrics(step=2, total_steps=4, train_mean_reward=0.5, full_valid_mean_reward=0.25)
    taught = StepMetrics(
        **graded.model_dump(exclude_unset=True), teacher_kl=0.75, full_valid_teacher_kl=0.625
    )
    before = StepMetrics(step=0, total_steps=4, full_valid_mean_reward=0.0, full_valid_teacher_kl=1.5)

    assert message(graded) == "Step 2/4 , train mean reward=0.50, full validation mean reward=0.25"
    assert message(taught) == "Step 2/4 , KL to the teacher=0.75, full validation KL to the teacher=0.62"
    assert message(before) == "Step 0/4 , full validation KL to the teacher=1.50"


def test_a_number_that_is_none_is_null_in_every_part_of_a_step() -> None:
    measured = {
        "step": 3,
        "train_loss": math.nan,
        "full_valid_loss": math.inf,
        "train_mean_chosen_reward": -math.inf,
        "teacher_kl": math.nan,
        "sampling_entropy": math.nan,
        "scores": {"graders": [{"name": "exact", "train_reward_mean": math.nan}]},
    }

    step = StepMetrics.model_validate(measured)

    assert to_json(step.to_data()) == to_json(
        {
            **dict.fromkeys(measured, None),
            "step": 3,
            "scores": {"graders": [{"name": "exact", "train_reward_mean": None}]},
        }
    )
    assert message(step) == "Step 3/0"
