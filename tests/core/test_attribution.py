"""Shares of groups and of parts of a grader in the update of a step, against sums over all orders and subsets."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.jobs.hyperparameter_groups import MEAN_OF_ANSWERS
from core.results import what_if
from core.results.attribution import (
    LEAST,
    Effects,
    LearnedAnswer,
    group_shares,
    groups_of_half,
    part_shares,
    shapley_effects,
    weighted_effects,
)
from core.rewards import equal
from worker.training.objectives.registry import OBJECTIVES

WEIGHTS = {"a": 0.7, "b": 0.2, "c": -0.1}
SCORES = st.floats(-2, 2, allow_nan=False).map(lambda value: round(value, 3))


def answer(
    group: int, advantage: float, tokens: int = 1, score: float | None = None, **parts: float
) -> LearnedAnswer:
    return LearnedAnswer((1, "train", group), group + 1, score, advantage, tokens, parts)


def shares_of(
    answers: Sequence[LearnedAnswer],
    names: Sequence[str],
    formula: Callable[[Mapping[str, float]], float | None],
    *,
    by_token: bool = False,
) -> dict[str, float] | None:
    return part_shares(answers, list(names), shapley_effects(list(names), formula), by_token=by_token)


def sizes_of(answers: Sequence[LearnedAnswer], effects: Effects) -> float:
    """The sum of |A_i phi_ik| of the answers of one group."""
    means = {name: fmean(one.parts[name] for one in answers) for name in "abc"}
    return math.fsum(
        abs(one.advantage * value) for one in answers for value in (effects(one.parts, means) or {}).values()
    )


def test_each_token_weighs_the_same_or_each_answer() -> None:
    answers = [answer(0, 1.0, 10), answer(0, -1.0, 30), answer(1, 2.0, 10), answer(1, -2.0, 10)]

    by_answer = {one.group: one.share for one in group_shares(answers, by_token=False)}
    by_token = {one.group: one.share for one in group_shares(answers, by_token=True)}

    assert by_answer == {0: pytest.approx(2 / 6), 1: pytest.approx(4 / 6)}
    assert by_token == {0: pytest.approx(40 / 80), 1: pytest.approx(40 / 80)}


def test_losses_weigh_answers_or_tokens_alike_as_their_objectives_do() -> None:
    assert {name for name, objective in OBJECTIVES.items() if objective.mean == "answers"} == MEAN_OF_ANSWERS


def test_groups_come_with_the_largest_share_first_and_say_what_they_are() -> None:
    answers = [answer(0, 0.0, score=1.0), answer(1, 0.5, score=1.0), answer(1, -0.5, score=None)]

    first, second = group_shares(answers, by_token=False)

    assert (first.group, first.line, first.share, first.answers, first.with_advantage) == (1, 2, 1.0, 2, 2)
    assert (first.mean_reward, second.mean_reward) == (1.0, 1.0)
    assert (second.share, second.with_advantage) == (0.0, 0)


@pytest.mark.parametrize(
    ("advantages", "half"),
    [([], 0), ([0.0, 0.0], 0), ([1.0], 1), ([3, 2, 2, 1], 2), ([1] * 8, 4), ([1] * 10, 5), ([1] * 48, 24)],
)
def test_half_of_an_update_is_counted_in_groups(advantages: Sequence[float], half: int) -> None:
    shares = group_shares([answer(group, one) for group, one in enumerate(advantages)], by_token=False)

    assert groups_of_half(shares) == half


@given(st.lists(st.tuples(SCORES, SCORES, SCORES), min_size=2, max_size=6))
def test_the_parts_of_a_weighted_sum_have_the_shares_of_its_terms(
    scores: Sequence[tuple[float, float, float]],
) -> None:
    def total(parts: Mapping[str, float]) -> float:
        return math.fsum(weight * parts[name] for name, weight in WEIGHTS.items())

    rows = [dict(zip("abc", row, strict=True)) for row in scores]
    mean = fmean(map(total, rows))
    answers = [LearnedAnswer((1, "train", 0), 1, None, total(row) - mean, 1, row) for row in rows]

    found = shares_of(answers, "abc", total)

    terms = {
        name: math.fsum(
            one.advantage * weight * (one.parts[name] - fmean(row[name] for row in rows)) for one in answers
        )
        for name, weight in WEIGHTS.items()
    }
    whole = math.fsum(terms.values())
    if found is None:
        assert whole <= LEAST * sizes_of(answers, weighted_effects(WEIGHTS))
        return
    assert found == pytest.approx({name: term / whole for name, term in terms.items()}, abs=1e-6)
    assert part_shares(answers, list("abc"), weighted_effects(WEIGHTS), by_token=False) == pytest.approx(
        found, abs=1e-6
    )


@given(st.lists(st.tuples(SCORES, SCORES, SCORES), min_size=2, max_size=5))
def test_the_parts_of_any_formula_have_their_mean_effect_over_all_orders(
    scores: Sequence[tuple[float, float, float]],
) -> None:
    def product(parts: Mapping[str, float]) -> float:
        return parts["a"] * parts["b"] + max(parts["c"], parts["a"])

    rows = [dict(zip("abc", row, strict=True)) for row in scores]
    means = {name: fmean(row[name] for row in rows) for name in "abc"}
    mean = fmean(map(product, rows))
    answers = [LearnedAnswer((1, "train", 0), 1, None, product(row) - mean, 1, row) for row in rows]

    found = shares_of(answers, "abc", product)

    effects = dict.fromkeys("abc", 0.0)
    for one in answers:
        for order in permutations("abc"):
            now = dict(means)
            for name in order:
                before = product(now)
                now[name] = one.parts[name]
                effects[name] += one.advantage * (product(now) - before) / 6
    whole = math.fsum(effects.values())
    if found is None:
        assert whole <= LEAST * sizes_of(answers, shapley_effects(list("abc"), product))
        return
    assert math.fsum(found.values()) == pytest.approx(1.0)
    assert found == pytest.approx({name: effect / whole for name, effect in effects.items()}, abs=1e-6)


def test_a_part_whose_term_the_updates_make_smaller_has_a_negative_share() -> None:
    answers = [answer(0, 0.5, right=1.0, short=0.0), answer(0, -0.5, right=0.0, short=1.0)]

    found = shares_of(answers, ("right", "short"), lambda parts: parts["right"] + 0.5 * parts["short"])

    assert found == pytest.approx({"right": 2.0, "short": -1.0})


def test_parts_count_with_the_shares_of_the_groups_in_which_they_differ() -> None:
    def total(parts: Mapping[str, float]) -> float:
        return parts["a"] + parts["b"]

    answers = [
        *(answer(0, 1.0 - 2 * member, 10, a=1.0 - member, b=0.0) for member in (0, 1)),
        *(answer(1, 1.0 - 2 * member, 990, a=0.0, b=1.0 - member) for member in (0, 1)),
    ]

    assert shares_of(answers, "ab", total) == pytest.approx({"a": 0.5, "b": 0.5})
    assert shares_of(answers, "ab", total, by_token=True) == pytest.approx({"a": 0.01, "b": 0.99})


def test_each_step_counts_the_same() -> None:
    """The loss of a step is divided by its own answers or tokens."""
    answers = [
        LearnedAnswer((step, "train", group), 1, None, advantage, tokens, {})
        for step, tokens in ((1, 100), (2, 1000))
        for group in (0, 1)
        for advantage in (1.0, -1.0)
    ]
    silent = [LearnedAnswer((3, "train", 0), 1, None, 0.0, 5000, {})]

    shares = group_shares([*answers, *silent], by_token=True)

    assert [one.share for one in shares] == [0.25] * 4 + [0.0]


def test_groups_whose_advantages_do_not_follow_the_score_are_left_out() -> None:
    """The best answer of the first is masked, so its mean is above the others: what is left points elsewhere."""
    masked = [answer(0, 0.0, a=1.0), answer(0, 0.3, a=0.0), answer(0, -0.1, a=0.2)]
    fine = [answer(1, 1.0, a=2.0), answer(1, -1.0, a=0.0)]

    assert shares_of(masked, "a", lambda parts: parts["a"]) is None
    assert shares_of([*masked, *fine], "a", lambda parts: parts["a"]) == pytest.approx({"a": 1.0})


def test_groups_in_which_the_formula_has_no_value_are_left_out() -> None:
    def ratio(parts: Mapping[str, float]) -> float | None:
        return None if parts["b"] == 0.0 else parts["a"] / parts["b"]

    without = [answer(0, 1.0, a=1.0, b=1.0), answer(0, -1.0, a=1.0, b=-1.0)]  # the mean of b is 0
    fine = [answer(1, 1.0, a=2.0, b=1.0), answer(1, -1.0, a=0.0, b=1.0)]

    assert shares_of(without, "ab", ratio) is None
    assert shares_of([*without, *fine], "ab", ratio) == pytest.approx({"a": 1.0, "b": 0.0})


def test_answers_that_lack_the_score_of_a_part_are_left_out() -> None:
    answers = [answer(0, 5.0, a=9.0), answer(0, 1.0, a=1.0, b=0.0), answer(0, -1.0, a=0.0, b=0.0)]

    assert shares_of(answers, "ab", lambda parts: parts["a"] + parts["b"]) == pytest.approx(
        {"a": 1.0, "b": 0.0}
    )


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=6), max_size=4))
def test_signal_by_the_size_of_a_group_is_the_mean_over_its_subsets(groups: Sequence[list[float]]) -> None:
    found = what_if.signal_by_group_size(groups)

    most = max(map(len, groups), default=0)
    for size, share in found.items():
        shares = [
            fmean(not equal(min(some), max(some)) for some in combinations(scores, size))
            for scores in groups
            if len(scores) == most
        ]
        assert share == pytest.approx(fmean(shares))
    assert set(found) == {size for size in (2, 4, most) if 2 <= size <= most}


@pytest.mark.parametrize(
    ("after", "cosine"),
    [((0.0, 1.0), 1.0), ((1.0, 0.0), -1.0), ((3.0, 5.0), 1.0), ((1.0, 1.0), None), ((None, 1.0), None)],
)
def test_the_cosine_of_advantages_says_whether_the_same_would_be_learned(
    after: tuple[float | None, float], cosine: float | None
) -> None:
    answers = [
        what_if.Rescored((1, "train", 0), before, new) for before, new in zip((0.0, 1.0), after, strict=True)
    ]

    assert what_if.compare(answers, 0.5).centered_cosine == (
        None if cosine is None else pytest.approx(cosine)
    )
