import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graders.builtin.text_similarity import (
    METRICS,
    Metric,
    TextSimilarity,
    bleu,
    fuzzy_match,
    gleu,
    meteor,
)
from graders.template import Template
from graders.types import ErrorKind, Grade, Sample

WORDS = st.text(alphabet="abc ", max_size=12)


def grade(got: str, row: dict[str, Any], metric: Metric = "fuzzy_match") -> Grade:
    templates = Template.parse("{{sample.output_text}}"), Template.parse("{{item.want}}")
    return asyncio.run(TextSimilarity("similar", *templates, metric).grade(Sample(got), row))


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
def test_similarity_is_one_less_the_share_of_edited_characters(a: str, b: str, score: float) -> None:
    assert fuzzy_match(a, b) == pytest.approx(score)


@given(WORDS, WORDS)
def test_similarity_is_symmetric_and_between_nought_and_one(a: Any, b: Any) -> None:
    assert 0.0 <= fuzzy_match(a, b) == fuzzy_match(b, a) <= 1.0


@given(WORDS, WORDS)
def test_only_the_same_text_is_perfectly_similar(a: Any, b: Any) -> None:
    assert (fuzzy_match(a, b) == 1.0) == (a == b)


def test_burying_the_answer_in_a_long_text_does_not_pay() -> None:
    assert fuzzy_match("Paris" + " or Rome" * 50, "Paris") < 0.1


def test_the_score_is_the_similarity_and_the_reason_shows_it() -> None:
    similar = grade("abxd", {"want": "abcd"})

    assert similar.score == 0.75
    assert similar.reason == "0.750 similar to 'abcd', got 'abxd'"


def test_a_missing_path_leaves_the_sample_ungraded() -> None:
    assert grade("a", {}) == Grade(None, "item.want is missing", ErrorKind.invalid_variable_error)


SENTENCE = "the quick brown fox jumps over it"


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_every_metric_knows_the_same_from_the_altogether_different(metric: Metric) -> None:
    assert METRICS[metric](SENTENCE, SENTENCE) > 0.99
    assert METRICS[metric]("0 1 2 3 4 5", SENTENCE) < 0.25
    assert METRICS[metric]("", "") == 1.0
    assert METRICS[metric]("", SENTENCE) == METRICS[metric](SENTENCE, "") == 0.0


@pytest.mark.parametrize("metric", sorted(METRICS))
@given(a=WORDS, b=WORDS)
def test_every_metric_stays_between_nought_and_one(metric: Metric, a: Any, b: Any) -> None:
    assert 0.0 <= METRICS[metric](a, b) <= 1.0


@pytest.mark.parametrize(
    ("metric", "score"),
    [
        ("rouge_1", 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)),  # a, b of three got and of four wanted
        ("rouge_2", 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)),  # "a b"
        ("rouge_3", 0.0),
        ("rouge_l", 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)),
    ],
)
def test_rouge_is_the_f_measure_of_the_n_grams_in_common(metric: Metric, score: float) -> None:
    assert METRICS[metric]("a b x", "a b c d") == pytest.approx(score)


def test_rouge_writes_nothing_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        METRICS["rouge_l"]("a b x", "a b c d")

    assert caplog.records == []


def test_rouge_l_allows_gaps_where_rouge_2_does_not() -> None:
    assert METRICS["rouge_2"]("a x b x c", "a b c") == 0.0
    assert METRICS["rouge_l"]("a x b x c", "a b c") == pytest.approx(0.75)


def test_gleu_is_the_share_of_n_grams_in_common() -> None:
    """Of the ten n-grams of four words, "a", "b", "c", "a b", "b c" and "a b c" are in common."""
    assert gleu("a b c x", "a b c d") == pytest.approx(0.6)


def test_bleu_of_a_sentence_without_a_common_4_gram_is_low_and_not_nothing() -> None:
    assert 0.0 < bleu("a b c x", "a b c d") < gleu("a b c x", "a b c d")


def test_bleu_punishes_an_answer_that_is_too_short() -> None:
    assert bleu("a b", "a b c d") == pytest.approx(0.3679, abs=1e-4)  # e^(1 - 4/2)


def test_meteor_matches_stems_and_not_synonyms() -> None:
    assert meteor("jumping", "jumped") == meteor("jump", "jump") == 0.5
    assert meteor("big", "large") == 0.0


@pytest.mark.slow
def test_texts_that_take_too_long_to_measure_are_not_judged() -> None:
    words = "a " * 20_000
    ungraded = grade(words, {"want": words}, "rouge_l")

    assert (ungraded.score, ungraded.error) == (None, ErrorKind.other_error)
    assert ungraded.reason.startswith("cannot measure rouge_l of 40000 characters: it takes more than ")


@pytest.mark.parametrize("metric", ["fuzzy_match", "bleu", "meteor", "rouge_2"])
@pytest.mark.slow
def test_long_texts_are_measured_like_short_ones(metric: Metric) -> None:
    """Above 2,000 characters in another process."""
    got, want = "the cat sat on the mat, " * 100, "the cat sat on a mat, " * 100

    assert grade(got, {"want": want}, metric).score == METRICS[metric](got, want)
