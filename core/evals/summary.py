"""Counts and scores of a run, kept as its items finish, and the paired comparison of two runs. Pure functions."""

import hashlib
import json
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from core.statistics import paired_difference

Item = Mapping[str, Any]
Summary = dict[str, Any]
NO_TOKENS = {
    "invocation_count": 0,
    "prompt_tokens": 0,
    "completion_tokens": 0,
    "cached_tokens": 0,
    "total_tokens": 0,
}


def empty(criteria: Sequence[str]) -> Summary:
    """The summary of a run with no items yet."""
    zero = {"passed": 0, "failed": 0, "errored": 0, "sum": 0.0, "squares": 0.0}
    return {
        "counts": {"pass": 0, "fail": 0, "error": 0},
        "criteria": {name: dict(zero) for name in criteria},
        "models": {},
        "judge_calls": 0,
    }


def add_item(summary: Summary, item: Item) -> None:
    """Count a finished item."""
    summary["counts"][item["status"]] += 1
    for result in item["results"]:
        counts = summary["criteria"].setdefault(
            result["name"], {"passed": 0, "failed": 0, "errored": 0, "sum": 0.0, "squares": 0.0}
        )
        score = result.get("score")
        if score is None:
            counts["errored"] += 1
            continue
        counts["passed" if result["passed"] else "failed"] += 1
        counts["sum"] += score
        counts["squares"] += score * score


def add_usage(summary: Summary, model: str, usage: Mapping[str, int], *, judge: bool) -> None:
    """Count one call of a model, which was sampled or asked as a judge."""
    if judge:
        summary["judge_calls"] = summary.get("judge_calls", 0) + 1
    counts = summary["models"].setdefault(model, dict(NO_TOKENS))
    counts["invocation_count"] += 1
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        counts[name] += usage.get(name, 0)
    counts["total_tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]


@dataclass(frozen=True)
class PaidItems:
    """The finished items that used tokens. An item that used none tells nothing about the cost of the next one."""

    count: int = 0
    tokens: int = 0
    largest: int = 0  # of one item

    @property
    def mean(self) -> float:
        return self.tokens / self.count if self.count else 0.0

    def plus(self, tokens: int) -> "PaidItems":
        """Add a finished item, which used this number of tokens over all attempts."""
        if not tokens:
            return self
        return PaidItems(self.count + 1, self.tokens + tokens, max(self.largest, tokens))


def paid_items(summary: Summary) -> PaidItems:
    return PaidItems(**summary.get("paid_items", {}))


def add_item_tokens(summary: Summary, tokens: int) -> None:
    """Count the tokens of a finished item, which `add_usage` has counted by model."""
    summary["paid_items"] = asdict(paid_items(summary).plus(tokens))


def finished(summary: Summary) -> int:
    return sum(summary["counts"].values()) if summary else 0


def result_counts(summary: Summary) -> dict[str, int]:
    counts = summary["counts"]
    return {
        "total": finished(summary),
        "passed": counts["pass"],
        "failed": counts["fail"],
        "errored": counts["error"],
    }


def criteria_results(summary: Summary) -> list[dict[str, Any]]:
    """`per_testing_criteria_results`, with the rate, the mean score and their standard errors as extensions."""
    return [_criterion(name, counts) for name, counts in summary["criteria"].items()]


def _criterion(name: str, counts: Mapping[str, Any]) -> dict[str, Any]:
    graded = counts["passed"] + counts["failed"]
    return {
        "testing_criteria": name,
        "passed": counts["passed"],
        "failed": counts["failed"],
        "errored": counts.get("errored", 0),
        **rate(counts["passed"], graded),
        "mean_score": counts["sum"] / graded if graded and "sum" in counts else None,
        "mean_score_standard_error": _standard_error(counts, graded) if "sum" in counts else None,
    }


def rate(passed: int, total: int) -> dict[str, float | None]:
    """The share that passed and its standard error: the square root of p(1 - p) / (n - 1)."""
    if total == 0:
        return {"pass_rate": None, "standard_error": None}
    share = passed / total
    error = math.sqrt(share * (1 - share) / (total - 1)) if total > 1 else None
    return {"pass_rate": share, "standard_error": error}


def _standard_error(counts: Mapping[str, Any], number: int) -> float | None:
    """The standard error of a mean: s / sqrt(n), from the sums."""
    if number < 2:
        return None
    mean = counts["sum"] / number
    variance = max(0.0, (counts["squares"] - number * mean * mean) / (number - 1))
    return math.sqrt(variance / number)


# Comparison.


@dataclass(frozen=True)
class _Outcome:
    """The part of an item that a comparison needs; the item may have megabytes of text."""

    row: str  # the hash of its content
    passed: float | None
    scores: Mapping[str, float | None]

    @classmethod
    def of(cls, item: Item) -> "_Outcome":
        text = json.dumps(item["datasource_item"], sort_keys=True, ensure_ascii=False)
        return cls(
            hashlib.sha256(text.encode()).hexdigest(),
            None if item["status"] == "error" else float(item["status"] == "pass"),
            {result["name"]: result.get("score") for result in item["results"]},
        )


def compare(first: Iterable[Item], second: Iterable[Item]) -> dict[str, Any]:
    """The second run minus the first, over the rows that both have. Rows pair by their content, not their order.

    A row that occurs several times pairs in order. An item that could not be graded is left out and counted.
    """
    pairs, unpaired = _paired([_Outcome.of(item) for item in first], [_Outcome.of(item) for item in second])
    names = list(dict.fromkeys(name for pair in pairs for outcome in pair for name in outcome.scores))
    return {
        "rows": len(pairs),
        "unpaired": unpaired,
        "passed": paired_difference([(a.passed, b.passed) for a, b in pairs]),
        "criteria": {
            name: paired_difference([(a.scores.get(name), b.scores.get(name)) for a, b in pairs])
            for name in names
        },
    }


def _paired(
    first: Sequence[_Outcome], second: Sequence[_Outcome]
) -> tuple[list[tuple[_Outcome, _Outcome]], int]:
    waiting: dict[str, deque[_Outcome]] = defaultdict(deque)
    for outcome in second:
        waiting[outcome.row].append(outcome)
    pairs = [(one, waiting[one.row].popleft()) for one in first if waiting[one.row]]
    return pairs, len(first) + len(second) - 2 * len(pairs)
