"""The inference process of `regraft-server up`: started when something needs it, and again when it dies."""

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading

from core.settings import Settings

log = logging.getLogger(__name__)


def own_address(settings: Settings) -> Settings:
    """The settings with an address on this machine for inference, where the operator has named none.

    It is put into the environment, too: that is where the runs which this process starts read their settings.
    """
    if settings.inference_url:
        return settings
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["REGRAFT_INFERENCE_URL"] = f"http://127.0.0.1:{port}/v1"
    os.environ["REGRAFT_INFERENCE_KEY"] = secrets.token_urlsafe(24)
    return Settings()


class InferenceServer:
    """`python -m worker.serve` as a child. It loads a model only when asked, so that waiting costs little memory."""

    def __init__(self, settings: Settings, *, restart_after_s: float = 2.0) -> None:
        self._port = settings.inference_url.rsplit(":", 1)[1].split("/", 1)[0]
        self._restart_after_s = restart_after_s
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        # The child dies with the thread that started it, so that thread has to be the one that waits.
        self._thread = threading.Thread(target=self._keep, name="inference", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._child is not None:
            self._child.kill()
        self._thread.join()

    def _keep(self) -> None:
        while not self._stopping.is_set():
            command = [sys.executable, "-m", "worker.serve", self._port, str(os.getpid())]
            self._child = subprocess.Popen(command, start_new_session=True)
            status = self._child.wait()
            if not self._stopping.is_set():
                log.warning("the inference process ended with status %d and is started again", status)
                self._stopping.wait(self._restart_after_s)
