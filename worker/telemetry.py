"""What a worker tells Prometheus of itself: its runs, its GPUs, its sandbox, and what its threads do."""

import csv
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import prometheus_client as prometheus
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from core.metrics import COUNTED
from graders.sandbox import pool


def _results(name: str, help: str, results: Iterable[str]) -> prometheus.Counter:
    """A counter by result. Each starts at 0: a series that begins at 1 has not grown, says Prometheus."""
    counter = prometheus.Counter(name, help, ("result",), registry=COUNTED)
    for result in results:
        counter.labels(result)
    return counter


WEBHOOK_ATTEMPTS = _results(
    "regraft_webhook_attempts",
    "Attempts to deliver a webhook: delivered, failed (and tried again), or given_up.",
    ("delivered", "failed", "given_up"),
)
SCRUBBED = _results(
    "regraft_scrubbed_objects",
    "Files and checkpoints that the scrub has read against their hashes: whole, damaged, missing, or unreadable.",
    ("whole", "damaged", "missing", "unreadable"),
)
PASS_FAILURES = prometheus.Counter(
    "regraft_reconciler_failures",
    "Passes of the reconciler that failed; each is tried again.",
    ("pass",),
    registry=COUNTED,
)

# By the name of a sample and its labels.
Counts = Counter[tuple[str, tuple[tuple[str, str], ...]]]


class Runs:
    """The figures of this worker's runs, one after the other, under its GPU class.

    What counts up goes on counting where the run before has ended. What shows a state is there only while a run is.
    """

    def __init__(self, gpu_class: str) -> None:
        self.gpu_class = gpu_class
        self._file: Path | None = None
        self._lock = threading.Lock()
        self._families: dict[str, Metric] = {}
        self._counted: defaultdict[str, Counts] = defaultdict(Counter)

    @contextmanager
    def following(self, file: Path) -> Iterator[None]:
        """A run writes into this file from now on. It is removed afterwards."""
        with self._lock:
            self._file = file
        try:
            yield
        finally:
            with self._lock:
                for family in self._of_the_run():
                    if family.type != "gauge":
                        self._families[family.name] = family
                        self._counted[family.name].update(_counts(family))
                self._file = None
                file.unlink(missing_ok=True)

    def collect(self) -> Iterable[Metric]:
        busy = GaugeMetricFamily(
            "regraft_worker_busy", "1 while this worker runs a job.", labels=["gpu_class"]
        )
        with self._lock:
            busy.add_metric([self.gpu_class], float(self._file is not None))
            return [busy, *self._together()]

    def _together(self) -> Iterator[Metric]:
        now = {family.name: family for family in self._of_the_run()}
        for name, known in (self._families | now).items():
            family = Metric(name, known.documentation, known.type)
            counts = Counter(self._counted[name])
            counts.update(_counts(now[name]) if name in now else {})
            for (sample, labels), value in counts.items():
                family.add_sample(sample, {"gpu_class": self.gpu_class} | dict(labels), value)
            yield family

    def _of_the_run(self) -> list[Metric]:
        if self._file is None or not self._file.exists():
            return []
        return list(text_string_to_metric_families(self._file.read_text()))


def _counts(family: Metric) -> Counts:
    return Counter({(one.name, tuple(one.labels.items())): one.value for one in family.samples})


class Sandbox:
    """How busy the python graders of this process are. What they are called begins with `name`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def collect(self) -> Iterable[Metric]:
        load = pool.shared().load()
        for name, help, value in (
            ("slots", "Python graders that can grade at the same time.", load.slots),
            ("grades", "Python grades under way, those that wait for a slot included.", load.grades),
            ("processes", "Processes kept for python graders.", load.processes),
        ):
            yield GaugeMetricFamily(f"{self.name}_{name}", help, value=value)


class SandboxLayers:
    """Which layers of the sandbox hold on this host. Asked once, and answered by the start of one process."""

    def __init__(self, probe: Callable[[], Mapping[str, str]] = pool.probe) -> None:
        self._probe = probe

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "regraft_sandbox_layer",
            "1 if the layer protects python graders on this host, 0 if it is missing; the log says why.",
            labels=["layer"],
        )
        for layer, missing in self._probe().items():
            family.add_metric([layer], float(not missing))
        yield family


class Gpus:
    """What `nvidia-smi` says of the GPUs that this machine or container sees; nothing where there are none."""

    command = (
        "nvidia-smi",
        "--query-gpu=index,memory.used,memory.total,utilization.gpu",
        "--format=csv,noheader,nounits",
    )
    fresh_seconds = 10.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at: float | None = None
        self._read: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            now = self._clock()
            if self._read_at is None or now - self._read_at >= self.fresh_seconds:
                self._read, self._read_at = self._families(self._ask()), now
            return self._read

    def _ask(self) -> str:
        # Missing, or hanging in a driver that has failed: either way there is nothing to tell.
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(self.command, capture_output=True, text=True, timeout=5, check=True).stdout
        return ""

    def _families(self, said: str) -> list[Metric]:
        used, total, busy = (
            GaugeMetricFamily(f"regraft_gpu_{name}", help, labels=["gpu"])
            for name, help in (
                ("memory_used_bytes", "Memory in use, whoever uses it."),
                ("memory_total_bytes", "Total GPU memory in bytes."),
                ("utilisation_ratio", "Share of the last moment in which the GPU computed."),
            )
        )
        mebibyte = 1 << 20
        for row in csv.reader(said.splitlines(), skipinitialspace=True):
            gpu = row[0]
            for family, value, unit in zip(
                (used, total, busy), row[1:], (mebibyte, mebibyte, 0.01), strict=True
            ):
                with suppress(ValueError):  # "[N/A]": a slice of a GPU knows no utilisation
                    family.add_metric([gpu], float(value) * unit)
        return [used, total, busy]
