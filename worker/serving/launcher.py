"""Run the inference process of `regraft-server up`: start it on the first request and restart it after it exits.

The server holds the listening socket and the process inherits it, so requests wait in the socket's backlog while no
process runs. An idle process exits to free its memory.
"""

import logging
import os
import secrets
import select
import socket
import sys
import threading
from collections.abc import Callable

from core.settings import Settings
from worker import forking
from worker.forking import Started
from worker.process import KILLED_SECONDS, quiet_environment

log = logging.getLogger(__name__)


def own_address(settings: Settings) -> tuple[Settings, socket.socket | None]:
    """Return settings with a local inference address and its socket, unless the operator has configured an address.

    Sets the environment variables too, from which child runs read their settings.
    """
    if settings.inference_url:
        return settings, None
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listening.getsockname()[1]
    os.environ["REGRAFT_INFERENCE_URL"] = f"http://127.0.0.1:{port}/v1"
    os.environ["REGRAFT_INFERENCE_KEY"] = secrets.token_urlsafe(24)
    return Settings(), listening


class InferenceServer:
    """Starts `python -m worker.serving` as a child process on incoming connections."""

    def __init__(
        self,
        listening: socket.socket,
        *,
        restart_after_s: float = 2.0,
        start_process: Callable[..., Started] = forking.start,
    ) -> None:
        self._listening = listening
        self._start_process = start_process
        self._restart_after_s = restart_after_s
        self._stopping, self._stop = socket.socketpair()
        self._child: Started | None = None
        self._thread = threading.Thread(target=self._keep, name="inference", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.close()
        if self._child is not None:
            self._child.kill()
        self._thread.join(KILLED_SECONDS)
        if self._thread.is_alive():
            log.error("the inference process does not end, as in a driver that hangs; it is left alone")
            return
        self._stopping.close()
        self._listening.close()

    def _keep(self) -> None:
        while self._knocked():
            descriptor = self._listening.fileno()
            command = [sys.executable, "-m", "worker.serving", str(descriptor), str(os.getpid())]
            try:
                self._child = self._start_process(command, quiet_environment(), pass_fds=[descriptor])
            except (
                OSError
            ) as cause:  # no memory, process or descriptor is free; the request waits in the backlog
                log.warning("the inference process could not be started: %s; retrying", cause)
                self._stops_within(self._restart_after_s)
                continue
            if self._stops_within(0):  # `stop` was called during the start and has not killed it
                self._child.kill()
            status = self._child.wait()
            if status != 0 and not self._stops_within(0):
                log.warning("the inference process exited with status %d", status)
                self._stops_within(self._restart_after_s)

    def _knocked(self) -> bool:
        """Wait for a connection. Returns False if the server stops."""
        select.select([self._listening, self._stopping], [], [])
        return not self._stops_within(0)

    def _stops_within(self, seconds: float) -> bool:
        return bool(select.select([self._stopping], [], [], seconds)[0])
