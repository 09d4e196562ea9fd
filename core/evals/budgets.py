"""Budgets of eval runs: caps on the tokens of all models, and on the calls of judges."""

from collections.abc import Mapping

from core.evals.summary import Summary

CAPS = ("tokens", "judge_calls")
JUDGES = ("score_model", "label_model")  # types of criteria that call a judge, once per item


def used(summary: Summary) -> dict[str, int]:
    """Usage of a run by the names of CAPS, over its finished and unfinished items."""
    models = summary.get("models", {})
    return {
        "tokens": sum(tokens["total_tokens"] for tokens in models.values()),
        "judge_calls": summary.get("judge_calls", 0),
    }


def render(budget: Mapping[str, int] | None, summary: Summary) -> dict[str, int] | None:
    """Each cap with what is used and what remains of it; None without a budget."""
    if budget is None:
        return None
    so_far = used(summary)
    shown = {}
    for name, cap in budget.items():
        shown[name] = cap
        shown[f"used_{name}"] = so_far[name]
        shown[f"remaining_{name}"] = max(0, cap - so_far[name])
    return shown
