"""Files of tensors: their sizes, and parts of them that are read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from worker.model.tensor_files import TensorFiles, TensorWriter
from worker.refusals import InvalidModel

TENSORS = {f"layer.{number}": torch.arange(8.0 * number).reshape(number, 8) for number in range(1, 8)}


def test_a_file_has_at_most_so_many_bytes_unless_one_tensor_has_more(tmp_path: Path) -> None:
    with TensorWriter(tmp_path) as writer:
        files = writer.write("model", TENSORS.items(), most=150)

    sizes: dict[str, list[int]] = {}
    for name, file in files.items():
        sizes.setdefault(file, []).append(TENSORS[name].nbytes)
    assert [size for each in sizes.values() for size in each] == [one.nbytes for one in TENSORS.values()]
    assert all(len(each) == 1 or sum(each) <= 150 for each in sizes.values())
    assert len(sizes) > 2
    assert {path.name for path in tmp_path.iterdir()} == sizes.keys()


def test_rows_are_read_by_name(tmp_path: Path) -> None:
    with TensorWriter(tmp_path) as writer:
        writer.write("moments", [*TENSORS.items(), ("scalar", torch.tensor(3.0))], most=150)

    with TensorFiles(tmp_path, "moments") as files:
        assert files.names() == {*TENSORS, "scalar"}
        assert files.shape("layer.5") == [5, 8]
        assert torch.equal(files.rows("layer.5", slice(2, 4)), TENSORS["layer.5"][2:4])
        assert files.rows("scalar", slice(None)) == 3.0
        with pytest.raises(InvalidModel, match=r"has no layer\.9"):
            files.shape("layer.9")


def taking(taken: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in TENSORS.items():
        taken.append(name)
        yield name, tensor


def test_without_a_folder_the_tensors_are_taken_and_nothing_is_written() -> None:
    taken: list[str] = []

    with TensorWriter(None) as writer:
        assert writer.write("model", taking(taken)) == {}

    assert taken == [*TENSORS]


def test_after_a_failure_all_tensors_are_taken_and_it_is_raised_at_the_end(tmp_path: Path) -> None:
    """Other ranks take part in each of them, and would wait."""
    taken: list[str] = []

    def write() -> None:
        with TensorWriter(tmp_path / "absent") as writer:
            writer.write("model", taking(taken), most=150)
            writer.write("moments", taking(taken), most=150)

    with pytest.raises((OSError, SafetensorError)):
        write()

    assert taken == [*TENSORS, *TENSORS]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "masters-00001.safetensors").write_bytes(b"nothing")

    with pytest.raises(InvalidModel, match="cannot be read"):
        TensorFiles(tmp_path, "masters")
