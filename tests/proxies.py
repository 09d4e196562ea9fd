"""Proxies before real servers, which fail as other servers do. A test sets `mode` and sees the failure from then on."""

import contextlib
import http.client
import http.server
import random
import socket
import socketserver
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from functools import partial
from typing import Any

OK = "ok"


@dataclass(frozen=True)
class S3Request:
    """What a mode looks at."""

    method: str
    query: str
    headers: Message

    @property
    def writes(self) -> bool:
        return self.method in ("PUT", "POST")

    @property
    def deletes(self) -> bool:
        return self.method == "DELETE" or self.deletes_many

    @property
    def deletes_many(self) -> bool:
        return self.method == "POST" and self.query.startswith("delete")

    @property
    def lists(self) -> bool:
        return self.method == "GET" and ("list-type" in self.query or "uploads" in self.query)

    @property
    def reads(self) -> bool:
        return self.method == "GET" and not self.lists

    @property
    def is_conditional(self) -> bool:
        return "If-None-Match" in self.headers

    @property
    def ends_upload(self) -> bool:
        return self.method == "POST" and "uploadId" in self.query

    @property
    def has_checksum(self) -> bool:
        return any(name.lower().startswith(("x-amz-checksum", "x-amz-sdk-checksum")) for name in self.headers)


@dataclass(frozen=True)
class S3Answer:
    """An error of S3, or a page of another server if there is no code."""

    status: int
    code: str = ""
    when: Callable[[S3Request], bool] = lambda request: True
    share: float = 1.0  # of the requests, by chance

    @property
    def body(self) -> bytes:
        if not self.code:
            return b"<html><h1>login</h1></html>"
        return f'<?xml version="1.0"?><Error><Code>{self.code}</Code><Message>injected</Message></Error>'.encode()


S3_MODES = {
    "no conditional put (501)": S3Answer(501, "NotImplemented", lambda r: r.is_conditional),
    "no conditional put (400)": S3Answer(400, "InvalidArgument", lambda r: r.is_conditional),
    "no conditional completion (501)": S3Answer(
        501, "NotImplemented", lambda r: r.is_conditional and r.ends_upload
    ),
    "no conditional completion (400)": S3Answer(
        400, "InvalidArgument", lambda r: r.is_conditional and r.ends_upload
    ),
    "no checksums (400)": S3Answer(400, "InvalidArgument", lambda r: r.has_checksum),
    "no checksums (501)": S3Answer(501, "NotImplemented", lambda r: r.has_checksum),
    "overloaded": S3Answer(503, "SlowDown"),
    "often overloaded": S3Answer(503, "SlowDown", share=0.3),
    "clock skew": S3Answer(403, "RequestTimeTooSkewed"),
    "expired credentials": S3Answer(403, "ExpiredToken"),
    "wrong region (301)": S3Answer(301, "PermanentRedirect"),
    "wrong region (400)": S3Answer(400, "AuthorizationHeaderMalformed"),
    "no right to put": S3Answer(403, "AccessDenied", lambda r: r.writes),
    "no right to delete": S3Answer(403, "AccessDenied", lambda r: r.deletes),
    "no right to list": S3Answer(403, "AccessDenied", lambda r: r.lists),
    "no right to get": S3Answer(403, "AccessDenied", lambda r: r.reads),
    "no rights": S3Answer(403, "AccessDenied"),
    "no bucket": S3Answer(404, "NoSuchBucket"),
    "no bulk delete (501)": S3Answer(501, "NotImplemented", lambda r: r.deletes_many),
    "no bulk delete (400)": S3Answer(400, "InvalidArgument", lambda r: r.deletes_many),
    "bulk delete without Content-MD5": S3Answer(400, "MissingContentMD5", lambda r: r.deletes_many),
    "no list of uploads": S3Answer(501, "NotImplemented", lambda r: r.lists and "uploads" in r.query),
    "lost uploads": S3Answer(404, "NoSuchUpload", lambda r: r.writes and "uploadId" in r.query),
    "completion fails (200)": S3Answer(200, "InternalError", lambda r: r.ends_upload),
    "completion is too much (503)": S3Answer(503, "SlowDown", lambda r: r.ends_upload),
    "completion meets another (409)": S3Answer(409, "ConditionalRequestConflict", lambda r: r.ends_upload),
    "completion lacks a part (400)": S3Answer(400, "InvalidPart", lambda r: r.ends_upload),
    "completion finds nothing (404)": S3Answer(404, "NoSuchKey", lambda r: r.ends_upload),
    "bad gateway": S3Answer(502),
    "login page": S3Answer(200),
    "login page for reads": S3Answer(200, when=lambda r: r.method in ("GET", "HEAD")),
    "login page for lists": S3Answer(200, when=lambda r: r.lists),
    "login page for uploads": S3Answer(200, when=lambda r: r.method == "POST"),
    "login page for completions": S3Answer(200, when=lambda r: r.ends_upload),
    "full": S3Answer(507, "XMinioStorageFull"),
    "quota": S3Answer(403, "QuotaExceeded", lambda r: r.writes),
    "read-only": S3Answer(405, "MethodNotAllowed", lambda r: r.writes or r.deletes),
}
# Changes of the server's own answers, and no answer at all.
RESET, SILENT, ODD_ETAGS, NO_ETAGS = "reset", "silent", "odd ETags", "no ETags"
# Downloads break in the middle, and what is asked for from there on is a page of another server, the whole blob, or the
# rest of a larger one.
LOGIN_AFTER_BREAK, WHOLE_AFTER_BREAK = "login page after a break", "whole blob after a break"
LARGER_AFTER_BREAK = "larger blob after a break"
AFTER_BREAK = (LOGIN_AFTER_BREAK, WHOLE_AFTER_BREAK, LARGER_AFTER_BREAK)
ALL_S3_MODES = (*S3_MODES, RESET, SILENT, ODD_ETAGS, NO_ETAGS, *AFTER_BREAK)


class S3Proxy:
    """A proxy before an S3 server. `mode` is one of ALL_S3_MODES, or OK."""

    def __init__(self, port: int) -> None:
        self.mode = OK
        self.chance = random.Random(1)  # the same in every run
        self.failed = 0  # requests that met the mode
        self.broken: tuple[int, dict[str, str], bytes] = (200, {}, b"")  # the last answer that broke, whole
        self._released = threading.Event()

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), partial(_S3Handler, self, port))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def repair(self) -> None:
        """End the fault, also for requests that wait for an answer."""
        self.mode = OK
        self._released.set()

    def wait_for_repair(self) -> None:
        self._released.wait()

    def stop(self) -> None:
        self.repair()
        self._server.shutdown()
        self._server.server_close()


class _S3Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, proxy: S3Proxy, port: int, *args: Any) -> None:
        self.proxy, self.upstream_port = proxy, port
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None: ...

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        mode = self.proxy.mode
        request = S3Request(self.command, urllib.parse.urlsplit(self.path).query, self.headers)
        failure = S3_MODES.get(mode)
        if mode in (RESET, SILENT):
            self.proxy.failed += 1
            if mode == SILENT:
                self.proxy.wait_for_repair()
            self.close_connection = True
        elif failure is not None and failure.when(request) and self.proxy.chance.random() < failure.share:
            self.proxy.failed += 1
            # The region is what Amazon's stores add to a redirect, and what clients look for.
            headers = {"Content-Type": "application/xml", "x-amz-bucket-region": "eu-west-1"}
            self._send(failure.status, headers, failure.body)
        elif mode in AFTER_BREAK and request.reads:
            self._break(mode)
        else:
            self._forward(body, mode)

    def _break(self, mode: str) -> None:
        if "Range" not in self.headers:
            self.proxy.broken = self._of_server(b"")
            self._send(*self.proxy.broken, share=0.5)
            self.close_connection = True
            return
        self.proxy.failed += 1
        if mode == LOGIN_AFTER_BREAK:
            self._send(200, {}, S3Answer(200).body)
        elif mode == LARGER_AFTER_BREAK:
            status, headers, content = self._of_server(b"")
            start = headers["Content-Range"].partition("-")[0]
            self._send(status, headers | {"Content-Range": f"{start}-39/40"}, content)
        else:
            self._send(*self.proxy.broken)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def _of_server(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """The status, headers and content of its answer."""
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream_port, timeout=60)
        with contextlib.closing(upstream):
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            content = answer.read()
        return answer.status, dict(answer.getheaders()), content

    def _forward(self, body: bytes, mode: str) -> None:
        status, headers, content = self._of_server(body)
        etag = next((name for name in headers if name.lower() == "etag"), None)
        # The odd tag of a part would come back to the server, which has another one.
        is_changed = mode == NO_ETAGS or (mode == ODD_ETAGS and "partNumber" not in self.path)
        if etag is not None and is_changed:
            self.proxy.failed += 1
            headers[etag] = '"not-an-md5"'
            if mode == NO_ETAGS:
                del headers[etag]
        self._send(status, headers, content)

    def _send(self, status: int, headers: dict[str, str], content: bytes, share: float = 1.0) -> None:
        self.send_response(status)
        length = str(len(content))
        for name, value in headers.items():
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("connection", "content-length", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: round(share * len(content))])


class TcpProxy:
    """A proxy before any server that speaks TCP."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        """`connect` opens a connection to the server."""
        self._connect = connect
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._mode = OK
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection. New ones are accepted."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Close every connection, and each new one at once."""
        with self._in("refuse"):
            self.cut()
            yield

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Accept connections, and forward nothing on them. Connections that exist are closed, before and after."""
        with self._in("silent"):
            self.cut()
            yield
        self.cut()

    @contextlib.contextmanager
    def _in(self, mode: str) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = OK

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            if self._mode == "silent":
                self._open.add(client)
                continue
            if self._mode == "refuse":
                client.close()
                continue
            try:
                server = self._connect()
            except OSError:  # the server was killed and has not started yet
                client.close()
                continue
            self._open |= {client, server}
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
        for end in (source, target):
            self._open.discard(end)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
                end.close()
