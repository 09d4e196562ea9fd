"""The process that holds a base model for the jobs of a worker. It computes nothing.

Started by worker/supervisor/sharing.py as `python -m worker.sharing.holder PARENT SOCKET MODEL`, and ended by a signal.
It listens from its first moment on, so that jobs can ask for the model while it is loaded.
"""

import argparse
import logging
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from core import fingerprint
from core.registry import Registry
from core.settings import Settings
from core.telemetry import logs
from worker import process
from worker.device import select_device
from worker.refusals import ModelUnavailable, Refusal, first_line
from worker.sharing.base import BaseLost, Offer, RunsAlone

if TYPE_CHECKING:
    from worker.sharing.image import Image

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m worker.sharing.holder")
    parser.add_argument(
        "parent", type=int, help="process id of the supervisor: this process ends when it does"
    )
    parser.add_argument("socket", type=int, help="the file descriptor of the listening socket")
    parser.add_argument("model", help="the base model, by its name in the registry")
    args = parser.parse_args()
    process.die_with_parent(args.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the supervisor decides
    settings = Settings()
    logs.configure([logs.handler(settings.log_format, sys.stdout)])
    hold(args.model, settings, socket.socket(fileno=args.socket))


def hold(model: str, settings: Settings, listener: socket.socket) -> NoReturn:
    """Load the model and give it to each job that connects."""
    from worker.model import memory
    from worker.model.policy import load_weights, source_of
    from worker.sharing.image import Image

    entry = Registry.load(settings.models_file).get(model)
    offer: Future[Offer] = Future()
    image: Future[Image] = Future()
    threading.Thread(target=accept, args=[listener, offer, image], daemon=True).start()
    try:
        device = select_device(settings)
        free = memory.available(device)
        source = source_of(entry, settings.model_cache)
        files = fingerprint.of_folder(source) if isinstance(source, Path) else ""
        offer.set_result(Offer(entry, files, free))
        image.set_result(Image(load_weights(entry, source, device)))
    except Exception as cause:
        log.warning("%s cannot be shared: %s", model, first_line(cause))
        for waiting in (offer, image):
            if not waiting.done():
                waiting.set_exception(cause)
    while True:
        signal.pause()


def accept(listener: socket.socket, offer: "Future[Offer]", image: "Future[Image]") -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError as cause:
            if listener.fileno() < 0:
                return  # it was closed
            # No descriptor is free, until a job ends.
            log.warning("a job could not connect to the base model: %s; retrying", cause)
            time.sleep(RETRY_SECONDS)
            continue
        connection = Connection(client.detach())
        try:
            threading.Thread(target=give, args=[connection, offer, image], daemon=True).start()
        except RuntimeError as cause:  # the system has no other thread now; the job ends, and is tried again
            log.warning("a job could not connect to the base model: %s", cause)
            connection.close()


def give(connection: Connection, offer: "Future[Offer]", image: "Future[Image]") -> None:
    """Send the offer and the model to one job, and wait until it has ended."""
    try:
        connection.send(offer.result())
        description = image.result().describe()
    except (Refusal, ModelUnavailable, RunsAlone) as cause:
        connection.send(cause)
        return
    except Exception as cause:
        connection.send(BaseLost(f"the base model could not be loaded: {first_line(cause)}"))
        return
    connection.send(description)
    if (file := image.result().file) is not None:
        send_handle(connection, file, None)
    try:
        connection.recv_bytes(0)  # nothing is sent, and nothing would be unpickled
    except (EOFError, OSError):
        connection.close()


if __name__ == "__main__":
    main()
