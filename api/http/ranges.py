"""The header `Range` of a download (RFC 9110, section 14): one part of the bytes, as download tools resume with."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fastapi.responses import StreamingResponse

from core.errors import RangeNotSatisfiable

# Headers of a content that is made while it is sent, and may differ at the next request.
NO_RANGES = {"accept-ranges": "none"}

_RANGE = re.compile(r"bytes=\s*(\d{0,18})-(\d{0,18})\s*")


@dataclass(frozen=True)
class ByteRange:
    """The bytes from `start` to before `end` of a content of `size` bytes."""

    start: int
    end: int
    size: int

    @property
    def content_range(self) -> str:
        return f"bytes {self.start}-{self.end - 1}/{self.size}"

    def of(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield this part of the whole content, and read nothing after it."""
        at = 0
        for chunk in chunks:
            if piece := chunk[max(0, self.start - at) : self.end - at]:
                yield piece
            at += len(chunk)
            if at >= self.end and self.end < self.size:
                return


def requested_part(header: str | None, size: int, *, if_range: str | None, etag: str) -> ByteRange | None:
    """Return the part that a request asks for. None: the whole content.

    The RFC lets a server ignore the header: this one does for other units, malformed values, several ranges, and an
    If-Range that does not name the current content.

    Raises:
        RangeNotSatisfiable: the part begins after the last byte, or is empty.
    """
    found = _RANGE.fullmatch(header or "")
    if found is None or found[0].strip() == "bytes=-" or (if_range is not None and if_range != etag):
        return None
    first, last = found.groups()
    if not first:  # the last bytes
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), size if not last else min(size, int(last) + 1)
        if last and int(last) < start:
            return None
    if start >= end:
        raise RangeNotSatisfiable(size)
    return ByteRange(start, end, size)


def ranged_response(
    content: Iterator[bytes],
    part: ByteRange | None,
    *,
    size: int,
    etag: str,
    media_type: str,
    disposition: str,
) -> StreamingResponse:
    """Send the requested part of a content of `size` bytes, or all of it.

    Args:
        etag: in quotes, and another one for each other content, so that parts of two are never joined.
    """
    headers = {"accept-ranges": "bytes", "etag": etag, "content-disposition": disposition}
    if part is None:
        headers["content-length"] = str(size)
        return StreamingResponse(content, media_type=media_type, headers=headers)
    headers |= {"content-length": str(part.end - part.start), "content-range": part.content_range}
    return StreamingResponse(part.of(content), status_code=206, media_type=media_type, headers=headers)
