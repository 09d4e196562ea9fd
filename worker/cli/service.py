"""The commands that run the service or a part of it. The only place that knows both the API and the worker."""

import argparse
import errno
import fcntl
import json
import logging
import os
import resource
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TextIO

import uvicorn
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from api.app import create_app
from api.http.rate_limits import open_rates
from api.http.shutdown import Server
from api.http.sign_on import behind_proxies
from api.resources.batch_requests import prepare_request
from core import private
from core.addresses import HostPort, family_of, tls_files
from core.connections import connection_options
from core.database.engine import READ_ONLY, Database, Send, earliest_now
from core.database.migrate import InvalidDatabaseUrl, SchemaNotReady, backend_of, open_unchanged, upgrade
from core.errors import InvalidApiKey, NoPassportKey
from core.jobs.queue import WakeUps, open_celery, sender, unread_queues
from core.masking import hide_secrets
from core.passports import new_key
from core.registry import BaseModelEntry, Registry, vllm_problem
from core.reloaded import Reloaded
from core.results.passport import key_file, signer_of
from core.service.service_metrics import ServiceCollector, StoreCollector
from core.settings import Settings, unknown_variables
from core.storage import fsck, self_test
from core.storage.disk import Disks
from core.storage.store import ATTEMPTS, BlobStore, StoreEmpty, blobs_of
from core.system_errors import file_problem
from core.telemetry import logs, metrics, tracing
from core.telemetry.metrics import MetricsCollector
from core.tenancy import keys, sessions
from graders.backends import Backends, InvalidBackends
from graders.sandbox import pool
from regraft_server import TERMINATED
from worker import compile_caches
from worker.backends import reloaded_backends
from worker.cli.configuration import (
    check_device,
    check_models,
    check_packages,
    read_settings,
    worker_without_vllm,
)
from worker.cli.parser import UsageError
from worker.device import select_device
from worker.dispatch import templates
from worker.dispatch.dispatcher import Dispatcher
from worker.dispatch.kubernetes import KubernetesApi
from worker.members.gathering import address_of, gathered
from worker.members.member import Member
from worker.packages import vllm_version
from worker.process import importing, quiet_environment
from worker.recording.exporters.choice import problem as exporters_problem
from worker.serving.export import export_to
from worker.serving.launcher import InferenceServer, own_address
from worker.supervisor import liveness, retention
from worker.supervisor.app import WorkerService
from worker.supervisor.one_shot import OneShot
from worker.telemetry import Gpus, Sandbox, SandboxLayers

log = logging.getLogger("regraft")

# The run of `up` drains after its requests, and a person may wait for the end of both.
UP_DRAINS_REQUESTS_SECONDS = 5
SCHEMA_POLL_SECONDS = 2.0


def configured(arguments: argparse.Namespace | None = None) -> Settings:
    """Read the settings and configure logging.

    Args:
        arguments: those named as environment variables replace them, also for child processes, which read these.

    Raises:
        UsageError: a setting is invalid.
    """
    given = {} if arguments is None else vars(arguments)
    os.environ |= {
        name: value for name, value in given.items() if name.startswith("REGRAFT_") and value is not None
    }
    settings = read_settings()
    compile_caches.place(settings.compile_cache, os.environ)
    raise_descriptor_limit()
    logs.configure([logs.handler(settings.log_format)], requests=settings.log_format == "json")
    for line in unknown_variables(os.environ):
        log.warning("%s", line)
    return settings


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors, often 1,024, to the hard limit: each connection needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a system may have a lower bound than the hard limit, as macOS does
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def handle_stop_signals(stop: Callable[[], None]) -> None:
    """Call `stop` at SIGTERM and Ctrl-C, which do not end the process. Call this in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop())


def up(arguments: argparse.Namespace) -> int:
    settings, listening = own_address(configured(arguments))
    with (
        _api_port(settings) as (settings, port),
        service_metrics(settings) as add_collector,
        sole_owner(settings),
    ):
        backends = prepare_worker(settings, _check_tls_files, first_key=True)
        make_passport_key(settings)
        log.info("log in with: %s", login_command(settings))
        print_console_address(settings, sys.stderr)
        return serve_all(settings, backends, listening, port, add_collector)


def api(arguments: argparse.Namespace) -> int:
    settings = configured(arguments)
    require_broker(settings)
    with _api_port(settings) as (settings, port), service_metrics(settings) as add_collector:
        backends = _backends(settings)
        check_packages(settings)
        check_store(settings)
        prepare(settings)
        check_passport_key(settings)
        _describe_python_graders(settings)
        send = sender(open_celery(settings.broker_url, settings.gpu_class), partial(unread_queues, settings))
        database, blobs = open_stores(settings)
        for collector in service_collectors(settings, database):
            add_collector(collector)
        serve_api(settings, database, blobs, backends, send, port, settings.drain_requests_seconds)
    return 0


def worker(arguments: argparse.Namespace) -> int:
    settings = configured(arguments)
    if arguments.jobs is not None:
        return run_jobs(settings, arguments.jobs, arguments.exit_when_idle)
    require_broker(settings)
    with service_metrics(settings) as add_collector:
        backends = prepare_worker(settings, check_broker=None)
        return work(settings, backends, add_collector)


def run_jobs(settings: Settings, jobs: int, idle_seconds: float) -> int:
    """Run some jobs and exit, as the process of a Kubernetes Job. On a machine other than 0 of a group, be a member.

    Returns the exit status (worker/supervisor/one_shot.py).
    """
    if settings.node_rank > 0:
        with serve_metrics(settings, Gpus()):  # Prometheus scrapes every pod of the pool
            return serve_group(settings)
    with service_metrics(settings) as add_collector, group_of(settings) as has_members:
        prepare_worker(settings, check_broker=None)
        database, blobs = open_stores(settings)
        store = open_blobs_of(settings, attempts=1)
        one_shot = OneShot(
            settings,
            database,
            blobs,
            jobs=jobs,
            idle_seconds=idle_seconds,
            store_problem=lambda: self_test.self_test(store, self_test.new_key()).cause,
            has_members=has_members,
        )
        handle_stop_signals(one_shot.stop)
        if TERMINATED.is_set():
            one_shot.stop()
        for collector in one_shot.collectors:
            add_collector(collector)
        with tracing.exported(settings.otlp_endpoint, "regraft-worker"):
            status = one_shot.run()
        database.close()
        compile_caches.prune(settings.compile_cache)  # and not before: the job waits for nothing
    return status


@contextmanager
def _api_port(settings: Settings) -> Iterator[tuple[Settings, socket.socket]]:
    """Bind the API's port. Yields the settings with the port that 0 stands for, too."""
    with bound(settings.host, settings.port, "REGRAFT_PORT", "--port") as port:
        yield settings.model_copy(update={"port": port.getsockname()[1]}), port


def _describe_python_graders(settings: Settings) -> None:
    log.info("%s", pool.described())
    if missing := pool.not_built(settings.grader_environments):
        log.warning("%s", missing)


def migrate(arguments: argparse.Namespace) -> int:
    settings = configured()
    if arguments.wait is None:
        prepare(settings, first_key=not arguments.schema_only)
        return 0
    stopped = threading.Event()
    handle_stop_signals(stopped.set)
    return 0 if wait_for_schema(settings, arguments.wait, stopped.wait) else 1


def wait_for_schema(settings: Settings, seconds: float, is_stopped: Callable[[float], bool]) -> bool:
    """Wait until another process has migrated the database. Returns whether this version can use its schema.

    Args:
        seconds: to wait at most, also for a database that does not respond.
        is_stopped: waits this many seconds and returns whether to stop, as `Event.wait`.

    Raises:
        UsageError: REGRAFT_DATABASE_URL is not the URL of a supported database.
    """
    deadline = time.monotonic() + seconds
    logged = ""
    while reason := schema_problem(settings):
        if reason != logged:
            log.info("waiting for the schema of this version: %s", reason)
            logged = reason
        if time.monotonic() > deadline:
            log.error("no process has migrated the database within %g s", seconds)
            return False
        if is_stopped(SCHEMA_POLL_SECONDS):
            return False
    return True


def schema_problem(settings: Settings) -> str | None:
    """Why this version cannot use the database yet. None: it can.

    Raises:
        UsageError: REGRAFT_DATABASE_URL is not the URL of a supported database.
    """
    with refusing_database(settings):
        try:
            open_unchanged(settings.database).close()
        except SchemaNotReady as refused:
            return str(refused)
        except DBAPIError as cause:
            return str(database_fails(settings, cause))
    return None


def export(arguments: argparse.Namespace) -> int:
    if arguments.weight_type and arguments.format != "gguf":
        raise UsageError(
            "--weight-type is for --format gguf; the other formats keep the precision of their files"
        )
    settings = configured()
    check_models(settings)
    prepare(settings)
    database, blobs = open_stores(settings)
    note = export_to(
        settings,
        database,
        blobs,
        arguments.name,
        arguments.output,
        format=arguments.format,
        weight_type=arguments.weight_type or "f16",
    )
    if note:
        print(note, file=sys.stderr)
    print(arguments.output)
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    settings = configured()
    hours = settings.orphan_hours if arguments.older_than_hours is None else arguments.older_than_hours
    if not hours >= 1:
        raise UsageError(
            "--older-than-hours must be at least 1: the database rows of younger blobs may not be written yet"
        )
    prepare(settings)
    delete_orphans(settings, hours, dry_run=arguments.dry_run)
    return 0


def check_blobs(arguments: argparse.Namespace) -> int:
    """Print every missing, damaged and orphaned blob. The exit status is 1 if there is one."""
    return print_findings(configured(), as_json=arguments.json)


def print_findings(settings: Settings, *, as_json: bool = False) -> int:
    with refusing_database(settings):
        database, blobs = open_unchanged(settings.database), open_blobs_of(settings)
    count = 0
    try:
        older_than = _hours_ago(database, settings.orphan_hours)
        for finding in fsck.check(database, blobs, orphans_older_than=older_than):
            count += 1
            if as_json:
                print(json.dumps(asdict(finding)), flush=True)
            else:
                print(f"{finding.problem:8}  {finding.owner or '-'}  {finding.key}", flush=True)
    except StoreEmpty as empty:
        raise UsageError(f"REGRAFT_BLOB_URL: {empty}") from empty
    finally:
        database.close()
    print(f"{count} findings.", file=sys.stderr)
    return 1 if count else 0


def _hours_ago(database: Database, hours: float) -> float:
    """That long ago, in Unix seconds."""
    with database.read() as session:
        return earliest_now(session) - hours * retention.HOUR


def login_command(settings: Settings) -> str:
    """Return the command that logs in on this machine. It reads the key file if that still exists."""
    command = f"regraft login --base-url http://{_local_address(settings)}"
    key = settings.data_dir / "api_key"
    return f"{command} < {shlex.quote(str(key))}" if key.exists() else command


def print_console_address(settings: Settings, out: TextIO) -> None:
    """Print an address that logs in to the console once, on a terminal only: other output ends up in a log."""
    if out.isatty() and (address := console_address(settings)):
        print(f"The console, for one login within 15 minutes: {address}", file=out)


def console_address(settings: Settings) -> str:
    """Return an address that logs in to the console once, by the key file. Empty without that or a console."""
    path = settings.data_dir / "api_key"
    if not path.exists() or not (settings.console_site / "index.html").is_file():
        return ""
    database = Database(settings.database)
    try:
        with database.write() as session:
            key, _ = keys.authenticate(session, path.read_text().strip())
            token = sessions.invite(session, key)
    except InvalidApiKey:  # it was revoked
        return ""
    finally:
        database.close()
    return f"http://{_local_address(settings)}/?t={token}"


def _local_address(settings: Settings) -> HostPort:
    """The address of the API on this machine."""
    return HostPort("127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host, settings.port)


def _backends(settings: Settings) -> Reloaded[Backends]:
    check_models(settings)  # the graders file refers to them
    try:
        return reloaded_backends(settings)
    except InvalidBackends as invalid:
        raise UsageError(f"REGRAFT_GRADERS_FILE: {invalid}") from invalid


def prepare_worker(
    settings: Settings, check_broker: Callable[[Settings], None] | None, *, first_key: bool = False
) -> Reloaded[Backends]:
    """Check what each process with a worker needs before it claims jobs, and prepare the database.

    The files and settings that the operator wrote are checked before the broker.

    Args:
        check_broker: raises UsageError. None: the process uses no broker, or has checked it.
        first_key: whether to create the first API key. Beside an API, that creates it.

    Returns:
        The backends of graders.

    Raises:
        UsageError: a job would fail for a reason that is the operator's.
    """
    backends = _backends(settings)
    check_packages(settings)
    check_device(settings)
    check_store(settings)
    _check_exporters(settings)
    if check_broker is not None:
        check_broker(settings)
    prepare(settings, first_key=first_key)
    _describe_python_graders(settings)
    if warning := worker_without_vllm(settings):
        log.warning("%s", warning)
    return backends


def require_broker(settings: Settings) -> None:
    """Raise UsageError if the broker works only within one process, or its URL names files that cannot be read."""
    if settings.embedded:
        raise UsageError(
            "memory:// works only within one process: use `up`, or set REGRAFT_BROKER_URL=redis://…"
        )
    _check_tls_files(settings)


def _check_tls_files(settings: Settings) -> None:
    for option, file in tls_files(settings.broker_url).items():
        if not os.access(file, os.R_OK):
            raise UsageError(f"REGRAFT_BROKER_URL: {option} names {file}, which this user cannot read")


def _check_exporters(settings: Settings) -> None:
    if (problem := exporters_problem(settings)) is not None:
        raise UsageError(problem)


def check_store(settings: Settings) -> None:
    """Put, get, head and delete one object. Warn if the store does not respond: that passes, and jobs wait for it.

    Raises:
        UsageError: it refuses to put, get or head. A worker would fail every job that it claims.
    """
    blobs = open_blobs_of(settings, attempts=1)  # an outage delays no start
    shown = hide_secrets(settings.blobs)
    result = self_test.self_test(blobs, self_test.new_key())
    if setting := result.setting(settings):
        raise UsageError(
            f"{setting}: {shown} refuses the service, which {result.action} an object to test it: {result.cause}"
        ) from result.cause
    if result.cause is not None:
        log.warning("the blob store %s does not respond: %s", shown, result.cause)
    if result.undeleted is not None:  # no job needs it
        log.warning(
            "the blob store %s deletes no objects, so its use only grows: %s", shown, result.undeleted
        )


def serve_all(
    settings: Settings,
    backends: Reloaded[Backends],
    listening: socket.socket | None,
    port: socket.socket,
    add_collector: Callable[[MetricsCollector], None],
) -> int:
    """Run the API in the main thread and the worker in others. The first Ctrl-C drains and stops both.

    Returns 1 if they stop because a thread of the worker has ended.
    """
    with ExitStack() as stack:
        stack.enter_context(inference_on_demand(listening))
        database, blobs = open_stores(settings)
        has_members = stack.enter_context(group_of(settings))
        worker = WorkerService(settings, database, blobs, backends, prepare_request, has_members)
        worker.start(on_failure=lambda: os.kill(os.getpid(), signal.SIGTERM))
        try:
            for collector in (*service_collectors(settings, database), *worker.collectors):
                add_collector(collector)
            serve_api(settings, database, blobs, backends, worker.send, port, UP_DRAINS_REQUESTS_SECONDS)
        finally:
            worker.stop()
            database.close()
    return int(worker.failed)


def service_collectors(settings: Settings, database: Database) -> tuple[MetricsCollector, ...]:
    """The metrics of a process with the API."""
    blobs = open_blobs_of(settings, attempts=1)  # an outage is visible at once
    collector = ServiceCollector(
        database,
        settings.default_limits,
        [settings.gpu_class],
        lambda: settings.hardware,
        settings.samplers,
    )
    return collector, StoreCollector(blobs)


def work(
    settings: Settings, backends: Reloaded[Backends], add_collector: Callable[[MetricsCollector], None]
) -> int:
    """Serve this machine's queue until SIGTERM or Ctrl-C, then drain. Returns 1 if it stops because a thread ended."""
    database, blobs = open_stores(settings)
    stopping = threading.Event()
    handle_stop_signals(stopping.set)
    with group_of(settings) as has_members, tracing.exported(settings.otlp_endpoint, "regraft-worker"):
        worker = WorkerService(settings, database, blobs, backends, prepare_request, has_members)
        worker.start(on_failure=stopping.set)
        for collector in worker.collectors:
            add_collector(collector)
        stopping.wait()
        worker.stop()
    database.close()
    return int(worker.failed)


@contextmanager
def group_of(settings: Settings) -> Iterator[Callable[[], bool]]:
    """As `gathered` does. Raises UsageError: the port is taken."""
    with ExitStack() as stack:
        try:
            has_members = stack.enter_context(gathered(settings))
        except OSError as cause:
            port = address_of(settings.rendezvous).port
            raise _cannot_listen(
                cause, "0.0.0.0", port, "REGRAFT_RENDEZVOUS", "REGRAFT_RENDEZVOUS"
            ) from cause
        yield has_members


def member(arguments: argparse.Namespace) -> int:
    """Run ranks until SIGTERM or Ctrl-C, then finish the run in progress. Needs no database and no blob store."""
    settings = configured()
    if settings.node_rank == 0:
        raise UsageError(
            "set REGRAFT_NODE_RANK to 1 or more, REGRAFT_NODES to the machines of the group, and REGRAFT_RENDEZVOUS to "
            "the host:port of its worker"
        )
    return serve_group(settings)


def dispatcher(arguments: argparse.Namespace) -> int:
    """Keep a Kubernetes Job for each job that may start, until SIGTERM. Returns 1 if its thread has ended."""
    settings = configured(arguments)
    folder = Path(arguments.templates)
    try:
        templates.load(folder)
        kubernetes = KubernetesApi(arguments.api, Path(arguments.account))
    except templates.InvalidTemplates as invalid:
        raise UsageError(f"--templates: {invalid}") from invalid
    except OSError as cause:
        raise UsageError(
            f"--account: {file_problem(cause)}. A pod has these files if it mounts the token of its ServiceAccount"
        ) from cause
    with serve_metrics(settings):
        prepare(settings, first_key=False)
        database = Database(settings.database)
        stopping = threading.Event()
        handle_stop_signals(stopping.set)
        passes = Dispatcher(
            database, kubernetes, partial(templates.load, folder), defaults=settings.default_limits
        )
        thread = threading.Thread(
            target=passes.run_until, args=[stopping, settings.reconcile_seconds], name="dispatcher"
        )
        thread.start()
        is_alive = liveness.touch_while_alive(liveness.file_in(settings.data_dir), [thread], stopping)
        thread.join()
        database.close()
        kubernetes.close()
    return int(not is_alive)


def serve_group(settings: Settings) -> int:
    """Run ranks for the runs of machine 0 until SIGTERM. Returns 1 if that ends because a thread has ended."""
    check_device(settings)
    private.make_folder(settings.data_dir)
    stopping = threading.Event()
    handle_stop_signals(stopping.set)
    # A launcher waits for the other machines of a run for the patience, without a sign of life.
    launching = Member(settings.hang_seconds + settings.patience_seconds)
    launching.start()
    log.info("joining the runs at %s, with %d ranks", settings.rendezvous, settings.ranks)
    is_alive = liveness.touch_while_alive(liveness.file_in(settings.data_dir), [launching.thread], stopping)
    launching.stop()
    launching.thread.join()
    return int(not is_alive)


def serve_api(
    settings: Settings,
    database: Database,
    blobs: BlobStore,
    backends: Reloaded[Backends],
    send: Send,
    port: socket.socket,
    drain_seconds: int,
) -> None:
    """Serve requests at the bound `port` until a signal, then return, so that the caller can clean up.

    Args:
        drain_seconds: how long requests in flight may take after the signal.
    """
    registry, rates = Registry.reloaded(settings.models_file), open_rates(settings.broker_url)
    app = create_app(settings, database, blobs, registry, backends, WakeUps(send), rates)
    # uvicorn stops at a signal and then raises it again; without our own handler the second signal would
    # terminate the process before the worker has drained.
    handle_stop_signals(lambda: None)
    traced = tracing.exported(settings.otlp_endpoint, "regraft-api")
    config = uvicorn.Config(
        app,
        proxy_headers=False,  # see behind_proxies
        ws="none",
        log_config=None,  # keep our logging
        log_level="warning",
        timeout_graceful_shutdown=drain_seconds,
        **connection_options(settings),
    )
    config.app = behind_proxies(app, config.forwarded_allow_ips)
    log.info("serving http://%s/v1", HostPort(settings.host, settings.port))
    with traced:
        Server(config, app.state.service.shutdown).run([port])


def inference(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM, then complete requests in flight. Needs the blob store and the registry, but no database.

    Returns 1 if the model of --model cannot be loaded.
    """
    settings = configured(arguments)
    if not settings.inference_key:
        raise UsageError("set REGRAFT_INFERENCE_KEY, here and where the API runs, to a secret of your choice")
    if arguments.tensor_parallel is not None and arguments.model is None:
        raise UsageError(
            "--tensor-parallel is for --model; `tensor_parallel` in the registry is for all models"
        )
    with (
        bound(settings.host, arguments.port, "--port", "--port") as listening,
        serve_metrics(settings, Gpus()) as add_collector,
    ):
        check_models(settings)
        if arguments.model is not None:
            base_model_of(settings, arguments.model)
        check_device(settings)
        compile_caches.prune_in_background(settings.compile_cache)
        with suppress(OSError):  # holds only caches, and base models are served without them
            private.make_folder(settings.data_dir)
        os.environ.update(quiet_environment())
        with importing():
            from worker.serving.kept_model import ModelChoice
            from worker.serving.server import serve
            from worker.serving.serving_metrics import VllmMetrics

        handle_stop_signals(lambda: None)  # as in serve_api
        listening.listen(512)
        add_collector(VllmMetrics())
        log.info("serving inference on http://%s/v1", HostPort(settings.host, listening.getsockname()[1]))
        with tracing.exported(settings.otlp_endpoint, "regraft-inference"):
            choice = arguments.model and ModelChoice(arguments.model, arguments.tensor_parallel)
            return int(serve(settings, listening, choice))


def base_model_of(settings: Settings, name: str) -> BaseModelEntry:
    """The entry of --model. Raises UsageError if the registry has none."""
    entry = Registry.load(settings.models_file).models.get(name)
    if entry is None:
        raise UsageError(f"--model: {name} is not a base model of the registry")
    return entry


def sampler(arguments: argparse.Namespace) -> int:
    """Sample for jobs until SIGTERM or Ctrl-C. Needs the blob store and the registry, but no database.

    Requests in flight are cut, and their jobs send them to other samplers. Returns 1 if the engine has failed: after an
    out-of-memory error the next process begins with smaller sizes.
    """
    settings = configured(arguments)
    if not settings.samplers_key:
        raise UsageError("set REGRAFT_SAMPLERS_KEY, here and for the workers, to a secret of your choice")
    # `bound` does not listen: until the model is loaded, connections are refused and jobs use other samplers.
    with (
        bound(settings.host, arguments.port, "--port", "--port") as listening,
        serve_metrics(settings, Gpus()) as add_collector,
    ):
        check_models(settings)
        entry = base_model_of(settings, arguments.model)
        check_device(settings)
        compile_caches.prune_in_background(settings.compile_cache)
        private.make_folder(settings.data_dir)
        os.environ.update(quiet_environment())
        with importing():
            from worker.engine.launch import EngineNotStarted
            from worker.serving import fleet_server
            from worker.serving.engines import EngineRefused
            from worker.serving.serving_metrics import OwnVllmMetrics

        if vllm_version() is None:
            raise UsageError("a sampler runs vLLM, which is not installed here")
        if problem := vllm_problem(entry, select_device(settings)):
            raise UsageError(f"{arguments.model}: {problem}")
        log.info(
            "sampling for %s on http://%s",
            arguments.model,
            HostPort(settings.host, listening.getsockname()[1]),
        )
        add_collector(OwnVllmMetrics())
        try:
            fleet_server.run(settings, arguments.model, entry, listening)
        except (EngineRefused, EngineNotStarted, fleet_server.EngineDied) as failed:
            log.error("%s: %s", arguments.model, failed, exc_info=failed.__cause__)
            return 1
    return 0


@contextmanager
def inference_on_demand(listening: socket.socket | None) -> Iterator[None]:
    """Start an inference process on the first request at this socket, for as long as the service runs."""
    if listening is None:  # REGRAFT_INFERENCE_URL names another server
        yield
        return
    server = InferenceServer(listening)
    server.start()
    try:
        yield
    finally:
        server.stop()


@contextmanager
def bound(host: str, port: int, setting: str, option: str) -> Iterator[socket.socket]:
    """Take a port, which does not listen yet.

    Args:
        setting: what an error names, with the option that changes it.

    Raises:
        UsageError: the port is taken, or the address is not this machine's.
    """
    with socket.socket(family_of(host)) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((host, port))
        except OSError as cause:
            raise _cannot_listen(cause, host, port, setting, option) from cause
        yield taken


def _cannot_listen(cause: OSError, host: str, port: int, setting: str, option: str) -> UsageError:
    if cause.errno == errno.EADDRINUSE:
        return UsageError(f"{setting}: port {port} of {host} is in use; choose another port with {option}")
    if cause.errno in (errno.EACCES, errno.EPERM):
        return UsageError(
            f"{setting}: this user may not listen on port {port}; choose one above 1023 with {option}"
        )
    return UsageError(f"REGRAFT_HOST: cannot listen on {host!r}: {cause.strerror}")


@contextmanager
def serve_metrics(
    settings: Settings, *collectors: MetricsCollector
) -> Iterator[Callable[[MetricsCollector], None]]:
    """Serve metrics to Prometheus during the context, if REGRAFT_METRICS_PORT is set. Yields what adds a collector.

    Raises:
        UsageError: the port is taken, as by another process of this machine with the same settings.
    """
    with ExitStack() as stack:
        listening = None
        if settings.metrics_port:
            port = bound(settings.host, settings.metrics_port, "REGRAFT_METRICS_PORT", "--metrics-port")
            listening = stack.enter_context(port)
        yield stack.enter_context(metrics.served(listening, settings, collectors))


def service_metrics(settings: Settings) -> AbstractContextManager[Callable[[MetricsCollector], None]]:
    """Serve the metrics of a process that stores data and runs graders.

    Raises:
        UsageError: as `serve_metrics`, or the database URL is invalid.
    """
    with refusing_database(settings):
        backend_of(settings.database)
    return serve_metrics(settings, Disks(settings), Sandbox("regraft_sandbox"), SandboxLayers())


def open_stores(settings: Settings) -> tuple[Database, BlobStore]:
    return Database(settings.database), open_blobs_of(settings)


def open_blobs_of(settings: Settings, *, attempts: int = ATTEMPTS) -> BlobStore:
    """Open the store of the settings.

    Raises:
        UsageError: REGRAFT_BLOB_URL names no blob store.
    """
    try:
        return blobs_of(settings, attempts=attempts)
    except ValueError as invalid:
        raise UsageError(f"REGRAFT_BLOB_URL: {invalid}") from invalid


def prepare(settings: Settings, *, first_key: bool = True) -> None:
    """Migrate, and on the very first start create the organization, the project and one key.

    The key is printed only on a terminal, because other output ends up in a log.

    Raises:
        UsageError: REGRAFT_DATABASE_URL is not the URL of a supported database, or that does not respond. Or
            REGRAFT_DATA_DIR, or the file of the first key in it, cannot be written. No key is created then, and the
            next start retries.
    """
    _make_data_folder(settings)
    with refusing_database(settings):
        try:
            upgrade(settings.database)
        except OSError as cause:  # the folder of SQLite cannot be written or locked
            raise database_fails(settings, cause) from cause
    if not first_key:
        return
    path = settings.data_dir / "api_key"
    database = Database(settings.database)
    try:
        with database.write() as session:
            key = keys.bootstrap(session, settings.first_key)
            if key is not None and not settings.first_key:
                _write_first_key(path, key)  # before the commit, which would leave an unreadable key behind
        if not database.accepts_writes():
            log.warning("REGRAFT_DATABASE_URL: %s Requests get 503 until it does.", READ_ONLY)
    finally:
        database.close()
    if key is None:
        return
    if settings.first_key:
        print("The first API key is the one in REGRAFT_FIRST_KEY.", file=sys.stderr)
        return
    if sys.stderr.isatty():
        print(f"Your API key is {key}\nIt is shown only once, and stored in {path}.", file=sys.stderr)
    else:
        print(
            f"The first API key is in {path}. Run `regraft-server admin key create` to create others.",
            file=sys.stderr,
        )


def _make_data_folder(settings: Settings) -> None:
    try:
        private.make_folder(settings.data_dir)
    except OSError as cause:
        raise UsageError(f"REGRAFT_DATA_DIR: {file_problem(cause)}") from cause


@contextmanager
def refusing_database(settings: Settings) -> Iterator[None]:
    """Raise a UsageError for a database that is none, does not respond or has another version's schema."""
    try:
        yield
    except InvalidDatabaseUrl as invalid:
        raise UsageError(f"REGRAFT_DATABASE_URL: {invalid}") from invalid
    except DBAPIError as cause:
        raise database_fails(settings, cause) from cause
    except SchemaNotReady as refused:
        raise UsageError(str(refused)) from refused


def database_fails(settings: Settings, cause: DBAPIError | OSError) -> UsageError:
    """Quote the driver. SQLAlchemy's own text has the statement, and the address of a page about it."""
    reason = file_problem(cause) if isinstance(cause, OSError) else str(cause.orig).strip()
    if backend_of(settings.database) != "sqlite":
        return UsageError(f"REGRAFT_DATABASE_URL: {reason}")
    setting = "REGRAFT_DATABASE_URL" if settings.database_url else "REGRAFT_DATA_DIR"
    return UsageError(
        f"{setting}: SQLite at {make_url(settings.database).database}: {reason}. It needs a folder that this user may "
        "write, of a local filesystem with locks and shared memory; network filesystems often lack one of them. Choose "
        "another folder, or PostgreSQL"
    )


def _write_first_key(path: Path, key: str) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(key + "\n")
    except OSError as cause:
        raise UsageError(
            f"REGRAFT_DATA_DIR: the first API key cannot be written to {path} ({cause.strerror}); no key was created"
        ) from cause


def make_passport_key(settings: Settings) -> None:
    """Create the key that signs passports, unless there is one. Beside other API processes each would have its own."""
    path = key_file(settings)
    if not settings.passport_key and not path.exists():
        try:
            private.write_new_file(path, new_key() + "\n")
        except OSError as cause:
            raise UsageError(
                f"REGRAFT_DATA_DIR: the passport key cannot be written to {path} ({cause.strerror})"
            ) from cause
    check_passport_key(settings)


def check_passport_key(settings: Settings) -> None:
    """Log the fingerprint of the key that signs passports.

    Raises:
        UsageError: the file of the key holds none.
    """
    try:
        signer = signer_of(settings)
    except NoPassportKey as unusable:
        raise UsageError(f"{key_file(settings)}: {unusable.message}") from unusable
    if signer is None:
        log.info("passports are off: REGRAFT_PASSPORT_KEY is not set")
    else:
        log.info("passports are signed by the key with the fingerprint %s", signer.fingerprint)


def delete_orphans(settings: Settings, hours: float, *, dry_run: bool) -> None:
    """Delete orphaned blobs, print one key per line, then the totals. Safe while the service runs."""
    database, blobs = open_stores(settings)
    count = size = 0
    try:
        older_than = _hours_ago(database, hours)
        unfinished = blobs.abort_stale_uploads(older_than, dry_run=dry_run)
        for removed in retention.sweep(database, blobs, older_than=older_than, dry_run=dry_run):
            for entry in removed:
                print(f"{entry.key} {entry.size}")
                count, size = count + 1, size + entry.size
    finally:
        database.close()
    done = "Would remove" if dry_run else "Removed"
    print(f"{done} {count} orphaned blobs with {size} bytes, and {unfinished} unfinished uploads.")


@contextmanager
def sole_owner(settings: Settings) -> Iterator[None]:
    """Lock the data folder, so that one `up` uses it: memory:// works only within one process.

    Raises:
        UsageError: another `up` uses it, or it cannot be written.
    """
    _make_data_folder(settings)
    try:
        file = (settings.data_dir / "lock").open("w")
    except OSError as cause:
        raise UsageError(f"REGRAFT_DATA_DIR: {file_problem(cause)}") from cause
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            raise UsageError(
                f"REGRAFT_DATA_DIR: another `regraft-server up` is using {settings.data_dir}; stop it, or choose "
                "another folder with --data-dir"
            ) from taken
        except OSError as cause:
            raise UsageError(
                f"REGRAFT_DATA_DIR: {settings.data_dir} cannot be locked ({cause.strerror}); choose a folder of a "
                "local filesystem with --data-dir"
            ) from cause
        yield
