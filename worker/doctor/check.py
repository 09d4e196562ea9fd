"""Checks and how they are run. A check is one function, which reads a Host and returns a Diagnosis."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from worker.doctor.host import Host
from worker.refusals import first_line

State = Literal["ok", "warning", "failed", "skipped"]
Group = Literal["gpu", "compute", "machine", "services"]
GROUPS: Mapping[Group, str] = {
    "gpu": "the GPU, its driver, and the packages for it",
    "compute": "what jobs compute, tried small on the device",
    "machine": "memory, disks and sandbox",
    "services": "database, broker and blob store",
}
# Each of these starts processes that import torch, which takes seconds.
COMPUTE_AT_ONCE = 2


@dataclass(frozen=True)
class Diagnosis:
    """The result of a check's function. `remedy` replaces that of the check."""

    state: State
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    name: str
    group: Group
    what: str  # is checked
    remedy: str  # if it fails
    run: Callable[[Host], Diagnosis]


@dataclass(frozen=True)
class CheckResult:
    """A finding with the check that has made it."""

    check: str
    group: Group
    what: str
    state: State
    text: str
    remedy: str
    seconds: float

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


CHECKS: list[Check] = []


def check(name: str, group: Group, *, remedy: str) -> Callable[[Callable[[Host], Diagnosis]], Check]:
    """Register a function as a check. Its docstring says what it checks."""

    def register(run: Callable[[Host], Diagnosis]) -> Check:
        made = Check(name, group, (run.__doc__ or "").strip().rstrip("."), remedy, run)
        CHECKS.append(made)
        return made

    return register


def ok(text: str) -> Diagnosis:
    return Diagnosis("ok", text)


def skipped(text: str) -> Diagnosis:
    return Diagnosis("skipped", text)


def warning(text: str, remedy: str = "") -> Diagnosis:
    return Diagnosis("warning", text, remedy)


def failed(text: str, remedy: str = "") -> Diagnosis:
    return Diagnosis("failed", text, remedy)


def chosen(only: Sequence[str], checks: Sequence[Check]) -> list[Check]:
    """The checks with these names or of these groups; all without any.

    Raises:
        KeyError: there is no check and no group of that name.
    """
    known = {check.name for check in checks} | set(GROUPS)
    if unknown := [name for name in only if name not in known]:
        raise KeyError(unknown[0])
    found = [check for check in checks if not only or check.name in only or check.group in only]
    return sorted(found, key=lambda check: [*GROUPS].index(check.group))


def run_all(checks: Sequence[Check], host: Host) -> Iterator[CheckResult]:
    """Run the checks and yield their results in order. Those that compute run beside the others."""
    with ThreadPoolExecutor(COMPUTE_AT_ONCE) as computing:
        running = {
            check.name: computing.submit(run_one, check, host) for check in checks if check.group == "compute"
        }
        for check in checks:
            with suppress(KeyError):
                yield running[check.name].result()
                continue
            yield run_one(check, host)


def run_one(check: Check, host: Host) -> CheckResult:
    """Run one check. An exception is a finding: whatever raises it would raise it in a job, too."""
    started = time.monotonic()
    try:
        found = check.run(host)
    except Exception as cause:
        found = failed(first_line(cause))
    remedy = "" if found.state in ("ok", "skipped") else found.remedy or check.remedy
    seconds = time.monotonic() - started
    return CheckResult(check.name, check.group, check.what, found.state, found.text, remedy, seconds)


def is_healthy(results: Iterable[CheckResult]) -> bool:
    return all(result.state != "failed" for result in results)
