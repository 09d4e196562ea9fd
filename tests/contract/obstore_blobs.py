"""A second BlobStore, on obstore: it shows that the contract asks for behavior and not for our classes."""

from collections.abc import Iterator
from hashlib import sha256
from tempfile import SpooledTemporaryFile
from typing import IO

import obstore
from obstore.exceptions import AlreadyExistsError, NotFoundError
from obstore.store import ObjectStore

from core.storage.store import (
    CHUNK_BYTES,
    BlobEntry,
    BlobExists,
    BlobInfo,
    BlobNotFound,
    BlobStore,
    BlobWriter,
    check_key,
    check_prefix,
)

IN_MEMORY_BYTES = 8 << 20


class ObstoreBlobs(BlobStore):
    """Blobs as objects of any store that obstore opens: memory, a folder, S3, GCS, or Azure.

    A put is spooled to a temporary file and sent by `commit`, so an unfinished one leaves nothing in the store.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        check_key(key)
        return _SpooledWriter(self._store, key, if_absent)

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        check_key(key)
        try:
            found = obstore.get(self._store, key)
        except (NotFoundError, FileNotFoundError):
            raise BlobNotFound(key) from None
        return _rechunked((bytes(chunk) for chunk in found.stream(min_chunk_size=chunk_size)), chunk_size)

    def size(self, key: str) -> int:
        check_key(key)
        try:
            return obstore.head(self._store, key)["size"]
        except (NotFoundError, FileNotFoundError):
            raise BlobNotFound(key) from None

    def entries(self, prefix: str) -> Iterator[BlobEntry]:
        check_prefix(prefix)
        folder = prefix[: prefix.rfind("/") + 1]
        return (
            BlobEntry(found["path"], found["size"], found["last_modified"].timestamp())
            for page in obstore.list(self._store, prefix=folder or None)
            for found in page
            if found["path"].startswith(prefix)
        )

    def url(self, key: str) -> str:
        return f"{self._store}/{key}"

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            obstore.delete(self._store, key)
        except (NotFoundError, FileNotFoundError):
            return

    def abort_stale_uploads(self, older_than: float, *, dry_run: bool = False) -> int:
        return 0


class _SpooledWriter(BlobWriter):
    def __init__(self, store: ObjectStore, key: str, if_absent: bool) -> None:
        self._store, self._key, self._if_absent = store, key, if_absent
        self._file: IO[bytes] = SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115 - `commit` or `abort` closes it
        self._size, self._sha256 = 0, sha256()

    def write(self, data: bytes) -> None:
        self._size += len(data)
        self._sha256.update(data)
        self._file.write(data)

    def commit(self) -> BlobInfo:
        self._file.seek(0)
        try:
            # Only a put in one piece can be conditional.
            if self._if_absent:
                obstore.put(self._store, self._key, self._file, mode="create", use_multipart=False)
            else:
                obstore.put(self._store, self._key, self._file)
        except AlreadyExistsError:
            raise BlobExists(self._key) from None
        finally:
            self._file.close()
        return BlobInfo(self._key, self._size, self._sha256.hexdigest())

    def abort(self) -> None:
        self._file.close()


def _rechunked(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= size:
            yield bytes(buffer[:size])
            del buffer[:size]
    if buffer:
        yield bytes(buffer)
