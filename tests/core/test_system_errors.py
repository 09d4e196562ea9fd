"""Errors of files are sentences, for the service and the client."""

import errno
import os
from pathlib import Path

import pytest

from core.system_errors import file_problem


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_no_error_of_a_file_is_shown_as_a_number_and_each_names_the_file(number: int) -> None:
    said = file_problem(OSError(number, os.strerror(number), "/data/a"))

    assert "/data/a" in said
    assert "Errno" not in said


def test_the_common_errors_have_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    paths = {
        tmp_path / "none": "does not exist; check the path",
        tmp_path: "is a folder; name a file",
        tmp_path / "file" / "inside": "is a file and no folder; check the path",
    }

    for path, remedy in paths.items():
        with pytest.raises(OSError, match="Errno") as raised:
            path.read_text()
        assert file_problem(raised.value).endswith(remedy)


def test_a_move_to_a_place_that_is_taken_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("from", "to"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "inside").touch()

    for moved, place in (("from", "to"), ("file", "to")):
        with pytest.raises(OSError, match="Errno") as raised:
            (tmp_path / moved).replace(tmp_path / place)
        assert file_problem(raised.value).startswith(f"{tmp_path / place} ")


def test_an_error_without_a_file_keeps_its_own_sentence() -> None:
    assert (
        file_problem(FileNotFoundError("The job has no checkpoint yet.")) == "The job has no checkpoint yet."
    )
    assert file_problem(OSError(errno.ENOMEM, "Cannot allocate memory")) == "Cannot allocate memory"
