"""From rows to the log-probabilities of their trained tokens, without a tensor of [tokens x vocabulary]."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from worker.model.batch import Tensors
from worker.model.json_schema import masked
from worker.model.policy import Policy
from worker.model.sizing import HEAD_CHUNK


def logprobs(policy: Policy, batch: Tensors, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute the log-probability [M] of each trained token and the entropy [M] (nats, no gradient) at its position.

    Only positions that predict an answer's token pass through the head, in chunks that are recomputed in the backward
    pass, so no [tokens x vocabulary] tensor is ever materialized.
    """
    return logprobs_of(policy, predicting(policy, batch), batch, temperature)


def predicting(policy: Policy, batch: Tensors) -> Tensor:
    """Compute the hidden state [M, h] that predicts each trained token."""
    return policy.hidden(batch.input_ids, batch.position_ids, batch.segment)[batch.row_M, batch.column_M]


def logprobs_of(policy: Policy, hidden: Tensor, batch: Tensors, temperature: float) -> tuple[Tensor, Tensor]:
    """As `logprobs`, from the result of `predicting`."""
    head = partial(_log_probabilities, policy, temperature)
    return through_head(head, hidden, batch.target_M, batch.allowed_M, _entropy, weights=policy.trained_head)


Statistic = Callable[[Tensor, Tensor], Tensor]
"""From the log-probabilities [m, V] and the targets [m] to one number for each position, without a gradient."""


def _entropy(logp: Tensor, target: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(logp.exp()).sum(-1)  # 0 at masked tokens
    return entropy


def through_head(
    head: Callable[[Tensor, Tensor | None], Tensor],
    hidden: Tensor,
    target_M: Tensor,
    allowed_M: Tensor | None,
    statistic: Statistic,
    *,
    weights: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """The log-probability [M] of each target and the statistic [M] of its position, chunk by chunk.

    Args:
        head: hidden states [m, h] and allowed tokens -> log-probabilities [m, V].
        hidden: [M, h].
        weights: those of the head that are trained.
    """
    targets = torch.split(target_M, HEAD_CHUNK)
    allowed: Sequence[Tensor | None] = [None] * len(targets)
    if allowed_M is not None:
        allowed = torch.split(allowed_M, HEAD_CHUNK)
    chunks = [
        _HeadChunk.apply(head, statistic, *chunk, *weights)  # type: ignore[no-untyped-call]
        for chunk in zip(torch.split(hidden, HEAD_CHUNK), targets, allowed, strict=True)
    ]
    logp, measured = zip(*chunks, strict=True)
    return torch.cat(logp), torch.cat(measured)


def _log_probabilities(policy: Policy, temperature: float, hidden: Tensor, allowed: Tensor | None) -> Tensor:
    """Of all tokens, [M, V]."""
    logits = policy.logits(hidden)
    if allowed is not None:
        logits = masked(logits, allowed)
    if temperature != 1.0:
        logits = logits / temperature
    return logits.log_softmax(-1)


class _HeadChunk(torch.autograd.Function):
    """Log-probability [m] of each target and a statistic [m]. Keeps the hidden states, and computes the head again."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Callable[..., Tensor],
        statistic: Statistic,
        hidden: Tensor,
        target: Tensor,
        allowed: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.head = head
        ctx.save_for_backward(hidden, target, allowed, *weights)
        logp = head(hidden, allowed)
        measured = statistic(logp, target)
        ctx.mark_non_differentiable(measured)
        return logp.gather(-1, target[:, None])[:, 0], measured

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, target, allowed, *weights = ctx.saved_tensors
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            logp = ctx.head(hidden, allowed).gather(-1, target[:, None])[:, 0]
        of_hidden, *of_weights = torch.autograd.grad(logp, [hidden, *weights], gradient)
        return None, None, of_hidden, None, None, *of_weights


def predicted(policy: Policy, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """The log-probability [M] of each learned token, and whether it is the likeliest (bool [M], no gradient)."""
    logp_M, is_top_M = through_head(
        partial(_log_softmax, policy),
        predicting(policy, tensors),
        tensors.target_M,
        None,
        _is_top,
        weights=policy.trained_head,
    )
    return logp_M, is_top_M


def _log_softmax(policy: Policy, hidden: Tensor, allowed: Tensor | None) -> Tensor:
    return policy.logits(hidden).log_softmax(-1)


def _is_top(logp: Tensor, target: Tensor) -> Tensor:
    return logp.argmax(-1) == target
