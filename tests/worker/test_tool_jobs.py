"""Whole jobs whose rows have tools, on a tiny model that a schema makes write calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from core.database.tables import Job
from core.results import rollouts
from core.results.rollout_filters import Wanted
from core.settings import Settings
from tests.families.templates import make_turn_model
from tests.hyperparameters import in_groups
from tests.worker.conftest import Bench

PICK = {
    "type": "function",
    "function": {"name": "pick", "parameters": {"type": "object", "properties": {"letter": {}}}},
}
CALLING = {
    "role": "assistant",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "pick", "arguments": '{"letter": "b"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "no"}
ASK = {"role": "user", "content": "w"}
ROWS = [
    {"messages": [ASK], "tools": [PICK], "letter": "a"},
    {"messages": [ASK, CALLING, RESULT], "tools": [PICK], "letter": "a"},
]
# Arguments of calls are objects for the template, as for those of the families.
TEMPLATE = (
    "{%- for t in tools or [] -%}{{ '[' + t.function.name + ']' }}{%- endfor -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for c in m.tool_calls or [] -%}{{ c.function.name + c.function.arguments.values() | join }}{%- endfor -%}"
    "{{ '<|im_end|>' + '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
GRADER = {
    "type": "string_check",
    "name": "letter",
    "input": "{{sample.output_tools[0].function.name}} {{sample.output_tools[0].function.arguments}}",
    "reference": 'pick {"letter": "a"}',
    "operation": "eq",
}


def calling(*functions: str) -> dict[str, Any]:
    """The format of a call of one of these functions, as Llama 3 writes it."""
    letter = {
        "type": "object",
        "properties": {"letter": {"enum": ["a", "b"]}},
        "required": ["letter"],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {"name": {"enum": list(functions)}, "parameters": letter},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}


FORMAT = calling("pick")


@pytest.fixture
def run(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Run a job over these rows, in this process, and return it."""

    def work(rows: Sequence[Mapping[str, Any]] = ROWS, *, template: str = TEMPLATE, parser: str = "") -> Job:
        model = make_turn_model(tmp_path / "model", template)
        registry = tmp_path / "models.toml"
        registry.write_text(
            f'[models.tiny]\npath = {json.dumps(str(model))}\ndtype = "float32"\ncontext = 512\n'
            + (f'tool_parser = "{parser}"\n' if parser else "")
        )
        monkeypatch.setenv("REGRAFT_MODELS_FILE", str(registry))
        monkeypatch.setenv("REGRAFT_DATA_DIR", str(tmp_path / "data"))
        with bench.database.write() as session:
            bench.add_files(session, bench.blobs, rows)
            job = session.scalars(select(Job)).one()
            asked = {
                "batch_size": 2,
                "n_epochs": 1,
                "advanced": in_groups({"group_size": 4, "max_completion_tokens": 96}),
            }
            job.body = {"grader": GRADER, "hyperparameters": asked, "response_format": FORMAT}
        bench.run_job(Settings())
        return bench.job()

    return work


@pytest.mark.slow
def test_graders_and_rollouts_have_the_calls_of_answers_to_rows_with_tools(
    run: Callable[..., Job], bench: Bench
) -> None:
    job = run(parser="llama3_json")

    with bench.database.read() as session:
        pages = rollouts.pages(session, job.id, split="train")
    rows = list(rollouts.find(bench.blobs, pages, Wanted()))
    assert [row["score"] is None for row in rows] == [False] * len(rows)
    whole = [row for row in rows if row["finish_reason"] == "stop"]
    assert len(whole) > len(rows) / 2
    for row in whole:
        [call] = row["output_tools"]
        letter = json.loads(call["function"]["arguments"])["letter"]
        assert (row["output_text"], row["output_tools_error"]) == ("", None)
        assert call["function"]["name"] == "pick"
        assert row["score"] == float(letter == "a")
    # The tools, and the call and its result in the second row, are in the prompts.
    lengths = {row["line"]: row["prompt_tokens"] for row in rows}
    assert lengths[1] > len("[pick]userw")
    assert lengths[2] == lengths[1] + len("assistant\npickb\n") + 2 + len("tool\nno\n") + 2
