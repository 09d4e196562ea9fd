"""A web server on loopback that answers from a script, and time that passes at once."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MSGPACK = "application/msgpack"


@dataclass
class Reply:
    status: int
    body: str
    headers: dict[str, str] = field(default_factory=dict)


# What a server may write for a count of tokens, as JSON, instead of an integer.
ODD_COUNTS = [
    "-5",
    "1.5",
    "NaN",
    "1e400",
    "-Infinity",
    '"many"',
    '"7"',
    "true",
    "null",
    "[]",
    "{}",
    "100000001",
    "9" * 4000,
]


def with_usage(reply: Reply, usage: str) -> Reply:
    """The reply with this JSON as its `usage`."""
    completion = json.loads(reply.body) | {"usage": "USAGE"}
    return Reply(reply.status, json.dumps(completion).replace('"USAGE"', usage), reply.headers)


def chat(content: object, finish_reason: str = "stop", refusal: str | None = None) -> Reply:
    text = content if isinstance(content, str) else json.dumps(content)
    message = {"role": "assistant", "content": text, "refusal": refusal}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return Reply(200, json.dumps({"choices": [choice], "usage": usage}))


def verdict(result: object) -> Reply:
    return chat({"steps": [{"description": "look", "conclusion": "fine"}], "result": result})


class ScriptedServer:
    """Answers with the replies in turn, the last one again and again. `async with` gives its address."""

    def __init__(self, replies: Sequence[Reply], hold: int = 1) -> None:
        """`hold`: answer nobody before that many requests are open at once."""
        self.replies, self.hold = list(replies), asyncio.Semaphore(0)
        self.holding = hold
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.open = self.most_open = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        self.requests.append(json.loads(await reader.readexactly(int(headers["content-length"]))))
        self.headers.append(headers)
        self.paths.append(first.split()[1])
        if self.open >= self.holding:
            for _ in range(self.holding):
                self.hold.release()
        await self.hold.acquire()
        if self.holding > 1:
            for _ in range(100):  # let whoever else is allowed to ask do so
                await asyncio.sleep(0)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        body = reply.body.encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in reply.headers.items())
        head = f"HTTP/1.1 {reply.status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{more}\r\n"
        self.open -= 1
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()


class Time:
    """Sleeping takes no time and is written down; the clock shows what has been slept."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def clock(self) -> float:
        return self.now


@contextmanager
def serving(answer: Callable[[str, Any], tuple[int, str | bytes]]) -> Iterator[str]:
    """A server in threads of its own, for callers with event loops of theirs. `answer` gets path and body.

    A body of MessagePack stays bytes.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self._answer(body if self.headers["content-type"] == MSGPACK else json.loads(body))

        def _answer(self, sent: Any) -> None:
            status, text = answer(self.path, sent)
            body = text if isinstance(text, bytes) else text.encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
