"""KL divergences of next-token distributions of which the likeliest tokens are compared one by one. Pure functions."""

import torch
from torch import Tensor

ROUNDING = 1e-6  # of a sum of probabilities in float32


def forward_kl_to_top(student: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """As `forward_kl` at temperature 1, of a teacher of which only the likeliest tokens [m, k] are known.

    Ids that only the teacher has are no tokens. Their probability is a part of that of all others.
    """
    is_token = ids < student.shape[-1]
    # In their place one of the list that the student has: it is not compared twice, because q is 0.
    ids = torch.where(is_token, ids, ids.amin(-1, keepdim=True).clamp(max=student.shape[-1] - 1))
    logprobs = logprobs.masked_fill(~is_token, -torch.inf)
    log_p = with_others_as_one(student.log_softmax(-1), ids)
    others = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=0)  # rounding may leave less than nothing
    return kl(torch.cat([logprobs, others.log()], -1), log_p)


def top_tokens(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` likeliest tokens of each position and their log-probabilities, [m, k], from those of all tokens [m, V].

    At least one token is left, which stands for the others.
    """
    top = logprobs.topk(min(k, logprobs.shape[-1] - 1))
    return top.indices, top.values


def kl_from_top(logprobs: Tensor, ids: Tensor, before: Tensor) -> Tensor:
    """KL(before || after) at each position [m], of `before` as `top_tokens` says, and `logprobs` [m, V] after.

    The other tokens count as one, so it is at most the KL over all tokens (the data-processing inequality, Cover and
    Thomas, Elements of Information Theory, section 2.8).
    """
    others = 1 - before.exp().sum(-1, keepdim=True)
    # The rest is rounding of float32 where all other tokens are forbidden.
    others = torch.where(others > ROUNDING, others, 0.0)
    return kl(torch.cat([before, others.log()], -1), with_others_as_one(logprobs, ids))


def kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(q || p) of log-probabilities [m, n]: [m]."""
    q = log_q.exp()
    # A token that the teacher excludes costs nothing, whatever its logarithm.
    return torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)


def with_others_as_one(logp: Tensor, top: Tensor) -> Tensor:
    """From log-probabilities [m, V] to those of the tokens `top` [m, k] and, last, of all others: [m, k + 1]."""
    others = logp.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logp.gather(-1, top), others], -1)
