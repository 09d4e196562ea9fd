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
    """This version has no environment of this name. The message lists the known ones."""


class EnvironmentNotBuilt(RuntimeError):
    """The environment is not built on this machine. The message contains the command that builds it."""


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter without packages: its executable, the folders of its standard library, and libpython."""

    program: str
    standard: tuple[str, ...]
    libraries: tuple[str, ...] = ()

    @classmethod
    def own(cls) -> Interpreter:
        """Return the interpreter of this process, without its virtual environment."""
        paths = sysconfig.get_paths()
        folders = {str(Path(paths[name]).resolve()) for name in ("stdlib", "platstdlib")}
        # In a virtual environment, platstdlib is a separate folder without a standard library.
        standard = {folder for folder in folders if Path(folder, "os.py").exists()} or folders
        libraries = map(str, Path(sys.base_prefix, "lib").glob("libpython*"))
        return cls(str(Path(sys.executable).resolve()), tuple(sorted(standard)), tuple(sorted(libraries)))


@dataclass(frozen=True)
class Environment:
    """An interpreter and the packages that graders may import. If `folder` is None, only the standard library."""

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
    """Return the default folder of environments, which belongs to this installation."""
    return Path(sys.prefix, "share/regraft/graders")


def environment_tags() -> tuple[str, ...]:
    """Return the tags of the environments that this version defines."""
    return tuple(sorted(file.stem for file in _PINS.glob("*.txt") if not file.stem.endswith(".nltk")))


def pins(tag: str) -> Path:
    """Return the requirements file of an environment, which pins each package as name==version.

    Raises:
        UnknownEnvironment: This version has no environment of this name.
    """
    if tag not in environment_tags():
        raise UnknownEnvironment(
            f"there is no environment {tag!r}; there is {', '.join(map(repr, environment_tags()))}"
        )
    return _PINS / f"{tag}.txt"


def corpora_source(tag: str) -> tuple[str, str]:
    """Return the pinned requirement of the package that ships data for NLTK, and the folder of the data in it."""
    [line] = [
        line
        for line in (_PINS / f"{tag}.nltk.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    requirement, _, folder = line.partition(" ")
    return requirement, folder


@lru_cache(maxsize=8)
def digest(tag: str) -> str:
    """Return the SHA-256 of all pins. An environment that was built from different pins is out of date."""
    return hashlib.sha256(pins(tag).read_bytes() + (_PINS / f"{tag}.nltk.txt").read_bytes()).hexdigest()


@lru_cache(maxsize=1)
def bare() -> Environment:
    """Return an environment with the interpreter of this process and no packages."""
    return Environment("", Interpreter.own())


def find(folder: Path, tag: str = DEFAULT) -> Environment:
    """Return the environment that is built in `folder`.

    Raises:
        UnknownEnvironment: This version has no environment of this name.
        EnvironmentNotBuilt: The build is missing, incomplete or out of date, or its interpreter no longer exists.
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
