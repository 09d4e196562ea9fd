"""The order in which the tests of this project run."""

from pathlib import Path

from tests.order import LONGEST, ROOT, longest_first, part, shuffled

SHORT, SECOND, FIRST = ROOT / "test_a.py", ROOT / LONGEST[1], ROOT / LONGEST[0]
TESTS = [(file, number) for file in (SHORT, SECOND, FIRST) for number in range(5)]


def file_of(test: tuple[Path, int]) -> Path:
    return test[0]


def test_files_that_take_longest_come_first_and_stay_in_order() -> None:
    assert longest_first(TESTS, file_of) == [*TESTS[10:], *TESTS[5:10], *TESTS[:5]]


def test_a_listed_file_exists() -> None:
    assert [name for name in LONGEST if not (ROOT / name).exists()] == []


def test_a_seed_always_gives_the_same_order_of_all_tests() -> None:
    order = shuffled(TESTS, file_of, seed=1)

    assert order == shuffled(TESTS, file_of, seed=1) != TESTS
    assert sorted(order) == sorted(TESTS)


def test_a_shuffled_file_stays_together() -> None:
    files = [file_of(test) for test in shuffled(TESTS, file_of, seed=1)]

    assert [files[first : first + 5] for first in (0, 5, 10)] == [[files[n]] * 5 for n in (0, 5, 10)]


def test_parts_of_the_suite_have_whole_files_and_every_test_once() -> None:
    tests = [f"{name}-{number}" for name in "abcdefg" for number in range(3)]

    parts = [part(tests, lambda test: Path(test[0]), number, 4) for number in (1, 2, 3, 4)]

    assert sorted(test for part in parts for test in part) == tests
    assert [{test[0] for test in part} for part in parts] == [{"a", "e"}, {"b", "f"}, {"c", "g"}, {"d"}]
