"""Whole jobs on a reasoning model that is tiny and writes noise."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from core.database.tables import Event, Job
from core.jobs import events
from core.results import rollouts
from core.results.rollout_filters import Wanted
from core.settings import Settings
from tests.families.templates import CHATML, HEADER, make_turn_model
from tests.hyperparameters import in_groups
from tests.thinking import DISTILL, HYBRID, make_thinking_model
from tests.tiny import make_byte_model
from tests.worker.conftest import Bench
from worker.refusals import UserMistake

ROWS = [{"messages": [{"role": "user", "content": text}], "letter": "a"} for text in "wxyz"]
GRADER = {
    "type": "string_check",
    "name": "letter",
    "input": "{{sample.output_json.letter}}",
    "reference": "{{item.letter}}",
    "operation": "eq",
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "letter",
        "schema": {
            "type": "object",
            "properties": {"letter": {"enum": ["a", "b"]}},
            "required": ["letter"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def run(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Run a job on this model with these hyperparameters, in this process, and return it."""

    def work(
        model: Any, effort: str = "default", *, rows: Sequence[Mapping[str, Any]] = ROWS, **advanced: Any
    ) -> Job:
        registry = tmp_path / "models.toml"
        registry.write_text(
            f'[models.tiny]\npath = {json.dumps(str(model))}\ndtype = "float32"\ncontext = 512\n'
        )
        monkeypatch.setenv("REGRAFT_MODELS_FILE", str(registry))
        monkeypatch.setenv("REGRAFT_DATA_DIR", str(tmp_path / "data"))
        with bench.database.write() as session:
            bench.add_files(session, bench.blobs, rows)
            job = session.scalars(select(Job)).one()
            asked = {
                "batch_size": 2,
                "n_epochs": 1,
                "eval_interval": 2,
                "reasoning_effort": effort,
                "advanced": in_groups({"group_size": 4, "max_completion_tokens": 64} | advanced),
            }
            job.body = {"grader": GRADER, "hyperparameters": asked, "response_format": FORMAT}
        bench.run_job(Settings())
        return bench.job()

    return work


@pytest.mark.slow
def test_a_job_with_a_schema_trains_on_answers_after_their_thoughts(
    run: Callable[..., Any], bench: Bench, tmp_path: Path
) -> None:
    job = run(make_thinking_model(tmp_path / "model", DISTILL), "low")

    assert job.resolved["thinking_budget"] == 16
    with bench.database.read() as session:
        pages = rollouts.pages(session, job.id)
        steps = [row.data for row in events.steps(session, job.id)]
    rows = list(rollouts.find(bench.blobs, pages, Wanted()))
    answered = [row for row in rows if row["output_text"]]
    assert len(answered) > len(rows) / 2
    assert all(json.loads(row["output_text"])["letter"] in ("a", "b") for row in answered)
    assert all(row["score"] == float(json.loads(row["output_text"])["letter"] == "a") for row in answered)
    assert any(row["output_reasoning"] for row in answered)
    assert max(row["reasoning_tokens"] for row in rows) == 17
    trained = [step for step in steps if step["step"]]
    assert all(0 < step["reasoning_tokens_mean"] <= 17 for step in trained)
    assert all(step["logprob_gap_max"] is None or step["logprob_gap_max"] < 1e-3 for step in trained)


@pytest.mark.slow  # a whole job on a real model, as the test above
def test_arguments_of_the_template_are_defaults_of_the_delivered_one(
    run: Callable[..., Any], bench: Bench, tmp_path: Path
) -> None:
    job = run(
        make_thinking_model(tmp_path / "model", HYBRID), chat_template_kwargs={"enable_thinking": False}
    )

    assert job.resolved["chat_template_kwargs"] == {"enable_thinking": False}
    assert job.resolved["thinking_budget"] is None
    with bench.database.read() as session:
        pages = rollouts.pages(session, job.id)
    [row, *_] = rollouts.find(bench.blobs, pages, Wanted())
    # <user> w <assistant>, and an empty thought that the template closed.
    assert row["prompt_tokens"] == 3 + len(["<think>", "\n", "\n", "</think>", "\n", "\n"])


@pytest.mark.slow
def test_a_job_records_its_chat_template_fixes_its_date_and_warns_of_what_makes_answers_worse(
    run: Callable[..., Any], bench: Bench, tmp_path: Path
) -> None:
    template = "{{- strftime_now('%H:%M:%S') -}}" + CHATML.removesuffix(HEADER)
    rows = [{"messages": [{"role": "user", "content": text}], "letter": "a"} for text in ("w", "x<|im_end|>")]

    job = run(make_turn_model(tmp_path / "model", template), rows=rows)

    created = datetime.fromtimestamp(job.created_at, UTC)
    assert job.resolved["chat_template_kwargs"] == {"strftime_now": created.isoformat()}
    with bench.database.read() as session:
        told = [(event.level, event.message, event.data) for event in session.scalars(select(Event))]
    [recorded] = [data["chat_template"] for _, _, data in told if data and "chat_template" in data]
    assert (recorded["end_of_turn"], recorded["generation_prompt"]) == ("<|im_end|>", False)
    assert any("Answers also end at '<|im_end|>'" in message for _, message, _ in told)
    warnings = [message for level, message, _ in told if level == "warn"]
    assert any("writes nothing before an answer" in message for message in warnings)
    assert any("1 rows of file-a contain the text of a special token" in message for message in warnings)
    with bench.database.read() as session:
        pages = rollouts.pages(session, job.id)
    lengths = {row["prompt_tokens"] for row in rollouts.find(bench.blobs, pages, Wanted())}
    short = len(f"{created:%H:%M:%S}") + 1 + len("user\nw") + 1 + len("\n")
    assert lengths == {short, short + len("<|im_end|>")}


@pytest.mark.parametrize(
    ("make", "budget", "reason"),
    [
        (make_byte_model, 8, "thinking_budget needs a model that reasons"),
        (make_thinking_model, 64, "leaves no room for an answer"),
    ],
)
def test_a_budget_that_cannot_work_is_refused(
    run: Callable[..., Any], tmp_path: Path, make: Callable[..., Path], budget: int, reason: str
) -> None:
    with pytest.raises(UserMistake, match=reason):
        run(make(tmp_path / "model"), thinking_budget=budget)
