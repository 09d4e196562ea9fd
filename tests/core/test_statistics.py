import pytest

from core.statistics import student


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (30, 2.042), (120, 1.980)]
)
def test_the_quantile_of_student_is_that_of_the_published_table(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, abs=5e-4)
