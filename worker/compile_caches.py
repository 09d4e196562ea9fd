"""Caches of compiled kernels, of all libraries in one folder, so that one volume keeps them when a pod is replaced.

A first step compiles for minutes; with these caches the next process that computes the same shapes on such a GPU does
not. Sizes that are part of a library's key have few values (worker/model/engine_sizes.py). Earlier versions of a
library and earlier models leave their kernels behind, so `prune` deletes what was not used for long: neither written
nor, where the volume records it, read. With `noatime` only writing counts.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from core.set_aside import remove_set_aside, set_aside
from core.units import GIB

log = logging.getLogger(__name__)

# The variable of each library, and its folder.
CACHES: Mapping[str, str] = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",  # torch.compile and FlexAttention
    "VLLM_CACHE_ROOT": "vllm",  # its torch.compile, and what it has found out about models
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",  # of the driver, which compiles PTX
}
# What grows without an end, and how deep in it a library writes and reads a thing as a whole. A file below is of that
# thing. The driver limits its cache by itself, and FlashInfer has one module for each kind of kernel.
PRUNED: Mapping[str, int] = {
    "triton": 1,
    "inductor": 2,
    "vllm/torch_compile_cache": 1,
    "vllm/torch_compile_cache/torch_aot_compile": 1,
}
MAX_AGE_SECONDS = 30 * 24 * 3600.0
SPARED_SECONDS = 3600.0  # since the last use: a process may be about to read the rest of it
MAX_BYTES = 32 * GIB
VOLUME_SHARE = 0.2  # other caches may be on the same volume
_PRUNING = threading.Lock()  # held while a thread of this process prunes


def place(folder: Path | None, environ: MutableMapping[str, str]) -> None:
    """Have this process and those that it starts use the folder. A library's own variable, if set, is kept.

    The libraries create their folders, so these belong to the user who compiles.
    """
    if folder is not None:
        for variable, name in CACHES.items():
            environ.setdefault(variable, str(folder.absolute() / name))


@dataclass(frozen=True, order=True)
class _Entry:
    used: float  # when, in seconds since the epoch
    bytes: int
    path: Path


def prune(folder: Path | None, *, max_bytes: int | None = None, now: float | None = None) -> None:
    """Delete compiled kernels that were not used for a month, and the least recently used beyond a limit.

    The libraries compile anew what they miss. Several processes may prune one folder. It reads the times of every file.

    Args:
        folder: of the setting. None: the libraries have their own, which may be others', and nothing is deleted.
        max_bytes: default: MAX_BYTES, or VOLUME_SHARE of the volume if that is less.
        now: seconds since the epoch; default: the time.
    """
    if folder is None or not folder.is_dir():
        return
    now = time.time() if now is None else now
    limit = (
        min(MAX_BYTES, int(VOLUME_SHARE * shutil.disk_usage(folder).total))
        if max_bytes is None
        else max_bytes
    )
    parents = list(_parents(folder))
    for parent in parents:
        remove_set_aside(parent)
    entries = sorted(entry for parent in parents for entry in _entries(parent))
    left = sum(entry.bytes for entry in entries)
    for entry in entries:
        age = now - entry.used
        if age > MAX_AGE_SECONDS or (left > limit and age > SPARED_SECONDS):
            log.info(
                "deleting compiled kernels that were not used for %.0f days: %s", age / 86400, entry.path
            )
            with suppress(OSError):  # another user owns it
                set_aside(entry.path)
            left -= entry.bytes
    for parent in parents:
        remove_set_aside(parent)


def prune_in_background(folder: Path | None, prune: Callable[[Path | None], None] = prune) -> None:
    """Prune in another thread, since it takes minutes on a network volume. Does nothing while such a thread runs."""
    if not _PRUNING.acquire(blocking=False):
        return

    def pruning() -> None:
        try:
            prune(folder)
        except Exception:
            log.exception("compiled kernels are not deleted; the next time is tomorrow or at the next start")
        finally:
            _PRUNING.release()

    threading.Thread(target=pruning, daemon=True, name="prune-compile-caches").start()


def _parents(folder: Path) -> Iterator[Path]:
    """The folders that contain the things of the caches."""
    for name, depth in PRUNED.items():
        yield from (folder / name).glob("/".join("*" * (depth - 1))) if depth > 1 else [folder / name]


def _entries(parent: Path) -> Iterator[_Entry]:
    """The things in a folder. Folders that are pruned themselves are not among them."""
    for path in parent.glob("*"):
        if not any(path.match(name) for name in PRUNED):
            with suppress(OSError):  # another process has deleted it, or owns it
                # Without folders: to list them counts as their use.
                files = [file.stat() for file in (path, *path.rglob("*")) if file.is_file()]
                used = max(
                    (max(file.st_mtime, file.st_atime) for file in files), default=path.stat().st_mtime
                )
                yield _Entry(used, sum(file.st_blocks * 512 for file in files), path)
