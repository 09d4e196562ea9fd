"""Local cache of adapters and of whole models, downloaded from the blob store on first use.

A folder's name is the hash of its checkpoint's manifest, which contains the hash of every file. A retrained checkpoint
therefore has another folder, and an existing folder is always valid.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from core.chat import Adapter
from core.model_templates import CHAT_TEMPLATE
from core.scratch import scratch_folder
from core.set_aside import remove_set_aside, set_aside
from core.settings import Settings
from core.storage import manifests
from core.storage.manifests import MANIFEST, Damaged, is_trainers
from core.storage.store import BlobCorrupt, BlobNotFound, BlobStore
from worker.serving.serving_metrics import loading

log = logging.getLogger(__name__)

NEEDED = ("adapter_model.safetensors", "adapter_config.json", CHAT_TEMPLATE)
KEPT = 256
# Whole models, of gigabytes each.
MODELS_KEPT = 4
# A request that waits in vLLM's queue reads its adapter again when its turn comes, and vLLM's engine ends if the folder
# is gone. No request waits for so long.
SPARED_SECONDS = 3600.0


def folder_of_adapters(settings: Settings) -> Path:
    """The inference server's, with a folder for each adapter."""
    return (settings.data_dir / "adapters").resolve()


class AdapterGone(Exception):
    """The adapter was deleted from the blob store, or replaced by another one."""


class AdapterDamaged(Exception):
    """An object of the adapter is missing or damaged."""


class DiskBudget:
    """The most bytes that the folders of some caches may have together, which share a volume. 0: no limit.

    Kubernetes evicts a pod whose volume exceeds its size, with all of its requests, so the budget is kept even if that
    removes folders that AdapterFolders would spare.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.roots: list[Path] = []
        self._lock = threading.Lock()
        self._downloads: dict[Path, int] = {}  # the bytes that each folder will have

    @contextmanager
    def room(self, needed: int, scratch: Path) -> Iterator[None]:
        """Remove the least recently used folders until `needed` bytes have room, and reserve these for the context.

        Args:
            scratch: the folder of the download, beside those of the cache.
        """
        if not self.max_bytes:
            yield
            return
        with self._lock:
            self._downloads[scratch] = needed
            self._evict()
        try:
            yield
        finally:
            with self._lock:
                del self._downloads[scratch]

    def _evict(self) -> None:
        for root in self.roots:
            remove_set_aside(root)
        folders = sorted(one for root in self.roots for one in _by_use(root))
        excess = sum(self._downloads.values()) + sum(one.bytes for one in folders) - self.max_bytes
        # Downloads of other processes, running or killed, need their bytes, too.
        excess += sum(
            _bytes(one) for root in self.roots for one in _hidden(root) if one not in self._downloads
        )
        for one in folders:
            if excess <= 0:
                break
            if time.time_ns() - one.used_ns < SPARED_SECONDS * 1e9:
                log.warning(
                    "removing %s, which requests may still use: more adapters are in use than "
                    "REGRAFT_ADAPTER_CACHE_BYTES, %d, has room for; enlarge the volume",
                    one.folder,
                    self.max_bytes,
                )
            excess -= one.bytes
            set_aside(one.folder)
        for root in self.roots:
            remove_set_aside(root)


@dataclass(frozen=True, order=True)
class _Cached:
    """A folder of a cache; the least recently used one is the first in order."""

    used_ns: int
    folder: Path

    @property
    def bytes(self) -> int:
        return _bytes(self.folder)


def _by_use(root: Path) -> list[_Cached]:
    """The folders of a cache, the least recently used first."""
    cached = []
    for entry in os.scandir(root) if root.exists() else ():
        if not entry.name.startswith("."):
            with suppress(FileNotFoundError):  # another process has removed it
                cached.append(_Cached(entry.stat().st_mtime_ns, root / entry.name))
    return sorted(cached)


def _hidden(root: Path) -> list[Path]:
    """The folders that are being downloaded or removed, also those that a killed process left."""
    return (
        [root / entry.name for entry in os.scandir(root) if entry.name.startswith(".")]
        if root.exists()
        else []
    )


def _bytes(folder: Path) -> int:
    """The bytes of its files, as far as no other process removes them meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


class AdapterFolders:
    """An LRU cache of `max_folders` folders under `root`, all of adapters or all of whole models.

    It has more while they have been used in the last `spared_seconds`, but never more bytes than `budget`.
    """

    def __init__(
        self,
        blobs: BlobStore,
        root: Path,
        *,
        max_folders: int = KEPT,
        spared_seconds: float = 0.0,
        budget: DiskBudget | None = None,
    ) -> None:
        self.blobs = blobs
        self.root = root
        self.budget = DiskBudget(0) if budget is None else budget
        self.budget.roots.append(root)
        self.max_folders = max_folders
        self.spared_seconds = spared_seconds
        self._lock = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}

    def folder(self, adapter: Adapter) -> Path:
        """Return a folder that PEFT (of a whole model: transformers) and vLLM can load. Blocks during the download.

        Raises:
            AdapterGone: it was deleted from the blob store.
            AdapterDamaged: an object of it is missing or damaged.
        """
        target = self.root / adapter.manifest_sha256
        with self._lock:
            fetching = self._fetching.setdefault(target.name, threading.Lock())
        with fetching:  # one download per folder; concurrent callers wait
            fetched = False
            while not self._mark_used(target):
                with loading("weights" if adapter.is_whole else "adapter"):
                    self._fetch(adapter, target)
                fetched = True
        if fetched:
            self._evict()
        return target

    def found(self, adapter: Adapter) -> Path | None:
        """Return the folder if it is in the cache."""
        target = self.root / adapter.manifest_sha256
        return target if self._mark_used(target) else None

    def _mark_used(self, target: Path) -> bool:
        """Mark the folder as recently used. Returns False if it does not exist."""
        with self._lock:
            try:
                # Set mtime explicitly: file-system timestamps are too coarse for LRU.
                now = time.time_ns()
                os.utime(target, ns=(now, now))
            except FileNotFoundError:
                return False
            return True

    def _fetch(self, adapter: Adapter, target: Path) -> None:
        try:
            with scratch_folder(self.root) as scratch:
                manifest = self.blobs.read(f"{adapter.prefix}/{MANIFEST}")
                if hashlib.sha256(manifest).hexdigest() != adapter.manifest_sha256:
                    raise AdapterGone("it has been replaced by other weights")
                files = [
                    file
                    for file in manifests.parse(manifest).files
                    if (not is_trainers(file.name) if adapter.is_whole else file.name in NEEDED)
                ]
                with self.budget.room(sum(file.bytes for file in files), scratch):
                    for file in files:
                        manifests.download(self.blobs, adapter.prefix, file, scratch)
                    try:
                        scratch.rename(target)
                    except OSError:
                        if not target.exists():  # another process may have downloaded the same files
                            raise
        except BlobNotFound as cause:
            raise AdapterGone("its files have been deleted") from cause
        except (Damaged, BlobCorrupt) as cause:
            log.error("the checkpoint %s is damaged: %s", adapter.prefix, cause)
            found = cause if isinstance(cause, Damaged) else Damaged(MANIFEST)
            raise AdapterDamaged(f"{found}") from cause

    def _evict(self) -> None:
        """Evict the least recently used folders beyond `max_folders`, except those that are spared."""
        with self._lock:
            unused = time.time_ns() - int(self.spared_seconds * 1e9)
            for one in _by_use(self.root)[: -self.max_folders]:
                if one.used_ns > unused:
                    break
                set_aside(one.folder)
        remove_set_aside(self.root)
