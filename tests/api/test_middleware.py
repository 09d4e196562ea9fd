import asyncio
import re
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from api.middleware import BodyLimit

SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/files",
    "headers": [(b"transfer-encoding", b"chunked")],
}


def answer_at_once(scope, receive, send):
    return PlainTextResponse("no", 401)(scope, receive, send)


def pieces_read(sent: list[dict[str, Any]], most_drained: int) -> int:
    """How many messages of the client were read when the answer began."""
    waiting, read_before_answer = iter(sent), []
    read = 0

    async def receive():
        nonlocal read
        read += 1
        return next(waiting)

    async def send(message):
        read_before_answer.append(read)

    streamed = re.compile("/v1/files")
    app = BodyLimit(answer_at_once, most_bytes=10, streamed=streamed, most_drained=most_drained)
    asyncio.run(app(SCOPE, receive, send))
    return read_before_answer[0]


BODY = [
    {"type": "http.request", "body": b"12345678", "more_body": more} for more in (True, True, True, False)
]


@pytest.mark.parametrize(("most_drained", "read"), [(100, 4), (16, 2)])
def test_what_is_still_coming_is_read_before_the_answer_but_not_without_end(most_drained, read):
    """Closing a connection with unread bytes in it can take the answer away from its reader."""
    assert pieces_read(BODY, most_drained) == read


def test_a_client_that_has_gone_is_not_waited_for():
    assert pieces_read([BODY[0], {"type": "http.disconnect"}], 100) == 2
