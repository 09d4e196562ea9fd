"""Files in other formats get one sentence, the same on upload, in a job, from the client and in a profile."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pyarrow
import pytest
from openai import OpenAI
from pyarrow import parquet
from regraft import Regraft
from regraft.cli import main
from regraft.convert import convert
from regraft.datasets import validate

from core.database.tables import File
from core.jobs.job_files import BadFile
from core.storage.datasets import MAX_TRAINING_ROWS
from core.storage.foreign_files import TARGETS, container_of, detect
from core.storage.store import FolderBlobs
from graders.spec import parse_grader
from tests.sdk.conftest import GRADER, House
from worker.supervise import offline_validation, validation

RFT = "o4-mini-2025-04-16"
ROW = {"messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}
CHAT = {"messages": [*ROW["messages"], {"role": "assistant", "content": "2"}]}
PAIR = {
    "input": {"messages": ROW["messages"]},
    "preferred_output": [{"role": "assistant", "content": "2"}],
    "non_preferred_output": [{"role": "assistant", "content": "3"}],
}
CALL = {"name": "add", "arguments": '{"a": 1}'}


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_parquet(*rows: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), out)
    return out.getvalue()


def does(target: str) -> str:
    return f"`regraft convert FILE --to {target}` does that."


TWELVE = 12  # rows: a supervised job needs ten
ALPACA = lines(*[{"instruction": f"add {n}", "input": "", "output": "b"} for n in range(TWELVE)])
SHAREGPT = lines(
    *[
        {"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": "b"}]}
        for n in range(TWELVE)
    ]
)
COMPLETIONS = lines(*[{"prompt": f"{n}?", "completion": "b"} for n in range(TWELVE)])
CHOSEN = lines(*[{"prompt": f"{n}?", "chosen": "b", "rejected": "c"} for n in range(TWELVE)])
LABELED = lines(*[{"prompt": f"{n}?", "completion": "b", "label": n % 2 == 0} for n in range(TWELVE)])
FUNCTIONS = lines(
    *[
        {
            "messages": [
                {"role": "user", "content": f"{n} + 1?"},
                {"role": "assistant", "content": None, "function_call": CALL},
                {"role": "function", "name": "add", "content": "2"},
                {"role": "assistant", "content": "2"},
            ],
            "functions": [{"name": "add", "parameters": {"type": "object", "properties": {}}}],
        }
        for n in range(TWELVE)
    ]
)
MIXED_LINES = b"question,answer\n" + "".join(f"{n}?,ü{n}\n" for n in range(TWELVE)).encode()
ROWS = [ROW | {"answer": str(n)} for n in range(TWELVE)]
NO_CONTAINER = False
# Name: the file, the method of the job, the sentence, and whether the file is none of JSONL.
FOREIGN: dict[str, tuple[bytes, str, str, bool]] = {
    "a JSON array": (
        json.dumps(ROWS).encode(),
        "reinforcement",
        f"the file is one JSON array; write one object per line. {does('rft')}",
        True,
    ),
    "a pretty JSON array": (
        json.dumps(ROWS, indent=2).encode(),
        "reinforcement",
        f"the file is one JSON array; write one object per line. {does('rft')}",
        True,
    ),
    "an array of a row per line": (
        b"[" + b",\n".join(json.dumps(row).encode() for row in ROWS) + b"]",
        "reinforcement",
        f"the file is one JSON array; write one object per line. {does('rft')}",
        True,
    ),
    "pretty JSON": (
        "\n".join(json.dumps(row, indent=4) for row in ROWS).encode(),
        "reinforcement",
        f"the file has JSON objects over several lines; write one object per line. {does('rft')}",
        True,
    ),
    "UTF-16": (
        lines(*ROWS).decode().encode("utf-16"),
        "reinforcement",
        f"the file is UTF-16; save it as UTF-8. {does('rft')}",
        True,
    ),
    "UTF-16 without a mark": (
        lines(*ROWS).decode().encode("utf-16-le"),
        "reinforcement",
        f"the file is UTF-16; save it as UTF-8. {does('rft')}",
        True,
    ),
    "UTF-32": (
        lines(*ROWS).decode().encode("utf-32"),
        "reinforcement",
        f"the file is UTF-32; save it as UTF-8. {does('rft')}",
        True,
    ),
    "gzip": (
        gzip.compress(lines(*ROWS)),
        "reinforcement",
        f"the file is compressed with gzip; uncompress it. {does('rft')}",
        True,
    ),
    "CSV": (
        MIXED_LINES,
        "supervised",
        f"the file is CSV with the columns question, answer; write one object per line. {does('sft')}",
        True,
    ),
    "CSV of a German Excel": (
        MIXED_LINES.replace(b",", b";").replace(b"\n", b"\r\n"),
        "supervised",
        f"the file is CSV with the columns question, answer; write one object per line. {does('sft')}",
        True,
    ),
    "Parquet": (
        as_parquet(*ROWS),
        "reinforcement",
        f"the file is Parquet; write one object per line. {does('rft')}",
        True,
    ),
    "CR line ends": (
        lines(*ROWS).replace(b"\n", b"\r"),
        "reinforcement",
        f"the lines of the file end with CR alone; end them with LF. {does('rft')}",
        True,
    ),
    "a workbook": (
        b"PK\x03\x04" + bytes(60),
        "reinforcement",
        "the file is a ZIP archive or an Excel workbook; unpack it, or save the sheet as CSV.",
        True,
    ),
    "Alpaca": (
        ALPACA,
        "supervised",
        f"the rows are Alpaca's (instruction, input, output); write them as messages. {does('sft')}",
        NO_CONTAINER,
    ),
    "Alpaca for preferences": (
        ALPACA,
        "dpo",
        "the rows are Alpaca's (instruction, input, output); they can become rows for method 'reinforcement' or "
        "'supervised', not for 'dpo'.",
        NO_CONTAINER,
    ),
    "ShareGPT": (
        SHAREGPT,
        "supervised",
        f"the rows are ShareGPT's (conversations); write them as messages. {does('sft')}",
        NO_CONTAINER,
    ),
    "prompt and completion": (
        COMPLETIONS,
        "supervised",
        f"the rows have prompt and completion; write them as messages. {does('sft')}",
        NO_CONTAINER,
    ),
    "TRL's preferences": (
        CHOSEN,
        "dpo",
        "the rows are TRL's preferences (chosen, rejected); write them as input, preferred_output and "
        f"non_preferred_output. {does('dpo')}",
        NO_CONTAINER,
    ),
    "TRL's labels": (
        LABELED,
        "dpo",
        f"the rows are TRL's labeled answers (prompt, completion, label); write them as input, output and label. {does('dpo')}",
        NO_CONTAINER,
    ),
    "TRL's prompts": (
        lines(*[{"prompt": ROW["messages"], "answer": "2"}] * TWELVE),
        "reinforcement",
        f"the rows have their prompt in the key prompt; write it as messages. {does('rft')}",
        NO_CONTAINER,
    ),
    "questions": (
        lines(*[{"question": "1 + 1?", "answer": "2"}] * TWELVE),
        "reinforcement",
        f"the rows have their prompt in the key question; write it as messages. {does('rft')}",
        NO_CONTAINER,
    ),
    "an input of the Responses API": (
        lines(*[{"input": ROW["messages"], "answer": "2"}] * TWELVE),
        "reinforcement",
        f"the rows have their prompt in the key input; write it as messages. {does('rft')}",
        NO_CONTAINER,
    ),
    "functions": (
        FUNCTIONS,
        "supervised",
        "the rows use functions and function_call, which OpenAI has replaced; write them as tools and tool_calls. "
        f"{does('sft')}",
        NO_CONTAINER,
    ),
}
table = pytest.mark.parametrize(
    ("content", "method", "sentence", "is_container"), FOREIGN.values(), ids=FOREIGN.keys()
)


@pytest.fixture
def desk(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, for a command line that is logged in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGRAFT_BASE_URL", house.base_url)
    monkeypatch.setenv("REGRAFT_API_KEY", house.key)
    return tmp_path


def job(method: str) -> dict[str, Any]:
    inside = {"grader": GRADER} if method == "reinforcement" else {}
    files = {"training_file": "theirs.data"} | ({"validation_split": 0.2} if inside else {})
    return {"model": RFT, "method": {"type": method, method: inside}} | files


def refusal_of_the_worker(content: bytes, method: str, folder: Path) -> str:
    """The message with which a job fails."""
    path = folder / "stored"
    path.write_bytes(content)
    blobs = FolderBlobs(folder / "blobs")
    info = blobs.put_file("file", path)
    file = File(id="file-1", filename="theirs", blob_key="file", bytes=info.size, sha256=info.sha256)
    with pytest.raises(BadFile) as bad:
        if method == "reinforcement":
            validation.check_file(blobs, file, parse_grader(GRADER), "training_file", MAX_TRAINING_ROWS)
        else:
            offline_validation.checked(blobs, file, method, "training_file")
    return bad.value.message


@table
def test_a_foreign_file_is_named_in_one_sentence_everywhere(
    content: bytes,
    method: str,
    sentence: str,
    is_container: bool,
    desk: Path,
    house: House,
    client: Regraft,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = desk / "theirs.data"
    path.write_bytes(content)
    (desk / "job.json").write_text(json.dumps(job(method)))

    found = detect([content])
    assert found is not None
    assert found.sentence(method) == sentence
    assert refusal_of_the_worker(content, method, desk) == f"Training file file-1 (theirs): {sentence}"
    assert main(["validate", path.name, "--method", method]) == 1
    assert capsys.readouterr().out == f"theirs.data: {sentence}\n"
    assert main(["jobs", "create", "-f", "job.json"]) == 1
    assert capsys.readouterr().err == f"regraft: {path.name}: {sentence} (invalid_dataset)\n"
    assert list(client.files.list()) == []
    assert list(client.fine_tuning.jobs.list()) == []

    if is_container:
        with pytest.raises(openai.BadRequestError) as refused:
            client.files.create(file=path, purpose="fine-tune")
        assert refused.value.code == "invalid_file_format"
        assert sentence.split(".")[0] in refused.value.message
    else:
        file = client.files.create(file=path, purpose="fine-tune")
        assert client.profile(file.id, method=method).foreign_format == sentence


@table
def test_a_foreign_file_becomes_a_dataset_of_the_job(
    content: bytes, method: str, sentence: str, is_container: bool, tmp_path: Path
) -> None:
    path = tmp_path / "theirs"
    path.write_bytes(content)
    target = TARGETS[method]
    if f"--to {target}`" not in sentence:
        with pytest.raises(ValueError, match=r"has no two answers|ZIP archive"):
            convert(path, target, tmp_path / "ours.jsonl")
        assert not (tmp_path / "ours.jsonl").exists()
        return

    made = convert(path, target, tmp_path / "ours.jsonl")

    grader = GRADER if method == "reinforcement" else None
    assert made.rows == TWELVE
    assert validate(made.path, method=method, grader=grader).rows == TWELVE
