"""The errors that end an engine, written to a file by its processes and read by the process that has started it.

vLLM's server says of a failed start only that it failed; the reason is in the log of a process below it. Our plugin
for vLLM adds this log handler to the engine's core and its workers. The server itself configures its loggers anew
after the plugin, without the handler.
"""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

FILE = "REGRAFT_ENGINE_ERRORS"  # in the environment of an engine's processes: a path
# vLLM's messages for the errors that end a process, once in its life. It logs others and continues: a request that
# cannot be parsed, or an adapter for which the memory does not suffice. The core's text has that of a worker's error.
FATAL = frozenset(
    {
        "EngineCore failed to start.",
        "EngineCore encountered a fatal error.",
        "WorkerProc failed to start.",
        "WorkerProc failed.",
    }
)


class ErrorFile(logging.Handler):
    """Appends each error that ends the process, one JSON string a line."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or record.msg not in FATAL:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(f"{type(error).__name__}: {error}"[:4000]) + "\n")
        except OSError:
            self.handleError(record)


def write_errors_of(logger: logging.Logger) -> None:
    """Have this process write the errors of the logger and those below it, if its parent wants them."""
    if path := os.environ.get(FILE):
        logger.addHandler(ErrorFile(Path(path)))


def file_in(folder: Path) -> Path:
    return folder / "errors"


def read(folder: Path) -> Iterator[str]:
    """Yield the errors of an engine with this private folder, oldest first. A line that was cut is left out."""
    try:
        lines = file_in(folder).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield str(json.loads(line))
        except ValueError:
            continue
