"""Create the exporters of a job from its integrations and the operator's settings."""

import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from core.database.tables import Job
from core.jobs import integrations
from core.jobs.hyperparameters import Resolved
from core.jobs.integrations import Kind
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.settings import Settings
from worker.recording.exporters.mlflow import MlflowExporter
from worker.recording.exporters.tensorboard import TensorBoardExporter
from worker.recording.exporters.threads import ExporterThread, ExporterThreads
from worker.recording.exporters.trackio import TrackioExporter
from worker.recording.exporters.types import Exporter, RunInfo
from worker.recording.exporters.wandb import WandbExporter

LABELS: Mapping[Kind, str] = {
    "wandb": "Weights & Biases",
    "mlflow": "MLflow",
    "trackio": "Trackio",
    "tensorboard": "TensorBoard",
}
WITHOUT_PACKAGE: frozenset[Kind] = frozenset({"tensorboard"})
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")  # in the name of a variable
Make = Callable[[Kind, Settings], Exporter]
Warn = Callable[[str, dict[str, Any]], None]


def make(kind: Kind, settings: Settings) -> Exporter:
    """Create the exporter, without importing its library yet."""
    match kind:
        case "wandb":
            return WandbExporter(settings.data_dir.resolve() / "wandb")
        case "mlflow":
            return MlflowExporter()
        case "trackio":
            return TrackioExporter()
        case "tensorboard":
            return TensorBoardExporter(settings.data_dir.resolve() / "tensorboard")


def problem(
    settings: Settings,
    environment: Mapping[str, str] = os.environ,
    is_installed: Callable[[str], bool] = lambda package: find_spec(package) is not None,
) -> str | None:
    """Return why this worker cannot use a configured integration, in a sentence; checked before the worker starts."""
    for kind in settings.enabled_integrations:
        enabled = f"REGRAFT_INTEGRATIONS has {kind!r}"
        if kind not in WITHOUT_PACKAGE and not is_installed(kind):
            return f"{enabled}, whose package is not installed: pip install 'regraft-server[{kind}]'"
        offline = environment.get("WANDB_MODE") in ("offline", "disabled")
        if kind == "wandb" and not offline and not environment.get("WANDB_API_KEY"):
            return f"{enabled}: set WANDB_API_KEY to a key of the account that owns the runs"
        if kind == "mlflow" and not environment.get("MLFLOW_TRACKING_URI"):
            return f"{enabled}: set MLFLOW_TRACKING_URI to your tracking server"
    return None


def exporters_of(
    job: Job, resolved: Resolved | ResolvedOffline, settings: Settings, warn: Warn, make: Make = make
) -> ExporterThreads:
    """Create the exporters of a run, without starting them. `warn` emits an event of the job."""
    exporters = []
    for one in integrations.requested_integrations(job):
        kind = one["type"]
        if kind not in settings.enabled_integrations:
            message = (
                f"{LABELS[kind]} is not enabled on the worker of this job: no metrics are exported to it."
            )
            warn(message, {"integration": kind})
            continue
        exporters.append(
            ExporterThread(make(kind, settings), run_info(job, one[kind], resolved), _teller(kind, warn))
        )
    return ExporterThreads(exporters)


def run_info(job: Job, place: Mapping[str, Any], resolved: Resolved | ResolvedOffline) -> RunInfo:
    config = {
        "job_id": job.id,
        "model": job.model,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "suffix": job.suffix,
        "seed": job.seed,
        "method": job.method,
        "grader": job.body.get("grader", {}).get("type"),
        **resolved.model_dump(mode="json"),
    }
    return RunInfo(
        job_id=job.id,
        project=place["project"],
        name=place.get("name") or job.id,
        entity=place.get("entity"),
        tags=tuple(dict.fromkeys(place.get("tags") or ())),
        config={name: value for name, value in config.items() if value is not None},
    )


def _teller(kind: Kind, warn: Warn) -> Callable[[str], None]:
    def warn_of_rejection(what: str) -> None:
        message = (
            f"{LABELS[kind]} rejects this job's metrics. The export is retried until the run ends; all "
            f"metrics are stored here as well. First error: {without_secrets(what)}"
        )
        warn(message, {"integration": kind})

    return warn_of_rejection


def without_secrets(text: str) -> str:
    """The first line of what a service or its library said, as a tenant may read it."""
    text = re.sub(r"//[^/@\s]+@", "//***@", text.strip().split("\n", 1)[0])
    for name, value in os.environ.items():
        if len(value) >= 8 and SECRET.search(name):
            text = text.replace(value, "***")
    return text[:300]
