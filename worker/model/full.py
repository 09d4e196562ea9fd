"""A policy all of whose weights are trained, without an adapter.

The model computes in the precision of its entry. Narrow weights (bfloat16) have a float32 copy each, the master
weights, which the optimizer changes and from which they are rounded anew after each step: at a learning rate of 1e-5
most updates are smaller than half of what bfloat16 can tell apart, and would be lost. Gradients are added up in float32
as well, one micro-batch after the other.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import Parameter

from core.jobs import full
from worker.model import lora, quantized, recompute
from worker.model.architecture import architecture, has_experts
from worker.model.policy import Base, Policy, Trained
from worker.refusals import InvalidModel, UnsupportedModel, first_line

MASTERS = "masters.pt"  # of a checkpoint: the float32 copies of narrow weights
FILE_BYTES = "5GB"  # of a safetensors file, at most
WRITTEN_BYTES = 2**30  # of a safetensors file for a sampler: as much is copied to main memory at a time


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
        self._compute_as(base, partial(lora.linear_in_float32, layer=base.parts.head))
        self._names = [name for name, _ in causal.named_parameters()]
        self._weights: list[Parameter] = list(causal.parameters())
        self._masters = [_master_of(weight) for weight in self._weights]
        self._version = 1

    @property
    def trained(self) -> Trained:
        return AllWeights(sum(weight.numel() for weight in self._weights))

    @property
    def trainable(self) -> list[Parameter]:
        return self._masters

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

    def write_weights(self, folder: Path) -> None:
        """Write the weights that compute into safetensors files, by the names and in the order of the model."""
        for number, tensors in enumerate(self.in_parts(WRITTEN_BYTES)):
            save_file(tensors, folder / f"model-{number:05}.safetensors")

    def in_parts(self, most: int) -> Iterator[dict[str, Tensor]]:
        """Yield the weights in main memory, at most `most` bytes or a single one at a time."""
        part: dict[str, Tensor] = {}
        for name, weight in zip(self._names, self._weights, strict=True):
            if part and sum(tensor.nbytes for tensor in part.values()) + weight.nbytes > most:
                yield part
                part = {}
            part[name] = weight.detach().cpu().contiguous()
        yield part

    @property
    def has_base(self) -> bool:
        return False

    def as_base(self) -> NoReturn:
        raise AssertionError("a policy without an adapter has no base: compare with a snapshot")

    @contextmanager
    def moved(self) -> Iterator[None]:
        """As it is: unlike a fresh adapter, the weights are not zero."""
        yield

    def snapshot(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self._weights]

    @contextmanager
    def wearing(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """With other weights of the same precision, such as a snapshot."""
        own = [weight.data for weight in self._weights]
        for weight, other in zip(self._weights, weights, strict=True):
            weight.data = other
        try:
            yield
        finally:
            for weight, data in zip(self._weights, own, strict=True):
                weight.data = data

    def save(self, folder: Path) -> None:
        """Write a whole model that transformers loads, its tokenizer, and the master weights."""
        self.causal.save_pretrained(folder, max_shard_size=FILE_BYTES)
        self.tokenizer.save_pretrained(folder)
        masters = {
            name: master.detach()
            for name, weight, master in zip(self._names, self._weights, self._masters, strict=True)
            if weight is not master
        }
        if masters:
            torch.save(masters, folder / MASTERS)

    def load(self, folder: Path) -> None:
        """Load a checkpoint of the same model: its master weights, and the weights without one.

        Raises:
            InvalidModel: its files are damaged, or are those of another model.
        """
        try:
            masters = _read_masters(folder / MASTERS) if (folder / MASTERS).exists() else {}
            files = quantized.files_by_tensor(folder)
            for name, master in zip(self._names, self._masters, strict=True):
                self._fill(name, master, masters, files)
        except (SafetensorError, KeyError, OSError) as cause:
            raise InvalidModel(
                f"The weights of the checkpoint cannot be read: {first_line(cause)}"
            ) from cause
        self.follow_trainable()

    @torch.no_grad()
    def _fill(self, name: str, master: Parameter, masters: dict[str, Tensor], files: dict[str, str]) -> None:
        if name in masters:
            saved = masters[name]
        else:
            with safe_open(files[name], "pt") as tensors:
                saved = tensors.get_tensor(name)
        if saved.shape != master.shape:
            raise InvalidModel(f"The saved weight {name} has another shape than the model's.")
        master.copy_(saved)


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
    try:
        files = quantized.files_by_tensor(base.source)
    except OSError as cause:
        raise InvalidModel(
            f"The model has no safetensors files, and train 'full' needs these: {first_line(cause)}"
        ) from cause
    others = [name for name, _ in base.model.named_parameters() if name not in files]
    if others:
        raise UnsupportedModel(
            f"train 'full' is not supported for {type(base.model).__name__}: its files have other names for its "
            f"weights, such as {others[0]}. Use train 'lora'."
        )


def _master_of(weight: Parameter) -> Parameter:
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


def _read_masters(file: Path) -> dict[str, Tensor]:
    try:
        masters: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as cause:
        raise InvalidModel(
            f"The master weights of the checkpoint cannot be read: {first_line(cause)}"
        ) from cause
    return masters
