"""Conclusions from the measurements of a step's updates. Without torch: the ledger of a run reads them."""

from typing import Protocol


class UpdateFacts(Protocol):
    """Measurements of the updates of a step: UpdateMetrics, OfflineMetrics."""

    @property
    def skipped(self) -> bool: ...
    @property
    def learning_rate(self) -> float | None: ...
    @property
    def update_kl(self) -> float | None: ...
    @property
    def rejected_updates(self) -> int | None: ...
    @property
    def unmeasured_updates(self) -> int | None: ...


def changed_nothing(update: UpdateFacts) -> bool:
    """Whether a step left the weights as they were: the first gradient was not finite, or all updates were rejected.

    The KL of an update is measured wherever updates can be rejected, so without one none was accepted.
    """
    is_rejected = bool(update.rejected_updates) and update.update_kl is None and not update.unmeasured_updates
    return is_rejected or (update.skipped and update.learning_rate is None)
