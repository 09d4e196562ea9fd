import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from core.asgi import BodyLimit, MinimumRate, TooSlow
from tests.api.conftest import House
from tests.slow_body import stopped_body

SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/files",
    "headers": [(b"transfer-encoding", b"chunked")],
}


def answer_at_once(
    scope: MutableMapping[str, Any],
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
) -> Coroutine[Any, Any, None]:
    return PlainTextResponse("no", 401)(scope, receive, send)


def pieces_read(sent: list[dict[str, Any]], most_drained: int) -> int:
    """How many messages of the client were read when the answer began."""
    waiting, read_before_answer = iter(sent), []
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 1
        return next(waiting)

    async def send(message: Any) -> None:
        read_before_answer.append(read)

    streamed = re.compile("/v1/files")
    app = BodyLimit(answer_at_once, most_bytes=10, streamed=streamed, most_drained=most_drained)
    asyncio.run(app(SCOPE, receive, send))
    return read_before_answer[0]


BODY = [
    {"type": "http.request", "body": b"12345678", "more_body": more} for more in (True, True, True, False)
]


@pytest.mark.parametrize(("most_drained", "read"), [(100, 4), (16, 2)])
def test_what_is_still_coming_is_read_before_the_answer_but_not_without_end(
    most_drained: int, read: int
) -> None:
    """Closing a connection with unread bytes in it can take the answer away from its reader."""
    assert pieces_read(BODY, most_drained) == read


def test_a_client_that_has_gone_is_not_waited_for() -> None:
    assert pieces_read([BODY[0], {"type": "http.disconnect"}], 100) == 2


class Drip:
    """A client that takes its time, which is a number here."""

    def __init__(self, *pieces: tuple[float, bytes]) -> None:
        self.now, self.pieces = 0.0, iter(pieces)

    def clock(self) -> float:
        return self.now

    async def receive(self) -> dict[str, Any]:
        seconds, body = next(self.pieces)
        self.now += seconds
        return {"type": "http.request", "body": body, "more_body": True}


def kept_pace(client: Drip, pieces: int, pause: float = 0.0) -> int:
    """How many pieces were taken before the client was found too slow."""
    pace = MinimumRate(100, 30.0, client.clock)

    async def read() -> int:
        for number in range(pieces):
            try:
                await pace.keep(client.receive)
            except TooSlow:
                return number
            client.now += pause
        return pieces

    return asyncio.run(read())


def test_a_body_may_take_any_time_if_it_keeps_coming() -> None:
    assert kept_pace(Drip(*[(10.0, b"x" * 1000)] * 100), 100) == 100


def test_a_body_that_comes_by_the_drop_is_refused_after_half_a_minute() -> None:
    assert kept_pace(Drip(*[(1.0, b"x")] * 100), 100) == 29


def test_a_fast_beginning_does_not_pay_for_a_slow_end() -> None:
    assert kept_pace(Drip((1.0, b"x" * 1_000_000), (30.0, b""), *[(1.0, b"x")] * 100), 100) == 31


def test_time_in_which_the_client_is_not_asked_is_not_its_own() -> None:
    assert kept_pace(Drip(*[(1.0, b"x" * 200)] * 100), 100, pause=60.0) == 100


def test_a_client_that_stops_in_the_middle_of_its_body_gets_408(house: House) -> None:
    app = BodyLimit(
        house.app,
        most_bytes=10,
        streamed=re.compile("/v1/files"),
        most_drained=10,
        least_rate=1000,
        window_s=0.01,
    )

    sent = asyncio.run(stopped_body(app, "/v1/files", house.key, "multipart/form-data; boundary=b"))

    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_timeout"
    assert house.app.state.service.admission.uploads.in_use == 0
