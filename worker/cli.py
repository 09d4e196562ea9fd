"""`regraft-server`: the commands an operator starts. The only place that knows both the API and the worker."""

import argparse
import fcntl
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from pydantic import ValidationError
from pydantic_settings import SettingsError

from api.app import create_app
from api.rates import open_rates
from api.shutdown import Server
from core import keys, logs, metrics, tracing
from core.blobs import BlobStore, blobs_of
from core.db import Database, Send
from core.figures import ServiceFigures
from core.metrics import Collector
from core.migrate import upgrade
from core.queue import open_celery, sender
from core.registry import Registry
from core.settings import Settings, problems
from graders.backends import Backends, InvalidBackends
from graders.sandbox import pool
from worker import admin, alive, retention
from worker.app import WorkerService
from worker.backends import open_backends
from worker.export import export_to
from worker.inference import InferenceServer, own_address
from worker.members import Seat
from worker.sinks.choice import problem as sinks_problem
from worker.telemetry import Gpus, Sandbox

log = logging.getLogger("regraft")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="regraft-server", description="Self-hosted reinforcement fine-tuning."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="API, worker and reconciler in one process, on the embedded default")
    commands.add_parser("api", help="the HTTP API alone (needs REGRAFT_BROKER_URL)")
    commands.add_parser("worker", help="a worker and its reconciler (needs REGRAFT_BROKER_URL)")
    commands.add_parser(
        "member", help="help with the runs of another machine's worker (needs REGRAFT_LEADER)"
    )
    commands.add_parser("migrate", help="bring the database to this version, and make the first key")
    commands.add_parser(
        "inference", help="the inference server alone (needs REGRAFT_INFERENCE_KEY)"
    ).add_argument("--port", type=int, default=8100)
    take_home = commands.add_parser("export", help="write a checkpoint as a folder")
    take_home.add_argument("name", help="a checkpoint's id, a tuned model's name, or a job's id")
    take_home.add_argument("-o", "--output", type=Path, required=True, help="an empty folder, or a new one")
    take_home.add_argument("--merged", action="store_true", help="a whole model instead of an adapter")
    admin.add_commands(commands)
    sweeping = commands.add_parser("sweep", help="delete blobs that nothing refers to (docs/storage.md)")
    sweeping.add_argument(
        "--older-than-hours", type=float, help="instead of REGRAFT_ORPHAN_HOURS; at least 1"
    )
    sweeping.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    args = parser.parse_args()

    try:
        settings = Settings()
    except (ValidationError, SettingsError) as invalid:
        parser.error(problems(invalid))
    logs.configure([logs.handler(settings.log_format)], requests=settings.log_format == "json")
    if args.command == "inference":
        return serve_inference(settings, args.port, parser)
    if args.command == "member":
        return be_member(settings, parser)
    if args.command == "admin":
        prepare(settings)
        return admin.run(args, settings)
    listening = None
    if args.command == "up":
        settings, listening = own_address(settings)
    try:
        backends = open_backends(settings)
    except InvalidBackends as invalid:
        parser.error(str(invalid))
    if args.command in ("api", "worker") and settings.embedded:
        parser.error("memory:// lives inside one process: use `up`, or set REGRAFT_BROKER_URL=redis://…")
    if args.command in ("up", "worker") and (problem := sinks_problem(settings)) is not None:
        parser.error(problem)
    prepare(settings)
    if args.command in ("up", "api", "worker"):
        log.info("%s", pool.described())
    if args.command == "up":
        up(settings, backends, listening)
    elif args.command == "api":
        send = sender(open_celery(settings.broker_url, settings.gpu_class))
        database, blobs = open_stores(settings)
        with measured(settings, ServiceFigures(database, settings.default_limits)):
            serve_api(settings, database, blobs, backends, send)
    elif args.command == "worker":
        work(settings, backends)
    elif args.command == "sweep":
        hours = settings.orphan_hours if args.older_than_hours is None else args.older_than_hours
        if not hours >= 1:
            parser.error("--older-than-hours must be at least 1: younger blobs may still get their row")
        sweep(settings, hours, dry_run=args.dry_run)
    elif args.command == "export":
        database, blobs = open_stores(settings)
        export_to(settings, database, blobs, args.name, args.output, merged=args.merged)
        print(args.output)
    return 0


def up(settings: Settings, backends: Backends, listening: socket.socket | None) -> None:
    """API in the main thread, worker beside it. The first Ctrl-C drains and ends both."""
    with sole_owner(settings), inference(listening):
        database, blobs = open_stores(settings)
        worker = WorkerService(settings, database, blobs, backends)
        worker.start()
        service = ServiceFigures(database, settings.default_limits)
        try:
            with measured(settings, service, *worker.figures):
                serve_api(settings, database, blobs, backends, worker.send)
        finally:
            worker.stop()
            database.close()


def work(settings: Settings, backends: Backends) -> None:
    """Serve this machine's queue until SIGTERM or Ctrl-C, then drain."""
    database, blobs = open_stores(settings)
    worker = WorkerService(settings, database, blobs, backends)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopping.set())
    worker.start()
    with measured(settings, *worker.figures), tracing.exported(settings.otlp_endpoint, "regraft-worker"):
        stopping.wait()
        worker.stop()  # within: how a run ends is told, too
    database.close()


def be_member(settings: Settings, parser: argparse.ArgumentParser) -> int:
    """Help until SIGTERM or Ctrl-C, and with the run in progress until that ends. Needs no database and no store."""
    if not settings.leader:
        parser.error("set REGRAFT_LEADER to host:port of the worker whose runs this machine is to help with")
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopping.set())
    seats = [Seat(gpu) for gpu in range(settings.ranks)]
    for seat in seats:
        seat.start()
    log.info("helping with the runs of %s, with %d processes", settings.leader, settings.ranks)
    alive.tell(alive.file_in(settings.data_dir), [seat.thread for seat in seats], stopping)
    for seat in seats:
        seat.stop()
    for seat in seats:
        seat.thread.join()
    return 0


def serve_api(
    settings: Settings, database: Database, blobs: BlobStore, backends: Backends, send: Send
) -> None:
    """Answer requests until a signal. Returns afterwards, so that the caller can put things away."""
    registry, rates = Registry.load(settings.models_file), open_rates(settings.broker_url)
    app = create_app(settings, database, blobs, registry, backends, send, rates)
    # uvicorn stops at a signal and then raises it once more; without a handler of ours that second one would
    # end the process before the worker has drained.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _already_stopping)
    traced = tracing.exported(settings.otlp_endpoint, "regraft-api")
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,  # ours
        log_level="warning",
        timeout_graceful_shutdown=5,
    )
    log.info("serving http://%s:%d/v1", settings.host, settings.port)
    with traced:
        Server(config, app.state.service.shutdown).run()


def _already_stopping(number: int, frame: FrameType | None) -> None:
    return None


def serve_inference(settings: Settings, port: int, parser: argparse.ArgumentParser) -> int:
    """Answer until SIGTERM, then finish what was begun. Needs the blob store and the registry, and no database."""
    if not settings.inference_key:
        parser.error("set REGRAFT_INFERENCE_KEY, here and where the API runs, to a secret of your choice")
    from worker.serve import serve  # here, because it brings torch

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _already_stopping)  # as in serve_api
    listening = socket.create_server((settings.host, port), backlog=512)
    log.info("serving inference on http://%s:%d/v1", settings.host, listening.getsockname()[1])
    with (
        metrics.served(settings.host, settings.metrics_port, [Gpus()]),
        tracing.exported(settings.otlp_endpoint, "regraft-inference"),
    ):
        serve(settings, listening)
    return 0


@contextmanager
def inference(listening: socket.socket | None) -> Iterator[None]:
    """An inference process whenever somebody asks at this socket, for as long as the service runs."""
    if listening is None:  # the operator has named one elsewhere
        yield
        return
    server = InferenceServer(listening)
    server.start()
    try:
        yield
    finally:
        server.stop()


def measured(settings: Settings, *figures: Collector) -> AbstractContextManager[None]:
    """For Prometheus to read meanwhile, where a port is set for it."""
    return metrics.served(settings.host, settings.metrics_port, [*figures, Sandbox("regraft_sandbox")])


def open_stores(settings: Settings) -> tuple[Database, BlobStore]:
    return Database(settings.database), blobs_of(settings)


def prepare(settings: Settings) -> None:
    """Migrate, and on the very first start make the organisation, the project and one key."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    upgrade(settings.database)
    database = Database(settings.database)
    try:
        with database.write() as session:
            key = keys.bootstrap(session)
    finally:
        database.close()
    if key is not None:
        path = settings.data_dir / "api_key"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(key + "\n")
        print(f"Your API key is {key}\nIt is shown this once, and kept in {path}.", file=sys.stderr)


def sweep(settings: Settings, hours: float, *, dry_run: bool) -> None:
    """Print what was deleted, a key a line, and the sums last. Safe while the service runs."""
    database, blobs = open_stores(settings)
    older_than = time.time() - hours * retention.HOUR
    count = size = 0
    try:
        unfinished = blobs.abort_stale_uploads(older_than, dry_run=dry_run)
        for removed in retention.sweep(database, blobs, older_than=older_than, dry_run=dry_run):
            for entry in removed:
                print(f"{entry.key} {entry.size}")
                count, size = count + 1, size + entry.size
    finally:
        database.close()
    done = "Would remove" if dry_run else "Removed"
    print(
        f"{done} {count} blobs with {size} bytes that nothing refers to, and {unfinished} unfinished uploads."
    )


@contextmanager
def sole_owner(settings: Settings) -> Iterator[None]:
    """One `up` per data folder: memory:// does not reach another process."""
    with (settings.data_dir / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"Another `regraft-server up` is already using {settings.data_dir}.")
        yield


if __name__ == "__main__":
    sys.exit(main())
