"""In bfloat16, norms and gated feed-forward layers keep less, and adapters are computed in bfloat16 as vLLM does."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from core.registry import BaseModelEntry
from tests.families.zoo import CONTEXT, FAMILIES
from worker.checks import compatibility
from worker.model import recompute
from worker.model.batch import tensors_of
from worker.model.policy import Policy, load_base
from worker.model.token_logprobs import logprobs
from worker.types import Pack, TrainingSequence

TITLES = (
    "Llama 2, 3",
    "Qwen 3",
    "Gemma 3",
    "Gemma 4",
    "OLMo 3",
    "Granite 3 MoE",
    "Phi-3",
    "Qwen 3 MoE",
    "gpt-oss",
    "Cohere Command R",
)
ANSWERS = tuple(TrainingSequence((7, 9, 11 + n), (0.0,) * 3, (1.0,) * 3, 1.0) for n in range(3))
PACK = Pack(tuple(range(5, 25)), ANSWERS)


def policy_of(title: str, folder: Path, dtype: str) -> Policy:
    """A tiny model of the family with random weights in its adapter."""
    [family] = [one for one in FAMILIES if one.title == title]
    entry = BaseModelEntry(path=family.save(folder), dtype=dtype, context=CONTEXT)
    policy = Policy(load_base("tiny", entry, folder, "cpu"), rank=4, alpha=8, seed=0)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(1))
    return policy


def gradients(policy: Policy) -> list[Tensor]:
    for parameter in policy.trainable:
        parameter.grad = None
    torch.autograd.backward(logprobs(policy, tensors_of([PACK]), 1.0).sum())
    return [parameter.grad.clone() for parameter in policy.trainable if parameter.grad is not None]


@contextmanager
def kept() -> Iterator[list[Tensor]]:
    """The tensors that autograd keeps in the context."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize("title", TITLES)
@pytest.mark.slow
def test_gradients_are_the_same_bit_for_bit(title: str, tmp_path: Path) -> None:
    policy = policy_of(title, tmp_path, "bfloat16")

    ours = gradients(policy)

    with recompute.uninstalled(policy.model):
        own = gradients(policy)
    assert len(ours) == len(policy.trainable)
    assert all(torch.equal(a, b) for a, b in zip(ours, own, strict=True))
    assert any(gradient.any() for gradient in ours)


@pytest.mark.parametrize("title", ["Llama 2, 3", "Qwen 3", "Gemma 3"])
def test_norms_keep_nothing_in_float32_and_gates_keep_two_results(title: str, tmp_path: Path) -> None:
    policy = policy_of(title, tmp_path, "bfloat16")
    wide = 128  # of the feed-forward layer

    def found(context: object) -> tuple[int, int]:
        with context, kept() as tensors:  # type: ignore[attr-defined]
            policy.hidden(*_inputs())
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        inner = [
            tensor for tensor in storages.values() if tensor.dim() > 1 and tensor.shape[-1] in (64, wide)
        ]
        activations = [tensor for tensor in inner if tensor.numel() > 64 * wide or tensor.dim() == 3]
        float32 = sum(tensor.dtype == torch.float32 and tensor.dim() == 3 for tensor in activations)
        return float32, sum(tensor.shape[-1] == wide and tensor.dim() == 3 for tensor in activations)

    float32, products = found(nullcontext())
    before = found(recompute.uninstalled(policy.model))

    assert float32 == 0 < before[0]
    assert products < before[1]


@pytest.mark.parametrize("title", ["Llama 2, 3", "Qwen 3", "Gemma 3", "Cohere Command R"])
@pytest.mark.slow
def test_norms_with_weights_of_any_size_are_as_near_to_float32_as_the_models_own(
    title: str, tmp_path: Path
) -> None:
    """PyTorch's rms_norm rounds once, after the weight; in float32 it is the same function."""
    narrow, wide = (policy_of(title, tmp_path / dtype, dtype) for dtype in ("bfloat16", "float32"))
    recompute.install(wide.model)
    generator = torch.Generator().manual_seed(2)

    found = 0
    for name, module in narrow.model.named_modules():
        if not isinstance(module.__dict__.get("forward"), recompute.Replaced) or list(module.children()):
            continue
        twin = wide.model.get_submodule(name)
        weight = module.weight
        assert isinstance(weight, Tensor) and isinstance(twin.weight, Tensor)
        weight.data.normal_(1.0, 0.5, generator=generator)
        twin.weight.data.copy_(weight)
        x = torch.randn(40, len(weight), generator=generator).bfloat16()
        ours, exact = module(x).double(), twin(x.float())
        with recompute.uninstalled(narrow.model), recompute.uninstalled(wide.model):
            own, own_exact = module(x).double(), twin(x.float())
        assert torch.allclose(exact, own_exact, rtol=1e-5, atol=1e-6)
        assert (ours - exact).norm() <= (own - exact).norm()
        found += 1
    assert found >= 3


@pytest.mark.parametrize("title", ["Llama 2, 3", "Granite 4", "Mamba 2"])
@pytest.mark.slow
def test_a_bfloat16_model_is_computed_as_transformers_does(title: str, tmp_path: Path) -> None:
    """The gated norms of state spaces take a second tensor, and keep their own forward."""
    policy = policy_of(title, tmp_path, "bfloat16")

    verdict = compatibility.probe(policy, sampled=False)

    assert verdict.largest < compatibility.TOLERANCE


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    tensors = tensors_of([PACK])
    return tensors.input_ids, tensors.position_ids, tensors.segment


class ClampedFeedForward(nn.Module):
    """As in DeepSeek V4: a gate that is clamped, which random numbers of the usual size do not reach."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 64), nn.Linear(32, 64)
        self.down_proj, self.act_fn, self.limit = nn.Linear(64, 32), nn.SiLU(), limit

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).clamp(max=self.limit), self.up_proj(x).clamp(-self.limit, self.limit)
        output: Tensor = self.down_proj(self.act_fn(gate) * up)
        return output


@pytest.mark.parametrize(("limit", "replaced"), [(10.0, False), (16.0, False), (float("inf"), True)])
def test_a_feed_forward_layer_that_clamps_its_gate_keeps_its_own_forward(
    limit: float, replaced: bool
) -> None:
    layer = ClampedFeedForward(limit).to(torch.bfloat16).requires_grad_(False)
    x = 100 * torch.randn(5, 32, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    own = layer(x)

    recompute.install(layer)

    assert ("forward" in vars(layer)) == replaced
    assert torch.equal(layer(x), own)


def test_a_float32_model_keeps_its_own_forwards(tmp_path: Path) -> None:
    policy = policy_of("Llama 2, 3", tmp_path, "float32")

    with recompute.uninstalled(policy.model):
        own = gradients(policy)

    assert all(torch.equal(a, b) for a, b in zip(gradients(policy), own, strict=True))
    assert not any(
        isinstance(module.__dict__.get("forward"), recompute.Replaced) for module in policy.model.modules()
    )


def test_the_gradient_of_a_bfloat16_model_is_that_of_its_float32_twin_but_for_rounding(
    tmp_path: Path,
) -> None:
    narrow = policy_of("Llama 2, 3", tmp_path / "a", "bfloat16")
    wide = policy_of("Llama 2, 3", tmp_path / "b", "float32")
    with torch.no_grad():  # the same base
        for ours, theirs in zip(wide.model.parameters(), narrow.model.parameters(), strict=True):
            ours.copy_(theirs)

    rounded, exact = (torch.cat([one.flatten() for one in gradients(policy)]) for policy in (narrow, wide))

    assert {parameter.dtype for parameter in narrow.trainable} == {torch.float32}
    assert (rounded - exact).norm() < 0.03 * exact.norm()
