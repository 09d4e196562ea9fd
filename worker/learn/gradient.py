"""Accumulate the adapter's gradient over the packs of a step, micro-batch by micro-batch.

The results are sums over tokens: the trainer divides them once the whole step is known. `OwnGradient` computes in this
process; `DistributedGradient` (worker/learn/distributed.py) computes on all ranks of the run.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from core.jobs.hyperparameters import Resolved
from worker.learn import grpo, ppo, token_rewards
from worker.learn.batch import RowCost, Tensors, micro_batches, tensors_of
from worker.learn.reference import WithReference
from worker.learn.row_cost import row_cost
from worker.learn.token_rewards import Moments, StepMoments
from worker.learn.totals import Totals
from worker.model.policy import Policy
from worker.model.sizing import HEAD_CHUNK
from worker.model.value_head import ValueHead
from worker.rollout.sampler_gate import SamplerGap
from worker.rollout.samplers import steering
from worker.rollout.samplers.json_schema import masked
from worker.sharing.turns import TURNS
from worker.types import AnswerKey, Pack, TokenValues, TrainingSequence

# The shortest pack that predicts a token.
_NOTHING = Pack((0, 0), (TrainingSequence((0, 0), (0.0, 0.0), (0.0, 0.0), 0.0),))


class Gradient(Protocol):
    """The gradient of one step. Call `add` any number of times, then `collect`; per further pass `again`, `collect`.

    With mini-batches, call `remember` for all but the first part before its `collect`, then `again` for each of them.
    With rewards of tokens, call `remember` for all parts, `reward_tokens`, `normalize`, then `again` for each part.
    """

    @property
    def capacity(self) -> int:
        """Return the number of tokens that fill all ranks."""
        ...

    def add(self, packs: Sequence[Pack], std: float, kl: float) -> None:
        """Add packs. Multiplies penalties by `std`, by which everything is divided later.

        `kl` is the weight of the penalty in this step.
        """
        ...

    def remember(self, packs: Sequence[Pack], part: int) -> None:
        """Keep the packs of a mini-batch, with their log-probabilities under the policy that sampled them."""
        ...

    def reward_tokens(self, kl: float) -> StepMoments:
        """Compute the advantages of all remembered tokens, and return their moments. `kl`: as for `add`."""
        ...

    def normalize(self, mean: float, std: float) -> None:
        """Normalize the advantages of all remembered tokens."""
        ...

    def again(self, std: float, kl: float, part: int = 0) -> None:
        """Add all packs of this mini-batch, under the current policy. Those of `add` are part 0."""
        ...

    def collect(self) -> Totals:
        """Write the gradient of all packs added since the last call to `grad` of the policy's weights."""
        ...

    def watched_kl(self) -> float | None:
        """Estimate the KL of the sampling policy for monitoring, from one pack and one forward pass.

        None: all weights are trained, and no copy of the first ones is kept.
        """
        ...

    def sampler_gap(self) -> SamplerGap:
        """Compare one micro-batch of the step with the sampler, under the adapter that rank 0 has now."""
        ...

    def token_values(self) -> dict[AnswerKey, TokenValues]:
        """Return what the step's passes computed with, for each token of each answer."""
        ...

    def end(self) -> None:
        """Discard the step's packs."""
        ...


def keep_memory() -> None:
    """Keep the memory of a step for the next one."""


class OwnGradient(WithReference):
    """Implements Gradient in this process, computing packs as they are added."""

    def __init__(
        self,
        policy: Policy,
        settings: Resolved,
        *,
        token_budget: int,
        held_to: str = "",
        release: Callable[[], None] = keep_memory,
    ) -> None:
        """`release`: called at the end of a step, when nothing of it is in use any more."""
        super().__init__(policy, has_reference=settings.has_reference)
        self.release = release
        self.settings = settings
        self.capacity = token_budget
        self.held_to = held_to
        self.value_head: ValueHead | None = None
        if settings.value_weight is not None:
            self.value_head = ValueHead(
                policy.hidden_size, policy.device, adapter_weight=settings.value_weight
            )
        self._batches: list[Batch] = []
        # Micro-batches of the step that other ranks have and this one has not, by part.
        self._filled_up: Counter[int] = Counter()
        self._totals = Totals()

    @property
    def trainable(self) -> list[Parameter]:
        """The weights that the first of several ranks updates: of the policy, and of a value head."""
        head = [] if self.value_head is None else list(self.value_head.parameters())
        return [*self.policy.led, *head]

    def add(self, packs: Sequence[Pack], std: float, kl: float) -> None:
        self.add_micro_batches(self.micro_batches(packs), std, kl)

    def micro_batches(self, packs: Sequence[Pack]) -> Iterator[list[Pack]]:
        rows = self.policy.route.forward == "rows"
        return micro_batches(packs, self.capacity, self.policy.device, rows=rows, cost=self._cost)

    def add_micro_batches(self, parts: Iterable[Sequence[Pack]], std: float, kl: float) -> None:
        for part in parts:
            batch = Batch(part)
            self._batches.append(batch)
            self._totals += self._backward(batch, std, kl)
            TURNS.offer()

    def remember(self, packs: Sequence[Pack], part: int) -> None:
        self.remember_micro_batches(self.micro_batches(packs), part)

    @torch.no_grad()
    def remember_micro_batches(self, parts: Iterable[Sequence[Pack]], part: int) -> None:
        for packs in parts:
            tensors = self.tensors(packs)
            reference = self._reference_logprobs(tensors) if self.settings.kl > 0 else None
            logp_M, _, value_M = self.forward(tensors)
            self._batches.append(Batch(packs, part, logp_M, reference, old_value=value_M))
            TURNS.offer()

    def reward_tokens(self, kl: float) -> StepMoments:
        return sum((self._reward_tokens(batch, kl) for batch in self._batches), StepMoments())

    def _reward_tokens(self, batch: "Batch", kl: float) -> StepMoments:
        settings, tensors = self.settings, self.tensors(batch.packs)
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

    def normalize(self, mean: float, std: float) -> None:
        for batch in self._batches:
            assert batch.advantage is not None, "`reward_tokens` comes first"
            batch.advantage = token_rewards.normalized(batch.advantage, mean, std).float()

    def fill_up(self, missing: int, part: int = 0, *, remembered: bool = False) -> None:
        """Gather the layers of a sharded base for as many micro-batches of other ranks, also in later passes."""
        self._filled_up[part] += missing
        for _ in range(missing):
            if remembered:
                self._gather_along_memory()
            else:
                self._gather_along(first=True)

    @torch.no_grad()
    def _gather_along_memory(self) -> None:
        """Compute passes as `remember` does, and keep nothing."""
        tensors = tensors_of([_NOTHING], self.policy.device)
        if self.settings.kl > 0:
            self._reference_logprobs(tensors)
        self.logprobs(tensors)

    def _gather_along(self, *, first: bool) -> None:
        """Compute passes as `_backward` does, and add nothing. `first`: the reference of the KL too."""
        tensors = tensors_of([_NOTHING], self.policy.device)
        if first and self.settings.kl > 0:
            self._reference_logprobs(tensors)
        (self.logprobs(tensors)[0] * 0.0).sum().backward()  # type: ignore[no-untyped-call]

    def gather_along_reference(self) -> None:
        """Gather the layers of a sharded base for one pass of rank 0 under the reference."""
        self._reference_logprobs(tensors_of([_NOTHING], self.policy.device))

    @cached_property
    def _cost(self) -> RowCost | None:
        return row_cost(self.policy)

    def again(self, std: float, kl: float, part: int = 0) -> None:
        for batch in self._batches:
            if batch.part == part:
                self._totals += self._backward(batch, std, kl)
                TURNS.offer()
        for _ in range(self._filled_up[part]):
            self._gather_along(first=False)

    def collect(self) -> Totals:
        totals, self._totals = self._totals, Totals()
        return totals

    def token_values(self) -> dict[AnswerKey, TokenValues]:
        found: dict[AnswerKey, TokenValues] = {}
        for batch in self._batches:
            if batch.old_logp is None or batch.used_advantage is None:
                continue  # a mini-batch after a gradient that was not finite
            answers = [one for pack in batch.packs for one in pack.sequences]
            sampled = [len(one.output_ids_T) - one.forced for one in answers]
            values = zip(
                torch.split(batch.old_logp.cpu(), sampled),
                torch.split(batch.used_advantage.cpu(), sampled),
                strict=True,
            )
            for one, (logprobs_T, advantages_T) in zip(answers, values, strict=True):
                found[one.key] = TokenValues(logprobs_T.numpy(), advantages_T.numpy())
        return found

    def end(self) -> None:
        self._batches, self._filled_up = [], Counter()
        self.release()

    def _backward(self, batch: "Batch", std: float, kl: float) -> Totals:
        settings = self.settings
        tensors = self.tensors(batch.packs)
        if settings.kl > 0 and batch.ref_logp is None:
            batch.ref_logp = self._reference_logprobs(tensors)
        logp_M, entropy_M, value_M = self.forward(tensors)
        if batch.old_logp is None:
            # The policy of the first pass is the one that sampled, so its log-probabilities are the old ones.
            batch.old_logp = logp_M.detach()
        sampled_M, answer_M = tensors.sampled_logp_M, tensors.answer_M
        # Without a correction the ratio is to the sampler's probabilities, so the clip also acts on their gap.
        old_M = batch.old_logp if settings.importance != "none" else sampled_M
        importance_M = grpo.importance_weight(old_M, sampled_M, settings.importance, settings.importance_cap)
        advantage_M = tensors.advantage_M if batch.advantage is None else batch.advantage
        if tensors.teacher_logp_M is not None:
            advantage_M = grpo.distillation_advantages(batch.old_logp, tensors.teacher_logp_M)
        batch.used_advantage = advantage_M / std
        part = grpo.loss(
            logp_M,
            old_M,
            advantage_M,
            tensors.weight_M * importance_M,
            answer_M,
            name=settings.loss,
            bounds=settings.ratio_bounds,
            # A penalty in the reward is in the advantages already.
            kl=0.0 if settings.has_token_rewards else kl * std,
            kl_estimator=settings.kl_estimator,
            ref_logp=batch.ref_logp,
        )
        value_loss = self._value_loss(batch, value_M, tensors.weight_M)
        (part + value_loss).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            clipped = grpo.was_clipped(
                settings.loss, logp_M - old_M, advantage_M, answer_M, settings.ratio_bounds
            )
            # In float64, because the weight of a broken sampler may overflow float32.
            gap_M = batch.old_logp.double() - sampled_M.double()
            ratio_M = gap_M.exp()
            return Totals(
                loss=part.item(),
                value_loss=value_loss.item(),
                tokens=len(logp_M),
                clipped=clipped.sum().item(),
                entropy=entropy_M.sum().item(),
                kl=0.0 if batch.ref_logp is None else grpo.kl_k3(logp_M, batch.ref_logp).sum().item(),
                gap=gap_M.abs().sum().item(),
                gap_max=gap_M.abs().max().item(),
                gap_k1=-gap_M.sum().item(),
                gap_k3=(torch.expm1(gap_M) - gap_M).sum().item(),
                ratio=ratio_M.sum().item(),
                ratio_squared=(ratio_M**2).sum().item(),
            )

    def _value_loss(self, batch: "Batch", value_M: Tensor | None, weight_M: Tensor) -> Tensor:
        """The sum over the tokens; 0 without a value head."""
        if value_M is None:
            return torch.zeros((), device=weight_M.device)
        assert (
            batch.old_value is not None and batch.returns is not None and self.settings.value_clip is not None
        )
        losses_M = ppo.value_loss(value_M, batch.old_value, batch.returns, self.settings.value_clip)
        return (weight_M * losses_M).sum()

    def watched_kl(self) -> float | None:
        """As Gradient says. Not during sampling, because the reference is the same model with its adapter disabled."""
        if self.reference is None and not self.policy.has_base:
            return None
        batch = self._batches[0]
        ref_logp = self._reference_logprobs(self.tensors(batch.packs[:1]))
        assert batch.old_logp is not None
        return grpo.kl_k3(batch.old_logp[: len(ref_logp)], ref_logp).mean().item()

    @torch.no_grad()
    def sampler_gap(self) -> SamplerGap:
        tensors = self.tensors(self._batches[0].packs)
        gap_M = (self.logprobs(tensors)[0].double() - tensors.sampled_logp_M.double()).abs()
        return SamplerGap(gap_M.mean().item(), gap_M.max().item(), len(gap_M))

    @torch.no_grad()
    def gather_along_sampler_gap(self) -> None:
        """Gather the layers of a sharded base for the pass of rank 0 in `sampler_gap`."""
        self.logprobs(tensors_of([_NOTHING], self.policy.device))

    @torch.no_grad()
    def _reference_logprobs(self, tensors: Tensors) -> Tensor:
        """Compute log-probabilities [M] under the reference."""
        with self.as_reference():
            return self.logprobs(tensors)[0]

    def tensors(self, packs: Sequence[Pack]) -> Tensors:
        tensors = tensors_of(packs, self.policy.device)
        answers = [answer for pack in packs for answer in pack.sequences]
        if self.held_to:
            allowed = [steering.allowed(self.policy, self.held_to, one) for one in answers]
            tensors = replace(tensors, allowed_M=torch.cat(allowed).to(self.policy.device))
        return steering.without_forced(tensors, answers)

    def logprobs(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        return logprobs(self.policy, batch, self.settings.temperature)

    def forward(self, batch: Tensors) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `logprobs`, and the value [M] of the position that predicts each token; None without a value head."""
        hidden = predicting(self.policy, batch)
        value_M = None if self.value_head is None else self.value_head(hidden)
        return *logprobs_of(self.policy, hidden, batch, self.settings.temperature), value_M


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


@dataclass
class Batch:
    """A micro-batch, with the values of its first pass that later passes reuse."""

    packs: Sequence[Pack]
    part: int = 0  # the mini-batch
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    advantage: Tensor | None = None  # with rewards of tokens
    used_advantage: Tensor | None = None  # of the last pass, divided by the std of the step
    old_value: Tensor | None = None  # with a value head, like `returns`
    returns: Tensor | None = None
