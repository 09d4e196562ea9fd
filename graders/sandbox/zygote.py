"""The sandbox's side: a bare interpreter that locks itself down, loads one source, and forks once per grade.

It exchanges frames on stdin and stdout: four bytes of length, then JSON. The first frame is the configuration:

    {"source", "entry", "parent", "readable", "listed", "path", "modules", "variables", "scratch", "user", "insecure",
     "without", and all of Limits}
        ->  {"layers"} or {"error"}
        ->  {"compile_error"}: "" if the source is a valid grader, else the process exits
        ->  {"ready"}
    {"sample", "item"}, or for tools {"arguments", "item", "state"}
        ->  {"status", "exit", "result", "output", "retire"}, or {"failed"} and the process exits

The fork reads the request of its grade itself, because the zygote's memory is readable by later forks.

The zygote runs on the Python of the grader's environment, where the service cannot be imported. It holds no secrets,
because children with untrusted code inherit its memory.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib
import json
import linecache
import marshal
import math
import os
import select
import signal
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from graders.sandbox import lockdown, scratch, syscalls
from graders.sandbox.entries import ENTRIES, GRADE
from graders.sandbox.source import FILE, TOO_DEEP, compiled
from graders.types import MAX_SCORE, MAX_STEPS, is_score, steps_of, too_large

SCRATCH = "/scratch"
SCRATCH_S = 0.05  # interval between measurements of the scratch folder
THREADS_S = 0.02  # interval between thread counts, if the kernel does not limit the threads of each grade
COMPILE_S, COMPILE_MEMORY = 10, 512 << 20  # seconds of processor time, bytes of address space
MAX_OUTPUT = 16 * 1024  # bytes of printed text that are kept
MAX_REASON = 4096
BEGUN = b"."
_OUT_OF_MEMORY = b'{"error": "memory"}'  # allocated in advance, because there is no memory when it is needed


def main() -> None:
    """Prepare, report readiness, and serve until stdin closes."""
    config = read_frame(0)
    assert config is not None
    try:
        lockdown.first_to_be_killed()
        zygote = Zygote(config, own_processes(config))
    except BaseException as cause:
        write_frame(1, {"error": f"{type(cause).__name__}: {cause}"[:MAX_REASON]})
        return
    write_frame(1, {"layers": zygote.layers})
    error = zygote.compile()
    write_frame(1, {"compile_error": error})
    if error:
        return
    zygote.load()
    write_frame(1, {"ready": True})
    while True:
        zygote.prepare()  # while the service processes the previous answer
        answer = zygote.grade()
        if answer is None:
            return
        write_frame(1, answer)
        if "failed" in answer:
            return
        del answer  # the next fork inherits this process's memory and must not read this answer


def own_processes(config: dict[str, Any]) -> str:
    """Continue as the first process of a new PID namespace. The original process waits outside until it exits.

    Returns:
        "", or the reason why there is no namespace.
    """
    if "pid_namespace" in config["without"]:
        return "turned off"
    if os.geteuid() != 0:
        return "needs root"
    try:
        lockdown.private_processes()
    except OSError as cause:
        return str(cause)
    alive, held = os.pipe()
    zygote = os.fork()
    if zygote == 0:
        os.close(held)
        config.update(parent=0, alive=alive)
        return ""
    try:
        os.dup2(held, 0)
        os.closerange(1, 1 << 16)  # so that the service gets EOF when the zygote closes its pipes
        with suppress(OSError):
            lockdown.become(config["user"])
        lockdown.die_with(config["parent"])
        os.waitpid(zygote, 0)
    finally:
        os._exit(0)  # also ends the zygote if it is still running


class Zygote:
    """One compiled source, in a process with every inheritable layer. Only forks run the source."""

    def __init__(self, config: dict[str, Any], pid_namespace: str) -> None:
        self.config = config
        self.entry = ENTRIES[config["entry"]]
        self.layers = {"pid_namespace": pid_namespace}  # "" if the layer is active, else the reason
        self.scratch = config["scratch"]  # a folder of the host, unless one in memory replaces it
        self.in_memory = False
        self.counts_threads = False
        self.ruleset = -1
        self.ready: ZygoteReady | None = None
        self.code: types.CodeType | None = None
        self.modules: list[str] = config["modules"]
        self._lock_down()
        os.environ.update(config["variables"], HOME=self.scratch, TMPDIR=self.scratch)
        self.filter = self._filter()

    def compile(self) -> str:
        """Compile the source in a fork with limits. Returns the error, or "" if the source is a valid grader.

        Raises:
            OSError: The system killed the fork, so the source was not checked.
        """
        result, write = os.pipe()
        child = os.fork()
        if child == 0:
            self._compile(write)
        os.close(write)
        answer = bytearray()
        while data := os.read(result, 1 << 20):
            answer += data
        os.close(result)
        _, status, used = os.wait4(child, 0)
        if status != 0:
            is_late = used.ru_utime + used.ru_stime > COMPILE_S - 1
            if os.waitstatus_to_exitcode(status) == -signal.SIGKILL and not is_late:
                raise OSError("the system killed it while it compiled the source, most likely for its memory")
            return f"compiling the source took more than {COMPILE_S} s" if is_late else TOO_DEEP
        head, _, marshalled = bytes(answer).partition(b"\n")
        found = json.loads(head)
        if found["error"]:
            return str(found["error"])
        self.code = marshal.loads(marshalled)
        self.modules = [*self.modules, *found["modules"]]
        return ""

    def _compile(self, result: int) -> None:
        """Compile the source and exit. Runs in a fork, whose exit frees the memory."""
        zygote = os.getppid()
        try:
            os.dup2(result, 3)
            null = os.open(os.devnull, os.O_RDONLY)
            for fd in range(3):
                os.dup2(null, fd)
            os.closerange(4, 1 << 16)
            lockdown.die_with(zygote)
            lockdown.low_priority()
            if "rlimits" not in self.config["without"]:
                lockdown.rlimits(COMPILE_MEMORY, COMPILE_S, 0)
            if self.filter:
                lockdown.seccomp(self.filter)
            try:
                done = compiled(self.config["source"], self.entry)
            except ValueError as cause:
                write(3, json.dumps({"error": str(cause)[:MAX_REASON]}).encode())
            else:
                write(3, json.dumps({"error": "", "modules": done.modules}).encode() + b"\n" + done.code)
        except BaseException:
            os._exit(1)
        os._exit(0)

    def load(self) -> None:
        """Import the modules that the source imports, and freeze the memory so that forks can share it."""
        config = self.config
        sys.path[:] = config["path"]
        for name in [name for name in sys.modules if name.partition(".")[0] == "graders"]:
            del sys.modules[name]  # the service's modules stay in use but cannot be imported by name
        _import(self.modules)
        lines = config["source"].splitlines(keepends=True)
        linecache.cache[FILE] = (len(config["source"]), None, lines, FILE)  # source lines of tracebacks
        gc.collect()
        gc.freeze()  # otherwise the first collection in each child would copy every page that it visits

    def prepare(self) -> None:
        """Fork the process of the next grade in advance. It locks itself down and waits for its request."""
        (begun_r, begun_w), (result_r, result_w), (output_r, output_w) = (os.pipe() for _ in range(3))
        child = os.fork()
        if child == 0:
            self._child(begun_w, result_w, output_w)
        for fd in (begun_w, result_w, output_w):
            os.close(fd)
        self.ready = ZygoteReady(child, begun_r, result_r, output_r)

    def grade(self) -> dict[str, Any] | None:
        """Let the waiting child run until its end or a limit. Returns the answer, or None if stdin was closed."""
        assert self.ready is not None
        ready, self.ready = self.ready, None
        begun = os.read(ready.begun, MAX_REASON)
        os.close(ready.begun)
        if begun != BEGUN:  # the child exited before the grader's code ran
            code = os.waitstatus_to_exitcode(os.waitpid(ready.child, 0)[1])
            if begun or code != 0:
                return {"failed": begun.decode() or f"the process for the grade ended with status {code}"}
            return None
        watch = Watch(ready.child, ready.result, ready.output, self.config)
        if not self.in_memory:
            watch.scratch = self.scratch
        if self.counts_threads:
            watch.threads = self.config["threads"]
        answer = watch.until_it_ends()
        answer["retire"] = not self._swept()
        return answer

    def _child(self, begun: int, result: int, output: int) -> None:
        self._hold(begun, result, output)
        body = _request(0)
        os.dup2(5, 0)
        os.write(4, BEGUN)
        os.close(4)  # the grader's code can report to the zygote only by its exit and on descriptor 3
        os.close(5)
        try:
            if body is None:
                raise MemoryError
            answer = self._run(json.loads(body))
        except MemoryError:
            answer = _OUT_OF_MEMORY
        except BaseException as cause:
            answer = _described(cause, self.config["scratch_bytes"])
        with suppress(BaseException):
            sys.stdout.flush()
        with suppress(BaseException):
            write(3, answer)
        os._exit(0)

    def _hold(self, begun: int, result: int, output: int) -> None:
        """Apply the layers of a single grade. Exits if a layer fails.

        Afterwards the file descriptors are: 0 requests, 1 and 2 output, 3 result, 4 `begun`, 5 /dev/null.
        """
        zygote = os.getppid()
        # The grader may block or handle signals, because the zygote sends only SIGKILL.
        null = os.open(os.devnull, os.O_RDONLY)
        # Duplicate to 10 or above first, because a descriptor may already have one of the target numbers.
        wanted = (output, output, result, begun, null, self.ruleset)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in wanted if fd >= 0]
        for number, fd in enumerate(moved, 1):
            os.dup2(fd, number)
        os.closerange(7, 1 << 16)
        config = self.config
        os.chdir(self.scratch)
        # A mount limits a folder in memory. In a folder of the host, a file must not outgrow the limit between scans.
        largest = (
            max(config["file_bytes"], config["scratch_bytes"]) if self.in_memory else config["file_bytes"]
        )
        threads = None if self.counts_threads else config["threads"]
        try:
            lockdown.die_with(zygote)
            lockdown.low_priority()
            if self.ruleset >= 0:
                lockdown.restrict(6)
            if "rlimits" not in config["without"]:
                lockdown.rlimits(config["memory"], _cpu_limit(config["wall_s"]), largest, threads)
            os.closerange(6, 7)
            if self.filter:
                lockdown.seccomp(self.filter)
        except (OSError, ValueError) as cause:
            if not config["insecure"]:
                os.write(4, f"a layer failed: {cause}".encode()[:MAX_REASON])
                os._exit(0)

    def _run(self, request: dict[str, Any]) -> bytes:
        assert self.code is not None
        # New streams, because those from before the fork have cached the state of their descriptors.
        stream = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115 - open until exit
        sys.stdout = sys.stderr = stream
        module = types.ModuleType("grader")
        sys.modules["grader"] = module
        # Before the grader can change it.
        length = len(request["sample"].get("output_text", "")) if self.entry is GRADE else 0
        given = [_argument(request, name) for name in self.entry.parameters]
        exec(self.code, module.__dict__)
        value = module.__dict__[self.entry.name](*given)
        return _checked(value, length) if self.entry is GRADE else _checked_call(value)

    def _lock_down(self) -> None:
        """Apply the layers that every fork inherits, and record each. The pool decides whether they are sufficient."""
        config = self.config
        readable, scratch_bytes = config["readable"], config["scratch_bytes"]
        root = os.geteuid() == 0

        def separate() -> None:
            if not root:
                raise OSError("needs root")
            lockdown.private_root(readable, SCRATCH, scratch_bytes, config["user"])
            self.scratch, self.in_memory = SCRATCH, True

        def own_user() -> None:
            if not root:
                raise OSError("not root, so the user stays the service's own")
            if not self.in_memory:
                os.chown(self.scratch, config["user"], config["user"])
            lockdown.become(config["user"])

        self._layer("namespaces", separate)
        self._layer("uid", own_user)
        self._layer("no_new_privs", lockdown.no_new_privs)
        lockdown.undumpable()
        lockdown.die_with(config["parent"])
        if "alive" in config:
            _end_if_closed(config["alive"])  # inside the PID namespace, getppid() is 0 for any parent outside
        # RLIMIT_NPROC counts the threads of all processes of a user, so the service's threads would exhaust it.
        self.counts_threads = bool(self.layers["uid"]) and Path("/proc/self/stat").exists()
        self._layer("landlock", self._see_little)
        self._layer("signal_scope", self._scoped)
        # Each child applies rlimits and seccomp itself, and exits before the grader's code runs if one fails.
        self._layer("rlimits", lambda: None)

    def _see_little(self) -> None:
        config = self.config
        readable, writable = [*config["readable"], self.scratch], [self.scratch]
        scoped = "signal_scope" not in config["without"]
        ruleset = lockdown.ruleset(readable, writable, config["listed"], scoped)
        if not self.counts_threads:
            lockdown.restrict(ruleset)
            os.close(ruleset)
            return
        # The zygote reads /proc to count the threads of a grade. The grade must not read it.
        wider = lockdown.ruleset([*readable, "/proc"], writable, config["listed"], scoped)
        lockdown.restrict(wider)
        os.close(wider)
        self.ruleset = ruleset

    def _scoped(self) -> None:
        if self.layers["landlock"]:
            raise OSError("needs Landlock")
        if (version := lockdown.landlock_version()) < lockdown.SCOPES:
            raise OSError(
                f"Landlock is of version {version}, and scopes signals from {lockdown.SCOPES} (Linux 6.12)"
            )

    def _filter(self) -> bytes:
        program = b""

        def make() -> None:
            nonlocal program
            program = syscalls.grader_filter()
            try_in_a_child(program)

        self._layer("seccomp", make)
        return program if not self.layers["seccomp"] else b""

    def _layer(self, name: str, apply: Callable[[], object]) -> None:
        self.layers[name] = lockdown.applied(apply, name in self.config["without"])

    def _swept(self) -> bool:
        """Empty the scratch folder for the next grade. Returns False if that fails; then do not reuse this zygote."""
        try:
            scratch.empty(self.scratch)
        except OSError:  # the service deletes it after this process has exited
            return False
        return True


class ZygoteReady(NamedTuple):
    """A child that waits for its request, and the zygote's ends of its pipes.

    The child writes BEGUN to `begun` before the grader's code runs, or the reason why a layer failed. The grader's code
    cannot write to it.
    """

    child: int
    begun: int
    result: int
    output: int


class Watch:
    """Reads the output of one child, enforces its limits, and waits for its exit."""

    def __init__(self, child: int, result: int, output: int, config: dict[str, Any]) -> None:
        self.child, self.output_limit = child, config["output"]
        self.result_limit = ENTRIES[config["entry"]].result_bytes
        self.deadline = time.monotonic() + config["wall_s"]
        self.cpu_limit = _cpu_limit(config["wall_s"])
        self.buffers = {result: bytearray(), output: bytearray()}
        self.result, self.output = result, output
        self.seen = 0
        # Scratch bytes and threads are counted here if the kernel does not limit them for each grade.
        self.scratch, self.scratch_bytes = "", config.get("scratch_bytes", 0)
        self.threads: int | None = None
        self.next_scan = 0.0

    def until_it_ends(self) -> dict[str, Any]:
        ended = os.pidfd_open(self.child)
        poll = select.poll()
        for fd in (self.result, self.output, ended):
            poll.register(fd, select.POLLIN)
        try:
            verdict = self._wait(poll, ended)
            if verdict:
                os.kill(self.child, signal.SIGKILL)
            _, status, used = os.wait4(self.child, 0)
            # No other process has the pipes open, so reading to the end does not block for long.
            for fd in self.buffers:
                while not verdict and self._drain(fd):
                    pass
        finally:
            for fd in (self.result, self.output, ended):
                os.close(fd)
        return {
            "status": verdict or self.why_killed(status, used.ru_utime + used.ru_stime),
            "exit": os.waitstatus_to_exitcode(status),
            "result": self.buffers[self.result].decode("latin-1"),
            "output": self._printed_output(),
        }

    def _printed_output(self) -> str:
        """Return the printed output. If it was truncated, the last line says so."""
        text = self.buffers[self.output].decode("utf-8", "replace")
        if self.seen <= MAX_OUTPUT:
            return text
        return f"{text}\n... cut: the first {MAX_OUTPUT:,} of {self.seen:,} bytes are shown"

    def _wait(self, poll: select.poll, ended: int) -> str:
        """Wait for the child. Returns the limit for which it must be killed, or "" if it exited."""
        often = THREADS_S if self.threads is not None else SCRATCH_S if self.scratch else math.inf
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            for fd, _ in poll.poll(min(left, often) * 1000 + 1):
                if fd == ended:
                    return ""
                if not self._drain(fd):
                    poll.unregister(fd)
            if self.seen > self.output_limit or len(self.buffers[self.result]) > self.result_limit:
                return "output_limit"
            if self.threads is not None and threads_of(self.child) > self.threads:
                return "thread_limit"
            if self._is_over():
                return "scratch_limit"

    def _is_over(self) -> bool:
        now = time.monotonic()
        if not self.scratch or now < self.next_scan:
            return False
        self.next_scan = now + SCRATCH_S
        return scratch.is_over(self.scratch, self.scratch_bytes)

    def why_killed(self, status: int, cpu_s: float) -> str:
        code = os.waitstatus_to_exitcode(status)
        if code in (
            -signal.SIGKILL,
            -signal.SIGXCPU,
        ):  # sent by the kernel: a verdict precedes the zygote's own SIGKILL
            return "cpu_limit" if cpu_s > self.cpu_limit - 1 else "memory"
        return "ended" if code == 0 else "crash"

    def _drain(self, fd: int) -> bool:
        data = os.read(fd, 65536)
        if fd == self.output:
            self.seen += len(data)
        room = (self.result_limit + 1 if fd == self.result else MAX_OUTPUT) - len(self.buffers[fd])
        self.buffers[fd] += data[: max(room, 0)]
        return bool(data) and self.seen <= 2 * self.output_limit


def _end_if_closed(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0):
        os._exit(0)
    os.close(fd)


def threads_of(process: int) -> int:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0  # the process has exited
    return int(stat.rpartition(")")[2].split()[17])


def _cpu_limit(wall_s: float) -> int:
    return 2 * int(wall_s + 1)  # seconds on two cores; the wall-clock limit is the main one


def _checked(value: Any, length: int) -> bytes:
    """Encode the return value of grade() as JSON, or an error if it is invalid. Calls no method of untrusted values."""
    if type(value) is not dict:
        return _scored(value, {})
    if not _has_plain_keys(value) or set(value) != {"score", "steps"}:
        return _error("value", "a dict from grade() must have 'score' and 'steps', and nothing else")
    steps = value["steps"]
    if type(steps) is list:
        steps = [
            _plain_step(step) for step in steps[: MAX_STEPS + 1]
        ]  # one more than the maximum is enough to be rejected
    try:
        kept = steps_of(steps, length)
    except ValueError as cause:
        return _error("value", f"grade() returned bad steps: {cause}")
    return _scored(value["score"], {"steps": [{"end": step.end, "score": step.score} for step in kept]})


def _argument(request: dict[str, Any], name: str) -> Any:
    """An argument of the function. The texts of a tool are parsed here, where parsing them can do no harm."""
    value = request[name]
    return json.loads(value) if name in ("arguments", "state") else value


def _checked_call(value: Any) -> bytes:
    """Encode the return value of call() as JSON, or an error if it is invalid. The state is a text of JSON in it."""
    if type(value) is not tuple or len(value) != 2:
        return _error("value", "call() must return a tuple: the output, and the state of the episode")
    output, state = value
    try:
        text = output if type(output) is str else json.dumps(output, allow_nan=False, ensure_ascii=False)
        kept = json.dumps(state, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as cause:
        return _error("value", f"the output and the state of call() must be JSON: {cause}")
    return json.dumps({"output": text, "state": kept}).encode()


def _has_plain_keys(value: dict[Any, Any]) -> bool:
    return all(type(key) is str for key in value)  # keys of other types may define __eq__


def _plain_step(step: Any) -> Any:
    if type(step) is not dict or not _has_plain_keys(step):
        return None
    return {key: _plain(value) for key, value in step.items()}


def _plain(value: Any) -> Any:
    """Convert a numpy scalar or a bool to a Python number."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    return float(value) if type(value) is bool else value


def _scored(value: Any, rest: dict[str, Any]) -> bytes:
    value = _plain(value)
    if type(value) not in (int, float):
        return _error("value", f"grade() must return a number, not {type(value).__name__[:100]}")
    try:
        score = float(value)
    except OverflowError:
        return _error("value", f"grade() returned an integer above {MAX_SCORE:g}, the largest score")
    if score - score != 0:  # NaN and the infinities
        return _error("value", f"grade() must return a finite number, not {score}")
    if not is_score(score):
        return _error("value", f"grade() {too_large(score)}")
    return json.dumps({"score": score, **rest}).encode()


def _described(cause: BaseException, scratch_bytes: int) -> bytes:
    """Format the traceback, starting at the first frame of the grader's source and truncated."""
    frames = cause.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != FILE:
        frames = frames.tb_next
    try:
        lines = traceback.format_exception(type(cause), cause, frames, limit=-10)
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EFBIG):
            lines.append(f"A grade may write {scratch_bytes >> 20} MiB in {scratch.MAX_ENTRIES} files.\n")
        return _error("user", "".join(lines))
    except MemoryError:
        return _OUT_OF_MEMORY
    except BaseException:
        return _error("user", "the exception could not be shown")


def _error(kind: str, text: str) -> bytes:
    if len(text) > MAX_REASON:
        text = f"{text[: MAX_REASON // 2]} ... {text[-MAX_REASON // 2 :]}"
    return json.dumps({"error": kind, "text": text}).encode()


def try_in_a_child(program: bytes) -> None:
    """Load the filter in a fork and check that it blocks a call. Raises OSError if either fails."""
    child = os.fork()
    if child == 0:
        try:
            lockdown.seccomp(program)
            os.kill(os.getpid(), 0)
        except PermissionError as denied:
            os._exit(0 if denied.filename is None else 2)
        except BaseException:
            os._exit(1)
        os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0:
        raise OSError("the kernel refused the filter" if code == 1 else "the filter does not bite")


def _import(modules: list[str]) -> None:
    for name in modules:
        # Ignore import errors here: the grade that imports the module reports them.
        with suppress(Exception, SystemExit):
            importlib.import_module(name)


def read_frame(fd: int) -> dict[str, Any] | None:
    """Read the next frame. Returns None if the other side has closed the pipe."""
    body = read_body(fd)
    return None if body is None else json.loads(body)


def read_body(fd: int) -> bytes | None:
    header = _read_exactly(fd, 4)
    return None if header is None else _read_exactly(fd, struct.unpack("!I", header)[0])


def write_frame(fd: int, value: dict[str, Any]) -> None:
    write_body(fd, json.dumps(value).encode())


def write_body(fd: int, body: bytes) -> None:
    write(fd, struct.pack("!I", len(body)) + body)


def write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _request(fd: int) -> bytearray | None:
    """Read the body of the next frame. Returns None if it does not fit in memory. Exits if the pipe is closed."""
    header = _read_exactly(fd, 4)
    if header is None:
        os._exit(0)
    size = struct.unpack("!I", header)[0]
    body = None
    with suppress(MemoryError):
        body = bytearray(size)
    left, chunk = size, memoryview(bytearray(1 << 16))
    while left:
        into = chunk[:left] if body is None else memoryview(body)[size - left :]
        if not (count := os.readv(fd, [into])):
            os._exit(0)
        left -= count
    return body


def _read_exactly(fd: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        more = os.read(fd, min(count - len(data), 1 << 20))
        if not more:
            return None
        data += more
    return bytes(data)
