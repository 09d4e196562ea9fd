"""The order in which the tests of this project run."""

from collections import Counter
from pathlib import Path

from tests.order import LONGEST, ROOT, TOGETHER, UNITS, longest_first, part, shuffled, unit

SHORT, SECOND, FIRST = ROOT / "test_a.py", ROOT / LONGEST[1], ROOT / LONGEST[0]
TESTS = [(file, number) for file in (SHORT, SECOND, FIRST) for number in range(5)]


def file_of(test: tuple[Path, int]) -> Path:
    return test[0]


def test_files_that_take_longest_come_first_and_stay_in_order() -> None:
    assert longest_first(TESTS, file_of) == [*TESTS[10:], *TESTS[5:10], *TESTS[:5]]


def test_a_listed_file_exists() -> None:
    assert [name for name in (*LONGEST, *UNITS) if not (ROOT / name).exists()] == []
    assert [name for names in TOGETHER for name in names if not [*ROOT.glob(f"{name}*")]] == []


def test_a_file_is_one_unit() -> None:
    assert unit("tests/core/test_jobs.py::test_a[1::2]") == unit("tests/core/test_jobs.py::TestB::test_c")
    assert unit("tests/core/test_jobs.py::test_a") != unit("tests/core/test_keys.py::test_a")


def test_files_that_share_a_service_are_one_unit() -> None:
    assert unit("tests/console/test_jobs.py::test_a") == unit("tests/console/test_studio.py::test_b")
    assert unit("tests/e2e/test_cli.py::test_a") == unit("tests/e2e/test_connections.py::test_b")
    assert unit("tests/e2e/test_cli.py::test_a") != unit("tests/e2e/test_serving.py::test_b")


def test_a_long_file_whose_tests_share_nothing_is_several_units() -> None:
    tests = [f"tests/api/test_schema.py::test_a[{number}]" for number in range(100)]

    sizes = Counter(map(unit, tests))
    assert len(sizes) == UNITS["api/test_schema.py"] and min(sizes.values()) > 20


def test_a_seed_always_gives_the_same_order_of_all_tests() -> None:
    order = shuffled(TESTS, file_of, seed=1)

    assert order == shuffled(TESTS, file_of, seed=1) != TESTS
    assert sorted(order) == sorted(TESTS)


def test_a_shuffled_file_stays_together() -> None:
    files = [file_of(test) for test in shuffled(TESTS, file_of, seed=1)]

    assert [files[first : first + 5] for first in (0, 5, 10)] == [[files[n]] * 5 for n in (0, 5, 10)]


def test_parts_of_the_suite_have_whole_units_and_every_test_once() -> None:
    tests = [f"{name}-{number}" for name in "abcdefg" for number in range(3)]

    parts = [part(tests, lambda test: test[0], number, 4) for number in (1, 2, 3, 4)]

    assert sorted(test for part in parts for test in part) == tests
    assert [{test[0] for test in part} for part in parts] == [{"a", "e"}, {"b", "f"}, {"c", "g"}, {"d"}]
