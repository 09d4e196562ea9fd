"""Files that appear only when complete."""

import errno
import os
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


@pytest.mark.parametrize("call", ["open", "replace"])
def test_a_file_that_cannot_be_written_is_named_and_not_the_temporary_one(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, *rest: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, call, refused)

    with pytest.raises(PermissionError) as raised, atomic_file(tmp_path / "rows.jsonl"):
        pass

    assert file_problem(raised.value).startswith(
        f"this user may not use or create {tmp_path / 'rows.jsonl'}; change the owner or the mode"
    )
    assert list(tmp_path.iterdir()) == []
