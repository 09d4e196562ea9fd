import json

import pytest

from core.text import storable, storable_json, to_json


def test_only_nul_and_lone_surrogates_are_replaced() -> None:
    assert storable("é 😀 \ud800\0 \u2028") == "é 😀 \ufffd\ufffd \u2028"


def test_every_text_of_a_json_value_is_made_storable() -> None:
    value = {"a\ud800": ["\udfff", 1, None, True, {"b": "\0"}]}

    assert storable_json(value) == {"a\ufffd": ["\ufffd", 1, None, True, {"b": "\ufffd"}]}


@pytest.mark.parametrize("text", ["a\ud83d", "\0", "\\u0000", "\\ud83d", "😀", "\u2028", "שלום"])
def test_json_has_the_storable_text_and_nothing_else_changes(text: str) -> None:
    assert json.loads(to_json([text, {text: 1.5}])) == [storable(text), {storable(text): 1.5}]
