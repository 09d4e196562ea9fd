import random

import pytest
from scipy import stats

from core.statistics import (
    average_ranks,
    differences,
    interval,
    paired,
    pearson,
    spearman,
    student,
)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (30, 2.042), (120, 1.980)]
)
def test_the_quantile_of_student_is_that_of_the_published_table(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, abs=5e-4)


@pytest.mark.parametrize("values", [3, 100], ids=["many ties", "few ties"])
def test_correlations_are_those_of_scipy(values: int) -> None:
    draw = random.Random(values)
    first = [float(draw.randrange(values)) for _ in range(200)]
    second = [value + draw.randrange(values) for value in first]

    assert pearson(first, second) == pytest.approx(stats.pearsonr(first, second).statistic, abs=1e-12)
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-12)
    assert average_ranks(second) == stats.rankdata(second).tolist()


def test_values_that_do_not_vary_have_no_correlation() -> None:
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert pearson([1], [1]) is None
    assert pearson([0.1 + 0.2, 0.3, 0.3], [1, 2, 3]) is None


def test_rewards_that_differ_by_rounding_share_a_rank() -> None:
    assert average_ranks([0.1 + 0.2, 0.3, 0.5]) == [1.5, 1.5, 3.0]


def test_a_large_number_of_independent_trials_has_wilsons_interval() -> None:
    share = interval([1.0] * 30 + [0.0] * 970, [1] * 1000)
    reference = stats.binomtest(30, 1000).proportion_ci(0.95, method="wilson")

    assert (share["low"], share["high"]) == pytest.approx((reference.low, reference.high), abs=2e-4)


def test_pairs_with_both_values_are_compared_and_rounding_is_no_difference() -> None:
    """Four of the service's reports compare validations row by row."""
    pairs = paired([(0.1 + 0.2, 0.3), (None, 1.0), (0.5, None), (1.0, 0.25)])

    assert differences(pairs) == [0.0, -0.75]
