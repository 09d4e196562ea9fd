"""`regraft verify`, which needs no server."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regraft.cli.output import answer, say
from regraft.cli.shared import DONE, NO, Refused

ANYONE = "The key is not pinned, and anyone can sign with another one: give the deployment's fingerprint with --key."
NOT_PROVEN = "The signature proves who signed the statement, not that it is true, or when it was signed."


def verify(arguments: argparse.Namespace) -> int:
    """Exit code 1: the passport or the folder's files were changed, or another key has signed it."""
    from regraft._rules import passports

    given, pinned = Path(arguments.file), None if arguments.key is None else _pinned(arguments.key)
    is_folder = given.is_dir()
    path = given / passports.FILE if is_folder else given
    content = path.read_bytes()  # an OSError says the path
    try:
        passport = passports.read(content)
    except passports.InvalidPassport as invalid:
        return _answer(arguments, path, [str(invalid)])
    problems = passports.problems_of_files(passport, given) if is_folder else []
    if pinned not in (None, passport.fingerprint):
        problems.insert(0, f"It is signed by another key, with the fingerprint {passport.fingerprint}.")
    found = {
        "model": _printable(str(passport.statement.get("model"))),
        "fingerprint": passport.fingerprint,
        "key_is_pinned": pinned is not None,
        "files_checked": len(passport.files) if is_folder else 0,
    }
    code = _answer(arguments, path, problems, found)
    say(NOT_PROVEN)
    if not is_folder:
        say("No files were checked: name the folder of the export to check them.")
    if pinned is None:
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
    found: Mapping[str, Any] | None = None,
) -> int:
    """Print the result. `found`: the facts of a passport with a valid signature."""
    shown = [_printable(problem) for problem in problems]
    value = {"file": str(path), "valid": not problems, "problems": shown, **(found or {})}

    def text() -> str:
        if problems:
            return "\n".join(f"{path}: {problem}" for problem in shown)
        return "{file}: valid: {model}, {files_checked} files checked; signed by {fingerprint}".format(
            **value
        )

    answer(arguments, value, text)
    return NO if problems else DONE


def _printable(text: str) -> str:
    """The text in ASCII: that of a stranger's file must not write to the terminal what the user takes for ours."""
    return json.dumps(text)[1:-1]
