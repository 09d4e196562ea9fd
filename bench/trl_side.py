"""What all benches that compare with TRL give its trainers."""

import time
from typing import Any

# Options of a trainer that computes in float32 on a CPU, and writes and prints nothing.
ON_CPU = {
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1000,
    "disable_tqdm": True,
}


def clock() -> Any:
    """A callback that notes the seconds of each step, and the losses that are logged."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.losses: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" in logs:
                self.losses.append(logs["loss"])

    return Clock()
