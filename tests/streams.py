"""Streams of bytes for stores of blobs: whole ones, and one that breaks."""

from collections.abc import Iterator

MIB = 1 << 20


def megabytes(count: int) -> Iterator[bytes]:
    return (bytes([number % 256]) * MIB for number in range(count))


def breaks_after(count: int) -> Iterator[bytes]:
    yield from megabytes(count)
    raise ConnectionError("the client went away")
