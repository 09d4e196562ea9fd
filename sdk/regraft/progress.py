"""A run as one line: `running  step 3/12 ██████░░  ▁▃▅  train 0.41  valid 0.38  14.2 s`. Without I/O."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from regraft._rules.states import JOB

FINAL = JOB.final
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=*%#"
AXIS = (0.0, 1.0)  # of rewards


@dataclass(frozen=True)
class Marks:
    """The characters of bars and sparklines; `plain` is for terminals without Unicode blocks."""

    full: str = "█"
    empty: str = "░"
    blocks: str = BLOCKS
    plus_minus: str = "±"

    @classmethod
    def plain(cls) -> "Marks":
        return cls("#", ".", ASCII_BLOCKS, "+-")


def marks_for(encoding: str | None) -> Marks:
    try:
        (BLOCKS + "█░±").encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return Marks.plain()
    return Marks()


@dataclass
class Progress:
    """The state of a run according to its events. A repeated step replaces the earlier one."""

    status: str = ""
    axis: tuple[float, float] = AXIS  # of the sparkline
    now: Mapping[str, Any] | None = None  # what the run does inside of its step
    queue: Mapping[str, Any] | None = None  # the place of a waiting job, and what it waits for
    waited: float = 0.0  # seconds that it has been watched in the queue
    steps: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, Any]) -> None:
        step = metrics["step"]
        # A run that resumes from a checkpoint repeats the steps after it.
        self.steps = {number: seen for number, seen in self.steps.items() if number < step}
        self.steps[step] = metrics
        self.now = None

    @property
    def rewards(self) -> list[float]:
        """The training rewards, in order of the steps."""
        values = [seen.get("train_mean_reward") for seen in self.steps.values()]
        return [value for value in values if value is not None]

    def line(self, *, bar: int = 20, spark: int = 24, marks: Marks | None = None) -> str:
        """The state in one line; `spark` = 0 omits the sparkline."""
        marks = marks or Marks()
        doing = [] if self.now is None or self.status in FINAL else [doing_now(self.now)]
        if self.queue is not None:
            doing = [queued_text(self.queue), f"{self.waited:.0f} s"]
        if not self.steps:
            return "  ".join([self.status, *doing])
        last = self.steps[max(self.steps)]
        step, total = last["step"], max(last["total_steps"], 1)
        filled = round(bar * min(step / total, 1.0))
        parts = [self.status] if self.status else []
        width = len(str(total))
        parts.append(f"step {step:>{width}}/{total} {marks.full * filled}{marks.empty * (bar - filled)}")
        if spark and len(self.rewards) > 1:
            parts.append(sparkline(self.rewards, spark, marks.blocks, self.axis))
        parts += doing
        if self.status in FINAL:  # the result is that of the delivered checkpoint, not of the last validation
            last = {name: value for name, value in last.items() if not name.startswith("full_valid_")}
        parts += described(last, marks)
        return "  ".join(parts)


def queued_text(queue: Mapping[str, Any]) -> str:
    """Such as `position 2, waiting for a free worker of class cpu`."""
    return f"position {queue['position']}, {queue['reason']}"


def doing_now(now: Mapping[str, Any]) -> str:
    """Such as `3: sampling 37/64`: a step, its phase, and how many of its answers are there."""
    place = "" if now["step"] is None else f"{now['step']}: "
    counted = "" if now["of"] is None else f" {now['done']}/{now['of']}"
    return f"{place}{now['phase']}{counted}"


def described(metrics: Mapping[str, Any], marks: Marks | None = None) -> list[str]:
    """The main numbers of one step; a validation with its standard error."""
    parts = []
    for label, key in (
        ("train", "train_mean_reward"),
        ("valid", "full_valid_mean_reward"),
        ("train loss", "train_loss"),
        ("valid loss", "full_valid_loss"),
    ):
        if metrics.get(key) is not None:
            parts.append(f"{label} {metrics[key]:.2f}")
    if metrics.get("full_valid_mean_reward") is not None and metrics.get("full_valid_stderr") is not None:
        parts[-1] += f" {(marks or Marks()).plus_minus}{metrics['full_valid_stderr']:.2f}"
    if metrics.get("groups_mixed_share") is not None:
        parts.append(f"groups with signal {metrics['groups_mixed_share']:.0%}")
    seconds = ((metrics.get("timing") or {}).get("step") or {}).get("full_iteration")
    if seconds is not None:
        parts.append(f"{seconds:.1f} s")
    return parts


def axis_of(grader: Any) -> tuple[float, float]:
    """The range of the grader's rewards according to its spec: its `range`, or 0 to 1."""
    bounds = grader.get("range") if isinstance(grader, Mapping) else getattr(grader, "range", None)
    if isinstance(bounds, list | tuple) and len(bounds) == 2:
        return float(bounds[0]), float(bounds[1])
    return AXIS


def sparkline(
    values: Sequence[float], width: int, blocks: str = BLOCKS, axis: tuple[float, float] = AXIS
) -> str:
    """The values on a fixed axis; more than `width` values are averaged.

    Scaling to the minimum and maximum would magnify noise. The axis is only extended for values outside it.
    """
    if len(values) > width:
        edges = [round(number * len(values) / width) for number in range(width + 1)]
        values = [statistics.fmean(values[low:high]) for low, high in pairwise(edges)]
    least, largest = min(axis[0], *values), max(axis[1], *values)
    top = len(blocks) - 1
    return "".join(blocks[round((value - least) / (largest - least) * top)] for value in values)
