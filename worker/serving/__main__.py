"""`python -m worker.serving DESCRIPTOR PARENT`: the inference server that the service starts on the first request."""

import argparse
import socket

from core.settings import Settings
from worker import process


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.serving")
    parser.add_argument("descriptor", type=int, help="inherited file descriptor of the listening socket")
    parser.add_argument("parent", type=int, help="process id of the server; this process exits with it")
    args = parser.parse_args()
    process.die_with_parent(args.parent)
    settings = Settings()
    with process.importing():
        from worker.serving.server import serve
    listening = socket.socket(fileno=args.descriptor)
    serve(settings, listening, shares_device=True, idle_seconds=settings.inference_idle_seconds)


if __name__ == "__main__":
    main()
