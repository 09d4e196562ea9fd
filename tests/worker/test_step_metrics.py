"""The table of step metrics has every metric that a run records, and no other."""

from dataclasses import fields

from core.results.step_metrics import COLUMNS, METRICS, SECTIONS
from tests.fakes import Skill
from worker.record.results import row
from worker.types import UpdateMetrics

NAMES = {metric.name for metric in METRICS}


def test_every_recorded_metric_is_in_the_table(bench):
    bench.train(skill=Skill(0.3), advanced={"group_size": 4, "resample_prompts": 2})

    recorded = set().union(*bench.steps())
    assert recorded - NAMES - SECTIONS.keys() == set()


def test_every_metric_of_the_table_is_recorded_by_some_run(bench):
    bench.train(skill=Skill(0.3), advanced={"group_size": 4, "resample_prompts": 2})

    steps = bench.steps()
    in_a_section = {metric.name for metric in METRICS if metric.path and metric.value(steps[1]) is not None}
    of_an_update = {field.name for field in fields(UpdateMetrics)}
    assert NAMES - set().union(*steps) - in_a_section - of_an_update == {"gpus"}


def test_a_row_of_the_result_file_begins_with_the_columns_of_the_table(bench):
    bench.train()

    assert list(row(bench.steps()[1]))[: len(COLUMNS)] == [metric.name for metric in COLUMNS]


def test_names_are_unique_and_every_metric_is_described():
    assert len(NAMES) == len(METRICS)
    assert all(metric.description.endswith(".") for metric in METRICS)
