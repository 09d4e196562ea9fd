"""The run without a model, of the fault injection (bench/chaos.py)."""

import asyncio
from pathlib import Path

from bench import fake_run
from core.settings import Settings
from graders.spec import parse_grader
from graders.types import Grade, Item, JudgeSample, Sample
from tests.fakes import ExactGrader
from tests.worker.conftest import GRADER, Bench
from worker.heartbeat import HeartbeatGrader


def test_it_takes_every_step_of_a_job_and_keeps_its_checkpoints(bench: Bench, tmp_path: Path) -> None:
    with bench.database.write() as session:
        bench.add_files(session, bench.blobs)
    grader = HeartbeatGrader(ExactGrader(), lambda: None)
    run = fake_run.assemble(
        bench.attempt(), parse_grader(GRADER), grader, Settings(), tmp_path, lambda: False, lambda: None, None
    )

    asyncio.run(run.train())

    assert bench.job().status == "succeeded"
    assert len(bench.checkpoints()) > 0


class JudgedTwice:
    """A grader of two parts that are both asked of a model."""

    name, type = "both", "multi"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        judged = Grade(
            0.5, reason="half", judge=JudgeSample("judge", [{"role": "user", "content": "long"}], {})
        )
        return Grade(0.5, sub_grades={"first": judged}, judge=judged.judge)


def test_a_run_keeps_no_prompts_and_replies_of_judges() -> None:
    """A step has thousands of grades, each with up to 128 kB of them; only evals show them."""
    grade = asyncio.run(HeartbeatGrader(JudgedTwice(), lambda: None).grade(Sample.from_text("yes"), {}))

    assert grade == Grade(0.5, sub_grades={"first": Grade(0.5, reason="half")})
