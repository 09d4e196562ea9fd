"""Events about the chat template of a job's model, and about rows that contain texts of its special tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from core.storage.datasets import Example
from worker.model.chat_tokens import answer_texts, special_tokens
from worker.model.policy import Policy
from worker.record.recorder import JobRecorder

MAX_NAMED = 5  # lines
# The fields of rows, and of their `input`, that are rendered.
RENDERED = ("messages", "preferred_output", "non_preferred_output", "output", "tools")


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
    for warning in facts.warnings:
        recorder.warn(warning, {})
    for file, rows in files.items():
        if lines := lines_with_special_texts(policy.tokenizer, rows):
            named = ", ".join(map(str, lines[:MAX_NAMED])) + (", ..." if len(lines) > MAX_NAMED else "")
            recorder.warn(
                f"{len(lines)} rows of {file} contain the text of a special token of the model (lines {named}). The "
                "model reads and learns it as text, not as a control token.",
                {"file": file, "special_text_rows": len(lines)},
            )


def lines_with_special_texts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Example]) -> list[int]:
    """The lines of the rows whose content has texts of special tokens."""
    special, kept = special_tokens(tokenizer), answer_texts(tokenizer, None)

    def has_texts(row: Mapping[str, Any]) -> bool:
        given = row["input"] if isinstance(row.get("input"), Mapping) else {}
        return any(
            special.occur_in(value) if name == "tools" else special.occur_in_chat(_chat(value), None, kept)
            for fields in (row, given)
            for name, value in fields.items()
            if name in RENDERED
        )

    return [row.line for row in rows if has_texts(row.item)]


def _chat(value: Any) -> list[Mapping[str, Any]]:
    """The messages in a field, which may be another thing in rows of reinforcement fine-tuning."""
    parts = value if isinstance(value, list) else []
    return [one for one in parts if isinstance(one, Mapping) and "role" in one]
