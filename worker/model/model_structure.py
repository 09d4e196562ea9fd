"""Find the parts of a causal model by running it: its decoder, its layers, what it does to its head's output.

Names of attributes and of config fields differ from family to family; what a short forward pass shows does not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from worker.refusals import UnsupportedModel

# Largest relative error of a logit that `Head.fit` accepts, in float32.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Head:
    """logits = cap * tanh(scale * head(hidden) / cap), or scale * head(hidden) without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, output: Tensor) -> Tensor:
        """The head's output [..., V] in float32 -> logits [..., V]."""
        if self.scale != 1.0:
            output = output * self.scale
        return output if self.cap is None else self.cap * torch.tanh(output / self.cap)

    def in_place(self, output: Tensor) -> Tensor:
        """As a call, in the memory of `output`, which needs no gradient."""
        if self.scale != 1.0:
            output.mul_(self.scale)
        return output if self.cap is None else output.div_(self.cap).tanh_().mul_(self.cap)

    @staticmethod
    def fit(outputs: Sequence[Tensor], logits: Sequence[Tensor]) -> "Head | None":
        """The function that turns each output into its logits (float32, same shapes); None if none does.

        Args:
            outputs: small ones first, for which a soft cap changes nothing.
        """
        small, large = outputs[0].double(), outputs[-1].double()
        scale = float((logits[0].double() * small).sum() / (small * small).sum().clamp(min=1e-30))
        scale = 1.0 if abs(scale - 1.0) < TOLERANCE else scale
        candidates = [Head(scale)]
        scaled = scale * large.flatten()
        peak = int(scaled.abs().argmax())
        reached = abs(float(logits[-1].double().flatten()[peak]))
        if 0 < reached < abs(float(scaled[peak])):
            candidates.append(Head(scale, _cap(abs(float(scaled[peak])), reached)))
        for head in candidates:
            errors = [
                ((head(output) - own).abs().max() / own.abs().max().clamp(min=1e-30)).item()
                for output, own in zip(outputs, logits, strict=True)
            ]
            if max(errors) < TOLERANCE:
                return head
        return None


def _cap(uncapped: float, reached: float) -> float:
    """Solve cap * tanh(uncapped / cap) = reached for the cap, by bisection: the left side grows with it."""
    low, high = reached, reached * 1e6
    for _ in range(200):
        middle = (low * high) ** 0.5
        if middle * float(torch.tanh(torch.tensor(uncapped / middle, dtype=torch.float64))) < reached:
            low = middle
        else:
            high = middle
    return round(high, 4)


@dataclass(frozen=True)
class Parts:
    decoder: Any  # the module that gives hidden states
    head: nn.Linear
    logits: Head  # what the model does to the head's output
    layers: nn.ModuleList | None  # of the decoder; None: not in one list


@torch.no_grad()
def parts_of(causal: PreTrainedModel) -> Parts:
    """Find the parts of a model with one short forward pass for each candidate.

    Raises:
        UnsupportedModel: no module's hidden states give the model's logits through its head.
    """
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModel(f"{type(causal).__name__} is not supported: it has no head for tokens.")
    for decoder in _candidates(causal):
        if head.weight.is_meta:  # without numbers, as when memory is estimated
            return Parts(decoder, head, Head(), _layers(causal, decoder))
        logits = _fit(causal, decoder, head)
        if logits is not None:
            return Parts(decoder, head, logits, _layers(causal, decoder))
    raise UnsupportedModel(
        f"{type(causal).__name__} is not supported: its logits are not the output of its head on the hidden states of "
        "its decoder, scaled and soft-capped."
    )


def _candidates(causal: PreTrainedModel) -> Iterator[nn.Module]:
    prefix = getattr(causal, "base_model_prefix", "")
    found = [
        getattr(causal, prefix, None) if prefix else None,
        getattr(causal, "model", None),
        causal.get_decoder(),
    ]
    seen: list[nn.Module] = []
    for module in found:
        if isinstance(module, nn.Module) and module is not causal and all(module is not one for one in seen):
            seen.append(module)
            yield module


def _fit(causal: PreTrainedModel, decoder: nn.Module, head: nn.Module) -> Head | None:
    """Replace the decoder's hidden states by scaled ones, and compare the model's logits with the head's output."""
    outputs, logits = [], []
    weight = head.weight
    assert isinstance(weight, Tensor)
    ids = torch.arange(3, 9, device=weight.device)[None] % weight.shape[0]
    for size in (1e-3, 1.0, 30.0):
        hidden: list[Tensor] = []

        def replace(
            module: nn.Module, args: Any, output: Any, size: float = size, hidden: Any = hidden
        ) -> Any:
            last = getattr(output, "last_hidden_state", None)
            if last is None:
                return output
            last = last.float()
            # The head's output at a root mean square of about `size`, whatever the weights are.
            hidden.append(last * (size / head(last).pow(2).mean().sqrt().clamp(min=1e-20)))
            output.last_hidden_state = hidden[-1]
            return output

        handle = decoder.register_forward_hook(replace)
        try:
            with _in_float32(head):
                own = causal(input_ids=ids, use_cache=False).logits
                if len(hidden) != 1:
                    return None
                outputs.append(head(hidden[0]).float())
                logits.append(own.float())
        finally:
            handle.remove()
    same_shapes = all(output.shape == own.shape for output, own in zip(outputs, logits, strict=True))
    return Head.fit(outputs, logits) if same_shapes else None


@contextmanager
def _in_float32(module: nn.Module) -> Iterator[None]:
    """With the weights of this module in float32. An embedding that is tied to it keeps the parameter that it has."""
    own = dict(module.named_parameters(recurse=False))
    try:
        for name, parameter in own.items():
            setattr(module, name, nn.Parameter(parameter.data.float(), requires_grad=False))
        yield
    finally:
        for name, parameter in own.items():
            setattr(module, name, parameter)


def _layers(causal: PreTrainedModel, decoder: nn.Module) -> nn.ModuleList | None:
    """The list of the decoder's layers: of the right length, and of text where there is more."""
    wanted = causal.config.get_text_config().num_hidden_layers
    text = causal.get_decoder()
    for root in (text if isinstance(text, nn.Module) else decoder, decoder):
        for module in root.modules():
            if isinstance(module, nn.ModuleList) and len(module) == wanted:
                return module
    return None
