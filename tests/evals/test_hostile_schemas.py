"""Schemas that are expensive or endless to apply: refused by name, while the API keeps answering others."""

import threading
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.evals.run_create_response import RunCreateResponse

from tests.evals.conftest import EXACT, House, completions
from tests.present import untyped

ANSWERS = {"type": "object", "properties": {"question": {}, "answer": {"type": "string"}}}
SCHEMA, CONTENT = "data_source_config.item_schema", "data_source.source.content"


def schema(question: dict[str, Any], **more: Any) -> dict[str, Any]:
    return ANSWERS | {"properties": ANSWERS["properties"] | untyped({"question": question})} | more


def doubling(depth: int) -> dict[str, Any]:
    """Each definition applies the next one twice: 2 ** depth applications."""
    definitions = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)}
    return schema({"$ref": "#/$defs/d0"}, **{"$defs": definitions | {f"d{depth}": {"type": "string"}}})


def create(
    client: OpenAI, item_schema: dict[str, Any], item: dict[str, Any] | None = None
) -> RunCreateResponse:
    made = client.evals.create(
        data_source_config={"type": "custom", "item_schema": item_schema}, testing_criteria=[EXACT]
    )
    source: Any = completions(1)
    if item is not None:
        source["source"]["content"] = [{"item": item}]
    return client.evals.runs.create(made.id, data_source=source)


BACKTRACKS = schema({"type": "string", "pattern": "^(a+)+$"})
LONG = {"question": "a" * 40 + "!", "answer": "x"}
HOSTILE = {
    "a pattern that backtracks for ever": (BACKTRACKS, LONG, SCHEMA, "too expensive"),
    "a reference that doubles": (doubling(40), LONG, SCHEMA, "too expensive"),
    "a pattern that is none": (schema({"pattern": "("}), None, SCHEMA, "is not a 'regex'"),
    "a key that is no pattern": (
        ANSWERS | {"patternProperties": {"(": {}}},
        None,
        SCHEMA,
        "is not a 'regex'",
    ),
    "a reference to itself": (
        schema({"$ref": "#/properties/question"}),
        None,
        CONTENT,
        "refers to itself without end",
    ),
    "two references in a circle": (
        schema({"$ref": "#/$defs/a"}, **{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        None,
        CONTENT,
        "refers to itself without end",
    ),
    "a reference to nothing": (schema({"$ref": "#/$defs/none"}), None, CONTENT, "which is not in it"),
    "a reference to a server": (schema({"$ref": "http://127.0.0.1/x"}), None, CONTENT, "which is not in it"),
    "a reference to a value that is not a schema": (
        schema({"$ref": "#/required/abc"}, required=["question"]),
        None,
        CONTENT,
        "cannot be applied",
    ),
    "a reference to a text": (schema({"$ref": "#/type"}), None, CONTENT, "cannot be applied"),
    "a number that cannot be divided": (
        schema({"multipleOf": 0.1}),
        {"question": 10**350, "answer": "x"},
        CONTENT,
        "cannot be applied",
    ),
    "a huge enumeration": (schema({"enum": list(range(2000))}), None, SCHEMA, "'enum' has 2000 entries"),
    "a deep schema": (schema(eval("{'items':" * 90 + "{}" + "}" * 90)), None, SCHEMA, "deep"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("item_schema", "item", "param", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_schema_is_refused_by_name(
    client: OpenAI, item_schema: dict[str, Any], item: dict[str, Any] | None, param: str, words: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        create(client, item_schema, item)

    assert refused.value.param == param
    assert words in str(refused.value)


@pytest.mark.slow
def test_others_are_answered_while_a_schema_is_applied(client: OpenAI, house: House) -> None:
    """The pattern runs in a process of the hazard pool, and a thread waits for it."""
    refused = []

    def attack() -> None:
        with pytest.raises(BadRequestError) as caught:
            create(client, BACKTRACKS, LONG)
        refused.append(caught.value)

    theirs = house.openai(house.other_key)
    attacking = threading.Thread(target=attack)
    attacking.start()
    answered = 0
    while attacking.is_alive():
        theirs.evals.list()
        answered += 1
        attacking.join(0.05)

    assert len(refused) == 1
    assert answered > 5, "an event loop that waits for the pattern answers one request, after it"
