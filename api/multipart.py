"""multipart/form-data read while it arrives: nothing is kept that the caller did not ask for."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from anyio import from_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from core.errors import InvalidRequest, PayloadTooLarge

Kind = Literal["begin", "data", "end", "field", "value", "header_end", "headers_end", "form_end"]
Event = tuple[Kind, bytes]


@dataclass(frozen=True)
class FormPart:
    """One field of the form. Read `chunks` before the next part is asked for; the rest of them is skipped."""

    name: str
    filename: str | None
    chunks: Iterator[bytes]

    def text(self, most_bytes: int = 1024) -> str:
        value = b""
        for chunk in self.chunks:
            value += chunk
            if len(value) > most_bytes:
                message = f"The form field '{self.name}' is longer than {most_bytes} bytes."
                raise InvalidRequest(message, param=self.name)
        return value.decode("utf-8", "replace")


def form_of(request: Request) -> Iterator[FormPart]:
    """The parts of a request's body, to be read in a thread of its own, where writing may take its time."""
    body = request.stream()

    def chunks() -> Iterator[bytes]:
        # The next piece is fetched when this one is written, so a client is never faster than the store, and
        # there is never more than a piece in memory.
        while chunk := from_thread.run(anext, body, b""):
            yield chunk

    return read_form(request.headers.get("content-type", ""), chunks())


def at_most(limit: int, part: FormPart) -> Iterator[bytes]:
    """What the part holds; PayloadTooLarge as soon as that is more than `limit` bytes."""
    received = 0
    for chunk in part.chunks:
        received += len(chunk)
        if received > limit:
            message = f"The {part.name} is larger than the maximum of {limit} bytes."
            raise PayloadTooLarge(message, param=part.name)
        yield chunk


def read_form(content_type: str, chunks: Iterable[bytes]) -> Iterator[FormPart]:
    """The parts of a body in their order.

    Raises:
        InvalidRequest: it is not a form, or ends before the form does.
    """
    media_type, options = parse_options_header(content_type)
    if media_type != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidRequest("Send the file as multipart/form-data.", code="invalid_content_type")
    events = _events(options[b"boundary"], chunks)
    headers: dict[bytes, bytes] = {}
    field = value = b""
    for kind, data in events:
        if kind == "begin":
            headers = {}
        elif kind == "field":
            field += data
        elif kind == "value":
            value += data
        elif kind == "header_end":
            headers[field.lower()] = value
            field = value = b""
        elif kind == "headers_end":
            part = _part(headers, _data(events))
            yield part
            for _ in part.chunks:
                pass
        elif kind == "form_end":
            return


def _part(headers: dict[bytes, bytes], chunks: Iterator[bytes]) -> FormPart:
    _, options = parse_options_header(headers.get(b"content-disposition", b""))
    if b"name" not in options:
        raise InvalidRequest("A part of the form has no name.", code="invalid_form")
    filename = options.get(b"filename")
    name = options[b"name"].decode("utf-8", "replace")
    return FormPart(name, None if filename is None else filename.decode("utf-8", "replace"), chunks)


def _data(events: Iterator[Event]) -> Iterator[bytes]:
    for kind, data in events:
        if kind == "end":
            return
        yield data


def _events(boundary: bytes, chunks: Iterable[bytes]) -> Iterator[Event]:
    """The parser calls back; this turns its calls into a sequence that can be waited for."""
    found: list[Event] = []

    def note(kind: Kind) -> None:
        found.append((kind, b""))

    def keep(kind: Kind, data: bytes, start: int, end: int) -> None:
        found.append((kind, data[start:end]))

    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": lambda: note("begin"),
                "on_header_field": lambda data, start, end: keep("field", data, start, end),
                "on_header_value": lambda data, start, end: keep("value", data, start, end),
                "on_header_end": lambda: note("header_end"),
                "on_headers_finished": lambda: note("headers_end"),
                "on_part_data": lambda data, start, end: keep("data", data, start, end),
                "on_part_end": lambda: note("end"),
                "on_end": lambda: note("form_end"),
            },
        )
        for chunk in chunks:
            parser.write(chunk)
            yield from found
            found.clear()
    except FormParserError as problem:
        raise InvalidRequest(f"The form cannot be read: {problem}", code="invalid_form") from None
    raise InvalidRequest("The request ended in the middle of the form.", code="invalid_form")
