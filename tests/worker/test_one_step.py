"""docs/contribute lists the files that lead from a claim to a checkpoint: a job goes through the functions it names."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from core.settings import Settings
from tests.worker.conftest import Bench
from tests.worker.test_family_jobs import set_up
from worker.assemble import assemble
from worker.child import run_claim

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/contribute/index.md").read_text()
LISTED = re.findall(r"^\d+\. `(.+?)`, `(.+?)`:", PAGE, flags=re.M)
MAX_FILES = 10


@contextmanager
def recorded_calls() -> Iterator[set[tuple[str, str]]]:
    """The functions that this thread and new ones call during the context, as (path, qualified name)."""
    codes: set[Any] = set()
    calls: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        inside = [code for code in codes if code.co_filename.startswith(str(ROOT))]
        calls |= {(str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname) for code in inside}


def test_a_newcomer_opens_few_files() -> None:
    assert 5 <= len(LISTED) <= MAX_FILES
    assert [path for path in re.findall(r"`(worker/[\w/]+\.py)`", PAGE) if not (ROOT / path).exists()] == []


@pytest.mark.slow
def test_a_job_goes_through_the_functions_of_the_list(
    bench: Bench, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up(bench, tiny_model, monkeypatch)
    monkeypatch.setenv("REGRAFT_DATABASE_URL", str(bench.database.engine.url))
    monkeypatch.setenv("REGRAFT_BLOB_URL", str(bench.tmp_path / "blobs"))
    (bench.tmp_path / "progress").touch()
    line = f"{bench.claim.job_id} {bench.claim.epoch}"

    with recorded_calls() as calls:
        run_claim(line, Settings(), assemble, bench.tmp_path / "progress", lambda: False)

    assert bench.job().status == "succeeded", bench.events()
    # A class is listed for the calls of all its methods.
    missing = [
        (path, name)
        for path, name in LISTED
        if not any(path == file and f"{called}.".startswith(f"{name}.") for file, called in calls)
    ]
    assert missing == []
