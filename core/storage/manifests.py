"""The manifest of a checkpoint: its files with their hashes, against which every reader verifies them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from core.storage.store import BlobCorrupt, BlobNotFound, BlobStore, is_bad_sector

MANIFEST = "manifest.json"
# The adapters of earlier policies, with which a run that resumes samples what was in flight.
EARLIER = "earlier_adapters.pt"
# Only the trainer can use its state, the master weights, moments and the reference, which are larger than the rest.
_TRAINERS = re.compile(r"trainer\.pt|masters\.pt|manifest\.json|(masters|moments|reference)-\d+\.safetensors")


class Damaged(Exception):
    """An object of a checkpoint is missing or does not match its hash. The message is for users."""

    def __init__(self, file: str, *, missing: bool = False, unreadable: bool = False) -> None:
        if unreadable:
            super().__init__(f"{file} cannot be read (I/O error)")
        else:
            super().__init__(f"{file} is {'missing' if missing else 'not the stored content'}")
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
    resume_files: tuple[ManifestFile, ...] = ()  # for a run that resumes; deleted when the job has succeeded


def is_trainers(name: str) -> bool:
    """Whether a file of a checkpoint is for training further alone."""
    return _TRAINERS.fullmatch(name) is not None


def read(blobs: BlobStore, prefix: str) -> Manifest:
    """Read the manifest of the checkpoint under `prefix`.

    Raises:
        Damaged: the manifest is missing or invalid.
    """
    try:
        return parse(blobs.read(f"{prefix}/{MANIFEST}"))
    except BlobNotFound:
        raise Damaged(MANIFEST, missing=True) from None
    except BlobCorrupt:
        raise Damaged(MANIFEST) from None
    except OSError as cause:
        if not is_bad_sector(cause):
            raise
        raise Damaged(MANIFEST, unreadable=True) from cause


def parse(content: bytes) -> Manifest:
    """Parse a manifest; raise Damaged if it is invalid."""
    try:
        fields = json.loads(content)
        files, resume_files = (
            tuple(ManifestFile(entry["name"], entry["bytes"], entry["sha256"]) for entry in entries)
            for entries in (fields["files"], fields.get("resume_files", []))
        )
        manifest = Manifest(fields["format"], files, resume_files)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(MANIFEST) from None
    texts = [text for file in (*files, *resume_files) for text in (file.name, file.sha256)]
    if not all(isinstance(text, str) for text in texts) or not isinstance(manifest.format, int):
        raise Damaged(MANIFEST)
    return manifest


def is_whole_model(content: bytes) -> bool:
    """Whether a checkpoint's manifest lists all weights of a model, and no adapter. False for an invalid manifest."""
    try:
        return any(file.name == "config.json" for file in parse(content).files)
    except Damaged:
        return False


def download(blobs: BlobStore, prefix: str, file: ManifestFile, folder: Path) -> None:
    """Download one file of the checkpoint under `prefix` into a folder, verified against its hash.

    Raises:
        Damaged: the file is missing or does not match the manifest.
    """
    try:
        blobs.download(f"{prefix}/{file.name}", folder / file.name, sha256=file.sha256)
    except BlobNotFound:
        raise Damaged(file.name, missing=True) from None
    except (BlobCorrupt, ValueError):  # a name that is not a key cannot have been stored
        raise Damaged(file.name) from None
