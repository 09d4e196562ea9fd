"""Adapters on this machine's disk, fetched from the blob store when they are first asked for.

A folder is named by the hash of its checkpoint's manifest, which has the hash of every file in it: what was trained
again has another name, and a folder that is there is right.
"""

import hashlib
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path

from core.blobs import BlobCorrupt, BlobNotFound, BlobStore
from core.chat import Adapter
from worker.answering import loading

MANIFEST = "manifest.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_config.json")
KEPT = 256


class AdapterGone(Exception):
    """The blob store no longer has the adapter, or has another one in its place."""


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
        """
        target = self.root / adapter.manifest_sha256
        with self._lock:
            fetching = self._fetching.setdefault(target.name, threading.Lock())
        with fetching:  # who comes second waits for the first one's download
            if not target.exists():
                with loading("adapter"):
                    self._fetch(adapter, target)
                self._evict()
        os.utime(target)
        return target

    def _fetch(self, adapter: Adapter, target: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=self.root, prefix=".part-"))
        try:
            manifest = self.blobs.read(f"{adapter.prefix}/{MANIFEST}")
            if hashlib.sha256(manifest).hexdigest() != adapter.manifest_sha256:
                raise AdapterGone(f"{adapter.prefix} holds other weights than those that were asked for")
            for file in json.loads(manifest)["files"]:
                if file["name"] in WEIGHTS:
                    key = f"{adapter.prefix}/{file['name']}"
                    self.blobs.download(key, scratch / file["name"], sha256=file["sha256"])
            try:
                scratch.rename(target)
            except OSError:
                if not target.exists():  # otherwise another process was first; its folder is as good
                    raise
        except (BlobNotFound, BlobCorrupt) as cause:
            raise AdapterGone(f"the weights in {adapter.prefix} are gone or damaged") from cause
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _evict(self) -> None:
        folders = [one for one in self.root.iterdir() if not one.name.startswith(".")]
        folders.sort(key=lambda one: one.stat().st_mtime)
        for folder in folders[: -self.kept]:
            shutil.rmtree(folder, ignore_errors=True)
