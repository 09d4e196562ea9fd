"""Adapters on this machine's disk, fetched from the blob store when they are first asked for.

A folder is named by the hash of its checkpoint's manifest, which has the hash of every file in it: what was trained
again has another name, and a folder that is there is right.
"""

import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from core import manifests
from core.blobs import BlobCorrupt, BlobNotFound, BlobStore
from core.chat import Adapter
from core.manifests import MANIFEST, Damaged
from worker.answering import loading

log = logging.getLogger(__name__)

CHAT_TEMPLATE = "chat_template.jinja"  # as transformers saves it with a tokenizer
NEEDED = ("adapter_model.safetensors", "adapter_config.json", CHAT_TEMPLATE)
KEPT = 256


class AdapterGone(Exception):
    """The blob store no longer has the adapter, or has another one in its place."""


class AdapterDamaged(Exception):
    """An object of the adapter is missing or is not what was stored."""


class AdapterFolders:
    """At most `kept` folders under `root`; the one that was not asked for the longest goes first."""

    def __init__(self, blobs: BlobStore, root: Path, *, kept: int = KEPT) -> None:
        self.blobs = blobs
        self.root = root
        self.kept = kept
        self._lock = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}

    def folder(self, adapter: Adapter) -> Path:
        """A folder that PEFT and vLLM load. Blocks while it is downloaded.

        Raises:
            AdapterGone: it is not in the blob store any more.
            AdapterDamaged: it is, and some of it is missing or damaged.
        """
        target = self.root / adapter.manifest_sha256
        with self._lock:
            fetching = self._fetching.setdefault(target.name, threading.Lock())
        with fetching:  # who comes second waits for the first one's download
            fetched = False
            while not self._taken(target):
                with loading("adapter"):
                    self._fetch(adapter, target)
                fetched = True
        if fetched:
            self._evict()
        return target

    def found(self, adapter: Adapter) -> Path | None:
        """The folder, if it is there."""
        target = self.root / adapter.manifest_sha256
        return target if self._taken(target) else None

    def _taken(self, target: Path) -> bool:
        """Make it the last one to go. False: it is not there, or not any more."""
        with self._lock:
            try:
                # Ours: the system's own goes on in jumps, by which two could be as old as each other.
                now = time.time_ns()
                os.utime(target, ns=(now, now))
            except FileNotFoundError:
                return False
            return True

    def _fetch(self, adapter: Adapter, target: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=self.root, prefix=".part-"))
        try:
            manifest = self.blobs.read(f"{adapter.prefix}/{MANIFEST}")
            if hashlib.sha256(manifest).hexdigest() != adapter.manifest_sha256:
                raise AdapterGone("other weights are in the place of those that were asked for")
            for file in manifests.parse(manifest).files:
                if file.name in NEEDED:
                    manifests.download(self.blobs, adapter.prefix, file, scratch)
            try:
                scratch.rename(target)
            except OSError:
                if not target.exists():  # otherwise another process was first; its folder is as good
                    raise
        except BlobNotFound as cause:
            raise AdapterGone("its files are gone") from cause
        except (Damaged, BlobCorrupt) as cause:
            log.error("the checkpoint %s is damaged: %s", adapter.prefix, cause)
            found = cause if isinstance(cause, Damaged) else Damaged(MANIFEST)
            raise AdapterDamaged(f"{found}") from cause
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _evict(self) -> None:
        """Rename before removing: whoever asks meanwhile has either kept a folder or finds none, never half of one."""
        with self._lock:
            found = [one for one in os.scandir(self.root) if not one.name.startswith(".")]
            if len(found) <= self.kept:
                return
            ages = {}
            for one in found:
                with suppress(FileNotFoundError):  # another process has removed it
                    ages[one.name] = one.stat().st_mtime_ns
            for name in sorted(ages, key=lambda name: ages[name])[: -self.kept]:
                with suppress(FileNotFoundError):
                    (self.root / name).rename(self.root / f".gone-{uuid.uuid4().hex}")
        for gone in self.root.glob(".gone-*"):  # and what a process that was killed had not come to
            shutil.rmtree(gone, ignore_errors=True)
