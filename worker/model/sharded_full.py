"""A policy all of whose weights are trained, in parts: each GPU keeps a part of every layer, with FSDP2.

The parts are float32, and are what the optimizer of their GPU changes: master weights, if the model computes in
bfloat16. FSDP2 gathers a layer in the precision that computes while it is in use, and adds up the gradients of all GPUs
in float32. The embeddings and the head are whole on every GPU, as in worker/model/sharding.py, with masters of their
own; their gradients are added up by the caller.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from worker.model import quantized, sharding
from worker.model.full import FullPolicy, master_of
from worker.model.policy import Base


class ShardedFullPolicy(FullPolicy):
    """All weights, of which this process trains a part. A method that says so is a collective operation."""

    def __init__(self, base: Base) -> None:
        """Begin with a model without weights; `shard` fills it."""
        super().__init__(base)
        # On the rank that leads: has the others call `write_weights` too during the context.
        self.with_others: Callable[[], AbstractContextManager[None]] = nullcontext

    def _master_of(self, weight: Parameter) -> Parameter:
        return weight  # until there are weights

    def shard(self, stand_in: FullPolicy, mesh: DeviceMesh, source: Path | str) -> None:
        """Keep a part of each layer, read from the files of `source`. All ranks of `mesh` call it.

        Args:
            stand_in: the policy on the stand-in, which has the buffers.

        Raises:
            UnsupportedModel: the files do not have the model's parameters under their own names.
            InvalidModel: parameters are missing in the files.
        """
        precision = MixedPrecisionPolicy()
        if self.has_masters:
            precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        outside = set(self.outside_of_layers)
        for module in self.text_decoder.modules():
            for weight in module.parameters(recurse=False):
                if weight not in outside:
                    weight.data = weight.data.float()  # on the meta device
        for layer in self.layers:
            _shard(layer, mesh, precision)
        _shard(self.text_decoder, mesh, precision, outside)
        sharding.place(self, stand_in)
        files = quantized.files_by_tensor(source)
        self._weights = list(self.causal.parameters())
        with torch.no_grad():
            for name, weight in zip(self.names, self._weights, strict=True):
                sharding.fill(name, weight, files, mesh, self.causal.config, self.dtype)
        self._mesh = mesh
        self._masters = [
            Parameter(weight.to_local()) if isinstance(weight, DTensor) else master_of(weight)
            for weight in self._weights
        ]

    @property
    def led(self) -> list[Parameter]:
        return []

    @property
    def parts(self) -> list[Parameter]:
        """Of `trainable`: those that this process alone has."""
        return [master for weight, master in self._both() if isinstance(weight, DTensor)]

    @property
    def replicated(self) -> list[Parameter]:
        """Of `trainable`: those that all ranks have, and update alike."""
        return [master for weight, master in self._both() if not isinstance(weight, DTensor)]

    def _both(self) -> Iterator[tuple[Parameter, Parameter]]:
        return zip(self._weights, self._masters, strict=True)

    def collect_gradients(self) -> None:
        """Leave the gradients of the parts, which FSDP2 has added up, on `parts`."""
        for weight, master in self._both():
            if isinstance(weight, DTensor):
                gradient, weight.grad = weight.grad, None
                master.grad = gradient.to_local() if isinstance(gradient, DTensor) else None

    @torch.no_grad()
    def follow_trainable(self) -> None:
        """Round the masters of the embeddings and the head; FSDP2 rounds the parts when it gathers them."""
        for weight, master in self._both():
            if not isinstance(weight, DTensor) and weight is not master:
                weight.copy_(master)
        self._version += 1

    def snapshot(self) -> list[Tensor]:
        """The parts of this process."""
        return [master.detach().to(self.dtype, copy=True) for master in self._masters]

    @contextmanager
    def with_weights(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """With other weights, such as a snapshot. All ranks enter it together to compute."""
        own = [_local(weight).detach().clone() for weight in self._weights]
        self._overwrite(weights)
        try:
            yield
        finally:
            self._overwrite(own)

    @torch.no_grad()
    def _overwrite(self, tensors: Sequence[Tensor]) -> None:
        for weight, tensor in zip(self._weights, tensors, strict=True):
            _local(weight).copy_(tensor)

    def full_tensor_of(self, number: int, tensor: Tensor) -> Tensor:
        """As FullPolicy does. A collective operation."""
        weight = self._weights[number]
        if not isinstance(weight, DTensor):
            return tensor.detach()
        spread = DTensor.from_local(
            tensor.detach(),
            self._mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
        whole: Tensor = spread.full_tensor()
        return whole

    def _computing(self) -> Iterator[Tensor]:
        """As FullPolicy does. A collective operation."""
        for number, master in enumerate(self._masters):
            yield self.full_tensor_of(number, master).to(self.dtype)

    def rows(self, number: int) -> slice:
        weight = self._weights[number]
        return sharding.rows_of(weight, self._mesh) if isinstance(weight, DTensor) else slice(None)

    def write_weights(self, folder: Path | None) -> None:
        """As FullPolicy does. A collective operation, to which the leading rank calls the others."""
        with self.with_others():
            super().write_weights(folder)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    outside: set[Parameter] | None = None,
) -> None:
    """Shard the module's weights, whose gradients are sums over all ranks."""
    fully_shard(
        module, mesh=mesh, reshard_after_forward=True, mp_policy=precision, ignored_params=outside or set()
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other
