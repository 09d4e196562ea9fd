"""Tables and the plot of a job for Jupyter. Texts of users and models are shown as text, never as HTML."""

import importlib.util
import sys
from typing import Any, cast

import pytest
from openai.pagination import AsyncCursorPage
from openai.types.fine_tuning import FineTuningJob
from regraft import JobComparison, Regraft, Rollout
from regraft.notebook import MAX_ROWS, CannotShow, plot_reward, table
from regraft.types import JobResult

from tests.sdk.conftest import House

HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(2)'>&amp;"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=x onerror=&#x27;alert(2)&#x27;&gt;&amp;amp;"
ANSWER: dict[str, Any] = {"id": "r", "step": 1, "split": "valid", "line": 3, "score": 0.5, "advantage": -0.25}
PAIR: dict[str, Any] = {
    "compared": 4, "ungraded": 0, "first": 0.25, "second": 0.75, "difference": 0.5, "ci_low": 0.1, "ci_high": 0.9,
    "wins": 2, "losses": 0, "ties": 2,
}  # fmt: skip


class Axes:
    """Records what is drawn, as matplotlib's Axes takes it."""

    def __init__(self) -> None:
        self.drawn: dict[str, tuple[Any, ...]] = {}

    def plot(self, xs: Any, ys: Any, *, label: str, **style: Any) -> None:
        self.drawn[label] = ([*xs], [*ys])

    def fill_between(self, xs: Any, low: Any, high: Any, *, label: str, **style: Any) -> None:
        self.drawn[label] = ([*xs], [*low], [*high])

    def axvline(self, x: float, *, label: str, **style: Any) -> None:
        self.drawn[label] = (x,)

    def set_xlabel(self, label: str) -> None:
        self.drawn["x"] = (label,)

    def set_ylabel(self, label: str) -> None:
        self.drawn["y"] = (label,)

    def legend(self) -> None:
        pass


def answer(text: str, **more: Any) -> Rollout:
    return Rollout.construct(**(ANSWER | {"output_text": text, "reason": text} | more))


def test_jobs_of_the_server_are_a_table(house: House, client: Regraft) -> None:
    job_id = house.job(suffix="desk")

    shown = table(client.jobs.list())

    assert shown.titles == ("name", "status", "model", "result", "created", "id")
    assert (shown.rows[0][0], shown.rows[0][-1]) == ("desk", job_id)
    assert f"<td>{job_id}</td>" in shown._repr_html_()
    assert repr(shown).startswith("name\tstatus")


def test_the_answers_of_a_model_are_escaped_and_long_ones_cut() -> None:
    shown = table([answer(HOSTILE), answer("long " * 1000, score=None)])

    html = shown._repr_html_()
    assert ESCAPED in html
    assert "<script" not in html
    assert "<img" not in html
    assert len(html) < 3000
    assert shown.rows[0][:5] == ("1", "valid", "3", "0.50", "-0.25")
    assert shown.rows[1][3] == ""


def test_only_the_first_rows_of_a_long_list_are_shown() -> None:
    shown = table(answer("yes") for _ in range(MAX_ROWS + 5))

    assert len(shown.rows) == MAX_ROWS
    assert f"The first {MAX_ROWS} rows." in shown._repr_html_()


def test_a_comparison_has_the_difference_of_each_job_to_the_first() -> None:
    jobs = [{"job_id": name, "model": HOSTILE, "step": 2, "gpu_seconds": 9.6, "ledger": []} for name in "ab"]
    pair = {"job_id": "b", "prompts": 4, "unpaired": 0, "reward": PAIR, "same_grader": True}

    shown = table(JobComparison.construct(jobs=jobs, pairs=[pair], config=[]))

    assert shown.rows[0][4:] == ("",) * 6
    assert shown.rows[1][2:] == ("2", "10", "0.75", "+0.50", "+0.10 to +0.90", "2", "0", "2")
    assert ESCAPED in shown._repr_html_()


def test_something_else_has_no_table() -> None:
    with pytest.raises(CannotShow, match="no table of int: pass jobs, rollouts or a comparison"):
        table(cast(list[FineTuningJob], [1]))


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (AsyncCursorPage[Any](data=[]), "await the page and pass page.data"),
        (FineTuningJob.construct(id="ftjob-1"), "no table of one FineTuningJob: pass a list of them"),
        (answer("yes"), "no table of one Rollout: pass a list of them"),
    ],
    ids=["page", "job", "rollout"],
)
def test_what_is_near_a_list_says_what_to_pass(items: Any, said: str) -> None:
    with pytest.raises(CannotShow, match=said):
        table(items)


def test_the_interval_begins_at_the_start_of_the_job_which_it_compares_with() -> None:
    axes = Axes()
    interval = {"full_valid_difference_low": 0.125, "full_valid_difference_high": 0.375}
    steps = [
        {"step": 0, "full_valid_mean_reward": 0.5},
        {"step": 2, "full_valid_mean_reward": 0.75, "full_valid_difference": 0.25, **interval},
    ]

    plot_reward(steps, None, cast(Any, axes))

    assert axes.drawn["95 % interval"] == ([0, 2], [0.5, 0.625], [0.5, 0.875])


def test_the_legend_has_nothing_without_values() -> None:
    axes = Axes()

    plot_reward([{"step": 1, "train_mean_reward": 0.5}], None, cast(Any, axes))

    assert {"validation", "95 % interval"} & axes.drawn.keys() == set()


def test_a_plot_has_the_validations_with_their_interval_and_the_delivered_step(
    house: House, client: Regraft
) -> None:
    job_id = house.job()
    difference = {"full_valid_difference": 0.25, "full_valid_difference_low": 0.125}
    house.step(job_id, 1, 2, 0.5)
    house.step(
        job_id, 2, 2, 0.75, full_valid_mean_reward=0.75, full_valid_difference_high=0.375, **difference
    )
    axes = Axes()

    client.jobs.plot(job_id, axes=cast(Any, axes))

    assert axes.drawn == {
        "training": ([1, 2], [0.5, 0.75]),
        "validation": ([2], [0.75]),
        "95 % interval": ([2], [0.625], [0.875]),
        "x": ("step",),
        "y": ("mean reward",),
    }


def test_the_delivered_step_is_marked_with_its_reward() -> None:
    axes = Axes()
    result = JobResult.construct(step=18, metric="full_valid_mean_reward", start=0.4, value=0.94)

    plot_reward([{"step": 18, "full_valid_mean_reward": 0.94}], result, cast(Any, axes))

    assert axes.drawn["delivered, step 18: 0.94"] == (18,)


def test_a_job_without_a_step_has_no_plot_and_says_so() -> None:
    with pytest.raises(
        CannotShow, match="no step with a reward yet; supervised and dpo jobs have no rewards"
    ):
        plot_reward([{"step": 0, "train_mean_reward": None}], None, cast(Any, Axes()))


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(ImportError, match="needs matplotlib: run `pip install matplotlib`"):
        plot_reward([{"step": 0, "train_mean_reward": 0.5}], None)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_matplotlib_draws_the_plot() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plot_reward([{"step": 0, "train_mean_reward": 0.5, "full_valid_mean_reward": 0.5}], None, axes)

    assert [line.get_label() for line in axes.get_lines()] == ["training", "validation"]
