"""The process of the hazard pool: imports one function, locks itself down, and forks for each batch of calls.

Frames go both ways on stdin and stdout, as in graders/sandbox/zygote.py:

    {"function", "warm_up", "parent", "readable", "listed", "path", "variables", "cpu_s", "turn_s", "wall_s", "memory",
     "without"}
        ->  {"layers"} or {"error"}
    {"batch", "calls": [[argument, ...], ...]}
        ->  any number of frames: the batch's number on the first line, then an outcome on each line, in order

An outcome is {"value"}, {"error", "text"}, or {"limit", "text"} with the limit "time", "memory", "crash", or "starved",
which means that the host gave the call no processor time. A limit is the last outcome of its batch. So is {"over"},
which belongs to no call: the fork has used up its turn. The service sends the other calls again. Several batches may
run at once, each in its own fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from graders.sandbox import lockdown, syscalls
from graders.sandbox.zygote import (
    MAX_REASON,
    read_body,
    read_frame,
    try_in_a_child,
    write,
    write_body,
    write_frame,
)

NICE = 5  # a lower priority than the service's threads
OUT_OF_MEMORY = 100  # exit status of a fork that ran out of memory
TURN_OVER = 101  # exit status of a fork whose turn ended before its last call


def main() -> None:
    """Prepare, report readiness, and serve until stdin closes."""
    config = read_frame(0)
    assert config is not None
    try:
        zygote = HazardZygote(config)
    except BaseException as cause:
        write_frame(1, {"error": f"{type(cause).__name__}: {cause}"[:MAX_REASON]})
        return
    write_frame(1, {"layers": zygote.layers})
    zygote.serve()


class CallBatch:
    """Calls that one fork runs in sequence, until a call exceeds a limit or the turn is over."""

    def __init__(self, number: int, calls: list[list[Any]]) -> None:
        self.number, self.calls = number, calls
        self.done = 0
        self.child, self.results = 0, -1
        self.partial = b""
        self.deadline = 0.0


class HazardZygote:
    """One imported and warmed-up function, in a process with every inheritable layer that this host supports."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.layers: dict[str, str] = {}  # "" if the layer is active, else the reason
        os.environ.update(config["variables"])
        sys.path[:] = config["path"]
        lockdown.die_with(config["parent"])
        lockdown.first_to_be_killed()
        # Before the layers: the service may be installed where only its own user can read.
        module, _, name = config["function"].partition(":")
        self.function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        for arguments in config["warm_up"]:
            self.function(*arguments)
        self._lock_down()
        self.filter = self._filter()
        self.batches: dict[int, CallBatch] = {}  # by file descriptor of the results pipe
        self.poll = select.poll()
        gc.collect()
        gc.freeze()  # otherwise the first collection in each child would copy every page that it visits

    def serve(self) -> None:
        """Run batches until stdin ends."""
        self.poll.register(0, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll(self._patience_ms()):
                if fd != 0:
                    self._read(self.batches[fd])
                    continue
                body = read_body(0)
                if body is None:
                    return  # the children exit with this process
                request = json.loads(body)
                self._fork(CallBatch(request["batch"], request["calls"]))
            now = time.monotonic()
            for batch in [batch for batch in self.batches.values() if batch.deadline <= now]:
                os.kill(batch.child, signal.SIGKILL)
                self._reap(batch, _starved(self.config["wall_s"]))

    def _patience_ms(self) -> float | None:
        if not self.batches:
            return None
        first = min(batch.deadline for batch in self.batches.values())
        return max(0.0, first - time.monotonic()) * 1000 + 1

    def _fork(self, batch: CallBatch) -> None:
        results, write = os.pipe()
        child = os.fork()
        if child == 0:
            self._child(batch, write)
        os.close(write)
        batch.child, batch.results = child, results
        batch.deadline = time.monotonic() + self.config["wall_s"]
        self.batches[results] = batch
        self.poll.register(results, select.POLLIN)

    def _read(self, batch: CallBatch) -> None:
        data = os.read(batch.results, 1 << 16)
        if not data:
            self._reap(batch, b"")
            return
        lines, newline, batch.partial = (batch.partial + data).rpartition(b"\n")
        if newline:
            self._answer(batch, lines + newline)

    def _answer(self, batch: CallBatch, lines: bytes) -> None:
        batch.done += lines.count(b"\n")
        batch.deadline = time.monotonic() + self.config["wall_s"]
        write_body(1, b"%d\n" % batch.number + lines)

    def _reap(self, batch: CallBatch, verdict: bytes) -> None:
        """Reap a fork and drop its batch. `verdict` is the outcome of a killed fork, and b"" if the fork exited."""
        self.poll.unregister(batch.results)
        os.close(batch.results)
        del self.batches[batch.results]
        code = os.waitstatus_to_exitcode(os.waitpid(batch.child, 0)[1])
        if batch.done < len(batch.calls):
            # Only if a call has finished; otherwise a call that exits with TURN_OVER would be retried forever.
            over = code == TURN_OVER and batch.done > 0
            self._answer(batch, verdict or (_OVER if over else _ended(code)))

    def _child(self, batch: CallBatch, results: int) -> None:
        try:
            end = time.monotonic() + self.config["turn_s"]
            self._hold(results)
            for arguments in batch.calls:
                # The timer limits each call; RLIMIT_CPU is per process, in whole seconds. SIGPROF ends the process.
                signal.setitimer(signal.ITIMER_PROF, self.config["cpu_s"])
                write(1, self._outcome(arguments))
                if time.monotonic() >= end:
                    os._exit(TURN_OVER)
            os._exit(0)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:
            os._exit(1)

    def _outcome(self, arguments: list[Any]) -> bytes:
        try:
            outcome = {"value": self.function(*arguments)}
        except MemoryError:
            raise
        except Exception as cause:
            outcome = {"error": type(cause).__name__, "text": str(cause)[:MAX_REASON]}
        return json.dumps(outcome).encode() + b"\n"

    def _hold(self, results: int) -> None:
        """Apply the layers of one fork. Closes all file descriptors except the results pipe."""
        zygote = os.getppid()
        null = os.open(os.devnull, os.O_RDONLY)
        wanted = [os.dup(fd) for fd in (null, results, null)]
        for number, fd in enumerate(wanted):
            os.dup2(fd, number)
        os.closerange(3, 1 << 16)
        os.nice(NICE)
        lockdown.die_with(zygote)
        for what, limit in (
            (resource.RLIMIT_AS, self.config["memory"]),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(what)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(what, (limit, limit))
        if self.filter:
            lockdown.seccomp(self.filter)

    def _lock_down(self) -> None:
        """Apply the layers that every fork inherits. Missing layers are accepted because the code is trusted."""
        config = self.config
        self._layer("namespaces", self._leave_the_hosts_files)
        self._layer("no_new_privs", lockdown.no_new_privs)
        lockdown.undumpable()
        lockdown.die_with(config["parent"])  # the change of user has reset it
        self._layer("landlock", lambda: lockdown.landlock(config["readable"], listed=config["listed"]))

    def _leave_the_hosts_files(self) -> None:
        if os.geteuid() != 0:
            raise OSError("needs root")
        lockdown.private_root(self.config["readable"])
        lockdown.become_nobody()  # the private root makes all packages readable for this user

    def _filter(self) -> bytes:
        made: list[bytes] = []

        def make() -> None:
            program = syscalls.grader_filter()
            try_in_a_child(program)
            made.append(program)

        self._layer("seccomp", make)
        return made[0] if made else b""

    def _layer(self, name: str, apply: Callable[[], object]) -> None:
        self.layers[name] = lockdown.applied(apply, name in self.config["without"])


_OVER = b'{"over": true}\n'


def _ended(code: int) -> bytes:
    match -code:
        case signal.SIGPROF | signal.SIGXCPU:
            return _limit("time")
        case signal.SIGKILL:  # this process sends no SIGKILL here, so the OOM killer did
            return _limit("memory")
        case number if number > 0:
            return _limit("crash", signal.Signals(number).name)
    if code == OUT_OF_MEMORY:
        return _limit("memory")
    return _limit("crash", f"exit status {code}")


def _limit(kind: str, text: str = "") -> bytes:
    return json.dumps({"limit": kind, "text": text}).encode() + b"\n"


def _starved(wall_s: float) -> bytes:
    """Return the outcome of a call that timed out without using its processor time: the host is overloaded."""
    text = f"no result within {wall_s:g} s, and its processor time was not used up: the host is overloaded"
    return _limit("starved", text)
