"""The service's side of the hazard pool: queues calls, sends them in batches, and sets the results of their futures.

Each hazard has one process, started by the first call, and one thread that communicates with it. Callers need no
threads: `submit` returns a future, which a coroutine awaits with `asyncio.wrap_future`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import sysconfig
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from struct import pack, unpack
from typing import Any, Literal

from graders.environments.catalog import bare
from graders.hazards.table import Hazard
from graders.sandbox.pool import VARIABLES, start_zygote, visible_to
from graders.sandbox.sizes import cores

IDLE_S = 1800.0  # an idle process exits after this time, and the next call starts a new one
BOOT_S = 120.0
GRACE_S = 30.0  # added to the wall-clock limit of a call; beyond it the process counts as hung
_ROOT = Path(__file__).parents[2]
_ATTEMPTS = 2  # of a call whose process failed; the call may not be the cause
_CHUNK = 1 << 16

# Limits in characters of JSON arguments: of one call, of an owner's queued calls, and of all queued calls of a hazard.
MAX_CALL, MAX_WAITING_PER_OWNER, MAX_WAITING = 4 << 20, 16 << 20, 64 << 20

# The project on whose behalf the current task submits calls.
OWNER: ContextVar[str] = ContextVar("owner", default="")

Limit = Literal["time", "memory", "crash", "size"]


class LimitExceeded(Exception):
    """A call exceeded a limit. `limit` is "crash" if the call killed its process, "size" if its input is too large."""

    def __init__(self, hazard: Hazard, limit: Limit, detail: str = "") -> None:
        super().__init__(hazard, limit, detail)
        self.hazard, self.limit, self.detail = hazard, limit, detail

    def __str__(self) -> str:
        match self.limit:
            case "time":
                return f"it takes more than {self.hazard.cpu_s:g} s"
            case "memory":
                return f"it takes more than {self.hazard.memory >> 20} MiB of memory"
            case "size":
                return f"its input is more than {MAX_CALL:,} characters of JSON"
        return f"it ended its process ({self.detail}), which most often means too much memory"


class HazardFailed(RuntimeError):
    """The pool failed, or the function raised an error, so the input was not checked."""


@dataclass
class _Call:
    """One call. Its future stays pending until the outcome is known, so a running call can be cancelled."""

    body: str
    owner: str
    result: Future[Any] = field(default_factory=Future)
    breaks: int = 0  # number of times that its process failed

    def succeed(self, value: Any) -> None:
        with suppress(InvalidStateError):  # cancelled
            self.result.set_result(value)

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.result.set_exception(error)


@dataclass
class _Batch:
    """The unanswered calls of one fork, all of the same owner."""

    owner: str
    calls: deque[_Call]


class HazardPool:
    """Run calls of any number of hazards, with at most `size` concurrent batches of each.

    Each owner except "" has at most `size - 1` batches of a hazard in flight, or one if `size` is 1.
    """

    def __init__(self, size: int | None = None, without: tuple[str, ...] = ()) -> None:
        self.size, self.without = size or cores(), without
        self._kinds: dict[Hazard, _Kind] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, hazard: Hazard, *arguments: Any) -> Future[Any]:
        """Queue a call and return its future, which fails with LimitExceeded or HazardFailed.

        Each OWNER has its own queue, and the queues are served fairly. Cancelling the future removes the call from the
        queue; a call that was already sent to a fork may still run.
        """
        call = _Call(json.dumps(arguments), OWNER.get())
        if len(call.body) > MAX_CALL:
            call.result.set_exception(LimitExceeded(hazard, "size"))
            return call.result
        with self._lock:
            if self._closed:
                raise HazardFailed("the pool is closed")
            kind = self._kinds.get(hazard)
            if kind is None:
                kind = self._kinds[hazard] = _Kind(hazard, self.size, self.without)
        kind.add(call)
        return call.result

    def close(self) -> None:
        """Terminate every process. Calls in flight and later ones fail."""
        with self._lock:
            self._closed = True
        for kind in self._kinds.values():
            kind.close()


@lru_cache(maxsize=1)
def shared() -> HazardPool:
    """Return the hazard pool of this process."""
    pool = HazardPool()
    atexit.register(pool.close)
    return pool


os.register_at_fork(after_in_child=shared.cache_clear)  # its threads and processes belong to the parent


class _Kind:
    """One hazard: its queues, its process, and the thread that communicates with the process."""

    def __init__(self, hazard: Hazard, slots: int, without: tuple[str, ...]) -> None:
        self.hazard, self.slots, self.without = hazard, slots, without
        self.most = max(1, slots - 1)  # batches of one owner at a time
        # Ordered by the owners' turns. Keyed by future, because a call can be cancelled anywhere in its queue.
        self._queues: dict[str, OrderedDict[Future[Any], _Call]] = {}
        self._waiting: Counter[str] = Counter()  # characters, by owner
        self._lock = threading.Lock()
        self._closed = False
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(self._wake, False)
        # The thread lives as long as the pool, because the process dies with the thread that started it.
        self._thread = threading.Thread(target=self._run, name=f"hazard-{hazard.name}", daemon=True)
        self._thread.start()

    def add(self, call: _Call) -> None:
        call.result.add_done_callback(partial(self._drop_if_cancelled, call.owner))
        with self._lock:
            if self._closed:
                raise HazardFailed("the pool is closed")
            if self._is_full_for(call):
                raise HazardFailed(f"{self.hazard.name}: too many calls wait")
            # Rouse the thread even if other owners have queued calls: one slot may be reserved for this owner.
            first = call.owner not in self._queues
            self._queues.setdefault(call.owner, OrderedDict())[call.result] = call
            self._waiting[call.owner] += len(call.body)
        if first:
            self._rouse()

    def _is_full_for(self, call: _Call) -> bool:
        """Return whether the call would exceed a limit. A first call always fits; the owner "" has no owner limit."""
        size, of_owner = len(call.body), self._waiting[call.owner]
        if call.owner and of_owner and of_owner + size > MAX_WAITING_PER_OWNER:
            return True
        return bool(self._queues) and self._waiting.total() + size > MAX_WAITING

    def _drop_if_cancelled(self, owner: str, result: Future[Any]) -> None:
        # This callback holds the future and not the call, so that no reference cycle delays freeing the call.
        if not result.cancelled():
            return
        result.set_running_or_notify_cancel()
        with self._lock:
            queue = self._queues.get(owner)
            if queue and result in queue:
                self._waiting[owner] -= len(queue.pop(result).body)
                if not queue:
                    del self._queues[owner], self._waiting[owner]

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._rouse()
        self._thread.join(BOOT_S)

    def _rouse(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake, b"!")

    def take(self, most: int, under_way: Counter[str]) -> list[_Call]:
        """Take up to `most` calls of the next owner; none if all owners with queued calls are at their limit.

        The next owner is the one with the fewest batches in flight; ties are broken by the order of turns.
        """
        with self._lock:
            owners = [owner for owner in self._queues if self._may_have_more(owner, under_way)]
            if not owners:
                return []
            owner = min(owners, key=under_way.__getitem__)
            queue = self._queues.pop(owner)
            batch = [queue.popitem(last=False)[1] for _ in range(min(most, len(queue)))]
            self._waiting[owner] -= sum(len(call.body) for call in batch)
            if queue:
                self._queues[owner] = queue  # after the other owners
            else:
                del self._waiting[owner]
        return batch

    def _may_have_more(self, owner: str, under_way: Counter[str]) -> bool:
        return owner == "" or under_way[owner] < self.most

    def put_back(self, calls: Iterable[_Call]) -> None:
        """Requeue the calls that a batch did not reach, before its owner's other calls. The owner's turn is last.

        Drops cancelled calls.
        """
        with self._lock:
            for call in reversed(list(calls)):
                if call.result.cancelled():
                    continue
                queue = self._queues.pop(call.owner, OrderedDict())
                queue[call.result] = call
                queue.move_to_end(call.result, last=False)
                self._queues[call.owner] = queue
                self._waiting[call.owner] += len(call.body)

    def give_back(self, calls: list[_Call], why: str) -> None:
        """Retry calls whose process failed; fail those that have used all attempts."""
        for call in calls:
            call.breaks += 1
            if call.breaks >= _ATTEMPTS:
                call.fail(HazardFailed(why))
        self.put_back(call for call in calls if call.breaks < _ATTEMPTS)

    def queued(self) -> int:
        with self._lock:
            return sum(map(len, self._queues.values()))

    def _fail_all(self, why: str) -> None:
        while calls := self.take(self.hazard.batch, Counter()):
            for call in calls:
                call.fail(HazardFailed(why))

    def _run(self) -> None:
        while not self._closed:
            self._wait(None)
            if self._closed or not self.queued():
                continue
            try:
                process = _Process(self)
            except (
                Exception
            ) as cause:  # any exception, because without this thread every later call would wait forever
                self._fail_all(f"{self.hazard.name}: {cause}")
                continue
            try:
                self._serve(process)
            except Exception as cause:
                self.give_back(process.calls(), f"{self.hazard.name}: its process broke: {cause}")
                self._rouse()
            finally:
                process.close()
        self._fail_all("the pool is closed")

    def _serve(self, process: _Process) -> None:
        while not self._closed:
            process.send_batches()
            if not process.batches and not self.queued():
                if not self._wait(IDLE_S):
                    return
                continue
            process.turn(self._awake)
            self._drain()
        raise HazardFailed("the pool is closed")

    def _wait(self, seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self._awake, select.POLLIN)
        roused = bool(poll.poll(None if seconds is None else seconds * 1000))
        self._drain()
        return roused

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._awake, _CHUNK)


class _Process:
    """The service's handle of one hazard's process: buffers of the pipes, and the batches in flight."""

    def __init__(self, kind: _Kind) -> None:
        self.kind, self.hazard = kind, kind.hazard
        self.batches: dict[int, _Batch] = {}
        self.number = 0
        self._out = bytearray()
        self._in = bytearray()
        environment = bare()
        self.process = start_zygote(environment, "graders.hazards.zygote")
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._deadline = time.monotonic() + BOOT_S
        visible = visible_to(environment)
        packages = [path for name in ("purelib", "platlib") if (path := sysconfig.get_path(name))]
        ours = [str(_ROOT / "graders"), str(_ROOT / "core")]
        self._put(
            {
                "function": self.hazard.function,
                "warm_up": self.hazard.warm_up,
                "parent": os.getpid(),
                "readable": sorted({*visible.readable, *packages, *ours}, key=len),
                "listed": [*visible.listed, str(_ROOT)],
                "path": [*visible.path, *dict.fromkeys((*packages, str(_ROOT)))],
                "variables": VARIABLES,
                "cpu_s": self.hazard.cpu_s,
                "turn_s": self.hazard.turn_s,
                "wall_s": self.hazard.wall_s,
                "memory": self.hazard.memory,
                "without": list(kind.without),
            }
        )
        try:
            answer = json.loads(self._first_frame())
            if "layers" not in answer:
                raise HazardFailed(f"its process did not start: {answer.get('error')}")
        except BaseException:
            self.close()
            raise
        self.layers: dict[str, str] = answer["layers"]

    def send_batches(self) -> None:
        """Fill the free slots with equal shares of the queue. Skips owners that are at their limit."""
        while (free := self.kind.slots - len(self.batches)) > 0 and (queued := self.kind.queued()):
            under_way = Counter(batch.owner for batch in self.batches.values())
            calls = self.kind.take(min(self.hazard.batch, -(-queued // free)), under_way)
            if not calls:
                return
            if not self.batches:
                self._progressed()
            self.number += 1
            self.batches[self.number] = _Batch(calls[0].owner, deque(calls))
            bodies = ",".join(call.body for call in calls)
            self._put_body(f'{{"batch":{self.number},"calls":[{bodies}]}}'.encode())

    def turn(self, awake: int) -> None:
        """Wait until a pipe is ready or a call is queued, then send and receive."""
        poll = select.poll()
        poll.register(awake, select.POLLIN)
        poll.register(self._stdout, select.POLLIN)
        if self._out:
            poll.register(self._stdin, select.POLLOUT)
        left = self._deadline - time.monotonic()
        events = dict(poll.poll(max(0.0, left) * 1000 + 1 if self.batches else None))
        if not events:
            raise HazardFailed("it does not answer")
        if self._stdin in events:
            del self._out[: os.write(self._stdin, self._out[:_CHUNK])]
        if self._stdout in events:
            self._receive()
            while (frame := self._frame()) is not None:
                self._settle(frame)

    def calls(self) -> list[_Call]:
        """Return the calls that the process has not answered."""
        return [call for batch in self.batches.values() for call in batch.calls]

    def close(self) -> None:
        self.process.kill()  # its children exit with it
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _settle(self, frame: bytes) -> None:
        number, _, lines = frame.partition(b"\n")
        calls = self.batches[int(number)].calls
        for line in lines.splitlines():
            outcome = json.loads(line)
            if "over" not in outcome:
                self._answer(calls.popleft(), outcome)
            if "over" in outcome or "limit" in outcome:
                # The fork has exited. Requeue the other calls, so that one owner does not hold a slot for long.
                self.kind.put_back(calls)
                calls.clear()
        if not calls:
            del self.batches[int(number)]
        self._progressed()

    def _answer(self, call: _Call, outcome: dict[str, Any]) -> None:
        if "value" in outcome:
            call.succeed(outcome["value"])
        elif "error" in outcome:
            call.fail(HazardFailed(f"{self.hazard.name}: {outcome['error']}: {outcome['text']}"))
        elif outcome["limit"] == "starved":
            call.fail(HazardFailed(f"{self.hazard.name}: {outcome['text']}"))
        else:
            call.fail(LimitExceeded(self.hazard, outcome["limit"], outcome["text"]))

    def _progressed(self) -> None:
        self._deadline = time.monotonic() + self.hazard.wall_s + GRACE_S

    def _first_frame(self) -> bytes:
        while (frame := self._frame()) is None:
            poll = select.poll()
            poll.register(self._stdout, select.POLLIN)
            if self._out:
                poll.register(self._stdin, select.POLLOUT)
            events = dict(poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000))
            if not events:
                raise HazardFailed("its process did not start in time")
            if self._stdin in events:
                del self._out[: os.write(self._stdin, self._out[:_CHUNK])]
            if self._stdout in events:
                self._receive()
        return frame

    def _receive(self) -> None:
        data = os.read(self._stdout, _CHUNK)
        if not data:
            raise HazardFailed("it ended")
        self._in += data

    def _frame(self) -> bytes | None:
        if len(self._in) < 4:
            return None
        size = unpack("!I", self._in[:4])[0]
        if len(self._in) < 4 + size:
            return None
        frame = bytes(self._in[4 : 4 + size])
        del self._in[: 4 + size]
        return frame

    def _put(self, frame: dict[str, Any]) -> None:
        self._put_body(json.dumps(frame).encode())

    def _put_body(self, body: bytes) -> None:
        self._out += pack("!I", len(body)) + body
