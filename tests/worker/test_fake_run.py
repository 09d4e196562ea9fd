"""The run without a model, of the fault injection (bench/chaos.py)."""

import asyncio
from pathlib import Path

from bench import fake_run
from core.settings import Settings
from graders.spec import parse_grader
from tests.fakes import ExactGrader
from tests.worker.conftest import GRADER, Bench
from worker.heartbeat import WatchedGrader


def test_it_takes_every_step_of_a_job_and_keeps_its_checkpoints(bench: Bench, tmp_path: Path) -> None:
    with bench.database.write() as session:
        bench.add_files(session, bench.blobs)
    grader = WatchedGrader(ExactGrader(), lambda: None)
    run = fake_run.assemble(
        bench.attempt(), parse_grader(GRADER), grader, Settings(), tmp_path, lambda: False, lambda: None, None
    )

    asyncio.run(run.train())

    assert bench.job().status == "succeeded"
    assert len(bench.checkpoints()) > 0
