"""Streaming parser for multipart/form-data: keeps only what the caller stores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import Protocol, TypeVar

from anyio import CancelScope, CapacityLimiter, to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from core.errors import InvalidRequest

MAX_FIELDS = 16
MAX_FIELD_BYTES = 1024
# Bytes collected before a thread writes them. In between, an upload holds no thread.
PIECE_BYTES = 256 << 10


class FormPart(Protocol):
    """Receives the content of one form field as it arrives."""

    def write(self, data: bytes) -> None: ...

    def end(self) -> None: ...


class TextField:
    """Collects a text field and passes it to `done`."""

    def __init__(self, name: str, done: Callable[[str], None]) -> None:
        self._name, self._done = name, done
        self._value = bytearray()

    def write(self, data: bytes) -> None:
        self._value += data
        if len(self._value) > MAX_FIELD_BYTES:
            message = f"The form field '{self._name}' is longer than {MAX_FIELD_BYTES} bytes."
            raise InvalidRequest(message, param=self._name)

    def end(self) -> None:
        self._done(self._value.decode("utf-8", "replace"))


class FormReader:
    """Incremental parser of a form.

    Args:
        begin: Called with the name and file name of each field; returns the receiver of its content.

    Raises:
        InvalidRequest: the body is not a form.
    """

    def __init__(self, content_type: str, begin: Callable[[str, str | None], FormPart]) -> None:
        media_type, options = parse_options_header(content_type)
        if media_type != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest("Send the file as multipart/form-data.", code="invalid_content_type")
        self._begin = begin
        self._part: FormPart | None = None
        self._fields = 0
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._ended = False
        with _readable():
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )

    def feed(self, data: bytes) -> None:
        """Parse the next piece.

        Raises:
            InvalidRequest: the body is not a form, or has too many fields. Errors of a field's receiver are raised
            unchanged.
        """
        if not self._ended:
            with _readable():
                self._parser.write(data)

    def close(self) -> None:
        """Raise InvalidRequest unless the form is complete."""
        if not self._ended:
            raise InvalidRequest("The request ended in the middle of the form.", code="invalid_form")

    def _on_part_begin(self) -> None:
        self._headers = {}
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise InvalidRequest("The form has too many fields.", code="invalid_form")

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _on_headers_finished(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"")
        _, options = parse_options_header(disposition)
        if b"name" not in options:
            raise InvalidRequest("A part of the form has no name.", code="invalid_form")
        name = options[b"name"].decode("utf-8", "replace")
        self._part = self._begin(name, _file_name(disposition, options))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        assert self._part is not None
        self._part.write(data[start:end])

    def _on_part_end(self) -> None:
        assert self._part is not None
        self._part.end()

    def _on_end(self) -> None:
        self._ended = True


def _file_name(disposition: bytes, options: dict[bytes, bytes]) -> str | None:
    """The file name of a part; None: it is not a file.

    Some clients send a name outside of ASCII as RFC 5987's `filename*`, perhaps with a `filename` for servers that do
    not know it.
    """
    if b"filename*" in disposition:
        header = Message()
        header["content-disposition"] = disposition.decode("latin-1")
        for name, value in header.get_params([], header="content-disposition"):
            if name.lower() == "filename" and isinstance(value, tuple):  # encoded: charset, language, text
                return collapse_rfc2231_value(value)
    plain = options.get(b"filename")
    return None if plain is None else plain.decode("utf-8", "replace")


class FormReceiver(Protocol):
    """Consumes the fields of a form."""

    def begin(self, name: str, filename: str | None) -> FormPart: ...

    def abort(self) -> None:
        """Discard everything. Also called at the end, then without effect."""


Made = TypeVar("Made")


async def receive(
    request: Request, to: FormReceiver, finish: Callable[[], Made], threads: CapacityLimiter
) -> Made:
    """Feed the request's form to `form` and return the result of `finish`. Holds a thread only while writing.

    The next piece is read from the client after this one is written, so a client is never faster than the store and
    at most one piece is in memory.
    """
    piece = bytearray()
    try:
        form = FormReader(request.headers.get("content-type", ""), to.begin)
        async for chunk in request.stream():
            piece += chunk
            if len(piece) >= PIECE_BYTES:
                await to_thread.run_sync(form.feed, bytes(piece), limiter=threads)
                piece.clear()
        await to_thread.run_sync(form.feed, bytes(piece), limiter=threads)
        form.close()
        return await to_thread.run_sync(finish, limiter=threads)
    finally:
        with CancelScope(shield=True):
            await to_thread.run_sync(to.abort, limiter=threads)


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except FormParserError as problem:
        raise InvalidRequest(f"The form cannot be read: {problem}", code="invalid_form") from None
