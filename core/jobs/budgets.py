"""Budgets: a cap on a job's GPU-seconds, or on money at the service's price.

A job at its cap pauses at a checkpoint. The cap counts as reached when the next step would exceed it, predicted by the
mean of recent steps of the same kind: a step cannot be interrupted, so waiting for the cap itself would exceed it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.database.tables import Job
from core.errors import BudgetReached, InvalidRequest
from core.settings import Settings


@dataclass(frozen=True)
class Price:
    """The price of a GPU-second; None if the service has no price."""

    per_gpu_second: float | None
    currency: str

    @classmethod
    def of(cls, settings: Settings) -> "Price":
        hardware = settings.hardware  # read once: the price and the currency of one version of the file
        return cls(hardware.price_per_gpu_second, hardware.currency)

    def amount(self, gpu_seconds: float) -> dict[str, Any] | None:
        """{"amount", "currency"} for this number of GPU-seconds."""
        if self.per_gpu_second is None:
            return None
        return {"amount": self._money(gpu_seconds, self.per_gpu_second), "currency": self.currency}

    def range(self, gpu_seconds: Mapping[str, float]) -> dict[str, Any] | None:
        """{"low", "expected", "high", "currency"} for a range of GPU-seconds."""
        price = self.per_gpu_second
        if price is None:
            return None
        amounts = {name: self._money(seconds, price) for name, seconds in gpu_seconds.items()}
        return amounts | {"currency": self.currency}

    @staticmethod
    def _money(gpu_seconds: float, price: float) -> float:
        return round(gpu_seconds * price, 6)  # six digits: a step of one second may cost less than a cent


def to_row(requested: dict[str, Any], price: Price) -> dict[str, Any]:
    """The value of Job.budget: the cap as requested ({"gpu_seconds"} or {"amount", "currency"}), and in GPU-seconds.

    Converts at the current price; later price changes do not affect the cap.

    Raises:
        InvalidRequest: the cap is money, and the service has no price or another currency.
    """
    if "gpu_seconds" in requested:
        return {"asked": requested, "gpu_seconds": float(requested["gpu_seconds"])}
    if price.per_gpu_second is None:
        raise InvalidRequest(
            "'budget.amount' needs a price, and this service has none; the operator can set "
            "price_per_gpu_second in the hardware file. Use 'budget.gpu_seconds' instead.",
            param="budget.amount",
        )
    if requested["currency"] != price.currency:
        raise InvalidRequest(
            f"'budget.currency' is {requested['currency']!r}, but the currency of this service is {price.currency!r} "
            "(currency in the hardware file).",
            param="budget.currency",
        )
    gpu_seconds = requested["amount"] / price.per_gpu_second
    if not math.isfinite(gpu_seconds):
        raise InvalidRequest(
            f"'budget.amount' is too large: at {price.per_gpu_second:g} {price.currency} a GPU-second it is infinite.",
            param="budget.amount",
        )
    return {"asked": requested, "gpu_seconds": gpu_seconds}


def render(job: Job) -> dict[str, Any] | None:
    """The requested budget, the cap, the used and the remaining GPU-seconds; None without a budget."""
    if job.budget is None:
        return None
    cap = job.budget["gpu_seconds"]
    return job.budget | {
        "used_gpu_seconds": job.gpu_seconds,
        "remaining_gpu_seconds": max(0.0, cap - job.gpu_seconds),
    }


@dataclass(frozen=True)
class Reached:
    """A cap that leaves no room for another step."""

    message: str
    data: dict[str, Any]


def reached(job: Job, used: float) -> Reached | None:
    """The reason why a job with this usage must not start another step; None: it may."""
    if job.budget is None:
        return None
    cap = job.budget["gpu_seconds"]
    next_step = (job.usage or {}).get("next_step_gpu_seconds", 0.0)
    if used < cap and used + next_step <= cap:
        return None
    message = f"{_number(used)} of {_words(job.budget)} are used"
    if used < cap:
        message += f", and the next step would take about {_number(next_step)} more"
    data = {"used_gpu_seconds": used, "cap_gpu_seconds": cap, "next_step_gpu_seconds": next_step}
    return Reached(message, data | {"asked": job.budget["asked"]})


def refuse_if_reached(job: Job, used: float) -> None:
    """Raise BudgetReached if a job with this usage would pause again immediately."""
    reason = reached(job, used)
    if reason is not None:
        raise BudgetReached(
            f"The job has reached its budget: {reason.message}. Raise or remove it first: "
            f"POST /v1/fine_tuning/jobs/{job.id}/budget."
        )


def changed(budget: dict[str, Any] | None) -> str:
    """The message of the event for a changed budget."""
    return "The budget was removed" if budget is None else f"The budget is now {_words(budget)}"


def _words(budget: dict[str, Any]) -> str:
    request = budget["asked"]
    money = f" ({request['amount']:.15g} {request['currency']})" if "amount" in request else ""
    return f"{_number(budget['gpu_seconds'])} GPU-seconds{money}"


def _number(seconds: float) -> str:
    return f"{seconds:.1f}".removesuffix(".0")
