"""A line to an S3 server that fails on demand: it answers 503, or is cut in the middle of a request or an answer."""

import socket
import threading
from contextlib import suppress

UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
METHODS = (b"GET /", b"PUT /", b"POST /", b"HEAD /", b"DELETE /")


class FlakyS3:
    """Forwards TCP connections to `host:port`. Set what shall go wrong; each trouble is used up as it happens.

    `refusals` requests are answered with 503. `cut_requests` connections, and `cut_answers`, are closed once this many
    bytes, `cut_after`, have gone through in that direction.
    """

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.refusals = 0
        self.cut_requests = 0
        self.cut_answers = 0
        self.cut_after = 0
        self.troubles: list[str] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._upstream) as server:
            answers = threading.Thread(target=self._pump, args=[server, client, "cut_answers"], daemon=True)
            answers.start()
            self._pump(client, server, "cut_requests")
            answers.join()

    def _pump(self, source: socket.socket, target: socket.socket, cut: str) -> None:
        passed = 0
        while piece := self._received(source):
            if piece.startswith(METHODS) and self._happens("refusals"):
                self._refuse(source)
                break
            if passed + len(piece) > self.cut_after and self._happens(cut):
                with suppress(OSError):
                    target.sendall(piece[: max(self.cut_after - passed, 0)])
                break
            passed += len(piece)
            try:
                target.sendall(piece)
            except OSError:
                break
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _refuse(self, client: socket.socket) -> None:
        # The rest of the request is read first, or closing would reset the connection before the answer is seen.
        client.settimeout(0.05)
        while self._received(client):
            pass
        with suppress(OSError):
            client.sendall(UNAVAILABLE)

    def _received(self, source: socket.socket) -> bytes:
        try:
            return source.recv(1 << 16)
        except OSError:
            return b""

    def _happens(self, trouble: str) -> bool:
        with self._lock:
            left: int = getattr(self, trouble)
            if left == 0:
                return False
            setattr(self, trouble, left - 1)
            self.troubles.append(trouble)
            return True
