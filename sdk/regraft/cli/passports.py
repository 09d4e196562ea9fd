"""`regraft verify`, which needs no server."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regraft.cli.output import answer, say
from regraft.cli.shared import DONE, NO, Refused

ANYONE = "Anyone can sign with another key: pin the deployment's fingerprint with --key."


def verify(arguments: argparse.Namespace) -> int:
    """Exit code 1: the passport or a file beside it was changed, or another key has signed it."""
    from regraft._rules import passports

    path = Path(arguments.file)
    path = path / passports.FILE if path.is_dir() else path
    content = path.read_bytes()  # an OSError says the path
    try:
        passport = passports.read(content)
    except passports.InvalidPassport as invalid:
        return _answer(arguments, path, [str(invalid)])
    is_beside = passports.is_beside(passport, path.parent)
    problems = passports.problems_of_files(passport, path.parent) if is_beside else []
    if arguments.key is not None and _pinned(arguments.key) != passport.fingerprint:
        problems.insert(0, f"It is signed by another key, with the fingerprint {passport.fingerprint}.")
    uncovered = passports.uncovered(passport, path.parent) if is_beside else []
    checked = f"{len(passport.files)} files beside it" if is_beside else "no files beside it"
    found = {
        "model": passport.statement.get("model"),
        "fingerprint": passport.fingerprint,
        "key_is_pinned": arguments.key is not None,
        "files": len(passport.files) if is_beside else 0,
        "uncovered": uncovered,
    }
    code = _answer(arguments, path, problems, checked, found)
    if uncovered:
        say(f"Not covered by the passport: {', '.join(map(_printable, uncovered))}")
    if arguments.key is None:
        say(ANYONE)
    return code


def _pinned(key: str) -> str:
    fingerprint = key.strip().lower()
    if len(fingerprint) != 64 or set(fingerprint) - set("0123456789abcdef"):
        raise Refused(
            "--key is a fingerprint: 64 hexadecimal digits, as the deployment's operator gives them."
        )
    return fingerprint


def _answer(
    arguments: argparse.Namespace,
    path: Path,
    problems: Sequence[str],
    checked: str = "",
    found: dict[str, Any] | None = None,
) -> int:
    value = {
        "file": str(path),
        "valid": not problems,
        "problems": list(map(_printable, problems)),
        **(found or {}),
    }
    if found is not None:
        value |= {
            "model": _printable(str(found["model"])),
            "uncovered": list(map(_printable, found["uncovered"])),
        }

    def text() -> str:
        if problems:
            return "\n".join(f"{path}: {_printable(problem)}" for problem in problems)
        assert found is not None, "a passport without problems was read"
        return f"{path}: valid: {value['model']}, with {checked}; signed by {found['fingerprint']}"

    answer(arguments, value, text)
    return NO if problems else DONE


def _printable(text: str) -> str:
    """The text in ASCII: that of a stranger's file must not write to the terminal what the user takes for ours."""
    return json.dumps(text)[1:-1]
