"""evals.create, update, list and delete with OpenAI's client, and each bad input refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from core.database.tables import Eval
from graders.template import Template
from tests.evals.conftest import CONFIG, EXACT, JUDGED, House
from tests.present import untyped


@pytest.mark.both_databases
def test_an_eval_is_returned_as_openai_returns_it(client: OpenAI, database_kind: str) -> None:
    made = client.evals.create(
        name="geography",
        metadata={"team": "maps"},
        data_source_config=CONFIG,
        testing_criteria=[EXACT, JUDGED],
    )

    assert made.id.startswith("eval_")
    assert made.object == "eval"
    assert made.metadata == {"team": "maps"}
    schema: dict[str, Any] = made.data_source_config.schema_
    assert schema["properties"]["item"] == CONFIG["item_schema"]
    assert "sample" in schema["required"]
    assert [criterion.name for criterion in made.testing_criteria] == ["exact", "polite"]
    assert client.evals.retrieve(made.id).to_dict() == made.to_dict()


def test_name_and_metadata_can_be_changed(client: OpenAI, new_eval: Callable[..., Any]) -> None:
    made = new_eval(metadata={"a": "1"})

    renamed = client.evals.update(made.id, name="history", metadata={"b": "2"})

    assert (renamed.name, renamed.metadata) == ("history", {"b": "2"})
    assert client.evals.retrieve(made.id).name == "history"


@pytest.mark.both_databases
def test_the_list_pages_in_both_orders_and_past_a_deleted_eval(
    client: OpenAI, new_eval: Callable[..., Any], database_kind: str
) -> None:
    made = [new_eval(name=str(number)).id for number in range(5)]

    assert [one.id for one in client.evals.list(limit=2)] == made
    assert [one.id for one in client.evals.list(limit=2, order="desc")] == made[::-1]
    first = client.evals.list(limit=2)
    assert client.evals.delete(made[1]).deleted
    assert [one.id for one in client.evals.list(after=first.data[-1].id, limit=2)] == made[2:]
    with pytest.raises(BadRequestError, match="No item with id 'eval_none'"):
        client.evals.list(after="eval_none")


def test_the_list_can_be_ordered_by_the_last_update(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = [new_eval(name=str(number)).id for number in range(3)]
    with house.database.write() as session:
        session.query(Eval).where(Eval.id == made[0]).one().updated_at += 100

    listed = client.evals.list(order_by="updated_at", order="desc")
    assert [one.id for one in listed] == [made[0], made[2], made[1]]


def test_every_variable_of_the_shown_schema_is_one_of_templates(new_eval: Callable[..., Any]) -> None:
    schema = untyped(new_eval().data_source_config.schema_)

    for name in schema["properties"]["sample"]["properties"]:
        assert Template.parse(f"{{{{sample.{name}}}}}").parts


def test_a_deleted_eval_is_gone_with_its_runs(client: OpenAI, new_eval: Callable[..., Any]) -> None:
    made = new_eval()

    deleted = client.evals.delete(made.id)

    assert (deleted.object, deleted.eval_id) == ("eval.deleted", made.id)
    for call in (client.evals.retrieve, client.evals.delete, client.evals.runs.list):
        with pytest.raises(NotFoundError):
            call(made.id)


def test_another_project_does_not_see_it(house: House, new_eval: Callable[..., Any]) -> None:
    made, theirs = new_eval(), house.openai(house.other_key)

    assert theirs.evals.list().data == []
    with pytest.raises(NotFoundError):
        theirs.evals.retrieve(made.id)
    with pytest.raises(NotFoundError):
        theirs.evals.update(made.id, name="mine")


BAD = [
    ({"testing_criteria": [EXACT | {"type": "vibes"}]}, "testing_criteria[0].type", "'vibes'"),
    (
        {"testing_criteria": [EXACT | {"type": "vibes"}]},
        "testing_criteria[0].type",
        "'label_model' or 'endpoint'.",
    ),
    ({"testing_criteria": [{"type": "multi", "name": "m"}]}, "testing_criteria[0].type", "multi"),
    ({"testing_criteria": []}, "testing_criteria", "at least one"),
    ({"testing_criteria": [EXACT, EXACT]}, "testing_criteria[1].name", "already"),
    (
        {"testing_criteria": [EXACT | {"reference": "{{item.city}}"}]},
        "testing_criteria[0]",
        "{{item.city}}",
    ),
    ({"testing_criteria": [EXACT | {"reference": "{{file.x}}"}]}, "testing_criteria[0].reference", "file"),
    ({"testing_criteria": [JUDGED | {"model": "gpt-4o"}]}, "testing_criteria[0].model", "judge"),
    (
        {
            "testing_criteria": [
                {
                    "type": "text_similarity",
                    "name": "near",
                    "input": "{{sample.output_text}}",
                    "reference": "{{item.answer}}",
                    "evaluation_metric": "bleu",
                }
            ]
        },
        "testing_criteria[0].pass_threshold",
        "Missing",
    ),
    (
        {
            "testing_criteria": [
                {
                    "type": "text_similarity",
                    "name": "near",
                    "input": "{{sample.output_text}}",
                    "reference": "{{item.answer}}",
                    "evaluation_metric": "cosine",
                    "pass_threshold": 0.5,
                }
            ]
        },
        "testing_criteria[0].evaluation_metric",
        "cosine",
    ),
    (
        {"data_source_config": CONFIG | {"item_schema": {"type": "objekt"}}},
        "data_source_config.item_schema",
        "objekt",
    ),
    ({"data_source_config": {"type": "custom"}}, "data_source_config.item_schema", "Missing"),
    (
        {"data_source_config": {"type": "stored_completions"}},
        "data_source_config.type",
        "'stored_completions' is not",
    ),
    ({"data_source_config": {"type": "logs"}}, "data_source_config.type", "'logs' is not supported"),
    ({"data_source_config": {"type": "else"}}, "data_source_config", "else"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k", ""),
]


@pytest.mark.parametrize(("wrong", "param", "words"), BAD, ids=[f"{case[1]}-{case[2]}" for case in BAD])
def test_a_bad_eval_is_refused_by_name(client: OpenAI, wrong: dict[str, Any], param: str, words: str) -> None:
    fields = {"name": "n", "data_source_config": CONFIG, "testing_criteria": [EXACT]} | wrong

    with pytest.raises(BadRequestError) as refused:
        client.evals.create(**fields)

    assert refused.value.param is not None
    assert refused.value.param.startswith(param)
    assert words in str(refused.value)
    assert client.evals.list().data == []


def test_a_repeated_request_gets_the_first_answer_with_its_status(house: House) -> None:
    body = {"data_source_config": CONFIG, "testing_criteria": [EXACT]}
    client = house.client(house.key)
    first, again = (
        client.post("/v1/evals", json=body, headers={"Idempotency-Key": "ci-1"}) for _ in range(2)
    )

    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert len(client.get("/v1/evals").json()["data"]) == 1
