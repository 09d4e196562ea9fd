"""The same file gets the same words from the client and from the server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regraft
from regraft import InvalidDataset, datasets
from regraft._rules import datasets as shipped

from core.database.tables import File
from core.jobs.job_files import BadFile
from core.storage import datasets as core
from core.storage.datasets import MAX_TRAINING_ROWS, MAX_VALIDATION_ROWS
from core.storage.store import FolderBlobs
from graders.build import item_paths
from graders.spec import parse_grader
from tests.sdk.conftest import GRADER, ROWS
from worker.supervisor import validation

BAD = b"""{"messages": [{"role": "user", "content": "hi"}]}
{"messages": []}
[1]

{"messages": [{"role": "assistant", "content": 4}], "answer": NaN}
{"messages": [{"role": "user", "content": "hi"}], "answer": "x"}
"""
JUDGE = {
    "type": "score_model",
    "name": "j",
    "model": "m",
    "input": [
        {"role": "system", "content": "Compare {{item.a}} with {{ item.b[0].c }}."},
        {"role": "user", "content": [{"type": "input_text", "text": "{{sample.output_text}} {{item.d}}"}]},
        {"role": "user", "content": {"type": "input_image", "image_url": "{{item.e}}"}},
    ],
}
GRADERS = [
    GRADER,
    JUDGE,
    {
        "type": "text_similarity",
        "name": "t",
        "input": "{{item.a}}",
        "reference": "{{item.b}}",
        "evaluation_metric": "bleu",
    },
    {"type": "math", "name": "m", "input": "{{sample.output_text}}", "reference": "{{item.solution}}"},
    {"type": "format", "name": "f", "input": "{{item.prefix}}{{sample.output_text}}", "pattern": "a+"},
    {"type": "python", "name": "p", "source": "def grade(sample, item):\n    return 1.0"},
    {"type": "endpoint", "name": "e", "url": "https://graders.example/{{item.no}}"},
    {
        "type": "multi",
        "name": "both",
        "graders": {"exact": GRADER, "judge": JUDGE},
        "calculate_output": "exact + judge",
    },
    {"type": "multi", "name": "list", "graders": [GRADER], "calculate_output": "exact"},
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "train.jsonl"
        path.write_bytes(content)
        return path

    return write


PAIRS = b'{"input": {"messages": [{"role": "user", "content": "hi"}]}, "preferred_output": []}\n'


def servers_words(path: Path, tmp_path: Path, grader: dict[str, str]) -> str:
    """What a job with this file would fail with."""
    blobs = FolderBlobs(tmp_path / "blobs")
    info = blobs.put_file("file", path)
    file = File(id="file-1", filename=path.name, blob_key="file", bytes=info.size, sha256=info.sha256)
    with pytest.raises(BadFile) as bad:
        validation.check_file(blobs, file, parse_grader(grader), "training_file", MAX_TRAINING_ROWS)
    return bad.value.message.removeprefix("Training file file-1 (train.jsonl): ")


def test_a_bad_file_is_told_in_the_servers_words(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(BAD)

    with pytest.raises(InvalidDataset) as bad:
        datasets.validate(path, grader=GRADER)

    assert str(bad.value) == servers_words(path, tmp_path, GRADER)
    assert [error.line for error in bad.value.errors] == [1, 2, 3, 4, 5]


def test_a_file_for_another_method_is_told_so_in_the_servers_words(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write(PAIRS)

    with pytest.raises(InvalidDataset) as bad:
        datasets.validate(path, grader=GRADER)

    assert str(bad.value) == servers_words(path, tmp_path, GRADER)
    assert str(bad.value).startswith(
        "the rows are made for method 'dpo', and were read as rows for 'reinforcement'. "
        "Use method 'dpo' for this file, "
        'or rows such as {"messages": '
    )


@pytest.mark.parametrize("grader", GRADERS, ids=lambda grader: f"{grader['type']}-{grader['name']}")
def test_what_a_grader_reads_is_found_without_the_server(grader: dict[str, Any]) -> None:
    assert datasets.item_paths(grader) == item_paths(parse_grader(json.loads(json.dumps(grader))))


def test_a_good_file_is_summed_up(write: Callable[..., Path]) -> None:
    summary = regraft.datasets.validate(write("".join(json.dumps(row) + "\n" for row in ROWS).encode()))

    assert (summary.rows, summary.fields) == (4, ("answer",))


def test_the_limits_are_the_servers() -> None:
    assert dict(datasets.MAX_ROWS) == {
        "train": MAX_TRAINING_ROWS,
        "valid": MAX_VALIDATION_ROWS,
    }


def test_the_rules_are_the_servers_own_file() -> None:
    """A link in the repository, which the wheel has as a file."""
    from pathlib import Path

    assert Path(shipped.__file__).read_bytes() == Path(core.__file__).read_bytes()
    assert Path(shipped.__file__).resolve() == Path(core.__file__).resolve()


def test_a_file_that_is_too_long_for_validation(write: Callable[..., Path]) -> None:
    path = write(b'{"messages": [{"role": "user", "content": "hi"}]}\n' * 1001)

    with pytest.raises(InvalidDataset, match="line 1001: the file must have at most 1000 examples"):
        datasets.validate(path, split="valid")
    assert datasets.validate(path).rows == 1001


def test_rows_that_choose_their_grader_need_its_fields_only(write: Callable[[bytes], Path]) -> None:
    word = {
        "type": "string_check",
        "name": "w",
        "input": "{{item.word}}",
        "reference": "x",
        "operation": "eq",
    }
    total = {"type": "math", "name": "t", "input": "{{sample.output_text}}", "reference": "{{item.total}}"}
    spec = {"type": "select", "name": "s", "key": "{{item.by}}", "graders": {"word": word, "total": total}}
    ask = {"messages": [{"role": "user", "content": "?"}]}
    good = [ask | {"by": "word", "word": "x"}, ask | {"by": "total", "total": "1"}]
    bad = [ask | {"by": "word", "total": "1"}, ask | {"by": "other"}, ask]

    assert datasets.validate(write("\n".join(map(json.dumps, good)).encode()), grader=spec).rows == 2
    with pytest.raises(InvalidDataset) as refused:
        datasets.validate(write("\n".join(map(json.dumps, bad)).encode()), grader=spec)

    assert [error.message for error in refused.value.errors] == [
        "the grader reads {{item.word}}, which this row does not have",
        "the row chooses the grader 'other', which is none of 'word', 'total'",
        "the grader reads {{item.by}}, which this row does not have",
    ]
