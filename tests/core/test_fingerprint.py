"""The hash of a model's files that its copies share."""

import os
from pathlib import Path

from core import fingerprint


def test_copies_of_a_folder_have_one_hash_whatever_their_times(tmp_path: Path) -> None:
    for name in ("first", "copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    os.utime(tmp_path / "copy" / "config.json", (1, 1))
    first, copy = (fingerprint.of_copies(tmp_path / name) for name in ("first", "copy"))
    assert first == copy != ""

    (tmp_path / "copy" / "config.json").write_text("[]")

    assert fingerprint.of_copies(tmp_path / "copy") != first


def test_a_folder_that_cannot_be_read_has_no_hash(tmp_path: Path) -> None:
    assert fingerprint.of_copies(tmp_path / "none") == ""
