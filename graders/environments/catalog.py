"""Find environments of python graders on this machine."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

DEFAULT = "2025-05-08"
FORMAT = 1
MARKER = "environment.json"
PACKAGES, CORPORA = "packages", "nltk_data"

_PINS = Path(__file__).parent


class UnknownEnvironment(ValueError):
    """There is no environment of this name; the message lists the known ones."""


class EnvironmentNotBuilt(RuntimeError):
    """The environment is not on this machine; the message has the command that builds it."""


@dataclass(frozen=True)
class Interpreter:
    """A Python without any packages: its program, the folders of its standard library, and libpython."""

    program: str
    standard: tuple[str, ...]
    libraries: tuple[str, ...] = ()

    @classmethod
    def own(cls) -> Interpreter:
        """The Python that this process runs on, without the virtual environment around it."""
        paths = sysconfig.get_paths()
        folders = {str(Path(paths[name]).resolve()) for name in ("stdlib", "platstdlib")}
        # In a virtual environment, platstdlib is a folder of its own that has no library in it.
        standard = {folder for folder in folders if Path(folder, "os.py").exists()} or folders
        libraries = map(str, Path(sys.base_prefix, "lib").glob("libpython*"))
        return cls(str(Path(sys.executable).resolve()), tuple(sorted(standard)), tuple(sorted(libraries)))


@dataclass(frozen=True)
class Environment:
    """A Python and the packages that graders may import with it. Without a folder: the standard library alone."""

    tag: str
    interpreter: Interpreter
    folder: Path | None = None

    @property
    def packages(self) -> str | None:
        return None if self.folder is None else str(self.folder / PACKAGES)

    @property
    def corpora(self) -> str | None:
        return None if self.folder is None else str(self.folder / CORPORA)


def default_folder() -> Path:
    """Where environments are unless a caller says otherwise: beside the installed service."""
    return Path(sys.prefix, "share/regraft/graders")


def known() -> tuple[str, ...]:
    """The tags that this version has pins for."""
    return tuple(sorted(file.stem for file in _PINS.glob("*.txt") if not file.stem.endswith(".nltk")))


def pins(tag: str) -> Path:
    """The file of pins, name==version, of all that is installed.

    Raises:
        UnknownEnvironment: this version has no environment of this name.
    """
    if tag not in known():
        raise UnknownEnvironment(f"there is no environment {tag!r}; there is {', '.join(map(repr, known()))}")
    return _PINS / f"{tag}.txt"


def corpora_source(tag: str) -> tuple[str, str]:
    """The pin of the package that ships data for NLTK, and the folder in it."""
    [line] = [
        line
        for line in (_PINS / f"{tag}.nltk.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    requirement, _, folder = line.partition(" ")
    return requirement, folder


@lru_cache(maxsize=8)
def digest(tag: str) -> str:
    """Of all the pins: what was built from other ones is out of date."""
    return hashlib.sha256(pins(tag).read_bytes() + (_PINS / f"{tag}.nltk.txt").read_bytes()).hexdigest()


@lru_cache(maxsize=1)
def bare() -> Environment:
    """This process's own Python without any packages."""
    return Environment("", Interpreter.own())


def find(folder: Path, tag: str = DEFAULT) -> Environment:
    """The environment as it is built in `folder`.

    Raises:
        UnknownEnvironment: this version has none of this name.
        EnvironmentNotBuilt: no complete build for these pins and an existing Python.
    """
    expected = digest(tag)
    try:
        built = json.loads((folder / tag / MARKER).read_text())
        interpreter = Interpreter(built["python"], tuple(built["standard"]), tuple(built["libraries"]))
        up_to_date = built["format"] == FORMAT and built["pins"] == expected
    except (OSError, ValueError, KeyError, TypeError):
        raise _not_built(tag, "is not built on this server") from None
    if not up_to_date:
        raise _not_built(tag, "is built on this server for another version of it")
    if not Path(interpreter.program).exists():
        raise _not_built(tag, "is built on this server for a Python that is no longer there")
    return Environment(tag, interpreter, (folder / tag).absolute())


def _not_built(tag: str, what: str) -> EnvironmentNotBuilt:
    return EnvironmentNotBuilt(
        f"The environment {tag!r} of python graders {what}; its operator builds it with "
        f"`regraft-server environments build {tag}`."
    )
