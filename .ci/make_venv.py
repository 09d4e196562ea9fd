"""Create the virtual environment of `make setup` with the Python that runs this, if its version is supported.

    python3 .ci/make_venv.py FOLDER [PYPROJECT]

Runs on Python 3.6 too, because its first task is to refuse an old one: it exits with 1 before it creates anything. It
replaces an environment whose own Python is not supported or does not run: `venv` would keep that interpreter.
"""

import re
import subprocess
import sys
import venv
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
ASK = "import sys; print('{}.{}.{}'.format(*sys.version_info))"


def main(folder: str, pyproject: str = str(PYPROJECT)) -> "str | None":
    """Create the environment. Returns why it cannot be."""
    source = Path(pyproject).read_text(encoding="utf-8")
    [(lowest, above)] = re.findall(r'^requires-python = ">=([0-9.]+),<([0-9.]+)"$', source, re.MULTILINE)
    own = ".".join(map(str, sys.version_info[:3]))
    if not is_supported(own, lowest, above):
        return (
            f"{sys.executable} is Python {own}, and regraft needs >={lowest},<{above}. "
            f"Choose another one: make setup PYTHON=python{lowest}"
        )
    clear = False
    if Path(folder).exists():
        old = version_in(folder)
        clear = not old or not is_supported(old, lowest, above)
        if clear:
            print(f"Replacing {folder}, which has {f'Python {old}' if old else 'no Python that runs'}.")
    venv.EnvBuilder(with_pip=True, clear=clear, symlinks=True).create(folder)
    return None


def version_in(folder: str) -> str:
    """The version of an environment's Python; empty if it has none that runs."""
    try:
        return subprocess.check_output([f"{folder}/bin/python", "-c", ASK], encoding="utf-8").strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def is_supported(version: str, lowest: str, above: str) -> bool:
    return numbers(lowest) <= numbers(version) < numbers(above)


def numbers(version: str) -> "list[int]":
    return [int(part) for part in version.split(".")]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
