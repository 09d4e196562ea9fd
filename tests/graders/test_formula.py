import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graders.formula import MAX_DEPTH, MAX_LENGTH, Formula, FormulaDomainError, FormulaError
from graders.types import is_score

SCORES = {"a": 0.5, "b": 2.0, "x": 3.0, "zero": 0.0}


def value(text: str, **scores: float) -> float:
    return Formula.parse(text, SCORES | scores).evaluate(SCORES | scores)


def mistake(text: str) -> FormulaError:
    with pytest.raises(FormulaError) as caught:
        Formula.parse(text, SCORES)
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("a", 0.5),
        ("0.8*a + 0.2*max(b, 0)", 0.8),
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("8 - 4 - 2", 2),
        ("8 / 4 / 2", 1),
        ("2^3^2", 512),
        ("2**3**2", 512),
        ("-x^2", -9),
        ("(-x)^2", 9),
        ("2^-1", 0.5),
        ("2^-1^2", 0.5),
        ("--x", 3),
        ("+x - -x", 6),
        ("2 * -x", -6),
        (".5 + 1. + 1e-1 + 2E+1", 21.6),
        ("min(3)", 3),
        ("min(3, 1, 2)", 1),
        ("max(3, x*2, 2)", 6),
        ("abs(-x)", 3),
        ("floor(-1.5)", -2),
        ("ceil(-1.5)", -1),
        ("exp(0)", 1),
        ("sqrt(9)", 3),
        ("log(exp(2))", 2),
        ("\n ( a\t) ", 0.5),
    ],
)
def test_a_formula_means_what_it_means_on_paper(text: str, expected: float) -> None:
    assert value(text) == pytest.approx(expected)


def test_a_grader_may_be_called_like_a_function_and_both_are_told_apart() -> None:
    assert value("max(max, 1)", max=7.0) == 7.0


def test_a_long_sum_is_not_a_deep_one() -> None:
    assert value("+".join(["1"] * 2000)) == 2000


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("  ", 2),
        ("1 +", 3),
        ("1 2", 2),
        ("2x", 1),
        ("a b", 2),
        ("(1", 2),
        ("1)", 1),
        ("()", 1),
        ("a + nope", 4),
        ("1 + max", 4),
        ("nope(1)", 0),
        ("a(1)", 0),
        ("1 + max()", 4),
        ("abs(1, 2)", 0),
        ("sqrt()", 0),
        ("max(1,)", 6),
        ("a < b", 2),
        ("a == b", 2),
        ("a.b", 1),
        ("a % b", 2),
        ("a // b", 3),
        ("a; b", 1),
        ("'a'", 0),
        ("1 + 1e999", 4),
        ("1_000", 1),
        ("٣", 0),
    ],
)
def test_a_mistake_is_refused_with_its_position(text: str, position: int) -> None:
    assert mistake(text).position == position


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    assert str(mistake("a + nope")) == "unknown name 'nope', known are a, b, x, zero (at position 4)"


@pytest.mark.parametrize("opening", ["(", "-", "2^", "abs(", "1*(", "-("])
def test_nesting_beyond_the_limit_is_refused_and_does_not_exhaust_the_stack(opening: str) -> None:
    """Each way to nest, once as deep as the length allows and once just past the limit."""
    closing = ")" * opening.count("(")

    for levels in (MAX_LENGTH // 8, MAX_DEPTH + 1):
        assert "deep" in mistake(opening * levels + "1" + closing * levels).message


def test_nesting_within_the_limit_is_fine() -> None:
    levels = MAX_DEPTH - 1

    assert value("(" * levels + "a" + ")" * levels) == 0.5


def test_a_formula_beyond_the_length_limit_is_refused() -> None:
    assert mistake("1" + " " * MAX_LENGTH).position == MAX_LENGTH


@pytest.mark.parametrize(
    "text",
    [
        "1 / zero",
        "log(zero)",
        "log(-1)",
        "sqrt(-1)",
        "zero ^ -1",
        "(-8) ^ 0.5",
        "exp(1000)",
        "10 ^ 400",
        "1e308 * 10",
        "min(1, 1e308 * 10)",
        "1 / (1e308 * 10)",
    ],
)
def test_leaving_the_finite_real_numbers_is_an_error_even_where_a_later_step_would_hide_it(text: str) -> None:
    with pytest.raises(FormulaDomainError, match="has no finite value"):
        value(text)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_does_not_pass_through(score: float) -> None:
    with pytest.raises(FormulaDomainError, match="a is"):
        value("min(a, 1)", a=score)


def test_the_message_shows_the_step_that_failed() -> None:
    with pytest.raises(FormulaDomainError, match=r"^3 / 0 has no finite value$"):
        value("1 + x / zero")


@given(st.text(alphabet="ab1.+-*/^(),e xmin", max_size=40))
def test_any_text_is_either_a_formula_or_a_mistake_within_it(text: str) -> None:
    try:
        Formula.parse(text, SCORES)
    except FormulaError as error:
        assert 0 <= error.position <= len(text)


NUMBERS = st.integers(0, 9).map(lambda digit: f"{digit}.0")  # floats, since Python's integers never overflow
NAMES = st.sampled_from(sorted(SCORES))


def expressions(operators: str) -> st.SearchStrategy[str]:
    def larger(smaller: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.tuples(smaller, st.sampled_from(operators), smaller).map(" ".join),
            smaller.map(lambda inner: f"({inner})"),
            smaller.map(lambda inner: f"-{inner}"),
            st.tuples(st.sampled_from(["min", "max"]), smaller, smaller).map(
                lambda t: f"{t[0]}({t[1]}, {t[2]})"
            ),
            smaller.map(lambda inner: f"abs({inner})"),
        )

    return st.recursive(NUMBERS | NAMES, larger, max_leaves=6)


def python_value(text: str) -> float | None:
    """What Python makes of the formula, None where it leaves the real numbers."""
    try:
        number = eval(text.replace("^", "**"), {}, dict(SCORES))
    except ArithmeticError:
        return None
    return number if isinstance(number, float) and math.isfinite(number) and is_score(number) else None


@given(expressions("+-*"))
def test_sums_and_products_are_exactly_those_of_python(text: str) -> None:
    assert value(text) == python_value(text)


@given(expressions("+-*/^"))
def test_a_formula_has_the_value_python_gives_it_or_neither_has_one(text: str) -> None:
    expected = python_value(text)

    if expected is None:
        with pytest.raises(FormulaDomainError):
            value(text)
    else:
        assert value(text) == expected


@pytest.mark.parametrize("text", ["1e16 + a", "-1e200 * b"])
def test_a_value_too_large_for_a_score_is_none(text: str) -> None:
    with pytest.raises(FormulaDomainError, match=r"is not from -1e\+15 to 1e\+15"):
        value(text)
