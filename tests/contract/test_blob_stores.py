"""What any BlobStore must do. A new one is added to STORES and needs to pass these tests and nothing else."""

import itertools
import os
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from core.storage.store import BlobCorrupt, BlobExists, BlobNotFound, BlobStore, FolderBlobs, S3Blobs
from tests.contract.obstore_blobs import ObstoreBlobs
from tests.servers import SeaweedFS
from tests.streams import MIB, breaks_after, megabytes


def folder(request: pytest.FixtureRequest) -> BlobStore:
    tmp_path: Path = request.getfixturevalue("tmp_path")
    return FolderBlobs(tmp_path / "blobs")


def moto(request: pytest.FixtureRequest) -> BlobStore:
    return S3Blobs(request.getfixturevalue("bucket"), "some/prefix", client=request.getfixturevalue("s3"))


def seaweed(request: pytest.FixtureRequest) -> BlobStore:
    server: SeaweedFS = request.getfixturevalue("seaweed")
    return S3Blobs(server.new_bucket(), "some/prefix", client=server.client)


def memory(request: pytest.FixtureRequest) -> BlobStore:
    return ObstoreBlobs(MemoryStore())


# SeaweedFS is the S3 that takes its duties seriously; moto is the one that is always there.
STORES: dict[str, Callable[[pytest.FixtureRequest], BlobStore]] = {
    "folder": folder,
    "moto": moto,
    "seaweed": seaweed,
    "memory": memory,
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> BlobStore:
    return STORES[request.param](request)


def leftovers(store: BlobStore) -> int:
    """How many abandoned puts have left something where list() cannot see it."""
    return store.abort_stale_uploads(time.time() + 3600, dry_run=True)


@pytest.mark.parametrize("size", [0, 1, 3 * MIB, 8 * MIB, 8 * MIB + 1, 17 * MIB])
@pytest.mark.slow
def test_a_stream_comes_back_as_it_went_in(store: BlobStore, size: int) -> None:
    data = os.urandom(size)

    info = store.put_stream("files/a", (data[at : at + MIB] for at in range(0, size, MIB)))

    assert (info.key, info.size, info.sha256) == ("files/a", size, sha256(data).hexdigest())
    assert store.size("files/a") == size
    assert store.read("files/a") == data


def test_bytes_and_files_are_stored_like_streams(store: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(b"hello")

    from_file = store.put_file("x/file", tmp_path / "local")
    from_bytes = store.put_bytes("x/bytes", b"hello")

    assert from_file.sha256 == from_bytes.sha256 == sha256(b"hello").hexdigest()
    assert store.read("x/file") == store.read("x/bytes") == b"hello"


def test_reading_is_in_chunks_of_at_most_the_asked_size(store: BlobStore) -> None:
    store.put_bytes("a", b"abcdefgh")

    assert list(store.open("a", chunk_size=3)) == [b"abc", b"def", b"gh"]


def test_a_put_replaces_what_was_there(store: BlobStore) -> None:
    store.put_bytes("a", b"old and longer")
    store.put_bytes("a", b"new")

    assert store.read("a") == b"new"


def test_a_reader_is_not_disturbed_by_a_put(store: BlobStore) -> None:
    store.put_bytes("a", b"old")
    chunks = store.open("a")
    store.put_bytes("a", b"new")

    assert b"".join(chunks) == b"old"


def test_a_blob_that_arrives_bit_by_bit_is_there_when_it_is_committed(store: BlobStore) -> None:
    data = os.urandom(9 * MIB)
    writer = store.writer("files/a")
    for at in range(0, len(data), MIB):
        writer.write(data[at : at + MIB])
    assert list(store.list("")) == []

    info = writer.commit()
    writer.abort()  # too late

    assert (info.size, info.sha256) == (len(data), sha256(data).hexdigest())
    assert store.read("files/a") == data


@pytest.mark.parametrize("size", [1, 9 * MIB])
def test_a_blob_that_is_given_up_half_way_leaves_nothing(store: BlobStore, size: int) -> None:
    writer = store.writer("files/a")
    writer.write(b"x" * size)

    writer.abort()
    writer.abort()

    assert list(store.list("")) == []
    assert store.abort_stale_uploads(time.time() + 3600) == 0


def test_a_missing_blob_is_named_by_the_call_itself(store: BlobStore, tmp_path: Path) -> None:
    store.put_bytes("a/b", b"")
    for missing in ("nothing", "a", "a/b/c"):  # the last two: a folder, and a file taken for one
        for call in (store.open, store.read, store.size):
            with pytest.raises(BlobNotFound, match=missing):
                call(missing)
        with pytest.raises(BlobNotFound, match=missing):
            store.download(missing, tmp_path / "target")


@pytest.mark.parametrize("count", [1, 17])
@pytest.mark.slow
def test_if_absent_refuses_a_taken_key_and_keeps_what_is_there(store: BlobStore, count: int) -> None:
    store.put_stream("a", megabytes(count), if_absent=True)

    with pytest.raises(BlobExists, match="a"):
        store.put_stream("a", itertools.repeat(b"x" * MIB, count), if_absent=True)
    assert store.read("a") == b"".join(megabytes(count))
    assert leftovers(store) == 0


def test_of_many_at_once_exactly_one_wins(store: BlobStore) -> None:
    start = threading.Barrier(8)
    outcomes: list[str] = []

    def put(name: str) -> None:
        start.wait()
        try:
            store.put_bytes("manifest.json", name.encode(), if_absent=True)
            outcomes.append(name)
        except BlobExists:
            pass

    threads = [threading.Thread(target=put, args=[f"writer-{number}"]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [store.read("manifest.json").decode()] == outcomes


@pytest.mark.parametrize("count", [1, 20])
def test_a_stream_that_breaks_leaves_nothing(store: BlobStore, count: int) -> None:
    with pytest.raises(ConnectionError):
        store.put_stream("files/a", breaks_after(count))

    assert list(store.list("")) == []
    assert leftovers(store) == 0


def test_a_stream_that_breaks_leaves_the_old_blob(store: BlobStore) -> None:
    store.put_bytes("a", b"old")
    with pytest.raises(ConnectionError):
        store.put_stream("a", breaks_after(20))

    assert store.read("a") == b"old"


def test_list_finds_keys_by_prefix(store: BlobStore) -> None:
    keys = ["jobs/1-x/a", "jobs/1/a", "jobs/1/b/c", "jobs/10/a", "other"]
    for key in reversed(keys):
        store.put_bytes(key, b"")

    assert sorted(store.list("")) == keys
    assert sorted(store.list("jobs/1/")) == ["jobs/1/a", "jobs/1/b/c"]
    assert sorted(store.list("jobs/1")) == keys[:4]
    assert list(store.list("jobs/1/b/c")) == ["jobs/1/b/c"]
    assert list(store.list("nothing/")) == []


def test_deleting_twice_is_fine(store: BlobStore) -> None:
    store.put_bytes("a/b", b"")
    for key in ("a/b", "a/b", "a", "never/was"):
        store.delete(key)

    assert list(store.list("")) == []


def test_deleting_a_folder_is_not_a_thing(store: BlobStore) -> None:
    store.put_bytes("a/b", b"")
    store.delete("a")
    store.delete("a/b/c")

    assert list(store.list("")) == ["a/b"]


def test_a_name_is_free_again_once_everything_below_it_is_deleted(store: BlobStore) -> None:
    store.put_bytes("a/b/c", b"")
    store.delete("a/b/c")
    store.put_bytes("a", b"now a blob")

    assert list(store.list("")) == ["a"]


def test_delete_prefix_takes_what_is_below_it_and_nothing_else(store: BlobStore) -> None:
    for key in ("jobs/1/a", "jobs/1/b/c", "jobs/10/a"):
        store.put_bytes(key, b"")

    assert store.delete_prefix("jobs/1/") == 2
    assert store.delete_prefix("jobs/1/") == 0
    assert list(store.list("")) == ["jobs/10/a"]


@pytest.mark.parametrize("prefix", ["", "jobs/1", "/", "../"])
def test_delete_prefix_refuses_a_prefix_that_could_reach_further(store: BlobStore, prefix: str) -> None:
    store.put_bytes("jobs/10/a", b"")

    with pytest.raises(ValueError, match=r"must end in '/'|not a blob key"):
        store.delete_prefix(prefix)
    assert list(store.list("")) == ["jobs/10/a"]


def test_a_download_with_the_right_hash_arrives(store: BlobStore, tmp_path: Path) -> None:
    info = store.put_bytes("a", b"weights")
    store.download("a", tmp_path / "new" / "target", sha256=info.sha256)

    assert (tmp_path / "new" / "target").read_bytes() == b"weights"


def test_a_corrupt_download_is_detected_and_leaves_the_target_alone(store: BlobStore, tmp_path: Path) -> None:
    info = store.put_bytes("a", b"weights")
    store.put_bytes("a", b"w3ights")  # as if a bit had flipped
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "target").write_bytes(b"from before")

    with pytest.raises(BlobCorrupt, match=info.sha256):
        store.download("a", folder / "target", sha256=info.sha256)
    assert [path.name for path in folder.iterdir()] == ["target"]
    assert (folder / "target").read_bytes() == b"from before"


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/..", ".", "a/./b", "a\0b", "a\nb"]
)
def test_bad_keys_are_refused_everywhere(store: BlobStore, key: str, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.put_bytes(key, b""),
        lambda: store.open(key),
        lambda: store.size(key),
        lambda: store.delete(key),
        lambda: store.download(key, tmp_path / "target"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="not a blob key"):
            call()


@pytest.mark.parametrize("key", ["a..b/...", "with space", "größe/数", "tmp/a", ".hidden", "%2e%2e/a?b#c"])
def test_unusual_keys_are_just_keys(store: BlobStore, key: str) -> None:
    store.put_bytes(key, b"x")

    assert store.read(key) == b"x"
    assert list(store.list("")) == [key]


@pytest.mark.parametrize("prefix", ["/a", "../", "a//", "a/../b"])
def test_a_bad_prefix_is_refused_by_the_call_itself(store: BlobStore, prefix: str) -> None:
    with pytest.raises(ValueError, match="not a blob key"):
        store.list(prefix)


def test_entries_tell_size_and_age(store: BlobStore) -> None:
    began = time.time()
    store.put_bytes("a/2", b"four")
    store.put_bytes("a/1", b"")
    store.put_bytes("b", b"x")

    entries = sorted(store.entries("a/"), key=lambda entry: entry.key)

    assert [(entry.key, entry.size) for entry in entries] == [("a/1", 0), ("a/2", 4)]
    assert all(began - 2 < entry.modified < time.time() + 2 for entry in entries)  # S3 counts whole seconds


@pytest.mark.parametrize("count", [0, 3, 1001])
def test_many_are_deleted_at_once(store: BlobStore, count: int) -> None:
    keys = [f"some/{number}" for number in range(count)]
    for key in keys[:2]:
        store.put_bytes(key, b"")
    store.put_bytes("other", b"")

    store.delete_many(keys)

    assert list(store.list("")) == ["other"]


def test_puts_that_never_ended_are_removed_once_they_are_old(store: BlobStore) -> None:
    """A store in which nothing is left of them has nothing to remove."""
    killed = store.writer("files/a")
    killed.write(b"x" * 9 * MIB)

    assert store.abort_stale_uploads(0.0) == 0  # none began before 1970
    left = leftovers(store)
    assert left == leftovers(store)  # a dry run removes nothing
    assert store.abort_stale_uploads(time.time() + 3600) == left
    assert leftovers(store) == 0
    assert list(store.list("")) == []
