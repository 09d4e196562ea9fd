"""Log-probabilities, entropy and their gradients in few passes, compared with the formulas in float64.

Bounds are those of the arithmetic: a sum of n products is off by at most n unit roundoffs of the sum of their absolute
values, in whatever order a CPU adds them up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.present import present, untyped
from tests.worker.test_memory import estimated, llama_shape
from worker.model import lora, sizing
from worker.model.head import Computation, entropy, is_top, through_head
from worker.model.model_structure import Head
from worker.training import soft_targets

LLAMA = llama_shape(layers=2, hidden=64, intermediate=128, heads=4)
POSITIONS, HIDDEN, VOCABULARY = 2 * sizing.HEAD_CHUNK + 70, 24, 1000
ROUNDOFF = torch.finfo(torch.float32).eps / 2
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "scaled": {"logits": Head(scale=0.25)},
    "capped": {"logits": Head(scale=2.0, cap=5.0)},
    "capped, temperature": {"logits": Head(cap=3.0), "temperature": 1.7},
    "bias": {"bias": True},
    "masked": {"masked": True},
    "all": {"masked": True, "bias": True, "logits": Head(scale=2.0, cap=5.0), "temperature": 0.8},
}


@dataclass(frozen=True)
class Case:
    """A head with random weights, of numbers that bfloat16 has, and what passes through it."""

    layer: nn.Linear
    hidden: Tensor
    target: Tensor
    allowed: Tensor | None  # bool [M, V]
    factor: Tensor  # the gradient of each log-probability
    logits: Head
    temperature: float

    @property
    def words(self) -> Tensor | None:
        """`allowed` as bits."""
        if self.allowed is None:
            return None
        padded = nn.functional.pad(self.allowed, (0, -VOCABULARY % 32)).view(len(self.hidden), -1, 32)
        return (padded.long() << torch.arange(32)).sum(-1).to(torch.int32)

    def computation(self, *, trained: bool, statistic: Any = entropy) -> Computation:
        product: Any = lora.TrainedLinear if trained else partial(lora.FrozenLinear, float32=True)
        weights = list(self.layer.requires_grad_(trained).parameters()) if trained else []
        return Computation(product(self.layer), self.logits, self.temperature, statistic, weights)


def case(
    dtype: torch.dtype,
    *,
    logits: Head = Head(),
    temperature: float = 1.0,
    bias: bool = False,
    masked: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    layer = nn.Linear(HIDDEN, VOCABULARY, bias=bias).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.copy_(draw(parameter.shape).bfloat16())
    target = torch.randint(VOCABULARY, (POSITIONS,), generator=generator)
    allowed = None
    if masked:
        allowed = torch.rand(POSITIONS, VOCABULARY, generator=generator) < 0.3
        allowed[torch.arange(POSITIONS), target] = True
    return Case(
        layer.to(dtype),
        draw(POSITIONS, HIDDEN).bfloat16().to(dtype).requires_grad_(),
        target,
        allowed,
        draw(POSITIONS),
        logits,
        temperature,
    )


@dataclass(frozen=True)
class Results:
    logp: Tensor
    entropy: Tensor
    gradients: Sequence[Tensor]  # of the hidden states, and of the weights if they are trained


def ours(given: Case, *, trained: bool = False) -> Results:
    computation = given.computation(trained=trained)
    logp, measured = through_head(computation, given.hidden, given.target, given.words)
    gradients = torch.autograd.grad(logp, [given.hidden, *computation.weights], given.factor.to(logp))
    assert measured is not None
    return Results(logp.detach(), measured, gradients)


@dataclass(frozen=True)
class Exact:
    """In float64 by autograd, with bounds of the errors in float32."""

    results: Results
    bounds: Results


def exact(given: Case) -> Exact:
    hidden = given.hidden.detach().double().requires_grad_()
    weights = [parameter.detach().double().requires_grad_() for parameter in given.layer.parameters()]
    logits = given.logits(nn.functional.linear(hidden, *weights))
    if given.allowed is not None:
        logits = logits.masked_fill(~given.allowed, -torch.inf)
    log_p = (logits / given.temperature).log_softmax(-1)
    logp = log_p.gather(-1, given.target[:, None])[:, 0]
    gradients = torch.autograd.grad(logp, [hidden, *weights], given.factor.double())
    p = log_p.detach().exp()
    found = Results(logp.detach(), torch.special.entr(p).sum(-1), gradients)
    return Exact(found, bounds(given, hidden.detach(), [one.detach() for one in weights], p))


def bounds(given: Case, hidden: Tensor, weights: Sequence[Tensor], p: Tensor) -> Results:
    weight, *bias = weights
    size = hidden.abs() @ weight.abs().t() + (bias[0].abs() if bias else 0.0)
    chain = given.logits.scale / given.temperature
    # The product, then at most 16 more operations on each logit; the sum of the exponentials.
    of_logit = (HIDDEN + 16) * ROUNDOFF * chain * size.amax(-1)
    of_logp = 2 * of_logit + (VOCABULARY + 16) * ROUNDOFF
    surprise = torch.where(p > 0, 1 - p.clamp(min=1e-300).log(), 0.0)
    of_entropy = 2 * (of_logp[:, None] * p * surprise).sum(-1) + VOCABULARY * ROUNDOFF * (p * surprise).sum(
        -1
    )
    is_target = nn.functional.one_hot(given.target, VOCABULARY)
    share = given.factor.double().abs()[:, None] * chain * (p + is_target)
    off = share * (2 * of_logp[:, None] + 32 * ROUNDOFF)
    roundoff = torch.finfo(given.layer.weight.dtype).eps / 2  # the gradient of the logits is rounded to it
    terms = off + roundoff * share
    of_hidden = (terms + VOCABULARY * ROUNDOFF * share) @ weight.abs()
    # The sum over chunks is rounded to the precision of the weights after each.
    summed = terms + (POSITIONS * ROUNDOFF + 4 * roundoff) * share
    of_weights = [summed.t() @ hidden.abs(), *(summed.sum(0) for _ in bias)]
    return Results(of_logp, of_entropy, [of_hidden, *of_weights])


def assert_within(found: Tensor, wanted: Tensor, bound: Tensor) -> None:
    rounded = torch.finfo(found.dtype).eps / 2 * wanted.abs()  # a result in bfloat16
    assert ((found.double() - wanted).abs() <= bound + 2 * rounded).all()


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64_but_for_rounding(
    name: str, dtype: torch.dtype, trained: bool
) -> None:
    given = case(dtype, **CASES[name])  # type: ignore[arg-type]

    found = ours(given, trained=trained)

    wanted = exact(given)
    assert found.logp.dtype == found.entropy.dtype == torch.float32
    assert_within(found.logp, wanted.results.logp, wanted.bounds.logp)
    assert_within(found.entropy, wanted.results.entropy, wanted.bounds.entropy)
    assert len(found.gradients) == (1 + len(list(given.layer.parameters())) if trained else 1)
    for ours_, exact_, bound in zip(
        found.gradients, wanted.results.gradients, wanted.bounds.gradients, strict=False
    ):
        assert ours_.dtype == dtype
        assert_within(ours_, exact_, bound)


def test_without_a_gradient_values_are_the_same_to_the_last_bit() -> None:
    """Or the ratio of a policy to itself would not be 1."""
    given = case(torch.float32, **CASES["all"])  # type: ignore[arg-type]

    with torch.no_grad():
        found = ours_without_gradient(given)

    assert torch.equal(found, ours(given).logp)


def ours_without_gradient(given: Case) -> Tensor:
    computation = given.computation(trained=False, statistic=None)
    logp, measured = through_head(computation, given.hidden, given.target, given.words)
    assert measured is None
    assert not logp.requires_grad
    return logp


def test_a_token_whose_probability_is_0_in_float32_has_its_log_probability() -> None:
    layer = nn.Linear(1, 3, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.tensor([[0.0], [-200.0], [1.0]]))
    computation = Computation(lora.FrozenLinear(layer), Head(), 1.0, entropy)

    logp, _ = through_head(computation, torch.ones(1, 1), torch.tensor([1]), None)

    assert logp.item() == pytest.approx(-201 - torch.tensor(-1.0).exp().log1p().item(), rel=1e-6)


def test_the_likeliest_token_is_known() -> None:
    given = case(torch.float32)
    computation = given.computation(trained=False, statistic=is_top)
    likeliest = nn.functional.linear(given.hidden.detach(), given.layer.weight).argmax(-1)
    target = torch.where(torch.arange(POSITIONS) % 2 == 0, likeliest, (likeliest + 1) % VOCABULARY)

    _, found = through_head(computation, given.hidden, target, None)

    assert torch.equal(present(found), torch.arange(POSITIONS) % 2 == 0)


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """The most bytes that tensors made during the context have at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {
            one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)
        }
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and (storage := one.untyped_storage())._cdata not in read:
                self._alive[storage._cdata] = (untyped(StorageWeakRef)(storage), storage.nbytes())
        self._alive = {address: entry for address, entry in self._alive.items() if not entry[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return result


WIDE = 128_256


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_take_as_much_memory_as_the_plan_says(
    dtype: torch.dtype, trained: bool, cap: float | None
) -> None:
    layer = nn.Linear(8, WIDE, bias=False, device="meta", dtype=dtype).requires_grad_(trained)
    product: Any = lora.TrainedLinear(layer) if trained else lora.FrozenLinear(layer, float32=True)
    weights = [layer.weight] if trained else []
    computation = Computation(product, Head(cap=cap), 0.9, entropy, weights)
    hidden = torch.empty(POSITIONS, 8, device="meta", dtype=dtype, requires_grad=True)
    target = torch.empty(POSITIONS, device="meta", dtype=torch.int64)
    allowed = torch.empty(POSITIONS, WIDE // 32, device="meta", dtype=torch.int32)

    with Peak() as peak:
        through_head(computation, hidden, target, allowed)[0].sum().backward()  # type: ignore[no-untyped-call]

    shape = replace(LLAMA, vocabulary=WIDE, hidden=8, bytes_each=dtype.itemsize)
    planned = estimated(shape, full=trained).head
    assert 0.8 * planned < peak.bytes < 1.01 * planned


def test_soft_targets_take_no_more() -> None:
    layer = nn.Linear(8, WIDE, bias=False, device="meta", dtype=torch.bfloat16).requires_grad_(False)
    product = lora.FrozenLinear(layer, float32=True)
    hidden = torch.empty(soft_targets.CHUNK, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)

    def loss(hidden: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = product(hidden)
        student = product(hidden)
        loss = soft_targets.forward_kl(student, teacher, top_k=None, temperature=2.0).sum()
        return loss, student.detach().argmax(-1)

    with Peak() as peak:
        soft_targets._Chunk.apply(loss, hidden)[0].backward()  # type: ignore[no-untyped-call]

    assert peak.bytes < estimated(replace(LLAMA, vocabulary=WIDE)).head
