"""MLflow. The tracking server is MLFLOW_TRACKING_URI of the worker's environment, with its own variables for access."""

import re
import time
from collections.abc import Mapping
from typing import Any

from worker.recording.exporters.types import RunInfo
from worker.types import Ended

JOB_TAG = "regraft.job_id"
# Its words for our ends: SCHEDULED is what will be run again.
STATUS: Mapping[Ended, str] = {"succeeded": "FINISHED", "failed": "FAILED", "interrupted": "SCHEDULED"}


class MlflowExporter:
    """The experiment is the integration's project, and the run is found again by its tag."""

    def __init__(self, tracking_uri: str | None = None) -> None:
        """None: the environment's."""
        self.tracking_uri = tracking_uri
        self._client: Any = None
        self._run_id = ""

    def start(self, run_info: RunInfo) -> int | None:
        from mlflow import MlflowClient
        from mlflow.entities import Param, ViewType

        self._client = MlflowClient(tracking_uri=self.tracking_uri)
        experiment_id = self._experiment(run_info.project)
        wanted = f"tags.`{JOB_TAG}` = '{run_info.job_id}'"
        found = self._client.search_runs([experiment_id], wanted, ViewType.ALL, max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            # Every step has its own number among its metrics.
            last = found[0].data.metrics.get("step")
            return None if last is None else int(last)
        tags = {JOB_TAG: run_info.job_id, **dict.fromkeys(run_info.tags, "true")}
        run = self._client.create_run(experiment_id, run_name=run_info.name, tags=tags)
        self._run_id = run.info.run_id
        params = [Param(key, str(value)) for key, value in run_info.config.items()]
        self._client.log_batch(self._run_id, params=params)
        return None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        taken = [Metric(_key(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=taken)

    def finish(self, ended: Ended) -> None:
        if ended == "interrupted":
            self._client.update_run(self._run_id, status=STATUS[ended])
        else:
            self._client.set_terminated(self._run_id, STATUS[ended])

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(name))


def _key(name: str) -> str:
    """A name as MLflow takes it; those of graders may have any characters."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)[:250]
