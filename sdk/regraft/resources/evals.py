"""client.evals: OpenAI's evals, and comparisons, gates and runs from a configuration file."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai.resources.evals import AsyncEvals as OpenAIAsyncEvals
from openai.types import EvalCreateResponse
from openai.types.evals import RunRetrieveResponse

from regraft._rules.states import EVAL_RUN
from regraft.requests import InvalidRequestFile, read_table
from regraft.resources.waiting import AsyncWaiting
from regraft.routes import listed, route
from regraft.types import EvalComparison

POLL_SECONDS = 2.0
# Key in the metadata of an eval: the hash of the configuration that created it.
CONFIG_KEY = "regraft_config"


@dataclass(frozen=True)
class EvalConfig:
    """A configuration file: an eval, and the data source and budget of its runs."""

    eval: dict[str, Any]
    data_source: dict[str, Any]
    budget: dict[str, Any] | None
    rows: Path | None  # the local file with the rows
    fingerprint: str


class InvalidGate(ValueError):
    """A condition of a gate that no run, or every run, would meet."""


@dataclass(frozen=True)
class Gate:
    """Whether a run is good enough, and each reason why it is not."""

    run_id: str
    passed: bool
    reasons: list[str]
    pass_rate: float | None
    comparison: EvalComparison | None = None


class AsyncEvals(OpenAIAsyncEvals):
    """OpenAI's evals, and `compare`, `wait`, `run_config` and `gate`."""

    async def compare(self, eval_id: str, first: str, second: str) -> EvalComparison:
        """The second run minus the first, over the rows that both have."""
        return await self._get(_compare_path(eval_id, first, second), cast_to=EvalComparison)

    async def wait(
        self,
        eval_id: str,
        run_id: str,
        *,
        progress: Callable[[RunRetrieveResponse], None] = lambda run: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> RunRetrieveResponse:
        """Return the run once it has ended; `progress` gets it every few seconds until then."""
        return await AsyncWaiting(POLL_SECONDS, sleep).until(
            lambda run: run.status in EVAL_RUN.final,
            lambda: self.runs.retrieve(run_id, eval_id=eval_id),
            progress,
        )

    async def run_config(
        self, config: EvalConfig, *, model: str | None = None, name: str | None = None
    ) -> RunRetrieveResponse:
        """Run an eval from a configuration. The eval of an earlier run with the same configuration is used again.

        Args:
            model: Replaces the model of the configuration.
            name: Of the run; default: the model.
        """
        made = await self._eval_of(config)
        source = dict(config.data_source)
        if model is not None:
            source["model"] = model
        if config.rows is not None:
            file = await self._client.files.create(file=config.rows, purpose="evals")
            source["source"] = {"type": "file_id", "id": file.id}
        run = await self.runs.create(
            made,
            name=name or str(source.get("model", "")),
            data_source=source,  # type: ignore[arg-type]
            extra_body=None if config.budget is None else {"budget": config.budget},
        )
        return await self.runs.retrieve(run.id, eval_id=made)

    async def _eval_of(self, config: EvalConfig) -> str:
        async for known in self.list(order="desc", limit=100):
            if (known.metadata or {}).get(CONFIG_KEY) == config.fingerprint:
                return known.id
        metadata = {**config.eval.get("metadata", {}), CONFIG_KEY: config.fingerprint}
        made: EvalCreateResponse = await self.create(**{**config.eval, "metadata": metadata})
        return made.id

    async def gate(
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
        run = await self.runs.retrieve(run_id, eval_id=eval_id)
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
            comparison = await self.compare(eval_id, baseline, run_id)
            reasons += _drop(comparison, max_drop)
        return Gate(run_id, not reasons, reasons, rate, comparison)


def _compare_path(eval_id: str, first: str, second: str) -> str:
    return route("/regraft/evals", eval_id, "compare") + f"?runs={listed((first, second))}"


def _drop(comparison: EvalComparison, max_drop: float | None) -> list[str]:
    passed = comparison.passed
    if passed.difference is None:
        return ["no row can be compared with the baseline"]
    interval = ""
    if passed.ci_low is not None and passed.ci_high is not None:
        interval = f" (95 % interval {passed.ci_low:+.3f} to {passed.ci_high:+.3f})"
    beyond_chance = passed.ci_high is not None and passed.ci_high < 0
    worse = beyond_chance if max_drop is None else passed.difference < -max_drop
    return [f"the pass rate changed by {passed.difference:+.3f}{interval}"] if worse else []


def run_error(run: RunRetrieveResponse) -> str:
    """The message and the code of the run's error; "" if it has none."""
    error: Any = run.error  # null unless the run has failed
    message, code = getattr(error, "message", None), getattr(error, "code", None)
    return f"{message} ({code})" if message and code else message or code or ""


def read_config(path: Path) -> EvalConfig:
    """Read a JSON, TOML or YAML file with `data_source_config`, `testing_criteria`, `data_source` and perhaps `budget`.

    A source of type "file" names a local JSONL file, relative to the configuration:
    {"type": "file", "path": "rows.jsonl"}.

    Raises:
        InvalidRequestFile: a part is missing.
    """
    table = read_table(path)
    for name in ("data_source_config", "testing_criteria", "data_source"):
        if name not in table:
            raise InvalidRequestFile(f"{path}: '{name}' is missing")
    made = {name: value for name, value in table.items() if name not in ("data_source", "budget")}
    made.setdefault("name", path.stem)
    source = dict(table["data_source"])
    rows = None
    inner = source.get("source")
    if isinstance(inner, Mapping) and inner.get("type") == "file":
        rows = path.parent / str(inner.get("path", ""))
        if not rows.is_file():
            raise InvalidRequestFile(f"{path}: data_source.source.path: there is no file {rows}")
    text = json.dumps(made, sort_keys=True, ensure_ascii=False)
    return EvalConfig(made, source, table.get("budget"), rows, hashlib.sha256(text.encode()).hexdigest()[:32])
