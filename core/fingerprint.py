"""Tell whether the files of a model have changed, without reading all of its weights."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

WHOLE_BYTES = 4 << 20  # smaller files are read whole: configs and tokenizers
BLOCKS, BLOCK_BYTES = 16, 64 << 10  # of a larger file: the first, the last, and some between


def of_folder(folder: Path) -> str:
    """A hash of the files of a folder; empty if they cannot be read, or change meanwhile.

    It has each file's name, size, contents or blocks of them, and times of modification and of the last change. Tools
    may set the former back (cp -p, rsync -t), but not the latter.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.iterdir()):
            if path.is_file():
                stat = path.stat()
                digest.update(repr((path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)).encode())
                digest.update(of_contents(path).encode())
    except OSError:
        return ""
    return digest.hexdigest()


def of_copies(folder: Path) -> str:
    """A hash of the files of a folder that copies of it on other machines share; empty if they cannot be read.

    It has each file's name, size, and contents or blocks of them (`of_contents`), and no times: other contents between
    the blocks have the same hash.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        parts = [(path.name, of_contents(path)) for path in files]
    except OSError:
        return ""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def of_contents(file: Path) -> str:
    """A hash of a file's size and contents, or of blocks of them. Raises OSError."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        digest.update(str(size).encode())
        for start, length in _blocks(size):
            opened.seek(start)
            digest.update(opened.read(length))
    return digest.hexdigest()


def conversion_of(gguf: Path, cache: Path) -> Path:
    """The folder that a GGUF file is converted to. By its contents: a replaced file may have the same size."""
    return cache / f"{gguf.stem}-{gguf.stat().st_size}-{of_contents(gguf)[:12]}"


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """The offset and length of each block."""
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    for number in range(BLOCKS):
        yield number * (size - BLOCK_BYTES) // (BLOCKS - 1), BLOCK_BYTES
