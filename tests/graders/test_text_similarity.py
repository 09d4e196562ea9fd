import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graders.template import Template
from graders.text_similarity import TextSimilarity, fuzzy_match
from graders.types import ErrorKind, Grade, Sample

WORDS = st.text(alphabet="abc ", max_size=12)


def grade(got: str, row: dict) -> Grade:
    templates = Template.parse("{{sample.output_text}}"), Template.parse("{{item.want}}")
    return asyncio.run(TextSimilarity("similar", *templates, "fuzzy_match").grade(Sample(got), row))


@pytest.mark.parametrize(
    ("a", "b", "score"),
    [
        ("same", "same", 1.0),
        ("", "", 1.0),
        ("", "abc", 0.0),
        ("abc", "xyz", 0.0),
        ("abcd", "abxd", 0.75),  # one character taken out, one put in, of eight
        ("ab", "abab", 1 - 2 / 6),
    ],
)
def test_similarity_is_one_less_the_share_of_edited_characters(a, b, score):
    assert fuzzy_match(a, b) == pytest.approx(score)


@given(WORDS, WORDS)
def test_similarity_is_symmetric_and_between_nought_and_one(a, b):
    assert 0.0 <= fuzzy_match(a, b) == fuzzy_match(b, a) <= 1.0


@given(WORDS, WORDS)
def test_only_the_same_text_is_perfectly_similar(a, b):
    assert (fuzzy_match(a, b) == 1.0) == (a == b)


def test_burying_the_answer_in_a_long_text_does_not_pay():
    assert fuzzy_match("Paris" + " or Rome" * 50, "Paris") < 0.1


def test_the_score_is_the_similarity_and_the_reason_shows_it():
    similar = grade("abxd", {"want": "abcd"})

    assert similar.score == 0.75
    assert similar.reason == "0.750 similar to 'abcd', got 'abxd'"


def test_a_missing_path_leaves_the_sample_ungraded():
    assert grade("a", {}) == Grade(None, "item.want is missing", ErrorKind.invalid_variable_error)
