"""Guide "Reinforcement fine-tuning", section on a schema from a Pydantic model: the job through the client."""

from openai import OpenAI
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel

from tests.conformance.helpers import NEW_JOB, assert_documented, jsonl
from tests.present import untyped

ROW = {"messages": [{"role": "user", "content": "Who is it?"}], "name": "Ada", "age": 36}


class Person(BaseModel):
    name: str
    age: int


def test_a_schema_made_from_a_class_is_the_jobs_response_format() -> None:
    client = OpenAI()
    train, test = (
        client.files.create(file=(name, jsonl([ROW])), purpose="fine-tune").id for name in ("train", "test")
    )
    schema = to_strict_json_schema(Person)
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": Person.__name__, "strict": True, "schema": schema},
    }

    job = client.fine_tuning.jobs.create(
        model="o4-mini-2025-04-16",
        training_file=train,
        validation_file=test,
        method=untyped(
            {
                "type": "reinforcement",
                "reinforcement": {
                    "grader": {
                        "type": "multi",
                        "graders": {
                            "name": {
                                "name": "name",
                                "type": "text_similarity",
                                "input": "{{sample.output_json.name}}",
                                "reference": "{{item.name}}",
                                "evaluation_metric": "fuzzy_match",
                            },
                            "age": {
                                "name": "age",
                                "type": "string_check",
                                "input": "{{sample.output_json.age}}",
                                "reference": "{{item.age}}",
                                "operation": "eq",
                            },
                        },
                        "calculate_output": "0.5 * name + 0.5 * age",
                    },
                    "response_format": response_format,
                    "hyperparameters": {"reasoning_effort": "medium"},
                },
            }
        ),
    )
    client.fine_tuning.jobs.cancel(job.id)

    assert_documented(job, NEW_JOB)
    assert (
        untyped(job.to_dict(warnings=False)["method"])["reinforcement"]["response_format"] == response_format
    )
