import os
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from core.outages import Resource, outage
from core.storage.store import (
    BREAKS_IN_A_ROW,
    BlobCorrupt,
    BlobExists,
    BlobStore,
    FolderBlobs,
    NotDeleted,
    S3Blobs,
    open_blobs,
    s3_client,
)
from tests.flaky_s3 import FlakyS3
from tests.servers import SeaweedFS
from tests.streams import MIB, breaks_after, megabytes


@pytest.fixture
def s3_store(s3: Any, bucket: str) -> S3Blobs:
    return S3Blobs(bucket, "some/prefix", client=s3)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder where a sync takes no time, if there is one: threads that wait for a disk take turns."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderBlobs:
    return FolderBlobs(tmp_path / "blobs")


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


def test_a_stream_is_never_whole_in_memory(folder_store: FolderBlobs) -> None:
    tracemalloc.start()
    try:
        folder_store.put_stream("big", megabytes(64))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert folder_store.size("big") == 64 * MIB
    assert peak < 32 * MIB


# What is not there


def test_a_missing_bucket_is_not_a_missing_blob(s3: Any) -> None:
    """Or a wrong setting would look like lost data."""
    with pytest.raises(s3.exceptions.NoSuchBucket):
        S3Blobs("no-such-bucket", client=s3).open("a")


# Failure half way


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


def test_when_even_the_abort_fails_the_first_error_is_told(s3: Any, bucket: str) -> None:
    def refuse(arguments: dict[str, Any]) -> None:
        raise TimeoutError("S3 is gone, too")

    store = S3Blobs(bucket, client=Request(s3, abort_multipart_upload=refuse))
    with pytest.raises(ConnectionError, match="the client went away"):
        store.put_stream("a", breaks_after(20))


def leftovers(store: BlobStore) -> int:
    """How many abandoned puts have left something where list() cannot see it."""
    return store.abort_stale_uploads(time.time() + 3600, dry_run=True)


# Listing and deleting


def test_a_folder_and_s3_list_in_the_order_of_the_keys(folder_store: FolderBlobs, s3_store: S3Blobs) -> None:
    keys = ["jobs/1-x/a", "jobs/1/a", "jobs/1/b/c", "jobs/10/a", "other"]
    for store in (folder_store, s3_store):
        for key in reversed(keys):
            store.put_bytes(key, b"")

        assert list(store.list("")) == keys
        assert list(store.list("jobs/1")) == keys[:4]


def test_two_prefixes_of_one_bucket_do_not_see_each_other(s3: Any, bucket: str) -> None:
    here, there = S3Blobs(bucket, "a", client=s3), S3Blobs(bucket, "ab", client=s3)
    here.put_bytes("x", b"")

    assert list(here.list("")) == ["x"]
    assert list(there.list("")) == []


def test_a_folder_made_in_the_console_of_s3_is_no_blob(s3: Any, bucket: str) -> None:
    """It is an empty object whose key ends with a slash, and such a key can be neither read nor copied."""
    store = S3Blobs(bucket, "below", client=s3)
    for folder in ("below/", "below/files/"):
        s3.put_object(Bucket=bucket, Key=folder)
    store.put_bytes("files/a", b"abc")

    assert [entry.key for entry in store.entries("")] == ["files/a"]


def test_puts_and_deletes_in_one_folder_do_not_trip_over_each_other(in_memory: Path) -> None:
    """A delete removes the folder it empties, perhaps just as a put is about to use it."""
    store = FolderBlobs(in_memory)
    problems: list[Exception] = []

    def churn(key: str) -> None:
        try:
            for _ in range(50):
                store.put_bytes(key, b"")
                store.delete(key)
        except OSError as error:
            problems.append(error)

    threads = [threading.Thread(target=churn, args=[f"deep/er/{number}"]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert problems == []


# Downloads


class BreakingBlobs(FolderBlobs):
    """Every read breaks after two chunks."""

    def open(self, key: str, *, chunk_size: int = MIB) -> Iterator[bytes]:
        return breaks_after(2)


def test_a_download_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    with pytest.raises(ConnectionError):
        BreakingBlobs(tmp_path).download("a", folder / "target")
    assert list(folder.iterdir()) == []


# Unfinished puts


def test_a_young_unfinished_put_is_left_alone(folder_store: FolderBlobs, seaweed: SeaweedFS) -> None:
    for store in (folder_store, S3Blobs(seaweed.new_bucket(), "some/prefix", client=seaweed.client)):
        abandoned = store.writer("files/a")
        abandoned.write(b"x" * 9 * MIB)

        assert store.abort_stale_uploads(time.time() - 3600) == 0
        assert leftovers(store) == 1
        assert store.abort_stale_uploads(time.time() + 3600) == 1


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
    assert leftovers(store) == 0


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


@pytest.fixture(params=["moto", "seaweed"])
def any_s3(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """A client and a new bucket of either S3 server."""
    if request.param == "moto":
        return request.getfixturevalue("s3"), request.getfixturevalue("bucket")
    seaweed: SeaweedFS = request.getfixturevalue("seaweed")
    return seaweed.client, seaweed.new_bucket()


@pytest.mark.parametrize("if_absent", [False, True])
@pytest.mark.parametrize("count", [1, 9])
def test_a_put_that_is_repeated_because_its_answer_was_lost_does_not_refuse_itself(
    any_s3: tuple[Any, str], count: int, if_absent: bool
) -> None:
    client, name = any_s3

    def send_twice(call: str) -> Callable[..., None]:
        def send(arguments: dict[str, Any]) -> None:
            if "self-test" not in arguments["Key"]:
                getattr(client, call)(**arguments)

        return send

    calls = {call: send_twice(call) for call in ("put_object", "complete_multipart_upload")}
    store = S3Blobs(name, client=Request(client, **calls))
    store.put_stream("a", megabytes(count), if_absent=if_absent)

    assert store.read("a") == b"".join(megabytes(count))
    with pytest.raises(BlobExists):
        S3Blobs(name, client=client).put_bytes("a", b"another", if_absent=True)


# A line that fails


@pytest.fixture
def flaky(seaweed: SeaweedFS) -> Iterator[FlakyS3]:
    line = FlakyS3("127.0.0.1", seaweed.port)
    yield line
    line.close()


class Far:
    """A bucket behind the failing line, with the client that the service uses, and the same bucket next door."""

    def __init__(self, flaky: FlakyS3, seaweed: SeaweedFS) -> None:
        client = s3_client(flaky.endpoint, "us-east-1", "when_supported", attempts=6)
        bucket = seaweed.new_bucket()
        self.ranges: list[str] = []
        self.ignored = ""  # a parameter that this store does not know
        noting = Request(client, get_object=self._note)
        self.store = S3Blobs(bucket, client=noting, sleep=lambda seconds: None)
        self.near = S3Blobs(bucket, client=seaweed.client)

    def _note(self, call: dict[str, Any]) -> None:
        self.ranges.append(call.get("Range", ""))
        call.pop(self.ignored, None)


@pytest.fixture
def far(flaky: FlakyS3, seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Far:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)
    return Far(flaky, seaweed)


@pytest.fixture
def far_store(far: Far) -> S3Blobs:
    return far.store


def test_an_upload_that_is_cut_in_a_part_arrives_whole(flaky: FlakyS3, far_store: S3Blobs) -> None:
    data = os.urandom(20 * MIB)
    flaky.cut_after, flaky.cut_requests = 4 * MIB, 2

    info = far_store.put_bytes("a", data)

    assert flaky.troubles == ["cut_requests"] * 2
    assert info.sha256 == sha256(data).hexdigest()
    assert far_store.read("a") == data
    assert leftovers(far_store) == 0


@pytest.mark.parametrize("size", [5, 20 * MIB])
def test_a_while_of_503_is_survived(flaky: FlakyS3, far_store: S3Blobs, size: int) -> None:
    data = os.urandom(size)
    flaky.refusals = 4

    far_store.put_bytes("a", data)
    flaky.refusals = 4

    assert far_store.read("a") == data
    assert flaky.troubles == ["refusals"] * 8


def test_a_download_that_is_cut_goes_on_where_it_was(flaky: FlakyS3, far: Far, tmp_path: Path) -> None:
    data = os.urandom(20 * MIB)
    info = far.store.put_bytes("a", data)
    flaky.cut_after, flaky.cut_answers = 6 * MIB, 3

    far.store.download("a", tmp_path / "a", sha256=info.sha256)

    assert flaky.troubles == ["cut_answers"] * 3
    assert (tmp_path / "a").read_bytes() == data
    starts = [int(one.removeprefix("bytes=").rstrip("-") or 0) for one in far.ranges]
    assert starts == sorted(set(starts)) and len(starts) == 4  # each further on than the one before
    assert starts[3] > 12 * MIB


@pytest.mark.parametrize("compares", [True, False], ids=["compares ETags", "ignores If-Match"])
def test_a_download_whose_blob_was_replaced_meanwhile_is_not_patched_together(
    flaky: FlakyS3, far: Far, compares: bool
) -> None:
    if not compares:
        far.ignored = "IfMatch"
    far.store.put_bytes("a", b"x" * 5 * MIB)
    flaky.cut_after, flaky.cut_answers = 2 * MIB, 1
    chunks = far.store.open("a")
    next(chunks)
    far.near.put_bytes("a", b"y" * 5 * MIB)

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


def test_what_fails_for_good_leaves_nothing_half_written(flaky: FlakyS3, tmp_path: Path, far: Far) -> None:
    far_store, near = far.store, far.near
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
    assert leftovers(near) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_blob_of_one_part_carries_its_hash(s3: Any, bucket: str) -> None:
    info = S3Blobs(bucket, client=s3).put_bytes("a", b"small")

    assert s3.head_object(Bucket=bucket, Key="a")["Metadata"] == {"sha256": info.sha256}


# open_blobs


class Deleting:
    """The part of boto3's client that deletes many, from a store that refuses some."""

    class exceptions:
        ClientError = ClientError

    def __init__(self, codes: dict[str, str]) -> None:
        self.codes = codes

    def delete_objects(self, **asked: Any) -> dict[str, Any]:
        names = [one["Key"] for one in asked["Delete"]["Objects"]]
        return {
            "Errors": [{"Key": name, "Code": self.codes[name]} for name in names if name in self.codes],
        }


@pytest.mark.parametrize("code", ["AccessDenied", "InternalError"])
def test_objects_that_s3_does_not_delete_are_named(code: str) -> None:
    store = S3Blobs("bucket", "mine", client=Deleting({"mine/b": code}))

    with pytest.raises(NotDeleted) as caught:
        store.delete_many(["a", "b", "c"])

    assert [*caught.value.causes] == ["b"]
    assert outage(caught.value) is None


def test_a_store_that_deletes_nothing_for_now_is_an_outage() -> None:
    store = S3Blobs("bucket", client=Deleting(dict.fromkeys("ab", "SlowDown")))

    with pytest.raises(ClientError) as caught:
        store.delete_many(["a", "b"])

    assert outage(caught.value) is Resource.BLOB_STORE


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_path_opens_a_folder(tmp_path: Path, scheme: str) -> None:
    open_blobs(f"{scheme}{tmp_path}").put_bytes("a", b"x")

    assert FolderBlobs(tmp_path).read("a") == b"x"


def test_a_file_url_may_be_quoted(tmp_path: Path) -> None:
    open_blobs(f"file://{tmp_path}/with%20space").put_bytes("a", b"x")

    assert FolderBlobs(tmp_path / "with space").read("a") == b"x"


@pytest.mark.parametrize("prefix", ["", "/", "/deep/er", "/deep/er/"])
@pytest.mark.slow
def test_an_s3_url_opens_a_bucket(s3: Any, bucket: str, s3_endpoint: str, prefix: str) -> None:
    open_blobs(f"s3://{bucket}{prefix}", endpoint_url=s3_endpoint, region="us-east-1").put_bytes("a", b"x")

    assert S3Blobs(bucket, prefix.strip("/"), client=s3).read("a") == b"x"


@pytest.mark.parametrize("url", ["", "gs://bucket", "s3://", "http://host/x", "file://host/path", "file://"])
def test_any_other_url_is_refused_with_what_is_accepted(url: str) -> None:
    with pytest.raises(ValueError, match="use a path, file:///path or s3://bucket/prefix"):
        open_blobs(url)


@pytest.mark.slow
def test_a_folder_does_not_load_boto3(tmp_path: Path) -> None:
    script = (
        "import sys; from core.storage.store import open_blobs; "
        "open_blobs(sys.argv[1]); sys.exit('boto3' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False).returncode == 0
