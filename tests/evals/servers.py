"""A chat server in threads, whose answers a test writes as a function, and which counts what it was asked."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], "str | dict[str, Any] | int"]


@dataclass
class ChatServer:
    """`asked` counts the requests by the text of their last message. An answer of int is an error status."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    fails: set[str] = field(default_factory=set)  # last messages that get status 400
    thoughts: dict[str, str] = field(default_factory=dict)  # before the answers to these last messages
    unknown: set[str] = field(default_factory=set)  # models that it does not know
    calls: dict[str, list[Any]] = field(default_factory=dict)  # in the answers to these last messages
    usages: dict[str, Any] = field(default_factory=dict)  # `usage` of the answers to these last messages


@contextmanager
def chat_server(answer: Answer) -> Iterator[ChatServer]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                server.requests.append(body)
                server.asked[str(body["messages"][-1]["content"])] += 1
            prompt = body["messages"][-1]["content"]
            said = 400 if prompt in server.fails else answer(body)
            if body.get("model") in server.unknown:
                self.send(404, error("model_not_found"))
                return
            if isinstance(said, int):
                self.send(said, error("no"))
                return
            usage = server.usages.get(prompt)
            body = completion(said) | ({} if usage is None else {"usage": usage})
            if prompt in server.thoughts:
                body["choices"][0]["message"]["reasoning_content"] = server.thoughts[prompt]
            if prompt in server.calls:
                body["choices"][0]["message"]["tool_calls"] = server.calls[prompt]
            self.send(200, body)

        def do_GET(self) -> None:
            """Its health."""
            self.send(200, {"status": "ok"})

        def send(self, status: int, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            return

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, *args: Any) -> None:
            """A client that was killed hangs up."""

    httpd = Quiet(("127.0.0.1", 0), Handler)
    server = ChatServer(f"http://127.0.0.1:{httpd.server_address[1]}/v1")
    thread = threading.Thread(target=httpd.serve_forever, args=[0.05], daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()


def error(code: str) -> dict[str, Any]:
    return {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": code}}


def completion(said: Any) -> dict[str, Any]:
    text = said if isinstance(said, str) else json.dumps(said)
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def verdict(result: Any) -> dict[str, Any]:
    """What a judge answers."""
    return {"steps": [], "result": result}
