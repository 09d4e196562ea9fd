"""From rows to the log-probabilities of their trained tokens, without a tensor of [tokens x vocabulary].

Only positions that predict a trained token pass through the head, in chunks (worker/model/head.py).
"""

from torch import Tensor

from worker.model.batch import Tensors
from worker.model.head import Computation, Statistic, entropy, is_top, through_head
from worker.model.policy import Policy


def logprobs(policy: Policy, batch: Tensors, temperature: float) -> Tensor:
    """Compute the log-probability [M] of each trained token."""
    return _through_head(policy, predicting(policy, batch), batch, temperature, None)[0]


def predicting(policy: Policy, batch: Tensors) -> Tensor:
    """Compute the hidden state [M, h] that predicts each trained token."""
    hidden = policy.hidden(batch.input_ids, batch.position_ids, batch.segment, batch.seen_until)
    return hidden[batch.row_M, batch.column_M]


def logprobs_and_entropy(
    policy: Policy, hidden: Tensor, batch: Tensors, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability [M] of each trained token and the entropy [M] (nats, no gradient) at its position.

    Args:
        hidden: the result of `predicting`.
    """
    logp_M, entropy_M = _through_head(policy, hidden, batch, temperature, entropy)
    assert entropy_M is not None
    return logp_M, entropy_M


def predicted(policy: Policy, hidden: Tensor, batch: Tensors) -> tuple[Tensor, Tensor]:
    """The log-probability [M] of each learned token, and whether none is likelier (bool [M], no gradient).

    Args:
        hidden: the result of `predicting`.
    """
    logp_M, is_top_M = _through_head(policy, hidden, batch, 1.0, is_top)
    assert is_top_M is not None
    return logp_M, is_top_M


def _through_head(
    policy: Policy, hidden: Tensor, batch: Tensors, temperature: float, statistic: Statistic | None
) -> tuple[Tensor, Tensor | None]:
    computation = Computation(
        policy.head_product, policy.head_logits, temperature, statistic, policy.trained_head
    )
    return through_head(computation, hidden, batch.target_M, batch.allowed_M)
