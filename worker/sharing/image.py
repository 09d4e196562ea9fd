"""A loaded model as something that other processes of this machine can map: its weights are in memory once.

On a CPU the tensors are in a file without a name (memfd), which each process maps copy-on-write: a process that wrote
to a weight would change its own copy only. On a GPU they stay where they are, and others open them by CUDA IPC. The
rest of the model (modules, config) is pickled.
"""

import io
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from transformers import PreTrainedModel

from worker.refusals import first_line
from worker.sharing.base import RunsAlone

# Bytes. Matrix products on a CPU round by the alignment of their factors, and those in a safetensors file have the one
# that they have there: a tensor keeps its place in a page, so that a job computes what it computes alone.
_PAGE = 4096


@dataclass(frozen=True)
class InFile:
    """A tensor in the file."""

    offset: int  # in bytes
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]

    def view_of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(
            storage, self.offset // self.dtype.itemsize, self.size, self.stride
        )


@dataclass(frozen=True)
class OnGpu:
    """A tensor in the memory of a GPU, as torch.multiprocessing describes it to another process."""

    open: Callable[..., Tensor]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Description:
    """A model without its tensors, and where each of these is."""

    pickled: bytes
    tensors: Sequence[InFile | OnGpu]
    is_parameter: Sequence[bool]
    file_bytes: int  # 0: there is no file


class Image:
    """The model, kept for others. It lives as long as this process, and on a GPU no longer."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take the model's tensors over: it is of no use afterwards.

        Raises:
            RunsAlone: a part of the model cannot be given to another process.
        """
        pickler = _Pickler(buffer := io.BytesIO())
        try:
            pickler.dump(model)
        except (pickle.PicklingError, TypeError, AttributeError) as cause:
            raise RunsAlone(f"{type(model).__name__} cannot be shared: {first_line(cause)}") from cause
        self._pickled, self._tensors = buffer.getvalue(), pickler.tensors
        self._in_file: list[InFile] = []
        self.file: int | None = None
        self.file_bytes = 0
        if model.device.type == "cpu":
            self._write_file()

    def _write_file(self) -> None:
        for tensor in self._tensors:
            # Without gaps, with the dimensions in the tensor's order.
            stride = torch.empty_like(tensor, device="meta").stride()
            address = tensor.data_ptr() // tensor.itemsize * tensor.itemsize
            offset = self.file_bytes + (address - self.file_bytes) % _PAGE
            self._in_file.append(InFile(offset, tensor.dtype, tuple(tensor.shape), stride))
            self.file_bytes = offset + tensor.nbytes
        self.file = os.memfd_create("regraft-base")
        os.ftruncate(self.file, max(1, self.file_bytes))
        storage = _mapped(self.file, self.file_bytes, shared=True)
        for place, tensor in zip(self._in_file, self._tensors, strict=True):
            place.view_of(storage).copy_(tensor.detach())
            tensor.data = tensor.data.new_empty(0)  # so that no two copies of the whole model are in memory

    def describe(self) -> Description:
        """For one other process."""
        tensors: Sequence[InFile | OnGpu] = self._in_file or [
            OnGpu(*reductions.reduce_tensor(tensor.detach()))  # type: ignore[no-untyped-call]
            for tensor in self._tensors
        ]
        parameters = [isinstance(tensor, nn.Parameter) for tensor in self._tensors]
        return Description(self._pickled, tensors, parameters, self.file_bytes)


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and keeps them by number. One that is used twice stays one."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        if type(obj) not in (Tensor, nn.Parameter) or obj.layout != torch.strided:
            raise pickle.PicklingError(f"it has a tensor of type {type(obj).__name__}")
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        tensor: Tensor = self._tensors[number]
        return tensor


def opened(description: Description, file: int | None) -> PreTrainedModel:
    """The model of an Image in another process. Nothing is copied.

    Args:
        file: a descriptor of the image's file, which may be closed afterwards.
    """
    storage = None if file is None else _mapped(file, description.file_bytes, shared=False)
    tensors: list[Tensor] = []
    for place, is_parameter in zip(description.tensors, description.is_parameter, strict=True):
        if isinstance(place, InFile):
            assert storage is not None, "tensors in a file come with it"
            tensor = place.view_of(storage)
        else:
            tensor = place.open(*place.arguments)
        tensors.append(nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
    model: PreTrainedModel = _Unpickler(description.pickled, tensors).load()
    return model


def _mapped(file: int, size: int, *, shared: bool) -> torch.UntypedStorage:
    # Not shared: torch maps it copy-on-write.
    mapped = torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", shared, max(1, size))
    assert isinstance(mapped, torch.UntypedStorage)
    return mapped
