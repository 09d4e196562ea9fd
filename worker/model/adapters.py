"""Choose the layers of a model that get an adapter, by a gradient and not by the names of families."""

import logging
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from core.jobs.hyperparameter_groups import LoraTargets
from worker.model import experts
from worker.model.architecture import has_experts
from worker.model.packed import PackedLinear
from worker.model.targets import Kind, LinearLayer, active_experts_in, chosen, has_suffix, kind_of
from worker.refusals import InvalidTargets, UnsupportedModel

log = logging.getLogger(__name__)

# By a part of a module's name: what sends tokens to experts, or chooses which keys are looked at. vLLM puts no
# adapter there, and what they choose has no gradient.
ROUTERS = frozenset(
    {"gate", "router", "wg", "classifier", "shared_expert_gate", "wq_b", "weights_proj", "index_qk_proj"}
)
PROBE_TOKENS = 64


def adapter_targets(model: PreTrainedModel, targets: LoraTargets = "all-linear") -> str | list[str]:
    """The linear layers that get an adapter, as PEFT takes them; `expert_targets` has those of experts.

    At most the linear layers that text has a gradient through, but the head and what routes. So the vision tower of a
    multimodal model has none, nor has what chooses the keys of sparse attention. PEFT's own "all-linear" is the same
    for a dense model, and is returned there. For a mixture of experts it may add the experts' fused weights and the
    router, or the attention alone, by the model's type.

    Raises:
        UnsupportedModel: the model has none that could have one.
        InvalidTargets: `targets` names layers that do not exist, or that cannot have an adapter.
    """
    adaptable = adaptable_layers(model)
    candidates = [layer for layer in adaptable if not layer.experts]
    learning = set(with_gradient(model, [layer.name for layer in candidates]))
    layers = [layer for layer in candidates if layer.name in learning]
    if not layers:
        raise UnsupportedModel(
            f"{type(model).__name__} is not supported: it has no plain linear layers for an adapter."
        )
    if targets == "all-linear" and len(layers) == len(_linear(model)) and not has_experts(model.config):
        return "all-linear"
    if left_out := len(candidates) - len(layers):
        log.info("%d linear layers get no adapter: no gradient of text passes through them", left_out)
    _refuse_absent(model, [layer for layer in adaptable if layer.experts or layer in layers], targets)
    names = [layer.name for layer in chosen(layers, targets)]
    return names if has_experts(model.config) else _shortened(model, names)


def expert_targets(model: PreTrainedModel, targets: LoraTargets) -> list[LinearLayer]:
    """The experts that get an adapter: one entry for each layer of a mixture."""
    return [layer for layer in chosen(adaptable_layers(model), targets) if layer.experts]


def adaptable_layers(model: PreTrainedModel) -> list[LinearLayer]:
    """The layers that can have an adapter in the order of names: linear layers and the experts of mixtures.

    Not among them: the head, what routes, what a kernel reads past an adapter, and what PEFT takes for experts.
    """
    taken = _taken_for_experts(model)
    linear = [
        LinearLayer(name, _kind(model, name), module.in_features + module.out_features)
        for name, module in _linear(model).items()
        if not _routes(name)
        and not _fused_with_state_space(model, name)
        and name.rpartition(".")[2] not in taken
    ]
    return sorted([*linear, *_expert_layers(model)], key=attrgetter("name"))


def _expert_layers(model: PreTrainedModel) -> list[LinearLayer]:
    active = active_experts_in(vars(model.config.get_text_config()))
    if active is None:
        return []
    return [
        LinearLayer(
            name,
            "experts",
            experts.width(module),
            len(module.gate_up_proj),
            active,
            experts.intermediate_size(module),
        )
        for name, module in experts.adaptable_experts(model).items()
    ]


def _taken_for_experts(model: PreTrainedModel) -> set[str]:
    """Last parts of names of linear layers for which PEFT adapts the experts' fused weights instead.

    For some mixtures it reads `shared_expert.up_proj`, and the `up_proj` of a dense layer among sparse ones, as the
    experts' weights before transformers fused them, whatever the whole name is; so does everyone who loads the
    adapter.
    """
    if not has_experts(model.config):
        return set()
    return {
        name for name in {one.rpartition(".")[2] for one in _linear(model)} if _is_translated(model, name)
    }


def _is_translated(model: PreTrainedModel, name: str) -> bool:
    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # a part of a fused weight
        return True
    return name not in set(config.target_modules or ())


def fused_experts(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The weights of all experts of a layer in one tensor [experts, ...], by name."""
    if not has_experts(model.config):
        return {}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Conv1d)
    }


def _linear(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers by name, without the head."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def _kind(model: PreTrainedModel, name: str) -> Kind:
    parents = name.split(".")[:-1]
    around = [model.get_submodule(".".join(parents[: n + 1])) for n in range(len(parents))]
    return kind_of(name, [type(module).__name__ for module in around])


def _shortened(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """The last parts of the names, where they name these layers and no others.

    Not for mixtures: for some of them PEFT translates the short names of experts to their fused weights.
    """
    short = sorted({name.rpartition(".")[2] for name in names})
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in short}
    return short if meant == set(names) else list(names)


def _refuse_absent(model: PreTrainedModel, layers: Sequence[LinearLayer], targets: LoraTargets) -> None:
    """Raise InvalidTargets unless each of the targets names at least one of the layers."""
    wanted = [] if targets == "all-linear" else [targets] if isinstance(targets, str) else targets
    for target in wanted:
        if not chosen(layers, [target]):
            names = sorted({layer.name.rpartition(".")[2] for layer in layers})
            raise InvalidTargets(
                f"lora.targets: {target!r} {_reason(model, target)}. These layers of {type(model).__name__} can have "
                f"an adapter: {', '.join(names)}."
            )


def _reason(model: PreTrainedModel, target: str) -> str:
    """Return the reason for which these layers cannot have an adapter, as the rest of a sentence."""
    if target == "attention":
        return "names no linear layer in a module that is known as attention"
    if target == "experts":
        if experts.adaptable_experts(model):
            return "names experts of which the model's config does not say how many a token goes through"
        if has_experts(model.config):
            return "names experts that are not computed through transformers' interface for experts, or have no gates"
        return "names nothing: the model is not a mixture of experts"
    modules = [name for name, _ in model.named_modules() if has_suffix(name, target)]
    linear = [name for name in modules if name in _linear(model)]
    head = model.get_output_embeddings()
    if any(model.get_submodule(name) is head for name in modules):
        return "is the head, which has no adapter"
    if any(_routes(name) for name in modules):
        return "chooses experts or keys, and what it chooses has no gradient"
    if any(name.rpartition(".")[2] in _taken_for_experts(model) for name in linear):
        return "is what PEFT takes for the fused weights of experts in this architecture"
    if any(_fused_with_state_space(model, name) for name in linear):
        return "is read by the kernels of state spaces past an adapter"
    if linear:
        return "has no gradient of text"
    weights = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and has_suffix(name, target)
    ]
    if modules or weights:
        return (
            "is no linear layer: embeddings, norms and whole blocks have no adapter, and the fused weights of experts "
            "have one as 'experts' only"
        )
    return "names no layer"


def _routes(name: str) -> bool:
    parts = name.split(".")
    return any(part in ROUTERS or "router" in part for part in parts)


def _fused_with_state_space(model: PreTrainedModel, name: str) -> bool:
    """Mamba's kernels read the weight of `out_proj` themselves, past an adapter; PEFT refuses it for most models."""
    parent, _, own = name.rpartition(".")
    mixer = model.get_submodule(parent)
    return own == "out_proj" and hasattr(mixer, "A_log") and hasattr(mixer, "D")


def with_gradient(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Those of the layers that are linear and whose output has a gradient in one pass over text, in the order given.

    A subclass of nn.Linear may return a tuple (Llama 4's router) or regroup its weight (DeepSeek V4).
    """
    if model.get_input_embeddings().weight.is_meta:  # without numbers, as when memory is estimated
        return list(names)
    reached: set[str] = set()
    handles = []

    def watch(name: str) -> Any:
        def hook(module: nn.Linear, args: tuple[Tensor, ...], output: Any) -> None:
            if _is_linear(module, args, output) and output.requires_grad:
                output.register_hook(lambda gradient: reached.add(name) if gradient.any() else None)

        return hook

    def begin(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_().clone()  # a leaf could not be scaled in place (CTRL)

    vocabulary = model.get_input_embeddings().weight.shape[0]
    device = model.get_input_embeddings().weight.device
    ids = torch.randint(vocabulary, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    try:
        handles.append(model.get_input_embeddings().register_forward_hook(begin))
        handles += [model.get_submodule(name).register_forward_hook(watch(name)) for name in names]
        with torch.enable_grad():
            model(input_ids=ids, use_cache=False).logits[0, -1].float().logsumexp(-1).backward()
    finally:
        for handle in handles:
            handle.remove()
    return [name for name in names if name in reached]


@torch.no_grad()
def _is_linear(module: nn.Linear, args: tuple[Tensor, ...], output: Any) -> bool:
    if type(module) in (nn.Linear, PackedLinear):
        return True
    if not isinstance(output, Tensor) or not args:
        return False
    plain = nn.functional.linear(args[0], module.weight, module.bias)
    return plain.shape == output.shape and torch.allclose(plain, output, rtol=1e-2, atol=1e-4)
