"""Exporters of a run's metrics to external services: a small protocol, and a module for each service."""

from worker.recording.exporters.types import Card, Sink

__all__ = ["Card", "Sink"]
