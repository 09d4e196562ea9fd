"""Learn a teacher's probabilities of the answers in a file: the forward KL of the next token, KL(teacher || student).

Sources: knowledge distillation (Hinton et al., arXiv 1503.02531, section 2: the temperature, and the factor T^2 that
keeps the size of the gradient); for each token of given answers, supervised KD in GKD (arXiv 2306.13649, section 2).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.learn.batch import tensors_of
from worker.learn.gradient import predicting
from worker.learn.offline_gradient import OfflineGradient, sequences
from worker.learn.teacher import TeacherPolicy
from worker.learn.totals import Totals
from worker.model.policy import Policy
from worker.model.sizing import HEAD_CHUNK
from worker.types import Pack

# Positions whose logits are alive at once. There are those of two models, so it is half of other losses'.
CHUNK = HEAD_CHUNK // 2


def forward_kl(student: Tensor, teacher: Tensor, *, top_k: int | None, temperature: float) -> Tensor:
    """T^2 KL(q || p) of each position [m], with q = softmax(teacher / T) and p = softmax(student / T).

    Args:
        student, teacher: logits [m, V]. Ids that only the wider of the two has are no tokens: models of a family fill
            their vocabularies up to different widths.
        top_k: compares only the teacher's likeliest tokens one by one, and the sum of the others' probabilities as if
            they were one token. That is a KL as well: never negative, and 0 for equal models. None: all tokens.
    """
    shared = min(student.shape[-1], teacher.shape[-1])
    log_p = (student / temperature).log_softmax(-1)[..., :shared]
    log_q = (teacher[..., :shared] / temperature).log_softmax(-1)
    if top_k is not None and top_k < shared:
        top = log_q.topk(top_k).indices
        log_p, log_q = (_with_the_others_as_one(logp, top) for logp in (log_p, log_q))
    q = log_q.exp()
    # A token that the teacher excludes costs nothing, whatever its logarithm.
    return temperature**2 * torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)


def _with_the_others_as_one(logp: Tensor, top: Tensor) -> Tensor:
    """From log-probabilities [m, V] to those of the tokens `top` [m, k] and, last, of all others: [m, k + 1]."""
    others = logp.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logp.gather(-1, top), others], -1)


class SoftTargetGradient(OfflineGradient):
    """The gradient of the forward KL to a teacher, which reads each micro-batch before the student does."""

    def __init__(
        self, policy: Policy, teacher: TeacherPolicy, settings: ResolvedOffline, *, token_budget: int
    ) -> None:
        super().__init__(policy, settings, token_budget=token_budget)
        self.teacher = teacher
        self.chunk = CHUNK

    def loss(self, packs: Sequence[Pack]) -> tuple[Tensor, Totals]:
        teacher = self.teacher
        tensors = tensors_of(packs, self.policy.device)
        with torch.no_grad(), teacher.teaching():
            taught = predicting(teacher.policy, tensors)
        hidden = predicting(self.policy, tensors)
        correct, parts = 0.0, []
        chunks = zip(
            *(torch.split(one, self.chunk) for one in (hidden, taught, tensors.target_M)), strict=True
        )
        for own, others, target in chunks:
            with torch.no_grad():
                teacher_logits = teacher.policy.logits(others)
            part, likeliest = _Chunk.apply(partial(self._kl, teacher_logits), own)  # type: ignore[no-untyped-call]
            parts.append(part)
            correct += (likeliest == target).sum().item()
        loss = torch.stack(parts).sum()
        return loss, Totals(
            loss=loss.item(), tokens=len(tensors.target_M), correct=correct, sequences=sequences(packs)
        )

    def _kl(self, teacher_logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over the positions [m] of the hidden states [m, h], and the student's likeliest token at each."""
        settings = self.settings
        assert settings.soft_temperature is not None
        logits = self.policy.logits(hidden)
        each = forward_kl(logits, teacher_logits, top_k=settings.top_k, temperature=settings.soft_temperature)
        return each.sum(), logits.detach().argmax(-1)


class _Chunk(torch.autograd.Function):
    """The loss of hidden states [m, h]. Its gradient is computed along with it, so that no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any, loss: Callable[[Tensor], tuple[Tensor, Tensor]], hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        if ctx.needs_input_grad[1]:
            with torch.enable_grad():
                hidden = hidden.detach().requires_grad_()
                value, also = loss(hidden)
                ctx.save_for_backward(*torch.autograd.grad(value, hidden))
        else:
            value, also = loss(hidden)
        ctx.mark_non_differentiable(also)
        return value.detach(), also

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[None, Tensor]:
        [of_hidden] = ctx.saved_tensors
        return None, gradient * of_hidden
