"""The head: from hidden states to log-probabilities of targets and a number for each position, in few passes.

Logits of a chunk of positions [m, V] in float32 are hundreds of megabytes, and each operation on them reads or writes
all of them. So what can be done in place is, and the product is not computed again for the gradient: that of a
log-probability with respect to its hidden state does not depend on the loss, which only multiplies it. It is computed
along with the log-probability, [m, h], unless the head is trained: the gradient of its weights does depend on the loss
of each position, and then the backward pass computes the chunk again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from worker.model.json_schema import forbidden
from worker.model.model_structure import Head
from worker.model.sizing import HEAD_CHUNK

ENTROPY_ROWS = HEAD_CHUNK // 4  # whose terms are in memory at a time


class HeadProduct(Protocol):
    """The linear layer of the head."""

    @property
    def layer(self) -> nn.Linear: ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., V] in float32, a new tensor."""
        ...

    def of_input(self, gradient: Tensor) -> Tensor:
        """The gradient [m, V] of an output, in the precision of the weights -> that of the input [m, h] in float32."""
        ...


@dataclass(frozen=True)
class Distribution:
    """Of the next token at each position of a chunk. `logits` are divided by the temperature; -inf: not allowed."""

    logits: Tensor  # float32 [m, V]
    probabilities: Tensor  # float32 [m, V]
    highest: Tensor  # float32 [m]: the largest logit
    target_logit: Tensor  # float32 [m]
    logp: Tensor  # float32 [m], of the target


Statistic = Callable[[Distribution], Tensor]
"""A number [m] for each position, without a gradient. Must not change the distribution."""


def entropy(found: Distribution) -> Tensor:
    """In nats. Tokens that are not allowed add 0."""
    parts = torch.split(found.probabilities, ENTROPY_ROWS)
    return torch.cat([torch.special.entr(part).sum(-1) for part in parts])


def is_top(found: Distribution) -> Tensor:
    """Whether no token is likelier than the target, bool."""
    return found.target_logit == found.highest


@dataclass(frozen=True)
class Computation:
    """The parts of a policy that compute its log-probabilities from hidden states.

    `weights`: those of the head that are trained.
    """

    product: HeadProduct
    logits: Head
    temperature: float
    statistic: Statistic | None
    weights: Sequence[Tensor] = ()

    def distribution(self, hidden: Tensor, target: Tensor, allowed: Tensor | None) -> Distribution:
        logits = self.logits.in_place(self.product(hidden))
        if allowed is not None:
            logits.masked_fill_(forbidden(allowed, logits.shape[-1]), float("-inf"))
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        highest, probabilities = logits.amax(-1), logits.softmax(-1)
        target_logit = logits.gather(-1, target[:, None])[:, 0]
        # The largest probability is at least 1 / V, so its logarithm is exact. That of the target may be 0 in float32.
        logp = target_logit - highest + probabilities.amax(-1).log_()
        return Distribution(logits, probabilities, highest, target_logit, logp)

    def of_output(self, found: Distribution, target: Tensor, factor: Tensor | None = None) -> Tensor:
        """d logp / d output [m, V] in the precision of the weights, times `factor` [m]. Destroys the distribution.

        (1 if v is the target, else 0) - p_v, times what the scale, the soft cap and the temperature add to the chain.
        """
        chain = self.logits.scale / self.temperature
        at_target = -torch.expm1(found.logp) * chain  # 1 - p, exact where p is nearly 1
        others = found.probabilities
        if self.logits.cap is None:
            chain = -chain
        else:
            # cap * tanh has the slope 1 - tanh^2. Tokens that are not allowed have p = 0, whatever theirs is.
            tanh = found.logits.mul_(self.temperature / self.logits.cap).clamp_(-1, 1)
            minus_slope = tanh.square_().sub_(1)
            at_target *= -minus_slope.gather(-1, target[:, None])[:, 0]
            others.mul_(minus_slope)
        dtype = self.product.layer.weight.dtype
        output = others if dtype == others.dtype else torch.empty_like(others, dtype=dtype)
        if factor is None:
            torch.mul(others, chain, out=output)
        else:
            torch.mul(others, factor[:, None] * chain, out=output)
            at_target *= factor
        return output.scatter_(-1, target[:, None], at_target[:, None].to(dtype))


def through_head(
    computation: Computation, hidden: Tensor, target_M: Tensor, allowed_M: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The log-probability [M] of each target and the statistic [M] of its position, chunk by chunk.

    Args:
        hidden: [M, h].
        allowed_M: bits of the tokens that the sampler could have drawn (worker.model.batch.Tensors).
    """
    differentiable = torch.is_grad_enabled()
    found: tuple[Tensor, Tensor | None] = _ThroughHead.apply(  # type: ignore[no-untyped-call]
        computation, differentiable, hidden, target_M, allowed_M, *computation.weights
    )
    return found


class _ThroughHead(torch.autograd.Function):
    """With a frozen head, keeps the gradient of each log-probability; else the hidden states."""

    @staticmethod
    def forward(
        ctx: Any,
        computation: Computation,
        differentiable: bool,
        hidden: Tensor,
        target: Tensor,
        allowed: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.computation, ctx.dtype = computation, hidden.dtype
        learns = differentiable and not weights and ctx.needs_input_grad[2]
        chunks = [_forward(computation, learns, *chunk) for chunk in _chunks(hidden, target, allowed)]
        logp, measured, of_hidden = zip(*chunks, strict=True)
        if learns:
            ctx.save_for_backward(*of_hidden)
        elif differentiable:
            ctx.save_for_backward(hidden, target, allowed, *weights)
        if computation.statistic is None:
            return torch.cat(logp), None
        statistic = torch.cat(measured)
        ctx.mark_non_differentiable(statistic)
        return torch.cat(logp), statistic

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        computation: Computation = ctx.computation
        if computation.weights:
            of_hidden, of_weights = _backward(computation, gradient, *ctx.saved_tensors[:3])
            return None, None, of_hidden, None, None, *of_weights
        rows: Sequence[Tensor] = ctx.saved_tensors
        of_hidden = rows[0].new_empty(len(gradient), rows[0].shape[-1], dtype=ctx.dtype)
        for part, factor, output in zip(rows, *_split(gradient, of_hidden), strict=True):
            torch.mul(part, factor[:, None], out=output)
        return None, None, of_hidden, None, None


def _forward(
    computation: Computation, learns: bool, hidden: Tensor, target: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probability [m], statistic [m] and, if `learns`, the gradient [m, h] of each log-probability."""
    found = computation.distribution(hidden, target, allowed)
    measured = None if computation.statistic is None else computation.statistic(found)
    if not learns:
        return found.logp, measured, None
    return found.logp, measured, computation.product.of_input(computation.of_output(found, target))


def _backward(
    computation: Computation, gradient: Tensor, hidden: Tensor, target: Tensor, allowed: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """The gradients of the hidden states and of the weights of the head, chunk by chunk."""
    of_hidden = torch.empty_like(hidden)
    of_weights = [torch.zeros_like(weight) for weight in computation.weights]
    factors, outputs = _split(gradient, of_hidden)
    for chunk, factor, output in zip(_chunks(hidden, target, allowed), factors, outputs, strict=True):
        _add_gradients(computation, factor, *chunk, output, of_weights)
    return of_hidden, of_weights


def _add_gradients(
    computation: Computation,
    factor: Tensor,
    hidden: Tensor,
    target: Tensor,
    allowed: Tensor | None,
    of_hidden: Tensor,
    of_weights: Sequence[Tensor],
) -> None:
    """Write the gradient of a chunk's hidden states [m, h], and add those of the weight [V, h] and of the bias [V]."""
    of_output = computation.of_output(computation.distribution(hidden, target, allowed), target, factor)
    of_hidden.copy_(computation.product.of_input(of_output))
    weight, *biases = of_weights
    weight.addmm_(of_output.t(), hidden)
    for bias in biases:
        bias.add_(of_output.sum(0))


def _split(*tensors: Tensor) -> list[Sequence[Tensor]]:
    return [torch.split(tensor, HEAD_CHUNK) for tensor in tensors]


def _chunks(
    hidden: Tensor, target: Tensor, allowed: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    parts = _split(hidden, target)
    masks: Sequence[Tensor | None] = [None] * len(parts[0])
    if allowed is not None:
        [masks] = _split(allowed)
    yield from zip(*parts, masks, strict=True)
