"""Graded groups to a better adapter: one optimizer step of LoRA under a GRPO-family loss."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from core.methods import Resolved
from worker import grpo
from worker.batch import Tensors, micro_batches, packs_of, tensors_of
from worker.policy import Policy
from worker.types import Group, Pack, UpdateMetrics

# Rows of the vocabulary matrix product alive at once: 512 x 49,152 float32 logits are 100 MB.
HEAD_CHUNK = 512


class Trainer(Protocol):
    def update(self, groups_P: Sequence[Group]) -> UpdateMetrics:
        """Learn from one step's groups. Afterwards the sampler draws from the new policy."""
        ...

    def save(self, folder: Path) -> None:
        """Write the adapter (PEFT format) and everything `load` needs to go on exactly."""
        ...

    def load(self, folder: Path) -> None: ...


class PeftTrainer:
    """Implements Trainer: AdamW on the adapter's float32 weights, the base frozen."""

    def __init__(self, policy: Policy, settings: Resolved, *, token_budget: int) -> None:
        self.policy = policy
        self.settings = settings
        self.token_budget = token_budget
        # Betas and no weight decay: what RL with LoRA converged on (a second moment of 0.95 forgets in ~20 steps).
        self.optimizer = torch.optim.AdamW(
            policy.trainable, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.steps_taken = 0

    def update(self, groups_P: Sequence[Group]) -> UpdateMetrics:
        settings = self.settings
        packs = packs_of(
            groups_P,
            loss=settings.loss,
            scale=settings.advantage_scale,
            max_completion_tokens=settings.max_completion_tokens,
            keep_all=settings.kl > 0,
        )
        trained = sum(len(pack.sequences) for pack in packs)
        dropped = sum(len(group.rollouts_G) for group in groups_P) - trained
        if not packs:
            return UpdateMetrics(0.0, 0, 0, dropped, None, None, None, None, None)

        totals = Totals()
        for batch in micro_batches(packs, self.token_budget):
            # Without a penalty the KL is only watched, so one pack a step estimates it: it costs a forward pass.
            reference = batch if settings.kl > 0 else batch[: 1 if totals.tokens == 0 else 0]
            totals.add(self._backward(batch, reference))
        norm = torch.nn.utils.clip_grad_norm_(self.policy.trainable, settings.max_grad_norm).item()
        finite = torch.isfinite(torch.tensor(norm)).item()
        if finite:
            self._step()
        self.optimizer.zero_grad(set_to_none=True)
        return UpdateMetrics(
            loss=totals.loss,
            trained_sequences=trained,
            trained_tokens=totals.tokens,
            dropped_sequences=dropped,
            grad_norm=norm if finite else None,
            clip_fraction=totals.clipped / totals.tokens,
            kl=totals.kl / totals.kl_tokens,
            entropy=totals.entropy / totals.tokens,
            logprob_gap=totals.gap / totals.tokens,
            skipped=not finite,
        )

    def _backward(self, packs: Sequence[Pack], reference: Sequence[Pack]) -> "Totals":
        """Add the gradient of these packs. `reference` is the part of them (from the front) to take the KL on."""
        settings = self.settings
        batch = tensors_of(packs, self.policy.device)
        ref_logp = self._base_logprobs(reference)
        logp_M, entropy_M = self.logprobs(batch)
        part = grpo.loss(
            logp_M,
            batch.old_logp_M,
            batch.advantage_M,
            batch.weight_M,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            kl=settings.kl,
            ref_logp=ref_logp if settings.kl > 0 else None,
        )
        part.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            clipped = grpo.was_clipped(
                logp_M, batch.old_logp_M, batch.advantage_M, settings.clip_low, settings.clip_high
            )
            return Totals(
                loss=part.item(),
                tokens=len(logp_M),
                clipped=clipped.sum().item(),
                entropy=entropy_M.sum().item(),
                gap=(logp_M - batch.old_logp_M).abs().sum().item(),
                kl=grpo.kl_k3(logp_M[: len(ref_logp)], ref_logp).sum().item(),
                kl_tokens=len(ref_logp),
            )

    @torch.no_grad()
    def _base_logprobs(self, packs: Sequence[Pack]) -> Tensor:
        """Log-probabilities under the model without its adapter, in the order `tensors_of` lists the tokens."""
        if not packs:
            return torch.empty(0, device=self.policy.device)
        with self.policy.as_base():
            return self.logprobs(tensors_of(packs, self.policy.device))[0]

    def logprobs(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """Log-probability [M] of each trained token and the entropy [M] (nats, no gradient) where it stood.

        Only positions that predict an answer's token reach the head, and in chunks that are recomputed in the
        backward pass, so no [tokens x vocabulary] tensor is ever whole.
        """
        hidden = self.policy.hidden(batch.input_ids, batch.position_ids, batch.mask)[
            batch.row_M, batch.column_M
        ]
        head: Callable[..., tuple[Tensor, Tensor]] = self._head_chunk
        chunks = [
            checkpoint(head, h, target, use_reentrant=False)
            for h, target in zip(
                torch.split(hidden, HEAD_CHUNK), torch.split(batch.target_M, HEAD_CHUNK), strict=True
            )
        ]
        logp, entropy = zip(*chunks, strict=True)
        return torch.cat(logp), torch.cat(entropy)

    def _head_chunk(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logp = (self.policy.logits(hidden) / self.settings.temperature).log_softmax(-1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, target[:, None])[:, 0], entropy

    def _step(self) -> None:
        self.steps_taken += 1
        warm = min(1.0, self.steps_taken / self.settings.warmup_steps) if self.settings.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * warm
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        self.policy.save(folder)
        state: dict[str, Any] = {
            "optimizer": self.optimizer.state_dict(),
            "steps_taken": self.steps_taken,
            "torch_rng": torch.get_rng_state(),
        }
        torch.save(state, folder / "trainer.pt")

    def load(self, folder: Path) -> None:
        self.policy.load(folder)
        state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps_taken = state["steps_taken"]
        torch.set_rng_state(state["torch_rng"])


class Totals:
    """Sums over the tokens of a step, added up micro-batch by micro-batch."""

    def __init__(self, **sums: float) -> None:
        self.loss = self.clipped = self.entropy = self.gap = self.kl = 0.0
        self.tokens = self.kl_tokens = 0
        vars(self).update(sums)

    def add(self, other: "Totals") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
