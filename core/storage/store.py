"""Storage of bytes: uploaded files, checkpoints, results. A local folder, or S3.

Keys are relative paths such as `orgs/o1/files/file-abc`, with the same rules in both stores, so that a deployment can
move from one to the other. A blob becomes visible under its key only when it is complete.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from core.outages import DENIED, REJECTED, Resource, TemporarilyUnavailable, outage, s3_code
from core.settings import Checksums, Settings
from core.telemetry.metrics import COUNTED

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
# S3 allows 10,000 parts, which limits a blob to 78 GiB, and requires 5 MiB per part except the last.
PART_BYTES = 8 << 20
# The maximum of a bulk delete in S3.
DELETED_AT_ONCE = 1000
# A download fails after this many broken connections without a whole chunk in between.
BREAKS_IN_A_ROW = 6
# botocore waits 50 ms and doubles that: ten attempts cover about 13 seconds, its default less than one.
ATTEMPTS = 10

# Prefix of the objects of self-tests, which are deleted at once.
SELF_TEST = "self-test"

T = TypeVar("T")


def _is_refused(error: BaseException) -> bool:
    """Whether S3 rejects the credentials, or does not let them do this: all requests, or those for one object."""
    if "botocore" not in sys.modules:
        return False
    from botocore.exceptions import ClientError, NoCredentialsError

    if isinstance(error, NoCredentialsError):
        return True
    return isinstance(error, ClientError) and s3_code(error) in DENIED | REJECTED


_PASSING_400 = {"RequestTimeout", "IncompleteBody"}


def setting_of(error: BaseException, settings: Settings) -> str | None:
    """The setting to change if the store refuses the check at the start. None: an outage, or a missing bucket."""
    if _is_refused(error) or isinstance(error, FolderDenied):
        return "REGRAFT_BLOB_URL"
    if isinstance(error, OSError) and outage(error) is None:
        return "REGRAFT_BLOB_URL"
    if "botocore" not in sys.modules:
        return None
    from botocore.exceptions import ClientError, ParamValidationError

    if isinstance(error, ParamValidationError):  # no bucket can have this name
        return "REGRAFT_BLOB_URL"
    if not isinstance(error, ClientError):
        return None
    code, status = s3_code(error), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status in {301, 307} or code == "AuthorizationHeaderMalformed":
        return "REGRAFT_S3_REGION"
    if status == 405:
        return "REGRAFT_BLOB_URL"
    if status == 501 or (status == 400 and code not in _PASSING_400):
        if settings.s3_checksums == "when_supported":
            return "REGRAFT_S3_CHECKSUMS=when_required"
        return "REGRAFT_S3_ENDPOINT_URL"
    return None


def is_bad_sector(error: OSError) -> bool:
    """Whether the disk cannot read this blob. Any other OSError is about the store and not about one blob."""
    return error.errno == errno.EIO


@dataclass(frozen=True)
class BlobInfo:
    """Size and hash of a stored blob. Keep the sha256 in the database row or the manifest: S3 may not return it."""

    key: str
    size: int
    sha256: str


@dataclass(frozen=True)
class BlobEntry:
    """One entry of a listing: `size` in bytes, `modified` in Unix seconds by the clock of the store."""

    key: str
    size: int
    modified: float


class BlobNotFound(KeyError):
    """No blob has this key."""


class BlobExists(Exception):
    """`if_absent` was set and the key exists."""


class BlobCorrupt(Exception):
    """The bytes do not match the stored sha256, or were replaced during the read."""


class NotDeleted(Exception):
    """Some blobs of many cannot be deleted, such as those under a retention lock. All others are deleted.

    Args:
        causes: The error of each, by its key.
    """

    def __init__(self, causes: Mapping[str, Exception]) -> None:
        self.causes = dict(causes)
        key, self.first = next(iter(self.causes.items()))
        super().__init__(f"{len(causes)} blobs not deleted, the first: {key}: {self.first!r}")


class StoreEmpty(TemporarilyUnavailable):
    """The store has no blobs at all, as with a wrong bucket or an unmounted folder."""

    resource = Resource.BLOB_STORE

    def __init__(self) -> None:
        super().__init__("The blob store is empty; is it the right one?")


class NotTheStore(TemporarilyUnavailable):
    """Another server answered, such as the login page of a proxy."""

    resource = Resource.BLOB_STORE

    def __init__(self, key: str, lacks: str) -> None:
        super().__init__(f"The response for {key!r} has no {lacks}, so it is not from an S3 store.")


class WriteNotFound(TemporarilyUnavailable):
    """The response to a write is 404 without a code that says whether the bucket or the upload is missing."""

    resource = Resource.BLOB_STORE

    def __init__(self, key: str) -> None:
        super().__init__(f"The store has no bucket or no upload for {key!r}.")


class FolderDenied(OSError, TemporarilyUnavailable):
    """The system does not let the service use the folder, or this file of it: an operator can change the rights."""

    resource = Resource.BLOB_STORE


class BlobWriter(Protocol):
    """A blob being written. Threads may take turns, but must not use it concurrently."""

    def write(self, data: bytes) -> None:
        """Append. The blob is not visible yet."""
        ...

    def commit(self) -> BlobInfo:
        """Make the complete blob visible under its key."""
        ...

    def abort(self) -> None:
        """Discard the blob. Without effect after `commit` and when repeated."""
        ...


class BlobStore(Protocol):
    """Storage of bytes by key. The methods with bodies build on the others; a store may override them."""

    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        """A writer for bytes that arrive piece by piece, so that no thread waits for the next one."""
        ...

    def put_stream(self, key: str, chunks: Iterable[bytes], *, if_absent: bool = False) -> BlobInfo:
        """Store `chunks` without holding all of them in memory; an exception on the way stores nothing."""
        writer = self.writer(key, if_absent=if_absent)
        try:
            for chunk in chunks:
                writer.write(chunk)
            return writer.commit()
        finally:
            writer.abort()

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Read the bytes in chunks of `chunk_size`. Raises BlobNotFound immediately, not on the first next()."""
        ...

    def size(self, key: str) -> int:
        """Size of the blob in bytes."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """The keys that start with `prefix`. `jobs/1` also finds `jobs/10`; `jobs/1/` does not.

        Sorted by key in a folder and in S3; SeaweedFS sorts by folder.
        """
        return (entry.key for entry in self.entries(prefix))

    def entries(self, prefix: str) -> Iterator[BlobEntry]:
        """As `list`, with size and age. Paged: concurrent deletions may or may not be reflected."""
        ...

    def url(self, key: str) -> str:
        """The location of the blob (or of the prefix `key`) for the operator's own tools."""
        ...

    def delete(self, key: str) -> None:
        """Delete the blob if it exists."""
        ...

    def abort_stale_uploads(self, older_than: float, *, dry_run: bool = False) -> int:
        """Remove the remains of unfinished puts that began before this Unix time, and return their number.

        No key refers to these remains.
        """
        ...

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete those blobs that exist.

        Raises:
            NotDeleted: some cannot be deleted.
            an outage (core/outages.py): the others may exist, too.
        """
        causes = self._delete_each(keys)
        if causes:
            raise NotDeleted(causes)

    def _delete_each(self, keys: Sequence[str]) -> dict[str, Exception]:
        """As `delete_many`, but returns the errors."""
        causes: dict[str, Exception] = {}
        for key in keys:
            try:
                self.delete(key)
            except Exception as cause:  # of any store's library
                if is_store_away(cause):
                    raise
                causes[key] = cause
        return causes

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> BlobInfo:
        return self.put_stream(key, [data], if_absent=if_absent)

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> BlobInfo:
        with path.open("rb") as file:
            return self.put_stream(key, _file_chunks(file, CHUNK_BYTES), if_absent=if_absent)

    def read(self, key: str) -> bytes:
        """Read the whole blob into memory, for manifests and other small ones."""
        return b"".join(self.open(key))

    def download(self, key: str, path: Path, *, sha256: str | None = None) -> None:
        """Write the blob to `path`, verified against `sha256` if given; on failure `path` is unchanged."""
        chunks = self.open(key)
        meter = _Meter()
        with _temporary(path.parent) as temp:
            _write(temp, meter.over(chunks))
            got = meter.info(key)
            if sha256 is not None and got.sha256 != sha256:
                raise BlobCorrupt(f"{key!r} has sha256 {got.sha256} in {got.size} bytes, expected {sha256}")
            temp.replace(path)

    def discard(self, *keys: str) -> None:
        """Clean up: delete blobs that no row refers to. A failure is logged and counted, and left to the sweep."""
        with _cleaning_up(keys):
            self.delete_many(keys)

    def discard_prefix(self, prefix: str) -> None:
        """Discard every key under a prefix that ends in '/'."""
        with _cleaning_up([prefix]):
            self.delete_prefix(prefix)

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key under a prefix that ends in '/', and return their number. Raises as `delete_many`."""
        _check_folder(prefix)
        count = 0
        causes: dict[str, Exception] = {}
        for keys in batched(self.list(prefix), DELETED_AT_ONCE):
            try:
                self.delete_many(keys)
            except NotDeleted as kept:
                causes |= kept.causes
            count += len(keys)
        if causes:
            raise NotDeleted(causes)
        return count


class FailedCleanups:
    """The failed clean-ups of this process as a metric."""

    count = 0

    def __init__(self, name: str) -> None:
        self._name = name

    def collect(self) -> Iterable[Metric]:
        text = "Deletions of unused blobs that failed; the sweep repeats them."
        yield CounterMetricFamily(self._name, text, FailedCleanups.count)


COUNTED.register(FailedCleanups("regraft_failed_cleanups"))


def is_store_away(cause: Exception) -> bool:
    """Whether an outage of the store is the cause, rather than that it refuses this object."""
    return outage(cause) is not None and not _is_denied(cause)


def _is_denied(cause: Exception) -> bool:
    """Whether the store refuses this: it may refuse one object and not the others."""
    return isinstance(cause, FolderDenied) or (hasattr(cause, "response") and s3_code(cause) in DENIED)


@contextmanager
def _cleaning_up(keys: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except Exception as cause:  # of any store's library, and never worth the work that is already done
        FailedCleanups.count += 1
        log.warning("unused blobs stay until the sweep deletes them: %s: %r", ", ".join(keys), cause)


class FolderBlobs(BlobStore):
    """Blobs as files under `root/objects/`, written first under `root/tmp/` on the same file system.

    A key cannot also be the folder of another one ("a" and "a/b"), which S3 would allow. A killed process leaves its
    temporary file in `root/tmp/`, where `abort_stale_uploads` removes it. Needs hard links.

    Missing rights raise FolderDenied, also with next().
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._objects = root / "objects"
        self._temp = root / "tmp"

    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        path = self._path(key)
        with _as_denied():
            return _FileWriter(key, path, self._temp, if_absent)

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        return _denials_of(_file_chunks(self._opened(key), chunk_size))

    def size(self, key: str) -> int:
        with self._opened(key) as file:
            return os.fstat(file.fileno()).st_size

    def list(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        folder = prefix[: prefix.rfind("/") + 1]
        return _denials_of(key for key in _walk(self._objects / folder, folder) if key.startswith(prefix))

    def entries(self, prefix: str) -> Iterator[BlobEntry]:
        keys = self.list(prefix)
        return _denials_of(entry for key in keys if (entry := _entry(self._objects / key, key)))

    def url(self, key: str) -> str:
        return str(self._path(key))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _as_denied(), contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            path.unlink()
        # Remove empty folders: a leftover folder would block its name as a key.
        with contextlib.suppress(OSError):  # stops at the first one that is not empty or already gone
            for folder in path.relative_to(self._objects).parents[:-1]:
                (self._objects / folder).rmdir()

    def abort_stale_uploads(self, older_than: float, *, dry_run: bool = False) -> int:
        with _as_denied():
            found = [_entry(path, path.name) for path in self._temp.glob(f"{_UNFINISHED}*")]
            # Age is the time of the last write, so a slow put in progress is not removed.
            stale = [entry.key for entry in found if entry and entry.modified < older_than]
            if not dry_run:
                for name in stale:
                    (self._temp / name).unlink(missing_ok=True)
        return len(stale)

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._objects / key

    def _opened(self, key: str) -> BinaryIO:
        path = self._path(key)
        try:
            with _as_denied():
                return path.open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise BlobNotFound(key) from None


class S3Blobs(BlobStore):
    """Blobs as objects of one bucket, under an optional prefix.

    A blob that fits in one part carries its sha256 as object metadata. A larger one does not: metadata is sent before
    the first part and the hash is known after the last, so only the returned `BlobInfo` has it, which belongs in the
    database row or the manifest. The ETag is never used as a hash: that of a multipart upload is not one.

    With `checksums`, every part is sent with its SHA-256, and a store that supports them rejects a damaged part. boto3
    retries failed requests, each part of an upload separately; it does not resume interrupted downloads, so this class
    does.

    `if_absent` needs a store that supports If-None-Match, which is tested once with a whole blob, and when an upload in
    parts ends. Without support an existing key is still detected, but of two concurrent writers both may succeed.
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
            check_key(prefix)
        self._client = client
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._checksums = checksums
        self._sleep = sleep
        self._conditional: bool | None = None  # not tested yet
        self._deletes_many = True  # until the store rejects the request
        self._trying = threading.Lock()

    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        return _S3Writer(self, key, self._condition(key) if if_absent else {})

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """As BlobStore.open. An interrupted download resumes at the break.

        Raises, with next(): BlobCorrupt if the blob carries its sha256 and does not match it, or was replaced after the
        connection broke.
        """
        with self._named(key):
            answer = _of_store(self._client.get_object(**self._where(key)), key)
        return self._resumed(key, answer, chunk_size)

    def size(self, key: str) -> int:
        try:
            with self._named(key):
                return int(_of_store(self._client.head_object(**self._where(key)), key)["ContentLength"])
        except BlobNotFound:
            # The response to a HEAD request does not say whether the key or the bucket is missing; that of a list does.
            self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
            raise

    def entries(self, prefix: str) -> Iterator[BlobEntry]:
        check_prefix(prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        return (
            BlobEntry(one["Key"].removeprefix(self._prefix), one["Size"], one["LastModified"].timestamp())
            for page in pages
            for one in _of_store(page, prefix, "Name").get("Contents", [])
            if not one["Key"].endswith("/")  # a folder of the S3 console: an empty object that is no blob
        )

    def url(self, key: str) -> str:
        where = self._where(key)
        return f"s3://{where['Bucket']}/{where['Key']}"

    def delete(self, key: str) -> None:
        self._client.delete_object(**self._where(key))

    def delete_many(self, keys: Sequence[str]) -> None:
        causes: dict[str, Exception] = {}
        for batch in batched(keys, DELETED_AT_ONCE):
            failed = self._delete_together(batch) if self._deletes_many else None
            causes |= self._delete_each(batch) if failed is None else failed
        if causes:
            raise NotDeleted(causes)

    def _delete_together(self, keys: Sequence[str]) -> dict[str, Exception] | None:
        """Delete at most DELETED_AT_ONCE blobs with one request, and return the errors.

        None: the store rejects such requests.
        """
        names = {self._where(key)["Key"]: key for key in keys}
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        error_of = self._client.exceptions.ClientError
        try:
            failed = self._client.delete_objects(Bucket=self._bucket, Delete=wanted).get("Errors", [])
        except error_of as error:
            code = s3_code(error)
            if code not in _NO_BULK_DELETE | DENIED:
                raise
            if code in _NO_BULK_DELETE:  # a policy may change while the process runs
                self._deletes_many = False
                log.warning("The S3 store behind bucket %s has no DeleteObjects: %s", self._bucket, error)
            return None
        causes: dict[str, Exception] = {
            names.get(one.get("Key", ""), one.get("Key", "")): error_of({"Error": one}, "DeleteObjects")
            for one in failed
        }
        if len(causes) == len(keys):  # all: the store is busy, rather than that these cannot be deleted
            for cause in causes.values():
                if is_store_away(cause):
                    raise cause
        return causes

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
                with contextlib.suppress(self._client.exceptions.NoSuchUpload):  # completed since the listing
                    self._client.abort_multipart_upload(
                        Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
        return count

    def _put_whole(
        self, where: dict[str, str], body: bytes, info: BlobInfo, condition: dict[str, str]
    ) -> None:
        metadata = {"sha256": info.sha256}
        mark = secrets.token_hex(8)
        if condition:  # otherwise the author of an existing blob does not matter
            metadata["put"] = mark
        with self._written(info.key, mark):
            sent = self._client.put_object(
                **where, Body=body, Metadata=metadata, **self._checksum(body), **condition
            )
            _of_store(sent, info.key)

    @contextmanager
    def _written(self, key: str, mark: str) -> Iterator[None]:
        """Translate S3 errors of a write of this key; that an earlier try of ours has succeeded is no error."""
        try:
            yield
        except self._client.exceptions.ClientError as error:
            code = s3_code(error)
            if code in _ENDED and self._is_ours(self._where(key), mark):
                return
            if code in _TAKEN:
                raise BlobExists(key) from error
            if code in _MISSING:
                raise WriteNotFound(key) from error
            raise

    def _is_ours(self, where: dict[str, str], mark: str) -> bool:
        """Whether we wrote the existing blob: a retry after a lost response conflicts with its own first request."""
        try:
            there = self._client.head_object(**where)
        except self._client.exceptions.ClientError:
            return False
        return bool(there["Metadata"].get("put") == mark)

    def _resumed(self, key: str, answer: dict[str, Any], chunk_size: int) -> Iterator[bytes]:
        # Imported lazily, as in _s3_client.
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
                    body = self._rest(key, at, size, etag)
        finally:
            body.close()
        got = meter.info(key)
        if sha256 not in (None, got.sha256):
            raise BlobCorrupt(f"{key!r} has sha256 {got.sha256} in {got.size} bytes, expected {sha256}")

    def _rest(self, key: str, at: int, size: int, etag: str) -> Any:
        """The body of a blob from byte `at` to its last one, if it still has this size and ETag.

        Raises:
            BlobCorrupt: it was replaced; some stores ignore If-Match and send the other blob.
            NotTheStore: a page of another server, or a blob from its first byte, as of a proxy that ignores Range.
        """
        asked = {"Range": f"bytes={at}-", "IfMatch": etag}
        corrupt = BlobCorrupt(f"{key!r} was replaced while it was read; read it again")
        try:
            with self._named(key):
                answer = _of_store(self._client.get_object(**self._where(key), **asked), key)
        except BlobExists as replaced:
            raise corrupt from replaced
        rest = f"bytes {at}-{size - 1}/{size}"
        if (answer["ETag"], answer.get("ContentRange")) == (etag, rest):
            return answer["Body"]
        answer["Body"].close()
        raise corrupt if answer["ETag"] != etag else NotTheStore(key, f"Content-Range {rest!r}")

    def _condition(self, key: str) -> dict[str, str]:
        """Headers that make a put fail if the key exists. Without support: raises BlobExists if it exists now."""
        if self._honours_conditions():
            return {"IfNoneMatch": "*"}
        self._refuse_existing(key)
        return {}

    def _refuse_existing(self, key: str) -> None:
        with contextlib.suppress(BlobNotFound):
            self.size(key)
            raise BlobExists(key)

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
        key = f"{SELF_TEST}/{secrets.token_hex(8)}"
        where = self._where(key)
        _of_store(self._client.put_object(**where, Body=b""), key)
        try:
            self._client.put_object(**where, Body=b"", IfNoneMatch="*")
        except self._client.exceptions.ClientError as error:
            if s3_code(error) in _TAKEN:
                return True
            if s3_code(error) in _NO_CONDITION:
                return False
            raise
        finally:
            self.discard(key)
        return False

    def _checksum(self, body: bytes) -> dict[str, str]:
        if not self._checksums:
            return {}
        return {"ChecksumSHA256": base64.b64encode(hashlib.sha256(body).digest()).decode()}

    def _where(self, key: str) -> dict[str, str]:
        check_key(key)
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    @contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """Translate S3 errors about this key; others are raised unchanged."""
        try:
            yield
        except self._client.exceptions.ClientError as error:
            code = s3_code(error)
            if code in _MISSING:
                raise BlobNotFound(key) from error
            if code in _TAKEN:
                raise BlobExists(key) from error
            raise


class _FileWriter(BlobWriter):
    """Writes a temporary file and renames it on commit."""

    def __init__(self, key: str, target: Path, folder: Path, if_absent: bool) -> None:
        self._key, self._target, self._if_absent = key, target, if_absent
        self._meter = _Meter()
        _make_folder(folder)
        handle, name = tempfile.mkstemp(dir=folder, prefix=_UNFINISHED)
        self._temp = Path(name)
        self._file = os.fdopen(handle, "wb")

    def write(self, data: bytes) -> None:
        self._meter.add(data)
        with _as_denied():
            self._file.write(data)

    def commit(self) -> BlobInfo:
        try:
            with _as_denied():
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                _publish(self._temp, self._target, if_absent=self._if_absent)
        except _TargetExists:
            raise BlobExists(self._key) from None
        return self._meter.info(self._key)

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, which fails on a full disk
            self._file.close()
        with _as_denied():
            self._temp.unlink(missing_ok=True)


class _S3Writer(BlobWriter):
    """Sends each full part; a blob that fits in one part is sent as a whole."""

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
        while len(self._buffer) > PART_BYTES:  # `commit` sends the last part, which must not be empty
            with self._store._written(self._key, self._mark):
                self._send(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    def commit(self) -> BlobInfo:
        info = self._meter.info(self._key)
        if self._upload is None:
            self._store._put_whole(self._where, bytes(self._buffer), info, self._condition)
            return info
        with self._store._written(self._key, self._mark):
            self._send(bytes(self._buffer))
            self._complete(self._upload)
        self._upload = None
        return info

    def abort(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            # The original error matters more; the sweep and the bucket's lifecycle rule also remove the upload.
            with contextlib.suppress(Exception):
                self._store._client.abort_multipart_upload(**upload)

    def _complete(self, upload: dict[str, str]) -> None:
        """Make the blob of the parts. A store may take conditions for whole blobs only; then look whether it exists."""
        client, parts = self._store._client, {"Parts": self._done}
        try:
            done = client.complete_multipart_upload(**upload, MultipartUpload=parts, **self._condition)
        except client.exceptions.ClientError as error:
            if not self._condition or s3_code(error) not in _NO_CONDITION:
                raise
            self._store._refuse_existing(self._key)
            done = client.complete_multipart_upload(**upload, MultipartUpload=parts)
        _of_store(done, self._key)

    def _send(self, part: bytes) -> None:
        client = self._store._client
        if self._upload is None:
            algorithm = {"ChecksumAlgorithm": "SHA256"} if self._store._checksums else {}
            metadata = {"put": self._mark}
            begun = client.create_multipart_upload(**self._where, Metadata=metadata, **algorithm)
            self._upload = self._where | {"UploadId": _of_store(begun, self._key, "UploadId")["UploadId"]}
        number = len(self._done) + 1
        sent = client.upload_part(**self._upload, PartNumber=number, Body=part, **self._store._checksum(part))
        _of_store(sent, self._key)
        # S3 may require the part checksums again on completion.
        checksums = {name: value for name, value in sent.items() if name in _PART_CHECKSUMS}
        self._done.append({"PartNumber": number, "ETag": sent["ETag"], **checksums})


def open_blobs(
    url: str,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    checksums: Checksums = "when_supported",
    attempts: int = ATTEMPTS,
) -> BlobStore:
    """Open the store of a setting: a path, `file:///path`, or `s3://bucket/prefix`.

    Credentials come from boto3's default chain. `when_required` is for S3-compatible stores without checksums.
    `attempts` is how often S3 is sent a request that fails.
    """
    if "://" not in url:
        if not url:
            raise ValueError(_accepted(url))
        return FolderBlobs(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return FolderBlobs(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        client = s3_client(endpoint_url, region, checksums, attempts=attempts)
        sent = checksums == "when_supported"
        return S3Blobs(parts.netloc, parts.path.strip("/"), client=client, checksums=sent)
    raise ValueError(_accepted(url))


def blobs_of(settings: Settings, *, attempts: int = ATTEMPTS) -> BlobStore:
    """Open the store of the settings."""
    return open_blobs(
        settings.blobs,
        endpoint_url=settings.s3_endpoint_url,
        region=settings.s3_region,
        checksums=settings.s3_checksums,
        attempts=attempts,
    )


def check_not_empty(blobs: BlobStore) -> None:
    """Raise StoreEmpty if the store has no blobs. Call it before treating a missing blob as damage.

    Logs of attempts and self-tests do not count: workers write those to a wrong store, too.
    """
    if all(key.endswith("/log.txt") or key.startswith(f"{SELF_TEST}/") for key in blobs.list("")):
        raise StoreEmpty


def _accepted(url: str) -> str:
    return f"{url!r} names no blob store: use a path, file:///path or s3://bucket/prefix"


def s3_client(
    endpoint_url: str | None, region: str | None, checksums: Checksums, *, attempts: int = ATTEMPTS
) -> Any:
    """A boto3 client that makes up to `attempts` attempts on network and 5xx errors."""
    # Imported lazily: boto3 loads slowly, and a folder store does not need it.
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": attempts},
        connect_timeout=5,
        read_timeout=60,
        request_checksum_calculation=checksums,
        # Our check covers the whole blob and works for resumed downloads, which botocore's does not.
        response_checksum_validation="when_required",
    )
    # Not boto3's default session, which keeps the first credentials that it finds.
    return boto3.Session().client("s3", endpoint_url=endpoint_url, region_name=region, config=config)


_PART_CHECKSUMS = {"ChecksumCRC32", "ChecksumCRC32C", "ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256"}
# Google Cloud Storage's S3 interface has no bulk deletion. Other stores reject it without Content-MD5, or with the
# checksum of botocore.
_NO_BULK_DELETE = {
    "501",
    "InvalidArgument",
    "InvalidRequest",
    "MethodNotAllowed",
    "MissingContentMD5",
    "NotImplemented",
}
_NO_CONDITION = ("NotImplemented", "501", "InvalidArgument")
_TAKEN = ("PreconditionFailed", "412")  # the number if the response has no body
_ENDED = (*_TAKEN, "NoSuchUpload")
_MISSING = ("NoSuchKey", "404")  # the number if the response has no body, as that of a HEAD request
_UNFINISHED = ".part-"


def _of_store(answer: dict[str, Any], key: str, field: str = "ETag") -> dict[str, Any]:
    """A response, which has this field if it is from an S3 store."""
    if field not in answer:
        raise NotTheStore(key, field)
    return answer


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Split into lists of `size` items; the last one may be shorter."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch


# Errors of missing rights, of an immutable file, and of a mount or a file that another program holds.
_NO_RIGHTS = {errno.EACCES, errno.EPERM, errno.EBUSY}


@contextmanager
def _as_denied() -> Iterator[None]:
    """Turn an error of the rights of the folder into FolderDenied; others are raised unchanged."""
    try:
        yield
    except FolderDenied:
        raise
    except OSError as error:
        if error.errno not in _NO_RIGHTS:
            raise
        raise FolderDenied(error.errno, error.strerror, error.filename) from error


def _denials_of(items: Iterable[T]) -> Iterator[T]:
    """The items of a generator that reads the folder; its errors are those of `_as_denied`."""
    with _as_denied():
        yield from items


class _Meter:
    """Counts and hashes the bytes of a stream."""

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


class _TargetExists(Exception):
    """The target of an exclusive publish exists."""


def check_key(key: str) -> None:
    # Unprintable characters are invalid in S3's XML listings and unsafe in logs.
    if not key.isprintable() or any(segment in ("", ".", "..") for segment in key.split("/")):
        raise ValueError(
            f"{key!r} is not a blob key: write segments with '/' between them, none empty, '.' or '..'"
        )


def check_prefix(prefix: str) -> None:
    if prefix:
        check_key(prefix.removesuffix("/"))


def _check_folder(prefix: str) -> None:
    # Without the slash, deleting `jobs/1` would also delete `jobs/10`, and "" everything.
    if not prefix.endswith("/"):
        raise ValueError(f"{prefix!r} must end in '/' to say where the deletion stops")
    check_prefix(prefix)


def _file_chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    with file:
        while chunk := file.read(size):
            yield chunk


def _walk(folder: Path, stem: str) -> Iterator[str]:
    """Every file below `folder` as `stem` plus its path, sorted by the whole key."""
    try:
        # Compare with the slash: "a-b" sorts before "a/b", although "a" sorts before "a-b".
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
    """None: the file was removed after it was listed."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return BlobEntry(key, found.st_size, found.st_mtime)


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A new temporary file in `folder`, deleted at the end unless it was moved."""
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
    """Rename a finished file atomically; with `if_absent`, exactly one of concurrent calls succeeds."""
    for attempts_left in reversed(range(100)):
        try:
            _make_folder(target.parent)
            if if_absent:
                _link(temp, target)
            else:
                temp.replace(target)
            break
        except (FileNotFoundError, FileExistsError):
            # A concurrent delete() removed the folder while it was empty: before our use, or just after mkdir reported
            # it as existing.
            if not attempts_left:
                raise
    with contextlib.suppress(FileNotFoundError):  # already deleted
        _sync_folder(target.parent)


def _link(temp: Path, target: Path) -> None:
    try:
        os.link(temp, target)
    except FileExistsError:
        raise _TargetExists from None


def _make_folder(folder: Path) -> None:
    """mkdir -p that survives a power failure: syncs each parent folder, which makes the new name durable."""
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
