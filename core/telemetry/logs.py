"""Log records with context: the request, the job, its attempt, its step.

    with logs.bound(job_id=job.id):
        ...  # every record logged in this block has the field

The text format appends the fields to the message; the JSON format has an object per line with the fields as keys.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import IO, Any, Literal

Format = Literal["text", "json"]

_bound: ContextVar[Mapping[str, Any]] = ContextVar("fields", default=MappingProxyType({}))

# Control sequences of terminals: CSI (colors, cursor), OSC (titles, links) and the short ones.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")

# Prefix of each traceback line of an exception group.
_GROUP_MARGIN = re.compile(r"^\s*[|+] ?")

# These loggers report every message, connection or request.
TALKATIVE = ("kombu", "httpx", "httpcore")


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Add fields to all records of this thread or task, and of those started from it, during the block."""
    token = _bound.set({**_bound.get(), **fields})
    try:
        yield
    finally:
        _bound.reset(token)


def extra(**fields: Any) -> dict[str, Any]:
    """Add fields to one record: `log.info("…", extra=logs.extra(status=200))`."""
    return {"fields": fields}


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        return super().formatMessage(record) + (f" [{fields}]" if fields else "")


class Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(
            {**line, **_fields(record), **line}, default=str
        )  # the first spread sets the order of keys


def handler(format: Format, stream: IO[str] | None = None) -> logging.Handler:
    """A handler for standard error, or for the given stream."""
    writes = logging.StreamHandler(stream)
    writes.setFormatter(Json() if format == "json" else TextFormatter())
    return writes


def configure(handlers: Sequence[logging.Handler], *, requests: bool = False) -> None:
    """Log everything from INFO on; with `requests` also a line per request of the API."""
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("api.http.request_metrics").setLevel(logging.INFO if requests else logging.WARNING)


def cleaned(text: str) -> str:
    """The text as a terminal would finally show it, without colors: the last version of a line redrawn by "\\r"."""
    lines = _ESCAPES.sub("", text).split("\n")
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines)


def headline(log: str) -> str:
    """The line of a process's log with the cause of its failure, or "".

    The first line of the exception of the last traceback; without one the last line.
    """
    lines = [_GROUP_MARGIN.sub("", line) for line in cleaned(log).splitlines() if line.strip()]
    begins = [number for number, line in enumerate(lines) if "Traceback (most recent call last):" in line]
    if begins:
        below = lines[begins[-1] + 1 :]
        return next((line.strip() for line in below if not line.startswith(" ")), "")
    return lines[-1].strip() if lines else ""


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {**_bound.get(), **getattr(record, "fields", {})}
