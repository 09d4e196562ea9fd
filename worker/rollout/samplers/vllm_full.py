"""Sampling a policy all of whose weights are trained, with vLLM."""

from collections.abc import Callable
from typing import Any

from worker.model.full import FullPolicy
from worker.rollout.samplers.published import PublishedWeights
from worker.rollout.samplers.vllm import UnfinishedSample, VllmSampler
from worker.rollout.samplers.wire import AdapterBytes


class FullVllmSampler(VllmSampler):
    """Has the engines load the current weights from files, in place of an adapter.

    The weights are written once after each change, before the first answer, and never while the trainer computes with
    answers: an engine that is restarted meanwhile loads the same files.
    """

    def __init__(self, policy: FullPolicy, weights: PublishedWeights, **arguments: Any) -> None:
        """`arguments`: of VllmSampler."""
        self._weights = weights
        self._full = policy
        super().__init__(policy, **arguments)

    def update_in_flight(self) -> None:
        raise AssertionError("jobs that train all weights continue no answers with other weights")

    def close(self) -> None:
        super().close()
        self._weights.close()

    def _current(self) -> Callable[[], None]:
        """Unlike an adapter, the weights are not copied at this call: they must not change before the first answer."""
        version = self._full.weights_version

        def publish() -> None:
            assert self._full.weights_version == version, (
                "the weights have changed since `answers` was called"
            )
            self._weights.publish()
            self._published = version

        return publish

    def _prepare(self, work: UnfinishedSample) -> None:
        """Have idle engines with other weights load the published ones."""
        for number, engine in [*self.engines.items()]:
            if engine.is_ready and engine.version != self._published:
                with self._losses_of(number, work):
                    engine.load(self._weights.paths)
                    engine.version = self._published

    def _adapter_for(self, engine: object) -> AdapterBytes | None:
        return None
