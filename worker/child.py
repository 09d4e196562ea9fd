"""The process of one attempt: reads its claim from stdin, runs the job, and reports how it ended by its exit status.

Started by worker/supervise/supervisor.py as `python -m worker.child PARENT PROGRESS`. With several ranks on this
machine it is their launcher, and rank 0 runs the job.
"""

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from core.database.engine import Database
from core.jobs import lifecycle, methods
from core.jobs.claim import Claim, LeaseLost
from core.jobs.distillation import teacher_of
from core.response_format import SchemaTooLarge
from core.settings import Settings
from core.storage.store import blobs_of
from core.telemetry import logs
from graders.environments.catalog import EnvironmentNotBuilt
from graders.sandbox import folders
from graders.spec import InvalidGrader, parse_grader
from worker import instruments, process
from worker.attempt import Attempt
from worker.backends import open_backends
from worker.heartbeat import Beat, WatchedGrader, beats_into
from worker.instruments import ObservedGrader
from worker.interfaces import Exporters
from worker.progress import PROGRESS
from worker.record.exporters.threads import left_behind
from worker.refusals import (
    InvalidModel,
    MemoryTaken,
    ModelUnavailable,
    UnsupportedModel,
    UserMistake,
    failing_once,
)
from worker.sharing.base import BaseLost, RunsAlone, SharedBase
from worker.sharing.turns import TURNS

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from worker.learn.world import World
    from worker.offline.run import OfflineRun
    from worker.run import Run, RunOutcome

SCRATCH = "regraft-run-"  # the folder of temporary files, with checkpoints
# worker.assemble.assemble. Its module imports torch, so it is imported where it is needed.
Assemble = Callable[..., "Run"]


async def run_attempt(
    attempt: Attempt,
    settings: Settings,
    assemble: Assemble,
    *,
    scratch: Path,
    stop_requested: Callable[[], bool],
    beat: Beat,
    world: "World | None" = None,
) -> "RunOutcome":
    """Train a claimed job. Rank 0 of `world` if there are several.

    Raises:
        UserMistake: the job cannot succeed as it is.
        LeaseLost: the job was cancelled or claimed by another worker.
    """
    if methods.variant(attempt.job.method, attempt.job.body) in methods.OFFLINE:
        # Imports torch, so it is imported where it is needed.
        assemble_offline = import_module("worker.offline.assemble").assemble
        with failing_once():
            offline: OfflineRun = assemble_offline(attempt, settings, scratch, stop_requested, beat, world)
        with closed_at_the_end(offline.exporters):
            return await trained(offline)
    if teacher_of(attempt.job) is not None:
        with failing_once():
            run = assemble(attempt, None, None, settings, scratch, stop_requested, beat, world)
        with closed_at_the_end(run.exporters):
            return await trained(run)
    try:
        spec = parse_grader(attempt.job.body["grader"])
        # The grader may hold connections, which belong to the running event loop.
        async with open_backends(settings).open(spec) as grader:
            watched = ObservedGrader(WatchedGrader(grader, beat), spec)
            with failing_once():
                run = assemble(attempt, spec, watched, settings, scratch, stop_requested, beat, world)
            with closed_at_the_end(run.exporters):
                return await trained(run)
    except InvalidGrader as refused:
        raise UserMistake("invalid_grader", str(refused), "method.reinforcement.grader") from refused


async def trained(run: "Run | OfflineRun") -> "RunOutcome":
    """Run the loop. A Refusal in it is a UserMistake."""
    try:
        with failing_once():
            return await run.train()
    except SchemaTooLarge as cause:
        raise UserMistake("schema_too_large", str(cause), "method.reinforcement.response_format") from cause


@contextmanager
def closed_at_the_end(exporters: Exporters) -> Iterator[None]:
    """Close the exporters with the way in which the attempt ended, unless the run has closed them."""
    try:
        yield
    except LeaseLost:
        exporters.abandon()
        raise
    except UserMistake:
        exporters.close("failed")
        raise
    except BaseException:
        exporters.close("interrupted")
        raise
    exporters.close("interrupted")


def main(assemble: Assemble | None = None, rank: Callable[..., None] | None = None) -> int:
    """Run the claimed job that stdin names as `job_id epoch`. The exit status tells the supervisor how it ended."""
    parser = argparse.ArgumentParser(prog="python -m worker.child")
    parser.add_argument("parent", type=int, help="process id of the supervisor: this run ends when it does")
    parser.add_argument("progress", type=Path, help="the file to touch at every sign of progress")
    args = parser.parse_args()
    process.die_with_parent(args.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the supervisor decides
    settings = Settings()
    if settings.ranks * settings.nodes > 1:
        return in_ranks(settings, args.progress, rank or be_rank)

    stopping = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, on_signal)
    with process.importing():
        assemble = assemble or import_module("worker.assemble").assemble
    return run_claim(sys.stdin.readline(), settings, assemble, args.progress, lambda: stopping)


def in_ranks(settings: Settings, progress: Path, rank: Callable[..., None]) -> int:
    """Start the ranks, and wait for their end."""
    from worker.learn.launch import Group, MembersMissing, RanksFailed, launch

    stopping = multiprocessing.get_context("spawn").Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    claim = sys.stdin.readline()  # the ranks have no stdin
    try:
        return launch(
            rank, os.getpid(), progress, stopping, claim, ranks=settings.ranks, group=Group.of(settings)
        )
    except (RanksFailed, MembersMissing) as cause:
        print(cause, file=sys.stderr)  # noqa: T201 - what the supervisor quotes
        return process.FAILED


def be_rank(
    parent: int,
    progress: Path,
    stopping: "Event",
    claim: str,
    world: "type[World] | None" = None,
) -> NoReturn:
    """Be one rank: run the job, or follow the one that does. Exits with a status in any case, which ends all ranks."""
    process.die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = process.FAILED
    try:
        with process.importing():
            from worker.learn.world import World

            assemble = import_module("worker.assemble").assemble
        settings = Settings()
        ranks = (world or World).join(settings.hang_seconds)
        ranks.watch_machines(settings.lost_machine_seconds, partial(end_without, settings))
        if ranks.rank > 0:
            follow_rank_0(ranks)
        status = run_claim(claim, settings, assemble, progress, stopping.is_set, ranks)
        status = process.ENDED if status == process.DONE else status
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by sys.exit, after which the launcher would wait for threads of exporters and for the other ranks.
        os._exit(status)


def follow_rank_0(world: "World") -> NoReturn:
    """Compute what rank 0 of this machine asks for until the launcher ends this process."""
    from worker.learn.distributed import follow
    from worker.learn.world import BrokenWorld

    try:
        follow(world)
    except (BrokenWorld, InvalidModel, UnsupportedModel):
        # Rank 0 has ended, or meets the same model and reports it. Its status must be the first that the launcher sees.
        while True:
            signal.pause()


def be_member(parent: int, world: "type[World] | None" = None) -> NoReturn:
    """Be a rank of a machine without rank 0: compute what that asks for until it ends. Exits with a status."""
    process.die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = process.FAILED
    try:
        with process.importing():
            from worker.learn.distributed import follow
            from worker.learn.world import BrokenWorld, World

        settings = Settings()
        ranks = (world or World).join(settings.hang_seconds)
        ranks.watch_machines(settings.lost_machine_seconds, partial(end_without, settings))
        try:
            follow(ranks)
        except BrokenWorld:
            status = process.ENDED  # the run has ended, or another rank: the first machine knows
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def end_without(settings: Settings, machine: int) -> NoReturn:
    """End this process because another machine of the run is lost. Its threads may wait for that one for long."""
    waited = f"{settings.lost_machine_seconds:g} s (REGRAFT_LOST_MACHINE_SECONDS)"
    print(f"machine {machine} of the run has not answered for {waited}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(process.FAILED)


def run_claim(
    line: str,
    settings: Settings,
    assemble: Assemble,
    progress: Path,
    stop_requested: Callable[[], bool],
    world: "World | None" = None,
) -> int:
    """Run the job of a claim, a line of stdin, and return the exit status."""
    from worker.record.recorder import JobRecorder
    from worker.run import RunOutcome

    database = Database(settings.database)
    blobs = blobs_of(settings)
    job_id, epoch, *folder = line.rstrip("\n").split(" ", 2)
    PROGRESS.begin()
    claim = Claim(job_id, int(epoch), "run")
    beat = beats_into(progress)
    shared = None
    if folder:  # the job shares the device and its base model
        places = process.DeviceSockets(Path(folder[0]))
        shared = SharedBase(places.base, settings.jobs_per_worker)
        TURNS.join(places.turns, beat)
    # Once for the operator, with the supervisor's own log, and once for the job's log.
    logs.configure([logs.handler(settings.log_format, sys.stdout), logs.handler("text", sys.stderr)])
    try:
        attempt = Attempt.begin(
            claim, database, blobs, patience_seconds=settings.patience_seconds, shared=shared
        )
        watched = instruments.attempt(claim, progress, settings.otlp_endpoint)
        with folders.private(SCRATCH) as scratch, watched:
            outcome = asyncio.run(
                run_attempt(
                    attempt,
                    settings,
                    assemble,
                    scratch=scratch,
                    stop_requested=stop_requested,
                    beat=beat,
                    world=world,
                )
            )
    except LeaseLost:
        return process.LOST
    except RunsAlone as cause:
        print(cause, file=sys.stderr)  # noqa: T201 - what the supervisor quotes
        return process.ALONE
    except (ModelUnavailable, BaseLost) as cause:
        # Worth another attempt, and no fault of the code, so without a traceback.
        print(cause, file=sys.stderr)  # noqa: T201 - what the supervisor quotes
        return process.FAILED
    except (EnvironmentNotBuilt, MemoryTaken) as missing:
        with lifecycle.fenced(database, claim) as (session, job):
            lifecycle.put_off(session, job, reason=str(missing))
        return process.PUT_OFF
    except UserMistake as mistake:
        JobRecorder(attempt).fail(code=mistake.code, message=mistake.message, param=mistake.param)
        return process.USER_MISTAKE
    return process.DONE if outcome is RunOutcome.DONE else process.DRAINED


if __name__ == "__main__":
    status = main()
    if left_behind():
        sys.stderr.flush()
        os._exit(status)  # the threads of an exporter that does not answer would keep the process alive
    sys.exit(status)
