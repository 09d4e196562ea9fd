"""The layers of a model that can have an adapter: their names, their kinds, and those that a job chooses.

Imports no torch, so that memory can be estimated from names and sizes alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from core.jobs.hyperparameter_groups import LoraTargets

# attention: mixes tokens (linear attention, state spaces and convolutions too); feed-forward: each token by itself;
# experts: all routed experts of a layer of a mixture, which are no linear layers.
Kind = Literal["attention", "feed-forward", "experts", "other"]
KINDS: tuple[Kind, ...] = ("attention", "feed-forward", "experts", "other")
ALIASES: tuple[Kind, ...] = ("attention", "experts")  # kinds that a job can choose by their name

# Parts of the names of classes and attributes in transformers. Mixtures have classes such as JetMoeAttention, so the
# words for attention come first. Nemotron-H calls every block `mixer`, so classes come before attributes.
_CLASSES: tuple[tuple[str, Kind], ...] = (
    (r"hyperconnection", "other"),
    (r"attention|attn|mixer|deltanet|shortconv", "attention"),
    (r"mlp|feedforward|ffn|experts|moe$|moeblock$", "feed-forward"),
)
_ATTRIBUTES: tuple[tuple[str, Kind], ...] = (
    (r"attention|attn|mixer|mamba|ssm|conv|temporal|lstm", "attention"),
    (r"mlp|feed_forward|ffn|ff$|experts?$|moe|fc\d*$", "feed-forward"),
)

# Names of the fields of a config that have the number of experts of a layer, and of those that a token goes through.
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_EXPERT_FIELDS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)


def experts_in(text: Mapping[str, Any]) -> int | None:
    """The experts of a layer, from the config of the text model; None: it is no mixture."""
    return _highest(text, EXPERT_FIELDS)


def active_experts_in(text: Mapping[str, Any]) -> int | None:
    """The experts that a token goes through in a layer, from the config of the text model; None: it does not say."""
    return _highest(text, ACTIVE_EXPERT_FIELDS)


def _highest(text: Mapping[str, Any], fields: Sequence[str]) -> int | None:
    """The first of these fields that has a number, or one for each layer: then the highest."""
    for field in fields:
        value = text.get(field)
        values = value if isinstance(value, list | tuple) else [value]
        # A layer without experts has 0 in such a list.
        if numbers := [number for number in values if isinstance(number, int) and number > 0]:
            return max(numbers)
    return None


@dataclass(frozen=True)
class LinearLayer:
    """A layer that can have an adapter: a linear layer, or the experts of a layer of a mixture."""

    name: str
    kind: Kind
    width: int  # inputs and outputs together, of all experts: times its rank, the parameters of its adapter
    experts: int = 0  # 0: it is a linear layer
    active_experts: int = 1  # that a token goes through
    expert_size: int = 0  # the intermediate size of an expert

    def rank(self, rank: int) -> int:
        """The rank of its adapter in a job of this rank. The experts of a token together have about that rank."""
        return max(1, rank // self.active_experts)


def kind_of(name: str, classes: Sequence[str]) -> Kind:
    """The kind of a linear layer.

    Args:
        name: its dotted name.
        classes: the names of the classes of the modules around it, outermost first: one for each part of `name` but the
            last.
    """
    *parts, own = name.split(".")
    layer = next((n for n, part in enumerate(parts) if part.isdigit()), 0)  # the number of its decoder layer
    inside = list(zip(parts, classes, strict=True))[layer + 1 :]
    for part, class_name in reversed(inside):
        if kind := _kind_of(class_name.lower(), _CLASSES) or _kind_of(part, _ATTRIBUTES):
            return kind
    return _kind_of(own, _ATTRIBUTES) or "other"


def _kind_of(text: str, words: Sequence[tuple[str, Kind]]) -> Kind | None:
    return next((kind for pattern, kind in words if re.search(pattern, text)), None)


def has_suffix(name: str, suffix: str) -> bool:
    """Whether the last parts of a dotted name are the suffix."""
    return name == suffix or name.endswith(f".{suffix}")


def chosen(layers: Sequence[LinearLayer], targets: LoraTargets) -> list[LinearLayer]:
    """Those of the layers that the hyperparameter `lora_targets` names."""
    if targets == "all-linear":
        return [layer for layer in layers if layer.kind != "experts"]
    names = [targets] if isinstance(targets, str) else targets
    return [layer for layer in layers if any(_is_named(layer, name) for name in names)]


def _is_named(layer: LinearLayer, name: str) -> bool:
    return layer.kind == name if name in ALIASES else has_suffix(layer.name, name)
