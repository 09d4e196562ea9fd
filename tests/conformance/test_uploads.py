"""Reference, uploads: a file in parts, by hand and by the client's helper."""

import hashlib
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.conformance.helpers import FILE, UPLOAD, assert_documented, starts
from tests.present import present

CONTENT = b'{"messages": [{"role": "user", "content": "Hi"}], "reference_answer": "x"}\n' * 50


def test_parts_become_a_file_in_the_order_that_is_named() -> None:
    client = OpenAI()
    created = client.uploads.create(
        bytes=len(CONTENT), filename="train.jsonl", mime_type="text/jsonl", purpose="fine-tune"
    )
    assert_documented(created, UPLOAD | {"status": "pending", "file": None, "purpose": "fine-tune"})
    second, first = (
        client.uploads.parts.create(created.id, data=data) for data in (CONTENT[1000:], CONTENT[:1000])
    )
    for part in (first, second):
        assert_documented(
            part,
            {"id": starts("part_"), "object": "upload.part", "created_at": int, "upload_id": created.id},
        )

    completed = client.uploads.complete(
        created.id, part_ids=[first.id, second.id], md5=hashlib.md5(CONTENT).hexdigest()
    )

    assert_documented(completed, UPLOAD | {"status": "completed", "file": FILE})
    assert completed.file is not None
    assert client.files.content(completed.file.id).read() == CONTENT


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_the_helper_uploads_in_chunks(place: str, tmp_path: Path) -> None:
    client = OpenAI()
    options: Any = {
        "mime_type": "text/jsonl",
        "purpose": "fine-tune",
        "part_size": 1024,
        "md5": hashlib.md5(CONTENT).hexdigest(),
    }

    if place == "disk":
        (tmp_path / "big.jsonl").write_bytes(CONTENT)
        upload = client.uploads.upload_file_chunked(file=tmp_path / "big.jsonl", **options)
    else:
        upload = client.uploads.upload_file_chunked(
            file=CONTENT, filename="big.jsonl", bytes=len(CONTENT), **options
        )

    assert_documented(upload, UPLOAD | {"status": "completed", "filename": "big.jsonl", "file": FILE})
    assert client.files.content(present(upload.file).id).content == CONTENT


def test_an_upload_is_cancelled() -> None:
    client = OpenAI()
    created = client.uploads.create(bytes=3, filename="a", mime_type="text/jsonl", purpose="fine-tune")

    cancelled = client.uploads.cancel(created.id)

    assert_documented(cancelled, UPLOAD | {"status": "cancelled", "file": None})
    with pytest.raises(openai.BadRequestError):
        client.uploads.parts.create(created.id, data=b"abc")


@pytest.mark.parametrize("changes", [{"bytes": 4}, {"md5": "0" * 32}])
def test_a_file_that_is_not_what_was_announced_is_refused(changes: dict[str, Any]) -> None:
    client = OpenAI()
    created = client.uploads.create(
        bytes=changes.get("bytes", 3), filename="a", mime_type="text/jsonl", purpose="fine-tune"
    )
    part = client.uploads.parts.create(created.id, data=b"abc")
    md5 = {"md5": changes["md5"]} if "md5" in changes else {}

    with pytest.raises(openai.BadRequestError):
        client.uploads.complete(created.id, part_ids=[part.id], **md5)
