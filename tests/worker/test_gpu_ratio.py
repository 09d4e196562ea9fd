"""The ratio of GPUs for sampling and learning, with numbers that can be checked in the head."""

import pytest

from worker.gpu_ratio import GpuRatio, RatioMeasurement
from worker.prepare.rollouts import ratio_of
from worker.sampling.placement import Placement


def test_gpus_move_to_the_side_that_the_other_waits_for() -> None:
    """24 GPU-seconds of sampling and 24 of learning on 8 GPUs: four each."""
    ratio = GpuRatio(12.0, 4.0, sampling_gpus=2, learning_gpus=6, tensor_parallel=1)

    assert ratio.best_sampling_gpus == 4
    assert (ratio.seconds_with(2), ratio.seconds_with(4)) == (12.0, 6.0)
    assert "so learning waits" in ratio.message
    assert "REGRAFT_SAMPLING_GPUS=4 with REGRAFT_RANKS=4 would take 6.0 s instead of 12.0 s" in ratio.message
    assert (ratio.data["best_sampling_gpus"], ratio.data["best_learning_gpus"]) == (4, 4)


def test_a_ratio_that_is_the_best_one_is_kept() -> None:
    ratio = GpuRatio(5.0, 6.0, sampling_gpus=4, learning_gpus=4, tensor_parallel=1)

    assert ratio.best_sampling_gpus == 4
    assert ratio.message.endswith("so sampling waits. No other ratio of these GPUs would be faster.")


def test_engines_of_several_gpus_get_all_of_theirs() -> None:
    ratio = GpuRatio(10.0, 2.0, sampling_gpus=2, learning_gpus=6, tensor_parallel=2)

    assert ratio.best_sampling_gpus == 4  # 5 s and 3 s; with five, no engine would have the fifth
    assert ratio.seconds_with(4) == pytest.approx(5.0)


def test_three_steps_that_sampled_ahead_are_measured_once() -> None:
    measurement = RatioMeasurement(1, 1)
    added = [
        measurement.add(*seconds) for seconds in ((None, 9.0), (3.0, 1.0), (4.0, 2.0), (5.0, 3.0), (9.0, 9.0))
    ]

    assert [one is not None for one in added] == [False, False, False, True, False]
    assert added[3] is not None
    assert (added[3].sampling_seconds, added[3].learning_seconds) == (4.0, 2.0)


@pytest.mark.parametrize(("kind", "measures"), [("split", True), ("colocated", False)])
def test_only_gpus_that_are_split_have_a_ratio(kind: str, measures: bool) -> None:
    placement = Placement(2, (("2", "3"),), "split" if kind == "split" else "colocated")

    assert ratio_of(placement, None) == (RatioMeasurement(2, 1, 2) if measures else None)
