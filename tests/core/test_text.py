from core.text import storable, storable_json


def test_only_lone_surrogates_are_replaced() -> None:
    assert storable("é 😀 \ud800") == "é 😀 ?"


def test_every_text_of_a_json_value_is_made_storable() -> None:
    value = {"a\ud800": ["\udfff", 1, None, True, {"b": "c"}]}

    assert storable_json(value) == {"a?": ["?", 1, None, True, {"b": "c"}]}
