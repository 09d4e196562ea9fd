"""Learn a teacher's probabilities of the answers in a file: the forward KL of the next token, KL(teacher || student).

Sources: knowledge distillation (Hinton et al., arXiv 1503.02531, section 2: the temperature, and the factor T^2 that
keeps the size of the gradient); for each token of given answers, supervised KD in GKD (arXiv 2306.13649, section 2).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.model.batch import Tensors, tensors_of
from worker.model.policy import Policy
from worker.model.sizing import HEAD_CHUNK
from worker.model.token_logprobs import predicting
from worker.training.loss import Batch, GradientSums, StepValues
from worker.training.row_loss import RowLoss
from worker.training.teacher import TeacherPolicy
from worker.training.top_kl import forward_kl_to_top, kl, with_others_as_one
from worker.training.world import World
from worker.types import Pack, TopTokens

# Positions whose logits are alive at once: with what autograd keeps of two models, 8 times as many numbers. The memory
# plan has 2.5 times those of HEAD_CHUNK positions (worker/model/sizing.py).
CHUNK = HEAD_CHUNK * 5 // 16

# The student's logits [m, V] to the loss of each position [m].
Comparison = Callable[[Tensor], Tensor]


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
        log_p, log_q = (with_others_as_one(logp, top) for logp in (log_p, log_q))
    return temperature**2 * kl(log_q, log_p)


class SoftTargetLoss(RowLoss):
    """The forward KL to a teacher, summed over the learned tokens.

    A teacher in memory reads each micro-batch before the student does; without one, the packs have its likeliest
    tokens.
    """

    def __init__(self, policy: Policy, teacher: TeacherPolicy | None, settings: ResolvedOffline) -> None:
        super().__init__(policy, settings)
        self.teacher = teacher
        self.chunk = CHUNK

    @property
    def filler(self) -> Pack:
        pack = super().filler
        if self.teacher is not None or self.settings.top_k is None:
            return pack
        size = len(pack.sequences[0].output_ids_T), self.settings.top_k
        top = TopTokens(torch.zeros(size, dtype=torch.int64), torch.full(size, -20.0))
        return replace(pack, sequences=(replace(pack.sequences[0], top=top),))

    @property
    def fixed_weights(self) -> Mapping[str, Sequence[Tensor] | None]:
        teacher = None if self.teacher is None else self.teacher.adapter
        return {**super().fixed_weights, "teacher": teacher}

    def receive(self, name: str, world: World) -> None:
        if name != "teacher":
            super().receive(name, world)
            return
        assert self.teacher is not None and self.teacher.adapter is not None
        world.broadcast(self.teacher.adapter)

    def __call__(self, batch: Batch, values: StepValues) -> tuple[Tensor, GradientSums]:
        packs = batch.packs
        tensors = tensors_of(packs, self.policy.device)
        comparisons = self._to_top(packs) if self.teacher is None else self._to_policy(self.teacher, tensors)
        hidden = predicting(self.policy, tensors)
        self.keep_output(batch, hidden)
        correct, parts = 0.0, []
        chunks = (torch.split(tensor, self.chunk) for tensor in (hidden, tensors.target_M))
        for own, target, compare in zip(*chunks, comparisons, strict=True):
            part, is_top = _Chunk.apply(partial(self._compared, compare, target), own)  # type: ignore[no-untyped-call]
            parts.append(part)
            correct += is_top.sum().item()
        loss = torch.stack(parts).sum()
        return loss, GradientSums(
            loss=loss.item(), tokens=len(tensors.target_M), correct=correct, sequences=batch.sequences
        )

    def _to_policy(self, teacher: TeacherPolicy, tensors: Tensors) -> list[Comparison]:
        """The KL of each chunk of positions to a teacher in memory, which reads them all now."""
        with torch.no_grad(), teacher.teaching():
            predicted = predicting(teacher.policy, tensors)
        temperature = self.settings.soft_temperature
        assert temperature is not None

        def compare(read: Tensor, student: Tensor) -> Tensor:
            with torch.no_grad():
                logits = teacher.policy.logits(read)
            return forward_kl(student, logits, top_k=self.settings.top_k, temperature=temperature)

        return [partial(compare, read) for read in torch.split(predicted, self.chunk)]

    def _to_top(self, packs: Sequence[Pack]) -> list[Comparison]:
        """The KL of each chunk of positions to the tokens in the packs."""
        tops = [one.top for pack in packs for one in pack.sequences if one.top is not None]
        ids, logprobs = (
            torch.split(torch.cat(values).to(self.policy.device), self.chunk)
            for values in ([top.ids for top in tops], [top.logprobs for top in tops])
        )
        return [
            partial(forward_kl_to_top, ids=top_ids, logprobs=top_logprobs)
            for top_ids, top_logprobs in zip(ids, logprobs, strict=True)
        ]

    def _compared(self, compare: Comparison, target: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over the positions [m] of the hidden states [m, h], and whether the student finds no token likelier
        than the target [m] at each.
        """
        logits = self.policy.logits(hidden)
        target_logit = logits.detach().gather(-1, target[:, None])[:, 0]
        return compare(logits).sum(), target_logit == logits.detach().amax(-1)


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
