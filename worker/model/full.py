"""A policy all of whose weights are trained, without an adapter.

The model computes in the precision of its entry. Narrow weights (bfloat16) have a float32 copy each, the master
weights, which the optimizer changes and from which they are rounded anew after each step: at a learning rate of 1e-5
most updates are smaller than half of what bfloat16 can tell apart, and would be lost. Gradients are added up in float32
as well, one micro-batch after the other.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from core.jobs import full
from core.units import GIB
from worker.model import lora, quantized, recompute, tensor_files
from worker.model.architecture import architecture, has_experts
from worker.model.policy import Base, Policy, Trained
from worker.model.tensor_files import TensorFiles, TensorWriter
from worker.refusals import InvalidModel, UnsupportedModel

MASTERS = "masters"  # files of a checkpoint: the float32 copies of narrow weights
WRITTEN_BYTES = GIB  # of a safetensors file for a sampler: as much is copied to main memory at a time


@dataclass(frozen=True)
class AllWeights:
    """Implements worker.model.policy.Trained."""

    parameters: int

    @property
    def sentence(self) -> str:
        return f"All {self.parameters:,} parameters are trained."

    def as_data(self) -> dict[str, Any]:
        return {"trained_parameters": self.parameters}


class FullPolicy(Policy):
    """The model with all of its weights trained, and the two halves of its forward pass."""

    def __init__(self, base: Base) -> None:
        """Train the weights of `base`, which change in place."""
        causal = base.model
        self.model = causal.eval()  # there is no adapter
        causal.requires_grad_(True)
        if base.parts.head.weight.dtype != torch.float32:
            recompute.install(causal, norms=False)
        self._compute_as(base, lora.TrainedLinear(base.parts.head))
        self.dtype = base.parts.head.weight.dtype
        self.names = [name for name, _ in causal.named_parameters()]  # in the order of `trainable`
        self._weights: list[Parameter] = list(causal.parameters())
        self._masters = [self._master_of(weight) for weight in self._weights]
        self._version = 1

    def _master_of(self, weight: Parameter) -> Parameter:
        return master_of(weight)

    @property
    def trained(self) -> Trained:
        return AllWeights(sum(weight.numel() for weight in self._weights))

    @property
    def trainable(self) -> list[Parameter]:
        return self._masters

    @property
    def computing(self) -> list[Parameter]:
        return self._weights

    @property
    def trained_head(self) -> list[Parameter]:
        return list(self._head.parameters())

    @torch.no_grad()
    def follow_trainable(self) -> None:
        """Round the master weights into those that compute."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight is not master:
                weight.copy_(master)
        self._version += 1

    @property
    def weights_version(self) -> int:
        """Differs whenever the weights may have changed. At least 1."""
        return self._version

    @property
    def has_base(self) -> bool:
        return False

    def as_base(self) -> NoReturn:
        raise AssertionError("a policy without an adapter has no base: compare with a snapshot")

    @contextmanager
    def moved(self) -> Iterator[None]:
        """As it is: unlike a fresh adapter, the weights are not zero."""
        yield

    @property
    def has_masters(self) -> bool:
        """Whether the weights that are trained are copies of those that compute."""
        return self.dtype in lora.NARROW

    def full_tensor_of(self, number: int, tensor: Tensor) -> Tensor:
        """A tensor that belongs to the weight of this number in `names`, of which this process may have a part."""
        return tensor.detach()

    def _computing(self) -> Iterator[Tensor]:
        """The weights that compute, each whole."""
        yield from (weight.detach() for weight in self._weights)

    def shape(self, number: int) -> torch.Size:
        """Of a whole weight, by its place in `names`."""
        return self._weights[number].shape

    def rows(self, number: int) -> slice:
        """The rows of a weight that this process trains."""
        return slice(None)

    def write_weights(self, folder: Path | None) -> None:
        """Write the weights that compute into safetensors files, by the names and in the order of the model.

        Args:
            folder: None on ranks that only take part, where this is a collective operation.
        """
        with TensorWriter(folder) as writer:
            self._write(writer, WRITTEN_BYTES)

    def _write(self, writer: TensorWriter, most: int) -> dict[str, str]:
        """As `write_weights`, and return the file of each tensor. `most`: bytes of a file."""
        buffers = [(name, one) for name, one in self.causal.named_buffers() if name in self._persistent]
        weights = zip(self.names, self._computing(), strict=True)
        return writer.write("model", chain(weights, buffers), most=most)

    @cached_property
    def _persistent(self) -> set[str]:
        """The names of buffers that belong to the model's files."""
        return {
            f"{place}.{name}" if place else name
            for place, module in self.causal.named_modules()
            for name in module._buffers.keys() - module._non_persistent_buffers_set
        }

    def save(self, folder: Path) -> None:
        """Write a whole model that transformers loads, its tokenizer, and the master weights."""
        with TensorWriter(folder) as writer:
            files = self.write_tensors(writer)
        self.write_description(folder, files)

    def write_tensors(self, writer: TensorWriter) -> dict[str, str]:
        """Write the weights that compute, and the master weights. Returns the file of each of the former."""
        files = self._write(writer, tensor_files.FILE_BYTES)
        if self.has_masters:
            whole = (self.full_tensor_of(number, one) for number, one in enumerate(self._masters))
            writer.write(MASTERS, zip(self.names, whole, strict=True))
        return files

    def write_description(self, folder: Path, files: Mapping[str, str]) -> None:
        """Write what a model has beside its tensors: index, config, tokenizer. `files`: as `write_tensors` returns."""
        if len(names := set(files.values())) == 1:
            (folder / names.pop()).rename(folder / SAFE_WEIGHTS_NAME)
        else:
            index = {"metadata": {}, "weight_map": dict(files)}
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))
        config = copy.deepcopy(self.causal.config)
        config.architectures, config.dtype = [type(self.causal).__name__], self.dtype
        config.save_pretrained(folder)
        if self.causal.generation_config is not None:
            self.causal.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Load a checkpoint of the same model: its master weights, or the weights where these are trained.

        Raises:
            InvalidModel: its files are damaged, or are those of another model.
        """
        with TensorFiles(folder, MASTERS if self.has_masters else "model") as files:
            for number, (name, master) in enumerate(zip(self.names, self._masters, strict=True)):
                self.fill(number, master, name, files)
        self.follow_trainable()

    @torch.no_grad()
    def fill(self, number: int, tensor: Tensor, name: str, files: TensorFiles) -> None:
        """Read a tensor that belongs to the weight of this number, or the part of it that this process has.

        Raises:
            InvalidModel: there is none of this name, or it has another shape.
        """
        if files.shape(name) != list(self.shape(number)):
            raise InvalidModel(f"The saved weight {name} has another shape than the model's.")
        if tensor.numel():
            tensor.copy_(files.rows(name, self.rows(number)))


def refuse(config: Any, parameters: int) -> None:
    """Refuse a model not all of whose weights can be trained. `parameters`: how many it has.

    Raises:
        UnsupportedModel: it is too large, quantized, or a mixture of experts.
    """
    name = architecture(config)
    if problem := full.too_large(parameters):
        raise UnsupportedModel(problem)
    if found := quantized.format_of(config):
        raise UnsupportedModel(
            f"train 'full' is not supported for {name}: its weights are quantized ({found}). Use train 'lora', or the "
            "model's files in bfloat16."
        )
    if has_experts(config):
        raise UnsupportedModel(
            f"train 'full' is not supported for {name}: it is a mixture of experts. Use train 'lora'."
        )


def refuse_other_names(base: Base) -> None:
    """Refuse a model whose files name its weights otherwise: it would be saved under names that `load` does not know.

    Raises:
        UnsupportedModel: the message names a weight.
        InvalidModel: there are no safetensors files.
    """
    files = quantized.files_by_tensor(base.source)
    others = [name for name, _ in base.model.named_parameters() if name not in files]
    if others:
        raise UnsupportedModel(
            f"train 'full' is not supported for {type(base.model).__name__}: its files have other names for its "
            f"weights, such as {others[0]}. Use train 'lora'."
        )


def master_of(weight: Parameter) -> Parameter:
    """The float32 copy of a narrow weight, which takes over its gradients; a wide one is its own."""
    if weight.dtype not in lora.NARROW:
        return weight
    master = nn.Parameter(weight.detach().float())

    def hand_over(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad.add_(weight.grad)
        weight.grad = None

    weight.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
    return master
