"""The adapters of experts in files: one pair of matrices for each expert and projection, or PEFT's own layout.

PEFT keeps one pair for each projection of all experts (`experts.base_layer.lora_A` for gate_up_proj and
`experts.lora_A` for down_proj). vLLM reads that for some architectures, and for all others it wants
`experts.N.gate_proj.lora_A` and so on. PEFT loads both: it converts the second as transformers converts the weights of
such a checkpoint. Conversions here copy numbers and compute nothing, so they are exact.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from worker.model.experts import DOWN, GATE_UP, adaptable_experts

# The architectures (of config.json) for whose adapters on experts vLLM reads PEFT's own layout: `is_3d_moe_weight` of
# the class that it takes for them. Those of the text alone, such as Qwen3_5MoeForCausalLM, are other classes.
FUSED_IN_VLLM = frozenset(
    {
        "ClefOmniForJointSchema",
        "GptOssForCausalLM",
        "InternS1ProForConditionalGeneration",
        "InternS2MobiusForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "Qwen3OmniMoeForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_BLOCK = re.compile(r"\.\w+\.")  # a part of a name
_GATE_UP_A = ".base_layer.lora_A.weight"  # the end of its name in a state dict of PEFT


@dataclass(frozen=True)
class ExpertPair:
    """scale * b @ a is added to a weight."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]


@dataclass(frozen=True)
class FusedPair:
    """The pairs of all experts, as PEFT keeps them."""

    a: Tensor  # [experts * rank, in], the rows of an expert together
    b: Tensor  # [out, rank * experts], the columns of a rank together

    def split(self, experts: int) -> list[ExpertPair]:
        """Of each expert, as views."""
        a_ERI = self.a.reshape(experts, -1, self.a.shape[-1])
        b_ERO = self.b.reshape(len(self.b), -1, experts)
        return [ExpertPair(a_ERI[number], b_ERO[..., number]) for number in range(experts)]

    @staticmethod
    def of(pairs: Sequence[ExpertPair]) -> "FusedPair":
        b_ORE = torch.stack([pair.b for pair in pairs], -1)
        return FusedPair(torch.cat([pair.a for pair in pairs]), b_ORE.reshape(len(b_ORE), -1))


@dataclass(frozen=True)
class Expert:
    """The three pairs of an expert in a file."""

    gate: ExpertPair
    up: ExpertPair
    down: ExpertPair


def to_per_expert(gate_up: FusedPair, down: FusedPair, experts: int) -> list[Expert]:
    """Divide the adapters of all experts. Gate and up have the same A, and the gate is the first half of B."""
    found = []
    for one, out in zip(gate_up.split(experts), down.split(experts), strict=True):
        half = len(one.b) // 2
        found.append(Expert(ExpertPair(one.a, one.b[:half]), ExpertPair(one.a, one.b[half:]), out))
    return found


def to_fused(pairs: Sequence[Expert]) -> tuple[FusedPair, FusedPair]:
    """Join the adapters of experts, for gate_up_proj and for down_proj.

    If gate and up of an expert differ in A, that of gate_up_proj has twice the rank: A is both of them, and B is zero
    where one has no part in the other.
    """
    is_shared = all(_has_same_bits(one.gate.a, one.up.a) for one in pairs)
    gate_up = [_gate_up(one.gate, one.up, is_shared=is_shared) for one in pairs]
    return FusedPair.of(gate_up), FusedPair.of([one.down for one in pairs])


def _has_same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether tensors are equal, also where they are not numbers."""
    return first.shape == second.shape and torch.equal(
        first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)
    )


def _gate_up(gate: ExpertPair, up: ExpertPair, *, is_shared: bool) -> ExpertPair:
    if is_shared:
        return ExpertPair(gate.a, torch.cat([gate.b, up.b]))
    b: Tensor = torch.block_diag(gate.b, up.b)  # type: ignore[no-untyped-call]
    return ExpertPair(torch.cat([gate.a, up.a]), b)


@dataclass(frozen=True)
class PerExpert:
    """The layout of a file with a pair for each expert and projection."""

    gate: str  # the last parts of names
    up: str
    down: str
    experts: int
    in_model: str  # a part of the names of the modules of experts, and what the files of the model have in its place
    in_files: str

    def to_file(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the adapter as PEFT names it to the file's layout."""
        found = dict(tensors)
        for name in tensors:
            if not name.endswith(_GATE_UP_A):
                continue
            module = name.removesuffix(_GATE_UP_A)
            gate_up, down = _pop(found, f"{module}.base_layer"), _pop(found, module)
            pairs = to_per_expert(gate_up, down, self.experts)
            stored = self._in_files(module)
            for number, one in enumerate(pairs):
                for own, pair in zip(self.projections, (one.gate, one.up, one.down), strict=True):
                    # Copies, because gate and up share A, and files have no shared tensors.
                    found[f"{stored}.{number}.{own}.lora_A.weight"] = pair.a.clone()
                    found[f"{stored}.{number}.{own}.lora_B.weight"] = pair.b.clone(
                        memory_format=torch.contiguous_format
                    )
        return found

    def from_file(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Invert `to_file`. Tensors in PEFT's layout stay as they are, and so do those of incomplete layers."""
        found = dict(tensors)
        of_experts = {module for name in tensors if (module := self._module_in_file(name)) is not None}
        for stored in of_experts:
            names = [f"{stored}.{number}.{own}" for number in range(self.experts) for own in self.projections]
            if not all(f"{name}.lora_{half}.weight" in found for name in names for half in "AB"):
                continue
            pairs = [_pop_pair(found, name) for name in names]
            triples = [Expert(*pairs[first : first + 3]) for first in range(0, len(pairs), 3)]
            module = self._in_model(stored)
            for name, pair in zip((f"{module}.base_layer", module), to_fused(triples), strict=True):
                found |= {f"{name}.lora_A.weight": pair.a, f"{name}.lora_B.weight": pair.b}
        return found

    def module_of(self, name: str) -> str:
        """The module of experts that a layer of the file is in; the layer itself if it is in none."""
        module = self._module_in_file(f"{name}.lora_A.weight")
        return name if module is None else self._in_model(module)

    def patterns(self, rank: int, alpha: int) -> tuple[dict[str, int], dict[str, int]]:
        """`rank_pattern` and `alpha_pattern` of the file's config, where experts have this rank.

        When PEFT joins the A of gate and up, its rank is twice that of either, and so is alpha for the same scale.
        """
        ranks = {f"experts.{GATE_UP}": 2 * rank, f"experts.{DOWN}": rank}
        return ranks | self.ranks(rank), {f"experts.{GATE_UP}": 2 * alpha}

    def ranks(self, rank: int) -> dict[str, int]:
        """The `rank_pattern` of the file's own tensors, which vLLM reads."""
        return {rf"experts\.\d+\.({'|'.join(self.projections)})": rank}

    @property
    def projections(self) -> tuple[str, str, str]:
        return self.gate, self.up, self.down

    def _module_in_file(self, name: str) -> str | None:
        """The module of experts of a tensor MODULE.NUMBER.PROJECTION.lora_A.weight; None: it is of no expert."""
        module, *parts = name.rsplit(".", 4)
        if len(parts) != 4 or not module.endswith(".experts"):
            return None
        return module if parts[0].isdigit() and parts[1] in self.projections else None

    def _in_files(self, module: str) -> str:
        return module.replace(self.in_model, self.in_files) if self.in_model else module

    def _in_model(self, module: str) -> str:
        return module.replace(self.in_files, self.in_model) if self.in_model else module


def _pop(tensors: dict[str, Tensor], name: str) -> FusedPair:
    return FusedPair(tensors.pop(f"{name}.lora_A.weight"), tensors.pop(f"{name}.lora_B.weight"))


def _pop_pair(tensors: dict[str, Tensor], name: str) -> ExpertPair:
    return ExpertPair(tensors.pop(f"{name}.lora_A.weight"), tensors.pop(f"{name}.lora_B.weight"))


def layout_of(model: PreTrainedModel, architecture: str) -> PerExpert | None:
    """The layout of the files of adapters on the experts of a model. None: PEFT's own.

    Files have a pair for each expert if checkpoints of the model have a weight for each, which PEFT then converts in
    the same way, unless vLLM wants PEFT's layout for this architecture.

    Args:
        architecture: of the config of the model's files. The model here may be their text part alone.
    """
    modules = adaptable_experts(model)
    counts = {module.gate_up_proj.shape[0] for module in modules.values()}
    if len(counts) != 1 or architecture in FUSED_IN_VLLM:
        return None
    mapping = get_model_conversion_mapping(model, None, None)
    names = [name for projection in (GATE_UP, DOWN) for name in _sources(mapping, projection)]
    if len(names) != 3:
        return None
    gate, up, down = names
    in_model, in_files = _renamed_block(mapping, next(iter(modules)))
    return PerExpert(gate, up, down, counts.pop(), in_model, in_files)


def _sources(mapping: Sequence[Any], projection: str) -> list[str]:
    """Names of the weights of an expert in files that become this projection of all experts."""
    for one in mapping:
        if isinstance(one, WeightConverter) and one.target_patterns[0].endswith(f".experts.{projection}"):
            kinds = [type(operation) for operation in one.operations]
            parts = [source.split(".") for source in one.source_patterns]
            if kinds in ([MergeModulelist, Concatenate], [MergeModulelist]) and all(
                part[-4:-2] == ["experts", "*"] and part[-1] == "weight" for part in parts
            ):
                return [part[-2] for part in parts]
    return []


def _renamed_block(mapping: Sequence[Any], module: str) -> tuple[str, str]:
    """The block around a module of experts, such as .mlp., and what the model's files call it; empty if the same."""
    for conversion in mapping:
        if isinstance(conversion, WeightRenaming):
            in_model = conversion.target_patterns[0]
            in_files = conversion.source_patterns[0].replace(r"\.", ".")
            if _BLOCK.fullmatch(in_files) and _BLOCK.fullmatch(in_model) and in_model in module:
                return in_model, in_files
    return "", ""


def rewrite(folder: Path, layout: PerExpert, rank: int) -> None:
    """Convert the adapter that PEFT has saved in a folder to the layout.

    Args:
        rank: of experts.
    """
    save_file(layout.to_file(load_file(folder / ADAPTER)), folder / ADAPTER, {"format": "pt"})
    config = json.loads((folder / CONFIG).read_text())
    ranks, alphas = layout.patterns(rank, config["lora_alpha"])
    (folder / CONFIG).write_text(
        json.dumps(config | {"rank_pattern": ranks, "alpha_pattern": alphas}, indent=2)
    )
