"""Changed files are read again, as a ConfigMap changes them. After an invalid one the earlier content is in force."""

import errno
from pathlib import Path

import pytest

from core.reloaded import EVERY_SECONDS, Reloaded


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Mounted:
    """A file in a volume of a ConfigMap: a link to a folder, which is replaced at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "..data" / "models.toml"
        self.versions = 0

    def write(self, text: str) -> None:
        self.versions += 1
        version = self.folder / f"..v{self.versions}"
        version.mkdir()
        (version / "models.toml").write_text(text)
        link = self.folder / "..new"
        link.symlink_to(version.name)
        link.replace(self.folder / "..data")


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    mounted = Mounted(tmp_path)
    mounted.write("1")
    return mounted


def test_a_changed_file_is_read_again(mounted: Mounted) -> None:
    clock = Clock()
    value = Reloaded(lambda: int(mounted.file.read_text()), [mounted.file, None], clock)
    mounted.write("2")

    assert value() == 1, "it looks once a second"
    clock.now += EVERY_SECONDS
    assert value() == 2


def test_an_unchanged_file_is_read_once(mounted: Mounted) -> None:
    clock, reads = Clock(), []
    value = Reloaded(lambda: reads.append(1), [mounted.file], clock)
    for _ in range(3):
        clock.now += EVERY_SECONDS
        value()

    assert len(reads) == 1


def test_an_invalid_file_leaves_the_earlier_content_in_force_until_it_is_mended(mounted: Mounted) -> None:
    clock = Clock()
    value = Reloaded(lambda: int(mounted.file.read_text()), [mounted.file], clock)
    mounted.write("two")
    clock.now += EVERY_SECONDS
    assert value() == 1

    mounted.write("3")
    clock.now += EVERY_SECONDS
    assert value() == 3


def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(mounted: Mounted) -> None:
    clock = Clock()
    causes: list[Exception] = []

    def read() -> int:
        if causes:
            raise ValueError("models.toml cannot be read") from causes.pop()
        return int(mounted.file.read_text())

    value = Reloaded(read, [mounted.file], clock)
    mounted.write("2")
    causes.append(OSError(errno.EMFILE, "Too many open files"))
    clock.now += EVERY_SECONDS
    assert value() == 1

    clock.now += EVERY_SECONDS
    assert value() == 2


def test_a_file_that_is_invalid_at_the_start_is_an_error(mounted: Mounted) -> None:
    mounted.write("one")

    with pytest.raises(ValueError, match="one"):
        Reloaded(lambda: int(mounted.file.read_text()), [mounted.file])
