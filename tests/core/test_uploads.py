"""Files in parts: what is put together, who wins, and what a crash leaves."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sqlalchemy import select, update

from core.database.engine import Database, Work
from core.database.tables import File, Upload, UploadPart
from core.errors import InvalidRequest, PayloadTooLarge, QuotaExceeded, UploadNotFound
from core.storage import uploads
from core.storage.store import BlobInfo, FolderBlobs
from core.tenancy import tenants
from core.tenancy.limits import Limits
from tests import factories
from tests.present import present

pytestmark = pytest.mark.both_databases


@pytest.fixture
def house(database: Database, tmp_path: Path) -> "House":
    return House(database, tmp_path / "blobs")


class House:
    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.folder, self.blobs = database, folder, FolderBlobs(folder)
        with database.write() as session:
            self.project = factories.project(session)

    def begin(self, size: int, **fields: Any) -> str:
        with self.database.write() as session:
            asked: dict[str, Any] = {"filename": "a.jsonl", "purpose": "fine-tune", "mime_type": "text/jsonl"}
            asked |= {"file_expires_after": None} | fields
            return uploads.create(Work(session), self.project.id, size=size, **asked).id

    def add(self, upload_id: str, *pieces: bytes | Callable[..., bytes], **more: Any) -> str:
        part = uploads.PartWriter(self.database, self.blobs, self.project.id, upload_id, **more)
        try:
            for piece in pieces:
                part.write(piece() if callable(piece) else piece)
            return part.commit().id
        finally:
            part.abort()

    def complete(
        self, upload_id: str, *part_ids: str, blobs: FolderBlobs | None = None, **more: Any
    ) -> tuple[Upload, File | None]:
        return uploads.complete(
            self.database, blobs or self.blobs, self.project.id, upload_id, part_ids=part_ids, **more
        )

    def cancel(self, upload_id: str) -> Upload:
        with self.database.write() as session:
            return uploads.cancel(Work(session), self.project.id, upload_id)

    def change(self, upload_id: str, **values: Any) -> None:
        with self.database.write() as session:
            session.execute(update(Upload).where(Upload.id == upload_id).values(**values))

    def rows(self, table: type[Any]) -> Sequence[Any]:
        with self.database.read() as session:
            return session.scalars(select(table)).all()

    def keys(self, prefix: str = "files") -> list[Any]:
        return list(self.blobs.list(f"projects/{self.project.id}/{prefix}/"))


class Interrupting(FolderBlobs):
    """Does something else in the middle of every put."""

    def __init__(self, root: Path, meanwhile: Callable[..., Any]) -> None:
        super().__init__(root)
        self.meanwhile = meanwhile

    def put_stream(self, key: str, chunks: Iterable[bytes], *, if_absent: bool = False) -> BlobInfo:
        info = super().put_stream(key, chunks, if_absent=if_absent)
        self.meanwhile()
        return info


def test_the_parts_become_one_file_in_the_order_that_is_asked_for(house: House) -> None:
    upload_id = house.begin(11)
    world, hello = house.add(upload_id, b"world"), house.add(upload_id, b"hello ")

    upload, file = house.complete(upload_id, hello, world)

    assert file is not None
    assert (upload.status, upload.file_id) == ("completed", file.id)
    assert house.blobs.read(file.blob_key) == b"hello world"
    assert (file.bytes, file.sha256) == (11, hashlib.sha256(b"hello world").hexdigest())


def test_a_part_that_was_sent_twice_may_be_left_out(house: House) -> None:
    upload_id = house.begin(1)
    first, _ = house.add(upload_id, b"a"), house.add(upload_id, b"a")

    assert present(house.complete(upload_id, first)[1]).bytes == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("twice", "is listed twice"),
        ("unknown", "has no part 'part_unknown'"),
        ("another's", "has no part"),
        ("short", "have 2 bytes, but the upload was announced with 4"),
        ("md5", "not 00000000000000000000000000000000"),
    ],
)
def test_what_does_not_fit_together_is_refused_and_can_be_put_right(
    house: House, name: str, message: str
) -> None:
    upload_id, other = house.begin(4), house.begin(2)
    first, second, foreign = house.add(upload_id, b"ab"), house.add(upload_id, b"cd"), house.add(other, b"xy")
    asked = {
        "twice": [first, first],
        "unknown": [first, "part_unknown"],
        "another's": [first, foreign],
        "short": [first],
        "md5": [first, second],
    }[name]

    with pytest.raises(InvalidRequest, match=message):
        house.complete(upload_id, *asked, md5="0" * 32 if name == "md5" else None)

    assert house.keys() == []
    right = hashlib.md5(b"abcd").hexdigest().upper()
    assert house.complete(upload_id, first, second, md5=right)[0].status == "completed"


def test_completing_twice_gives_the_same_file(house: House) -> None:
    upload_id = house.begin(1)
    part = house.add(upload_id, b"a")
    _, file = house.complete(upload_id, part)
    while uploads.discard_parts(house.database, house.blobs):
        pass

    assert present(house.complete(upload_id, part)[1]).id == present(file).id
    assert file is not None
    assert house.keys() == [file.blob_key]


def test_of_many_who_complete_at_once_all_get_the_same_file(house: House) -> None:
    upload_id = house.begin(1)
    part = house.add(upload_id, b"a")
    together = threading.Barrier(4)

    def complete(_: Any) -> str:
        # All have read the parts before anybody is done.
        return present(house.complete(upload_id, part, blobs=Interrupting(house.folder, together.wait))[1]).id

    with ThreadPoolExecutor(4) as threads:
        ids = set(threads.map(complete, range(4)))

    [file] = house.rows(File)
    assert ids == {file.id}
    assert house.keys() == [file.blob_key]


def test_who_is_late_because_the_parts_are_gone_gets_the_file_of_the_first(house: House) -> None:
    upload_id = house.begin(1)
    part = house.add(upload_id, b"a")

    class Overtaken(FolderBlobs):
        def open(self, key: str, **more: int) -> Iterator[bytes]:
            house.complete(upload_id, part)
            uploads.discard_parts(house.database, house.blobs)
            return super().open(key, **more)

    slow = Overtaken(house.folder)
    _, file = house.complete(upload_id, part, blobs=slow)

    assert file is not None
    assert [file.id] == [one.id for one in house.rows(File)]


@pytest.mark.parametrize("end", ["completed", "cancelled", "expired"])
def test_an_upload_that_ended_takes_no_more_parts(house: House, end: str) -> None:
    upload_id = house.begin(1)
    part = house.add(upload_id, b"a")
    finish(house, end, upload_id, part)

    with pytest.raises(InvalidRequest, match=end) as refusal:
        house.add(upload_id, b"b")

    assert refusal.value.code == "invalid_upload_state"
    assert len(house.keys("uploads")) == 1  # what was refused is not kept


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_an_upload_that_ended_otherwise_cannot_be_completed(house: House, end: str) -> None:
    upload_id = house.begin(1)
    part = house.add(upload_id, b"a")
    finish(house, end, upload_id, part)

    with pytest.raises(InvalidRequest, match=end):
        house.complete(upload_id, part)
    assert house.keys() == []


def finish(house: House, end: str, upload_id: str, part: str) -> None:
    if end == "completed":
        house.complete(upload_id, part)
    elif end == "cancelled":
        house.cancel(upload_id)
    else:
        house.change(upload_id, expires_at=int(time.time()))


def test_an_upload_that_is_cancelled_while_a_part_arrives_does_not_get_it(house: House) -> None:
    upload_id = house.begin(1)

    def arriving() -> bytes:
        house.cancel(upload_id)
        return b"a"

    with pytest.raises(InvalidRequest, match="cancelled"):
        house.add(upload_id, arriving)
    assert (house.keys("uploads"), house.rows(UploadPart)) == ([], [])


def test_an_upload_that_is_cancelled_while_it_is_put_together_makes_no_file(house: House) -> None:
    upload_id = house.begin(1)
    part = house.add(upload_id, b"a")

    with pytest.raises(InvalidRequest, match="cancelled"):
        house.complete(upload_id, part, blobs=Interrupting(house.folder, lambda: house.cancel(upload_id)))
    assert (house.keys(), house.rows(File)) == ([], [])


def test_an_upload_does_not_expire_while_it_is_put_together(house: House) -> None:
    upload_id = house.begin(1)
    part = house.add(upload_id, b"a")
    house.change(upload_id, expires_at=int(time.time()) + 5)
    seen = []

    def expire() -> None:
        with house.database.write() as session:
            seen.append(uploads.expire(session))
            # It was given more than the five seconds that it had left.
            seen.append(uploads.get(session, house.project.id, upload_id).expires_at > time.time() + 600)

    house.complete(upload_id, part, blobs=Interrupting(house.folder, expire))

    assert seen == [0, True]


def test_cancelling_twice_is_fine_and_cancelling_a_completed_one_is_not(house: House) -> None:
    upload_id, done = house.begin(1), house.begin(1)
    house.complete(done, house.add(done, b"a"))

    assert [house.cancel(upload_id).status for _ in range(2)] == ["cancelled"] * 2
    with pytest.raises(InvalidRequest, match="already completed"):
        house.cancel(done)


def test_a_crash_before_the_commit_leaves_the_upload_as_it_was(house: House) -> None:
    upload_id = house.begin(1)
    part = house.add(upload_id, b"a")

    class Dies(BaseException):
        pass

    def die() -> NoReturn:
        raise Dies

    with pytest.raises(Dies):
        house.complete(upload_id, part, blobs=Interrupting(house.folder, die))

    assert house.rows(File) == []
    assert present(house.complete(upload_id, part)[1]).bytes == 1


def test_parts_go_when_the_upload_has_ended_and_not_before(house: House) -> None:
    pending, ended = house.begin(1), house.begin(1)
    house.add(pending, b"a"), house.add(ended, b"b")
    house.cancel(ended)

    assert uploads.discard_parts(house.database, house.blobs) == 1
    assert uploads.discard_parts(house.database, house.blobs) == 0

    [left] = house.rows(UploadPart)
    assert (left.upload_id, house.keys("uploads")) == (pending, [left.blob_key])


def test_only_late_uploads_expire(house: House) -> None:
    late, early, done = house.begin(1), house.begin(1), house.begin(1)
    house.complete(done, house.add(done, b"a"))
    for upload_id in (late, done):
        house.change(upload_id, expires_at=int(time.time()) - 1)

    with house.database.write() as session:
        assert uploads.expire(session) == 1

    assert {row.id: row.status for row in house.rows(Upload)} == {
        late: "expired",
        early: "pending",
        done: "completed",
    }


def test_an_upload_has_an_hour_and_its_file_the_time_that_was_asked_for(house: House) -> None:
    upload_id = house.begin(1, file_expires_after=7200)

    upload, file = house.complete(upload_id, house.add(upload_id, b"a"))

    assert file is not None
    assert upload.created_at <= file.created_at <= present(file.expires_at) - 7200
    [row] = house.rows(Upload)
    assert row.created_at + uploads.LIFETIME <= row.expires_at


def test_every_part_may_be_sent_twice_and_then_there_is_an_end(house: House) -> None:
    upload_id = house.begin(4)
    for piece in (b"ab", b"ab", b"cd", b"cd"):
        house.add(upload_id, piece)

    with pytest.raises(InvalidRequest, match="announced with 4 bytes, and has received 8"):
        house.add(upload_id, b"e")
    with pytest.raises(InvalidRequest, match="already has 4 parts"):
        house.add(upload_id, b"e", most_parts=4)


def test_a_part_larger_than_any_part_may_be_is_refused_while_it_arrives(house: House) -> None:
    upload_id = house.begin(100)

    with pytest.raises(PayloadTooLarge, match="larger than the maximum of 3 bytes"):
        house.add(upload_id, b"abc", b"d", most_bytes=3)

    assert house.keys("uploads") == []


def test_a_part_larger_than_the_upload_was_announced_is_refused_while_it_arrives(house: House) -> None:
    upload_id = house.begin(1)
    asked = []

    def more() -> bytes:
        asked.append(1)
        return b"x" * 1000

    with pytest.raises(InvalidRequest, match="announced with 1 bytes, and this part has more"):
        house.add(upload_id, b"a", more, more)

    assert asked == [1]
    assert house.keys("uploads") == []


def stored(house: House) -> int:
    with house.database.read() as session:
        return tenants.stored_bytes(session, house.project.id)


def test_the_quota_counts_what_an_upload_announced_or_has_received_whichever_is_more(house: House) -> None:
    upload_id, other = house.begin(4), house.begin(10)
    assert stored(house) == 14

    for piece in (b"abc", b"abc"):
        house.add(upload_id, piece)

    assert stored(house) == 16
    house.cancel(other)
    assert stored(house) == 6


def test_what_an_ended_upload_has_received_counts_until_it_is_deleted(house: House) -> None:
    late, cancelled = house.begin(4), house.begin(4)
    house.add(late, b"abc")
    house.add(cancelled, b"ab")
    house.change(late, expires_at=int(time.time()) - 1)
    house.cancel(cancelled)
    assert stored(house) == 5

    with house.database.write() as session:
        uploads.expire(session)
    uploads.discard_parts(house.database, house.blobs)

    assert stored(house) == 0


def test_a_part_beyond_what_was_announced_needs_room_of_its_own(house: House) -> None:
    limits = Limits(storage_bytes=5)
    upload_id = house.begin(4, limits=limits)
    house.add(upload_id, b"abc", limits=limits)

    with pytest.raises(QuotaExceeded, match="storage_bytes is 5"):
        house.add(upload_id, b"abc", limits=limits)

    house.add(upload_id, b"de", limits=limits)
    assert stored(house) == 5
    assert len(house.keys("uploads")) == 2


def test_a_project_has_no_more_than_so_many_pending_uploads(house: House) -> None:
    first = house.begin(1, most_pending=2)
    late = house.begin(1, most_pending=2)
    with pytest.raises(QuotaExceeded, match="pending_uploads is 2"):
        house.begin(1, most_pending=2)

    house.cancel(first)
    house.change(late, expires_at=int(time.time()) - 1)

    assert house.begin(1, most_pending=2) and house.begin(1, most_pending=2)


def test_another_projects_upload_does_not_exist(house: House) -> None:
    upload_id = house.begin(1)
    with house.database.write() as session:
        other = factories.project(session)

    with house.database.read() as session, pytest.raises(UploadNotFound):
        uploads.get(session, other.id, upload_id)


def test_an_upload_of_known_content_shares_its_blob(house: House) -> None:
    contents = [b"same", b"same", b"other"]
    files = [
        present(house.complete(upload, house.add(upload, content))[1])
        for content in contents
        for upload in [house.begin(len(content))]
    ]

    first, second, other = files
    assert (first.blob_key == second.blob_key, first.blob_key == other.blob_key) == (True, False)
    stored = [key for key in house.blobs.list("projects/") if "/files/" in key]
    assert sorted(stored) == sorted({file.blob_key for file in files})


def test_an_upload_of_damaged_content_has_its_own_blob(house: House) -> None:
    first = present(house.complete(upload := house.begin(4), house.add(upload, b"same"))[1])
    house.blobs.put_bytes(first.blob_key, b"damn")

    second = present(house.complete(again := house.begin(4), house.add(again, b"same"))[1])

    assert second.blob_key != first.blob_key
    assert house.blobs.read(second.blob_key) == b"same"
