"""Events at the start of a run: its hyperparameters, its model, and the chat template with the rows that use it."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from core.jobs.full import is_full
from core.registry import sampler_of
from core.storage.datasets import Example
from worker.model.chat_tokens import answer_texts, special_tokens
from worker.model.policy import Policy
from worker.model.token_text import TokenTexts
from worker.offline.rows import TokenizedRow
from worker.packages import missing_vllm
from worker.prepare.loaded import BackgroundPolicy, LoadedPolicy
from worker.prepare.row_task import RowTask
from worker.prepare.task import PromptTask
from worker.prepare.training_plan import TrainingPlan
from worker.recording.recorder import JobRecorder, Quota
from worker.sampling.choice import Warn

MAX_NAMED = 5  # lines
# The fields of rows, and of their `input`, that are rendered.
RENDERED = ("messages", "preferred_output", "non_preferred_output", "output", "tools")


def record_start(plan: TrainingPlan, start: LoadedPolicy | BackgroundPolicy) -> JobRecorder:
    """Record what "auto" became and, in the first attempt, what the job has to know of its model."""
    base, job, settings = plan.base, plan.job, plan.settings
    samples = isinstance(plan.task, PromptTask)
    quota = Quota(
        settings.rollout_bytes_per_job, settings.rollouts_per_step, settings.rollout_tokens_per_step
    )
    recorder = JobRecorder(plan.attempt, settings.default_limits, quota, TokenTexts(start.policy.tokenizer))
    recorder.resolved(plan.task.settings, base.sampler_name if samples else None)
    if not plan.is_first:
        return recorder
    wanted = sampler_of(base.entry, settings.sampler, base.device, adapters=not is_full(job))
    if samples and (warning := missing_vllm(base.device, wanted, base.sampler)):
        recorder.warn(warning, {"sampler": base.sampler})
    start.report(recorder)
    files = {job.training_file: plan.rows.train, job.validation_file or "": plan.rows.valid}
    report_template(recorder, start.policy, files)
    if isinstance(plan.task, RowTask):
        report_lost_text(recorder.warn, job.training_file, plan.task.train)
        report_lost_text(recorder.warn, job.validation_file or "", plan.task.valid)
    if base.precision:
        recorder.inform(base.precision, {"quantization": base.quantization})
    return recorder


def report_template(recorder: JobRecorder, policy: Policy, files: Mapping[str, Sequence[Example]]) -> None:
    """Record the facts of the chat template with the job, and warn of what makes answers worse.

    Args:
        files: the rows of the job by the id of their file. Texts of special tokens in them are text.
    """
    facts = policy.template_facts
    if facts is None:
        return
    recorder.inform(f"The chat template: {facts}.", {"chat_template": facts.model_dump()})
    for note in facts.notes:
        recorder.inform(note, {})
    has_tools = any(
        fields.get("tools") for rows in files.values() for row in rows for fields in _objects_of(row.item)
    )
    for warning in facts.warnings_for(has_tools=has_tools):
        recorder.warn(warning, {})
    for file, rows in files.items():
        if lines := lines_with_special_texts(policy.tokenizer, rows):
            recorder.warn(
                f"{len(lines)} rows of {file} contain the text of a special token of the model ({_named(lines)}). The "
                "model reads and learns it as text, not as a control token.",
                {"file": file, "special_text_rows": len(lines)},
            )


def report_lost_text(warn: Warn, file: str, rows: Sequence[TokenizedRow]) -> None:
    """Warn of rows whose answers have text beside calls that the chat template leaves out."""
    if lines := [row.line for row in rows if row.loses_text]:
        warn(
            f"{len(lines)} rows of {file} have text beside calls of functions ({_named(lines)}) that the model's chat "
            "template leaves out: the model neither reads nor learns it.",
            {"file": file, "lost_text_rows": len(lines)},
        )


def _named(lines: Sequence[int]) -> str:
    return f"lines {', '.join(map(str, lines[:MAX_NAMED]))}" + (", ..." if len(lines) > MAX_NAMED else "")


def lines_with_special_texts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Example]) -> list[int]:
    """The lines of the rows whose content has texts of special tokens."""
    special, kept = special_tokens(tokenizer), answer_texts(tokenizer, None)

    def has_texts(row: Mapping[str, Any]) -> bool:
        return any(
            special.occur_in(value) if name == "tools" else special.occur_in_chat(_chat(value), None, kept)
            for fields in _objects_of(row)
            for name, value in fields.items()
            if name in RENDERED
        )

    return [row.line for row in rows if has_texts(row.item)]


def _objects_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The row, and the `input` of one with a preference: both may have messages and tools."""
    given = row.get("input")
    return [row, given] if isinstance(given, Mapping) else [row]


def _chat(value: Any) -> list[Mapping[str, Any]]:
    """The messages in a field, which may be another thing in rows of reinforcement fine-tuning."""
    parts = value if isinstance(value, list) else []
    return [one for one in parts if isinstance(one, Mapping) and "role" in one]
