"""Written by .ci/sync_client.py from regraft.resources.evals; do not edit."""

import time
from collections.abc import Callable

from openai.resources.evals import Evals as OpenAIEvals
from openai.types import EvalCreateResponse
from openai.types.evals import RunRetrieveResponse

from regraft._rules.states import EVAL_RUN
from regraft.resources.evals import (
    CONFIG_KEY,
    POLL_SECONDS,
    EvalConfig,
    Gate,
    InvalidGate,
    _compare_path,
    _drop,
    run_error,
)
from regraft.sync.waiting import Waiting
from regraft.types import EvalComparison


class Evals(OpenAIEvals):
    """OpenAI's evals, and `compare`, `wait`, `run_config` and `gate`."""

    def compare(self, eval_id: str, first: str, second: str) -> EvalComparison:
        """The second run minus the first, over the rows that both have."""
        return self._get(_compare_path(eval_id, first, second), cast_to=EvalComparison)

    def wait(
        self,
        eval_id: str,
        run_id: str,
        *,
        progress: Callable[[RunRetrieveResponse], None] = lambda run: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> RunRetrieveResponse:
        """Return the run once it has ended; `progress` gets it every few seconds until then."""
        return Waiting(POLL_SECONDS, sleep).until(
            lambda run: run.status in EVAL_RUN.final,
            lambda: self.runs.retrieve(run_id, eval_id=eval_id),
            progress,
        )

    def run_config(
        self, config: EvalConfig, *, model: str | None = None, name: str | None = None
    ) -> RunRetrieveResponse:
        """Run an eval from a configuration. The eval of an earlier run with the same configuration is used again.

        Args:
            model: Replaces the model of the configuration.
            name: Of the run; default: the model.
        """
        made = self._eval_of(config)
        source = dict(config.data_source)
        if model is not None:
            source["model"] = model
        if config.rows is not None:
            file = self._client.files.create(file=config.rows, purpose="evals")
            source["source"] = {"type": "file_id", "id": file.id}
        run = self.runs.create(
            made,
            name=name or str(source.get("model", "")),
            data_source=source,  # type: ignore[arg-type]
            extra_body=None if config.budget is None else {"budget": config.budget},
        )
        return self.runs.retrieve(run.id, eval_id=made)

    def _eval_of(self, config: EvalConfig) -> str:
        for known in self.list(order="desc", limit=100):
            if (known.metadata or {}).get(CONFIG_KEY) == config.fingerprint:
                return known.id
        metadata = {**config.eval.get("metadata", {}), CONFIG_KEY: config.fingerprint}
        made: EvalCreateResponse = self.create(**{**config.eval, "metadata": metadata})
        return made.id

    def gate(
        self,
        eval_id: str,
        run_id: str,
        *,
        min_pass_rate: float | None = None,
        baseline: str | None = None,
        max_drop: float | None = None,
        allow_errors: int = 0,
    ) -> Gate:
        """Decide whether a run may be deployed.

        Args:
            min_pass_rate: The lowest pass rate of the graded items.
            baseline: A run of the same eval. The gate fails if the run is worse beyond chance: if the whole 95 %
                interval of the difference is below 0.
            max_drop: With a baseline, the largest drop of the pass rate that is allowed instead.
            allow_errors: Items that may be without a grade.

        Raises:
            InvalidGate: a rate is not between 0 and 1, `allow_errors` is negative, or `max_drop` has no baseline.
        """
        for name, rate in (("min_pass_rate", min_pass_rate), ("max_drop", max_drop)):
            if rate is not None and not 0 <= rate <= 1:
                raise InvalidGate(f"{name} is {rate:g}: a rate is between 0 and 1")
        if allow_errors < 0:
            raise InvalidGate(f"allow_errors is {allow_errors}: it cannot be negative")
        if max_drop is not None and baseline is None:
            raise InvalidGate("max_drop needs a baseline to compare with")
        run = self.runs.retrieve(run_id, eval_id=eval_id)
        rate = getattr(run, "pass_rate", None)
        reasons = []
        if run.status != "completed":
            why = run_error(run)
            reasons.append(f"the run is {run.status}: {why}" if why else f"the run is {run.status}")
        if rate is None:
            reasons.append("no item is graded")
        if run.result_counts.errored > allow_errors:
            reasons.append(f"{run.result_counts.errored} items could not be sampled or graded")
        if min_pass_rate is not None and rate is not None and rate < min_pass_rate:
            reasons.append(f"the pass rate is {rate:.3f}, and at least {min_pass_rate:g} is required")
        comparison = None
        if baseline is not None:
            comparison = self.compare(eval_id, baseline, run_id)
            reasons += _drop(comparison, max_drop)
        return Gate(run_id, not reasons, reasons, rate, comparison)
