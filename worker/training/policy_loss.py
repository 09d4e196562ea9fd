"""The loss of sampled answers with rewards: GRPO and its relatives, PPO, and distillation of sampled answers.

The packs of the step's groups, with their advantages and weights, come from contributions.py. Formulas are in
worker/training/objectives/, grpo.py, token_rewards.py and ppo.py.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from core.jobs.hyperparameters import Resolved
from worker.model import token_constraints
from worker.model.batch import Tensors, answers_of, by_answer, tensors_of
from worker.model.policy import Policy
from worker.model.token_logprobs import logprobs, logprobs_and_entropy, predicting
from worker.model.value_head import ValueHead
from worker.training import grpo, importance, ppo, token_rewards
from worker.training.loss import Batch, GradientSums, KeptValues, Loss, StepValues
from worker.training.objective import Tokens, token_loss
from worker.training.objectives.registry import objective_of
from worker.training.sampler_gate import SamplerGap
from worker.training.token_rewards import Moments, StepMoments
from worker.types import AnswerKey, Pack, TokenValues


class PolicyLoss(Loss):
    """A sum over the trained tokens of a step.

    With rewards of tokens, the order is: `remember` of all micro-batches, `reward_tokens`, `normalize`, then the loss.
    """

    couples_answers = False

    def __init__(self, policy: Policy, settings: Resolved, *, response_schema: str = "") -> None:
        super().__init__(policy, has_reference=settings.has_reference)
        self._settings = settings
        self.objective = objective_of(settings)
        # These take a ratio, a mean, or a sum of rewards, over the tokens of a whole episode.
        self.couples_calls = (
            self.objective.couples_calls or settings.has_token_rewards or settings.couples_importance
        )
        self.response_schema = response_schema
        self.value_head: ValueHead | None = None
        if settings.value_weight is not None:
            self.value_head = ValueHead(
                policy.hidden_size, policy.device, adapter_weight=settings.value_weight
            )

    @property
    def settings(self) -> Resolved:
        return self._settings

    @property
    def trainable(self) -> list[Parameter]:
        """Of the policy, and of a value head."""
        head = [] if self.value_head is None else list(self.value_head.parameters())
        return [*super().trainable, *head]

    @property
    def filler(self) -> Pack:
        pack = super().filler
        return replace(pack, sequences=(replace(pack.sequences[0], weight=0.0),))

    def remember(self, batch: Batch) -> None:
        """Keep the log-probabilities under the policy that sampled, and under the reference."""
        tensors = self.laid_out(batch)
        batch.ref_logp = self._reference_logprobs(tensors) if self.settings.kl > 0 else None
        batch.old_logp, _, batch.old_value = self.forward(tensors)

    def reward_tokens(self, batches: Iterable[Batch], kl: float) -> StepMoments:
        """Compute the advantages of all remembered tokens, and return their moments.

        Args:
            kl: the weight of the penalty in this step.
        """
        moments = StepMoments()
        for batch in batches:
            of_batch = self._reward_tokens(batch, kl)
            if not batch.is_filler:
                moments += of_batch
        return moments

    def _reward_tokens(self, batch: Batch, kl: float) -> StepMoments:
        settings, tensors = self.settings, self.laid_out(batch)
        assert batch.old_logp is not None, "the micro-batches are remembered"
        kl_M = torch.zeros_like(batch.old_logp)
        if batch.ref_logp is not None:
            kl_M = grpo.kl_k1(batch.old_logp, batch.ref_logp)
        answer_M = tensors.answer_M
        reward_M = token_rewards.token_rewards(tensors.advantage_M, kl_M, answer_M, kl)
        if batch.old_value is None:
            batch.advantage = token_rewards.reinforce_plus_plus(reward_M, answer_M)
            return StepMoments(Moments.of(batch.advantage))
        assert settings.gamma is not None and settings.gae_lambda is not None
        batch.advantage = ppo.gae(reward_M, batch.old_value, answer_M, settings.gamma, settings.gae_lambda)
        return_M = batch.advantage + batch.old_value.double()
        batch.returns = return_M.float()
        return StepMoments(Moments.of(batch.advantage), Moments.of(return_M))

    def normalize(self, batches: Iterable[Batch], mean: float, std: float) -> None:
        """Normalize the advantages of all remembered tokens. After an out-of-memory error it can be called again."""
        for batch in batches:
            assert batch.advantage is not None, "`reward_tokens` comes first"
            batch.normalized_advantage = token_rewards.normalized(batch.advantage, mean, std).float()

    def __call__(self, batch: Batch, values: StepValues) -> tuple[Tensor, GradientSums]:
        settings = self.settings
        tensors = self.laid_out(batch)
        if settings.kl > 0 and batch.ref_logp is None:
            batch.ref_logp = self._reference_logprobs(tensors)
        logp_M, entropy_M, value_M = self.forward(tensors, batch)
        if batch.old_logp is None:
            # The policy of the first pass is the one that sampled, so its log-probabilities are the old ones.
            batch.old_logp = logp_M.detach()
        sampled_M, answer_M = tensors.sampled_logp_M, tensors.answer_M
        # Without a correction the ratio is to the sampler's probabilities, so the clip also acts on their gap.
        old_M = batch.old_logp if settings.importance != "none" else sampled_M
        importance_M = importance.weights_of(old_M, sampled_M, answer_M, settings)
        advantage_M = (
            tensors.advantage_M if batch.normalized_advantage is None else batch.normalized_advantage
        )
        if tensors.teacher_logp_M is not None:
            advantage_M = grpo.distillation_advantages(batch.old_logp, tensors.teacher_logp_M)
        batch.used_advantage = advantage_M
        is_recent_M = self._is_recent(logp_M, sampled_M, advantage_M, answer_M)
        loss = token_loss(
            logp_M,
            old_M,
            advantage_M * is_recent_M,
            tensors.weight_M * importance_M,
            answer_M,
            objective=self.objective,
            # A penalty in the reward is in the advantages already.
            kl=0.0 if settings.has_token_rewards else values.kl * values.std,
            kl_estimator=settings.kl_estimator,
            ref_logp=batch.ref_logp,
            log_ratio_penalty=settings.log_ratio_penalty * values.std,
        )
        value_loss = self._value_loss(batch, value_M, tensors.weight_M)
        with torch.no_grad():
            masked_M, teaches_M = (importance_M == 0) | ~is_recent_M, advantage_M != 0
            clipped = self.objective.clipped(Tokens(logp_M, old_M, advantage_M, answer_M))
            sums = GradientSums(
                loss=loss.item(),
                value_loss=value_loss.item(),
                tokens=len(logp_M),
                clipped=clipped.sum().item(),
                masked=masked_M.sum().item(),
                teaching=int(teaches_M.sum().item()),
                teaching_masked=(masked_M & teaches_M).sum().item(),
                entropy=entropy_M.sum().item(),
                kl=0.0 if batch.ref_logp is None else grpo.kl_k3(logp_M, batch.ref_logp).sum().item(),
            )
            sums += _gap_sums(batch.old_logp, sampled_M)
        return loss + value_loss, sums

    def _is_recent(self, logp_M: Tensor, sampled_M: Tensor, advantage_M: Tensor, answer_M: Tensor) -> Tensor:
        """Which tokens the off-policy mask keeps under the current policy."""
        threshold = self.settings.off_policy_threshold
        if not threshold:
            return torch.ones_like(answer_M, dtype=torch.bool)
        return importance.is_recent(logp_M, sampled_M, advantage_M, answer_M, threshold)

    def _value_loss(self, batch: Batch, value_M: Tensor | None, weight_M: Tensor) -> Tensor:
        """The sum over the tokens; 0 without a value head."""
        if value_M is None:
            return torch.zeros((), device=weight_M.device)
        assert (
            batch.old_value is not None and batch.returns is not None and self.settings.value_clip is not None
        )
        losses_M = ppo.value_loss(value_M, batch.old_value, batch.returns, self.settings.value_clip)
        return (weight_M * losses_M).sum()

    def token_values(self, batches: Iterable[Batch], std: float) -> dict[AnswerKey, TokenValues]:
        """Return what the step's passes computed with, for each token of each answer.

        Args:
            std: of the step, as in `divisors`. With `overlap` it is not known in the first pass.
        """
        found: dict[AnswerKey, Tensor] = {}  # [2, T]
        for batch in batches:
            if batch.is_filler or batch.old_logp is None or batch.used_advantage is None:
                continue  # a mini-batch after a gradient that was not finite
            values = torch.stack([batch.old_logp.cpu(), batch.used_advantage.cpu() / std])
            for answer, part in by_answer(batch.packs, values):
                unknown = torch.full((2, answer.undivided.trained_tokens), math.nan)
                found.setdefault(answer.undivided.key, unknown)[:, answer.index] = part
        return {key: TokenValues(*values.numpy()) for key, values in found.items()}

    def watched_kl(self, batches: Sequence[Batch]) -> float | None:
        """Estimate the KL of the sampling policy for monitoring, from one forward pass: of the first pack, or of the
        rows of the first answer.

        Not during sampling, because the reference is the same model with its adapter disabled.

        Returns:
            None: this rank has no pack, or all weights are trained and no copy of the first ones is kept.
        """
        if not batches or (self.reference is None and not self.policy.has_base):
            return None
        batch = Batch(_first_whole(batches[0].packs), is_filler=batches[0].is_filler)
        ref_logp = self._reference_logprobs(self.laid_out(batch))
        KeptValues.of(batches[:1]).restore([batch])
        assert batch.old_logp is not None
        return grpo.kl_k3(batch.old_logp, ref_logp).mean().item()

    def sampler_gap(self, batches: Sequence[Batch]) -> SamplerGap | None:
        """Compare a micro-batch of the step with the sampler, under the current adapter. None: there is none."""
        if not batches:
            return None
        tensors = self.laid_out(batches[0])
        gap_M = (self.logprobs(tensors).double() - tensors.sampled_logp_M.double()).abs()
        return SamplerGap(gap_M.mean().item(), gap_M.max().item(), len(gap_M))

    @torch.no_grad()
    def _reference_logprobs(self, tensors: Tensors) -> Tensor:
        """Compute log-probabilities [M] under the reference."""
        with self.as_reference():
            return self.logprobs(tensors)

    @property
    def temperature(self) -> float:
        return self.settings.temperature

    def laid_out(self, batch: Batch) -> Tensors:
        # A filler need not be an answer that the schema allows.
        return tensors_of(batch.packs, self.policy.device) if batch.is_filler else self.tensors(batch.packs)

    def tensors(self, packs: Sequence[Pack]) -> Tensors:
        tensors = tensors_of(packs, self.policy.device)
        if not self.response_schema:
            return tensors
        allowed = [
            token_constraints.allowed(self.policy, self.response_schema, answer.undivided)[answer.index]
            for answer in answers_of(packs)
        ]
        return replace(tensors, allowed_M=torch.cat(allowed).to(self.policy.device))

    def logprobs(self, tensors: Tensors) -> Tensor:
        """Compute the log-probability [M] of each trained token."""
        return logprobs(self.policy, tensors, self.settings.temperature)

    def forward(self, tensors: Tensors, batch: Batch | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the log-probability [M] of each trained token, and the entropy [M] and value [M] at its position.

        There is no value without a value head. `batch` is that of a pass before an update, which is measured.
        """
        hidden = predicting(self.policy, tensors)
        if batch is not None:
            self.keep_output(batch, hidden)
        value_M = None if self.value_head is None else self.value_head(hidden)
        return *logprobs_and_entropy(self.policy, hidden, tensors, self.settings.temperature), value_M


def _first_whole(packs: Sequence[Pack]) -> list[Pack]:
    """The first pack of a micro-batch, with the other rows of its answers."""
    first = {id(answer.undivided) for answer in answers_of(packs[:1])}
    return [pack for pack in packs if any(id(answer.undivided) in first for answer in answers_of([pack]))]


def _gap_sums(old_M: Tensor, sampled_M: Tensor) -> GradientSums:
    """How far the sampler's log-probabilities are from the trainer's."""
    # In float64, because the weight of a broken sampler may overflow float32.
    gap_M = old_M.double() - sampled_M.double()
    ratio_M = gap_M.exp()
    return GradientSums(
        gap=gap_M.abs().sum().item(),
        gap_max=gap_M.abs().max().item(),
        gap_k1=-gap_M.sum().item(),
        gap_k3=(torch.expm1(gap_M) - gap_M).sum().item(),
        ratio=ratio_M.sum().item(),
        ratio_squared=(ratio_M**2).sum().item(),
    )
