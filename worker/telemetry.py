"""Prometheus metrics of a worker: its runs, its GPUs, its sandbox and its threads."""

import csv
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import prometheus_client as prometheus
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from core.service.workers import GpuUse
from core.telemetry.metrics import COUNTED
from graders.sandbox import pool
from worker.process import run_within

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0  # of nvidia-smi


def _results(name: str, help: str, results: Iterable[str]) -> prometheus.Counter:
    """Create a counter by result, at 0 for each: Prometheus sees no increase in a series that begins at 1."""
    counter = prometheus.Counter(name, help, ("result",), registry=COUNTED)
    for result in results:
        counter.labels(result)
    return counter


WEBHOOK_ATTEMPTS = _results(
    "regraft_webhook_attempts",
    "Attempts to deliver a webhook, by result: delivered, failed (will be retried), or given_up.",
    ("delivered", "failed", "given_up"),
)
SCRUBBED = _results(
    "regraft_scrubbed_objects",
    "Files and checkpoints verified by the scrub, by result: whole, damaged, missing, or unreadable.",
    ("whole", "damaged", "missing", "unreadable"),
)
PASS_FAILURES = prometheus.Counter(
    "regraft_reconciler_failures",
    "Failed reconciler passes. The reconciler retries each.",
    ("pass",),
    registry=COUNTED,
)

EVAL_ITEMS = _results(
    "regraft_eval_items",
    "Finished items of eval runs, by result: pass, fail, or error.",
    ("pass", "fail", "error"),
)
EVAL_SECONDS = prometheus.Histogram(
    "regraft_eval_item_seconds",
    "Seconds of an item of an eval run, by phase: sampling (with the wait for a place at the server) or grading.",
    ("phase",),
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
    registry=COUNTED,
)

# Keys: the name of a sample and its labels.
Counts = Counter[tuple[str, tuple[tuple[str, str], ...]]]


class Runs:
    """Collects the metrics of this worker's runs, labeled with its GPU class.

    Counters and histograms accumulate over runs. Gauges exist only while a run is in progress; those of runs that share
    the device are of the one that began last.
    """

    def __init__(self, gpu_class: str) -> None:
        self.gpu_class = gpu_class
        self._files: list[Path] = []
        self._lock = threading.Lock()
        self._families: dict[str, Metric] = {}
        self._counted: defaultdict[str, Counts] = defaultdict(Counter)

    @contextmanager
    def following(self, file: Path) -> Iterator[None]:
        """Read the metrics of a run from this file during the context, then delete the file."""
        with self._lock:
            self._files.append(file)
        try:
            yield
        finally:
            with self._lock:
                self._files.remove(file)
                for family in _of_the_run(file):
                    if family.type != "gauge":
                        self._families[family.name] = family
                        self._counted[family.name].update(_counts(family))
                with suppress(OSError):
                    file.unlink()

    def collect(self) -> Iterable[Metric]:
        busy = GaugeMetricFamily(
            "regraft_worker_busy", "1 while this worker runs a job.", labels=["gpu_class"]
        )
        jobs = GaugeMetricFamily(
            "regraft_worker_jobs", "Number of jobs that this worker runs.", labels=["gpu_class"]
        )
        with self._lock:
            busy.add_metric([self.gpu_class], float(bool(self._files)))
            jobs.add_metric([self.gpu_class], len(self._files))
            return [busy, jobs, *self._together()]

    def _together(self) -> Iterator[Metric]:
        now: dict[str, Metric] = {}
        counted: defaultdict[str, Counts] = defaultdict(Counter)
        for family in (family for file in self._files for family in _of_the_run(file)):
            now[family.name] = family
            if family.type == "gauge":
                counted[family.name] = _counts(family)
            else:
                counted[family.name].update(_counts(family))
        for name, known in (self._families | now).items():
            family = Metric(name, known.documentation, known.type)
            counts = Counter(self._counted[name])
            counts.update(counted[name])
            for (sample, labels), value in counts.items():
                family.add_sample(sample, {"gpu_class": self.gpu_class} | dict(labels), value)
            yield family


def _of_the_run(file: Path) -> list[Metric]:
    try:
        text = file.read_text()
    except FileNotFoundError:  # it has counted nothing yet
        return []
    except OSError as cause:  # such as no free descriptor
        log.warning("the metrics of a run cannot be read: %s", cause)
        return []
    return list(text_string_to_metric_families(text))


def _counts(family: Metric) -> Counts:
    return Counter({(sample.name, tuple(sample.labels.items())): sample.value for sample in family.samples})


class Sandbox:
    """Collects the load of this process's python graders, in metrics whose names begin with `name`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def collect(self) -> Iterable[Metric]:
        load = pool.shared().load()
        for name, help, value in (
            ("slots", "Python grader slots: the maximum number of concurrent python grades.", load.slots),
            ("grades", "Python grades in flight, including those queued for a slot.", load.grades),
            ("processes", "Sandbox processes for python graders.", load.processes),
        ):
            yield GaugeMetricFamily(f"{self.name}_{name}", help, value=value)


class SandboxLayers:
    """Reports which layers of the sandbox work on this host. Probes once, by starting one process."""

    def __init__(self, probe: Callable[[], Mapping[str, str]] = pool.probe) -> None:
        self._probe = probe

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "regraft_sandbox_layer",
            "1 if the sandbox layer works on this host, 0 if it is unavailable; the log has the reason.",
            labels=["layer"],
        )
        for layer, missing in self._probe().items():
            family.add_metric([layer], float(not missing))
        yield family


class Gpus:
    """Collects GPU metrics from `nvidia-smi`; no metrics on a machine or in a container without GPUs."""

    command = (
        "nvidia-smi",
        "--query-gpu=index,memory.used,memory.total,utilization.gpu,name",
        "--format=csv,noheader,nounits",
    )
    fresh_seconds = 10.0
    # Between two of its processes in a driver that hangs: each may stay until the machine is restarted.
    hung_seconds = 600.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at: float | None = None
        self._again_at = float("-inf")
        self._read: Sequence[GpuUse] = []

    def collect(self) -> Iterable[Metric]:
        return self._families(self.read())

    def read(self) -> Sequence[GpuUse]:
        """The GPUs as they were at most ten seconds ago; none while nvidia-smi does not answer."""
        with self._lock:
            now = self._clock()
            is_old = self._read_at is None or now - self._read_at >= self.fresh_seconds
            if is_old and now >= self._again_at:
                self._read = self._parse(self._ask())
                self._read_at = self._clock()  # after it, so that no waiting caller starts another process
            return self._read

    def _ask(self) -> str:
        try:
            answer = run_within(self.command, ANSWER_SECONDS)
        except OSError:  # not installed, or no process is free
            return ""
        if answer is None:
            log.warning(
                "nvidia-smi has not answered in %g s, as in a driver that hangs; the next try is in %g s",
                ANSWER_SECONDS,
                self.hung_seconds,
            )
            self._again_at = self._clock() + self.hung_seconds
            return ""
        return "" if answer.returncode else answer.stdout

    @staticmethod
    def _parse(output: str) -> list[GpuUse]:
        mebibyte = 1 << 20
        found = []
        rows = [row for row in csv.reader(output.splitlines(), skipinitialspace=True) if len(row) == 5]
        for index, *values, name in rows:
            used, total, busy = map(_known, values)
            found.append(
                GpuUse(
                    index=index,
                    name=name,
                    memory_used_bytes=None if used is None else int(used * mebibyte),
                    memory_total_bytes=None if total is None else int(total * mebibyte),
                    utilization=None if busy is None else busy / 100,
                )
            )
        return found

    @staticmethod
    def _families(gpus: Sequence[GpuUse]) -> list[Metric]:
        used, total, busy = (
            GaugeMetricFamily(f"regraft_gpu_{name}", help, labels=["gpu"])
            for name, help in (
                ("memory_used_bytes", "GPU memory in use by all processes, in bytes."),
                ("memory_total_bytes", "Total GPU memory in bytes."),
                ("utilization_ratio", "GPU utilization of the last sample period, from 0 to 1."),
            )
        )
        for gpu in gpus:
            for family, value in (
                (used, gpu.memory_used_bytes),
                (total, gpu.memory_total_bytes),
                (busy, gpu.utilization),
            ):
                if value is not None:
                    family.add_metric([gpu.index], float(value))
        return [used, total, busy]


def _known(value: str) -> float | None:
    """None: "[N/A]", such as the utilization of a MIG slice."""
    try:
        return float(value)
    except ValueError:
        return None
