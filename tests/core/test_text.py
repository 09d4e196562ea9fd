import json
import math
from pathlib import Path

import pytest
from sqlalchemy.exc import StatementError

from core.database.engine import Database
from core.database.migrate import upgrade
from core.database.tables import StepMetric
from core.text import storable, storable_json, to_json


def test_only_nul_and_lone_surrogates_are_replaced() -> None:
    assert storable("é 😀 \ud800\0 \u2028") == "é 😀 \ufffd\ufffd \u2028"


def test_every_text_of_a_json_value_is_made_storable() -> None:
    value = {"a\ud800": ["\udfff", 1, None, True, {"b": "\0"}]}

    assert storable_json(value) == {"a\ufffd": ["\ufffd", 1, None, True, {"b": "\ufffd"}]}


@pytest.mark.parametrize("text", ["a\ud83d", "\0", "\\u0000", "\\ud83d", "😀", "\u2028", "שלום"])
def test_json_has_the_storable_text_and_nothing_else_changes(text: str) -> None:
    assert json.loads(to_json([text, {text: 1.5}])) == [storable(text), {storable(text): 1.5}]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_number_is_written_that_only_one_of_the_databases_stores(tmp_path: Path, number: float) -> None:
    """PostgreSQL refuses NaN in a JSON column. SQLite would store it, so that its tests would not find the error."""
    upgrade(url := f"sqlite:///{tmp_path}/regraft.db")
    database = Database(url)

    with pytest.raises(StatementError, match="not JSON compliant"), database.write() as session:
        session.add(StepMetric(job_id="ftjob-1", step=1, epoch=1, data={"scores": [{"mean": number}]}))
