"""Evals, runs and output items in OpenAI's shapes: of created evals, and of jobs' validations."""

import time
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from core.database.tables import Eval, EvalRun, Job, RolloutPage
from core.evals import budgets, imported, lifecycle, summary
from core.evals.items import Item
from core.evals.summary import rate
from core.masking import hide_in_error, hide_in_foreign, hide_secrets
from core.results import evals
from core.results.evals import Criterion
from core.results.rollouts import Row, SamplePosition
from graders.spec import GRADER_TYPES

# Free text, because an imported item may have another status.
ItemStatus = Literal["pass", "fail", "error"]
RunStatus = Literal["queued", "in_progress", "completed", "canceled", "failed"]

# The variables of graders: `{{item.x}}` and `{{sample.output_text}}`. Rows may have other keys than their messages.
SCHEMA = {
    "type": "object",
    "properties": {
        "item": {"type": "object", "properties": {"messages": {"type": "array"}}, "required": ["messages"]},
        "sample": {"type": "object", "properties": {"output_text": {"type": "string"}}},
    },
    "required": ["item", "sample"],
}
# Variables that the templates of graders have (graders/types.py).
_SAMPLE = {
    "type": "object",
    "properties": {
        "output_text": {"type": "string"},
        "output_json": {},
        "output_tools": {"type": "array"},
        "output_tools_error": {"type": "string"},
        "output_reasoning": {"type": "string"},
        "choices": {"type": "array"},
    },
}

# Of a sample whose run names no model or does not set the parameter: the defaults that OpenAI's API names. There is
# none for a seed or a limit of tokens, which stay null.
UNSET = {"model": "", "temperature": 1.0, "top_p": 1.0}
# The code and the templates of graders (graders/types.py).
_RUN_AS_SENT = ("source", "input", "reference")


class EvalOut(BaseModel):
    id: str
    object: Literal["eval"] = "eval"
    created_at: int
    name: str
    data_source_config: dict[str, Any]
    testing_criteria: list[dict[str, Any]]
    metadata: dict[str, str] | None
    updated_at: int = Field(description="Extension.")
    job_id: str | None = Field(
        default=None, description="Extension: the job whose validations this eval shows."
    )

    @classmethod
    def of(cls, source: Eval | Job) -> "EvalOut":
        return cls.of_job(source) if isinstance(source, Job) else cls.of_eval(source)

    @classmethod
    def of_eval(cls, eval_row: Eval) -> "EvalOut":
        is_imported = _is_imported(eval_row.data_source_config)
        return cls(
            id=imported.public_id(eval_row.id),
            created_at=eval_row.created_at,
            updated_at=eval_row.updated_at,
            name=eval_row.name,
            data_source_config=_config(eval_row.data_source_config),
            testing_criteria=[
                _imported_criterion(spec) if is_imported else hide_secrets(spec)
                for spec in eval_row.testing_criteria
            ],
            metadata=hide_in_foreign(eval_row.metadata_) if is_imported else eval_row.metadata_,
        )

    @classmethod
    def of_job(cls, job: Job) -> "EvalOut":
        return cls(
            id=evals.eval_id(job.id),
            created_at=job.created_at,
            updated_at=job.created_at,
            name=job.suffix or job.id,
            data_source_config={"type": "custom", "schema": SCHEMA},
            testing_criteria=[
                hide_secrets(criterion.spec) | {"name": criterion.name, "pass_threshold": criterion.threshold}
                for criterion in evals.criteria(job.body["grader"])
            ],
            metadata=job.metadata_,
            job_id=job.id,
        )


def _is_imported(config: Mapping[str, Any]) -> bool:
    """Whether an eval with this config comes from another service: an import stores the schema of a whole row."""
    return "schema" in config


def _imported_criterion(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A criterion of another service without secrets, also those of fields and types that are unknown here.

    The code and templates of a known grader are shown as they run, since new evals are made of them.
    """
    shown: dict[str, Any] = hide_in_foreign(spec)
    if spec.get("type") in GRADER_TYPES:
        shown |= {name: hide_secrets(spec[name]) for name in _RUN_AS_SENT if name in spec}
    if isinstance(parts := spec.get("graders"), Mapping):
        shown["graders"] = {
            name: _imported_criterion(part) if isinstance(part, Mapping) else shown["graders"][name]
            for name, part in parts.items()
        }
    return shown


def _config(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the schema of a whole row. An imported one has it already."""
    if _is_imported(stored):
        shown = hide_in_foreign(stored) | {"schema": stored["schema"]}  # its properties may have any name
        return {name: value for name, value in shown.items() if name != "item_schema"}
    properties = {"item": stored["item_schema"]}
    if stored.get("include_sample_schema"):
        properties["sample"] = _SAMPLE
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": stored["type"], "schema": schema}


class RunOut(BaseModel):
    id: str
    object: Literal["eval.run"] = "eval.run"
    created_at: int
    eval_id: str
    name: str
    status: str
    model: str
    report_url: str
    result_counts: dict[str, int]
    per_model_usage: list[dict[str, Any]]
    per_testing_criteria_results: list[dict[str, Any]]
    data_source: dict[str, Any]
    metadata: dict[str, str] | None = None
    error: dict[str, Any] | None = None
    # Extensions.
    pass_rate: float | None = Field(description="Extension: the share of the graded items that passed.")
    standard_error: float | None = Field(description="Extension: the standard error of pass_rate.")
    progress: dict[str, int] = Field(description="Extension: finished items and the rows of the source.")
    started_at: int | None = Field(default=None, description="Extension.")
    finished_at: int | None = Field(default=None, description="Extension.")
    estimated_finish: int | None = Field(default=None, description="Extension: Unix time.")
    budget: dict[str, int] | None = Field(
        default=None, description="Extension: each cap, and its used_ and remaining_ amounts."
    )
    note: str | None = Field(default=None, description="Extension: what an unfinished run waits for.")
    step: int | None = Field(default=None, description="Extension: of a job's validation.")

    @classmethod
    def of_run(cls, run: EvalRun, content: list[Any] | None, *, report_url: str) -> "RunOut":
        kept = run.summary or summary.empty([])
        is_imported = "imported" in kept
        hide = hide_in_foreign if is_imported else hide_secrets
        shown = hide(kept.get("imported", {}))
        counts = shown.get("result_counts") or summary.result_counts(kept)
        finished = summary.finished(kept)
        source = hide(run.data_source)
        rows = source.get("source") or {}
        if content is not None or rows.get("type") == "file_content":  # whose rows are deleted after a while
            source["source"] = rows | {"content": content or []}
        return cls(
            id=imported.public_id(run.id),
            created_at=run.created_at,
            eval_id=imported.public_id(run.eval_id),
            name=run.name,
            status=run.status,
            model=run.model or "",
            report_url=report_url,
            result_counts=counts,
            per_model_usage=shown.get("per_model_usage")
            or [{"model_name": name, **tokens} for name, tokens in kept["models"].items()],
            per_testing_criteria_results=shown.get("per_testing_criteria_results")
            or summary.criteria_results(kept),
            data_source=source,
            metadata=hide_in_foreign(run.metadata_) if is_imported else run.metadata_,
            error=hide_in_foreign(run.error),
            **summary.rate(counts["passed"], counts["passed"] + counts["failed"]),
            progress={"finished": finished, "total": run.total},
            started_at=run.started_at,
            finished_at=None if is_imported else run.finished_at,
            estimated_finish=_estimated_finish(run, finished),
            budget=budgets.render(run.budget, kept),
            note=run.note,
        )

    @classmethod
    def of(
        cls, job: Job, page: RolloutPage, *, model: str, summary: dict[str, Any], report_url: str
    ) -> "RunOut":
        counts, tokens = summary["counts"], summary["tokens"]
        return cls(
            id=evals.run_id(job.id, page.step),
            created_at=page.created_at,
            eval_id=evals.eval_id(job.id),
            name=f"Step {page.step}",
            status="completed",
            model=model,
            report_url=report_url,
            result_counts={
                "total": counts["total"],
                "passed": counts["pass"],
                "failed": counts["fail"],
                "errored": counts["error"],
            },
            per_model_usage=[
                {
                    "model_name": model,
                    "invocation_count": counts["total"],
                    **tokens,
                    "cached_tokens": 0,
                    "total_tokens": sum(tokens.values()),
                }
            ],
            per_testing_criteria_results=[
                {"testing_criteria": name, **results, **rate(results["passed"], sum(results.values()))}
                for name, results in summary["criteria"].items()
            ],
            data_source={"type": "jsonl", "source": {"type": "file_id", "id": job.validation_file}},
            **rate(counts["pass"], counts["pass"] + counts["fail"]),
            progress={"finished": counts["total"], "total": counts["total"]},
            finished_at=page.created_at,
            step=page.step,
        )


def _estimated_finish(run: EvalRun, finished: int) -> int | None:
    """The time at which the remaining items are done at the mean pace so far; None while it is unknown."""
    if run.status != lifecycle.RUNNING or not finished or run.started_at is None:
        return None
    elapsed = max(1.0, time.time() - run.started_at)
    return round(time.time() + elapsed / finished * (run.total - finished))


class ItemOut(BaseModel):
    id: str
    object: Literal["eval.run.output_item"] = "eval.run.output_item"
    created_at: int
    run_id: str
    eval_id: str
    status: str
    datasource_item_id: int | None
    datasource_item: dict[str, Any]
    results: list[dict[str, Any]]
    sample: dict[str, Any]
    rollout_id: str | None = Field(
        default=None, description="Extension: id of a job's sample in /v1/regraft/jobs/{id}/rollouts."
    )

    @classmethod
    def of_item(cls, run: EvalRun, item: Item) -> "ItemOut":
        shown = {name: value for name, value in item.items() if name != "line"}
        hide = _hide_in_imported if "imported" in (run.summary or {}) else _without_secrets
        return cls(
            run_id=imported.public_id(run.id),
            eval_id=imported.public_id(run.eval_id),
            **shown
            | {
                "results": [hide(result) for result in item["results"]],
                "sample": hide(_with_defaults(item["sample"])),
            },
        )

    @classmethod
    def of(cls, job: Job, page: RolloutPage, row: Row, *, model: str) -> "ItemOut":
        criteria = evals.criteria(job.body["grader"])
        return cls(
            id=evals.item_id(job.id, SamplePosition.of(row)),
            created_at=page.created_at,
            run_id=evals.run_id(job.id, page.step),
            eval_id=evals.eval_id(job.id),
            status=evals.status(row, criteria[0]),
            datasource_item_id=row["line"],
            datasource_item=(row["item"] or {}) | {"messages": row["messages"] or []},
            results=[_result(criterion, row) for criterion in criteria],
            sample=_with_defaults(_sample(job, row, model)),
            rollout_id=row["id"],
        )


def _without_secrets(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A sample, or the result of a grader, without the secrets of a server that an error may quote."""
    hidden: dict[str, Any] = hide_secrets(stored)
    for name in ("error", "reason"):
        if hidden.get(name):
            hidden[name] = hide_in_error(hidden[name])
    if isinstance(hidden.get("sample"), Mapping):  # of a judge model
        hidden["sample"] = _without_secrets(hidden["sample"])
    return hidden


def _hide_in_imported(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A sample, or the result of a grader, of another service without secrets. What models said is kept."""
    shown: dict[str, Any] = hide_in_foreign(stored)
    shown |= {name: hide_secrets(stored[name]) for name in ("input", "output") if name in stored}
    if isinstance(judge := stored.get("sample"), Mapping):  # of a judge model
        shown["sample"] = _hide_in_imported(judge)
    return shown


def _result(criterion: Criterion, row: Row) -> dict[str, Any]:
    """The result of one grader. A null score could not be graded, for the given reason."""
    if criterion.key is None:
        reason, error, output = row["reason"], row["error"], row["output"]
    else:
        said = ((row[name] or {}).get(criterion.key) for name in ("sub_reasons", "sub_errors", "sub_outputs"))
        reason, error, output = said
    return {
        "name": criterion.name,
        "type": criterion.type,
        "passed": criterion.passed(row),
        "score": criterion.score(row),
        "reason": reason,
        "error": error,
        "output": output,
        "sample": None,
    }


def _with_defaults(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The sample with the defaults of parameters that were not set."""
    unset = {name: value for name, value in UNSET.items() if name in sample and sample[name] is None}
    return {**sample, **unset}


def _sample(job: Job, row: Row, model: str) -> dict[str, Any]:
    settings = job.resolved or {}
    prompt, completion = row["prompt_tokens"] or 0, row["completion_tokens"] or 0
    return {
        "input": row["messages"] or [],
        "output": [
            {"role": "assistant", "content": row["output_text"]}
            | ({"reasoning_content": row["output_reasoning"]} if row["output_reasoning"] else {})
            | ({"tool_calls": row["output_tools"]} if row["output_tools"] else {})
        ],
        "finish_reason": row["finish_reason"],
        "model": model,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "cached_tokens": 0,
        },
        "error": None,
        "temperature": settings.get("eval_temperature"),
        "max_completion_tokens": settings.get("max_completion_tokens"),
        "top_p": 1.0,
        "seed": job.seed,
    }
