"""The last results of `regraft-server doctor` on a machine, in the data folder. Workers report them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from core.json_files import JsonFiles

FOLDER = "doctor"


class DoctorResult(BaseModel):
    """A check as it last ended on this machine."""

    check: str
    state: Literal["ok", "warning", "failed", "skipped"]
    text: str
    remedy: str
    checked_at: float  # seconds of this machine's clock


class _ResultsOfHost(BaseModel):
    results: list[DoctorResult]


def keep(data_dir: Path, host: str, results: Iterable[DoctorResult]) -> None:
    """Store the results of a machine. Those of other checks stay; machines may share a data folder."""
    by_check = {one.check: one for one in (*found(data_dir, host), *results)}
    _files(data_dir).write(_ResultsOfHost(results=[*by_check.values()]), host)


def found(data_dir: Path, host: str) -> list[DoctorResult]:
    """The last result of each check on this machine; none: the doctor has not run there."""
    kept = _files(data_dir).read(host)
    return kept.results if kept else []


def _files(data_dir: Path) -> JsonFiles[_ResultsOfHost]:
    return JsonFiles(data_dir / FOLDER, _ResultsOfHost)
