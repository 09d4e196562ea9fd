"""The commands of evals."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from regraft.cli.output import plain, print_json, say, table
from regraft.cli.shared import DONE, NO, connect
from regraft.eval_archive import Report, export, import_folder
from regraft.resources.evals import Gate, read_config, run_error
from regraft.sync.client import Regraft


def evals_run(arguments: argparse.Namespace) -> int:
    """Exit code 1: a run did not complete, or none of its items is graded. Later runs are compared with the first."""
    config, client = read_config(arguments.config), connect()
    runs = [
        client.evals.run_config(config, model=model, name=arguments.name)
        for model in arguments.models or [None]
    ]
    ended = [client.evals.wait(run.eval_id, run.id, progress=run_progress()) for run in runs]
    if arguments.output == "json":
        print_json(ended)
    else:
        print(_runs_table(ended))
        for run in ended:
            if why := run_error(run):
                print(f"{run.id} {run.status}: {why}")
        first, *others = ended
        for other in others:
            print(_difference(client.evals.compare(first.eval_id, first.id, other.id)))
    without = [run for run in ended if run.status == "completed" and _has_no_grade(run)]
    for run in without:
        say(f"{run.id}: no item is graded. The first one: {_first_error(client, run)}")
    return NO if without or any(run.status != "completed" for run in ended) else DONE


def _has_no_grade(run: Any) -> bool:
    counts = run.result_counts
    return bool(counts.total and not counts.passed and not counts.failed)


def _first_error(client: Regraft, run: Any) -> str:
    """Return why the first item has no grade: its answer's error, or that of a criterion."""
    items = client.evals.runs.output_items.list(run.id, eval_id=run.eval_id, limit=1).data
    item: dict[str, Any] = items[0].to_dict() if items else {}
    error = (item.get("sample") or {}).get("error") or {}
    reasons = [one.get("reason") or one.get("error") for one in item.get("results") or []]
    return str(error.get("message") or next((why for why in reasons if why), "it has no reason"))


def evals_compare(arguments: argparse.Namespace) -> int:
    comparison = connect().evals.compare(arguments.eval_id, arguments.first, arguments.second)
    if arguments.output == "json":
        print_json(comparison)
    else:
        print(_difference(comparison))
    return DONE


def evals_gate(arguments: argparse.Namespace) -> int:
    """Exit code 1: the run is not good enough."""
    gate: Gate = connect().evals.gate(
        arguments.eval_id,
        arguments.run_id,
        min_pass_rate=arguments.min_pass_rate,
        baseline=arguments.baseline,
        max_drop=arguments.max_drop,
        allow_errors=arguments.allow_errors,
    )
    if arguments.output == "json":
        print_json(plain(gate.__dict__))
    else:
        print("passed" if gate.passed else "\n".join(["failed", *(f"  - {why}" for why in gate.reasons)]))
    return DONE if gate.passed else NO


def evals_import(arguments: argparse.Namespace) -> int:
    return _report(arguments, import_folder(connect(), arguments.folder, report_line=say), "Imported")


def evals_export(arguments: argparse.Namespace, folder: Path) -> int:
    """Read with OpenAI's client and the key in OPENAI_API_KEY; OPENAI_BASE_URL may name another service."""
    return _report(arguments, export(openai.OpenAI(), folder, report_line=say), f"Wrote {folder}:")


def _report(arguments: argparse.Namespace, report: Report, what: str) -> int:
    """Exit code 1: an eval or a run that is finished is left out."""
    if arguments.output == "json":
        print_json(report.__dict__)
    else:
        counts = f"{report.evals} evals, {report.runs} runs, {report.items} items, {report.files} files"
        print("\n".join([f"{what} {counts}", *(f"Left out: {why}" for why in report.left_out)]))
    return NO if report.failed else DONE


def run_progress() -> Callable[[Any], None]:
    """Say how far a run is, whenever it changes."""
    said = ""

    def print_progress(run: Any) -> None:
        nonlocal said
        done = run.progress
        waiting = "; it waits for a worker" if run.status == "queued" else ""
        now = f"{run.id} {run.status}: {done['finished']} of {done['total']}{waiting}"
        if now != said:
            said = now
            say(now)

    return print_progress


def _runs_table(runs: list[Any]) -> str:
    rows = [
        (
            run.id,
            run.model,
            run.status,
            run.result_counts.passed,
            run.result_counts.failed,
            run.result_counts.errored,
            _with_error(run.pass_rate, run.standard_error),
        )
        for run in runs
    ]
    return table(("RUN", "MODEL", "STATUS", "PASSED", "FAILED", "ERRORED", "PASS RATE"), rows)


def _with_error(rate: float | None, error: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.3f}" if error is None else f"{rate:.3f} ± {error:.3f}"


def _difference(comparison: Any) -> str:
    measures = {"passed": comparison.passed, **comparison.criteria}
    rows = [
        (
            name,
            one.first,
            one.second,
            one.difference,
            "-" if one.ci_low is None else f"{one.ci_low:+.3f} to {one.ci_high:+.3f}",
            one.wins,
            one.losses,
            one.ties,
        )
        for name, one in measures.items()
    ]
    head = ("", "FIRST", "SECOND", "DIFFERENCE", "95 % INTERVAL", "WINS", "LOSSES", "TIES")
    left = f"\n{comparison.unpaired} items have no partner." if comparison.unpaired else ""
    if comparison.passed.ungraded:
        left += f"\n{comparison.passed.ungraded} items have no grade in one of the runs."
    return table(head, rows) + left
