"""The service's side of the sandbox: keeps zygotes warm, runs at most one grade per core, and validates results."""

from __future__ import annotations

import atexit
import errno
import hashlib
import itertools
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from struct import pack, unpack
from typing import Any, Literal, TypeVar

from graders.environments.catalog import Environment, EnvironmentNotBuilt, bare, default_folder, find
from graders.sandbox import cgroup, folders, scratch, sizes, users
from graders.sandbox.entries import CALL, GRADE, SandboxEntry
from graders.sandbox.lockdown import NOBODY
from graders.sandbox.turns import Turns
from graders.types import StepScore, is_score, steps_of

# Modules that a zygote imports before the first grade, in addition to the packages in source.INSTALLED that the source
# imports. A grade imports all others itself.
STANDARD = (
    "collections", "dataclasses", "datetime", "decimal", "difflib", "fractions", "functools", "itertools",
    "json", "math", "random", "re", "statistics", "string", "textwrap", "typing", "unicodedata",
)  # fmt: skip
# One thread each: more would not be faster on one core, and forks do not inherit the zygote's threads.
VARIABLES = dict.fromkeys(
    (
        "OPENBLAS_NUM_THREADS",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "RAYON_NUM_THREADS",
    ),
    "1",
)
REQUIRED = ("no_new_privs", "seccomp", "rlimits")
INSECURE = "REGRAFT_PYTHON_GRADERS"

_BOOT_S, _GRACE_S = 60.0, 5.0
_FORKS = 5000
_MAX_ANSWER = 1 << 20  # without the result

_MAX_KNOWN = 1024
IDLE_S = 600.0

Kind = Literal[
    "ok",
    "user_error",
    "timeout",
    "memory",
    "crash",
    "output_limit",
    "scratch_limit",
    "thread_limit",
    "bad_result",
]
T = TypeVar("T")


class SandboxUnavailable(RuntimeError):
    """This host cannot isolate untrusted code. The message names what is missing."""


class SandboxFailed(RuntimeError):
    """The sandbox itself failed during a grade, so the sample is ungraded."""


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one grade.

    With a private root, the scratch folder is a mount in memory that limits its size. Otherwise it is a folder of the
    host: the zygote measures it during the grade, and `file_bytes` limits each file.
    """

    wall_s: float = 120.0
    memory: int = 2 << 30  # bytes of address space, which bounds the host memory that a grade can take
    file_bytes: int = 16 << 20
    threads: int = 128
    output: int = 1 << 20  # printed bytes before the grade is killed; the first 16 kB are kept
    scratch_bytes: int = 256 << 20


@dataclass(frozen=True)
class GradeOutcome:
    """The outcome of one grade. If `kind` is "ok", `score` passes `is_score`, else it is None and `reason` says why."""

    kind: Kind
    score: float | None = None
    reason: str = ""
    output: str = ""
    steps: tuple[StepScore, ...] = ()


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of one call of a tool. Unless `kind` is "ok", `reason` says why there is no output."""

    kind: Kind
    output: str = ""
    state: str = "null"  # JSON; the tool may have forged it, so only the sandbox parses it
    reason: str = ""


class ZygoteProcess:
    """A process that runs the grades of one source. Not thread-safe, except for `kill`."""

    def __init__(
        self,
        source: str,
        limits: SandboxLimits,
        environment: Environment,
        insecure: bool = False,
        without: Iterable[str] = (),
        folder: str | None = None,
        user: int = NOBODY,
        entry: SandboxEntry = GRADE,
    ) -> None:
        """Start the process.

        Args:
            entry: The function of the source that is called.
            folder: Parent of the scratch folder.
            user: User id of the process, if the service runs as root.
        """
        if sys.platform != "linux":
            raise SandboxUnavailable("Python graders need Linux: seccomp and Landlock are missing here.")
        self.limits, self.insecure, self.user, self.entry = limits, insecure, user, entry
        self.served, self.retired = 0, False
        self.layers: dict[str, str] = {}
        self._compile_error: str | None = None
        try:
            self.scratch = folders.make(folder)
        except OSError as cause:
            raise SandboxUnavailable(f"Python graders need a writable temporary folder: {cause}") from cause
        visible = visible_to(environment)
        self._config = {
            "source": source,
            "entry": entry.name,
            "parent": os.getpid(),
            "readable": visible.readable,
            "listed": visible.listed,
            "path": visible.path,
            "modules": STANDARD,
            "variables": VARIABLES | ({"NLTK_DATA": environment.corpora} if environment.corpora else {}),
            "scratch": self.scratch,
            "user": user,
            "insecure": insecure,
            "without": list(without),
            **asdict(limits),
        }
        self.process = start_zygote(environment, "graders.sandbox.zygote")
        # Join before the process forks, so that its children are in the group as well.
        self._no_cgroup = (
            "turned off" if "cgroup" in self._config["without"] else cgroup.join(self.process.pid)
        )

    def boot(self) -> None:
        """Wait until the process has locked itself down. Later calls return immediately.

        Raises:
            SandboxUnavailable: A required layer is missing.
            SandboxFailed: The process did not start.
        """
        if self.layers:
            return
        answer = self._ask(self._config, _BOOT_S)
        if "layers" not in answer:
            self.close()
            raise SandboxFailed(f"the sandbox did not start: {answer.get('error')}")
        self.layers = answer["layers"] | {"cgroup": self._no_cgroup}
        if not self.layers["namespaces"]:
            scratch.remove(self.scratch)  # replaced by a folder in memory
        if not self.insecure:
            self._refuse_if_thin()

    def compile(self) -> str:
        """Boot and wait for the compiler, once. Returns the compile error, or "" if the source is valid."""
        self.boot()
        if self._compile_error is None:
            self._compile_error = str(self._answer(_BOOT_S).get("compile_error"))
            if self._compile_error:
                self.close()
            else:
                self._answer(_BOOT_S)  # the process has imported the source's modules
        return self._compile_error

    def grade(self, sample: Mapping[str, Any], item: Mapping[str, Any]) -> GradeOutcome:
        """Run the source once. Raises SandboxFailed, after which this zygote cannot be used."""
        if error := self.compile():
            return GradeOutcome("user_error", reason=error)
        length = len(sample.get("output_text", ""))
        return self._run(
            {"sample": sample, "item": item}, partial(_outcome, limits=self.limits, length=length)
        )

    def call(self, arguments: str, item: Mapping[str, Any], state: str) -> CallOutcome:
        """Call the tool once. Raises SandboxFailed, after which this zygote cannot be used.

        Args:
            arguments: A JSON object.
            state: JSON.
        """
        if error := self.compile():
            return CallOutcome("user_error", reason=error)
        frame = {"arguments": arguments, "item": item, "state": state}
        return self._run(frame, partial(_call_outcome, limits=self.limits))

    def _run(self, frame: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
        """Run the source once. `read` reads the zygote's answer."""
        answer = self._ask(frame, self.limits.wall_s + _GRACE_S)
        self.served += 1
        self.retired = self.retired or bool(answer.get("retire")) or self.served >= _FORKS
        if "failed" in answer:
            self.close()
            raise SandboxFailed(str(answer["failed"]))
        try:
            return read(answer)
        except (KeyError, TypeError, ValueError) as cause:
            self.close()
            raise SandboxFailed(f"the sandbox gave no sensible answer: {cause!r}") from cause

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill the process from another thread; a waiting caller gets SandboxFailed."""
        self.retired = True
        with suppress(OSError):
            self.process.kill()  # its child is killed as well (PR_SET_PDEATHSIG)

    def close(self) -> None:
        """Terminate the process and its running grade, if any. Idempotent."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        scratch.remove(self.scratch)

    def _refuse_if_thin(self) -> None:
        missing = missing_layers(self.layers)
        if missing:
            self.close()
            raise SandboxUnavailable(f"Python graders cannot run safely here: {'; '.join(missing)}.")

    def _ask(self, frame: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
        # default=dict: a row may be any Mapping, and the encoder knows only dict.
        body = json.dumps(frame, default=dict).encode()
        deadline = time.monotonic() + wait_s
        try:
            self._send(memoryview(pack("!I", len(body)) + body), deadline)
        except (OSError, SandboxFailed) as cause:
            self.close()
            raise SandboxFailed(f"the sandbox ended or hung: {cause}") from cause
        return self._answer(deadline - time.monotonic())

    def _answer(self, wait_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + wait_s
        try:
            size = unpack("!I", self._receive(4, deadline))[0]
            # A result is a text in JSON, which writes one of its characters as up to six bytes.
            if size > _MAX_ANSWER + 6 * self.entry.result_bytes:
                raise SandboxFailed("the sandbox answered with too much")
            answer = json.loads(self._receive(size, deadline))
            if not isinstance(answer, dict):
                raise SandboxFailed("the sandbox gave no sensible answer")
            return answer
        except (OSError, ValueError, SandboxFailed) as cause:
            self.close()
            raise SandboxFailed(f"the sandbox ended or hung: {cause}") from cause

    def _send(self, left: memoryview, deadline: float) -> None:
        assert self.process.stdin is not None
        fd = self.process.stdin.fileno()
        while left:
            _wait(fd, select.POLLOUT, deadline)
            left = left[os.write(fd, left[:4096]) :]  # a writable pipe accepts a page without blocking

    def _receive(self, count: int, deadline: float) -> bytes:
        assert self.process.stdout is not None
        fd, data = self.process.stdout.fileno(), bytearray()
        while len(data) < count:
            _wait(fd, select.POLLIN, deadline)
            more = os.read(fd, count - len(data))
            if not more:
                raise SandboxFailed("it closed its end")
            data += more
        return bytes(data)


@dataclass(frozen=True)
class Load:
    """The load of a pool: the number of concurrent grades, of running and queued grades, and of processes."""

    slots: int
    grades: int
    processes: int


class PoolCall(Future[T]):
    """The future result of a call to a process of the pool. Cancelling a running call kills its process."""

    def __init__(
        self,
        source: str,
        environment: Environment | None,
        owner: str,
        work: Callable[[ZygoteProcess], T],
        entry: SandboxEntry = GRADE,
    ) -> None:
        super().__init__()
        self.entry = entry
        self.source, self.environment, self.owner, self.work = source, environment, owner, work
        self.began: Future[None] = Future()  # has its result once the call runs
        self.began.set_running_or_notify_cancel()  # it cannot be cancelled
        self._abandoned = False
        self._zygote: ZygoteProcess | None = None
        self._with_zygote = threading.Lock()

    def cancel(self) -> bool:
        """Cancel the call, also while it runs. Returns True if the call has no result and will not have one."""
        if super().cancel():
            return True
        with self._with_zygote:
            self._abandoned = not self.done()
            if self._abandoned and self._zygote is not None:
                self._zygote.kill()
            return self._abandoned

    def forget_its_input(self) -> None:
        """Free the input of a finished call, which may stay in its owner's queue for a while."""

        def nothing(zygote: ZygoteProcess) -> T:
            raise AssertionError("a call that is done is not made")

        self.source, self.work = "", nothing

    @contextmanager
    def uses(self, zygote: ZygoteProcess) -> Iterator[None]:
        """Kill this process if the call is cancelled while the block runs."""
        with self._with_zygote:
            if self._abandoned:
                raise SandboxFailed("the grade was cancelled")
            self._zygote = zygote
        try:
            yield
        finally:
            with self._with_zygote:
                self._zygote = None


@dataclass(frozen=True)
class _Idle:
    key: str
    zygote: ZygoteProcess
    since: float


class Pool:
    """Runs the grades of any number of sources, at most one per core, and schedules their owners fairly.

    No owner may use all slots, so that its slow grades do not delay another owner's. If several owners use all slots,
    a grade waits for at most `wall_s`, plus `wall_s` for each owner before it. The owner "" may use all slots, because
    a process that uses it has no other owner.

    Processes are not shared between owners. Idle ones stay warm for `idle_s`; if there are too many, the longest idle
    is evicted. Defaults of `limits` and `size` are in graders.sandbox.sizes.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        size: int | None = None,
        insecure: bool = False,
        without: Iterable[str] = (),
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        here = sizes.sizes_of_this_machine()
        self.limits = limits or SandboxLimits(memory=here.memory, scratch_bytes=here.scratch_bytes)
        self.insecure, self.without = insecure, tuple(without)
        self.size = size or here.slots
        self.idle_s, self.clock = idle_s, clock
        # These threads also start the zygotes, because a zygote dies with the thread that started it, and the threads
        # of a web server are short-lived.
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="sandbox")
        self._turns: Turns[Callable[[], None]] = Turns(most=max(1, self.size - 1))
        self._waiting: set[Future[Any]] = set()
        self._idle: list[_Idle] = []  # longest idle first
        self._all: set[ZygoteProcess] = set()
        self._known: OrderedDict[str, str] = OrderedDict()  # compile errors by key; "" if there is none
        self._folder: folders.Folder | None = None
        self._users = itertools.cycle(users.available())
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._under_way = 0
        self._closed = False

    def submit(
        self,
        source: str,
        sample: Mapping[str, Any],
        item: Mapping[str, Any],
        environment: Environment | None = None,
        owner: str = "",
    ) -> PoolCall[GradeOutcome]:
        """Queue a grade and return its future, which raises SandboxUnavailable or SandboxFailed.

        An error of the grader is an Outcome and not an exception. Cancelling the future also stops a running grade.

        Args:
            environment: Default: the default one in the default folder.
            owner: The project. Owners do not share processes, and share the cores fairly.
        """

        def grade(zygote: ZygoteProcess) -> GradeOutcome:
            return zygote.grade(sample, item)

        call = PoolCall(source, environment, owner, grade)
        if error := self._known_error(_key(source, environment, owner)):
            call.set_result(GradeOutcome("user_error", reason=error))
            return call
        return self._submit(call)

    def call(
        self,
        source: str,
        arguments: str,
        item: Mapping[str, Any],
        state: str,
        environment: Environment | None = None,
        owner: str = "",
    ) -> PoolCall[CallOutcome]:
        """Queue a call of a tool, as `submit` queues a grade."""

        def work(zygote: ZygoteProcess) -> CallOutcome:
            return zygote.call(arguments, item, state)

        return self._submit(PoolCall(source, environment, owner, work, CALL))

    def compile_error(
        self,
        source: str,
        environment: Environment | None = None,
        owner: str = "",
        entry: SandboxEntry = GRADE,
    ) -> Future[str]:
        """Queue a compilation and return a future of the error, or of "" if the source is valid.

        The future raises the same exceptions as that of `submit`, and can be cancelled in the same way.
        """
        known = self._known_error(_key(source, environment, owner, entry))
        if known is not None:
            answer: Future[str] = Future()
            answer.set_result(known)
            return answer
        return self._submit(PoolCall(source, environment, owner, ZygoteProcess.compile, entry))

    def _known_error(self, key: str) -> str | None:
        with self._lock:
            return self._known.get(key)

    @property
    def zygotes(self) -> list[ZygoteProcess]:
        """All running processes."""
        with self._lock:
            return list(self._all)

    @property
    def idle(self) -> list[ZygoteProcess]:
        """The processes that wait for a grade, longest idle first."""
        with self._lock:
            return [idle.zygote for idle in self._idle]

    def load(self) -> Load:
        """Return the current load."""
        with self._lock:
            return Load(self.size, self._under_way, len(self._all))

    def layers(self) -> dict[str, str]:
        """Start one zygote and return the state of each layer: "" if it is active, else the reason."""
        return self._threads.submit(self._probe).result()

    def expire(self) -> None:
        """Terminate the processes that have been idle for `idle_s`."""
        with self._lock:
            before = self.clock() - self.idle_s
            old = [idle.zygote for idle in self._idle if idle.since <= before]
            self._idle = [idle for idle in self._idle if idle.since > before]
            self._all.difference_update(old)
            self._timer = None
            self._wait_to_expire()
        for zygote in old:
            zygote.close()

    def close(self) -> None:
        """Terminate every process, including those that run a grade. Later calls raise an error."""
        with self._lock:
            self._closed = True
            zygotes, self._idle = list(self._all), []
            waiting = list(self._waiting)
            if self._timer is not None:
                self._timer.cancel()
        for call in waiting:
            call.cancel()
        for zygote in zygotes:
            zygote.kill()
        self._threads.shutdown(cancel_futures=True)
        for zygote in zygotes:
            zygote.close()
        self._all.clear()
        if self._folder is not None:
            self._folder.remove()

    def _submit(self, call: PoolCall[T]) -> PoolCall[T]:
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._turns.put(call.owner, lambda: self._run(call))
            self._under_way += 1
            self._waiting.add(call)
        call.add_done_callback(self._done)
        call.add_done_callback(lambda _: call.forget_its_input())
        self._threads.submit(self._next)
        return call

    def _done(self, call: Future[Any]) -> None:
        with self._lock:
            self._under_way -= 1
            self._waiting.discard(call)

    def _next(self) -> None:
        """Run queued calls in fair order until none may run. Each submitted call schedules this once."""
        while True:
            with self._lock:
                turn = self._turns.take()
            if turn is None:
                return
            owner, run = turn
            try:
                run()
            finally:
                with self._lock:
                    self._turns.end(owner)

    def _run(self, call: PoolCall[T]) -> None:
        if not call.set_running_or_notify_cancel():
            return
        call.began.set_result(None)
        with self._lock:
            self._waiting.discard(call)
        try:
            result = self._worked(call)
        except BaseException as cause:
            call.set_exception(cause)
        else:
            call.set_result(result)

    def _worked(self, call: PoolCall[T]) -> T:
        environment = call.environment
        if environment is None:
            try:
                environment = find(default_folder())
            except EnvironmentNotBuilt as cause:
                raise SandboxUnavailable(str(cause)) from cause
        key = _key(call.source, call.environment, call.owner, call.entry)
        zygote = self._take(key) or self._start(call.source, environment, call.entry)
        try:
            with call.uses(zygote):
                self._note(key, zygote.compile())
                return call.work(zygote)
        finally:
            self._give(key, zygote)

    def _note(self, key: str, compile_error: str) -> None:
        with self._lock:
            self._known[key] = compile_error
            self._known.move_to_end(key)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def _take(self, key: str) -> ZygoteProcess | None:
        dead = []
        try:
            with self._lock:
                for index in reversed(range(len(self._idle))):
                    if self._idle[index].key == key:
                        zygote = self._idle.pop(index).zygote
                        if zygote.lives:
                            return zygote
                        dead.append(zygote)
                        self._all.discard(zygote)
            return None
        finally:
            for zygote in dead:
                zygote.close()

    def _give(self, key: str, zygote: ZygoteProcess) -> None:
        with self._lock:
            spent = [zygote] if zygote.retired or self._closed else []
            if not spent:
                self._idle.append(_Idle(key, zygote, self.clock()))
                if len(self._idle) > 2 * self.size:
                    spent = [self._idle.pop(0).zygote]
                self._wait_to_expire()
            self._all.difference_update(spent)
        for old in spent:
            old.close()

    def _wait_to_expire(self) -> None:
        """Start a timer that calls `expire` when the longest idle process is due. The caller holds the lock."""
        if self._timer is not None or not self._idle or self._closed:
            return
        left = self._idle[0].since + self.idle_s - self.clock()
        timer = threading.Timer(max(left, 1.0), self.expire)
        timer.daemon = True
        with suppress(RuntimeError):  # the system has no other thread now; the next idle process tries again
            timer.start()
            self._timer = timer

    def _start(self, source: str, environment: Environment, entry: SandboxEntry) -> ZygoteProcess:
        zygote = self._launched(source, environment, self.insecure, entry)
        with self._lock:
            if not self._closed:
                self._all.add(zygote)
                return zygote
        zygote.close()
        raise SandboxFailed("the pool is closed")

    def _launched(
        self, source: str, environment: Environment, insecure: bool, entry: SandboxEntry = GRADE
    ) -> ZygoteProcess:
        with self._lock:
            try:
                self._folder = self._folder or folders.Folder.claim()
            except OSError as cause:
                raise SandboxUnavailable(
                    f"Python graders need a writable temporary folder: {cause}"
                ) from cause
            taken = {zygote.user for zygote in self._all}
            candidates = itertools.islice(self._users, len(taken) + 1)
            user = next((user for user in candidates if user not in taken), NOBODY)
        return ZygoteProcess(
            source, self.limits, environment, insecure, self.without, self._folder.path, user, entry
        )

    def _probe(self) -> dict[str, str]:
        zygote = self._launched("", bare(), insecure=True)
        try:
            zygote.boot()
        finally:
            zygote.close()
        return zygote.layers


def _key(source: str, environment: Environment | None, owner: str, entry: SandboxEntry = GRADE) -> str:
    return hashlib.sha256(json.dumps([owner, str(environment), source, entry.name]).encode()).hexdigest()


@lru_cache(maxsize=1)
def shared() -> Pool:
    """Return the pool of this process. REGRAFT_PYTHON_GRADERS=insecure lets graders run with missing layers."""
    pool = Pool(insecure=os.environ.get(INSECURE) == "insecure")
    atexit.register(pool.close)
    return pool


class SandboxBusy(BlockingIOError):
    """The machine lacked what a layer of the sandbox needs when it was probed."""


class LayersProbe:
    """The state of each layer on this host: "" if it is active, else the reason. Kept, unless a reason is momentary."""

    def __init__(self, layers: Callable[[], dict[str, str]]) -> None:
        """`layers` starts a process to find them."""
        self._layers = layers
        self._lock = threading.Lock()
        self._states: dict[str, str] | None = None

    def __call__(self) -> dict[str, str]:
        with self._lock:
            if self._states is not None:
                return self._states
            found = self._layers()
            if not any(map(_is_momentary, found.values())):
                self._states = found
            return found

    def refusal(self) -> str:
        """Return which required layers are missing, or "".

        Raises:
            SandboxBusy: they are for a moment only.
        """
        layers = self()
        why = "; ".join(missing_layers(layers))
        if why and any(map(_is_momentary, layers.values())):
            raise SandboxBusy(
                errno.EAGAIN, f"the sandbox of python graders cannot be set up at the moment: {why}"
            )
        return why


# Not ENOSPC, which is what a host without user namespaces says.
_MOMENTARY = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_ERROR_NUMBER = re.compile(r"\[Errno (\d+)\]")


def _is_momentary(reason: str) -> bool:
    number = _ERROR_NUMBER.match(reason)
    return number is not None and int(number[1]) in _MOMENTARY


probe = LayersProbe(lambda: shared().layers())


def described() -> str:
    """Return one line for the log: the active and missing layers, or why python graders are disabled."""
    try:
        unsafe = refusal()
    except SandboxBusy as busy:
        unsafe = str(busy)
    if unsafe:
        return f"python graders are refused: {unsafe}"
    layers = probe()
    holds = ", ".join(name for name, missing in layers.items() if not missing) or "nothing"
    lacks = "; ".join(f"{name} ({missing})" for name, missing in layers.items() if missing)
    how = f"python graders run behind {holds}" + (f"; without {lacks}" if lacks else "")
    return how + (" (declared insecure)" if shared().insecure else "")


def not_built(environments: Path | None) -> str:
    """Return a message for the operator if the default environment in this folder is not built, else ""."""
    try:
        find(environments or default_folder())
    except EnvironmentNotBuilt as missing:
        return f"{missing} Until then jobs and requests with python graders wait or are refused."
    return ""


def refusal() -> str:
    """Return the reason why this process must not run python graders, or "" if it may.

    Raises:
        SandboxBusy: it is not known now.
    """
    return "" if shared().insecure else probe.refusal()


def missing_layers(layers: Mapping[str, str]) -> list[str]:
    """Return an error message for each required layer that is missing."""
    missing = [f"{name} is missing ({layers[name]})" for name in REQUIRED if layers[name]]
    # A separate user protects the service from a grader, but not the scratch folders of other graders.
    if layers["landlock"] and layers["namespaces"]:
        missing.append(
            f"both landlock ({layers['landlock']}) and namespaces ({layers['namespaces']}) are missing"
        )
    elif layers["landlock"] and layers["uid"]:
        missing.append(
            f"both landlock ({layers['landlock']}) and a user of its own ({layers['uid']}) are missing"
        )
    return missing


def _outcome(answer: Mapping[str, Any], limits: SandboxLimits, length: int) -> GradeOutcome:
    output = str(answer["output"])
    if (stopped := _stopped(answer, limits, "grade")) is not None:
        return GradeOutcome(stopped[0], reason=stopped[1], output=output)
    return _result(answer["result"], output, length)


def _call_outcome(answer: Mapping[str, Any], limits: SandboxLimits) -> CallOutcome:
    if (stopped := _stopped(answer, limits, "output")) is not None:
        return CallOutcome(stopped[0], reason=stopped[1])
    return call_result(answer["result"])


def _stopped(answer: Mapping[str, Any], limits: SandboxLimits, what: str) -> tuple[Kind, str] | None:
    """The limit that stopped a process, and its reason; None: it has ended by itself. `what` it had to give."""
    match answer["status"]:
        case "timeout":
            return "timeout", f"no {what} within {limits.wall_s:g} s"
        case "output_limit":
            return "output_limit", "it wrote too much output"
        case "scratch_limit":
            most = f"{limits.scratch_bytes >> 20} MiB in {scratch.MAX_ENTRIES} files"
            return "scratch_limit", f"it wrote more than {most}"
        case "thread_limit":
            return "thread_limit", f"it started more than {limits.threads} threads"
        case "cpu_limit":
            return "timeout", "it used too much processor time"
        case "memory":
            return "memory", "killed by the system, most likely for its memory"
        case "crash":
            return "crash", _exit(int(answer["exit"]))
        case "ended":
            return None
    raise ValueError(f"unknown status {answer['status']!r}")


def call_result(text: str) -> CallOutcome:
    """Parse the result of a tool, which is as untrusted as that of a grader.

    It may have 14 MiB, which as lists of lists would take hundreds of MiB, so its two texts are all that is read of it.
    """
    if not text:
        return CallOutcome("crash", reason="it ended without an output")
    if (texts := _two_texts(text)) is not None:
        return CallOutcome("ok", *texts)
    if len(text) <= GRADE.result_bytes and (failed := _failed(_parsed(text))) is not None:
        return CallOutcome(failed[0], reason=failed[1])
    return CallOutcome("bad_result", reason="its result is not one that call() can give")


_JSON = json.JSONDecoder()


def _two_texts(text: str) -> tuple[str, str] | None:
    """The output and the state in a result, as the sandbox writes them; None: it is another JSON."""
    texts: list[str] = []
    end = 0
    for head in ('{"output": ', ', "state": '):
        if not text.startswith(head + '"', end):
            return None
        try:
            value, end = _JSON.raw_decode(text, end + len(head))  # a text, since it begins as one
        except ValueError:
            return None
        texts.append(value)
    return (texts[0], texts[1]) if text[end:] == "}" else None


def _result(text: str, output: str, length: int) -> GradeOutcome:
    """Parse the child's result, which is untrusted input because the grader can forge it.

    `length` is the length of the sample's text, which bounds the ends of the steps.
    """
    if not text:
        return GradeOutcome("crash", reason="it ended without a grade", output=output)
    match _parsed(text):
        case {"score": float(score), **rest} if not rest and is_score(score):
            return GradeOutcome("ok", score, output=output)
        case {"score": float(score), "steps": raw, **rest} if not rest and is_score(score):
            with suppress(ValueError):
                return GradeOutcome("ok", score, output=output, steps=steps_of(raw, length))
        case result if (failed := _failed(result)) is not None:
            return GradeOutcome(failed[0], reason=failed[1], output=output)
    return GradeOutcome("bad_result", reason="its result is not one that grade() can give", output=output)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _failed(result: Any) -> tuple[Kind, str] | None:
    """The error in a result; None: there is none."""
    match result:
        case {"error": "memory", **rest} if not rest:
            return "memory", "out of memory"
        case {"error": "value", "text": str(why), **rest} if not rest:
            return "bad_result", why
        case {"error": "user", "text": str(why), **rest} if not rest:
            return "user_error", why
    return None


def _exit(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"it ended with status {code}"


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise SandboxFailed("it did not answer in time")


@dataclass(frozen=True)
class Visible:
    """The files and folders that a grader may read, the folders that it may list, and its sys.path."""

    readable: list[str]
    listed: list[str]
    path: list[str]


def start_zygote(environment: Environment, module: str) -> subprocess.Popen[bytes]:
    """Start the `main` of a module of graders in the environment's interpreter, with pipes for stdin and stdout."""
    # Last on the path, so that other files in this folder cannot shadow the standard library.
    root = str(Path(__file__).parents[2])
    start = f"import sys; sys.path.append({root!r}); from {module} import main; main()"
    # env={}: the process must not inherit the service's secrets, not even at its start.
    return subprocess.Popen(
        [environment.interpreter.program, "-I", "-S", "-B", "-X", "utf8", "-c", start],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        bufsize=0,
    )


@lru_cache(maxsize=8)
def visible_to(environment: Environment) -> Visible:
    """Return the standard library, the environment's packages and data, and C libraries, but no other packages."""
    standard, libraries = environment.interpreter.standard, environment.interpreter.libraries
    # Packages of the interpreter itself are inside the folder of its standard library, or next to it on Debian.
    parts = [
        entry for folder in standard for entry in entries_without(folder, ("site-packages", "dist-packages"))
    ]
    parts += [
        entry
        for folder in ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
        for entry in entries_without(folder, ("python",))
    ]
    own = [folder for folder in (environment.packages, environment.corpora) if folder is not None]
    others = ["/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/null"]
    # Shortest first: a link or folder must exist before its contents are mounted.
    readable = sorted({path for path in (*parts, *libraries, *own, *others) if Path(path).exists()}, key=len)
    path = [*standard, *(f"{folder}/lib-dynload" for folder in standard)]
    return Visible(
        readable, list(standard), path if environment.packages is None else [*path, environment.packages]
    )


def entries_without(folder: str, hidden: tuple[str, ...]) -> list[str]:
    """List a folder without names that start with `hidden`. A link, or a file, is returned unchanged."""
    if Path(folder).is_symlink() or not Path(folder).is_dir():
        return [folder]
    return [str(entry) for entry in Path(folder).iterdir() if not entry.name.startswith(hidden)]
