"""Where the metrics of a run are sent besides: one small protocol, and a module for each service."""

from worker.sinks.types import Card, Ended, Sink

__all__ = ["Card", "Ended", "Sink"]
