"""Measure how long choosing a step's prompts blocks the event loop: 50,000 rows, 256 prompts a step, over two epochs.

`seconds_per_step_50k` is the worst step, which is one that begins an epoch and shuffles it; `seconds_per_step_mean_50k`
the mean. `others_seconds_50k` is one order of the prompts that dynamic sampling may draw, which is made in a thread.
"""

import statistics
import time
from collections.abc import Callable

from bench.report import report
from bench.sizes import sized
from worker.rollout.prompts import PromptStream
from worker.types import Prompt

ROWS, BATCH, EPOCHS = sized(50_000, 1024), 256, 2


def main() -> None:
    prompts = [Prompt(line, (1, 2, 3), {}) for line in range(1, ROWS + 1)]
    stream = PromptStream(prompts, batch_size=BATCH, seed=1)
    steps = range(1, EPOCHS * ROWS // BATCH + 1)
    seconds = [seconds_of(lambda step=step: stream.batch(step)) for step in steps]  # type: ignore[misc]
    report(
        "data",
        {
            "seconds_per_step_50k": max(seconds),
            "seconds_per_step_mean_50k": statistics.fmean(seconds),
            "others_seconds_50k": seconds_of(lambda: stream.others(len(steps))),
        },
    )


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
