"""What is downloaded: bytes as they come, and files that are there when they are whole and not before."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import httpx2
import openai


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Write `path`: it appears, or replaces the file that was there, when the block has ended well.

    Raises:
        FileNotFoundError: its folder is not there.
    """
    if path.exists() and not path.is_file():  # a pipe, or /dev/null: these are written to, and never replaced
        with path.open("wb") as out:
            yield out
        return
    target = path.resolve()  # a link stays, and what it leads to is replaced
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {target.parent}.")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as out:
            yield out
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def chunks(response: httpx2.Response) -> Iterator[bytes]:
    """The body as it comes.

    Raises:
        openai.APIConnectionError: it ends before it is whole, or nothing comes any more.
    """
    try:
        yield from response.iter_bytes()
    except httpx2.RequestError as cause:
        raise openai.APIConnectionError(request=response.request) from cause


async def async_chunks(response: httpx2.Response) -> AsyncIterator[bytes]:
    """As `chunks`."""
    try:
        async for chunk in response.aiter_bytes():
            yield chunk
    except httpx2.RequestError as cause:
        raise openai.APIConnectionError(request=response.request) from cause
