"""Locked folders for temporary files."""

import errno
from pathlib import Path
from typing import NoReturn

import pytest

from graders.sandbox import folders


def test_a_file_system_without_locks_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)

    with pytest.raises(OSError, match="cannot be locked"), folders.private("regraft-run-", str(tmp_path)):
        pass

    assert list(tmp_path.iterdir()) == []
