"""Tables and a plot for Jupyter: `table(client.jobs.list())`, and `client.jobs.plot(job_id)` with matplotlib."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

from openai.types.fine_tuning import FineTuningJob

from regraft.cli.output import when
from regraft.jobs import result_of
from regraft.types import EvalDifference, JobComparison, JobResult, Rollout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_ROWS = 100  # more would make a notebook slow; a list of the server continues in pages
MAX_CHARACTERS = 200  # of a cell
# What `client.jobs.plot` reads of each step.
PLOTTED = (
    "train_mean_reward",
    "full_valid_mean_reward",
    "full_valid_difference",
    "full_valid_difference_low",
    "full_valid_difference_high",
)
Steps = Sequence[Mapping[str, Any]]


class CannotShow(TypeError):
    """There is no table for such an object, or no plot of such a job."""


@dataclass(frozen=True)
class Table:
    """Cells that Jupyter shows as a table, and a terminal as text."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    has_more: bool = False  # whether rows were left out

    def _repr_html_(self) -> str:
        """HTML in which all texts are escaped, because users and models write names, answers and reasons."""
        head = "".join(f"<th>{escape(title)}</th>" for title in self.titles)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        more = f"<p>The first {len(self.rows)} rows.</p>" if self.has_more else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"

    def __repr__(self) -> str:
        return "\n".join(
            "\t".join(" ".join(cell.split()) for cell in row) for row in (self.titles, *self.rows)
        )


def table(items: JobComparison | Iterable[FineTuningJob] | Iterable[Rollout]) -> Table:
    """A table of jobs, of rollouts or of a comparison, of at most MAX_ROWS rows.

    Args:
        items: what `client.jobs.list`, `client.rollouts.list` or `client.jobs.compare` returns, or a list of the same.

    Raises:
        CannotShow: it is something else.
    """
    if isinstance(items, JobComparison):
        return _comparison(items)
    if isinstance(items, FineTuningJob | Rollout):
        raise CannotShow(f"there is no table of one {type(items).__name__}: pass a list of them")
    if hasattr(items, "__aiter__"):  # of the asynchronous client
        raise CannotShow(f"there is no table of {type(items).__name__}: await the page and pass page.data")
    found = [*islice(items, MAX_ROWS + 1)]
    shown, has_more = found[:MAX_ROWS], len(found) > MAX_ROWS
    if all(isinstance(one, FineTuningJob) for one in shown):
        return Table(_JOB, tuple(map(_job, shown)), has_more)
    if all(isinstance(one, Rollout) for one in shown):
        return Table(_ROLLOUT, tuple(map(_rollout, shown)), has_more)
    raise CannotShow(
        f"there is no table of {type(shown[0]).__name__}: pass jobs, rollouts or a comparison of jobs"
    )


_JOB = ("name", "status", "model", "result", "created", "id")
_ROLLOUT = ("step", "split", "line", "score", "advantage", "answer", "reason")


def _job(job: Any) -> tuple[str, ...]:
    result = result_of(job)
    name = job.user_provided_suffix or ""
    return (name, job.status, job.model, "" if result is None else str(result), when(job.created_at), job.id)


def _rollout(rollout: Any) -> tuple[str, ...]:
    numbers = (str(rollout.step), rollout.split, str(rollout.line), _number(rollout.score))
    advantage = _number(rollout.advantage, "+.2f")
    return (*numbers, advantage, _short(rollout.output_text), _short(rollout.reason or ""))


def _comparison(found: JobComparison) -> Table:
    reward = {pair.job_id: pair.reward for pair in found.pairs}
    titles = (
        "job",
        "model",
        "step",
        "GPU seconds",
        "reward",
        "difference",
        "95 % interval",
        "wins",
        "losses",
        "ties",
    )
    rows = []
    for job in found.jobs:
        step = "" if job.step is None else str(job.step)
        compared = _difference(reward.get(job.job_id))
        rows.append((job.job_id, job.model, step, f"{job.gpu_seconds:.0f}", *compared))
    return Table(titles, tuple(rows))


def _difference(reward: EvalDifference | None) -> tuple[str, ...]:
    """The cells of a job's difference to the first one; empty for the first one and where no prompt is shared."""
    if reward is None:
        return ("",) * 6
    has_interval = reward.ci_low is not None and reward.ci_high is not None
    interval = f"{reward.ci_low:+.2f} to {reward.ci_high:+.2f}" if has_interval else ""
    counts = (str(reward.wins), str(reward.losses), str(reward.ties))
    return (_number(reward.second), _number(reward.difference, "+.2f"), interval, *counts)


def _number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"


def plot_reward(steps: Steps, result: JobResult | None, axes: "Axes | None" = None) -> "Axes":
    """Draw the validated reward with its 95 % interval, the training reward, and the delivered step.

    The interval is that of the difference to the start of the job, around the validated reward.

    Args:
        steps: rows of `client.jobs.metrics(id, frame=False)`.
        axes: where to draw; None: on a new figure.

    Raises:
        CannotShow: no step has a reward.
        ImportError: matplotlib is missing.
    """
    train, valid = _series(steps, "train_mean_reward"), _series(steps, "full_valid_mean_reward")
    if not train and not valid:
        raise CannotShow(
            "the job has no step with a reward yet; supervised and dpo jobs have no rewards and no plot"
        )
    axes = _new_axes() if axes is None else axes
    axes.plot([*train], [*train.values()], color="0.6", linewidth=1, label="training")
    bands = _bands(steps)
    if bands:
        low, high = zip(*bands.values(), strict=True)
        axes.fill_between([*bands], low, high, alpha=0.2, label="95 % interval")
    if valid:
        axes.plot([*valid], [*valid.values()], linewidth=2, marker="o", label="validation")
    if result is not None and result.metric == "full_valid_mean_reward":
        axes.axvline(
            result.step,
            color="0.3",
            linestyle=":",
            label=f"delivered, step {result.step}: {result.value:.2f}",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.legend()
    return axes


def _new_axes() -> "Axes":
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("client.jobs.plot needs matplotlib: run `pip install matplotlib`") from None
    _, axes = pyplot.subplots()
    return axes


def _series(steps: Steps, name: str) -> dict[int, float]:
    """The values of a metric by step, of the steps that have it."""
    return {step["step"]: step[name] for step in steps if step.get(name) is not None}


def _bands(steps: Steps) -> dict[int, tuple[float, float]]:
    """The interval around the validated reward by step; at the start of the job, which it compares with, the reward."""
    bands: dict[int, tuple[float, float]] = {}
    for step in steps:
        reward, difference, low, high = (step.get(name) for name in PLOTTED[1:])
        if reward is not None and step["step"] == 0:
            bands[0] = (reward, reward)
        if reward is not None and difference is not None and low is not None and high is not None:
            bands[step["step"]] = (reward - difference + low, reward - difference + high)
    return bands if bands.keys() - {0} else {}
