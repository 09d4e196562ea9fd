"""PPO's advantages and the loss of its values, as pure functions of flat tensors, as in token_rewards.py.

Sources: PPO (arXiv 1707.06347) and generalized advantage estimation (GAE, arXiv 1506.02438). The clipped loss of the
values is in neither; it is that of OpenAI's baselines, which trl and verl have as well.
"""

import torch
from torch import Tensor

from worker.training.token_rewards import discounted_sums


def gae(reward_M: Tensor, value_M: Tensor, answer_M: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimation (GAE eq. 16; PPO eq. 11), in float64, before it is normalized.

    delta_t = r_t + gamma V_{t+1} - V_t, where V after the end of an answer is 0, and A_t = delta_t + gamma lam A_{t+1}.
    The return of a token is A_t + V_t.

    An episode is one series of actions in the order of sampling, in all its branches: t + 1 is the token that was
    sampled next, and its value is of the path that the policy read then. The reward is at the last sampled token.
    """
    value_M = value_M.double()
    next_M = torch.zeros_like(value_M)
    next_M[:-1] = torch.where(answer_M[1:] == answer_M[:-1], value_M[1:], 0.0)
    return discounted_sums(reward_M + gamma * next_M - value_M, answer_M, gamma * lam)


def value_loss(value_M: Tensor, old_M: Tensor, return_M: Tensor, clip: float) -> Tensor:
    """0.5 max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) of each token.

    The value has no gradient where the clipped value is further from the return.
    """
    clipped_M = old_M + (value_M - old_M).clamp(-clip, clip)
    return 0.5 * torch.maximum((value_M - return_M) ** 2, (clipped_M - return_M) ** 2)
