"""Tables in memory and datasets of the hub become datasets for a job, by the rules for files."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
from httpx2 import Request, Response
from huggingface_hub.errors import HfHubHTTPError
from regraft import InvalidDataset
from regraft.cli import main
from regraft.convert import convert
from regraft.tables import Table, from_hub

ROWS: list[dict[str, Any]] = [
    {"question": "1 + 1?", "label": "2", "tags": ["sum"], "level": 1.0},
    {"question": "2 + 3?", "label": "5", "tags": [], "level": None},
    {"question": "3 + 3?", "label": "6", "tags": ["sum", "twice"], "level": 2.5},
]
NAMES = {"prompt": "question", "answer": "label"}


class Hub:
    """Stands in for `datasets.load_dataset`: the splits of acme/sums, and the errors of the real one."""

    def __init__(self) -> None:
        self.splits = {
            "train": datasets.Dataset.from_list(ROWS),
            "test": datasets.Dataset.from_list(ROWS[:1]),
        }
        self.error: Exception | None = None
        self.names: list[str] = []

    def load_dataset(
        self, path: str, name: str | None = None, *, split: str, revision: str | None = None
    ) -> datasets.Dataset:
        self.names.append(path)
        if self.error is not None:
            raise self.error
        if path != "acme/sums":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub")
        if name is not None:
            raise ValueError(f"BuilderConfig '{name}' not found. Available: ['default']")
        if split not in self.splits:
            raise ValueError(f'Unknown split "{split}". Should be one of {[*self.splits]}.')
        return self.splits[split]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub, and an empty working directory."""
    monkeypatch.chdir(tmp_path)
    fake = Hub()
    monkeypatch.setattr(datasets, "load_dataset", fake.load_dataset)
    return fake


def http_error(status: int, reason: str) -> HfHubHTTPError:
    request = Request("GET", "https://huggingface.co/api/datasets/acme/sums")
    return HfHubHTTPError(f"{status} {reason}", response=Response(status, request=request))


def converted(table: Table, folder: Path) -> list[dict[str, Any]]:
    made = convert(table, "rft", folder / "ours.jsonl", names=NAMES)
    return [json.loads(line) for line in made.path.read_text().splitlines()]


@pytest.mark.parametrize(
    "table",
    [
        ROWS,
        pandas.DataFrame(ROWS),
        pandas.DataFrame(ROWS, index=["a", "b", "c"]),
        pyarrow.Table.from_pylist(ROWS),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        datasets.Dataset.from_list([ROWS[0], *ROWS]).select([1, 2, 3]),
        [row | {"level": np.float32(row["level"])} if row["level"] else row for row in ROWS],
    ],
    ids=["dicts", "DataFrame", "index", "Arrow", "Dataset", "IterableDataset", "selected", "numpy"],
)
def test_a_table_in_memory_becomes_a_dataset(table: Table, tmp_path: Path) -> None:
    rows = converted(table, tmp_path)

    assert rows == [
        {
            "answer": row["label"],
            "messages": [{"role": "user", "content": row["question"]}],
            "tags": row["tags"],
            "level": row["level"],
        }
        for row in ROWS
    ]


def test_a_stream_that_can_be_read_once_keeps_its_first_rows(tmp_path: Path) -> None:
    """Answers with their prompt are looked for before the rows are written."""
    batches = pyarrow.Table.from_pylist(ROWS).to_batches(max_chunksize=1)

    rows = converted(pyarrow.RecordBatchReader.from_batches(batches[0].schema, batches), tmp_path)

    assert [row["answer"] for row in rows] == ["2", "5", "6"]


class Stream:
    """Any other table that Arrow can read, once."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._tables = [table]

    def __arrow_c_stream__(self, requested_schema: Any = None, /) -> Any:
        return self._tables.pop().__arrow_c_stream__(requested_schema)


def test_a_table_of_any_package_is_read_once(tmp_path: Path) -> None:
    rows = converted(Stream(pyarrow.Table.from_pylist(ROWS)), tmp_path)

    assert [row["answer"] for row in rows] == ["2", "5", "6"]


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


FAR = pyarrow.table({"question": ["a"], "when": pyarrow.array([2**62], pyarrow.timestamp("us"))})
TWICE = pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
ZONE = pyarrow.array([0], pyarrow.timestamp("us", tz="Nowhere/At_All"))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (FAR, "Arrow cannot read the table: "),
        (datasets.Dataset(FAR), "Arrow cannot read the Dataset: "),
        (pyarrow.table({"question": ["a"], "twice": TWICE}), "Arrow cannot read the table: .*duplicate"),
        (pyarrow.table({"question": ["a"], "when": ZONE}), "Arrow cannot read the table: "),
        ([{"question": "a", 1: "b"}], "line 1: has the key 1, which is not a text"),
        ([{"question": "a", "label": "b", "\ud800": 1}], "line 1: has in the name of a field a value that JSON"),
        ([{"question": "a", "label": "b", "tree": nested(100_000)}], "line 1: is nested too deeply"),
        ([], "the table is empty"),
        (pandas.DataFrame({"question": []}), "the table is empty"),
        ({"question": ["a"], "label": ["b"]}, r"a dict is not a table: pass pandas.DataFrame\(data\) for a dict of"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "a DatasetDict is not a table: choose one of"),
        (iter(ROWS), "list_iterator is not a table: pass a path, pandas.DataFrame"),
        (["a"], "line 1: is no mapping"),
        (pandas.DataFrame({"prompt": ["a", "b"], "answer": [1, "x"]}), "Arrow cannot read the DataFrame: .* answer"),
        (pandas.DataFrame({"other": ["a"]}), "line 1: has no field 'question', which --map names"),
    ],
    ids=["year", "year of a Dataset", "twice", "zone", "key", "surrogate", "nested", "no rows", "no rows of pandas",
         "columns", "splits", "iterator", "texts", "mixed", "fields"],
)  # fmt: skip
def test_a_table_that_cannot_be_converted_says_why_and_nothing_is_written(
    table: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidDataset, match=said):
        converted(table, tmp_path)

    assert not (tmp_path / "ours.jsonl").exists()


@pytest.mark.parametrize(
    ("package", "convert_with", "said"),
    [
        ("pyarrow", lambda to: converted(pandas.DataFrame(ROWS), to), "needs pyarrow: run `pip install pyarrow`"),
        ("datasets", lambda to: from_hub("acme/sums"), "hub:acme/sums needs the package datasets: run `pip install"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_with_its_installation(
    package: str, convert_with: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(InvalidDataset, match=said):
        convert_with(tmp_path)


def test_the_command_converts_a_split_of_a_dataset_of_the_hub(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rft = ["--to", "rft", "--map", "prompt=question", "--map", "answer=label"]

    assert main(["convert", "hub:acme/sums", *as_rft]) == 0
    assert main(["convert", "hub:acme/sums", "--split", "test", *as_rft, "-o", "valid.jsonl"]) == 0

    assert capsys.readouterr().out == "sums.rft.jsonl: 3 rows\nvalid.jsonl: 1 rows\n"


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("hub:acme/other", [], "hub:acme/other cannot be loaded"),
        ("hub:../sums", [], "'../sums' is no name of the hub's"),
        ("hub:acme/sums", ["--encoding", "cp1252"], "--encoding is of text files"),
        ("hub:sums", [], "'sums' is no name of the hub's: write it as OWNER/NAME"),
        ("hub:acme/sums", ["--split", "dev"], "hub:acme/sums cannot be loaded"),
        ("hub:acme/sums", ["--config", "none"], "hub:acme/sums cannot be loaded"),
        ("acme/sums/test.jsonl", ["--split", "test"], "--config and --split are of datasets of the hub"),
    ],
)
def test_a_dataset_that_the_hub_does_not_give_is_refused_by_its_name(
    hub: Hub, source: str, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", source, "--to", "rft", *options]) != 0

    assert said in capsys.readouterr().err
    assert not [*tmp_path.glob("*.jsonl")]


def test_a_local_folder_of_the_name_is_not_taken_for_the_dataset_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "acme" / "sums").mkdir(parents=True)

    with pytest.raises(InvalidDataset, match="acme/sums is also a local path"):
        from_hub("acme/sums")

    assert hub.names == []


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'acme/sums' on the Hub (ConnectError)"),
        http_error(500, "Internal Server Error"),
        http_error(403, "Forbidden"),  # as a proxy answers
    ],
    ids=["connection", "500", "403"],
)
def test_an_unreachable_hub_is_named_with_the_way_around_it(hub: Hub, error: Exception) -> None:
    hub.error = error

    with pytest.raises(InvalidDataset, match=r"hub cannot be reached for acme/sums: .*convert the file"):
        from_hub("acme/sums")
