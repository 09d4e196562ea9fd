"""Graded groups to a better adapter: optimizer steps of LoRA under a GRPO-family loss."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from core.methods import Resolved
from worker import grpo
from worker.batch import Share, Tensors, divisors, micro_batches, share_of, tensors_of
from worker.memory import HEAD_CHUNK
from worker.policy import Policy
from worker.samplers.json_schema import masked
from worker.types import Group, Pack, UpdateMetrics


class Trainer(Protocol):
    def add(self, group: Group) -> None:
        """Take a graded group into the step. May be called while the step's other answers are still sampled."""
        ...

    def step(self) -> UpdateMetrics:
        """Learn from the groups taken in since the last step. Afterwards the sampler draws from the new policy."""
        ...

    def save(self, folder: Path) -> None:
        """Write the adapter (PEFT format) and everything `load` needs to go on exactly."""
        ...

    def load(self, folder: Path) -> None: ...


class PeftTrainer:
    """Implements Trainer: AdamW on the adapter's float32 weights, the base frozen."""

    def __init__(self, policy: Policy, settings: Resolved, *, token_budget: int, held_to: str = "") -> None:
        """`held_to` is the schema that the sampler held the answers to."""
        self.policy = policy
        self.settings = settings
        self.token_budget = token_budget
        self.held_to = held_to
        # Betas and no weight decay: what RL with LoRA converged on (a second moment of 0.95 forgets in ~20 steps).
        self.optimizer = torch.optim.AdamW(
            policy.trainable, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.steps_taken = 0
        # The adapter of the KL's reference, once it is not the base model any more.
        self.reference: list[Tensor] | None = None
        # The step that is being put together.
        self._shares: list[Share] = []
        self._answers = 0
        self._waiting: list[Pack] = []
        self._batches: list[Batch] = []
        self._totals = Totals()

    def add(self, group: Group) -> None:
        """With `overlap` the group's part of the gradient is computed here, as soon as a micro-batch is full."""
        share = share_of(group, self.settings, self.policy.text)
        self._shares.append(share)
        self._answers += len(group.rollouts_G)
        if share.pack is not None:
            self._waiting.append(share.pack)
        if self.settings.overlap and sum(pack.tokens for pack in self._waiting) >= self.token_budget:
            self._compute_waiting(std=1.0)

    def step(self) -> UpdateMetrics:
        """Pass `updates_per_batch` times over the answers (DeepSeekMath's mu), with an optimizer step after each."""
        settings = self.settings
        shares, answers = self._shares, self._answers
        self._shares, self._answers = [], 0
        trained = sum(len(share.pack.sequences) for share in shares if share.pack is not None)
        if not trained:
            return UpdateMetrics(0.0, 0, 0, answers, None, None, None, None, None)
        whole, std = divisors(shares, settings)
        self._compute_waiting(std)
        batches, passes = self._batches, [self._totals]
        self._batches, self._totals = [], Totals()
        watched = self._watched_kl(batches[0]) if settings.kl == 0 else None

        norms: list[float] = []
        for number in range(settings.updates_per_batch):
            if number > 0:
                passes.append(sum((self._backward(batch, std) for batch in batches), Totals()))
            for parameter in self.policy.trainable:
                if parameter.grad is not None:
                    parameter.grad.div_(whole * std)
            norm = torch.nn.utils.clip_grad_norm_(self.policy.trainable, settings.max_grad_norm).item()
            finite = math.isfinite(norm)
            if finite:
                norms.append(norm)
                self._step()
            self.optimizer.zero_grad(set_to_none=True)
            if not finite:  # nor would it be in another pass over the same answers
                break
        if norms:
            self.steps_taken += 1
            self._refresh_reference()

        first, total = passes[0], sum(passes[1:], passes[0])
        return UpdateMetrics(
            loss=total.loss / (whole * std) / len(passes),
            trained_sequences=trained,
            trained_tokens=total.tokens,
            dropped_sequences=answers - trained,
            grad_norm=sum(norms) / len(norms) if norms else None,
            clip_fraction=total.clipped / total.tokens,
            kl=total.kl / total.tokens if watched is None else watched,
            entropy=first.entropy / first.tokens,
            logprob_gap=first.gap / first.tokens,
            logprob_gap_max=first.gap_max,
            logprob_gap_k1=first.gap_k1 / first.tokens,
            logprob_gap_k3=first.gap_k3 / first.tokens,
            logprob_gap_ess=first.effective_sample_size,
            skipped=len(norms) < len(passes),
        )

    def _compute_waiting(self, std: float) -> None:
        """Add the gradient of the packs that wait: sums, still to be divided."""
        for packs in micro_batches(self._waiting, self.token_budget):
            batch = Batch(packs)
            self._totals += self._backward(batch, std)
            self._batches.append(batch)
        self._waiting = []

    def _backward(self, batch: "Batch", std: float) -> "Totals":
        """Add the gradient of these packs. A penalty is multiplied by the `std` that all will be divided by."""
        settings = self.settings
        tensors = self._tensors(batch.packs)
        if settings.kl > 0 and batch.ref_logp is None:
            batch.ref_logp = self._reference_logprobs(batch.packs)
        logp_M, entropy_M = self.logprobs(tensors)
        if batch.old_logp is None:
            # The first pass is over the policy that sampled, so its own numbers are the old ones: no pass extra.
            batch.old_logp = logp_M.detach()
        sampled_M, answer_M = tensors.sampled_logp_M, tensors.answer_M
        # Without a correction the ratio itself is to what was sampled, and the clip acts on the gap as well.
        old_M = batch.old_logp if settings.importance != "none" else sampled_M
        importance_M = grpo.importance_weight(old_M, sampled_M, settings.importance, settings.importance_cap)
        part = grpo.loss(
            logp_M,
            old_M,
            tensors.advantage_M,
            tensors.weight_M * importance_M,
            answer_M,
            name=settings.loss,
            bounds=settings.ratio_bounds,
            kl=settings.kl * std,
            kl_estimator=settings.kl_estimator,
            ref_logp=batch.ref_logp,
        )
        part.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            clipped = grpo.was_clipped(
                settings.loss, logp_M - old_M, tensors.advantage_M, answer_M, settings.ratio_bounds
            )
            # In float64: a single weight of a sampler gone wrong may be beyond float32.
            gap_M = batch.old_logp.double() - sampled_M.double()
            ratio_M = gap_M.exp()
            return Totals(
                loss=part.item(),
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

    def _watched_kl(self, batch: "Batch") -> float:
        """The KL of the policy that sampled, where it is only watched: one pack estimates it, for a forward pass.

        Here and not beside the sampling: the reference is the same model with its adapter switched off.
        """
        ref_logp = self._reference_logprobs(batch.packs[:1])
        assert batch.old_logp is not None
        return grpo.kl_k3(batch.old_logp[: len(ref_logp)], ref_logp).mean().item()

    @torch.no_grad()
    def _reference_logprobs(self, packs: Sequence[Pack]) -> Tensor:
        """Log-probabilities under the reference, in the order `tensors_of` lists the tokens."""
        with self._as_reference():
            return self.logprobs(self._tensors(packs))[0]

    def _as_reference(self) -> AbstractContextManager[None]:
        return self.policy.as_base() if self.reference is None else self.policy.wearing(self.reference)

    def _refresh_reference(self) -> None:
        """Iterative GRPO (DeepSeekMath, Algorithm 1): every so often the reference becomes the policy."""
        every = self.settings.reference_refresh_steps
        if every and self.steps_taken % every == 0:
            self.reference = [parameter.detach().clone() for parameter in self.policy.trainable]

    def _tensors(self, packs: Sequence[Pack]) -> Tensors:
        tensors = tensors_of(packs, self.policy.device)
        if not self.held_to:
            return tensors
        answers = [answer for pack in packs for answer in pack.sequences]
        allowed = [self.policy.vocabulary.allowed(self.held_to, one.output_ids_T) for one in answers]
        return replace(tensors, allowed_M=torch.cat(allowed).to(self.policy.device))

    def logprobs(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """Log-probability [M] of each trained token and the entropy [M] (nats, no gradient) where it stood.

        Only positions that predict an answer's token reach the head, and in chunks that are recomputed in the
        backward pass, so no [tokens x vocabulary] tensor is ever whole.
        """
        hidden = self.policy.hidden(batch.input_ids, batch.position_ids, batch.mask)[
            batch.row_M, batch.column_M
        ]
        head: Callable[..., tuple[Tensor, Tensor]] = self._head_chunk
        targets = torch.split(batch.target_M, HEAD_CHUNK)
        allowed: Sequence[Tensor | None] = [None] * len(targets)
        if batch.allowed_M is not None:
            allowed = torch.split(batch.allowed_M, HEAD_CHUNK)
        chunks = [
            checkpoint(head, *chunk, use_reentrant=False)
            for chunk in zip(torch.split(hidden, HEAD_CHUNK), targets, allowed, strict=True)
        ]
        logp, entropy = zip(*chunks, strict=True)
        return torch.cat(logp), torch.cat(entropy)

    def _head_chunk(self, hidden: Tensor, target: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = self.policy.logits(hidden)
        if allowed is not None:
            logits = masked(logits, allowed)
        logp = (logits / self.settings.temperature).log_softmax(-1)
        with torch.no_grad():
            entropy = torch.special.entr(logp.exp()).sum(-1)  # 0 where nothing is allowed to be
        return logp.gather(-1, target[:, None])[:, 0], entropy

    def _step(self) -> None:
        settings = self.settings
        # Warm-up counts steps of the run, however many updates each makes.
        warm = min(1.0, (self.steps_taken + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * warm
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        self.policy.save(folder)
        state: dict[str, Any] = {
            "optimizer": self.optimizer.state_dict(),
            "steps_taken": self.steps_taken,
            "reference": self.reference,
            "torch_rng": torch.get_rng_state(),
        }
        torch.save(state, folder / "trainer.pt")

    def load(self, folder: Path) -> None:
        self.policy.load(folder)
        state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps_taken = state["steps_taken"]
        reference = state["reference"]
        self.reference = (
            None if reference is None else [tensor.to(self.policy.device) for tensor in reference]
        )
        torch.set_rng_state(state["torch_rng"])


@dataclass
class Batch:
    """A micro-batch, and what its first pass leaves to those after it: what stays the same while the policy moves."""

    packs: Sequence[Pack]
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None


@dataclass(frozen=True)
class Totals:
    """Sums over the tokens of a step (and one maximum), added up micro-batch by micro-batch."""

    loss: float = 0.0
    tokens: int = 0
    clipped: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    gap_k1: float = 0.0
    gap_k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0

    @property
    def effective_sample_size(self) -> float:
        """(sum of the weights)^2 / (n x sum of their squares): 1 where all are alike, 1 / n where one has it all."""
        if self.ratio_squared == 0.0:  # so small that float64 has no number for them
            return 0.0
        return self.ratio * (self.ratio / self.ratio_squared) / self.tokens

    def __add__(self, other: "Totals") -> "Totals":
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Totals(**sums | {"gap_max": max(self.gap_max, other.gap_max)})
