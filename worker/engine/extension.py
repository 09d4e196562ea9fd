"""Our methods of vLLM's workers, called by name in each process of an engine (`worker_extension_cls`).

The calls into what vLLM does not promise to keep are here, in worker_class.py and in stepped.py;
tests/worker/vllm_contract.py and test_vllm_runners.py name each of them, so that a new version fails there first.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from worker.engine.kept_weights import KeptWeights
from worker.engine.protocol import AdapterBytes

ADAPTER_ID = 1


class SamplingWorker:
    """Mixed into vLLM's worker class. With tensor parallelism each takes its part of the same adapter or weights."""

    def put_policy_adapter(self, adapter: AdapterBytes) -> None:
        put_adapter(self, adapter)

    def load_policy_weights(self, files: tuple[str, ...]) -> None:
        load_weights(self, files)

    def policy_tensors_without_layer(self, tensors: tuple[str, ...]) -> list[str]:
        return tensors_without_layer(self, tensors)

    def keep_copies_of_weights(self) -> None:
        """Copy the weights to main memory at the first sleep only."""
        import torch
        from vllm.device_allocator.cumem import CuMemAllocator, unmap_and_release

        KeptWeights(CuMemAllocator.get_instance(), unmap_and_release, torch.cuda.synchronize)

    def use_one_adapter_linear(self) -> None:
        """Replace vLLM's linear layers with adapters on a CPU."""
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        PunicaWrapperCPU.add_lora_linear = one_adapter_linear


def tensors_without_layer(worker: Any, tensors: tuple[str, ...]) -> list[str]:
    """The adapter tensors for which vLLM's model has no layer. It would ignore them. Runs in vLLM's worker."""
    from vllm.lora.layers import FusedMoE3DWithLoRA
    from vllm.lora.layers import MergedColumnParallelLinearVariableSliceWithLoRA as AnySlices
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = worker.model_runner.lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = mapper.get_rename_mapper() if mapper is not None else None
    whole = {name for name, layer in manager.modules.items() if isinstance(layer, AnySlices)}
    layers = adaptable(manager.modules, manager.packed_modules, whole)
    # These have PEFT's two pairs for all experts: that of down_proj and, under this name, that of gate_up_proj.
    layers |= {
        f"{name}.base_layer"
        for name, layer in manager.modules.items()
        if isinstance(layer, FusedMoE3DWithLoRA)
    }
    return [name for name in tensors if parse_fine_tuned_lora_name(name, mapper)[0] not in layers]


def linear_layers(model: Any) -> list[str]:
    """Return the last parts of the names of the layers that vLLM allocates adapter slots for.

    In place of vLLM's own function, which adds the embeddings, the head and the experts of mixtures. No adapter of ours
    has the first two, and few have experts: a slot for those of 30B-A3B would be 62 times as large as one for its
    linear layers.
    """
    from vllm.model_executor.layers.linear import LinearBase

    return _named_last(model, LinearBase)


def linear_layers_and_experts(model: Any) -> list[str]:
    """As `linear_layers`, with the experts of mixtures: of an engine whose adapters are on experts."""
    from vllm.model_executor.layers.fused_moe import MoERunner
    from vllm.model_executor.layers.linear import LinearBase

    return _named_last(model, (LinearBase, MoERunner))


def _named_last(model: Any, kinds: Any) -> list[str]:
    modules = model.named_modules()
    return sorted({name.rpartition(".")[2] for name, module in modules if isinstance(module, kinds)})


def adaptable(
    modules: Iterable[str], packed: Mapping[str, Sequence[str]], unsplit: Collection[str]
) -> set[str]:
    """The names under which vLLM takes an adapter.

    It fails for an adapter of a module that it expects in parts: the files of GLM 4 have `gate_up_proj`, and vLLM
    expects `gate_proj` and `up_proj`.

    Args:
        modules: vLLM's own, by name.
        packed: for modules that are made of several layers, the names of these.
        unsplit: modules that also take one adapter for all their parts.
    """
    parts = {part for names in packed.values() for part in names}
    return {name for name in modules if name not in packed or name in unsplit} | parts


def put_adapter(worker: Any, adapter: AdapterBytes) -> None:
    """Write the adapter into its slot in place of the one before. Runs in vLLM's worker."""
    from safetensors.torch import load
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    lora = worker.model_runner.lora_manager
    manager = lora._adapter_manager
    config = {
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.modules),
        "rank_pattern": adapter.ranks,
    }
    peft = PEFTHelper.from_dict(config)
    peft.validate_legal(lora.lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    model = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        # Freshly unpacked and ours alone: vLLM multiplies the scale into B in place.
        load(adapter.tensors),
        peft,
        device="cpu",
        dtype=lora.lora_config.lora_dtype,
        model_vocab_size=lora.vocab_size,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    replace_adapter(manager, model)


def replace_adapter(manager: Any, model: Any) -> None:
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(model)
    manager.activate_adapter(ADAPTER_ID)
    manager.pin_adapter(ADAPTER_ID)
    # Sleep has put back the rows' mapping of another step, which the manager takes for the last that it has written.
    manager._last_mapping = None


def load_weights(worker: Any, files: Iterable[str]) -> None:
    """Replace the model's weights by those of safetensors files, in place. Runs in vLLM's worker."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    # It warns of every module whose weights are not in the files, such as rotary embeddings, which have buffers only.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    worker.reload_weights(weights_iterator=tensors_of(files))
    for module in worker.model_runner.get_model().modules():
        # On a CPU a head has a packed copy of its weights. vLLM does not renew it if these are the embeddings'.
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def tensors_of(files: Iterable[str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.offset_keys():
                yield name, tensors.get_tensor(name)


def one_adapter_linear(
    self: Any,
    y: Any,
    x: Any,
    lora_a_stacked: tuple[Any, ...],
    lora_b_stacked: tuple[Any, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **unused: Any,
) -> None:
    """y += scale * x A^T B^T, in place of PunicaWrapperCPU.add_lora_linear, where every row has adapter 0.

    vLLM's own gathers A and B once per token, which is three quarters of the time of a step.

    Shapes: x [T, in], y [T, sum(output_slices)], A [1, 1, rank, in], B [1, 1, out, rank] for each slice.
    """
    first = 0
    for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        low = x @ a[0, 0].T
        y[:, first : first + width].addmm_(low, b[0, 0].T, alpha=scale)
        first += width
