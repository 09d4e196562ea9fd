"""`.ci/english.py` counts the definitions whose names have a word that says nothing: no count may rise."""

import runpy
from pathlib import Path

import pytest

ENGLISH = runpy.run_path(str(Path(__file__).parents[1] / ".ci/english.py"))
PART = {"part": ["core/a.py:1 part_of", "core/b.py:7 Part"]}


def test_a_definition_more_than_allowed_is_listed_with_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert ENGLISH["counts_differ"](PART, {"part": 1})

    assert capsys.readouterr().out.splitlines() == PART["part"]


def test_numbers_that_are_right_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert not ENGLISH["counts_differ"](PART, {"part": 2})

    assert capsys.readouterr() == ("", "")


def test_a_number_that_has_become_too_high_is_to_be_lowered(capsys: pytest.CaptureFixture[str]) -> None:
    assert ENGLISH["counts_differ"](PART, {"part": 3})

    assert capsys.readouterr().err == "lower VAGUE_WORDS['part'] to 2\n"


def test_words_are_found_in_every_kind_of_name_that_a_definition_has(tmp_path: Path) -> None:
    source = """
class HeldLease:
    is_kept: bool
class JobNotFound:
    def part_of(self, whole_row, apart):
        self.place = found = 1
"""
    for folder in ENGLISH["PRODUCT"]:
        (tmp_path / folder).mkdir()
    (tmp_path / "core/a.py").write_text(source)

    named = ENGLISH["vague_definitions"](tmp_path)

    assert {word: names for word, names in named.items() if names} == {
        "held": ["core/a.py:2 HeldLease"],
        "kept": ["core/a.py:3 is_kept"],
        "part": ["core/a.py:5 part_of"],
        "whole": ["core/a.py:5 whole_row"],
        "place": ["core/a.py:6 place"],
    }
