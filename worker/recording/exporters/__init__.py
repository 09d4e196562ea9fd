"""Exporters of a run's metrics to external services: a small protocol, and a module for each service."""

from worker.recording.exporters.types import Exporter, RunInfo

__all__ = ["Exporter", "RunInfo"]
