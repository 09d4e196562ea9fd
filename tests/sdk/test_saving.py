"""Files that appear only when complete."""

from pathlib import Path

import pytest
from regraft._rules.system_errors import file_problem
from regraft.saving import atomic_file


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    with atomic_file(path) as first, atomic_file(path) as second:
        first.write(b"1" * 10)
        second.write(b"2" * 5)
        first.write(b"1" * 10)

    assert path.read_bytes() == b"1" * 20
    assert list(tmp_path.iterdir()) == [path]


def test_a_temporary_file_cannot_be_foreseen(tmp_path: Path) -> None:
    """Who can write into the folder could put a link to another file in its place."""
    names = set()
    for _ in range(2):
        with atomic_file(tmp_path / "rows.jsonl"):
            names |= {one.name for one in tmp_path.iterdir() if one.suffix == ".part"}

    assert len(names) == 2


def test_a_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()

    with atomic_file(tmp_path / "rows.jsonl"):
        pass

    assert (tmp_path / "rows.jsonl").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), atomic_file(tmp_path / "rows.jsonl"):
        raise KeyError

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_created_is_named_and_not_the_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / (
        "a" * 255
    )  # the longest name that a filesystem has, so that a temporary one is too long

    with pytest.raises(OSError, match="too long") as raised, atomic_file(path):
        pass

    assert raised.value.filename == str(path)


def test_a_path_that_is_a_loop_of_links_or_has_a_nul_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")

    for name, words in (("loop", "levels of symbolic links"), ("loop/a", "symbolic links"), ("a\0b", "null")):
        with pytest.raises(OSError, match=words) as raised, atomic_file(tmp_path / name):
            pass

        assert file_problem(raised.value).startswith(f"{tmp_path / name}: ")


def test_a_file_that_cannot_be_replaced_is_named_and_not_the_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    with pytest.raises(IsADirectoryError) as raised, atomic_file(path):
        path.mkdir()

    assert file_problem(raised.value) == f"{path} is a folder; name a file"
    assert list(tmp_path.iterdir()) == [path]
