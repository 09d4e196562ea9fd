"""Tensors in several safetensors files, written one after the other, and read by name and in parts."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from core.outages import outage
from worker.refusals import InvalidModel, first_line

FILE_BYTES = 5 * 10**9  # of a file, at most, unless one tensor has more


class TensorWriter:
    """Writes sets of tensors into a folder. A context, which raises the first failure of a file at its end.

    After a failure the tensors are taken nevertheless: that may be a collective operation, in which others take part.
    """

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None takes all tensors and writes nothing."""
        self._folder = folder
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if raised is None and self._failure is not None:
            raise self._failure

    def write(
        self, stem: str, tensors: Iterable[tuple[str, Tensor]], *, most: int = FILE_BYTES
    ) -> dict[str, str]:
        """Write named tensors into `{stem}-00001.safetensors` and so on, of which one file is in memory at a time.

        Returns:
            The name of the file of each tensor.
        """
        found: dict[str, str] = {}
        waiting: dict[str, Tensor] = {}
        size = number = 0
        for name, tensor in tensors:
            if self._folder is None or self._failure is not None:
                waiting.clear()
                continue
            if waiting and size + tensor.nbytes > most:
                number += 1
                found |= self._flush(f"{stem}-{number:05}.safetensors", waiting)
                size = 0
            waiting[name] = tensor.detach().to("cpu").contiguous()
            size += tensor.nbytes
        if waiting:
            found |= self._flush(f"{stem}-{number + 1:05}.safetensors", waiting)
        return found

    def _flush(self, name: str, waiting: dict[str, Tensor]) -> dict[str, str]:
        assert self._folder is not None, "without one nothing waits"
        try:
            save_file(waiting, self._folder / name, metadata={"format": "pt"})
        except (OSError, SafetensorError) as cause:
            self._failure = cause
        names = dict.fromkeys(waiting, name)
        waiting.clear()
        return names


class TensorFiles:
    """The tensors of `{stem}-*.safetensors` of a folder. A context, which closes the files."""

    def __init__(self, folder: Path, stem: str) -> None:
        """One file may be `{stem}.safetensors`. Raises InvalidModel: a file is damaged."""
        self._open = ExitStack()
        self._files: dict[str, Any] = {}  # by the name of a tensor
        try:
            for path in sorted(folder.glob(f"{stem}*.safetensors")):
                file = self._open.enter_context(safe_open(path, "pt"))
                self._files |= dict.fromkeys(file.keys(), file)
        except (SafetensorError, OSError) as cause:
            self._open.close()
            if outage(cause) is not None:
                raise
            raise InvalidModel(
                f"The trainer's state in the checkpoint cannot be read: {first_line(cause)}"
            ) from cause

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> list[int]:
        """Raises InvalidModel: there is no such tensor."""
        return list(self._slice(name).get_shape())

    def rows(self, name: str, rows: slice) -> Tensor:
        """These rows of a tensor. Raises InvalidModel: there is none of this name."""
        part = self._slice(name)
        read: Tensor = part[rows] if part.get_shape() else part[...]
        return read

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise InvalidModel(f"The trainer's state in the checkpoint has no {name}.")
        return self._files[name].get_slice(name)
