"""The manifest of a checkpoint: which files it has, with their hashes. All readers of checkpoints check against it."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from pathlib import Path

from core.blobs import BlobCorrupt, BlobNotFound, BlobStore

MANIFEST = "manifest.json"


class Damaged(Exception):
    """An object of a checkpoint is missing, or its bytes are not those that were stored. The message is for users."""

    def __init__(self, file: str, *, missing: bool = False, unreadable: bool = False) -> None:
        if unreadable:
            super().__init__(f"{file} cannot be read (I/O error)")
        else:
            super().__init__(f"{file} is {'missing' if missing else 'not what was stored'}")
        self.file = file
        self.problem = "missing" if missing else "damaged"


@dataclass(frozen=True)
class ManifestFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    format: int
    files: tuple[ManifestFile, ...]


def read(blobs: BlobStore, prefix: str) -> Manifest:
    """The manifest of the checkpoint under `prefix`.

    Raises:
        Damaged: it is missing, or is no manifest.
    """
    try:
        return parse(blobs.read(f"{prefix}/{MANIFEST}"))
    except BlobNotFound:
        raise Damaged(MANIFEST, missing=True) from None
    except BlobCorrupt:
        raise Damaged(MANIFEST) from None
    except OSError as cause:
        if cause.errno != errno.EIO:  # a sector that the disk cannot read; anything else is about the store
            raise
        raise Damaged(MANIFEST, unreadable=True) from cause


def parse(content: bytes) -> Manifest:
    """Raise Damaged if this is not the text of a manifest."""
    try:
        fields = json.loads(content)
        files = [ManifestFile(one["name"], one["bytes"], one["sha256"]) for one in fields["files"]]
        manifest = Manifest(fields["format"], tuple(files))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(MANIFEST) from None
    texts = [text for file in manifest.files for text in (file.name, file.sha256)]
    if not all(isinstance(text, str) for text in texts) or not isinstance(manifest.format, int):
        raise Damaged(MANIFEST)
    return manifest


def download(blobs: BlobStore, prefix: str, file: ManifestFile, folder: Path) -> None:
    """Write one file of the checkpoint under `prefix` into a folder, checked against its hash.

    Raises:
        Damaged: it is missing, or has other bytes than the manifest says.
    """
    try:
        blobs.download(f"{prefix}/{file.name}", folder / file.name, sha256=file.sha256)
    except BlobNotFound:
        raise Damaged(file.name, missing=True) from None
    except (BlobCorrupt, ValueError):  # a name that is no key is not what was stored either
        raise Damaged(file.name) from None
