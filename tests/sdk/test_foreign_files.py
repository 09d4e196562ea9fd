"""Files in other formats get one sentence, the same on upload, in a job, from the client and in a profile."""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Literal

import openai
import pyarrow
import pytest
from pyarrow import ipc, parquet
from regraft import InvalidDataset, Regraft
from regraft.cli import main
from regraft.convert import SameFile, convert, json_lines
from regraft.datasets import validate
from regraft.literals import FileMethod

from core.database.tables import File
from core.jobs.job_files import BadFile
from core.storage.datasets import MAX_LINE_BYTES, MAX_TRAINING_ROWS
from core.storage.foreign_files import (
    ARROW_FILE,
    ARROW_STREAM,
    EMPTY,
    HEAD_BYTES,
    PARQUET,
    TARGETS,
    ZSTD,
    Target,
    detect,
)
from core.storage.store import FolderBlobs
from graders.spec import parse_grader
from tests.present import present
from tests.sdk.conftest import GRADER, House
from worker.supervisor import offline_validation, validation

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


def as_arrow(*rows: dict[str, Any], is_stream: bool = False) -> bytes:
    table = pyarrow.Table.from_pylist(list(rows))
    out = io.BytesIO()
    with (ipc.new_stream if is_stream else ipc.new_file)(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return out.getvalue()


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "zstd": zstd,
}


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
ULTRAFEEDBACK = lines(
    *[
        {
            "prompt": f"{n}?",
            "chosen": (good := [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "b"}]),
            "rejected": [good[0], {"role": "assistant", "content": "c"}],
            "messages": good,
        }
        for n in range(TWELVE)
    ]
)
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
FOREIGN: dict[str, tuple[bytes, FileMethod, str, bool]] = {
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
    **{
        name: (
            compress(lines(*ROWS)),
            "reinforcement",
            f"the file is compressed with {name}; uncompress it. {does('rft')}",
            True,
        )
        for name, compress in COMPRESS.items()
    },
    "Arrow": (
        as_arrow(*ROWS),
        "reinforcement",
        f"the file is Arrow or Feather; write one object per line. {does('rft')}",
        True,
    ),
    "an Arrow stream": (
        as_arrow(*ROWS, is_stream=True),
        "reinforcement",
        "the file is an Arrow stream, such as of datasets' save_to_disk; write one object per line. "
        f"{does('rft')}",
        True,
    ),
    "the page of a login": (
        b"\n<!DOCTYPE html>\n<html><title>Sign in</title></html>\n",
        "reinforcement",
        "the file is an HTML or XML page, such as that of a login or of an error; download the data once more and "
        "look at it before the upload.",
        True,
    ),
    "an error of S3": (
        b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>',
        "supervised",
        "the file is an HTML or XML page, such as that of a login or of an error; download the data once more and "
        "look at it before the upload.",
        True,
    ),
    "a pointer of Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
        "reinforcement",
        "the file is a pointer of Git LFS; download the data with `git lfs pull`.",
        True,
    ),
    "an old Excel": (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600),
        "reinforcement",
        "the file is binary; save its rows as JSONL, CSV or Parquet.",
        True,
    ),
    "CSV with one column": (
        b"messages\n"
        + b"".join(b'"%b"\n' % json.dumps(CHAT["messages"]).replace('"', '""').encode() for _ in ROWS),
        "supervised",
        f"the file is CSV with the column messages; write one object per line. {does('sft')}",
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
    "Dolly": (
        lines(*[{"instruction": "1 + 1?", "context": "", "response": "2", "category": "math"}] * TWELVE),
        "supervised",
        f"the rows are Dolly's (instruction, context, response); write them as messages. {does('sft')}",
        NO_CONTAINER,
    ),
    "instructions": (
        lines(*[{"instruction": "1 + 1?", "answer": "2"}] * TWELVE),
        "reinforcement",
        f"the rows have their prompt in the key instruction; write it as messages. {does('rft')}",
        NO_CONTAINER,
    ),
    "TRL's preferences for reinforcement": (
        CHOSEN,
        "reinforcement",
        "the rows are TRL's preferences (chosen, rejected); write them as input, preferred_output and "
        f"non_preferred_output, or the prompts as messages. {does('rft')}",
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
        f"non_preferred_output, or the prompts as messages. {does('dpo')}",
        NO_CONTAINER,
    ),
    "UltraFeedback's preferences, with the chosen conversation in messages": (
        ULTRAFEEDBACK,
        "dpo",
        "the rows are TRL's preferences (chosen, rejected); write them as input, preferred_output and "
        f"non_preferred_output, or the prompts as messages. {does('dpo')}",
        NO_CONTAINER,
    ),
    "TRL's labels": (
        LABELED,
        "dpo",
        "the rows are TRL's labeled answers (prompt, completion, label); write them as input, output and label, "
        f"or the good ones as messages. {does('dpo')}",
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
    "messages in texts of JSON": (
        lines(*[{"messages": json.dumps(ROW["messages"]), "answer": str(n)} for n in range(TWELVE)]),
        "reinforcement",
        f"the rows have their messages as texts of JSON; write them as lists. {does('rft')}",
        NO_CONTAINER,
    ),
    "functions for prompts": (
        FUNCTIONS,
        "reinforcement",
        "the rows use functions and function_call, which OpenAI has replaced; write them as tools and tool_calls. "
        f"{does('rft')}",
        NO_CONTAINER,
    ),
    "functions without an answer": (
        lines(*[{"messages": [*ROW["messages"], {"role": "assistant", "function_call": CALL}]}] * TWELVE),
        "reinforcement",
        "the rows use functions and function_call, which OpenAI has replaced; they can become rows for method "
        "'supervised', not for 'reinforcement'.",
        NO_CONTAINER,
    ),
    "pairs in texts of JSON": (
        lines(*[{name: json.dumps(value) for name, value in PAIR.items()}] * TWELVE),
        "dpo",
        f"the rows have their messages as texts of JSON; write them as lists. {does('dpo')}",
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
PREFERENCES_SENTENCE = (
    "the rows are TRL's preferences (chosen, rejected); write them as input, preferred_output and "
)
HH = lines(
    *[
        {
            name: f"\n\nHuman: {n}?\n\nAssistant: Which one?\n\nHuman: All.\n\nAssistant: {text}"
            for name, text in (("chosen", "b"), ("rejected", "c"))
        }
        for n in range(TWELVE)
    ]
)
TOOL_TURNS = [
    {"from": "human", "value": "1 + 1?"},
    {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1}})},
    {"from": "observation", "value": "2"},
    {"from": "gpt", "value": "2"},
]
HERMES = [
    TOOL_TURNS[0],
    {"from": "gpt", "value": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'},
    {"from": "tool", "value": "<tool_response>2</tool_response>"},
    TOOL_TURNS[3],
]
WITH_CALLS = (
    f"the rows are ShareGPT's with calls of tools (conversations); write them as messages. {does('rft')}"
)


def a_tar(mode: Literal["w", "w:gz"]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        member = tarfile.TarInfo("train.jsonl")
        member.size = len(content := lines(*ROWS))
        archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


FOREIGN |= {
    "Anthropic's hh-rlhf": (
        HH,
        "dpo",
        f"{PREFERENCES_SENTENCE}non_preferred_output, or the prompts as messages. {does('dpo')}",
        NO_CONTAINER,
    ),
    "hh-rlhf for reinforcement": (
        HH,
        "reinforcement",
        f"{PREFERENCES_SENTENCE}non_preferred_output, or the prompts as messages. {does('rft')}",
        NO_CONTAINER,
    ),
    "LLaMA-Factory's preferences": (
        lines(
            *[
                {
                    "conversations": [{"from": "human", "value": f"{n}?"}],
                    "chosen": {"from": "gpt", "value": "b"},
                    "rejected": {"from": "gpt", "value": "c"},
                }
                for n in range(TWELVE)
            ]
        ),
        "dpo",
        "the rows are LLaMA-Factory's preferences (conversations, chosen, rejected); write them as input, "
        f"preferred_output and non_preferred_output, or the prompts as messages. {does('dpo')}",
        NO_CONTAINER,
    ),
    "columns": (
        json.dumps({"prompt": [f"{n}?" for n in range(TWELVE)], "answer": ["b"] * TWELVE}).encode(),
        "reinforcement",
        f"the file is one JSON object with its columns; write one object per line. {does('rft')}",
        NO_CONTAINER,
    ),
    "columns with messages": (
        json.dumps({name: [row[name] for row in ROWS] for name in ROW}).encode(),
        "reinforcement",
        f"the file is one JSON object with its columns; write one object per line. {does('rft')}",
        NO_CONTAINER,
    ),
    "columns of pandas with messages": (
        json.dumps({name: {n: row[name] for n, row in enumerate(ROWS)} for name in ROW}).encode(),
        "reinforcement",
        f"the file is one JSON object with its columns; write one object per line. {does('rft')}",
        NO_CONTAINER,
    ),
    "columns of pandas with pairs": (
        json.dumps({name: dict.fromkeys(range(TWELVE), PAIR[name]) for name in PAIR}).encode(),
        "dpo",
        f"the file is one JSON object with its columns; write one object per line. {does('dpo')}",
        NO_CONTAINER,
    ),
    "columns of pandas": (
        json.dumps({name: {str(n): name for n in range(TWELVE)} for name in ("prompt", "answer")}).encode(),
        "supervised",
        f"the file is one JSON object with its columns; write one object per line. {does('sft')}",
        NO_CONTAINER,
    ),
    "calls of ShareGPT": (
        lines(*[{"conversations": TOOL_TURNS}] * TWELVE),
        "reinforcement",
        WITH_CALLS,
        NO_CONTAINER,
    ),
    "calls of Hermes": (
        lines(*[{"conversations": HERMES}] * TWELVE),
        "reinforcement",
        WITH_CALLS,
        NO_CONTAINER,
    ),
    "lines of space between rows": (
        ALPACA.replace(b"\n", b"\n\n"),
        "reinforcement",
        f"the rows are Alpaca's (instruction, input, output); write them as messages. {does('rft')}",
        NO_CONTAINER,
    ),
    "turns of ShareGPT in messages": (
        SHAREGPT.replace(b"conversations", b"messages"),
        "supervised",
        f"the messages have ShareGPT's keys (from, value); write them as role and content. {does('sft')}",
        NO_CONTAINER,
    ),
    "a question with its answer under another name": (
        lines(*[{"question": "1 + 1?", "a": "2"}] * TWELVE),
        "supervised",
        "the rows have their prompt in the key question; write it as messages. `regraft convert FILE --to sft --map "
        "answer=FIELD` does that.",
        NO_CONTAINER,
    ),
    "prompts alone": (
        lines(*[{"prompt": "1 + 1?"}] * TWELVE),
        "supervised",
        "the rows have their prompt in the key prompt; they can become rows for method 'reinforcement', not for "
        "'supervised'.",
        NO_CONTAINER,
    ),
    "unknown keys": (
        lines(*[{"q": "1 + 1?", "a": "2"}] * TWELVE),
        "supervised",
        "the rows have no known key for their prompt (they have q, a); write them as messages. `regraft convert FILE "
        "--to sft --map prompt=FIELD --map answer=FIELD` does that.",
        NO_CONTAINER,
    ),
    "a known key with a capital": (
        lines(*[{"Messages": ROW["messages"], "answer": "2"}] * TWELVE),
        "reinforcement",
        "the rows have no known key for their prompt (they have Messages, answer); write them as messages. "
        f"{does('rft')}",
        NO_CONTAINER,
    ),
    "columns with unknown names": (
        json.dumps({"q": [f"{n}?" for n in range(TWELVE)], "a": ["b"] * TWELVE}).encode(),
        "supervised",
        "the file is one JSON object with its columns; write one object per line. `regraft convert FILE --to sft "
        "--map prompt=FIELD --map answer=FIELD` does that.",
        NO_CONTAINER,
    ),
    "columns of pandas with unknown names": (
        json.dumps({name: {str(n): name for n in range(TWELVE)} for name in ("q", "a", "b")}).encode(),
        "dpo",
        "the file is one JSON object with its columns; pairs need two answers in each row: if these have them, name "
        "them with `regraft convert FILE --to dpo --map prompt=FIELD --map chosen=FIELD --map rejected=FIELD`.",
        NO_CONTAINER,
    ),
    "a table with two unknown columns for preferences": (
        b"question,a,b\n" + b"1 + 1?,2,3\n" * TWELVE,
        "dpo",
        "the file is CSV with the columns question, a, b; pairs need two answers in each row: if these have them, name "
        "them with `regraft convert FILE --to dpo --map chosen=FIELD --map rejected=FIELD`.",
        True,
    ),
    "a table with one answer for preferences": (
        b"q,a\n" + b"1 + 1?,2\n" * TWELVE,
        "dpo",
        "the file is CSV with the columns q, a; its rows can become rows for method 'reinforcement' or 'supervised', "
        "not for 'dpo'.",
        True,
    ),
    "a tar archive": (a_tar("w"), "reinforcement", "the file is a tar archive; unpack it.", True),
    "a compressed archive": (a_tar("w:gz"), "reinforcement", "the file is a tar archive; unpack it.", True),
    "a file that is compressed twice": (
        gzip.compress(bz2.compress(lines(*ROWS))),
        "reinforcement",
        "the file is compressed twice; uncompress it.",
        True,
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
    read: Callable[[], Any] = partial(offline_validation.checked, blobs, file, method, "training_file")
    if method == "reinforcement":
        spec = parse_grader(GRADER)
        read = partial(validation.check_file, blobs, file, spec, "training_file", MAX_TRAINING_ROWS)
    with pytest.raises(BadFile) as bad:
        read()
    return bad.value.message


@table
def test_a_foreign_file_is_named_in_one_sentence_everywhere(
    content: bytes,
    method: FileMethod,
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
        assert sentence.split(";")[0] in refused.value.message
    else:
        file = client.files.create(file=path, purpose="fine-tune")
        assert client.profile(file.id, method=method).foreign_format == sentence


@table
def test_a_foreign_file_becomes_a_dataset_of_the_job(
    content: bytes, method: FileMethod, sentence: str, is_container: bool, tmp_path: Path
) -> None:
    path = tmp_path / "theirs"
    path.write_bytes(content)
    target = TARGETS[method]
    if f"--to {target}" not in sentence:
        with pytest.raises(
            ValueError,
            match=f"has no (two answers|answer|prompt)|that is not one text|{re.escape(sentence[:30])}",
        ):
            convert(path, target, tmp_path / "ours.jsonl")
        assert not (tmp_path / "ours.jsonl").exists()
        return

    made = convert(path, target, tmp_path / "ours.jsonl", names=told(sentence))

    grader = GRADER if method == "reinforcement" else None
    assert made.rows == TWELVE
    assert validate(made.path, method=method, grader=grader).rows == TWELVE


def told(sentence: str) -> dict[str, str]:
    """What a user writes for FIELD, in the files whose sentences ask for it."""
    fields = {"prompt": "q", "answer": "a", "chosen": "a", "rejected": "b"}
    return {name: field for name, field in fields.items() if f"--map {name}=FIELD" in sentence}


@table
def test_each_command_that_the_sentence_about_rows_names_works(
    content: bytes, method: FileMethod, sentence: str, is_container: bool, tmp_path: Path
) -> None:
    found = detect([content])
    path = tmp_path / "theirs"
    path.write_bytes(content)

    assert found is not None
    # The rows of these are unknown until pyarrow reads them.
    needs_pyarrow = found in (PARQUET, ARROW_FILE, ARROW_STREAM, ZSTD)
    for target in () if needs_pyarrow else found.targets:
        assert f"{target}" in found.sentence()
        names = told(found.sentence())
        assert convert(path, target, tmp_path / f"{target}.jsonl", names=names).rows > 0


def array(rows: list[dict[str, Any]]) -> bytes:
    return json.dumps(rows).encode()


def pretty(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(row, indent=2) for row in rows).encode()


def wrapped(rows: list[dict[str, Any]]) -> bytes:
    return json.dumps({"data": rows}).encode()


def table_of(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(
        {key: one if isinstance(one, str) else json.dumps(one) for key, one in row.items()} for row in rows
    )
    return text.getvalue().encode()


@pytest.mark.parametrize(
    "put",
    [
        array,
        pretty,
        wrapped,
        table_of,
        lambda rows: gzip.compress(lines(*rows)),
        lambda rows: gzip.compress(array(rows)),
        lambda rows: lines(*rows).decode().encode("utf-16"),
        lambda rows: lines(*rows).replace(b"\n", b"\r"),
    ],
    ids=["array", "pretty", "data", "CSV", "gzip", "gzip of an array", "UTF-16", "CR"],
)
@pytest.mark.parametrize(
    ("row", "targets"),
    [
        ({"messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}, ("rft", "sft")),
        ({"messages": [{"role": "user", "content": "1 + 1?"}], "label": "2"}, ("rft", "sft")),
        ({"messages": [{"role": "user", "content": "1 + 1?"}]}, ("rft",)),
        (CHAT, ("rft", "sft")),
        ({"prompt": "1 + 1?"}, ("rft",)),
        ({"message": "1 + 1?", "topic": "sums"}, ("rft", "sft")),
        ({"message": "1 + 1?", "answer": "2"}, ("rft", "sft")),
        ({"a": "1 + 1?", "b": "2", "c": "3"}, ("rft", "sft")),
        ({"Question": "1 + 1?", "Answer": "2"}, ("rft", "sft")),
        ({"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}, ("rft", "sft", "dpo")),
    ],
    ids=[
        "rft",
        "rft with another field",
        "a prompt",
        "a chat",
        "prompt",
        "unknown fields",
        "an answer to an unknown field",
        "three unknown fields",
        "capitals",
        "preferences",
    ],
)
def test_the_sentence_about_a_file_names_the_commands_that_its_rows_allow(
    row: dict[str, Any], targets: tuple[Target, ...], put: Callable[..., bytes], tmp_path: Path
) -> None:
    found = present(detect([put([row] * TWELVE)]))

    assert found.targets == targets
    for target in targets:
        sentence = replace(found, targets=(target,)).sentence()
        asked = [name for name in ("prompt", "answer") if f"--map {name}=FIELD" in sentence]
        names = {name: list(row)[name == "answer"] for name in asked}
        assert len(convert_text(tmp_path, put([row] * TWELVE), target, **names)) == TWELVE


def test_the_sentence_about_columns_without_a_prompt_asks_for_it() -> None:
    found = present(detect([table_of([{"message": "1 + 1?", "topic": "sums"}])]))

    assert found.sentence("reinforcement") == (
        "the file is CSV with the columns message, topic; write one object per line. "
        "`regraft convert FILE --to rft --map prompt=FIELD` does that."
    )
    assert "--to sft --map prompt=FIELD --map answer=FIELD" in found.sentence("supervised")


def test_a_table_with_tabs_and_short_names_asks_for_its_prompt() -> None:
    assert "--map prompt=FIELD" in present(detect([b"a\tb\n1 + 1?\t2\n"])).sentence()


@pytest.mark.parametrize("content", [b"[]", b" [\n ]\n"])
def test_an_array_without_rows_is_an_empty_file(content: bytes, tmp_path: Path) -> None:
    assert present(detect([content])) is EMPTY
    with pytest.raises(InvalidDataset, match="the file is empty"):
        convert_text(tmp_path, content, "rft")


@pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["as it is", "compressed"])
def test_a_row_of_a_table_that_the_start_of_the_file_cuts_is_not_judged(
    packed: Callable[[bytes], bytes],
) -> None:
    row = {"prompt": "1 + 1?" * 900, "chosen": "2", "rejected": "3"}
    content = packed(table_of([row] * TWELVE * 2))

    found = present(detect(content[at : at + HEAD_BYTES] for at in range(0, len(content), HEAD_BYTES)))

    assert found.targets == ("rft", "sft", "dpo")


def convert_text(folder: Path, content: bytes, target: Target, **names: str) -> list[dict[str, Any]]:
    (folder / "theirs").write_bytes(content)
    made = convert(folder / "theirs", target, folder / "ours.jsonl", names=names)
    return [json.loads(line) for line in made.path.read_bytes().splitlines()]


USER = {"role": "user", "content": "1 + 1?"}
ANSWER = {"role": "assistant", "content": "2"}
WRONG = {"role": "assistant", "content": "3"}
CHAT_OF_NOTHING = {"messages": [USER, {"role": "assistant", "content": ""}]}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
ADDER = {"name": "add", "parameters": {"type": "object", "properties": {}}}
ADD = {"name": "add", "arguments": {"a": 1}}


def called(number: int, arguments: str) -> dict[str, Any]:
    """A call of the tool."""
    return {"id": f"call_{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


CONVERTED: dict[str, tuple[Any, Target, dict[str, str], Any]] = {
    "Alpaca": (
        {"instruction": "Add", "input": "1 + 1?", "output": "2", "text": "Below is ..."},
        "sft",
        {},
        {"messages": [{"role": "user", "content": "Add\n\n1 + 1?"}, ANSWER]},
    ),
    "Alpaca without an input": (
        {"instruction": "1 + 1?", "input": "", "output": "2", "system": "Be brief."},
        "rft",
        {},
        {"messages": [{"role": "system", "content": "Be brief."}, USER], "answer": "2"},
    ),
    "ShareGPT": (
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "1 + 1?"},
                {"from": "gpt", "value": "2"},
            ],
            "id": "a",
        },
        "sft",
        {},
        {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER]},
    ),
    "prompt and completion": (
        {"prompt": "1 + 1?", "completion": "2"},
        "sft",
        {},
        {"messages": [USER, ANSWER]},
    ),
    "a conversational completion": (
        {"prompt": [USER], "completion": [ANSWER]},
        "rft",
        {},
        {"messages": [USER], "answer": "2"},
    ),
    "preferences": (
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
        "dpo",
        {},
        {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [WRONG]},
    ),
    "preferences that begin with the prompt": (
        {"chosen": [USER, ANSWER], "rejected": [USER, WRONG], "score_chosen": 9.0},
        "dpo",
        {},
        {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [WRONG]},
    ),
    "preferences that begin with the prompt beside them": (
        {"prompt": "1 + 1?", "system": "Be brief.", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
        "dpo",
        {},
        {
            "input": {"messages": [SYSTEM, USER]},
            "preferred_output": [ANSWER],
            "non_preferred_output": [WRONG],
        },
    ),
    "preferences of several turns": (
        {
            "prompt": "1 + 1?",
            "chosen": [USER, ANSWER, USER, ANSWER],
            "rejected": [USER, ANSWER, USER, WRONG],
            "messages": [USER, ANSWER, USER, ANSWER],
        },
        "dpo",
        {},
        {
            "input": {"messages": [USER, ANSWER, USER]},
            "preferred_output": [ANSWER],
            "non_preferred_output": [WRONG],
        },
    ),
    "texts that begin with the prompt": (
        {"prompt": "1 + 1? ", "chosen": "1 + 1? 2", "rejected": "1 + 1? 3"},
        "sft",
        {},
        {"messages": [{"role": "user", "content": "1 + 1? "}, ANSWER]},
    ),
    "the preferred answer of UltraFeedback": (
        {"prompt": "1 + 1?", "chosen": [USER, ANSWER], "rejected": [USER, WRONG], "messages": [USER, WRONG]},
        "sft",
        {},
        {"messages": [USER, ANSWER]},
    ),
    "Dolly": (
        {"instruction": "Add", "context": "1 + 1?", "response": "2", "category": "qa"},
        "sft",
        {},
        {"messages": [{"role": "user", "content": "Add\n\n1 + 1?"}, ANSWER]},
    ),
    "a context that its prompt repeats": (
        {"prompt": "1 + 1?", "context": "1 + 1", "answer": "2"},
        "rft",
        {},
        {"messages": [USER], "answer": "2"},
    ),
    "OpenOrca": (
        {"system_prompt": "Be brief.", "question": "1 + 1?", "response": "2", "id": "a"},
        "sft",
        {},
        {"messages": [SYSTEM, USER, ANSWER]},
    ),
    "LLaMA-Factory": (
        {"instruction": "1 + 1?", "output": "2", "system": "Be brief.", "history": [["Hi", "Hello"]]},
        "sft",
        {},
        {
            "messages": [
                SYSTEM,
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                USER,
                ANSWER,
            ]
        },
    ),
    "the preferred answer": (
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
        "sft",
        {},
        {"messages": [USER, ANSWER]},
    ),
    "an answer with a label": (
        {"prompt": "1 + 1?", "completion": "3", "label": False},
        "dpo",
        {},
        {"input": {"messages": [USER]}, "output": [WRONG], "label": False},
    ),
    "functions": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": CALL},
                {"role": "function", "name": "add", "content": "2"},
                ANSWER,
            ],
            "functions": [{"name": "add", "parameters": {}}],
        },
        "sft",
        {},
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "2"},
                ANSWER,
            ],
            "tools": [TOOL],
        },
    ),
    "other names": (
        {"task": "1 + 1?", "label": 2, "page": 7},
        "rft",
        {"prompt": "task", "answer": "label"},
        {"messages": [USER], "answer": 2, "page": 7},
    ),
    "a prompt and an answer that are numbers": (
        {"task": 11, "label": 2},
        "sft",
        {"prompt": "task", "answer": "label"},
        {"messages": [{"role": "user", "content": "11"}, ANSWER]},
    ),
    "answers that are numbers, and one message as the prompt": (
        {"task": USER, "good": 2, "bad": 3},
        "dpo",
        {"prompt": "task", "chosen": "good", "rejected": "bad"},
        PAIR,
    ),
    "a system message and a context that are numbers": (
        {"task": "1 +", "rest": 5, "how": 8, "label": "2"},
        "rft",
        {"prompt": "task", "context": "rest", "system": "how", "answer": "label"},
        {
            "messages": [{"role": "system", "content": "8"}, {"role": "user", "content": "1 +\n\n5"}],
            "answer": "2",
        },
    ),
    "messages in a text of JSON": (
        {"chat": json.dumps([USER]), "label": "2"},
        "rft",
        {"messages": "chat", "answer": "label"},
        ROW,
    ),
    "turns of ShareGPT under another name": (
        {"chat": [{"from": "human", "value": "1 + 1?"}], "label": "2"},
        "rft",
        {"prompt": "chat", "answer": "label"},
        ROW,
    ),
    "paths into fields": (
        {"task": {"text": ["1 + 1?"]}, "reward.model": {"ground_truth": "2"}},
        "rft",
        {"prompt": "task.text[0]", "answer": "reward.model.ground_truth"},
        {
            "messages": [USER],
            "answer": "2",
            "task": {"text": ["1 + 1?"]},
            "reward.model": {"ground_truth": "2"},
        },
    ),
    "calls of LLaMA-Factory": (
        {
            "conversations": [
                {"from": "human", "value": "1 + 1, and 2 + 2?"},
                {"from": "function_call", "value": json.dumps([ADD, ADD | {"arguments": {"a": 2}}])},
                {"from": "observation", "value": "2"},
                {"from": "observation", "value": "4"},
                {"from": "function_call", "value": json.dumps(ADD)},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "2"},
            ],
            "tools": json.dumps([ADDER]),
            "system": "Add.",
        },
        "sft",
        {},
        {
            "messages": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "1 + 1, and 2 + 2?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [called(1, '{"a": 1}'), called(2, '{"a": 2}')],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "2"},
                {"role": "tool", "tool_call_id": "call_2", "content": "4"},
                {"role": "assistant", "content": None, "tool_calls": [called(3, '{"a": 1}')]},
                {"role": "tool", "tool_call_id": "call_3", "content": "2"},
                ANSWER,
            ],
            "tools": [{"type": "function", "function": ADDER}],
        },
    ),
    "calls of Hermes": (
        {
            "conversations": [
                {"from": "human", "value": "1 + 1?"},
                {"from": "gpt", "value": f"I add.\n<tool_call>\n{json.dumps(ADD)}\n</tool_call>\n"},
                {"from": "tool", "value": "<tool_response>\n2\n</tool_response>\n"},
                {"from": "gpt", "value": "2"},
            ],
            "tools": json.dumps([{"type": "function", "function": ADDER}]),
        },
        "sft",
        {},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "I add.", "tool_calls": [called(1, '{"a": 1}')]},
                {"role": "tool", "tool_call_id": "call_1", "content": "2"},
                ANSWER,
            ],
            "tools": [{"type": "function", "function": ADDER}],
        },
    ),
    "tools without calls": (
        {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}], "tools": ""},
        "sft",
        {},
        {"messages": [USER, ANSWER]},
    ),
    "a supervised row": ({"messages": [USER, ANSWER]}, "rft", {}, {"messages": [USER], "answer": "2"}),
    "a row of a reinforcement job": (ROW, "sft", {}, {"messages": [USER, ANSWER]}),
    "a row of the job itself": (PAIR, "dpo", {}, PAIR),
}


@pytest.mark.parametrize(("row", "target", "names", "right"), CONVERTED.values(), ids=CONVERTED.keys())
def test_a_row_is_converted(
    row: dict[str, Any], target: Target, names: dict[str, str], right: dict[str, Any], tmp_path: Path
) -> None:
    assert convert_text(tmp_path, lines(row), target, **names) == [right]


GREETINGS = {
    "an answer that begins with the words of its prompt": [
        {
            "prompt": "Hi",
            "chosen": "Hi! How can I help you today?",
            "rejected": "Hi there, what do you want?",
        },
    ],
    "one such answer in a file without others": [
        {"prompt": "Hi", "chosen": "Hi there.", "rejected": "Hi you."},
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
    ],
}


OTHER = {"role": "user", "content": "2 + 2?"}
ANSWERS_TO_OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another prompt than that beside it": (
        {"prompt": "1 + 1?", "chosen": [OTHER, ANSWER], "rejected": [OTHER, WRONG]},
        "chosen",
    ),
    "turns that differ": (
        {"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, WRONG, OTHER, WRONG]},
        "chosen",
    ),
    "a user who speaks last": ({"prompt": "1 + 1?", "chosen": [OTHER], "rejected": [USER]}, "chosen"),
    "a completion with a question": ({"prompt": "1 + 1?", "completion": [OTHER]}, "completion"),
}


@pytest.mark.parametrize(("row", "field"), ANSWERS_TO_OTHERS.values(), ids=ANSWERS_TO_OTHERS.keys())
@pytest.mark.parametrize("target", ["dpo", "sft", "rft"])
def test_a_prompt_is_never_paired_with_the_answer_to_another(
    row: dict[str, Any], field: str, target: Target, tmp_path: Path
) -> None:
    no_pair = target == "dpo" and "chosen" not in row
    words = (
        "has no two answers" if no_pair else f"has in {field} other messages than the answer to its prompt"
    )

    with pytest.raises(InvalidDataset, match=words):
        convert_text(tmp_path, lines(row), target)


@pytest.mark.parametrize("rows", GREETINGS.values(), ids=GREETINGS.keys())
@pytest.mark.parametrize("target", ["dpo", "sft", "rft"])
def test_words_of_an_answer_are_not_taken_for_its_prompt(
    rows: list[dict[str, str]], target: Target, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "theirs.jsonl").write_bytes(lines(*rows))

    assert main(["convert", "theirs.jsonl", "--to", target]) == 0
    said = capsys.readouterr().out
    made = (desk / f"theirs.{target}.jsonl").read_text()
    assert all(f'"{row["chosen"]}"' in made for row in rows)
    assert "begin with the text of their prompt in 1 row(s)" in said
    assert "nothing was cut off" in said


def test_prompts_that_all_answers_begin_with_are_cut_off_and_named(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": f"{n}?\nb", "rejected": f"{n}? c"} for n in range(3)]
    (tmp_path / "theirs").write_bytes(lines(*rows))

    made = convert(tmp_path / "theirs", "sft", tmp_path / "ours.jsonl")

    answers = [json.loads(line)["messages"][1]["content"] for line in made.path.read_text().splitlines()]
    assert answers == ["\nb"] * 3
    assert made.notes == (
        "chosen and rejected begin with the text of their prompt in 3 row(s), all of the file: it was cut off",
    )


@pytest.mark.parametrize("target", ["rft", "sft"])
@pytest.mark.parametrize(
    ("good", "bad"), [(True, False), (1, 0), (1.0, 0.0), ("True", "False"), ("1", "0"), ("yes", "no")]
)
def test_bad_answers_never_become_targets_however_their_labels_are_written(
    good: object, bad: object, target: Target, tmp_path: Path
) -> None:
    rows = [{"prompt": "1 + 1?", "completion": text, "label": how} for text, how in (("2", good), ("3", bad))]
    ours = [
        {"input": PAIR["input"], "output": [answer], "label": how}
        for answer, how in ((ANSWER, good), (WRONG, bad))
    ]
    table = f"prompt,completion,label\n1 + 1?,2,{good}\n1 + 1?,3,{bad}\n".encode()
    right = {"messages": [USER], "answer": "2"} if target == "rft" else {"messages": [USER, ANSWER]}

    for content in (lines(*rows), lines(*ours), table):
        assert convert_text(tmp_path, content, target) == [right]
        assert [row["label"] for row in convert_text(tmp_path, content, "dpo")] == [True, False]


def test_the_command_counts_rows_that_it_leaves_out_and_names_the_fields_without_a_place(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "theirs.csv").write_text(
        "prompt,completion,label,page,note\na,b,1,7,\na,c,0,7,\nd,,1,7,\ne,  ,yes,7,\nf,g,yes,8,\n"
    )

    assert main(["convert", "theirs.csv", "--to", "sft"]) == 0
    assert capsys.readouterr().out == (
        "theirs.sft.jsonl: 2 rows\nleft out: 1 row(s) whose label is false\nleft out: 2 row(s) without an answer\n"
        "dropped fields: page\n"
    )


@pytest.mark.parametrize(
    "row", [{"prompt": "a", "answer": None}, {"question": "a", "response": ""}, CHAT_OF_NOTHING]
)
@pytest.mark.parametrize("target", ["rft", "sft"])
def test_rows_without_an_answer_are_left_out(row: dict[str, Any], target: Target, tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(lines(row, ROW))

    made = convert(tmp_path / "theirs", target, tmp_path / "ours.jsonl")

    assert (made.rows, made.left_out) == (1, {"without an answer": 1})


def test_pairs_of_one_answer_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(lines({"prompt": "a", "chosen": "b", "rejected": "b"}, PAIR))

    made = convert(tmp_path / "theirs", "dpo", tmp_path / "ours.jsonl")

    assert (made.rows, made.left_out) == (1, {"whose two answers are the same": 1})


def test_what_a_user_may_miss_in_the_converted_file_is_named(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answered = {"messages": [USER, WRONG], "answer": "2"}
    many = MAX_TRAINING_ROWS + 1
    (desk / "theirs.jsonl").write_bytes(lines(answered) + lines({"prompt": "a", "answer": "b"}) * (many - 1))

    assert main(["convert", "theirs.jsonl", "--to", "rft"]) == 0
    assert capsys.readouterr().out == (
        f"theirs.rft.jsonl: {many} rows\ndropped fields: the message of the assistant\n"
        f"note: a reinforcement job reads at most {MAX_TRAINING_ROWS} rows\n"
    )


def test_a_folder_is_named_with_a_file_of_it(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / "saved").mkdir()
    (desk / "saved" / "data.arrow").write_bytes(as_arrow(*ROWS, is_stream=True))

    assert main(["convert", "saved", "--to", "rft"]) == 2
    assert "saved is a folder" in (said := capsys.readouterr().err)
    assert "such as saved/data.arrow" in said


def test_the_source_is_never_replaced(tmp_path: Path) -> None:
    source = tmp_path / "theirs.csv"
    source.write_text("question,answer\na,b\n")
    (tmp_path / "link").symlink_to(source)

    for path in (source, tmp_path / "link"):
        with pytest.raises(SameFile, match="is the file that is converted: choose another name"):
            convert(source, "rft", path)
    assert source.read_text() == "question,answer\na,b\n"


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
@pytest.mark.parametrize("packed", [*COMPRESS.values(), bytes], ids=[*COMPRESS, "plain"])
def test_text_is_read_in_every_encoding_with_all_line_ends_compressed_or_not(
    packed: Callable[[bytes], bytes], encoding: str, ends: bytes, tmp_path: Path
) -> None:
    rows = [ROW | {"answer": "zwölf \u2028 十二"}] * 3
    content = lines(*rows).replace(b"\n", ends).decode().encode(encoding)

    assert convert_text(tmp_path, packed(content), "rft") == rows


@pytest.mark.parametrize("encoding", ["cp1252", "shift_jis", "utf-16-be"])
def test_the_encoding_of_a_file_may_be_named(
    encoding: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"cp1252": "Größe: 2 €", "shift_jis": "答え", "utf-16-be": "答え"}[encoding]
    for name, text in (
        ("theirs.csv", f"question,answer\n1 + 1?,{answer}\n"),
        ("theirs.json", json.dumps([ROW | {"answer": answer}], ensure_ascii=False)),
        ("theirs.jsonl", json.dumps(ROW | {"answer": answer}, ensure_ascii=False)),
    ):
        (desk / name).write_bytes(text.encode(encoding))

        assert main(["convert", name, "--to", "rft", "--encoding", encoding]) == 0
        assert capsys.readouterr().out == "theirs.rft.jsonl: 1 rows\n"
        assert json.loads((desk / "theirs.rft.jsonl").read_text()) == {"messages": [USER], "answer": answer}
        (desk / "theirs.rft.jsonl").unlink()


@pytest.mark.parametrize("options", [[], ["-o", "theirs.rft.jsonl"]], ids=["default name", "-o"])
def test_a_file_that_exists_is_replaced_only_if_asked(
    options: list[str], desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "theirs.csv").write_text("question,answer\n1 + 1?,2\n")
    (desk / "theirs.rft.jsonl").write_text("mine")
    convert_it = ["convert", "theirs.csv", "--to", "rft", *options]

    assert main(convert_it) == 2
    assert (desk / "theirs.rft.jsonl").read_text() == "mine"
    assert "theirs.rft.jsonl already exists: choose another name with -o" in capsys.readouterr().err
    assert main([*convert_it, "--force"]) == 0
    assert json.loads((desk / "theirs.rft.jsonl").read_text())["answer"] == "2"


def test_an_encoding_that_is_none_or_not_that_of_the_file_is_refused(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "theirs.csv").write_bytes("question,answer\na,é\n".encode("cp1252"))
    convert_it = ["convert", "theirs.csv", "--to", "rft", "--encoding"]

    assert main([*convert_it, "cp9999"]) == 2
    assert "no encoding of text named cp9999" in capsys.readouterr().err
    assert main([*convert_it, "hex"]) == 2
    assert "no encoding of text named hex" in capsys.readouterr().err
    assert main([*convert_it, "a\0b"]) == 2
    assert main([*convert_it, "undefined"]) == 2
    assert "no encoding of text named undefined" in capsys.readouterr().err
    for other in ("ascii", "utf-16", "idna"):
        assert main([*convert_it, other]) == 1
        assert f"the file is not {other}: save it as UTF-8, or name its encoding" in capsys.readouterr().err


def test_cells_of_a_table_may_have_commas_quotes_and_line_ends(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbfprompt,answer\r\n"Say ""a, b""\nand c",x\r\n\r\n'

    [row] = convert_text(tmp_path, content, "rft")

    assert row == {"messages": [{"role": "user", "content": 'Say "a, b"\nand c'}], "answer": "x"}


TABLES = {
    "capitals": ("Question,Answer\n1 + 1?,2\n", "question", "answer"),
    "other characters": ("Frage,Lösung (€)\n1 + 1?,2\n", "Frage", "Lösung (€)"),
    "pandas' index": (",question,answer\n0,1 + 1?,2\n", "question", "answer"),
    "pandas' index before tabs": ("\tquestion\tanswer\n0\t1 + 1?\t2\n", "question", "answer"),
    "Excel's separator": ("sep=;\r\nquestion;answer\r\n1 + 1?;2\r\n", "question", "answer"),
    "blank lines before the names": ("\n\nquestion,answer\n1 + 1?,2\n", "question", "answer"),
}


@pytest.mark.parametrize(("content", "prompt", "answer"), TABLES.values(), ids=TABLES.keys())
def test_tables_of_common_programs_are_recognized_and_converted(
    content: str, prompt: str, answer: str, tmp_path: Path
) -> None:
    found = detect([content.encode()])
    names = {} if prompt == "question" else {"prompt": prompt, "answer": answer}

    assert found is not None
    assert found.seen.lower() == f"the file is csv with the columns {prompt}, {answer}".lower()
    assert convert_text(tmp_path, content.encode(), "rft", **names) == [{"messages": [USER], "answer": "2"}]


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_the_messages_in_a_column_of_json_are_read_whatever_its_name(name: str, tmp_path: Path) -> None:
    content = table_of([{"chat": [USER], "label": "2"}])

    assert convert_text(tmp_path, content, "rft", **{name: "chat", "answer": "label"}) == [ROW]


AS_TEXT, SELLER = json.dumps([USER]), json.dumps([{"role": "seller", "name": "Acme"}])
IN_TEXTS: dict[str, tuple[dict[str, Any], Target, dict[str, str], dict[str, Any]]] = {
    "messages": ({"messages": AS_TEXT, "answer": "2"}, "rft", {}, ROW),
    "messages for the prompt": ({"messages": AS_TEXT, "answer": "2"}, "rft", {"prompt": "messages"}, ROW),
    "a path into messages": (
        {"messages": AS_TEXT, "answer": "2"},
        "sft",
        {"prompt": "messages[0].content"},
        CHAT,
    ),
    "a prompt and an answer": ({"prompt": AS_TEXT, "completion": json.dumps([ANSWER])}, "sft", {}, CHAT),
    "two answers": (
        {"prompt": AS_TEXT, "chosen": json.dumps([ANSWER]), "rejected": json.dumps([WRONG])},
        "dpo",
        {},
        PAIR,
    ),
    "a pair": ({name: json.dumps(value) for name, value in PAIR.items()}, "dpo", {}, PAIR),
    "one message for each text": (
        {"prompt": json.dumps(USER), "chosen": json.dumps(ANSWER), "rejected": json.dumps(WRONG)},
        "dpo",
        {},
        PAIR,
    ),
    "functions for tools": (
        {"messages": json.dumps(CHAT["messages"]), "tools": json.dumps([ADDER])},
        "sft",
        {},
        CHAT | {"tools": [{"type": "function", "function": ADDER}]},
    ),
    "objects for a grader": (
        {"messages": AS_TEXT, "answer": '{"messages": ["a"], "role": "x", "content": "y"}'},
        "rft",
        {},
        {"messages": [USER], "answer": '{"messages": ["a"], "role": "x", "content": "y"}'},
    ),
    "texts for a grader": (
        {"messages": AS_TEXT, "answer": SELLER, "other": AS_TEXT},
        "rft",
        {},
        {"messages": [USER], "answer": SELLER, "other": AS_TEXT},
    ),
}


@pytest.mark.parametrize(("row", "target", "names", "right"), IN_TEXTS.values(), ids=IN_TEXTS.keys())
@pytest.mark.parametrize(
    "put",
    [
        lambda rows: lines(*rows),
        array,
        pretty,
        wrapped,
        table_of,
        lambda rows: as_parquet(*rows),
        lambda rows: as_arrow(*rows),
    ],
    ids=["JSONL", "array", "pretty", "data", "CSV", "Parquet", "Arrow"],
)
def test_messages_in_texts_of_json_are_messages_in_every_file(
    row: dict[str, Any],
    target: Target,
    names: dict[str, str],
    right: dict[str, Any],
    put: Callable[[list[dict[str, Any]]], bytes],
    tmp_path: Path,
) -> None:
    assert convert_text(tmp_path, put([row, row]), target, **names) == [right, right]


def test_messages_in_texts_of_json_are_messages_in_a_table_in_memory(tmp_path: Path) -> None:
    made = convert(
        [{"chat": AS_TEXT, "answer": "2"}], "rft", tmp_path / "ours.jsonl", names={"prompt": "chat"}
    )

    assert json.loads(made.path.read_text()) == ROW


@pytest.mark.parametrize("role", ["model", "human", "ai", "User", "gpt", "function_call"])
@pytest.mark.parametrize("put", [lines, lambda row: table_of([row])], ids=["JSONL", "CSV"])
def test_messages_in_texts_of_json_with_the_roles_of_other_formats_are_refused_as_in_lists(
    role: str, put: Callable[..., bytes], tmp_path: Path
) -> None:
    row = {"prompt": json.dumps([USER, {"role": role, "content": "2"}]), "answer": "2"}

    with pytest.raises(InvalidDataset, match=r"line \d: messages\[1\]\.role: must be one of"):
        convert_text(tmp_path, put(row), "rft")


def test_objects_with_roles_of_no_format_in_a_text_are_a_text(tmp_path: Path) -> None:
    accounts = json.dumps([{"role": "user", "name": "Ann"}, {"role": "admin", "name": "Bo"}])

    [row] = convert_text(tmp_path, lines({"prompt": accounts, "answer": "2"}), "rft")

    assert row["messages"] == [{"role": "user", "content": accounts}]


BROKEN = {
    "half of a list": AS_TEXT[:-5],
    "a text encoded twice": json.dumps(AS_TEXT),
    "one": json.dumps(USER),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("name", ["messages", "conversations"])
@pytest.mark.parametrize("is_named", [False, True], ids=["found", "named"])
def test_a_text_of_messages_that_is_no_list_is_refused_and_is_no_prompt(
    text: str, name: str, is_named: bool, tmp_path: Path
) -> None:
    names = {"prompt": name} if is_named else {}
    words = f"line 1: has in {name} a text that is not a JSON list of messages"

    for row in ({name: text, "answer": "2"}, {name: text, "prompt": "1 + 1?", "answer": "2"}):
        with pytest.raises(InvalidDataset, match=words):
            convert_text(tmp_path, lines(row), "rft", **names)


def test_words_in_the_field_of_messages_are_a_prompt_if_they_are_named_so(tmp_path: Path) -> None:
    row = {"messages": "1 + 1?", "answer": "2"}

    with pytest.raises(InvalidDataset, match="list of messages; for a prompt use --map prompt=messages"):
        convert_text(tmp_path, lines(row), "rft")
    assert convert_text(tmp_path, lines(row), "rft", prompt="messages") == [ROW]


NOT_TEXT: dict[str, tuple[dict[str, Any], Target, dict[str, str], str]] = {
    "texts in the prompt": (
        {"q": ["1 + 1?"], "answer": "2"},
        "rft",
        {"prompt": "q"},
        "has in prompt a list that is no text and no messages; for one text of it use --map prompt=FIELD[0]",
    ),
    "an object in the prompt": (
        {"q": {"text": "1 + 1?"}, "answer": "2"},
        "rft",
        {"prompt": "q"},
        "has in prompt an object that is no text and no messages",
    ),
    "null in the prompt": ({"q": None, "answer": "2"}, "rft", {"prompt": "q"}, "has null in prompt"),
    "texts in the answer": (
        {"prompt": "1 + 1?", "a": ["2"]},
        "sft",
        {"answer": "a"},
        "has in answer a list that is no text and no messages; for one text of it use --map answer=FIELD[0]",
    ),
    "numbers in a preferred answer": (
        {"prompt": "1 + 1?", "a": [2], "b": "3"},
        "dpo",
        {"chosen": "a", "rejected": "b"},
        "has in chosen a list that is no text and no messages",
    ),
    "an object in an answer": (
        {"prompt": "1 + 1?", "a": {"value": 2}},
        "sft",
        {"answer": "a"},
        "has in answer an object that is no text and no messages",
    ),
    "a list in the system message": (
        {"prompt": "1 + 1?", "s": ["Be brief."]},
        "rft",
        {"system": "s"},
        "has in s a list, and system is a text",
    ),
    "a number in the earlier turns": (
        {"prompt": "1 + 1?", "h": 4},
        "rft",
        {"history": "h"},
        "has in h a number, and history is a list of messages, or JSON of one",
    ),
    "a text in the messages": (
        {"q": "1 + 1?"},
        "rft",
        {"messages": "q"},
        "has in q a string, and messages is a list of messages, or JSON of one",
    ),
    "messages as Python prints them": (
        {"q": str([USER])},
        "rft",
        {"prompt": "q"},
        "has in prompt a list as Python prints it: write it with json.dumps",
    ),
}


@pytest.mark.parametrize(("row", "target", "names", "words"), NOT_TEXT.values(), ids=NOT_TEXT.keys())
@pytest.mark.parametrize("put", [lines, as_parquet], ids=["JSONL", "Parquet"])
def test_a_value_that_is_no_text_is_refused_by_the_name_of_its_field(
    row: dict[str, Any],
    target: Target,
    names: dict[str, str],
    words: str,
    put: Callable[..., bytes],
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidDataset, match=re.escape(f"line 1: {words}")):
        convert_text(tmp_path, put(row), target, **names)


def test_dates_and_times_are_texts_and_bytes_are_none(tmp_path: Path) -> None:
    row = {"prompt": "When?", "day": date(2026, 11, 28), "sum": Decimal("1.50"), "image": b"x"}

    [day] = convert_text(tmp_path, as_parquet(row), "sft", answer="day")
    [total] = convert_text(tmp_path, as_parquet(row), "sft", answer="sum")

    assert [made["messages"][1]["content"] for made in (day, total)] == ["2026-11-28", "1.50"]
    with pytest.raises(InvalidDataset, match="line 1: has an answer or a prompt that is no text: b'x'"):
        convert_text(tmp_path, as_parquet(row), "sft", answer="image")


def test_a_table_with_one_column_is_recognized_by_its_name_or_by_that_of_the_file(tmp_path: Path) -> None:
    assert (
        convert_text(tmp_path, b'Prompt\r\n1 + 1?\r\n"1, 2"\r\n', "rft")[1]["messages"][0]["content"]
        == "1, 2"
    )
    (tmp_path / "theirs.csv").write_text("Frage\n1 + 1?\n")

    made = convert(tmp_path / "theirs.csv", "rft", tmp_path / "ours.jsonl", names={"prompt": "Frage"})

    assert json.loads(made.path.read_bytes()) == {"messages": [USER]}


def test_the_name_of_a_table_is_believed_where_its_lines_differ(tmp_path: Path) -> None:
    (tmp_path / "theirs.csv").write_text("Frage,Wert\na\nb,c\n")

    with pytest.raises(InvalidDataset, match="line 2: has 1 cells, and line 1 has 2 names"):
        convert(tmp_path / "theirs.csv", "rft", tmp_path / "ours.jsonl", names={"prompt": "Frage"})


NAMED = {
    "one column": (
        "theirs.csv",
        b"Frage\n1 + 1?\n",
        "the file is CSV with the column Frage; write one object per line",
    ),
    "a name with a colon": (
        "theirs.tsv",
        b"Frage: was?\tAntwort\n1 + 1?\t2\n",
        "the file is CSV with the columns Frage: was?, Antwort; write one object per line",
    ),
    "a name with the comma of another table": (
        "theirs.CSV",
        b"Frage (kurz, lang);Antwort\n1 + 1?;2\n",
        "the file is CSV with the columns Frage (kurz, lang), Antwort; write one object per line",
    ),
    "a short line": (
        "theirs.csv",
        b"Frage,Wert\na\n",
        "the file is CSV with the columns Frage, Wert; write one object per line",
    ),
    "JSON that is a cell": (
        "theirs.csv",
        b'{"q": "1 + 1?"},2\n',
        "the file is named as CSV, and its first line does not name columns; write the names of the columns into the "
        "first line",
    ),
    "a column without a name": (
        "theirs.csv",
        b"a,,b\n1,2,3\n",
        "the file is named as CSV, and its first line does not name columns; write the names of the columns into the "
        "first line",
    ),
}


@pytest.mark.parametrize(("name", "content", "sentence"), NAMED.values(), ids=NAMED.keys())
def test_the_name_of_a_file_decides_everywhere_where_its_content_may_be_a_table_or_not(
    name: str, content: bytes, sentence: str, desk: Path, client: Regraft, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / name).write_bytes(content)
    (desk / "job.json").write_text(json.dumps(job("reinforcement") | {"training_file": name}))

    assert main(["validate", name]) == 1
    assert capsys.readouterr().out.startswith(f"{name}: {sentence}")
    assert main(["jobs", "create", "-f", "job.json"]) == 1
    assert capsys.readouterr().err.startswith(f"regraft: {name}: {sentence}")
    with pytest.raises(openai.BadRequestError, match=re.escape(sentence)):
        client.files.create(file=desk / name, purpose="fine-tune")


@pytest.mark.parametrize("content", [lines(*ROWS), lines(ROW | {"text": "a, b\n" * 20_000})])
def test_rows_in_a_file_that_is_named_as_a_table_are_read_as_rows(content: bytes, desk: Path) -> None:
    (desk / "theirs.csv").write_bytes(content)

    assert detect([content], "theirs.csv") is None
    assert main(["validate", "theirs.csv"]) == 0
    assert convert(desk / "theirs.csv", "rft", desk / "ours.jsonl").rows == len(content.splitlines())


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_array_is_read_in_pieces_wherever_they_end(size: int) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "[{" * n + '"\\\n'}], "answer": "]},"} for n in range(40)
    ]
    text = json.dumps(rows, indent=1)

    found = json_lines(text[at : at + size] for at in range(0, len(text), size))

    assert [json.loads(line) for line in found] == rows


REFUSED: dict[str, tuple[bytes, Target, dict[str, str], str]] = {
    "a row without a prompt": (
        lines(*[{"a": "1 + 1?", "b": "2"}] * 3),
        "rft",
        {},
        "line 1: has no prompt; name its field with --map prompt=FIELD (and in 2 more lines: 2, 3)",
    ),
    "a name that no row has": (
        lines({"prompt": "a"}),
        "rft",
        {"answer": "label"},
        "line 1: has no field 'label', which --map names",
    ),
    "a path to nothing": (
        lines({"prompt": "a", "answers": {"text": []}}),
        "rft",
        {"answer": "answers.text[0]"},
        "line 1: has nothing at 'answers.text[0]', which --map names",
    ),
    "an unknown speaker": (
        lines({"conversations": [{"from": "narrator", "value": "x"}]}),
        "sft",
        {},
        "line 1: has a message in conversations from 'narrator', which is unknown",
    ),
    "a bad answer for a supervised job": (
        lines({"prompt": "a", "completion": "b", "label": False}),
        "sft",
        {},
        "there are only rows whose label is false",
    ),
    "a conversation that does not begin with its prompt": (
        lines({"prompt": "2 + 2?", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]}),
        "sft",
        {},
        "line 1: has in chosen other messages than the answer to its prompt",
    ),
    "a turn that is one text": (
        lines({"instruction": "a", "output": "b", "history": ["c"]}),
        "sft",
        {},
        "line 1: has a turn in history that is no pair of texts",
    ),
    "half of an array, to the end of a row": (
        b'[{"prompt": "a"},\n{"prompt": "b"},\n',
        "rft",
        {},
        "the JSON array has no ] at its end: the file is not complete",
    ),
    "an array in an array": (
        b'[{"prompt": "a"}, [{"prompt": "b"}]]',
        "rft",
        {},
        "the file has an array inside of the array: write one object per line",
    ),
    "more ends than arrays": (
        b'[{"prompt": "a"}]]',
        "rft",
        {},
        "the file has a ] without its [: write one object per line",
    ),
    "half of a Parquet file": (as_parquet(ROW)[:-40], "rft", {}, "the Parquet file is damaged: "),
    "a table with a short line": (
        b"prompt,answer\na,b\nc\n",
        "rft",
        {},
        "line 3: has 1 cells, and line 1 has 2 names",
    ),
    "a table with a quote that is not closed": (
        b'question,answer\r\n"1\n+ 1?",2\r\n2 + 2?,"4\r\n3 + 3?,6\r\n',
        "rft",
        {},
        "line 4: has wrong quotes (unexpected end of data, at line 5): close the quote, or write a quote inside of a "
        'cell as ""',
    ),
    "a table whose first row has a quote that is not closed": (
        b'question\tanswer\n"1 + 1?\t2\n2 + 2?\t4\n',
        "rft",
        {},
        "line 2: has wrong quotes (unexpected end of data, at line 3)",
    ),
    "a table with a quote that another row closes": (
        b'question,answer\n1 + 1?,"2\n2 + 2?,4\n3 + 3?,"6"\n',
        "rft",
        {},
        "line 2: has wrong quotes (',' expected after '\"', at line 4)",
    ),
    "a table with a quote that is open for the longest cell": (
        b'question,answer\n1 + 1?,"2\n' + b"2 + 2?,4\n" * (MAX_LINE_BYTES // 9 + 1),
        "rft",
        {},
        "line 2: has wrong quotes (field larger than field limit (4194304), at line 46",
    ),
    "a table with a short line after a cell of two lines": (
        b'prompt,answer\n"a\nb",c\nd\n',
        "rft",
        {},
        "line 4: has 1 cells, and line 1 has 2 names",
    ),
    "a table with a column twice": (
        b"prompt,label,label\na,b,c\n",
        "rft",
        {},
        "line 1: has the column 'label' twice: rename one of them",
    ),
    "a table with a list as Python prints it": (
        f'messages,label\n"{[USER]}",a\n'.encode(),
        "rft",
        {},
        "line 2: has in messages a list as Python prints it: write it with json.dumps",
    ),
    "a row with a list as Python prints it": (
        lines({"messages": str([USER]), "label": "a"}),
        "rft",
        {},
        "line 1: has in messages a list as Python prints it: write it with json.dumps",
    ),
    "a table without rows": (
        b"prompt,label\n",
        "rft",
        {},
        "the file has the names of its columns and no rows",
    ),
    "a table of an old Excel": (
        "prompt,answer\na,é\n".encode("latin-1"),
        "rft",
        {},
        "the file is not utf-8: save it as UTF-8, or name its encoding, such as --encoding cp1252",
    ),
    "broken JSON in an array": (
        b'[{"prompt": "a"},\n{"prompt": "b",}]',
        "rft",
        {},
        "line 2: is not JSON: ",
    ),
    **{
        f"half of a file compressed with {name}": (
            compress(lines(*ROWS))[:-12],
            "rft",
            {},
            "the compressed data is damaged: ",
        )
        for name, compress in COMPRESS.items()
    },
    "another content than its compression says": (
        bz2.compress(lines(*ROWS))[:10] + bytes(80),
        "rft",
        {},
        "the compressed data is damaged: ",
    ),
    "half of an Arrow file": (as_arrow(ROW)[:-40], "rft", {}, "the Arrow file is damaged: "),
    "the result of no call": (
        lines({"conversations": [{"from": "human", "value": "x"}, {"from": "observation", "value": "y"}]}),
        "sft",
        {},
        "line 1: has a message in conversations from 'observation' without a call before it",
    ),
    "a call that is not JSON": (
        lines(
            {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "add(1)"}]}
        ),
        "sft",
        {},
        "line 1: has a call in conversations that is not JSON",
    ),
    "a call without a name": (
        lines(
            {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "[1]"}]}
        ),
        "sft",
        {},
        "line 1: has a call in conversations that is no object with name and arguments",
    ),
    "tools that are not JSON": (
        lines({"conversations": [{"from": "human", "value": "x"}], "tools": "add, sub"}),
        "sft",
        {},
        "line 1: has tools that are not JSON",
    ),
    "an empty file": (b"", "rft", {}, "the file is empty"),
    "a file with white space only": (b"\n  \n", "rft", {}, "the file is empty"),
    "a long file with white space only": (b"\n" * 70_000, "rft", {}, "the file is empty"),
}


@pytest.mark.parametrize(("content", "target", "names", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_converted_is_named_and_nothing_is_written(
    content: bytes, target: Target, names: dict[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidDataset) as refused:
        convert_text(tmp_path, content, target, **names)

    assert str(refused.value).startswith(words)
    assert not (tmp_path / "ours.jsonl").exists()


def test_a_number_that_is_none_is_a_missing_value_and_bytes_have_no_place(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": answer, "score": score, "image": {"bytes": b"\xff", "path": "a.png"}}
        for answer, score in ((1.0, float("nan")), (float("nan"), 2.0))
    ]
    (tmp_path / "theirs").write_bytes(as_parquet(*rows))

    made = convert(tmp_path / "theirs", "rft", tmp_path / "ours.jsonl")

    right = {"messages": [{"role": "user", "content": "a"}], "answer": 1.0, "score": None}
    assert [json.loads(line) for line in made.path.read_text().splitlines()] == [right]
    assert (made.left_out, made.dropped_fields) == ({"without an answer": 1}, ("image",))


def test_the_field_of_a_value_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(as_parquet({"prompt": "a", "scores": [1.0, float("inf")]}))

    with pytest.raises(InvalidDataset, match="line 1: has in scores a value that JSON cannot hold"):
        convert(tmp_path / "theirs", "rft", tmp_path / "ours.jsonl")


def test_without_pyarrow_the_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(InvalidDataset, match="Parquet file needs pyarrow: run `pip install pyarrow`"):
        convert_text(tmp_path, as_parquet(*ROWS), "rft")


def test_the_command_names_the_written_file_and_the_next_command_accepts_it(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "questions.csv").write_text("question,label\n1 + 1?,2\n2 + 2?,4\n")

    code = main(
        ["convert", "questions.csv", "--to", "rft", "--map", "prompt=question", "--map", "answer=label"]
    )

    assert (code, capsys.readouterr().out) == (0, "questions.rft.jsonl: 2 rows\n")
    assert main(["validate", "questions.rft.jsonl"]) == 0
    assert main(["convert", "questions.csv", "--to", "rft", "-o", "questions.csv"]) == 2
    assert main(["convert", "questions.csv", "--to", "rft", "--map", "answer"]) == 2
    twice = ["--map", "answer=label", "--map", "answer=question"]
    assert main(["convert", "questions.csv", "--to", "rft", "-o", "new.jsonl", *twice]) == 2


def test_a_field_that_the_grader_reads_is_found_before_the_upload(
    desk: Path, client: Regraft, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "theirs.data").write_bytes(lines(ROW, *[{"messages": ROW["messages"]}] * 30))
    (desk / "job.json").write_text(json.dumps(job("reinforcement")))

    assert main(["jobs", "create", "-f", "job.json"]) == 1
    assert capsys.readouterr().err == (
        "regraft: theirs.data:2: the grader reads {{item.answer}}, which this row does not have (and in 29 more "
        "lines: 3, 4, 5, 6, …) (invalid_dataset)\n"
    )
    assert list(client.files.list()) == []


def test_the_local_files_of_a_pipelines_jobs_are_validated_before_the_upload(
    desk: Path, client: Regraft, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "theirs.data").write_bytes(ALPACA)
    stages = [{"name": "first", "job": {"model": "tiny", "training_file": "theirs.data"}}]
    (desk / "pipeline.json").write_text(json.dumps({"stages": stages}))

    assert main(["pipelines", "create", "-f", "pipeline.json"]) == 1
    assert "theirs.data: the rows are Alpaca's" in capsys.readouterr().err
    assert list(client.files.list()) == []


def test_one_file_for_training_and_validation_is_uploaded_once(desk: Path, client: Regraft) -> None:
    (desk / "theirs.data").write_bytes(lines(*ROWS))
    request = job("reinforcement") | {"validation_split": None, "validation_file": "theirs.data"}

    made = client.jobs.submit(request)

    assert made.validation_file == made.training_file
    assert [file.id for file in client.files.list()] == [made.training_file]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps(ROWS), " the file is one JSON array; write one object per line."),
        ("[]", " the file is empty; write one object per line."),
        (
            json.dumps({"data": ROWS}),
            ' the file is one JSON object with its rows in {"data": [...]}; write one',
        ),
        (lines({"text": "a"}).decode(), " the rows have no known key for their prompt (they have text);"),
        (lines(ROW, {"text": "a"}).decode(), "2: messages: is missing"),
    ],
)
def test_rows_in_a_file_that_is_named_like_a_job_are_read_as_rows(
    content: str, words: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "train.json").write_text(content)

    assert main(["validate", "train.json"]) == 1
    assert capsys.readouterr().out.startswith(f"train.json:{words}")


NAMED_JSON: dict[str, tuple[bytes, str]] = {
    "UTF-16": (json.dumps(ROWS).encode("utf-16"), " the file is UTF-16;"),
    "UTF-32": (json.dumps(ROWS).encode("utf-32"), " the file is UTF-32;"),
    "Parquet": (as_parquet(*ROWS), " the file is Parquet;"),
    "Arrow": (as_arrow(*ROWS), " the file is Arrow or Feather;"),
    "a tar archive": (a_tar("w"), " the file is a tar archive;"),
    "other bytes": (b"%PDF-1.7\n", " the file is binary;"),
    "a page": (b"<!doctype html><html></html>", " the file is an HTML or XML page"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", " the file is a pointer of Git LFS;"),
    "no bytes": (b"", " the file is empty;"),
    "white space": (b" \n", " the file is empty;"),
    "CR": (lines(*ROWS).replace(b"\n", b"\r"), " the lines of the file end with CR alone;"),
    "a table": (
        table_of([{"question": "a", "answer": "b"}]),
        " the file is CSV with the columns question, answer;",
    ),
    "rows over several lines": (pretty([ROW, ROW]), " the file has JSON objects over several lines;"),
    "rows with a model": (
        lines(*[{"model": "m", "prompt": "a"}] * 2),
        " the rows have their prompt in the key prompt;",
    ),
} | {name: (put(lines(*ROWS)), f" the file is compressed with {name};") for name, put in COMPRESS.items()}


@pytest.mark.parametrize(("content", "words"), NAMED_JSON.values(), ids=NAMED_JSON.keys())
def test_a_dataset_of_any_format_that_is_named_json_is_no_job(
    content: bytes, words: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "train.json").write_bytes(content)

    assert main(["validate", "train.json"]) == 1
    assert capsys.readouterr().out.startswith(f"train.json:{words}")


@pytest.mark.parametrize("content", ['{"model": "m",}', '{"model": "m"}}', '{"model": "m"'])
def test_a_broken_job_that_is_named_json_is_no_dataset(
    content: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "job.json").write_text(content)

    assert main(["validate", "job.json"]) == 2
    assert "job.json: " in capsys.readouterr().err


def test_lists_of_one_length_in_a_row_among_others_are_no_columns(tmp_path: Path) -> None:
    rows = [{"q": ["1 + 1?", "x"], "a": ["2", "y"]}, {"q": ["2 + 2?", "x"], "a": ["4", "y"]}]
    names = {"prompt": "q[0]", "answer": "a[0]"}

    made = convert_text(tmp_path, lines(*rows), "rft", **names)
    [alone] = convert_text(tmp_path, as_parquet(rows[0]), "rft", **names)

    assert [row["answer"] for row in made] == ["2", "4"]
    assert alone["answer"] == "2"


@pytest.mark.parametrize("indent", [None, 2])
def test_the_rows_in_data_are_converted(indent: int | None, tmp_path: Path) -> None:
    wrapped = json.dumps({"version": 1, "data": ROWS}, indent=indent).encode()

    assert convert_text(tmp_path, wrapped, "rft") == ROWS


@pytest.mark.parametrize(
    "content",
    [b"", b"\n \t\r\n\n", b"\xef\xbb\xbf\n", "\n \n".encode("utf-16")],
    ids=["no bytes", "white space", "a byte order mark and white space", "white space in UTF-16"],
)
def test_an_empty_file_says_so_everywhere(
    content: bytes, desk: Path, client: Regraft, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "theirs.data").write_bytes(content)
    (desk / "job.json").write_text(json.dumps(job("reinforcement")))

    assert "the file is empty" in refusal_of_the_worker(content, "reinforcement", desk)
    for command in (["validate", "theirs.data"], ["jobs", "create", "-f", "job.json"]):
        assert main(command) == 1
        said = capsys.readouterr()
        assert "theirs.data: the file is empty" in said.out + said.err
    with pytest.raises(openai.BadRequestError, match="The file is empty"):
        client.files.create(file=("theirs.data", content), purpose="fine-tune")


JSONL = {
    "rows of a reinforcement job": lines(*ROWS),
    "conversations": lines(CHAT),
    "pairs": lines(PAIR),
    "rows with an input for the grader": lines(ROW | {"input": "x", "output": "y", "prompt": "z"}),
    "one long row": lines(ROW | {"text": "a, b\n" * 20_000}),
    "a row with white space": b'\r\n  { "messages" : [ ] }  \r\n',
    "a byte order mark": b"\xef\xbb\xbf" + lines(ROW),
    "a row that is a list": b"[1]\n" + lines(ROW),
    "a truncated row": b'{"messages": [\n' + lines(ROW),
    "a raw line end in a text": b'{"messages": "a\nb"}\n',
    "a raw tab in a text": b'{"messages": [{"role": "user", "content": "q"}], "answer": "a\tb"}\n',
    "a Python dict": b"{'messages': [], 'answer': 1}\n",
    "lines of text": b"Hello.\nWorld.\n",
    "Latin-1": '{"answer": "é"}\n'.encode("latin-1"),
    "deep": b'{"a": ' * 5000,
}


@pytest.mark.parametrize("content", JSONL.values(), ids=JSONL.keys())
def test_jsonl_is_no_foreign_format_whatever_its_rows_are(content: bytes) -> None:
    assert detect([content]) is None
    assert detect(content[at : at + 1] for at in range(min(len(content), 2000))) is None
