"""Somebody's web server, which receives webhooks."""

import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Received:
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes


@dataclass
class Receiver:
    """Answers with these statuses in turn, the last one again and again. `with` starts and stops it.

    A status of 0 is no answer for as long as the receiver is there.
    """

    statuses: Sequence[int] = (200,)
    received: list[Received] = field(default_factory=list)
    tls: ssl.SSLContext | None = None

    def __enter__(self) -> "Receiver":
        receiver = self
        self.gone = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.received.append(Received(self.path, headers, body))
                number = min(len(receiver.received), len(receiver.statuses)) - 1
                status = receiver.statuses[number]
                if status == 0:
                    receiver.gone.wait()
                    return
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("location", f"{receiver.url}/moved")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self._thread.start()
        return self

    def hang_up(self) -> None:
        """Close the connections that are left without an answer."""
        self.gone.set()

    def __exit__(self, *exc: object) -> None:
        self.hang_up()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ids(self) -> list[str]:
        return [one.headers["webhook-id"] for one in self.received]
