"""Where bytes live: uploaded files, checkpoints, results. A local folder, or S3.

Keys are relative paths such as `orgs/o1/files/file-abc`, with the same rules in both stores, so that a
deployment can move from one to the other. Nothing is visible under its key before all of it has been written.
"""

import base64
import contextlib
import errno
import hashlib
import itertools
import logging
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from core.settings import Checksums, Settings

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
# S3 takes at most 10,000 parts, which bounds one blob at 78 GiB, and none below 5 MiB except the last.
PART_BYTES = 8 << 20
# What one bulk delete may have.
DELETED_AT_ONCE = 1000
# A download is given up when the connection breaks so often without a whole chunk in between.
BREAKS_IN_A_ROW = 6

T = TypeVar("T")


def is_away(error: BaseException) -> bool:
    """Whether the store may answer again if one only waits: out of reach, overloaded, cut off, full, or empty."""
    if isinstance(error, OSError):
        return isinstance(error, ConnectionError | TimeoutError) or error.errno in _PASSING_ERRNOS
    if isinstance(error, StoreEmpty):
        return True
    if "botocore" not in sys.modules:
        return False
    from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError
    from botocore.exceptions import ConnectionError as Unconnected

    if isinstance(error, ClientError):
        status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status == 429 or error.response["Error"]["Code"] == "RequestTimeout"
    return isinstance(error, Unconnected | HTTPClientError | IncompleteReadError)


_PASSING_ERRNOS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.EAGAIN,
    errno.EHOSTUNREACH,
    errno.ENOTCONN,  # the process of a FUSE mount has ended
    errno.ENETUNREACH,
}


@dataclass(frozen=True)
class BlobInfo:
    """What was stored. Keep the sha256 in the database row or the manifest: a store may not give it back."""

    key: str
    size: int
    sha256: str


@dataclass(frozen=True)
class BlobEntry:
    """One line of a listing: `size` in bytes, `modified` in Unix seconds by the clock of whoever stores it."""

    key: str
    size: int
    modified: float


class BlobNotFound(KeyError):
    """No blob has this key."""


class BlobExists(Exception):
    """`if_absent` was asked for, and the key is taken by somebody else."""


class BlobCorrupt(Exception):
    """The bytes do not have the sha256 they were stored with, or were replaced while they were read."""


class StoreEmpty(Exception):
    """A blob is missing from a store that has none at all, such as another bucket or a folder that is not mounted."""

    def __init__(self) -> None:
        super().__init__("The blob store is empty; is it the right one?")


class BlobWriter(Protocol):
    """A blob on its way into a store. It may be handed from thread to thread, and is not for two at once."""

    def write(self, data: bytes) -> None:
        """Append. Nothing is visible under the key yet."""
        ...

    def commit(self) -> BlobInfo:
        """Make the blob visible: all of it, under its key."""
        ...

    def abort(self) -> None:
        """Leave nothing behind; after `commit`, and a second time, without effect."""
        ...


class BlobStore(Protocol):
    """Bytes by key. The bodies given here follow from the others; inherit them, or do better."""

    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        """For bytes that arrive bit by bit, where no thread should wait for the next of them."""
        ...

    def put_stream(self, key: str, chunks: Iterable[bytes], *, if_absent: bool = False) -> BlobInfo:
        """Store what `chunks` yields without ever holding all of it; an exception half way stores nothing."""
        writer = self.writer(key, if_absent=if_absent)
        try:
            for chunk in chunks:
                writer.write(chunk)
            return writer.commit()
        finally:
            writer.abort()

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The bytes in chunks of `chunk_size`. BlobNotFound comes at once, not with the first next()."""
        ...

    def size(self, key: str) -> int:
        """How many bytes the blob has."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """The keys that start with `prefix`. `jobs/1` also finds `jobs/10`; `jobs/1/` does not.

        A folder and S3 have them in order, SeaweedFS in that of its folders.
        """
        return (entry.key for entry in self.entries(prefix))

    def entries(self, prefix: str) -> Iterator[BlobEntry]:
        """As `list`, with size and age. Found page by page: what is deleted meanwhile may or may not be in it."""
        ...

    def url(self, key: str) -> str:
        """Where an operator finds the blob (or what starts with `key`) with tools of their own."""
        ...

    def delete(self, key: str) -> None:
        """Make sure that no blob has this key; deleting twice is fine."""
        ...

    def abort_stale_uploads(self, older_than: float, *, dry_run: bool = False) -> int:
        """Remove what puts that began before this Unix time, and never ended, left where no key reaches it.

        Returns how many there were.
        """
        ...

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> BlobInfo:
        return self.put_stream(key, [data], if_absent=if_absent)

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> BlobInfo:
        with path.open("rb") as file:
            return self.put_stream(key, _file_chunks(file, CHUNK_BYTES), if_absent=if_absent)

    def read(self, key: str) -> bytes:
        """The whole blob in memory: for manifests and other small ones."""
        return b"".join(self.open(key))

    def download(self, key: str, path: Path, *, sha256: str | None = None) -> None:
        """Write the blob to `path`: all of it, with this `sha256` if given, or leave `path` as it was."""
        chunks = self.open(key)
        meter = _Meter()
        with _temporary(path.parent) as temp:
            _write(temp, meter.over(chunks))
            got = meter.info(key)
            if sha256 is not None and got.sha256 != sha256:
                raise BlobCorrupt(f"{key!r} has sha256 {got.sha256} in {got.size} bytes, expected {sha256}")
            temp.replace(path)

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key under a prefix that ends in '/', and say how many there were."""
        _check_folder(prefix)
        count = 0
        for keys in batched(self.list(prefix), DELETED_AT_ONCE):
            self.delete_many(keys)
            count += len(keys)
        return count


class FolderBlobs(BlobStore):
    """Blobs as files under `root/objects/`, written first under `root/tmp/` on the same filesystem.

    A key cannot also be the folder of another one ("a" and "a/b"), which S3 would allow. A process that is
    killed leaves its temporary file in `root/tmp/`, where no key can reach it, for `abort_stale_uploads` to find.
    Needs hard links.
    """

    def __init__(self, root: Path) -> None:
        self._objects = root / "objects"
        self._temp = root / "tmp"

    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        return _FileWriter(key, self._path(key), self._temp, if_absent)

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        return _file_chunks(self._opened(key), chunk_size)

    def size(self, key: str) -> int:
        with self._opened(key) as file:
            return os.fstat(file.fileno()).st_size

    def list(self, prefix: str) -> Iterator[str]:
        _check_prefix(prefix)
        folder = prefix[: prefix.rfind("/") + 1]
        return (key for key in _walk(self._objects / folder, folder) if key.startswith(prefix))

    def entries(self, prefix: str) -> Iterator[BlobEntry]:
        keys = self.list(prefix)
        return (entry for key in keys if (entry := _entry(self._objects / key, key)))

    def url(self, key: str) -> str:
        return str(self._path(key))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            path.unlink()
        # Empty folders go too: a folder left behind would keep its name from ever being a key.
        with contextlib.suppress(OSError):  # the first that is not empty, or is gone already, ends it
            for folder in path.relative_to(self._objects).parents[:-1]:
                (self._objects / folder).rmdir()

    def abort_stale_uploads(self, older_than: float, *, dry_run: bool = False) -> int:
        found = [_entry(path, path.name) for path in self._temp.glob(f"{_UNFINISHED}*")]
        # By the time of the last write: a put that still goes on, however slowly, is not among them.
        stale = [entry.key for entry in found if entry and entry.modified < older_than]
        if not dry_run:
            for name in stale:
                (self._temp / name).unlink(missing_ok=True)
        return len(stale)

    def _path(self, key: str) -> Path:
        _check_key(key)
        return self._objects / key

    def _opened(self, key: str) -> BinaryIO:
        try:
            return self._path(key).open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise BlobNotFound(key) from None


class S3Blobs(BlobStore):
    """Blobs as objects of one bucket, under an optional prefix.

    A blob that fits in one part carries its sha256 as object metadata. A larger one does not: metadata is
    sent before the first part and the hash is known after the last, so it lives only in the `BlobInfo`
    returned here, which belongs in the database row or the manifest. The ETag is never used as a hash: that
    of a multipart upload is none.

    With `checksums`, every part goes with its SHA-256, and a store that knows them refuses one that arrives
    damaged. A request that fails is repeated by the client, each part of an upload by itself; what no client
    does is go on with a download that breaks in the middle, so that is done here.

    `if_absent` needs a store that honours If-None-Match, which is tried once. Where it is not, a key that is taken
    is still noticed, but of two writers at the same moment both may win.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        client: Any,
        checksums: bool = True,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if prefix:
            _check_key(prefix)
        self._client = client
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._checksums = checksums
        self._sleep = sleep
        self._conditional: bool | None = None  # not tried yet
        self._trying = threading.Lock()

    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        return _S3Writer(self, key, self._condition(key) if if_absent else {})

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """As BlobStore promises. A connection that breaks half way is taken up again where it broke.

        Raises, with next(): BlobCorrupt when the blob carries its sha256 and that is another, or when it was
        replaced after the connection broke.
        """
        with self._named(key):
            answer = self._client.get_object(**self._where(key))
        return self._resumed(key, answer, chunk_size)

    def size(self, key: str) -> int:
        with self._named(key):
            return int(self._client.head_object(**self._where(key))["ContentLength"])

    def entries(self, prefix: str) -> Iterator[BlobEntry]:
        _check_prefix(prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        return (
            BlobEntry(one["Key"].removeprefix(self._prefix), one["Size"], one["LastModified"].timestamp())
            for page in pages
            for one in page.get("Contents", [])
        )

    def url(self, key: str) -> str:
        where = self._where(key)
        return f"s3://{where['Bucket']}/{where['Key']}"

    def delete(self, key: str) -> None:
        self._client.delete_object(**self._where(key))

    def delete_many(self, keys: Sequence[str]) -> None:
        for some in batched(keys, DELETED_AT_ONCE):
            wanted = {"Objects": [{"Key": self._where(key)["Key"]} for key in some], "Quiet": True}
            failed = self._client.delete_objects(Bucket=self._bucket, Delete=wanted).get("Errors", [])
            if failed:
                raise OSError(f"{len(failed)} of {len(some)} blobs not deleted, the first: {failed[0]}")

    def abort_stale_uploads(self, older_than: float, *, dry_run: bool = False) -> int:
        count = 0
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        for upload in (upload for page in pages for upload in page.get("Uploads", [])):
            if upload["Initiated"].timestamp() >= older_than:
                continue
            count += 1
            if not dry_run:
                with contextlib.suppress(self._client.exceptions.NoSuchUpload):  # ended since it was listed
                    self._client.abort_multipart_upload(
                        Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
        return count

    def _put_whole(
        self, where: dict[str, str], body: bytes, info: BlobInfo, condition: dict[str, str]
    ) -> None:
        metadata = {"sha256": info.sha256}
        mark = secrets.token_hex(8)
        if condition:  # else it does not matter whether we wrote what is there
            metadata["put"] = mark
        try:
            self._client.put_object(
                **where, Body=body, Metadata=metadata, **self._checksum(body), **condition
            )
        except self._client.exceptions.ClientError as error:
            if not (_code(error) in _TAKEN and self._is_ours(where, mark)):
                with self._named(info.key):
                    raise

    def _is_ours(self, where: dict[str, str], mark: str) -> bool:
        """Did we write what is there? A request whose answer got lost is sent again, and then meets itself."""
        try:
            there = self._client.head_object(**where)
        except self._client.exceptions.ClientError:
            return False
        return bool(there["Metadata"].get("put") == mark)

    def _resumed(self, key: str, answer: dict[str, Any], chunk_size: int) -> Iterator[bytes]:
        # Imported here for the reason that _s3_client gives.
        from botocore.exceptions import ConnectionError, HTTPClientError, IncompleteReadError

        etag, size, sha256 = answer["ETag"], answer["ContentLength"], answer["Metadata"].get("sha256")
        meter, at, breaks, body = _Meter(), 0, 0, answer["Body"]
        try:
            while at < size:
                try:
                    for chunk in meter.over(body.iter_chunks(chunk_size)):
                        at += len(chunk)
                        if len(chunk) == chunk_size:
                            breaks = 0
                        yield chunk
                    if at < size:
                        raise IncompleteReadError(actual_bytes=at, expected_bytes=size)
                except (ConnectionError, HTTPClientError, IncompleteReadError) as error:
                    breaks += 1
                    if breaks == BREAKS_IN_A_ROW:
                        raise
                    log.warning("the download of %s broke after %d of %d bytes: %s", key, at, size, error)
                    body.close()
                    self._sleep(min(0.1 * 2**breaks, 10.0))
                    body = self._rest(key, at, etag)
        finally:
            body.close()
        got = meter.info(key)
        if sha256 not in (None, got.sha256):
            raise BlobCorrupt(f"{key!r} has sha256 {got.sha256} in {got.size} bytes, expected {sha256}")

    def _rest(self, key: str, at: int, etag: str) -> Any:
        """The body of a blob from byte `at` on, if it is still the one that has this ETag."""
        try:
            with self._named(key):
                return self._client.get_object(**self._where(key), Range=f"bytes={at}-", IfMatch=etag)["Body"]
        except BlobExists as replaced:
            raise BlobCorrupt(f"{key!r} was replaced while it was read; read it again") from replaced

    def _condition(self, key: str) -> dict[str, str]:
        """What makes a put fail when the key is taken; BlobExists if the store cannot do that, and it is."""
        if self._honours_conditions():
            return {"IfNoneMatch": "*"}
        with contextlib.suppress(BlobNotFound):
            self.size(key)
            raise BlobExists(key)
        return {}

    def _honours_conditions(self) -> bool:
        with self._trying:
            if self._conditional is None:
                self._conditional = self._try_condition()
                if not self._conditional:
                    log.warning(
                        "The S3 store behind bucket %s ignores If-None-Match, so of two writers of one key at the "
                        "same moment both may win. Checkpoints are safe: no two attempts write the same keys.",
                        self._bucket,
                    )
            return self._conditional

    def _try_condition(self) -> bool:
        where = self._where(f"self-test/{secrets.token_hex(8)}")
        self._client.put_object(**where, Body=b"")
        try:
            self._client.put_object(**where, Body=b"", IfNoneMatch="*")
        except self._client.exceptions.ClientError as error:
            if _code(error) in _TAKEN:
                return True
            if _code(error) in ("NotImplemented", "501"):
                return False
            raise
        finally:
            self._client.delete_object(**where)
        return False

    def _checksum(self, body: bytes) -> dict[str, str]:
        if not self._checksums:
            return {}
        return {"ChecksumSHA256": base64.b64encode(hashlib.sha256(body).digest()).decode()}

    def _where(self, key: str) -> dict[str, str]:
        _check_key(key)
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    @contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """Give S3's answers our names; whatever is not about this key rises as it is."""
        try:
            yield
        except self._client.exceptions.ClientError as error:
            code = _code(error)
            if code in ("NoSuchKey", "404"):  # a HEAD has no body to say more than 404
                raise BlobNotFound(key) from error
            if code in _TAKEN:
                raise BlobExists(key) from error
            raise


class _FileWriter(BlobWriter):
    """Writes a temporary file, and gives it its name at the end."""

    def __init__(self, key: str, target: Path, folder: Path, if_absent: bool) -> None:
        self._key, self._target, self._if_absent = key, target, if_absent
        self._meter = _Meter()
        _make_folder(folder)
        handle, name = tempfile.mkstemp(dir=folder, prefix=_UNFINISHED)
        self._temp = Path(name)
        self._file = os.fdopen(handle, "wb")

    def write(self, data: bytes) -> None:
        self._meter.add(data)
        self._file.write(data)

    def commit(self) -> BlobInfo:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        try:
            _publish(self._temp, self._target, if_absent=self._if_absent)
        except _Taken:
            raise BlobExists(self._key) from None
        return self._meter.info(self._key)

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # closing writes what is left, for which there may be no room
            self._file.close()
        self._temp.unlink(missing_ok=True)


class _S3Writer(BlobWriter):
    """Sends a part whenever one is full; what fits into one goes as a whole."""

    def __init__(self, store: S3Blobs, key: str, condition: dict[str, str]) -> None:
        self._store, self._key, self._condition = store, key, condition
        self._where = store._where(key)
        self._meter, self._buffer = _Meter(), bytearray()
        self._mark = secrets.token_hex(8)
        self._upload: dict[str, str] | None = None
        self._done: list[dict[str, Any]] = []

    def write(self, data: bytes) -> None:
        self._meter.add(data)
        self._buffer += data
        while len(self._buffer) > PART_BYTES:  # the last part is sent by `commit`, and is never empty
            with self._named():
                self._send(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    def commit(self) -> BlobInfo:
        info = self._meter.info(self._key)
        if self._upload is None:
            self._store._put_whole(self._where, bytes(self._buffer), info, self._condition)
            return info
        with self._named():
            self._send(bytes(self._buffer))
            self._store._client.complete_multipart_upload(
                **self._upload, MultipartUpload={"Parts": self._done}, **self._condition
            )
        self._upload = None
        return info

    def abort(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            # The caller must see what went wrong first; the sweep and the bucket's lifecycle rule are the next nets.
            with contextlib.suppress(Exception):
                self._store._client.abort_multipart_upload(**upload)

    def _send(self, part: bytes) -> None:
        client = self._store._client
        if self._upload is None:
            algorithm = {"ChecksumAlgorithm": "SHA256"} if self._store._checksums else {}
            metadata = {"put": self._mark}
            begun = client.create_multipart_upload(**self._where, Metadata=metadata, **algorithm)
            self._upload = self._where | {"UploadId": begun["UploadId"]}
        number = len(self._done) + 1
        sent = client.upload_part(**self._upload, PartNumber=number, Body=part, **self._store._checksum(part))
        # Checksums that went with a part must be repeated at the end, or S3 may refuse.
        checksums = {name: value for name, value in sent.items() if name in _PART_CHECKSUMS}
        self._done.append({"PartNumber": number, "ETag": sent["ETag"], **checksums})

    @contextmanager
    def _named(self) -> Iterator[None]:
        """S3's answers by our names; that an upload has ended is fine where it was us who ended it."""
        try:
            with self._store._named(self._key):
                yield
        except Exception as error:
            kind = self._store._client.exceptions.ClientError
            cause = error if isinstance(error, kind) else error.__cause__
            ended = isinstance(cause, kind) and _code(cause) in _ENDED
            if not (ended and self._store._is_ours(self._where, self._mark)):
                raise


def open_blobs(
    url: str,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    checksums: Checksums = "when_supported",
) -> BlobStore:
    """The store a setting names: a path, `file:///path`, or `s3://bucket/prefix`.

    Credentials come from boto3's usual chain. `when_required` is for S3 look-alikes that stumble over checksums.
    """
    if "://" not in url:
        if not url:
            raise ValueError(_accepted(url))
        return FolderBlobs(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return FolderBlobs(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        client = s3_client(endpoint_url, region, checksums)
        sent = checksums == "when_supported"
        return S3Blobs(parts.netloc, parts.path.strip("/"), client=client, checksums=sent)
    raise ValueError(_accepted(url))


def blobs_of(settings: Settings) -> BlobStore:
    """The store that the settings name."""
    return open_blobs(
        settings.blobs,
        endpoint_url=settings.s3_endpoint_url,
        region=settings.s3_region,
        checksums=settings.s3_checksums,
    )


def check_not_empty(blobs: BlobStore) -> None:
    """Raise StoreEmpty if the store has no blobs. Call it before a missing blob counts as damage.

    Logs of attempts do not count: workers write those to a wrong store, too, after each attempt that fails there.
    """
    if all(key.endswith("/log.txt") for key in blobs.list("")):
        raise StoreEmpty


def _accepted(url: str) -> str:
    return f"{url!r} names no blob store: use a path, file:///path or s3://bucket/prefix"


def s3_client(
    endpoint_url: str | None, region: str | None, checksums: Checksums, *, attempts: int = 10
) -> Any:
    """A boto3 client that repeats what fails on the way or with 5xx, `attempts` times at most."""
    # Imported here, because it takes long to load and a folder needs none of it.
    import boto3
    from botocore.config import Config

    config = Config(
        # botocore waits 50 ms and doubles that: ten attempts outlast about 13 seconds, its default less than one.
        retries={"mode": "standard", "total_max_attempts": attempts},
        connect_timeout=5,
        read_timeout=60,
        request_checksum_calculation=checksums,
        # Ours is over the whole blob and survives a download in pieces, which botocore's does not.
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", endpoint_url=endpoint_url, region_name=region, config=config)


_PART_CHECKSUMS = {"ChecksumCRC32", "ChecksumCRC32C", "ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256"}
_TAKEN = ("PreconditionFailed", "412")  # the number where an answer has no body
_ENDED = (*_TAKEN, "NoSuchUpload")
_UNFINISHED = ".part-"


def _code(error: Any) -> str:
    return str(error.response["Error"]["Code"])


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items and a last, shorter one."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch


class _Meter:
    """Counts and hashes the bytes that flow through."""

    def __init__(self) -> None:
        self._size = 0
        self._sha256 = hashlib.sha256()

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        self._sha256.update(chunk)

    def over(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.add(chunk)
            yield chunk

    def info(self, key: str) -> BlobInfo:
        return BlobInfo(key, self._size, self._sha256.hexdigest())


class _Taken(Exception):
    """The target of an exclusive publish already exists."""


def _check_key(key: str) -> None:
    # Unprintable characters fit neither S3's XML listings nor anybody's log.
    if not key.isprintable() or any(segment in ("", ".", "..") for segment in key.split("/")):
        raise ValueError(
            f"{key!r} is not a blob key: write segments with '/' between them, none empty, '.' or '..'"
        )


def _check_prefix(prefix: str) -> None:
    if prefix:
        _check_key(prefix.removesuffix("/"))


def _check_folder(prefix: str) -> None:
    # Without the slash, deleting `jobs/1` would take `jobs/10` with it, and "" everything.
    if not prefix.endswith("/"):
        raise ValueError(f"{prefix!r} must end in '/' to say where the deletion stops")
    _check_prefix(prefix)


def _file_chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    with file:
        while chunk := file.read(size):
            yield chunk


def _walk(folder: Path, stem: str) -> Iterator[str]:
    """Every file below `folder` as `stem` plus its path, in the order of the whole keys."""
    try:
        # The slash is part of the comparison: "a-b" sorts before "a/b", although "a" sorts before "a-b".
        with os.scandir(folder) as entries:
            names = sorted(entry.name + "/" * entry.is_dir(follow_symlinks=False) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if name.endswith("/"):
            yield from _walk(folder / name, stem + name)
        else:
            yield stem + name


def _entry(path: Path, key: str) -> BlobEntry | None:
    """None: it was removed after it was listed."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return BlobEntry(key, found.st_size, found.st_mtime)


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A fresh file in `folder`, gone at the end unless it was moved away."""
    _make_folder(folder)
    handle, name = tempfile.mkstemp(dir=folder, prefix=_UNFINISHED)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _publish(temp: Path, target: Path, *, if_absent: bool) -> None:
    """Give a finished file its name in one step; with `if_absent`, of many at once exactly one succeeds."""
    for attempts_left in reversed(range(100)):
        try:
            _make_folder(target.parent)
            if if_absent:
                _link(temp, target)
            else:
                temp.replace(target)
            break
        except (FileNotFoundError, FileExistsError):
            # A delete() removed the folder, empty until now, under our feet: before we used it, or just after
            # mkdir had found it there, which mkdir reports as "exists".
            if not attempts_left:
                raise
    with contextlib.suppress(FileNotFoundError):  # deleted again already
        _sync_folder(target.parent)


def _link(temp: Path, target: Path) -> None:
    try:
        os.link(temp, target)
    except FileExistsError:
        raise _Taken from None


def _make_folder(folder: Path) -> None:
    """mkdir -p that survives a power cut: a new name is durable once the folder that holds it is synced."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
