"""The process of one attempt: reads its claim from stdin, runs the job, and reports how it ended by its exit status.

Started by worker/supervisor/supervisor.py as `python -m worker.child PARENT PROGRESS`. With several ranks on this
machine it is their launcher, and rank 0 runs the job.
"""

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from core.claims import Claim, LeaseLost
from core.database.engine import Database
from core.jobs import lifecycle
from core.jobs.params import GRADER_PARAM, SHADOW_PARAM
from core.outages import Resource
from core.registry import InvalidRegistry
from core.response_format import SchemaTooLarge
from core.settings import Settings
from core.storage.store import blobs_of
from core.telemetry import logs
from graders.backends import InvalidBackends
from graders.calls import ServerAway
from graders.environments.catalog import EnvironmentNotBuilt
from graders.sandbox import folders
from graders.spec import GraderSpec, InvalidGrader, parse_grader
from graders.tools.protocol import ToolsFail
from graders.types import Grader
from worker import instruments, process
from worker.attempt import Attempt
from worker.backends import open_backends, patience_of_run
from worker.device import GpuUnusable
from worker.heartbeat import Beat, HeartbeatGrader, heartbeat_to
from worker.instruments import InstrumentedGrader
from worker.interfaces import Exporters
from worker.out_of_memory import OutOfDeviceMemory, OutOfMainMemory, Shortage
from worker.progress import PROGRESS
from worker.recording.exporters.threads import has_abandoned_threads
from worker.refusals import (
    LoweredForNextAttempt,
    MachineLacks,
    MemoryTaken,
    ModelUnavailable,
    NoMember,
    NotEnoughDisk,
    NotEnoughMemory,
    NotKnownYet,
    PausedWhileWaiting,
    UserMistake,
    failing_once,
    starting_later,
    waiting_for_names,
)
from worker.sharing.base import BaseLost, DeviceShare, RunsAlone
from worker.sharing.turns import TurnsLost

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from worker.run import Run, RunOutcome
    from worker.training.world import World

# The time that an operator has to free a disk or memory, in seconds. Then the job fails with what it lacks.
MAX_WAIT = 24 * 3600.0
SCRATCH = "regraft-run-"  # the folder of temporary files, with checkpoints
# A job waits at no cost while its machine lacks something, or until the operator has repaired a file.
WAITS = (
    MachineLacks,
    MemoryTaken,
    GpuUnusable,
    EnvironmentNotBuilt,
    NoMember,
    InvalidRegistry,
    InvalidBackends,
    NotKnownYet,
)
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
    from worker.recording.plan_record import lowering_for_next_attempt

    try:
        # The grader may hold connections, which belong to the running event loop.
        async with AsyncExitStack() as opened:
            opened.enter_context(booked_at_the_end(attempt))
            with failing_once(), starting_later(), waiting_for_names():
                spec, grader = await opened.enter_async_context(opened_grader(attempt, settings, beat))
                shadow = await opened.enter_async_context(opened_shadow(attempt, settings, beat))
                attempt = replace(attempt, shadow_grader=shadow)
                run = assemble(attempt, spec, grader, settings, scratch, stop_requested, beat, world)
            with closed_at_the_end(run.exporters), failing_once(), lowering_for_next_attempt(attempt):
                return await trained(run)
    except InvalidGrader as refused:
        raise UserMistake("invalid_grader", str(refused), GRADER_PARAM) from refused


@asynccontextmanager
async def opened_grader(
    attempt: Attempt, settings: Settings, beat: Beat
) -> AsyncIterator[tuple[GraderSpec, Grader] | tuple[None, None]]:
    """The job's grader during the context. None: it learns from the rows of its file, or from a teacher."""
    body = attempt.job.body
    if "grader" not in body:
        yield None, None
        return
    spec = parse_grader(body["grader"])
    backends, patience = open_backends(settings), patience_of_run(settings, beat)
    async with backends.open(spec, patience=patience, ledger=attempt.ledger) as grader:
        yield spec, InstrumentedGrader(HeartbeatGrader(grader, beat), spec)


@asynccontextmanager
async def opened_shadow(attempt: Attempt, settings: Settings, beat: Beat) -> AsyncIterator[Grader | None]:
    """The job's shadow grader during the context; None: it has none.

    Calls are retried for seconds only: while its server is unavailable the scores are missing, and the run continues.
    """
    body = attempt.job.body
    if body.get("shadow_grader") is None:
        yield None
        return
    async with AsyncExitStack() as opened:
        try:
            spec = parse_grader(body["shadow_grader"], SHADOW_PARAM)
            opening = open_backends(settings).open(spec, ledger=attempt.ledger)
            grader = await opened.enter_async_context(opening)
        except InvalidGrader as refused:
            raise UserMistake("invalid_grader", str(refused), SHADOW_PARAM) from refused
        yield HeartbeatGrader(grader, beat)


@contextmanager
def booked_at_the_end(attempt: Attempt) -> Iterator[None]:
    """Count what judges have used for steps that the attempt does not record, such as asynchronous batches."""
    try:
        yield
    except BaseException:
        attempt.book_once()
        raise
    attempt.book()


async def trained(run: "Run") -> "RunOutcome":
    """Run the loop. A Refusal in it is a UserMistake."""
    with refusing():
        return await run.train()


@contextmanager
def refusing() -> Iterator[None]:
    """Raise a Refusal, or a schema that is too large for an answer, as a UserMistake."""
    try:
        with failing_once():
            yield
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
        return in_ranks(settings, args.progress, rank or run_rank)

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
    from worker.training.launch import Group, MembersMissing, RanksFailed, launch

    stopping = multiprocessing.get_context("spawn").Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    claim = sys.stdin.readline()  # the ranks have no stdin
    try:
        return launch(
            rank, os.getpid(), progress, stopping, claim, ranks=settings.ranks, group=Group.of(settings)
        )
    except (RanksFailed, MembersMissing) as cause:
        print(cause, file=sys.stderr)  # noqa: T201 - what the supervisor quotes
        # A machine that left between the claim and the run is no failure of the job.
        return process.UNSTARTED if isinstance(cause, MembersMissing) else process.FAILED


def run_rank(
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
            from worker.training.world import World

            assemble = import_module("worker.assemble").assemble
        settings = Settings()
        ranks = (world or World).join(settings.hang_seconds)
        ranks.watch_machines(settings.lost_machine_seconds, partial(end_without, settings))
        if ranks.rank > 0:
            follow_rank_0(ranks)
        else:
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
    from worker.training.world import BrokenWorld

    with suppress(BrokenWorld):
        followed(world)
    # Rank 0 has ended, or ends for this rank. Its status must be the first that the launcher sees.
    while True:
        signal.pause()


def followed(world: "World") -> None:
    """Follow rank 0 until this rank alone cannot continue, and report the reason: rank 0 ends the run for it.

    Rank 0 may be waiting for this rank in a collective operation, and it records the error of the job.

    Raises:
        BrokenWorld: the run has ended, or another rank.
    """
    from worker.training.distributed import follow

    try:
        with refusing():
            follow(world)
    except OutOfDeviceMemory:
        return  # `follow` has reported it
    except UserMistake as mistake:
        world.refuse(mistake)


def run_member(parent: int, progress: Path, world: "type[World] | None" = None) -> NoReturn:
    """Be a rank of a machine without rank 0: compute what that asks for until it ends. Exits with a status.

    The file `progress` is touched whenever machine 0 has answered.
    """
    process.die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = process.FAILED
    try:
        with process.importing():
            import_module("worker.training.distributed")
            from worker.training.world import BrokenWorld, World

        settings = Settings()
        ranks = (world or World).join(settings.hang_seconds)
        end, beat = partial(end_without, settings), heartbeat_to(progress)
        ranks.watch_machines(settings.lost_machine_seconds, end, on_answer=beat)
        with suppress(BrokenWorld):  # the run has ended, or another rank: the first machine knows
            followed(ranks)
            ranks.wait_for_end()  # rank 0 ends the run, and its status is what counts
        status = process.ENDED
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
    database = Database(settings.database)
    blobs = blobs_of(settings)
    PROGRESS.begin()
    claim = claim_of(line)
    beat = heartbeat_to(progress)
    # Once for the operator, with the supervisor's own log, and once for the job's log.
    logs.configure([logs.handler(settings.log_format, sys.stdout), logs.handler("text", sys.stderr)])
    try:
        attempt = Attempt.begin(
            claim,
            database,
            blobs,
            patience_seconds=settings.patience_seconds,
            shared=device_share(line, settings, beat),
        )
    except LeaseLost:
        return process.LOST
    except TurnsLost as cause:
        print(cause, file=sys.stderr)  # noqa: T201 - what the supervisor quotes
        return process.FAILED

    def run() -> "RunOutcome":
        if world is not None:
            world.watch_ranks(partial(end_with_shortage, attempt), partial(end_with_mistake, attempt))
        with ExitStack() as opened:
            with starting_later():
                scratch = opened.enter_context(folders.private(SCRATCH))
            opened.enter_context(instruments.attempt(claim, progress, settings.otlp_endpoint))
            return asyncio.run(
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

    return status_of(attempt, run)


def status_of(attempt: Attempt, run: Callable[[], "RunOutcome"]) -> int:
    """Run an attempt, and return the exit status for its end. Ends that are no crash are recorded with the job."""
    from worker.run import RunOutcome

    try:
        outcome = run()
    except LeaseLost:
        return process.LOST
    except RunsAlone as cause:
        print(cause, file=sys.stderr)  # noqa: T201 - what the supervisor quotes
        return process.ALONE
    except (ModelUnavailable, ServerAway, BaseLost, TurnsLost, OutOfMainMemory) as cause:
        # Worth another attempt, and no fault of the code, so without a traceback.
        print(cause, file=sys.stderr)  # noqa: T201 - what the supervisor quotes
        return process.FAILED
    except WAITS as cause:
        return postpone(attempt, cause)
    except LoweredForNextAttempt as cause:
        return retry_with_less_memory(attempt, str(cause))
    except ToolsFail as cause:
        return paused(attempt, cause)
    except PausedWhileWaiting:
        return process.DRAINED
    except UserMistake as mistake:
        return failed(attempt, mistake)
    statuses = {RunOutcome.DONE: process.DONE, RunOutcome.ROLLED_BACK: process.ROLLED_BACK}
    return statuses.get(outcome, process.DRAINED)


def paused(attempt: Attempt, cause: ToolsFail) -> int:
    """Pause the job, whose user has to repair a tool, and return the exit status."""
    try:
        attempt.write(lambda session, job: lifecycle.pause_by_service(session, job, str(cause), cause.data))
    except LeaseLost:
        return process.LOST
    return process.DRAINED


def failed(attempt: Attempt, mistake: UserMistake) -> int:
    """Record the error of the job, and return the exit status."""
    from worker.recording.recorder import JobRecorder

    try:
        JobRecorder(attempt).fail(code=mistake.code, message=mistake.message, param=mistake.param)
    except LeaseLost:  # or another thread has recorded what another rank has met
        return process.LOST
    return process.USER_MISTAKE


def device_share(line: str, settings: Settings, beat: Beat) -> DeviceShare | None:
    """Join the other jobs of the device and of the base model that a line of stdin names. None: it names none."""
    _, _, *folder = line.rstrip("\n").split(" ", 2)
    if not folder:
        return None
    return DeviceShare.join(process.DeviceSockets(Path(folder[0])), settings.jobs_per_worker, beat)


def claim_of(line: str) -> Claim:
    """The claim of a line of stdin."""
    job_id, epoch, *_ = line.split()
    return Claim(job_id, int(epoch), "run")


def end_with_shortage(attempt: Attempt, shortage: Shortage) -> NoReturn:
    """End this process because another rank ran out of memory in an operation of all ranks, which has no end then.

    Unless this rank has run out of memory too, and ends by itself: then this thread waits.
    """
    from worker.recording.plan_record import lowering_for_next_attempt

    def run() -> NoReturn:
        with failing_once(), lowering_for_next_attempt(attempt):
            raise OutOfDeviceMemory(shortage)

    end_with(attempt, run)


def end_with_mistake(attempt: Attempt, mistake: UserMistake) -> NoReturn:
    """End this process because the job cannot succeed by what another rank has met: it is the error of the job."""

    def run() -> NoReturn:
        raise mistake

    end_with(attempt, run)


def end_with(attempt: Attempt, run: Callable[[], NoReturn]) -> NoReturn:
    """End this process, from any of its threads, with the status of a run that ends so."""
    status = process.FAILED
    try:
        status = status_of(attempt, run)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def postpone(attempt: Attempt, cause: Exception) -> int:
    """Put the job off because of what this machine lacks, or fail it after too long. Return the exit status."""
    if (late := too_late(cause)) is not None and has_waited_too_long(attempt, cause):
        return failed(attempt, late)
    if isinstance(cause, MachineLacks):
        print(cause, file=sys.stderr)  # noqa: T201 - what the supervisor quotes
        return process.UNSTARTED
    try:
        attempt.write(lambda session, job: lifecycle.put_off(session, job, reason=str(cause)))
    except LeaseLost:
        return process.LOST
    if isinstance(cause, EnvironmentNotBuilt | NoMember | NotKnownYet):  # which other jobs do not need
        return process.PUT_OFF
    return process.GPU_UNUSABLE if isinstance(cause, GpuUnusable) else process.RESTS


def retry_with_less_memory(attempt: Attempt, reason: str) -> int:
    """End the attempt because of its sizes, which are lower in the next one. Return the exit status."""
    try:
        attempt.write(lambda session, job: lifecycle.run_smaller(session, job, reason=reason))
    except LeaseLost:
        return process.LOST
    return process.PUT_OFF


def too_late(cause: Exception) -> UserMistake | None:
    """The error of a job that has waited too long for a resource. None: it waits for as long as it takes."""
    hours = f"{MAX_WAIT / 3600:.0f} hours"
    if isinstance(cause, MachineLacks) and cause.resource is Resource.DISK:
        return UserMistake(NotEnoughDisk.code, f"No worker had room on its disk for {hours}. {cause.details}")
    if isinstance(cause, MemoryTaken):
        return UserMistake(NotEnoughMemory.code, f"No worker had enough free memory for {hours}: {cause}.")
    return cause.mistake if isinstance(cause, NotKnownYet) else None


def has_waited_too_long(attempt: Attempt, cause: Exception) -> bool:
    """Whether all attempts have ended with this cause for longer than an operator needs to end it.

    Files of two workers may lack different names, so any name counts.
    """
    is_name = isinstance(cause, NotKnownYet)
    reason, most = (NotKnownYet.PREFIX, attempt.retry.seconds) if is_name else (str(cause), MAX_WAIT)
    return attempt.read(lambda session: lifecycle.put_off_for(session, attempt.job.id, reason)) >= most


if __name__ == "__main__":
    status = main()
    if has_abandoned_threads():
        sys.stderr.flush()
        os._exit(status)  # the threads of an exporter that does not answer would keep the process alive
    sys.exit(status)
