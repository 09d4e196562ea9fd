"""Guide "Working with evals": describe the task, upload test data, run, poll and read the results."""

import json
from typing import Any

import openai
import pytest

from tests.conformance.helpers import assert_documented, poll, starts
from tests.e2e.conftest import Server

pytestmark = pytest.mark.slow

ROWS = [
    {"item": {"ticket_text": "My monitor won't turn on!", "correct_label": "Hardware"}},
    {"item": {"ticket_text": "I'm in vim and I can't quit!", "correct_label": "Software"}},
    {"item": {"ticket_text": "Best restaurants in Cleveland?", "correct_label": "Other"}},
]
RUN = {
    "id": starts("evalrun_"),
    "object": "eval.run",
    "eval_id": starts("eval_"),
    "status": "completed",
    "model": str,
    "name": "Categorization text run",
    "created_at": int,
    "report_url": starts("http"),
    "result_counts": {"total": 3, "errored": 0, "failed": int, "passed": int},
    "per_model_usage": [
        {
            "model_name": str,
            "invocation_count": 3,
            "prompt_tokens": int,
            "completion_tokens": int,
            "total_tokens": int,
            "cached_tokens": int,
        }
    ],
    "per_testing_criteria_results": [{"testing_criteria": str, "passed": int, "failed": int}],
    "data_source": {
        "type": "responses",
        "model": "gpt-4o-mini-2024-07-18",
        "input_messages": {"type": "template", "template": list},
        "source": {"type": "file_id", "id": starts("file-")},
    },
    "error": None,
    "metadata": None,
}


def test_categorize_tickets(service: Server, inference: None) -> None:
    client = openai.OpenAI()
    eval_obj = client.evals.create(
        name="IT Ticket Categorization",
        data_source_config={
            "type": "custom",
            "item_schema": {
                "type": "object",
                "properties": {"ticket_text": {"type": "string"}, "correct_label": {"type": "string"}},
                "required": ["ticket_text", "correct_label"],
            },
            "include_sample_schema": True,
        },
        testing_criteria=[
            {
                "type": "string_check",
                "name": "Match output to human label",
                "input": "{{ sample.output_text }}",
                "operation": "eq",
                "reference": "{{ item.correct_label }}",
            }
        ],
    )
    text = "\n".join(json.dumps(row) for row in ROWS)
    file = client.files.create(file=("tickets.jsonl", text.encode()), purpose="evals")

    run: Any = client.evals.runs.create(
        eval_obj.id,
        name="Categorization text run",
        data_source={
            "type": "responses",
            "model": "gpt-4o-mini-2024-07-18",
            "input_messages": {
                "type": "template",
                "template": [
                    {"role": "developer", "content": "Categorize the ticket: Hardware, Software, or Other."},
                    {"role": "user", "content": "{{ item.ticket_text }}"},
                ],
            },
            "source": {"type": "file_id", "id": file.id},
        },
    )
    assert run.status == "queued"
    run = poll(
        lambda: client.evals.runs.retrieve(run.id, eval_id=eval_obj.id), lambda run: run.status == "completed"
    )

    assert_documented(run.model_dump(), RUN)
    items = client.evals.runs.output_items.list(run.id, eval_id=eval_obj.id)
    assert [item.datasource_item for item in items] == [row["item"] for row in ROWS]
