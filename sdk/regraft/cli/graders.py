"""The commands of stored graders."""

import argparse
import difflib
import json
from typing import Any

from regraft.cli.output import print_json, say, shortened, table, when
from regraft.client import Regraft

DONE, NO = 0, 1
WIDE = 60
SHORT = 12  # characters of a version, which name it as well


def graders_save(arguments: argparse.Namespace) -> int:
    saved = Regraft().graders.save(arguments.name, arguments.grader, note=arguments.note)
    return _answer(
        arguments, saved, f"{saved.name} {saved.version[:SHORT]}, one of {saved.versions} version(s)"
    )


def graders_list(arguments: argparse.Namespace) -> int:
    listed = list(Regraft().graders.list(limit=100))
    rows = [
        [one.name, one.grader["type"], one.version[:SHORT], one.versions, one.cases, when(one.updated_at)]
        for one in listed
    ]
    return _answer(arguments, listed, table(["name", "type", "version", "versions", "cases", "saved"], rows))


def graders_show(arguments: argparse.Namespace) -> int:
    graders = Regraft().graders
    name, _, version = arguments.name.partition("@")
    spec = graders.version(name, version).grader if version else graders.retrieve(name).grader
    print_json(spec)
    return DONE


def graders_versions(arguments: argparse.Namespace) -> int:
    listed = list(Regraft().graders.versions(arguments.name, limit=100))
    rows = [
        [
            one.version[:SHORT],
            "current" if one.is_current else "",
            when(one.created_at),
            shortened(one.note, WIDE),
        ]
        for one in listed
    ]
    return _answer(arguments, listed, table(["version", "", "saved", "note"], rows))


def graders_diff(arguments: argparse.Namespace) -> int:
    """Exit code 1: they differ."""
    graders = Regraft().graders
    first = graders.version(arguments.name, arguments.version)
    second = graders.version(arguments.name, arguments.other) if arguments.other else None
    after = graders.retrieve(arguments.name).grader if second is None else second.grader
    names = first.version[:SHORT], "current" if second is None else second.version[:SHORT]
    lines = [*difflib.unified_diff(_lines(first.grader), _lines(after), names[0], names[1], lineterm="")]
    _answer(arguments, lines, "\n".join(lines))
    return NO if lines else DONE


def graders_delete(arguments: argparse.Namespace) -> int:
    graders = Regraft().graders
    name, _, version = arguments.name.partition("@")
    if version:
        graders.delete_version(name, version)
    else:
        graders.delete(name)
    return _answer(arguments, {"name": arguments.name, "deleted": True}, f"deleted {arguments.name}")


def graders_cases(arguments: argparse.Namespace) -> int:
    graders = Regraft().graders
    for case_id in arguments.delete:
        graders.delete_case(arguments.name, case_id)
    if arguments.add is not None:
        added = graders.add_cases(arguments.name, arguments.add)
        say(f"{len(added)} added")
    listed = list(graders.cases(arguments.name))
    rows = [
        [one.id, str(one.expect), shortened(str(one.sample["output_text"]), WIDE), shortened(one.note, WIDE)]
        for one in listed
    ]
    return _answer(arguments, listed, table(["case", "expected", "answer", "note"], rows))


def graders_check(arguments: argparse.Namespace) -> int:
    """Exit code 1: a case failed."""
    name, _, version = arguments.name.partition("@")
    found = Regraft().graders.check(name, grader=arguments.grader, version=version or None)
    rows = [
        [
            one.case_id,
            one.score,
            str(one.expect),
            "ok" if one.passed else ", ".join(one.errors) or "not as expected",
            shortened(one.reason, WIDE),
        ]
        for one in found.results
    ]
    _answer(arguments, found, table(["case", "score", "expected", "", "reason"], rows))
    say(f"{found.passed} passed, {found.failed} failed, with version {found.version[:SHORT]}")
    return NO if found.failed else DONE


def _lines(spec: dict[str, Any]) -> list[str]:
    """The lines of a specification, with line breaks where its source code has them."""
    text = json.dumps(spec, indent=2, sort_keys=True, ensure_ascii=False)
    return text.replace("\\n", "\n").splitlines()


def _answer(arguments: argparse.Namespace, value: object, text: str) -> int:
    if arguments.output == "json":
        print_json(value)
    elif text:
        print(text)
    return DONE
