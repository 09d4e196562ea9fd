"""A regraft service on this machine for as long as an example runs: SQLite, a folder, no broker."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI


@contextmanager
def local_service(folder: Path) -> Iterator[OpenAI]:
    """Start `regraft-server up` with its data in `folder`, yield OpenAI's client for it, and stop it."""
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    environment = os.environ | {"REGRAFT_DATA_DIR": str(folder), "REGRAFT_PORT": str(port)}
    log_path = folder / "server.log"
    with log_path.open("w") as log:
        command = [sys.executable, "-m", "worker.cli", "up"]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_until_ready(server, port, log_path)
            print(
                f"Service ready after {time.monotonic() - start:.1f} s; its log is {log_path}\n", flush=True
            )
            if found := re.search(r"The console, .*: (http\S+)", log_path.read_text()):
                print(f"Watch it in a browser: {found[1]}\n", flush=True)
            key = (folder / "api_key").read_text().strip()
            yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    sys.exit(f"The service did not start. The end of its log:\n{log.read_text()[-2000:]}")
