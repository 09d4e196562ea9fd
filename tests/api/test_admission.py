"""Whose turn it is: places for long requests, shared between projects."""

import asyncio
import gc
import threading
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from api.http.admission import AdmittedRequest, ConcurrencyLimit
from core.errors import TooManyAtOnce


def share(*, places: int = 2, per_project: int = 2, waiting: int = 10) -> ConcurrencyLimit:
    return ConcurrencyLimit("grader runs", places=places, per_project=per_project, waiting=waiting)


class Line:
    """Requests that ask for a place one after the other, and who got one."""

    def __init__(self, share: ConcurrencyLimit) -> None:
        self.share = share
        self.served: list[str] = []
        self.places: list[AdmittedRequest] = []
        self.asking: list[asyncio.Task[None]] = []

    async def ask(self, *names: str) -> None:
        """A name is a project and a number: a1, a2, b1."""
        for name in names:
            self.asking.append(asyncio.create_task(self._one(name)))
            await settled()

    async def _one(self, name: str) -> None:
        place = await self.share.enter(name[0])
        self.served.append(name)
        self.places.append(place)

    async def leave(self, number: int = 0) -> None:
        self.places.pop(number).leave()
        await settled()


async def settled() -> None:
    """Everything that can go on without anybody's doing has done so."""
    for _ in range(5):
        await asyncio.sleep(0)


def in_a_loop(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scene())


def test_turns_go_round_the_projects_however_many_requests_one_has() -> None:
    async def scene() -> None:
        line = Line(share(places=1))
        await line.ask("a1", "a2", "a3", "a4", "b1", "c1")
        for _ in range(5):
            await line.leave()

        assert line.served == ["a1", "b1", "c1", "a2", "a3", "a4"]

    in_a_loop(scene)


def test_a_project_never_has_more_than_its_places_and_others_get_the_rest() -> None:
    async def scene() -> None:
        line = Line(share(places=3, per_project=2))
        await line.ask("a1", "a2", "a3", "b1", "b2")
        assert line.served == ["a1", "a2", "b1"]

        await line.leave()
        assert line.served[3:] == ["a3"] or line.served[3:] == ["b2"]
        assert line.share.in_use == 3

    in_a_loop(scene)


def test_a_free_place_goes_to_the_project_that_has_the_fewest() -> None:
    async def scene() -> None:
        line = Line(share(places=3, per_project=3))
        await line.ask("a1", "a2", "a3", "a4", "b1")

        await line.leave()

        assert line.served[3:] == ["b1"]

    in_a_loop(scene)


def test_a_line_that_is_full_is_refused_with_when_to_come_back() -> None:
    async def scene() -> None:
        line = Line(share(places=1, per_project=1, waiting=1))
        await line.ask("a1", "a2")

        with pytest.raises(TooManyAtOnce) as refused:
            await line.share.enter("a")

        assert refused.value.status_code == 429
        assert refused.value.headers["retry-after"] == "5"
        assert refused.value.envelope()["error"]["code"] == "rate_limit_exceeded"

        await line.ask("b1")  # the line of one project is not that of another
        await line.leave()
        assert line.served == ["a1", "b1"]

    in_a_loop(scene)


def test_who_gives_up_leaves_the_line_and_takes_no_place() -> None:
    async def scene() -> None:
        line = Line(share(places=1))
        await line.ask("a1", "b1", "c1")

        line.asking[1].cancel()
        await settled()
        await line.leave()

        assert line.served == ["a1", "c1"]

    in_a_loop(scene)


def test_who_gives_up_at_the_moment_of_their_turn_passes_the_place_on() -> None:
    async def scene() -> None:
        line = Line(share(places=1))
        await line.ask("a1", "b1", "c1")

        line.places.pop().leave()  # b's turn has come, and b has not run yet
        line.asking[1].cancel()
        await settled()

        assert line.served == ["a1", "c1"]
        assert line.share.in_use == 1

    in_a_loop(scene)


def test_leaving_twice_gives_back_one_place() -> None:
    async def scene() -> None:
        places = share(places=2)
        first, _ = await places.enter("a"), await places.enter("a")

        first.leave()
        first.leave()

        assert places.in_use == 1

    in_a_loop(scene)


def test_a_project_that_has_nothing_here_is_forgotten() -> None:
    async def scene() -> None:
        places = share(places=1, per_project=1, waiting=0)

        async def leave_and_be_refused(times: int) -> None:
            for number in range(times):
                place = await places.enter(f"{times}/{number}")
                with pytest.raises(TooManyAtOnce):
                    await places.enter(f"{times}/{number}/refused")
                place.leave()

        await leave_and_be_refused(2)  # what the interpreter keeps of a first run does not count
        tracemalloc.start()
        await leave_and_be_refused(2000)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert kept < 50_000

    in_a_loop(scene)


def test_a_request_that_gives_up_as_a_place_becomes_free_ends_as_cancelled() -> None:
    async def scene() -> None:
        line = Line(share(places=1))
        await line.ask("a1", "b1", "c1")
        line.asking[1].cancel()
        await line.leave()

        with pytest.raises(asyncio.CancelledError):
            await line.asking[1]
        assert line.served == ["a1", "c1"]

    in_a_loop(scene)


def test_a_thread_keeps_its_place_until_it_has_ended_even_if_nobody_waits_for_it() -> None:
    """Otherwise clients that ask and leave would have any number of threads at once."""

    async def scene() -> None:
        places = share(places=1)
        begun, go = threading.Event(), threading.Event()

        def call() -> None:
            begun.set()
            go.wait(30)

        asking = asyncio.create_task(places.in_thread("a", call))
        assert await asyncio.to_thread(begun.wait, 10)
        asking.cancel()
        await settled()
        assert asking.cancelled()
        assert places.in_use == 1

        go.set()
        (await places.enter("a")).leave()
        assert places.in_use == 0

    in_a_loop(scene)


def test_what_a_thread_raises_reaches_the_caller_and_frees_the_place() -> None:
    def call() -> None:
        raise ValueError("no")

    async def scene() -> None:
        places = share(places=1)

        with pytest.raises(ValueError, match="no"):
            await places.in_thread("a", call)
        await settled()

        assert places.in_use == 0

    in_a_loop(scene)
