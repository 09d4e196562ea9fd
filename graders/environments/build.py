"""Build an environment: install its pinned packages into a separate folder, and lay out data for NLTK."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from graders.environments.catalog import (
    CORPORA,
    DEFAULT,
    FORMAT,
    MARKER,
    PACKAGES,
    Environment,
    EnvironmentNotBuilt,
    Interpreter,
    corpora_source,
    digest,
    find,
    pins,
)

Install = Callable[[Path, list[str]], None]


class BuildFailed(RuntimeError):
    """The installer failed. The message contains the end of its output."""


def install_packages(target: Path, what: list[str]) -> None:
    """Install packages into `target` and compile their bytecode, which graders cannot write."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is not None:
        command = [uv, "pip", "install", "--python", sys.executable, "--compile-bytecode"]
    else:
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--quiet", "--no-deps", "--target", str(target), *what]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")


def build(
    folder: Path, tag: str = DEFAULT, corpora: Path | None = None, *, install: Install = install_packages
) -> tuple[Environment, bool]:
    """Build the environment in `folder` for this process's Python, if needed.

    Skips an environment that is up to date. Builds in a temporary folder that is renamed at the end, so an interrupted
    build leaves no partial environment.

    Args:
        folder: Folder of all environments, with a subfolder for each tag.
        tag: The environment to build.
        corpora: A folder of NLTK data to add, with subfolders such as `corpora/` and `tokenizers/`. Forces a rebuild.
        install: Installs packages into a folder.

    Returns:
        The environment, and whether it was built by this call.

    Raises:
        UnknownEnvironment: This version has no environment of this name.
        BuildFailed: The installation of a package failed.
    """
    pins(tag)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if corpora is None:
            try:
                return find(folder, tag), False
            except EnvironmentNotBuilt:
                pass
        under_way = folder / f".{tag}.building"
        shutil.rmtree(under_way, ignore_errors=True)
        under_way.mkdir()
        install(under_way / PACKAGES, ["-r", str(pins(tag))])
        _lay_out_corpora(under_way, tag, corpora, install)
        (under_way / MARKER).write_text(json.dumps(_marker(tag), indent=2))
        _put_in_place(under_way, folder / tag)
        return find(folder, tag), True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a file lock, so that only one build runs at a time."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _marker(tag: str) -> dict[str, object]:
    own = Interpreter.own()
    return {
        "format": FORMAT,
        "tag": tag,
        "pins": digest(tag),
        "python": own.program,
        "standard": own.standard,
        "libraries": own.libraries,
    }


def _lay_out_corpora(under_way: Path, tag: str, more: Path | None, install: Install) -> None:
    requirement, inside = corpora_source(tag)
    shipped = under_way / "shipped"
    install(shipped, [requirement])
    # The package contains each archive unpacked as well.
    shutil.copytree(shipped / inside, under_way / CORPORA, ignore=shutil.ignore_patterns("*.zip", ".*"))
    shutil.rmtree(shipped)
    if more is not None:
        shutil.copytree(more, under_way / CORPORA, dirs_exist_ok=True)


def _put_in_place(built: Path, place: Path) -> None:
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    built.rename(place)
    shutil.rmtree(old, ignore_errors=True)
