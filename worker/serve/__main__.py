"""`python -m worker.serve DESCRIPTOR PARENT`: the inference server that the service starts on the first request."""

import argparse
import socket

from core.settings import Settings
from worker import process


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.serve")
    parser.add_argument("descriptor", type=int, help="inherited file descriptor of the listening socket")
    parser.add_argument("parent", type=int, help="process id of the server; this process exits with it")
    args = parser.parse_args()
    process.die_with_parent(args.parent)
    settings = Settings()
    with process.importing():
        from worker.serve.server import serve
    serve(settings, socket.socket(fileno=args.descriptor), idle_seconds=settings.inference_idle_seconds)


if __name__ == "__main__":
    main()
