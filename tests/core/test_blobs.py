import itertools
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from core.storage.store import (
    BREAKS_IN_A_ROW,
    BlobCorrupt,
    BlobExists,
    BlobNotFound,
    BlobStore,
    FolderBlobs,
    S3Blobs,
    open_blobs,
    s3_client,
)
from tests.flaky_s3 import FlakyS3
from tests.servers import SeaweedFS

MIB = 1 << 20
BUCKETS = (f"bucket-{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def s3_client_of_all(s3_endpoint: str) -> Any:
    # A session of its own, since boto3's default one remembers the first credentials it saw.
    return boto3.Session("test", "test").client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")


@pytest.fixture
def s3(s3_client_of_all: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plain client, to look behind the store; its credentials are the ones open_blobs finds, too."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return s3_client_of_all


@pytest.fixture
def bucket(s3: Any) -> str:
    name = next(BUCKETS)
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture
def s3_store(s3: Any, bucket: str) -> S3Blobs:
    return S3Blobs(bucket, "some/prefix", client=s3)


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderBlobs:
    return FolderBlobs(tmp_path / "blobs")


@pytest.fixture
def seaweed_store(seaweed: SeaweedFS) -> S3Blobs:
    return S3Blobs(seaweed.new_bucket(), "some/prefix", client=seaweed.client)


# SeaweedFS is the S3 that takes its duties seriously; moto is the one that is always there.
@pytest.fixture(params=["folder", "s3", "seaweed"])
def store(request: pytest.FixtureRequest) -> BlobStore:
    chosen: BlobStore = request.getfixturevalue(f"{request.param}_store")
    return chosen


def megabytes(count: int) -> Iterator[bytes]:
    return (bytes([number % 256]) * MIB for number in range(count))


def breaks_after(count: int) -> Iterator[bytes]:
    yield from megabytes(count)
    raise ConnectionError("the client went away")


class Request:
    """What a client under test calls, after `before` has had its turn."""

    def __init__(self, client: Any, **before: Callable[..., None]) -> None:
        self._client = client
        self._before = before

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name not in self._before:
            return call

        def called(**arguments: Any) -> Any:
            self._before[name](arguments)
            return call(**arguments)

        return called


# What goes in comes out


@pytest.mark.parametrize("size", [0, 1, 3 * MIB, 8 * MIB, 8 * MIB + 1, 17 * MIB])
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


def test_a_stream_is_never_whole_in_memory(folder_store: FolderBlobs) -> None:
    tracemalloc.start()
    try:
        folder_store.put_stream("big", megabytes(64))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert folder_store.size("big") == 64 * MIB
    assert peak < 32 * MIB


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


# What is not there


def test_a_missing_blob_is_named_by_the_call_itself(store: BlobStore, tmp_path: Path) -> None:
    store.put_bytes("a/b", b"")
    for missing in ("nothing", "a", "a/b/c"):  # the last two: a folder, and a file taken for one
        for call in (store.open, store.read, store.size):
            with pytest.raises(BlobNotFound, match=missing):
                call(missing)
        with pytest.raises(BlobNotFound, match=missing):
            store.download(missing, tmp_path / "target")


def test_a_missing_bucket_is_not_a_missing_blob(s3: Any) -> None:
    """Or a wrong setting would look like lost data."""
    with pytest.raises(s3.exceptions.NoSuchBucket):
        S3Blobs("no-such-bucket", client=s3).open("a")


# if_absent


@pytest.mark.parametrize("count", [1, 17])
def test_if_absent_refuses_a_taken_key_and_keeps_what_is_there(store: BlobStore, count: int) -> None:
    store.put_stream("a", megabytes(count), if_absent=True)

    with pytest.raises(BlobExists, match="a"):
        store.put_stream("a", itertools.repeat(b"x" * MIB, count), if_absent=True)
    assert store.read("a") == b"".join(megabytes(count))
    assert leftovers(store) == []


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


# Failure half way


@pytest.mark.parametrize("count", [1, 20])
def test_a_stream_that_breaks_leaves_nothing(store: BlobStore, count: int) -> None:
    with pytest.raises(ConnectionError):
        store.put_stream("files/a", breaks_after(count))

    assert list(store.list("")) == []
    assert leftovers(store) == []


def test_a_stream_that_breaks_leaves_the_old_blob(store: BlobStore) -> None:
    store.put_bytes("a", b"old")
    with pytest.raises(ConnectionError):
        store.put_stream("a", breaks_after(20))

    assert store.read("a") == b"old"


def test_a_process_killed_half_way_leaves_nothing_under_any_key(tmp_path: Path) -> None:
    dies = """if True:
        import os, pathlib, sys
        from core.storage.store import FolderBlobs
        def chunks():
            yield b"half"
            os._exit(9)
        FolderBlobs(pathlib.Path(sys.argv[1])).put_stream("a", chunks())
    """
    killed = subprocess.run([sys.executable, "-c", dies, tmp_path], check=False)

    assert killed.returncode == 9
    assert list(FolderBlobs(tmp_path).list("")) == []


def test_when_even_the_abort_fails_the_first_error_is_told(s3_store: S3Blobs) -> None:
    def refuse(arguments: dict[str, Any]) -> None:
        raise TimeoutError("S3 is gone, too")

    s3_store._client = Request(s3_store._client, abort_multipart_upload=refuse)
    with pytest.raises(ConnectionError, match="the client went away"):
        s3_store.put_stream("a", breaks_after(20))


def leftovers(store: BlobStore) -> list[Any]:
    """What an abandoned put would have left where list() cannot see it."""
    if isinstance(store, FolderBlobs):
        return list(store._temp.iterdir())
    assert isinstance(store, S3Blobs)
    uploads: list[Any] = store._client.list_multipart_uploads(Bucket=store._bucket).get("Uploads", [])
    return uploads


# Listing and deleting


def test_list_finds_keys_by_prefix(store: BlobStore) -> None:
    keys = ["jobs/1-x/a", "jobs/1/a", "jobs/1/b/c", "jobs/10/a", "other"]
    for key in reversed(keys):
        store.put_bytes(key, b"")

    in_order = list if not is_seaweed(store) else sorted
    assert in_order(store.list("")) == keys
    assert list(store.list("jobs/1/")) == ["jobs/1/a", "jobs/1/b/c"]
    assert in_order(store.list("jobs/1")) == keys[:4]
    assert list(store.list("jobs/1/b/c")) == ["jobs/1/b/c"]
    assert list(store.list("nothing/")) == []


def is_seaweed(store: BlobStore) -> bool:
    return isinstance(store, S3Blobs) and store._bucket.startswith("weed-")


def test_two_prefixes_of_one_bucket_do_not_see_each_other(s3: Any, bucket: str) -> None:
    here, there = S3Blobs(bucket, "a", client=s3), S3Blobs(bucket, "ab", client=s3)
    here.put_bytes("x", b"")

    assert list(here.list("")) == ["x"]
    assert list(there.list("")) == []


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


def test_puts_and_deletes_in_one_folder_do_not_trip_over_each_other(
    folder_store: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delete removes the folder it empties, perhaps just as a put is about to use it."""
    monkeypatch.setattr("os.fsync", lambda handle: None)  # a disk that waits would make them take turns
    problems: list[Exception] = []

    def churn(key: str) -> None:
        try:
            for _ in range(50):
                folder_store.put_bytes(key, b"")
                folder_store.delete(key)
        except OSError as error:
            problems.append(error)

    threads = [threading.Thread(target=churn, args=[f"deep/er/{number}"]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert problems == []


# Downloads


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


def test_a_download_that_breaks_leaves_nothing(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "open", lambda key: breaks_after(2))
    folder = tmp_path / "cache"

    with pytest.raises(ConnectionError):
        store.download("a", folder / "target")
    assert list(folder.iterdir()) == []


# Keys


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


# Ages


def test_entries_tell_size_and_age_in_the_order_of_the_keys(store: BlobStore) -> None:
    began = time.time()
    store.put_bytes("a/2", b"four")
    store.put_bytes("a/1", b"")
    store.put_bytes("b", b"x")

    entries = list(store.entries("a/"))

    assert [(entry.key, entry.size) for entry in entries] == [("a/1", 0), ("a/2", 4)]
    assert all(began - 2 < entry.modified < time.time() + 2 for entry in entries)  # S3 counts whole seconds


@pytest.mark.parametrize("count", [0, 3, 1001])
def test_many_are_deleted_at_once(folder_store: FolderBlobs, s3_store: S3Blobs, count: int) -> None:
    for store in (folder_store, s3_store):
        keys = [f"some/{number}" for number in range(count)]
        for key in keys[:2]:
            store.put_bytes(key, b"")
        store.put_bytes("other", b"")

        store.delete_many(keys)

        assert list(store.list("")) == ["other"]


def unfinished(store: BlobStore) -> None:
    """What a process leaves that is killed in the middle of a put."""
    if isinstance(store, FolderBlobs):
        store.put_bytes("makes/folders", b"")
        (store._temp / ".part-abc").write_bytes(b"half")
    else:
        assert isinstance(store, S3Blobs)
        store._client.create_multipart_upload(Bucket=store._bucket, Key=f"{store._prefix}a")


def test_puts_that_never_ended_are_removed_once_they_are_old(store: BlobStore) -> None:
    unfinished(store)

    young = (
        0 if isinstance(store, S3Blobs) and not is_seaweed(store) else time.time() - 3600
    )  # moto: all in 2010
    assert store.abort_stale_uploads(young) == 0
    assert store.abort_stale_uploads(time.time() + 3600, dry_run=True) == 1
    assert len(leftovers(store)) == 1
    assert store.abort_stale_uploads(time.time() + 3600) == 1
    assert leftovers(store) == []


def test_unfinished_uploads_of_another_prefix_are_not_ours(s3: Any, bucket: str) -> None:
    s3.create_multipart_upload(Bucket=bucket, Key="theirs/a")

    assert S3Blobs(bucket, "ours", client=s3).abort_stale_uploads(time.time() + 3600) == 0


# S3


@pytest.mark.parametrize("size", [5, 8 * MIB + 5])
def test_a_part_that_arrives_damaged_is_refused_and_nothing_is_stored(seaweed: SeaweedFS, size: int) -> None:
    def flip(arguments: dict[str, Any]) -> None:
        arguments["Body"] = b"?" + arguments["Body"][1:]

    client = Request(seaweed.client, put_object=flip, upload_part=flip)
    store = S3Blobs(seaweed.new_bucket(), client=client)

    with pytest.raises(client.exceptions.ClientError, match=r"BadDigest|XAmzContentChecksumMismatch"):
        store.put_bytes("a", b"x" * size)
    assert list(store.list("")) == []
    assert leftovers(store) == []


def test_where_checksums_are_not_wanted_none_are_sent(s3: Any, bucket: str) -> None:
    seen: list[set[str]] = []

    def note(arguments: dict[str, Any]) -> None:
        seen.append({name for name in arguments if name.startswith("Checksum")})

    client = Request(s3, put_object=note, upload_part=note, create_multipart_upload=note)
    store = S3Blobs(bucket, client=client, checksums=False)
    store.put_bytes("a", b"small")
    store.put_stream("b", megabytes(9))

    assert seen == [set()] * 4


def test_a_blob_that_rots_in_the_store_is_noticed_when_it_is_read(s3: Any, bucket: str) -> None:
    store = S3Blobs(bucket, client=s3)
    info = store.put_bytes("a", b"weights")
    s3.put_object(Bucket=bucket, Key="a", Body=b"w3ights", Metadata={"sha256": info.sha256})

    with pytest.raises(BlobCorrupt, match=info.sha256):
        store.read("a")


def test_a_store_that_ignores_conditions_is_found_out_once(
    s3: Any, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    def ignore(arguments: dict[str, Any]) -> None:
        arguments.pop("IfNoneMatch", None)

    store = S3Blobs(bucket, client=Request(s3, put_object=ignore, complete_multipart_upload=ignore))
    for key in ("a", "b"):
        store.put_bytes(key, b"first", if_absent=True)
        with pytest.raises(BlobExists):
            store.put_bytes(key, b"second", if_absent=True)

    assert [store.read(key) for key in store.list("")] == [b"first", b"first"]
    assert len([one for one in caplog.records if "ignores If-None-Match" in one.message]) == 1


@pytest.mark.parametrize("count", [1, 9])
def test_a_put_that_is_repeated_because_its_answer_was_lost_does_not_refuse_itself(
    store: BlobStore, count: int
) -> None:
    if isinstance(store, FolderBlobs):
        pytest.skip("a folder answers at once")
    assert isinstance(store, S3Blobs)
    client = store._client

    def send_twice(call: str) -> Callable[..., None]:
        def send(arguments: dict[str, Any]) -> None:
            if "self-test" not in arguments["Key"]:
                getattr(client, call)(**arguments)

        return send

    calls = {call: send_twice(call) for call in ("put_object", "complete_multipart_upload")}
    store._client = Request(client, **calls)
    store.put_stream("a", megabytes(count), if_absent=True)

    assert store.read("a") == b"".join(megabytes(count))
    with pytest.raises(BlobExists):
        S3Blobs(store._bucket, "some/prefix", client=client).put_bytes("a", b"another", if_absent=True)


# A line that fails


@pytest.fixture
def flaky(seaweed: SeaweedFS) -> Iterator[FlakyS3]:
    line = FlakyS3("127.0.0.1", seaweed.port)
    yield line
    line.close()


@pytest.fixture
def far_store(flaky: FlakyS3, seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> S3Blobs:
    """Behind the failing line, with the client that the service uses."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    client = s3_client(flaky.endpoint, "us-east-1", "when_supported", attempts=6)
    return S3Blobs(seaweed.new_bucket(), client=client, sleep=lambda seconds: None)


def test_an_upload_that_is_cut_in_a_part_arrives_whole(flaky: FlakyS3, far_store: S3Blobs) -> None:
    data = os.urandom(20 * MIB)
    flaky.cut_after, flaky.cut_requests = 4 * MIB, 2

    info = far_store.put_bytes("a", data)

    assert flaky.troubles == ["cut_requests"] * 2
    assert info.sha256 == sha256(data).hexdigest()
    assert far_store.read("a") == data
    assert leftovers(far_store) == []


@pytest.mark.parametrize("size", [5, 20 * MIB])
def test_a_while_of_503_is_survived(flaky: FlakyS3, far_store: S3Blobs, size: int) -> None:
    data = os.urandom(size)
    flaky.refusals = 4

    far_store.put_bytes("a", data)
    flaky.refusals = 4

    assert far_store.read("a") == data
    assert flaky.troubles == ["refusals"] * 8


def test_a_download_that_is_cut_goes_on_where_it_was(
    flaky: FlakyS3, far_store: S3Blobs, tmp_path: Path
) -> None:
    data = os.urandom(20 * MIB)
    info = far_store.put_bytes("a", data)
    asked: list[str] = []
    far_store._client = Request(
        far_store._client, get_object=lambda call: asked.append(call.get("Range", ""))
    )
    flaky.cut_after, flaky.cut_answers = 6 * MIB, 3

    far_store.download("a", tmp_path / "a", sha256=info.sha256)

    assert flaky.troubles == ["cut_answers"] * 3
    assert (tmp_path / "a").read_bytes() == data
    starts = [int(one.removeprefix("bytes=").rstrip("-") or 0) for one in asked]
    assert starts == sorted(set(starts)) and len(starts) == 4  # each further on than the one before
    assert starts[3] > 12 * MIB


def test_a_download_whose_blob_was_replaced_meanwhile_is_not_patched_together(
    flaky: FlakyS3, far_store: S3Blobs, seaweed: SeaweedFS
) -> None:
    far_store.put_bytes("a", b"x" * 5 * MIB)
    flaky.cut_after, flaky.cut_answers = 2 * MIB, 1
    chunks = far_store.open("a")
    next(chunks)
    S3Blobs(far_store._bucket, client=seaweed.client).put_bytes("a", b"y" * 5 * MIB)

    with pytest.raises(BlobCorrupt, match="was replaced while it was read"):
        list(chunks)
    assert flaky.troubles == ["cut_answers"]


def test_a_download_that_never_gets_on_is_given_up(
    flaky: FlakyS3, far_store: S3Blobs, tmp_path: Path
) -> None:
    far_store.put_bytes("a", os.urandom(5 * MIB))
    flaky.cut_after, flaky.cut_answers = 2 * MIB, 1000
    chunks = far_store.open("a")
    next(chunks)
    flaky.cut_after = 1000  # from now on not even a whole chunk

    with pytest.raises(Exception, match=r"(?i)bytes expected|broken"):
        list(chunks)
    assert len(flaky.troubles) == BREAKS_IN_A_ROW


def test_what_fails_for_good_leaves_nothing_half_written(
    flaky: FlakyS3, seaweed: SeaweedFS, tmp_path: Path, far_store: S3Blobs
) -> None:
    near = S3Blobs(far_store._bucket, client=seaweed.client)
    near.put_bytes("old", b"old")

    def goes_down() -> Iterator[bytes]:
        yield from megabytes(10)  # the first part is through by then
        flaky.refusals = 6
        yield from megabytes(10)

    with pytest.raises(Exception, match="503"):
        far_store.put_stream("old", goes_down())
    flaky.refusals = 6
    with pytest.raises(Exception, match="503"):
        far_store.download("old", tmp_path / "target")

    assert near.read("old") == b"old"
    assert leftovers(near) == []
    assert list(tmp_path.iterdir()) == []


def test_a_blob_of_one_part_carries_its_hash(s3: Any, bucket: str) -> None:
    info = S3Blobs(bucket, client=s3).put_bytes("a", b"small")

    assert s3.head_object(Bucket=bucket, Key="a")["Metadata"] == {"sha256": info.sha256}


# open_blobs


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_path_opens_a_folder(tmp_path: Path, scheme: str) -> None:
    open_blobs(f"{scheme}{tmp_path}").put_bytes("a", b"x")

    assert FolderBlobs(tmp_path).read("a") == b"x"


def test_a_file_url_may_be_quoted(tmp_path: Path) -> None:
    open_blobs(f"file://{tmp_path}/with%20space").put_bytes("a", b"x")

    assert FolderBlobs(tmp_path / "with space").read("a") == b"x"


@pytest.mark.parametrize("prefix", ["", "/", "/deep/er", "/deep/er/"])
def test_an_s3_url_opens_a_bucket(s3: Any, bucket: str, s3_endpoint: str, prefix: str) -> None:
    open_blobs(f"s3://{bucket}{prefix}", endpoint_url=s3_endpoint, region="us-east-1").put_bytes("a", b"x")

    assert S3Blobs(bucket, prefix.strip("/"), client=s3).read("a") == b"x"


@pytest.mark.parametrize("url", ["", "gs://bucket", "s3://", "http://host/x", "file://host/path", "file://"])
def test_any_other_url_is_refused_with_what_is_accepted(url: str) -> None:
    with pytest.raises(ValueError, match="use a path, file:///path or s3://bucket/prefix"):
        open_blobs(url)


def test_a_folder_does_not_load_boto3(tmp_path: Path) -> None:
    script = (
        "import sys; from core.storage.store import open_blobs; "
        "open_blobs(sys.argv[1]); sys.exit('boto3' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False).returncode == 0
