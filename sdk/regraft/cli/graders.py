"""The commands of graders."""

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Iterator
from textwrap import indent
from typing import Any

from regraft._rules.datasets import unique_keys
from regraft.cli.output import answer, print_json, say, say_quarters, shortened, table
from regraft.cli.shared import DONE, NO, WIDE, Refused, connect
from regraft.display import Waiting
from regraft.requests import read_grader
from regraft.resources.grader_audits import CREATE
from regraft.resources.graders import GraderTest
from regraft.resources.waiting import refuse_failed
from regraft.types import GraderAudit

NARROW = 60
SHORT = 12  # characters of a version, which name it as well


def graders_save(arguments: argparse.Namespace) -> int:
    saved = connect().graders.save(arguments.name, arguments.grader, note=arguments.note)
    return answer(
        arguments, saved, lambda: f"{saved.name} {saved.version[:SHORT]}, one of {saved.versions} version(s)"
    )


def graders_show(arguments: argparse.Namespace) -> int:
    graders = connect().graders
    name, _, version = arguments.name.partition("@")
    spec = graders.version(name, version).grader if version else graders.retrieve(name).grader
    print_json(spec)
    return DONE


def graders_diff(arguments: argparse.Namespace) -> int:
    """Exit code 1: they differ."""
    graders = connect().graders
    first = graders.version(arguments.name, arguments.version)
    second = graders.version(arguments.name, arguments.other) if arguments.other else None
    after = graders.retrieve(arguments.name).grader if second is None else second.grader
    names = first.version[:SHORT], "current" if second is None else second.version[:SHORT]
    lines = [*difflib.unified_diff(_lines(first.grader), _lines(after), names[0], names[1], lineterm="")]
    answer(arguments, lines, lambda: "\n".join(lines))
    return NO if lines else DONE


def graders_delete(arguments: argparse.Namespace) -> int:
    graders = connect().graders
    name, _, version = arguments.name.partition("@")
    if version:
        graders.delete_version(name, version)
    else:
        graders.delete(name)
    return answer(arguments, {"name": arguments.name, "deleted": True}, lambda: f"deleted {arguments.name}")


def graders_cases(arguments: argparse.Namespace) -> int:
    graders = connect().graders
    for case_id in arguments.delete:
        graders.delete_case(arguments.name, case_id)
    if arguments.add is not None:
        added = graders.add_cases(arguments.name, arguments.add)
        say(f"{len(added)} added")
    listed = list(graders.cases(arguments.name))
    rows = [
        [
            one.id,
            str(one.expect),
            shortened(str(one.sample["output_text"]), NARROW),
            shortened(one.note, NARROW),
        ]
        for one in listed
    ]
    return answer(arguments, listed, lambda: table(["case", "expected", "answer", "note"], rows))


def graders_check(arguments: argparse.Namespace) -> int:
    """Exit code 1: a case failed."""
    name, _, version = arguments.name.partition("@")
    found = connect().graders.check(name, grader=arguments.grader, version=version or None)
    rows = [
        [
            one.case_id,
            one.score,
            str(one.expect),
            "ok" if one.passed else ", ".join(one.errors) or "not as expected",
            shortened(one.reason, NARROW),
        ]
        for one in found.results
    ]
    answer(arguments, found, lambda: table(["case", "score", "expected", "", "reason"], rows))
    say(f"{found.passed} passed, {found.failed} failed, with version {found.version[:SHORT]}")
    return NO if found.failed else DONE


def graders_audit(arguments: argparse.Namespace) -> int:
    """Exit code 1: the verdict is stop."""
    client = connect()
    begun = client.grader_audits.create(
        arguments.grader,
        arguments.training_file,
        answer=arguments.answer,
        rows=arguments.rows,
        max_tokens=arguments.max_tokens,
    )
    with Waiting(sys.stderr, "the audit") as waiting:
        progress = _audit_progress(waiting.say)
        progress(begun)
        audit = client.grader_audits.wait(begun.id, progress=progress)
    refuse_failed(client, audit, CREATE)
    report = audit.report
    assert report is not None, "an audit that is neither failed nor canceled is completed"
    rows = [[one.kind, one.expect, one.line, one.score, shortened(one.text, NARROW)] for one in report.worst]
    worst = f"\n{table(['worst', 'expected', 'line', 'score', 'answer'], rows)}" if rows else ""
    rates = [
        f"{one.wrong} of {one.answers} {name}"
        for name, one in (
            ("wrong answers without knowledge pass", report.false_positives),
            ("wrong answers that mention the right one pass", report.mentions),
            ("right answers do not pass", report.false_negatives),
        )
        if one.answers
    ]
    lines = [report.sentence, *report.advice, *report.notes, *rates]
    answer(arguments, audit, lambda: "\n".join(lines) + worst)
    return NO if report.verdict == "stop" else DONE


def _audit_progress(say: Callable[[str], None]) -> Callable[[GraderAudit], None]:
    """Say the id and each quarter of the grades."""
    say_quarter = say_quarters(say)

    def print_progress(audit: GraderAudit) -> None:
        now = audit.progress
        say_quarter("grading", now.graded / now.of, f"{audit.id}: {now.graded} of {now.of} answers graded")

    return print_progress


def _lines(spec: dict[str, Any]) -> list[str]:
    """The lines of a specification, with line breaks where its source code has them."""
    text = json.dumps(spec, indent=2, sort_keys=True, ensure_ascii=False)
    return text.replace("\\n", "\n").splitlines()


def graders_validate(arguments: argparse.Namespace) -> int:
    asked = {"grader": read_grader(arguments.grader)}
    # Not with the SDK's types: their union lacks our grader types.
    response: Any = connect().post("/fine_tuning/alpha/graders/validate", body=asked, cast_to=object)
    grader = response["grader"]
    return answer(arguments, response, lambda: f"{grader['name']} ({grader['type']}): valid")


def graders_run(arguments: argparse.Namespace) -> int:
    if (arguments.sample is None) == (arguments.cases is None):
        raise Refused("Pass either --sample TEXT or a JSONL file of cases.")
    if arguments.cases is not None:
        cases: Any = arguments.cases
    else:
        cases = [{**_item(arguments.item), "sample": arguments.sample}]
    tests = connect().graders.test(arguments.grader, cases)
    failed = sum(not test.passed for test in tests)
    if arguments.output == "json":
        print_json(tests)
    else:
        rows = [
            [
                test.line,
                float(test.reward),
                test.expect if test.expect is None else float(test.expect),
                "ok" if test.passed else ", ".join(test.errors) or "not as expected",
                shortened(_headline(test.reason), WIDE),
            ]
            for test in tests
        ]
        print(table(["line", "reward", "expect", "", "reason"], rows))
        for test in tests:
            for title, text in _details(test):
                print(f"\nline {test.line}, {title}:\n{indent(text.rstrip(), '  ')}")
        say(f"{len(tests) - failed} passed, {failed} failed")
    return NO if failed else DONE


def _headline(reason: str) -> str:
    """The line of a reason for the table: the last one of a traceback, which names the exception."""
    return next((line for line in reversed(reason.splitlines()) if line.strip()), "")


def _details(test: GraderTest) -> Iterator[tuple[str, str]]:
    """Texts that do not fit into the table, with titles: printed output, and full reasons."""
    if test.output:
        yield "printed", test.output
    reason = test.reason.strip()
    if reason != shortened(reason, WIDE):
        yield ", ".join(test.errors) or "reason", reason
    for name, text in test.error_details.items():
        # A detail of a multi grader reads "key: text", and the reason often includes the text already.
        if text.strip() not in reason and text.partition(": ")[2].strip() not in reason:
            yield name, text


def _item(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        item = json.loads(text, object_pairs_hook=unique_keys)
    except ValueError as cause:
        raise Refused(f"--item: {cause}") from cause
    if not isinstance(item, dict):
        raise Refused("--item must be a JSON object.")
    return item
