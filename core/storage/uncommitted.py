"""Blobs that are stored before the transaction that adds their rows."""

from types import TracebackType
from typing import Self

from core.storage.store import BlobStore


class Uncommitted:
    """Deletes the blobs of rows that were not added, on `close` or when it is left.

    Call `keep` as the last statement within the transaction. A commit that seems to fail may have succeeded, because
    its acknowledgement can be lost: from then on the sweep of blobs without a row decides (core/storage/orphans.py).
    """

    def __init__(self, blobs: BlobStore, *keys: str) -> None:
        self._blobs = blobs
        self._keys = set(keys)

    def add(self, key: str) -> None:
        self._keys.add(key)

    def keep(self, *keys: str) -> None:
        """The transaction adds rows for these blobs. Keys of other blobs are ignored."""
        self._keys.difference_update(keys)

    def keep_all(self) -> None:
        self._keys.clear()

    def close(self) -> None:
        if self._keys:
            self._blobs.discard(*sorted(self._keys))
        self._keys.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
