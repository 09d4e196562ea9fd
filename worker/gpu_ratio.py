"""Find the ratio of GPUs with which sampling and learning would wait least for each other, from what steps took."""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

MEASURED_STEPS = 3


def gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def settings_of(sampling_gpus: int, ranks: int) -> str:
    """The settings of a worker with this ratio. `regraft-server plan` prints the same."""
    return f"REGRAFT_SAMPLING_GPUS={sampling_gpus} with REGRAFT_RANKS={ranks}"


def side_by_side(
    sampling_seconds: float, sampling_gpus: int, learning_seconds: float, learning_gpus: int
) -> str:
    """Which of the two waits for the other. `regraft-server plan` prints the same."""
    waits = "learning" if sampling_seconds > learning_seconds else "sampling"
    return (
        f"sampling takes {sampling_seconds:.1f} s on {gpus(sampling_gpus)}, learning {learning_seconds:.1f} s on "
        f"{learning_gpus}, so {waits} waits."
    )


@dataclass(frozen=True)
class GpuSplit:
    """The GPUs of a run of which some sample and others learn. There may be more that do neither."""

    sampling: int
    learning: int


@dataclass(frozen=True)
class GpuRatio:
    """Seconds of both at once, on these GPUs, and the best division of the GPUs if each scales with its own."""

    sampling_seconds: float
    learning_seconds: float
    sampling_gpus: int
    learning_gpus: int
    tensor_parallel: int

    def seconds_with(self, sampling_gpus: int) -> float:
        """Of the longer of the two, if `sampling_gpus` sample and the others learn."""
        learning_gpus = self.sampling_gpus + self.learning_gpus - sampling_gpus
        return max(
            self.sampling_seconds * self.sampling_gpus / sampling_gpus,
            self.learning_seconds * self.learning_gpus / learning_gpus,
        )

    @property
    def best_sampling_gpus(self) -> int:
        total, step = self.sampling_gpus + self.learning_gpus, self.tensor_parallel
        # The present one wins a tie.
        return min(
            range(step, total, step), key=lambda gpus: (self.seconds_with(gpus), gpus != self.sampling_gpus)
        )

    @property
    def message(self) -> str:
        sides = side_by_side(
            self.sampling_seconds, self.sampling_gpus, self.learning_seconds, self.learning_gpus
        )
        begins = f"Measured in {MEASURED_STEPS} steps: {sides} "
        best = self.best_sampling_gpus
        if best == self.sampling_gpus:
            return f"{begins}No other ratio of these GPUs would be faster."
        learning = self.sampling_gpus + self.learning_gpus - best
        return (
            f"{begins}{settings_of(best, learning)} would take {self.seconds_with(best):.1f} s instead of "
            f"{self.seconds_with(self.sampling_gpus):.1f} s, if both scale with their GPUs."
        )

    @property
    def data(self) -> dict[str, Any]:
        best = self.best_sampling_gpus
        return {
            "sampling_seconds": self.sampling_seconds,
            "learning_seconds": self.learning_seconds,
            "sampling_gpus": self.sampling_gpus,
            "learning_gpus": self.learning_gpus,
            "best_sampling_gpus": best,
            "best_learning_gpus": self.sampling_gpus + self.learning_gpus - best,
        }


@dataclass
class RatioMeasurement:
    """Measures the first steps of an attempt at a job whose GPUs are split."""

    sampling_gpus: int
    learning_gpus: int
    tensor_parallel: int = 1
    _seconds: list[tuple[float, float]] = field(default_factory=list)

    def add(self, ahead_seconds: float | None, learning_seconds: float) -> GpuRatio | None:
        """Returns the result, once. Steps that were not sampled during another one do not count."""
        if ahead_seconds is None or len(self._seconds) == MEASURED_STEPS:
            return None
        self._seconds.append((ahead_seconds, learning_seconds))
        if len(self._seconds) < MEASURED_STEPS:
            return None
        sampling, learning = (fmean(column) for column in zip(*self._seconds, strict=True))
        return GpuRatio(sampling, learning, self.sampling_gpus, self.learning_gpus, self.tensor_parallel)
