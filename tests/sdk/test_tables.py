"""Tables in memory and datasets of the hub become datasets for a job, by the rules for files."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pytest
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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of datasets by name, which `datasets` reads in place of the hub; the hub itself is unavailable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "acme" / "sums"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "test.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    return tmp_path


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
    ],
    ids=["dicts", "DataFrame", "index", "Arrow", "Dataset", "IterableDataset", "selected"],
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


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "a DatasetDict is not a table: choose one of"),
        (iter(ROWS), "list_iterator is not a table: pass a path, pandas.DataFrame"),
        (["a"], "line 1: is no mapping"),
        (pandas.DataFrame({"prompt": ["a", "b"], "answer": [1, "x"]}), "Arrow cannot read the DataFrame: .* answer"),
        (pandas.DataFrame({"other": ["a"]}), "line 1: has no field 'question', which --map names"),
    ],
    ids=["splits", "iterator", "texts", "mixed", "fields"],
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
    hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rft = ["--to", "rft", "--map", "prompt=question", "--map", "answer=label"]

    assert main(["convert", "hub:acme/sums", *as_rft]) == 0
    assert main(["convert", "hub:acme/sums", "--split", "test", *as_rft, "-o", "valid.jsonl"]) == 0

    assert capsys.readouterr().out == "sums.rft.jsonl: 3 rows\nvalid.jsonl: 1 rows\n"


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("hub:acme/other", [], "hub:acme/other: "),
        ("hub:sums", [], "'sums' is no name of the hub's: write it as OWNER/NAME"),
        ("hub:acme/sums", ["--split", "dev"], "hub:acme/sums cannot be loaded"),
        ("hub:acme/sums", ["--config", "none"], "hub:acme/sums cannot be loaded"),
        ("acme/sums/test.jsonl", ["--split", "test"], "--config and --split are of datasets of the hub"),
    ],
)
def test_a_dataset_that_the_hub_does_not_give_is_refused_by_its_name(
    hub: Path, source: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", source, "--to", "rft", *options]) != 0

    assert said in capsys.readouterr().err
    assert not [*hub.glob("*.jsonl")]


def test_an_unreachable_hub_is_named_with_the_way_around_it(hub: Path) -> None:
    with pytest.raises(InvalidDataset, match=r"hub cannot be reached for acme/other: .*convert the file"):
        from_hub("acme/other")
