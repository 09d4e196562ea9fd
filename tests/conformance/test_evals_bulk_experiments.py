"""Cookbook "Evals API: bulk model and prompt experimentation": one eval, a run for each prompt and model."""

from functools import partial

import openai
import pytest

from tests.conformance.helpers import poll
from tests.e2e.conftest import Server

pytestmark = pytest.mark.slow

NOTES = ["New message from Ada: lunch at noon?", "Your parcel arrives tomorrow."]
PROMPTS = {"basic": "Summarize the notification.", "strict": "Summarize the notification in five words."}


def test_a_run_for_each_prompt(service: Server, inference: None) -> None:
    client = openai.OpenAI()
    made = client.evals.create(
        name="Push notification bulk experiment",
        metadata={"description": "Which prompt summarizes best"},
        data_source_config={
            "type": "custom",
            "item_schema": {
                "type": "object",
                "properties": {"notifications": {"type": "string"}},
                "required": ["notifications"],
            },
            "include_sample_schema": True,
        },
        testing_criteria=[
            {
                "type": "label_model",
                "name": "push_notification_grader",
                "model": "o3-mini",
                "input": [
                    {"role": "developer", "content": "Label the summary as correct or incorrect."},
                    {
                        "role": "user",
                        "content": "<push>{{item.notifications}}</push><summary>{{sample.output_text}}</summary>",
                    },
                ],
                "passing_labels": ["correct"],
                "labels": ["correct", "incorrect"],
            }
        ],
    )
    runs = [
        client.evals.runs.create(
            made.id,
            name=f"bulk_{name}",
            metadata={"prompt": name},
            data_source={
                "type": "completions",
                "input_messages": {
                    "type": "template",
                    "template": [
                        {"role": "developer", "content": prompt},
                        {
                            "role": "user",
                            "content": {"type": "input_text", "text": "<push>{{item.notifications}}</push>"},
                        },
                    ],
                },
                "model": "gpt-4o-mini-2024-07-18",
                "sampling_params": {
                    "temperature": 0.5,
                    "max_completion_tokens": 16,
                    "top_p": 0.9,
                    "seed": 42,
                },
                "source": {
                    "type": "file_content",
                    "content": [{"item": {"notifications": note}} for note in NOTES],
                },
            },
        )
        for name, prompt in PROMPTS.items()
    ]
    done = [
        poll(
            partial(client.evals.runs.retrieve, run.id, eval_id=made.id),
            lambda run: run.status in ("completed", "failed"),
        )
        for run in runs
    ]

    assert [run.metadata for run in done] == [{"prompt": "basic"}, {"prompt": "strict"}]
    assert all(run.result_counts.total == 2 for run in done)
    [result] = done[0].per_testing_criteria_results
    assert result.passed + result.failed == 2
    assert {usage.run_model_name for usage in done[0].per_model_usage} == {
        "gpt-4o-mini-2024-07-18",
        "o3-mini",
    }
    assert [run.id for run in client.evals.runs.list(made.id)] == [run.id for run in runs]
