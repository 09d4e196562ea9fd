"""Where bytes live: uploaded files, checkpoints, results. A local folder, or S3.

Keys are relative paths such as `orgs/o1/files/file-abc`, with the same rules in both stores, so that a
deployment can move from one to the other. Nothing is visible under its key before all of it has been written.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol
from urllib.parse import unquote, urlsplit

CHUNK_BYTES = 1 << 20
# S3 takes at most 10,000 parts, which bounds one blob at 78 GiB, and none below 5 MiB except the last.
PART_BYTES = 8 << 20


def is_away(error: BaseException) -> bool:
    """Whether the store may answer again if one only waits: out of reach, overloaded, cut off, or full."""
    if isinstance(error, OSError):
        return isinstance(error, ConnectionError | TimeoutError) or error.errno in _PASSING_ERRNOS
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
    errno.ENETUNREACH,
}


@dataclass(frozen=True)
class BlobInfo:
    """What was stored. Keep the sha256 in the database row or the manifest: a store may not give it back."""

    key: str
    size: int
    sha256: str


class BlobNotFound(KeyError):
    """No blob has this key."""


class BlobExists(Exception):
    """`if_absent` was asked for, and the key is taken.

    Perhaps by ourselves: a request that S3 carried out, but whose answer was lost, is sent again. So compare
    what is there before you call it a conflict.
    """


class BlobCorrupt(Exception):
    """The bytes do not have the sha256 they were stored with."""


class BlobStore(Protocol):
    """Bytes by key. The bodies given here follow from the others; inherit them, or do better."""

    def put_stream(self, key: str, chunks: Iterable[bytes], *, if_absent: bool = False) -> BlobInfo:
        """Store what `chunks` yields without ever holding all of it; an exception half way stores nothing."""
        ...

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The bytes in chunks of `chunk_size`. BlobNotFound comes at once, not with the first next()."""
        ...

    def size(self, key: str) -> int:
        """How many bytes the blob has."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """The keys that start with `prefix`, in order. `jobs/1` also finds `jobs/10`; `jobs/1/` does not."""
        ...

    def url(self, key: str) -> str:
        """Where an operator finds the blob (or what starts with `key`) with tools of their own."""
        ...

    def delete(self, key: str) -> None:
        """Make sure that no blob has this key; deleting twice is fine."""
        ...

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
        for key in self.list(prefix):
            self.delete(key)
            count += 1
        return count


class FolderBlobs(BlobStore):
    """Blobs as files under `root/objects/`, written first under `root/tmp/` on the same filesystem.

    A key cannot also be the folder of another one ("a" and "a/b"), which S3 would allow. A process that is
    killed leaves its temporary file in `root/tmp/`, where no key can reach it. Needs hard links.
    """

    def __init__(self, root: Path) -> None:
        self._objects = root / "objects"
        self._temp = root / "tmp"

    def put_stream(self, key: str, chunks: Iterable[bytes], *, if_absent: bool = False) -> BlobInfo:
        target = self._path(key)
        meter = _Meter()
        with _temporary(self._temp) as temp:
            _write(temp, meter.over(chunks))
            try:
                _publish(temp, target, if_absent=if_absent)
            except _Taken:
                raise BlobExists(key) from None
        return meter.info(key)

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        return _file_chunks(self._opened(key), chunk_size)

    def size(self, key: str) -> int:
        with self._opened(key) as file:
            return os.fstat(file.fileno()).st_size

    def list(self, prefix: str) -> Iterator[str]:
        _check_prefix(prefix)
        folder = prefix[: prefix.rfind("/") + 1]
        return (key for key in _walk(self._objects / folder, folder) if key.startswith(prefix))

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
    of a multipart upload is none. The bucket should have a lifecycle rule that aborts incomplete uploads
    after a day, for those of a process that was killed.
    """

    def __init__(self, bucket: str, prefix: str = "", *, client: Any) -> None:
        if prefix:
            _check_key(prefix)
        self._client = client
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    def put_stream(self, key: str, chunks: Iterable[bytes], *, if_absent: bool = False) -> BlobInfo:
        where = self._where(key)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        meter = _Meter()
        parts = _parts(meter.over(chunks), PART_BYTES)
        first, second = next(parts), next(parts, None)
        with self._named(key):
            if second is None:
                metadata = {"sha256": meter.info(key).sha256}
                self._client.put_object(**where, Body=first, Metadata=metadata, **condition)
            else:
                self._put_parts(where, itertools.chain([first, second], parts), condition)
        return meter.info(key)

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """As BlobStore promises. A connection that breaks half way raises; it is not resumed."""
        with self._named(key):
            body = self._client.get_object(**self._where(key))["Body"]
        chunks: Iterator[bytes] = body.iter_chunks(chunk_size)
        return chunks

    def size(self, key: str) -> int:
        with self._named(key):
            return int(self._client.head_object(**self._where(key))["ContentLength"])

    def list(self, prefix: str) -> Iterator[str]:
        _check_prefix(prefix)
        pages = self._pages(prefix)
        return (name.removeprefix(self._prefix) for page in pages for name in page)

    def url(self, key: str) -> str:
        where = self._where(key)
        return f"s3://{where['Bucket']}/{where['Key']}"

    def delete(self, key: str) -> None:
        self._client.delete_object(**self._where(key))

    def delete_prefix(self, prefix: str) -> int:
        _check_folder(prefix)
        count = 0
        for page in self._pages(prefix):  # a page and a bulk delete have the same limit, 1000 keys
            wanted = {"Objects": [{"Key": name} for name in page], "Quiet": True}
            failed = self._client.delete_objects(Bucket=self._bucket, Delete=wanted).get("Errors", [])
            if failed:
                raise OSError(f"{len(failed)} blobs under {prefix!r} not deleted, the first: {failed[0]}")
            count += len(page)
        return count

    def _put_parts(self, where: dict[str, str], parts: Iterable[bytes], condition: dict[str, str]) -> None:
        upload = where | {"UploadId": self._client.create_multipart_upload(**where)["UploadId"]}
        try:
            done = []
            for number, part in enumerate(parts, start=1):
                sent = self._client.upload_part(**upload, PartNumber=number, Body=part)
                # Checksums that the client added by itself must be repeated at the end, or S3 may refuse.
                checksums = {name: value for name, value in sent.items() if name in _PART_CHECKSUMS}
                done.append({"PartNumber": number, "ETag": sent["ETag"], **checksums})
            self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": done}, **condition)
        except BaseException:
            # The caller must see what went wrong first; the bucket's lifecycle rule is the second net.
            with contextlib.suppress(Exception):
                self._client.abort_multipart_upload(**upload)
            raise

    def _pages(self, prefix: str) -> Iterator[Sequence[str]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        for page in pages:
            if names := [entry["Key"] for entry in page.get("Contents", [])]:
                yield names

    def _where(self, key: str) -> dict[str, str]:
        _check_key(key)
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    @contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """Give S3's answers our names; whatever is not about this key rises as it is."""
        try:
            yield
        except self._client.exceptions.ClientError as error:
            code = error.response["Error"]["Code"]
            if code in ("NoSuchKey", "404"):  # a HEAD has no body to say more than 404
                raise BlobNotFound(key) from error
            if code in ("PreconditionFailed", "412"):
                raise BlobExists(key) from error
            raise


def open_blobs(
    url: str,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    checksums: Literal["when_supported", "when_required"] = "when_supported",
) -> BlobStore:
    """The store a setting names: a path, `file:///path`, or `s3://bucket/prefix`.

    Credentials come from boto3's usual chain. `when_required` is for S3 look-alikes that stumble over the CRC
    checksums boto3 sends by default.
    """
    if "://" not in url:
        if not url:
            raise ValueError(_accepted(url))
        return FolderBlobs(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return FolderBlobs(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        client = _s3_client(endpoint_url, region, checksums)
        return S3Blobs(parts.netloc, parts.path.strip("/"), client=client)
    raise ValueError(_accepted(url))


def _accepted(url: str) -> str:
    return f"{url!r} names no blob store: use a path, file:///path or s3://bucket/prefix"


def _s3_client(endpoint_url: str | None, region: str | None, checksums: str) -> Any:
    # Imported here, because it takes long to load and a folder needs none of it.
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "max_attempts": 5},
        connect_timeout=5,
        read_timeout=60,
        request_checksum_calculation=checksums,
        response_checksum_validation=checksums,
    )
    return boto3.client("s3", endpoint_url=endpoint_url, region_name=region, config=config)


_PART_CHECKSUMS = {"ChecksumCRC32", "ChecksumCRC32C", "ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256"}


class _Meter:
    """Counts and hashes the bytes that flow through."""

    def __init__(self) -> None:
        self._size = 0
        self._sha256 = hashlib.sha256()

    def over(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._size += len(chunk)
            self._sha256.update(chunk)
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


def _parts(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Cut a stream into parts of `size` bytes and a last, shorter one; an empty stream is one empty part."""
    buffer = bytearray()
    empty = True
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= size:
            yield bytes(buffer[:size])
            del buffer[:size]
            empty = False
    if buffer or empty:
        yield bytes(buffer)


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


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A fresh file in `folder`, gone at the end unless it was moved away."""
    _make_folder(folder)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".part-")
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
