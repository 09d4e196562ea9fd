"""The process of the hazard pool: imports one function, locks itself down, and forks for each batch of calls.

Frames go both ways on stdin and stdout, as in graders/sandbox/zygote.py:

    {"function", "warm_up", "parent", "readable", "listed", "path", "variables", "cpu_s", "turn_s", "wall_s", "memory",
     "without"}
        ->  {"layers"} or {"error"}
    {"batch", "calls": [[argument, ...], ...]}
        ->  any number of frames: the batch's number on the first line, then an outcome on each line, in order

An outcome is {"value"}, {"error", "text"}, or {"limit", "text"}: "time", "memory", "crash", or "starved" where the host
gave it no processor time. A limit is the last outcome of its batch, and so is {"over"}, which is no call's: its turn
is over. The service asks for the rest again. Several batches may run at once, each in a fork of its own.
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
from graders.sandbox.zygote import MAX_REASON, read_body, read_frame, try_in_a_child, write_body, write_frame

NICE = 5  # the service's own threads come first
OUT_OF_MEMORY = 100  # the exit status of a fork that ran out of it
TURN_OVER = 101  # of one that used up its time before its calls


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


class Batch:
    """Calls that one fork makes, one after the other, until one meets a limit or the turn is over."""

    def __init__(self, number: int, calls: list[list[Any]]) -> None:
        self.number, self.calls = number, calls
        self.done = 0
        self.child, self.results = 0, -1
        self.partial = b""
        self.deadline = 0.0


class HazardZygote:
    """One function, imported and warm, behind every layer that a fork inherits and that this host offers."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.layers: dict[str, str] = {}  # "" holds, otherwise why not
        os.environ.update(config["variables"])
        sys.path[:] = config["path"]
        lockdown.die_with(config["parent"])
        lockdown.first_to_be_killed()
        # Before the layers: whoever installed the service may have put it where nobody else can read.
        module, _, name = config["function"].partition(":")
        self.function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        for arguments in config["warm_up"]:
            self.function(*arguments)
        self._lock_down()
        self.filter = self._filter()
        self.batches: dict[int, Batch] = {}  # by the descriptor of their results
        self.poll = select.poll()
        gc.collect()
        gc.freeze()  # else the first collection in every child copies each page it looks at

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
                    return  # the children end with this process
                request = json.loads(body)
                self._fork(Batch(request["batch"], request["calls"]))
            now = time.monotonic()
            for batch in [batch for batch in self.batches.values() if batch.deadline <= now]:
                os.kill(batch.child, signal.SIGKILL)
                self._reap(batch, _starved(self.config["wall_s"]))

    def _patience_ms(self) -> float | None:
        if not self.batches:
            return None
        first = min(batch.deadline for batch in self.batches.values())
        return max(0.0, first - time.monotonic()) * 1000 + 1

    def _fork(self, batch: Batch) -> None:
        results, write = os.pipe()
        child = os.fork()
        if child == 0:
            self._child(batch, write)
        os.close(write)
        batch.child, batch.results = child, results
        batch.deadline = time.monotonic() + self.config["wall_s"]
        self.batches[results] = batch
        self.poll.register(results, select.POLLIN)

    def _read(self, batch: Batch) -> None:
        data = os.read(batch.results, 1 << 16)
        if not data:
            self._reap(batch, b"")
            return
        lines, newline, batch.partial = (batch.partial + data).rpartition(b"\n")
        if newline:
            self._answer(batch, lines + newline)

    def _answer(self, batch: Batch, lines: bytes) -> None:
        batch.done += lines.count(b"\n")
        batch.deadline = time.monotonic() + self.config["wall_s"]
        write_body(1, b"%d\n" % batch.number + lines)

    def _reap(self, batch: Batch, verdict: bytes) -> None:
        """Collect a fork that ended, or that is being killed for what `verdict` says, and forget its batch."""
        self.poll.unregister(batch.results)
        os.close(batch.results)
        del self.batches[batch.results]
        code = os.waitstatus_to_exitcode(os.waitpid(batch.child, 0)[1])
        if batch.done < len(batch.calls):
            # Not without a call that was made, or a call that exits like this would be asked for again for ever.
            over = code == TURN_OVER and batch.done > 0
            self._answer(batch, verdict or (_OVER if over else _ended(code)))

    def _child(self, batch: Batch, results: int) -> None:
        try:
            end = time.monotonic() + self.config["turn_s"]
            self._hold(results)
            for arguments in batch.calls:
                # Per call, where RLIMIT_CPU is per process and in whole seconds. The signal ends the process.
                signal.setitimer(signal.ITIMER_PROF, self.config["cpu_s"])
                _write(1, self._outcome(arguments))
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
        """The layers of one fork. It has no descriptor but for its results."""
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
        """What every fork inherits. The code is ours, so a host without a layer runs it all the same."""
        config = self.config
        self._layer("namespaces", self._leave_the_hosts_files)
        self._layer("no_new_privs", lockdown.no_new_privs)
        lockdown.undumpable()
        lockdown.die_with(config["parent"])  # a change of user undid it
        self._layer("landlock", lambda: lockdown.landlock(config["readable"], listed=config["listed"]))

    def _leave_the_hosts_files(self) -> None:
        if os.geteuid() != 0:
            raise OSError("needs root")
        lockdown.private_root(self.config["readable"])
        lockdown.become_nobody()  # who can read the packages in a root of our own, wherever they are

    def _filter(self) -> bytes:
        made: list[bytes] = []

        def make() -> None:
            program = syscalls.grader_filter()
            try_in_a_child(program)
            made.append(program)

        self._layer("seccomp", make)
        return made[0] if made else b""

    def _layer(self, name: str, apply: Callable[[], object]) -> None:
        if name in self.config["without"]:
            self.layers[name] = "turned off"
            return
        try:
            apply()
            self.layers[name] = ""
        except OSError as cause:
            self.layers[name] = str(cause) or type(cause).__name__


_OVER = b'{"over": true}\n'


def _ended(code: int) -> bytes:
    match -code:
        case signal.SIGPROF | signal.SIGXCPU:
            return _limit("time")
        case signal.SIGKILL:  # not by us, so by the kernel
            return _limit("memory")
        case number if number > 0:
            return _limit("crash", signal.Signals(number).name)
    if code == OUT_OF_MEMORY:
        return _limit("memory")
    return _limit("crash", f"exit status {code}")


def _limit(kind: str, text: str = "") -> bytes:
    return json.dumps({"limit": kind, "text": text}).encode() + b"\n"


def _starved(wall_s: float) -> bytes:
    """Of a call that was ended before it had its processor time: that is about the host, and not about its input."""
    text = f"no result within {wall_s:g} s, and its processor time was not used up: the host is overloaded"
    return _limit("starved", text)


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
