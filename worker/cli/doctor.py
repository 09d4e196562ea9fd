"""`regraft-server doctor`: checks of this machine and its services on one page, each with a remedy."""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TextIO

from core.telemetry import checkup
from core.telemetry.checkup import DoctorResult
from worker import compile_caches
from worker.cli.configuration import read_settings
from worker.cli.parser import UsageError
from worker.doctor import computing, gpu, machine, services
from worker.doctor.check import CHECKS, GROUPS, Check, CheckResult, chosen, is_healthy, run_all
from worker.doctor.host import Host

# Importing them registers their checks.
MODULES = (gpu, computing, machine, services)


def main(arguments: argparse.Namespace) -> int:
    """Return 1 if a check has failed.

    Raises:
        UsageError: --only names no check and no group.
    """
    settings = read_settings()
    compile_caches.place(settings.compile_cache, os.environ)
    return doctor(Host(settings), CHECKS, arguments.only, as_json=arguments.json, out=sys.stdout)


def doctor(host: Host, checks: Sequence[Check], only: Sequence[str], *, as_json: bool, out: TextIO) -> int:
    try:
        selected = chosen(only, checks)
    except KeyError as unknown:
        names = ", ".join([*GROUPS, *(check.name for check in checks)])
        raise UsageError(
            f"--only: {unknown.args[0]!r} is neither a check nor a group; there are: {names}"
        ) from None
    started = time.monotonic()
    results: list[CheckResult] = []
    for result in run_all(selected, host):
        results.append(result)
        if not as_json:
            print(line_of(result), file=out, flush=True)
    _keep(results, host)
    if as_json:
        print(
            json.dumps({"healthy": is_healthy(results), "checks": [one.as_data() for one in results]}),
            file=out,
        )
    else:
        print(f"\n{total(results)}, in {time.monotonic() - started:.0f} s.", file=out)
    return 0 if is_healthy(results) else 1


def _keep(results: Iterable[CheckResult], host: Host) -> None:
    """Store the results for the workers of this machine, which report them.

    Before the first start there is no data folder. It is not created here: the service may run as another user.
    """
    folder, now = host.settings.data_dir, time.time()
    if folder.is_dir():
        kept = [
            DoctorResult(check=one.check, state=one.state, text=one.text, remedy=one.remedy, checked_at=now)
            for one in results
        ]
        checkup.keep(folder, socket.gethostname(), kept)


def line_of(result: CheckResult) -> str:
    line = f"{result.state:8} {result.check:14} {result.text}"
    return f"{line}\n{'':24}{result.remedy}" if result.remedy else line


def total(results: Iterable[CheckResult]) -> str:
    states = [result.state for result in results]
    return ", ".join(f"{states.count(state)} {state}" for state in ("ok", "warning", "failed", "skipped"))
