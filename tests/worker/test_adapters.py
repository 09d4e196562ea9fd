"""Adapters on disk: fetched once, checked, and never the wrong ones."""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.chat import Adapter
from core.storage.store import FolderBlobs
from worker.serving.adapters import AdapterDamaged, AdapterFolders, AdapterGone, DiskBudget


class CountingBlobs(FolderBlobs):
    reads = 0

    def open(self, key: str, **options: int) -> Iterator[bytes]:
        self.reads += 1
        return super().open(key, **options)


@pytest.fixture
def blobs(tmp_path: Path) -> CountingBlobs:
    return CountingBlobs(tmp_path / "blobs")


@pytest.fixture
def store(blobs: CountingBlobs) -> Callable[..., Adapter]:
    def store(prefix: str, weights: bytes, damaged: bool = False) -> Adapter:
        files = [
            {"name": name, "bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
            for name in ("adapter_config.json", "adapter_model.safetensors", "trainer.pt")
        ]
        for file in files[:2]:
            blobs.put_bytes(f"{prefix}/{file['name']}", b"damaged" if damaged else weights)
        manifest = json.dumps({"format": 1, "files": files}).encode()
        blobs.put_bytes(f"{prefix}/manifest.json", manifest)
        return Adapter(prefix=prefix, manifest_sha256=hashlib.sha256(manifest).hexdigest())

    return store


def weights_in(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def test_an_adapter_is_fetched_once_however_many_ask(
    blobs: CountingBlobs, store: Callable[..., Adapter], tmp_path: Path
) -> None:
    folders, adapter = AdapterFolders(blobs, tmp_path / "cache"), store("a", b"one")
    threads = [threading.Thread(target=folders.folder, args=(adapter,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert weights_in(folders.folder(adapter)) == b"one"
    assert blobs.reads == 3  # the manifest and two files; not what only the trainer needs


def test_new_weights_under_an_old_prefix_are_another_adapter(
    blobs: CountingBlobs, store: Callable[..., Adapter], tmp_path: Path
) -> None:
    folders = AdapterFolders(blobs, tmp_path / "cache")
    old = store("a", b"old")
    folders.folder(old)
    new = store("a", b"new")

    assert weights_in(folders.folder(new)) == b"new"
    assert weights_in(folders.folder(old)) == b"old"


@pytest.mark.parametrize("what", ["overwritten", "damaged", "deleted"])
def test_what_is_not_the_right_adapter_is_not_kept(
    blobs: CountingBlobs, store: Callable[..., Adapter], tmp_path: Path, what: str
) -> None:
    adapter = store("a", b"old", damaged=what == "damaged")
    if what == "overwritten":
        store("a", b"new")
    if what == "deleted":
        blobs.delete_prefix("a/")

    with pytest.raises(AdapterDamaged if what == "damaged" else AdapterGone):
        AdapterFolders(blobs, tmp_path / "cache").folder(adapter)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_one_that_was_not_asked_for_the_longest_goes_first(
    blobs: CountingBlobs, store: Callable[..., Adapter], tmp_path: Path
) -> None:
    folders = AdapterFolders(blobs, tmp_path / "cache", max_folders=2)
    a, b, c = (store(name, name.encode()) for name in "abc")
    for adapter in (a, b, a, c):
        folders.folder(adapter)

    assert {folder.name for folder in (tmp_path / "cache").iterdir()} == {
        a.manifest_sha256,
        c.manifest_sha256,
    }


def test_adapters_that_queued_requests_may_still_read_are_kept(
    blobs: CountingBlobs, store: Callable[..., Adapter], tmp_path: Path
) -> None:
    folders = AdapterFolders(blobs, tmp_path / "cache", max_folders=1, spared_seconds=60.0)
    a, b, c, d = (store(name, name.encode()) for name in "abcd")
    for adapter in (a, b, c):
        folders.folder(adapter)
    assert len(list((tmp_path / "cache").iterdir())) == 3

    for adapter in (a, b):
        os.utime(tmp_path / "cache" / adapter.manifest_sha256, (1.0, 1.0))
    folders.folder(d)

    assert {folder.name for folder in (tmp_path / "cache").iterdir()} == {
        c.manifest_sha256,
        d.manifest_sha256,
    }


def test_caches_of_one_volume_make_room_before_they_download_whatever_their_number(
    blobs: CountingBlobs, store: Callable[..., Adapter], tmp_path: Path
) -> None:
    """The most recently used stay, and one that is larger than the budget is the only one."""
    budget = DiskBudget(25)
    small = AdapterFolders(blobs, tmp_path / "small", spared_seconds=60.0, budget=budget)
    large = AdapterFolders(blobs, tmp_path / "large", budget=budget)
    a, b, c, d = (store(name, name.encode() * 5) for name in "abcd")  # 10 bytes of two files each
    for cache, adapter in ((small, a), (large, b), (small, a), (small, c)):
        cache.folder(adapter)

    assert [cache.found(one) is not None for cache, one in ((small, a), (large, b), (small, c))] == [
        True, False, True,
    ]  # fmt: skip
    small.folder(store("e", b"e" * 20))
    assert len(list((tmp_path / "small").iterdir())) == 1
    large.folder(d)
    assert list((tmp_path / "small").iterdir()) == []


@pytest.mark.parametrize(
    ("left", "room"), [(".gone-1", 2), (".part-1", 1)], ids=["removed", "another download"]
)
def test_bytes_of_hidden_folders_count_against_the_budget(
    blobs: CountingBlobs, store: Callable[..., Adapter], tmp_path: Path, left: str, room: int
) -> None:
    """What a killed process was removing goes first; a download of another process may still be running."""
    folders = AdapterFolders(blobs, tmp_path / "cache", budget=DiskBudget(25))
    (tmp_path / "cache" / left).mkdir(parents=True)
    (tmp_path / "cache" / left / "weights").write_bytes(b"1234567")

    for name in "abc":
        folders.folder(store(name, name.encode() * 5))  # 10 bytes of two files

    cached = [one.name for one in (tmp_path / "cache").iterdir() if not one.name.startswith(".")]
    assert len(cached) == room


def test_one_that_is_asked_for_while_it_is_removed_is_fetched_again(
    blobs: CountingBlobs, store: Callable[..., Adapter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, rmtree = AdapterFolders(blobs, tmp_path / "cache", max_folders=1), shutil.rmtree
    asked, meanwhile = threading.Event(), []
    old, new = store("a", b"old"), store("b", b"new")

    def remove(path: Any, **options: Any) -> None:
        if weights_of(path) == b"old" and not asked.is_set():
            asked.set()
            meanwhile.append(folders.folder(old))
        rmtree(path, **options)

    folders.folder(old)
    monkeypatch.setattr("core.set_aside.shutil.rmtree", remove)
    folders.folder(new)

    assert [weights_in(folder) for folder in meanwhile] == [b"old"]


def weights_of(folder: Path) -> bytes | None:
    return weights_in(folder) if (folder / "adapter_model.safetensors").exists() else None


def test_one_that_another_process_has_removed_is_fetched_again(
    blobs: CountingBlobs, store: Callable[..., Adapter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, adapter = AdapterFolders(blobs, tmp_path / "cache"), store("a", b"one")
    folder, utime = folders.folder(adapter), os.utime

    def removed_first(path: Any, *given: Any, **options: Any) -> None:
        if not gone:
            gone.append(path.rename(tmp_path / "gone"))
        utime(path, *given, **options)

    gone: list[Any] = []
    monkeypatch.setattr("worker.serving.adapters.os.utime", removed_first)

    assert weights_in(folders.folder(adapter)) == b"one"
    assert folder.exists() and gone


def test_what_a_killed_process_was_removing_goes_with_the_next_one(
    blobs: CountingBlobs, store: Callable[..., Adapter], tmp_path: Path
) -> None:
    folders = AdapterFolders(blobs, tmp_path / "cache")
    left = tmp_path / "cache" / ".gone-1"
    left.mkdir(parents=True)
    adapter = store("a", b"a")
    folders.folder(adapter)

    assert [folder.name for folder in (tmp_path / "cache").iterdir()] == [adapter.manifest_sha256]
