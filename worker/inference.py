"""The inference process of `regraft-server up`: started when the first request comes, and again when it has ended.

The server holds the listening socket and the process inherits it: a request that comes while there is no process waits
in the socket until there is one. An idle process ends by itself, so that it costs no memory.
"""

import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading

from core.settings import Settings
from worker.process import quiet_environment

log = logging.getLogger(__name__)


def own_address(settings: Settings) -> tuple[Settings, socket.socket | None]:
    """The settings with an address on this machine for inference, where the operator has named none; and its socket.

    It is put into the environment, too: that is where the runs which this process starts read their settings.
    """
    if settings.inference_url:
        return settings, None
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listening.getsockname()[1]
    os.environ["REGRAFT_INFERENCE_URL"] = f"http://127.0.0.1:{port}/v1"
    os.environ["REGRAFT_INFERENCE_KEY"] = secrets.token_urlsafe(24)
    return Settings(), listening


class InferenceServer:
    """`python -m worker.serve` as a child, whenever somebody knocks."""

    def __init__(self, listening: socket.socket, *, restart_after_s: float = 2.0) -> None:
        self._listening = listening
        self._restart_after_s = restart_after_s
        self._stopping, self._stop = socket.socketpair()
        self._child: subprocess.Popen[bytes] | None = None
        # The child dies with the thread that started it, so that thread has to be the one that waits.
        self._thread = threading.Thread(target=self._keep, name="inference", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.close()
        if self._child is not None:
            self._child.kill()
        self._thread.join()
        self._stopping.close()
        self._listening.close()

    def _keep(self) -> None:
        while self._knocked():
            descriptor = self._listening.fileno()
            command = [sys.executable, "-m", "worker.serve", str(descriptor), str(os.getpid())]
            self._child = subprocess.Popen(
                command, start_new_session=True, pass_fds=[descriptor], env=quiet_environment()
            )
            if self._told_to_stop(0):  # while it was started, so that nobody has killed it yet
                self._child.kill()
            status = self._child.wait()
            if status != 0 and not self._told_to_stop(0):
                log.warning("the inference process ended with status %d", status)
                self._told_to_stop(self._restart_after_s)

    def _knocked(self) -> bool:
        """Wait for a connection. False: the server ends."""
        select.select([self._listening, self._stopping], [], [])
        return not self._told_to_stop(0)

    def _told_to_stop(self, seconds: float) -> bool:
        return bool(select.select([self._stopping], [], [], seconds)[0])
