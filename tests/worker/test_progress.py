"""Progress inside a step: what is counted, what is written, and what the API shows."""

import asyncio
import json
import re
import sys
from ast import literal_eval
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from api.resources.job_shapes import ProgressOut
from core.database.engine import Database
from core.jobs import lifecycle
from core.outages import Resource
from graders.spec import parse_grader
from graders.types import Grade, Item, Sample
from tests.worker.conftest import Bench
from worker import process
from worker.backends import Server
from worker.instruments import InstrumentedGrader, InstrumentedSampler
from worker.progress import PROGRESS, Progress, Writer, in_step
from worker.sampling import Answer, Sampling
from worker.supervisor.supervisor import REPORT_SECONDS, RunProcess, RunProgress
from worker.types import Prompt, Rollout


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Words:
    """A sampler of as many answers as are wanted."""

    async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        for prompt in range(len(prompts_P)):
            for member in range(sampling.group_size):
                yield Answer(prompt, member, Rollout((1,), (0.0,), "a", "stop"))


class Same:
    name = type = "same"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        return Grade(1.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress(clock)


def shown(progress: Progress) -> tuple[Any, ...]:
    now = progress.now()
    return now["step"], now["phase"], now["done"], now["of"], now["since"]


def test_a_run_loads_before_its_first_step(progress: Progress) -> None:
    assert shown(progress) == (None, "loading", None, None, 1000)


def test_a_run_loads_since_it_has_its_job_and_not_since_its_process_waits_for_one(
    progress: Progress, clock: Clock
) -> None:
    clock.now += 200
    progress.begin()

    assert shown(progress) == (None, "loading", None, None, 1200)


def test_the_answers_of_a_step_are_counted_and_then_their_grades(progress: Progress, clock: Clock) -> None:
    progress.with_grader()
    progress.step(3)
    clock.now += 5
    progress.sampling(4, validates=False)
    progress.sampled()
    assert shown(progress) == (3, "sampling", 1, 4, 1005)

    progress.graded()
    for _ in range(3):
        progress.sampled()
    assert shown(progress) == (3, "grading", 1, 4, 1005)


def test_a_phase_without_answers_follows_until_the_next_one(progress: Progress, clock: Clock) -> None:
    progress.with_grader()
    progress.step(1)
    progress.sampling(1, validates=False)
    progress.sampled()
    progress.graded()
    clock.now += 10
    with progress.phase("training"):
        assert shown(progress) == (1, "training", None, None, 1010)
    assert shown(progress) == (1, "training", None, None, 1010)

    clock.now += 1
    progress.sampling(2, validates=True)
    assert shown(progress) == (1, "validation", 0, 2, 1011)


def test_kernels_that_are_compiled_are_counted_while_that_lasts(progress: Progress, clock: Clock) -> None:
    progress.step(1)
    with progress.phase("training"):
        clock.now += 5
        with progress.compiling(2, 8):
            assert shown(progress) == (1, "compiling", 2, 8, 1005)
        assert shown(progress) == (1, "training", None, None, 1000)


def test_answers_that_are_sampled_during_an_update_are_counted_after_it(progress: Progress) -> None:
    progress.sampling(2, validates=False)
    with progress.phase("training"):
        progress.sampled()
        assert progress.now()["phase"] == "training"

    assert (progress.now()["phase"], progress.now()["done"]) == ("sampling", 1)


def test_answers_without_a_grader_are_done_when_they_are_sampled(progress: Progress) -> None:
    with progress.phase("saving"):
        pass
    progress.sampling(1, validates=False)
    progress.sampled()

    assert progress.now()["phase"] == "saving"


def test_the_sampler_and_the_grader_of_a_run_are_counted() -> None:
    spec = parse_grader(
        {"type": "string_check", "name": "same", "input": "a", "reference": "a", "operation": "eq"}
    )
    sampler, grader = InstrumentedSampler(Words()), InstrumentedGrader(Same(), spec)
    prompts = [Prompt(line, (1,), {"messages": []}) for line in (1, 2)]

    async def seen() -> list[tuple[Any, ...]]:
        found = []
        with in_step(4):
            async for _ in sampler.sample(prompts, Sampling(2, 1.0, 8, job_seed=0, step=4)):
                found.append(shown(PROGRESS)[:4])
            for _ in range(3):
                await grader.grade(Sample("a"), {})
                found.append(shown(PROGRESS)[:4])
        return found

    assert asyncio.run(seen()) == [
        *[(4, "sampling", done, 4) for done in (1, 2, 3)],
        *[(4, "grading", done, 4) for done in (0, 1, 2, 3)],
    ]


def test_only_a_change_is_written(progress: Progress, tmp_path: Path) -> None:
    write = Writer(tmp_path / "now", progress)
    write()
    first = (tmp_path / "now").stat().st_ino
    write()
    assert (tmp_path / "now").stat().st_ino == first

    progress.step(1)
    write()

    assert json.loads((tmp_path / "now").read_text())["step"] == 1
    assert [one.name for one in tmp_path.iterdir()] == ["now"]


def test_a_disk_that_takes_nothing_is_logged_once_and_tried_again(
    progress: Progress, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write = Writer(tmp_path / "absent" / "now", progress)
    for step in range(3):
        progress.step(step)
        write()

    assert [
        one.message.startswith("the progress of the run cannot be written") for one in caplog.records
    ] == [True]
    (tmp_path / "absent").mkdir()
    write()
    assert json.loads((tmp_path / "absent" / "now").read_text())["step"] == 2


def test_the_supervisor_reads_it_at_most_once_a_second(
    progress: Progress, clock: Clock, tmp_path: Path
) -> None:
    touched = tmp_path / "progress"
    touched.touch()
    read, write = RunProgress(touched, clock), Writer(process.now_of(touched), progress)
    assert read.news() is None, "the run has not started"

    write()
    assert read.news() == progress.now()
    progress.step(1)
    write()
    assert read.news() is None, "less than a second has passed"
    clock.now += REPORT_SECONDS
    assert read.news() == progress.now()
    clock.now += REPORT_SECONDS
    assert read.news() is None, "nothing has changed"


def test_its_files_end_with_the_run() -> None:
    """A kill may come between the two."""
    run = RunProcess(lambda progress: [sys.executable, "-c", "import sys; sys.stdin.read()"])
    now = process.now_of(Path(str(run.figures).removesuffix(".prom")))
    for file in (now, process.unfinished(now)):
        file.write_text("{}")

    run.end()

    assert not now.exists() and not process.unfinished(now).exists()


def reported(database: Database, bench: Bench, **now: Any) -> dict[str, Any] | None:
    with database.write() as session:
        lifecycle.report(session, bench.claim, now)
    return lifecycle.progress_of(bench.job())


def test_the_job_shows_what_its_newest_attempt_does(bench: Bench) -> None:
    now = {"step": 1, "phase": "sampling", "done": 3, "of": 8, "since": 1000}
    assert lifecycle.progress_of(bench.job()) is None

    assert reported(bench.database, bench, **now) == now

    bench.again()
    assert lifecycle.progress_of(bench.job()) is None, "that was another attempt's"


def test_an_attempt_that_has_lost_the_job_reports_nothing(bench: Bench) -> None:
    lost = bench.claim
    bench.again()

    with bench.database.write() as session:
        lifecycle.report(session, lost, {"step": 9, "phase": "training"})

    assert bench.job().progress is None


def test_the_api_knows_every_phase_that_a_run_reports() -> None:
    """A job whose phase it does not know could not be shown at all."""
    reported: set[str] = {Progress().now()["phase"], "compiling"}
    reported |= {f"waiting for the {name}" for name in (*get_args(Server), *Resource)}
    for path in (Path(__file__).parents[2] / "worker").rglob("*.py"):
        calls = re.findall(r"PROGRESS\.(phase|waiting)\((?!server\))(.+?)[,)]", path.read_text())
        assert all(name.startswith('"') for _, name in calls), path
        for kind, name in calls:
            reported.add(f"waiting for the {literal_eval(name)}" if kind == "waiting" else literal_eval(name))

    assert {"training", "starting the sampler", "waiting for the teacher"} <= reported
    assert reported <= {*get_args(ProgressOut.model_fields["phase"].annotation)}
