"""What a worker and its runs tell Prometheus."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, write_to_textfile

from graders.sandbox import pool
from graders.spec import parse_grader
from graders.types import ErrorKind, Grade, Item, Sample
from tests.descriptors import no_free_descriptor
from tests.fakes import ExactGrader
from tests.present import untyped
from tests.worker.conftest import GRADER, Bench
from worker import instruments
from worker.instruments import InstrumentedGrader
from worker.telemetry import Gpus, Runs, Sandbox, SandboxLayers


def read(collector: Runs | Gpus | Sandbox | SandboxLayers) -> dict[Any, Any]:
    """The values by name and labels' values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


class Child:
    """A run as its supervisor sees it: what it counts is in a file."""

    def __init__(self, file: Path) -> None:
        self.file, self.registry = file, CollectorRegistry()
        self.tokens = Counter("tokens", "-", registry=self.registry)
        self.seconds = Histogram("seconds", "-", ("phase",), buckets=(1, 10), registry=self.registry)
        self.reward = Gauge("reward", "-", registry=self.registry)

    def work(self, tokens: int, seconds: int, reward: float) -> None:
        self.tokens.inc(tokens)
        self.seconds.labels("sampling").observe(seconds)
        self.reward.set(reward)
        write_to_textfile(str(self.file), self.registry)


def test_runs_that_share_a_device_are_counted_together(tmp_path: Path) -> None:
    runs, first, second = Runs("h200"), Child(tmp_path / "first.prom"), Child(tmp_path / "second.prom")

    with runs.following(first.file):
        first.work(tokens=100, seconds=3, reward=0.5)
        with runs.following(second.file):
            second.work(tokens=10, seconds=30, reward=0.25)
            together = read(runs)
        after = read(runs)

    assert together["regraft_worker_jobs", "h200"] == 2
    assert together["tokens_total", "h200"] == 110
    assert together["seconds_count", "h200", "sampling"] == 2
    assert together["reward", "h200"] == 0.25, "of the one that began last"
    assert after["regraft_worker_jobs", "h200"] == 1
    assert after["tokens_total", "h200"] == 110


def test_a_run_is_seen_while_it_runs(tmp_path: Path) -> None:
    runs, child = Runs("h200"), Child(tmp_path / "run.prom")

    with runs.following(child.file):
        before = read(runs)
        child.work(tokens=100, seconds=3, reward=0.5)
        during = read(runs)

    assert before == {("regraft_worker_busy", "h200"): 1, ("regraft_worker_jobs", "h200"): 1}
    assert during["tokens_total", "h200"] == 100
    assert during["seconds_bucket", "h200", "10.0", "sampling"] == 1
    assert during["reward", "h200"] == 0.5


def test_counts_go_on_where_the_run_before_ended_and_states_end_with_it(tmp_path: Path) -> None:
    runs = Runs("cpu")
    first, second = Child(tmp_path / "1.prom"), Child(tmp_path / "2.prom")
    with runs.following(first.file):
        first.work(tokens=100, seconds=3, reward=0.5)

    between = read(runs)
    with runs.following(second.file):
        second.work(tokens=11, seconds=30, reward=0.75)
        during = read(runs)

    assert between["tokens_total", "cpu"] == 100
    assert between["regraft_worker_busy", "cpu"] == 0
    assert ("reward", "cpu") not in between
    assert during["tokens_total", "cpu"] == read(runs)["tokens_total", "cpu"] == 111
    assert during["seconds_count", "cpu", "sampling"] == 2
    assert during["seconds_sum", "cpu", "sampling"] == 33
    assert during["reward", "cpu"] == 0.75
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_dies_before_it_counted_anything_leaves_nothing(tmp_path: Path) -> None:
    runs = Runs("cpu")
    with runs.following(tmp_path / "never.prom"):
        pass

    assert read(runs) == {("regraft_worker_busy", "cpu"): 0, ("regraft_worker_jobs", "cpu"): 0}


def counted() -> dict[Any, Any]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in instruments.COUNTED.collect()
        for sample in family.samples
    }


def grown(before: dict[Any, Any], *series: str) -> Any:
    return counted().get(series, 0) - before.get(series, 0)


def test_a_worker_without_a_free_descriptor_counts_its_runs_and_answers(tmp_path: Path) -> None:
    runs, child = Runs("h200"), Child(tmp_path / "run.prom")

    with no_free_descriptor(), runs.following(child.file):
        busy = read(runs)
    child.work(tokens=100, seconds=3, reward=0.5)
    with runs.following(child.file), no_free_descriptor():
        unread = read(runs)

    assert busy["regraft_worker_busy", "h200"] == 1
    assert unread == {("regraft_worker_busy", "h200"): 1, ("regraft_worker_jobs", "h200"): 1}
    assert read(runs)["regraft_worker_busy", "h200"] == 0


def test_each_grader_of_a_multi_is_counted_by_its_type() -> None:
    exact = {"type": "string_check", "input": "{{sample.output_text}}", "operation": "eq", "reference": "a"}
    spec = parse_grader(
        {
            "type": "multi",
            "name": "both",
            "graders": {
                "x": exact | {"name": "named by a tenant"},
                "y": {"type": "python", "name": "p", "source": "def grade(sample, item): return 1"},
            },
            "calculate_output": "x + y",
        }
    )

    class Both:
        name, type = "both", "multi"

        async def grade(self, sample: Sample, item: Item) -> Grade:
            failed = Grade(None, "it took too long", ErrorKind.python_grader_runtime_error, seconds=2.0)
            parts = {"x": Grade(1.0, seconds=0.25), "y": failed}
            return Grade(None, "y could not be judged", failed.error, parts)

    before = counted()
    asyncio.run(InstrumentedGrader(Both(), spec).grade(Sample("a"), {}))

    assert grown(before, "regraft_grades_total", "string_check", "graded") == 1
    assert grown(before, "regraft_grades_total", "python", "python_grader_runtime_error") == 1
    assert grown(before, "regraft_grades_total", "multi", "python_grader_runtime_error") == 1
    assert grown(before, "regraft_grade_seconds_sum", "python") == pytest.approx(2.0)
    assert not [value for series in counted() for value in series if "tenant" in value]


def test_a_step_and_its_tokens_are_counted_by_the_loop_itself(bench: Bench) -> None:
    before = counted()
    run = bench.run()
    run.experience.sampler = instruments.InstrumentedSampler(run.experience.sampler)
    run.experience.collector.sampler = run.experience.sampler
    run.experience.rewards.grader = InstrumentedGrader(ExactGrader(), parse_grader(GRADER))
    asyncio.run(run.train())

    steps = bench.steps()
    answers = 4 * 8 + 3 * 4  # four steps of two groups of four, and three validations of four prompts
    assert grown(before, "regraft_step_seconds_count", "all") == len(steps) == 5
    assert grown(before, "regraft_sampled_tokens_total") == 2 * answers
    assert (
        grown(before, "regraft_trained_tokens_total")
        == sum(one.get("trained_tokens", 0) for one in steps)
        > 0
    )
    assert grown(before, "regraft_grades_total", "string_check", "graded") == answers
    assert counted()["regraft_reward", "train"] == steps[-1]["train_reward_mean"]
    assert counted()["regraft_mixed_groups_share",] == steps[-1]["groups_mixed_share"]


def test_a_run_writes_its_counts_when_it_ends(tmp_path: Path) -> None:
    with instruments.written_to(tmp_path / "run.prom"):
        instruments.SAMPLED.inc(5)

    assert (
        f"regraft_sampled_tokens_total {counted()['regraft_sampled_tokens_total',]}"
        in (tmp_path / "run.prom").read_text()
    )


def says(text: str, status: int = 0) -> Gpus:
    """Stands in for nvidia-smi."""
    gpus = Gpus()
    gpus.command = (sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})")
    return gpus


def test_the_gpus_are_told_of_as_nvidia_smi_sees_them() -> None:
    figures = read(says("0, 20480, 143771, 87, NVIDIA H200\n1, 0, 143771, [N/A], NVIDIA H200"))

    assert figures == {
        ("regraft_gpu_memory_used_bytes", "0"): 20480 * 2**20,
        ("regraft_gpu_memory_total_bytes", "0"): 143771 * 2**20,
        ("regraft_gpu_utilization_ratio", "0"): pytest.approx(0.87),
        ("regraft_gpu_memory_used_bytes", "1"): 0,
        ("regraft_gpu_memory_total_bytes", "1"): 143771 * 2**20,
    }


def test_nvidia_smi_that_hangs_delays_its_readers_once(tmp_path: Path) -> None:
    """Each of its processes may stay inside the driver that hangs until the machine is restarted."""
    started, now = tmp_path / "started", [0.0]
    gpus = Gpus(lambda: now[0])
    untyped(gpus).command = ("sh", "-c", f"printf x >> '{started}'; exec sleep 600")

    for _ in range(3):
        assert read(gpus) == {}
        now[0] += gpus.fresh_seconds

    assert started.read_text() == "x"


@pytest.mark.parametrize("broken", ["missing", "failing"])
def test_a_machine_without_gpus_or_a_driver_has_nothing_to_tell(broken: str) -> None:
    gpus = says("No devices were found", status=6)
    if broken == "missing":
        untyped(gpus).command = ("no-such-program",)

    assert read(gpus) == {}


@pytest.mark.slow
def test_python_grades_under_way_are_counted_until_they_end() -> None:
    sandbox = pool.Pool(size=2, insecure=True)
    try:
        assert (sandbox.load().slots, sandbox.load().grades) == (2, 0)
        grades = [
            sandbox.submit("def grade(sample, item): return 1", {"output_text": ""}, {}) for _ in range(4)
        ]
        assert sandbox.load().grades > 0
        assert [grade.result().score for grade in grades] == [1.0] * 4
        assert 1 <= sandbox.load().processes <= 2
    finally:
        sandbox.close()
    assert sandbox.load().grades == 0
    assert {series[0] for series in read(Sandbox("its"))} == {"its_slots", "its_grades", "its_processes"}


def test_a_missing_layer_of_the_sandbox_is_0() -> None:
    layers = SandboxLayers(lambda: {"seccomp": "", "signal_scope": "needs Linux 6.12"})

    assert read(layers) == {
        ("regraft_sandbox_layer", "seccomp"): 1.0,
        ("regraft_sandbox_layer", "signal_scope"): 0.0,
    }
