"""Files of jobs that learn from the answers in them: what is wrong with one that is made for another method."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.database.tables import File
from core.jobs.job_files import BadFile, count_rows, refuse_other_kinds
from core.storage.store import FolderBlobs

ASK = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
PROMPT = {"messages": [ASK], "answer": "4"}
CHAT = {"messages": [ASK, ANSWER]}
PAIR = {
    "input": {"messages": [ASK]},
    "preferred_output": [ANSWER],
    "non_preferred_output": [{"role": "assistant", "content": "5"}],
}
SCORED = {**CHAT, "score": 1.0}


def refusal_of(rows: list[dict[str, Any]], variant: str, folder: Path) -> str:
    blobs = FolderBlobs(folder / "blobs")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    info = blobs.put_file("rows", path)
    file = File(id="file-1", filename="rows.jsonl", blob_key="rows", bytes=info.size, sha256=info.sha256)
    with pytest.raises(BadFile) as bad:
        count_rows(blobs, file, variant, "training_file")
    assert bad.value.code == "invalid_training_file"
    return bad.value.message


def test_a_step_trust_region_of_a_reward_model_of_scores_is_refused_by_name() -> None:
    guarded, plain = ({"advanced": {"optimizer": {"step_kl": target}}} for target in (0.05, 0.0))

    with pytest.raises(BadFile, match=r"advanced\.optimizer\.step_kl"):
        refuse_other_kinds(["scores"], guarded)
    refuse_other_kinds(["scores"], plain)
    refuse_other_kinds(["steps"], guarded)


@pytest.mark.parametrize("variant", ["supervised", "distillation_logits"])
def test_prompts_for_a_grader_are_named_before_the_errors_of_their_rows(variant: str, tmp_path: Path) -> None:
    first, *errors = refusal_of([PROMPT] * 30, variant, tmp_path).split("\n")

    assert first == (
        "Training file file-1 (rows.jsonl): the rows are made for method 'reinforcement', and were read as rows for "
        "'supervised'. Use method 'reinforcement' for this file, or rows such as "
        '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}.'
    )
    assert errors[0] == "line 1: answer: is not a key of this format (and in 29 more lines: 2, 3, 4, 5, …)"


@pytest.mark.parametrize(
    ("row", "variant", "format_", "made_for", "example"),
    [
        (CHAT, "dpo", "fine-tune-chat", "supervised", '{"input": '),
        (PAIR, "supervised", "fine-tune-preference", "dpo", '{"messages": '),
        (SCORED, "dpo", "scored answers", "reward_model", '{"input": '),
        (PAIR, "distillation_logits", "fine-tune-preference", "dpo", '{"messages": '),
    ],
)
def test_openais_words_for_another_format_are_followed_by_what_to_do(
    row: dict[str, Any], variant: str, format_: str, made_for: str, example: str, tmp_path: Path
) -> None:
    said = refusal_of([row] * 12, variant, tmp_path)

    method = variant.removesuffix("_logits")
    assert (
        f"Input file file-1 is in the {format_} format, but the specified fine-tuning job is not using '{made_for}' as "
        f"the training method (provided method={method}). Use method '{made_for}' for this file, or rows such as "
        + example
        in said
    )
    assert "\n" not in said


@pytest.mark.parametrize("variant", ["dpo", "reward_model"])
def test_prompts_have_the_format_of_conversations_and_are_for_reinforcement(
    variant: str, tmp_path: Path
) -> None:
    said = refusal_of([PROMPT] * 12, variant, tmp_path)

    assert "is in the fine-tune-chat format" in said
    assert "Use method 'reinforcement' for this file" in said


def test_one_row_of_another_kind_is_an_error_of_its_line(tmp_path: Path) -> None:
    assert refusal_of([CHAT] * 12 + [PROMPT], "supervised", tmp_path).startswith(
        "Training file file-1 (rows.jsonl): line 13: "
    )
