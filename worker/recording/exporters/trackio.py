"""Trackio: a folder of this machine, or what TRACKIO_SPACE_ID or TRACKIO_SERVER_URL of the environment name."""

from collections.abc import Mapping
from typing import Any

from worker.recording.exporters.types import RunInfo
from worker.types import Ended


class TrackioExporter:
    """The run is found again by its name, which therefore ends with the job's id."""

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, run_info: RunInfo) -> int | None:
        import trackio

        self._run = trackio.init(
            project=run_info.project,
            name=run_info.name if run_info.name == run_info.job_id else f"{run_info.name} {run_info.job_id}",
            config={**run_info.config, "tags": list(run_info.tags)},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        last = self._run._next_step - 1  # there is no public word for it; pyproject.toml pins the version
        return None if last < 0 else int(last)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        # trackio has its own column for the step, and warns about a metric with that name.
        self._run.log({name: value for name, value in metrics.items() if name != "step"}, step=step)

    def finish(self, ended: Ended) -> None:
        self._run.finish()
