"""Reference, files: every documented way to hand one over, and every call on it."""

import io
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from openai.types import FilePurpose

from tests.conformance.helpers import FILE, assert_documented
from tests.present import untyped

CONTENT = b'{"messages": [{"role": "user", "content": "Hi"}], "reference_answer": "x"}\n'


def path(folder: Path) -> Path:
    (folder / "train.jsonl").write_bytes(CONTENT)
    return folder / "train.jsonl"


SHAPES = {
    "path": (path, "train.jsonl"),
    "open file": (lambda folder: path(folder).open("rb"), "train.jsonl"),
    "bytes": (lambda folder: CONTENT, "upload"),
    "buffer": (lambda folder: io.BytesIO(CONTENT), "upload"),
    "tuple": (lambda folder: ("rows.jsonl", CONTENT), "rows.jsonl"),
    "tuple with a type": (lambda folder: ("rows.jsonl", CONTENT, "application/jsonl"), "rows.jsonl"),
    "tuple with a file": (lambda folder: ("größe.jsonl", io.BytesIO(CONTENT)), "größe.jsonl"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_is_uploaded_in_every_shape(shape: str, tmp_path: Path) -> None:
    make, name = SHAPES[shape]
    client = OpenAI()

    file = client.files.create(file=untyped(make(tmp_path)), purpose="fine-tune")

    assert_documented(file, FILE | {"bytes": len(CONTENT), "filename": name, "purpose": "fine-tune"})
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert client.files.retrieve(file.id).to_dict() == file.to_dict()


@pytest.mark.parametrize("purpose", ["fine-tune", "evals", "batch", "user_data"])
def test_a_file_has_one_of_the_documented_purposes(purpose: FilePurpose) -> None:
    client = OpenAI()

    file = client.files.create(file=("rows.jsonl", CONTENT), purpose=purpose)

    assert_documented(file, FILE | {"purpose": purpose})
    assert file.id in [one.id for one in client.files.list(purpose=purpose, limit=1).data]


def test_a_file_may_expire() -> None:
    file = OpenAI().files.create(
        file=("rows.jsonl", CONTENT),
        purpose="fine-tune",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )

    assert_documented(file, FILE | {"expires_at": file.created_at + 3600})


def test_the_content_is_read_in_every_documented_way(tmp_path: Path) -> None:
    client = OpenAI()
    file = client.files.create(file=("rows.jsonl", CONTENT), purpose="fine-tune")

    content = client.files.content(file.id)
    content.write_to_file(tmp_path / "copy.jsonl")

    assert content.text == CONTENT.decode()
    assert content.read() == content.content == CONTENT
    assert b"".join(client.files.content(file.id).iter_bytes()) == CONTENT
    assert (tmp_path / "copy.jsonl").read_bytes() == CONTENT
    with client.files.with_streaming_response.content(file.id) as stream:
        assert b"".join(stream.iter_bytes()) == CONTENT
    with pytest.warns(DeprecationWarning, match="should be used instead"):
        assert client.files.retrieve_content(file.id) == CONTENT.decode()


def test_a_file_is_deleted() -> None:
    client = OpenAI()
    file = client.files.create(file=("rows.jsonl", CONTENT), purpose="fine-tune")

    deleted = client.files.delete(file.id)

    assert_documented(deleted, {"id": file.id, "object": "file", "deleted": True})
    with pytest.raises(openai.NotFoundError) as gone:
        client.files.retrieve(file.id)
    assert gone.value.body == {
        "message": f"No such File object: {file.id}",
        "type": "invalid_request_error",
        "param": "id",
        "code": None,
    }


@pytest.mark.parametrize("purpose", ["fine-tuning", ""])
def test_another_purpose_is_refused(purpose: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        OpenAI().files.create(file=("rows.jsonl", CONTENT), purpose=untyped(purpose))

    assert refused.value.param == "purpose"
