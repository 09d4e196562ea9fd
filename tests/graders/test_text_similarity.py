import asyncio
import unicodedata
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graders.builtin.text_similarity import (
    Metric,
    TextSimilarity,
    Tokenizer,
    bleu,
    composed,
    fuzzy_match,
    gleu,
    has_no_word,
    ignores_words,
    measure,
    meteor,
    rouge_words,
    too_short,
)
from graders.template import Template
from graders.types import ErrorKind, Grade, Sample

METRICS = sorted(get_args(Metric))
OF_WORDS = [metric for metric in METRICS if metric != "fuzzy_match"]
WORDS = st.text(alphabet="abc ", max_size=12)


def grade(
    got: str, row: dict[str, Any], metric: Metric = "fuzzy_match", tokenizer: Tokenizer | None = None
) -> Grade:
    templates = Template.parse("{{sample.output_text}}"), Template.parse("{{item.want}}")
    return asyncio.run(TextSimilarity("similar", *templates, metric, tokenizer).grade(Sample(got), row))


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


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_knows_the_same_from_the_altogether_different(metric: Metric) -> None:
    assert measure(metric, SENTENCE, SENTENCE) > 0.99
    assert measure(metric, "0 1 2 3 4 5", SENTENCE) < 0.25
    assert measure(metric, "", "") == 1.0
    assert measure(metric, "", SENTENCE) == measure(metric, SENTENCE, "") == 0.0


@pytest.mark.parametrize("metric", METRICS)
@given(a=WORDS, b=WORDS)
def test_every_metric_stays_between_nought_and_one(metric: Metric, a: Any, b: Any) -> None:
    assert 0.0 <= measure(metric, a, b) <= 1.0


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
    assert measure(metric, "a b x", "a b c d") == pytest.approx(score)


def test_rouge_writes_nothing_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        measure("rouge_l", "a b x", "a b c d")

    assert caplog.records == []


def test_rouge_l_allows_gaps_where_rouge_2_does_not() -> None:
    assert measure("rouge_2", "a x b x c", "a b c") == 0.0
    assert measure("rouge_l", "a x b x c", "a b c") == pytest.approx(0.75)


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

    assert grade(got, {"want": want}, metric).score == measure(metric, got, want)


# One text a script, each with another text of the same script that shares no word with it.
SCRIPTS = {
    "Latin": ("Ärger über Öl", "Örger äber Ül"),
    "Cyrillic": ("Добрый день вам всем сегодня", "Злая ночь им никому завтра"),
    "Greek": ("καλημέρα σε όλους τους φίλους", "τα παιδιά παίζουν έξω"),
    "Arabic": ("صباح الخير يا أصدقائي اليوم", "ليل هادئ بلا نجوم"),
    "Hebrew": ("בוקר טוב לכל החברים היום", "לילה שקט בלי כוכבים"),
    "Devanagari": ("हिन्दी में लिखा हुआ पाठ", "बच्चे बाहर खेलते हैं"),
    "Han": ("你好世界今天", "再见月亮明晚"),
    "Kana": ("ラーメンをください", "すしがほしい"),
    "Hangul": ("안녕하세요 여러분 오늘 좋은 날", "밤하늘에 별이 없다"),
    "Thai": ("สวัสดีครับ", "ฝนตก"),
}


@pytest.mark.parametrize("metric", OF_WORDS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_with_the_unicode_tokenizer_every_script_has_words(script: str, metric: Metric) -> None:
    text, other = SCRIPTS[script]

    if too_short(metric, text, "unicode") is None:
        assert measure(metric, text, text, "unicode") > 0.95
        assert measure(metric, text, unicodedata.normalize("NFD", text), "unicode") > 0.95
    assert measure(metric, other, text, "unicode") < 0.35
    assert not has_no_word(metric, text, "unicode")


@pytest.mark.parametrize("metric", OF_WORDS)
@given(a=st.text(st.characters(min_codepoint=32, max_codepoint=126)), b=WORDS)
def test_for_ascii_texts_the_unicode_tokenizer_changes_nothing(metric: Metric, a: str, b: str) -> None:
    assert measure(metric, a, b, "unicode") == measure(metric, a, b)
    assert not ignores_words(metric, a, None)


@given(text=st.text(max_size=40))
def test_without_the_unicode_tokenizer_rouge_reads_the_words_of_rouge_score(text: str) -> None:
    from rouge_score.tokenizers import DefaultTokenizer

    assert rouge_words(text, None) == DefaultTokenizer().tokenize(text)


@pytest.mark.parametrize("metric", ["rouge_1", "rouge_l"])
def test_a_reference_without_a_word_for_rouge_is_named_in_the_reason(metric: Metric) -> None:
    plain = grade("你好", {"want": "你好"}, metric)

    assert plain.score == 0.0
    assert plain.reason.endswith("every answer scores 0, because the reference has no word of a-z and 0-9")
    assert grade("你好", {"want": "你好"}, metric, "unicode") == Grade(
        1.0, "1.000 similar to '你好', got '你好'"
    )


@pytest.mark.parametrize(
    ("metric", "got", "want", "reads"),
    [
        ("rouge_1", "Ärger", "Örger", "only 'rger' of the reference"),
        ("bleu", "你好世界", "你好世界", 'the reference as 1 word; set "tokenizer": "unicode"'),
        ("gleu", "你好 世界", "你好 世界", 'the reference as 2 words; set "tokenizer": "unicode"'),
    ],
)
def test_a_reference_of_which_a_metric_reads_other_words_is_named_in_the_reason(
    metric: Metric, got: str, want: str, reads: str
) -> None:
    wrong = grade(got, {"want": want}, metric)

    assert wrong.score == 1.0
    assert wrong.reason.endswith(f"; {metric} reads {reads}")
    assert "reads" not in grade("anger", {"want": "anger"}, metric).reason


def test_a_reference_with_fewer_words_than_rouge_compares_is_named_in_the_reason() -> None:
    assert grade("blue", {"want": "blue"}, "rouge_2").reason.endswith(
        "has 1 of the 2 words that rouge_2 compares"
    )


@pytest.mark.parametrize(
    ("metric", "text", "ignored"),
    [
        ("rouge_1", "Ärger", True),  # "rger"
        ("rouge_1", "anger", False),
        ("bleu", "Ärger", False),
        ("bleu", "你好世界", True),  # one word
        ("meteor", "हिन्दी", True),  # three words and three vowel signs
        ("fuzzy_match", "你好", False),
    ],
)
def test_a_text_whose_words_a_metric_does_not_read_is_known(metric: Metric, text: str, ignored: bool) -> None:
    assert ignores_words(metric, text, None) == ignored
    assert not ignores_words(metric, text, "unicode")


@pytest.mark.parametrize("words", [1, 2, 5])
def test_meteor_of_equal_texts_is_below_one_by_half_a_cube_of_their_words(words: int) -> None:
    text = " ".join("abcdefgh"[:words])

    assert meteor(text, text) == pytest.approx(1 - 0.5 / words**3)


MARKS = "".join(chr(code) for code in range(0x300, 0x370))


@given(st.text(alphabet="aeIou\u304b\uac00\u1100\u1161\u0344\u1ebf" + MARKS))
def test_marks_in_any_order_are_composed_as_unicode_says(text: str) -> None:
    assert composed(text) == unicodedata.normalize("NFC", text)


def test_a_reference_of_a_million_marks_does_not_hold_up_the_service() -> None:
    """CPython's normalization takes half an hour for it, in which no other thread of the process runs."""
    marks = 500_000
    text = "a" + "\u0301\u0316" * marks

    assert composed(text) == "\u00e1" + "\u0316" * marks + "\u0301" * (marks - 1)
    assert not has_no_word("rouge_1", text, "unicode")
    assert too_short("rouge_2", text, "unicode") == "has 1 of the 2 words that rouge_2 compares"
