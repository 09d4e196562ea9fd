"""The process of one attempt: reads its claim from stdin, runs the job, and reports how it ended by its exit status.

Started by worker/supervise/supervisor.py as `python -m worker.child PARENT PROGRESS`.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.database.engine import Database
from core.jobs import lifecycle
from core.jobs.claim import Claim, LeaseLost
from core.response_format import SchemaTooLarge
from core.settings import Settings
from core.storage.store import blobs_of
from core.telemetry import logs
from graders.environments.catalog import EnvironmentNotBuilt
from graders.spec import InvalidGrader, parse_grader
from worker import instruments, process
from worker.attempt import Attempt
from worker.backends import open_backends
from worker.heartbeat import Beat, WatchedGrader, beats_into
from worker.instruments import ObservedGrader
from worker.learn.members import members_of
from worker.learn.ranks import Ranks
from worker.record.exporters.feed import Feeds, left_behind
from worker.record.recorder import Recorder
from worker.refusals import ModelUnavailable, UserMistake, failing_once
from worker.run import Run, RunOutcome

# worker.assemble.assemble. Its module imports torch, so it is imported where it is needed.
Assemble = Callable[..., Run]


async def run_attempt(
    attempt: Attempt,
    settings: Settings,
    assemble: Assemble,
    *,
    scratch: Path,
    stop_requested: Callable[[], bool],
    beat: Beat,
) -> RunOutcome:
    """Train a claimed job.

    Raises:
        UserMistake: the job cannot succeed as it is.
        LeaseLost: the job was cancelled or claimed by another worker.
    """
    try:
        spec = parse_grader(attempt.job.reinforcement["grader"])
        # The grader may hold connections, which belong to the running event loop.
        async with open_backends(settings).open(spec) as grader:
            watched = ObservedGrader(WatchedGrader(grader, beat), spec)
            with Ranks(settings.ranks, members_of(settings)) as ranks:
                with failing_once():
                    run = assemble(attempt, spec, watched, settings, ranks, scratch, stop_requested, beat)
                with closed_at_the_end(run.feeds):
                    return await trained(run)
    except InvalidGrader as refused:
        raise UserMistake("invalid_grader", str(refused), "method.reinforcement.grader") from refused


async def trained(run: Run) -> RunOutcome:
    """Run the loop. A Refusal in it is a UserMistake."""
    try:
        with failing_once():
            return await run.train()
    except SchemaTooLarge as cause:
        raise UserMistake("schema_too_large", str(cause), "method.reinforcement.response_format") from cause


@contextmanager
def closed_at_the_end(feeds: Feeds) -> Iterator[None]:
    """Close the exporters with the way in which the attempt ended, unless the run has closed them."""
    try:
        yield
    except LeaseLost:
        feeds.abandon()
        raise
    except UserMistake:
        feeds.close("failed")
        raise
    except BaseException:
        feeds.close("interrupted")
        raise
    feeds.close("interrupted")


def main(assemble: Assemble | None = None) -> int:
    """Run the claimed job that stdin names as `job_id epoch`. The exit status tells the supervisor how it ended."""
    parser = argparse.ArgumentParser(prog="python -m worker.child")
    parser.add_argument("parent", type=int, help="process id of the supervisor: this run ends when it does")
    parser.add_argument("progress", type=Path, help="the file to touch at every sign of progress")
    args = parser.parse_args()
    process.die_with_parent(args.parent)

    stopping = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the supervisor decides

    # This takes seconds, and a spare child does it before there is a job.
    assemble = assemble or import_module("worker.assemble").assemble
    settings = Settings()
    database = Database(settings.database)
    blobs = blobs_of(settings)
    job_id, epoch = sys.stdin.readline().split()
    claim = Claim(job_id, int(epoch), "run")
    # Once for the operator, with the supervisor's own log, and once for the job's log.
    logs.configure([logs.handler(settings.log_format, sys.stdout), logs.handler("text", sys.stderr)])
    try:
        attempt = Attempt.begin(claim, database, blobs, patience_seconds=settings.patience_seconds)
        watched = instruments.attempt(claim, args.progress, settings.otlp_endpoint)
        with TemporaryDirectory(prefix="regraft-") as scratch, watched:
            outcome = asyncio.run(
                run_attempt(
                    attempt,
                    settings,
                    assemble,
                    scratch=Path(scratch),
                    stop_requested=lambda: stopping,
                    beat=beats_into(args.progress),
                )
            )
    except LeaseLost:
        return process.LOST
    except ModelUnavailable as cause:
        # Worth another attempt, and no fault of the code, so without a traceback.
        print(cause, file=sys.stderr)  # noqa: T201 - what the supervisor quotes
        return process.FAILED
    except EnvironmentNotBuilt as missing:
        with lifecycle.fenced(database, claim) as (session, job):
            lifecycle.put_off(session, job, reason=str(missing))
        return process.PUT_OFF
    except UserMistake as mistake:
        Recorder(attempt).fail(code=mistake.code, message=mistake.message, param=mistake.param)
        return process.USER_MISTAKE
    return process.DONE if outcome is RunOutcome.DONE else process.DRAINED


if __name__ == "__main__":
    status = main()
    if left_behind():
        sys.stderr.flush()
        os._exit(status)  # the threads of an exporter that does not answer would keep the process alive
    sys.exit(status)
