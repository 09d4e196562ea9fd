"""Downloads: chunks of a response, and files that appear only when complete."""

import errno
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import httpx2
import openai


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write `path` atomically: it appears, or replaces the existing file, when the block succeeds.

    Raises:
        FileNotFoundError: its folder does not exist.
        OSError: the file cannot be created, or not replaced; it names `path`.
    """
    if path.exists() and not path.is_file():  # pipes and /dev/null are written to directly
        with path.open("wb") as out:
            yield out
        return
    with _naming(path):
        target = path.resolve()  # keeps a symbolic link and replaces its target
    if not target.parent.is_dir():
        raise FileNotFoundError(f"No such folder: {target.parent}")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    with _naming(path):
        out = temporary.open("xb")  # never a file or a link that is already there
    try:
        with out:
            yield out
        with _naming(path):
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name this file in errors of its temporary one, and in those of a path that can be none."""
    try:
        yield
    except OSError as cause:
        raise OSError(cause.errno, cause.strerror, str(path)) from cause
    except RuntimeError as cause:  # of pathlib
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from cause
    except ValueError as cause:
        raise OSError(errno.EINVAL, str(cause), str(path)) from cause


def chunks(response: httpx2.Response) -> Iterator[bytes]:
    """The body in chunks.

    Raises:
        openai.APIConnectionError: the body is truncated or times out.
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
