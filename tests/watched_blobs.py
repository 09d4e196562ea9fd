"""A store of blobs that remembers what it was asked for."""

from collections.abc import Iterator
from pathlib import Path

from core.storage.store import CHUNK_BYTES, BlobInfo, BlobWriter, FolderBlobs


class WatchedBlobs(FolderBlobs):
    """`begun`: keys of writers; `written`: bytes of each write; `opened`: keys.

    While it is not `reachable`, nothing can be deleted; while it is not `writable`, nothing written.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun: list[str] = []
        self.written: list[int] = []
        self.opened: list[str] = []
        self.reachable = True
        self.writable = True

    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        if not self.writable:
            raise OSError("the store")
        self.begun.append(key)
        return _WatchedWriter(super().writer(key, if_absent=if_absent), self.written)

    def delete(self, key: str) -> None:
        if not self.reachable:
            raise TimeoutError("the store")
        super().delete(key)

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        self.opened.append(key)
        return super().open(key, chunk_size=chunk_size)


class _WatchedWriter(BlobWriter):
    def __init__(self, writer: BlobWriter, written: list[int]) -> None:
        self._writer, self._written = writer, written

    def write(self, data: bytes) -> None:
        self._written.append(len(data))
        self._writer.write(data)

    def commit(self) -> BlobInfo:
        return self._writer.commit()

    def abort(self) -> None:
        self._writer.abort()
