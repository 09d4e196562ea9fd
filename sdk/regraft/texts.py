"""Texts of responses: `print(verdict)`. The classes of regraft.types with a text inherit one of these."""

from typing import TYPE_CHECKING, cast

from regraft._rules.verdict import NOT_HELD_OUT, counted

if TYPE_CHECKING:
    from regraft.types import JobResult, ScoreRange, Verdict


class VerdictText:
    def __str__(self) -> str:
        """`worse than the base model: 0.59 -> 0.00 (difference -0.59, 95 % interval ...)`."""
        verdict = cast("Verdict", self)
        base = verdict.start or "the base model"
        finding = {
            "improved": f"better than {base}",
            "worse": f"worse than {base}",
            "no_difference": f"no difference to {base}"
            if verdict.difference >= 0
            else f"not significantly different from {base}",
            "too_few": f"too few rows to compare with {base}",
        }[verdict.outcome]
        if verdict.ground is not None:
            finding = f"{finding}, damaged ({verdict.ground.replace('_', ' ')})"
        interval = ""
        if verdict.ci_low is not None and verdict.ci_high is not None:
            interval = f", 95 % interval {verdict.ci_low:.2f} to {verdict.ci_high:.2f}"
        left_out = f", {verdict.ungraded} ungraded" if verdict.ungraded else ""
        return (
            f"{finding}: {verdict.base_reward:.2f} -> {verdict.tuned_reward:.2f} "
            f"(difference {verdict.difference:+.2f}{interval}; "
            f"{counted(verdict.wins, 'win')}, {counted(verdict.losses, 'loss', 'losses')}, "
            f"{counted(verdict.ties, 'tie')} in {counted(verdict.rows, 'row')}{left_out})"
            f"{_by_shadow(verdict)}{'' if verdict.held_out else f'. {NOT_HELD_OUT}'}"
        )


def _by_shadow(verdict: "Verdict") -> str:
    difference, low, high = (
        getattr(verdict, f"shadow_{name}", None) for name in ("difference", "ci_low", "ci_high")
    )
    if difference is None:
        return ""
    interval = "" if low is None or high is None else f", 95 % interval {low:.2f} to {high:.2f}"
    return f"; by the shadow grader {difference:+.2f}{interval}"


class JobResultText:
    def __str__(self) -> str:
        """`0.40 -> 0.94 at step 18`."""
        result = cast("JobResult", self)
        loss = "loss " if result.metric == "full_valid_loss" else ""
        start = "" if result.start is None else f"{result.start:.2f} -> "
        return f"{loss}{start}{result.value:.2f} at step {result.step}"


class ScoreRangeText:
    def __str__(self) -> str:
        expect = cast("ScoreRange", self)
        if expect.min == expect.max:
            return f"{expect.min:g}"
        if expect.max is None:
            return f"from {expect.min:g}"
        return f"to {expect.max:g}" if expect.min is None else f"{expect.min:g} to {expect.max:g}"
