"""Train a policy on graded groups: optimizer steps with a GRPO-family loss."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.jobs.hyperparameters import Resolved
from core.storage.manifests import EARLIER
from worker.learn import grpo
from worker.learn.batch import Share, batch_of, divisors, in_mini_batches, share_of
from worker.learn.distributed import DistributedGradient
from worker.learn.gradient import Gradient, OwnGradient, keep_memory
from worker.learn.optimizer import BETAS, AdapterOptimizer, optimizer_of
from worker.learn.token_rewards import StepMoments
from worker.learn.totals import Totals
from worker.learn.trained import read_state, trained_of
from worker.learn.value_optimizer import ValueOptimizer
from worker.learn.world import World
from worker.model.policy import Policy
from worker.refusals import SamplerMismatch
from worker.rollout.sampler_gate import SamplerGap, SamplerGate
from worker.rollout.samplers.requests import same
from worker.sharing.turns import TURNS
from worker.types import Group, Pack, UpdateMetrics


class PeftTrainer:
    """Implements Trainer: AdamW on the policy's trainable weights in float32: the adapter's, or all of the model."""

    def __init__(
        self,
        policy: Policy,
        settings: Resolved,
        *,
        token_budget: int,
        held_to: str = "",
        gate: SamplerGate | None = None,
        world: World | None = None,
        keeps_tokens: bool = False,
        release: Callable[[], None] = keep_memory,
    ) -> None:
        """`held_to` is the response schema of the sampler; the ranks of `world` compute a share of the gradient.

        With `keeps_tokens`, `step` returns what it computed with for each token. `release` is called on all ranks at
        the end of each step.
        """
        self.policy = policy
        self.settings = settings
        self.own = OwnGradient(policy, settings, token_budget=token_budget, held_to=held_to, release=release)
        self.gradient: Gradient = self.own
        if world is not None:
            self.gradient = DistributedGradient(self.own, world)
        self.waits = settings.value_warmup_steps or 0  # steps before the first of the policy
        self.trained = trained_of(self.own, optimizer_of(policy, settings, world), world)
        self.value_optimizer: ValueOptimizer | None = None
        if self.own.value_head is not None:
            self.value_optimizer = ValueOptimizer(self.own.value_head, settings, betas=BETAS)
        self.steps_taken = 0
        self.gate = gate
        self.keeps_tokens = keeps_tokens
        # The adapters before each of the last steps, the oldest first, as the sampler reads them.
        self._earlier: deque[dict[str, Tensor]] = deque(maxlen=settings.off_policy_steps)
        # The adapter that sampled the step's answers, if it is not the current one.
        self._sampled_with: Mapping[str, Tensor] | None = None
        # How many more steps of this attempt the gate judges under an adapter that is not the current one.
        self._to_judge = 0 if settings.continue_in_flight else settings.off_policy_steps + 1
        # State of the current step.
        self._shares: list[Share] = []
        self._answers = 0
        self._waiting: list[Share] = []

    @property
    def _kl(self) -> float:
        """The weight of the penalty in the current step."""
        return grpo.kl_weight(self.settings.kl, self.settings.kl_warmup_steps, self.steps_taken)

    @property
    def optimizer(self) -> AdapterOptimizer:
        return self.trained.optimizer

    @TURNS
    def add(self, group: Group) -> None:
        """Add a group. With `overlap`, computes its part of the gradient as soon as a micro-batch is full."""
        share = share_of(group, self.settings, self.policy.text)
        self._shares.append(share)
        self._answers += len(group.rollouts_G)
        if share.pack is not None:
            self._waiting.append(share)
        if (
            self.settings.overlap
            and sum(pack.tokens for pack in _packs(self._waiting)) >= self.gradient.capacity
        ):
            self._compute_waiting(std=1.0)

    @TURNS
    def step(self) -> UpdateMetrics:
        """Pass `updates_per_batch` times over the answers (DeepSeekMath's mu), with an optimizer step after each, or
        after each of its `mini_batches`: the ratio of all of them is to the policy before the first (DeepSeek-R1).
        """
        before = self.policy.adapter() if self.settings.off_policy_steps else {}
        is_stale = bool(self._earlier) and not same(self._earlier[0], before)
        self._sampled_with = self._earlier[0] if is_stale else None
        metrics = self._update()
        if self.settings.continue_in_flight:
            self._to_judge = 0  # from now on an update may be in the middle of an answer
        self._earlier.append(before)
        self.steps_taken += 1  # also without an update, so that the schedule depends on the step alone
        self._refresh_reference()
        return metrics

    def _update(self) -> UpdateMetrics:
        settings = self.settings
        kl_weight = self._kl if settings.kl > 0 else None
        shares, answers = batch_of(self._shares, settings), self._answers
        self._shares, self._answers = [], 0
        # Computed groups had signal, so they are in the batch; pending ones may have been replaced by resampling.
        batch = {id(share) for share in shares}
        self._waiting = [share for share in self._waiting if id(share) in batch]
        trained = sum(len(pack.sequences) for pack in _packs(shares))
        if not trained:
            return UpdateMetrics(0.0, 0, 0, answers, None, None, None, None, None, kl_weight=kl_weight)
        _, std = divisors(shares, settings)
        parts = in_mini_batches(shares, settings.mini_batches, seed=self.steps_taken)
        wholes = [divisors(part, settings)[0] for part in parts]
        moments = StepMoments()
        if settings.has_token_rewards:
            moments = self._reward_tokens(parts)
        else:
            if len(parts) > 1:
                self._waiting = parts[0]
                for number, part in enumerate(parts[1:], start=1):
                    self.gradient.remember(_packs(part), number)
            self._compute_waiting(std)
        passes = [self.gradient.collect()]
        self._check_sampler(passes[0])
        watched = self.gradient.watched_kl() if settings.kl == 0 else None

        norms: list[float] = []
        losses: list[float] = []
        for number in range(settings.updates_per_batch * len(parts)):
            part_number = number % len(parts)
            if number > 0:
                self.gradient.again(std, self._kl, part_number)
                passes.append(self.gradient.collect())
            divisor = wholes[part_number] * std
            losses.append(passes[-1].loss / divisor)
            # Warm-up counts steps of the run, however many updates each makes.
            norm = self._descend(divisor)
            if norm is None:  # another pass over the same answers would not be finite either
                break
            norms.append(norm)
        tokens = self.gradient.token_values() if self.keeps_tokens else {}
        self.gradient.end()

        first, total = sum(passes[1 : len(parts)], passes[0]), sum(passes[1:], passes[0])
        return UpdateMetrics(
            loss=sum(losses) / len(losses),
            trained_sequences=trained,
            trained_tokens=total.tokens,
            dropped_sequences=answers - trained,
            grad_norm=sum(norms) / len(norms) if norms else None,
            clip_fraction=total.clipped / total.tokens,
            kl=total.kl / total.tokens if settings.kl > 0 else watched,
            kl_weight=kl_weight,
            entropy=first.entropy / first.tokens,
            logprob_gap=first.gap / first.tokens,
            logprob_gap_max=first.gap_max,
            logprob_gap_k1=first.gap_k1 / first.tokens,
            logprob_gap_k3=first.gap_k3 / first.tokens,
            logprob_gap_ess=first.effective_sample_size,
            value_loss=None if self.own.value_head is None else total.value_loss / total.tokens,
            explained_variance=moments.explained_variance,
            skipped=len(norms) < len(passes),
            tokens=tokens,
        )

    def _descend(self, divisor: float) -> float | None:
        """Take a step of the adapter and of a value head. As `AdapterOptimizer.step`; 0 where the adapter waits."""
        if self.value_optimizer is not None and self.steps_taken < self.waits:
            self.trained.clear()
            return 0.0 if self.value_optimizer.step(divisor, self.steps_taken) else None
        norm = self.trained.step(divisor, self.steps_taken - self.waits)
        if self.value_optimizer is None:
            return norm
        if norm is None:
            self.value_optimizer.clear()
            return None
        return norm if self.value_optimizer.step(divisor, self.steps_taken) else None

    def _reward_tokens(self, parts: Sequence[Sequence[Share]]) -> StepMoments:
        """Compute the advantages of all tokens of the step, then the gradient of the first mini-batch."""
        assert self.settings.std is not None
        for number, part in enumerate(parts):
            self.gradient.remember(_packs(part), number)
        self._waiting = []
        moments = self.gradient.reward_tokens(self._kl)
        advantages = moments.advantages
        self.gradient.normalize(advantages.mean, advantages.std(self.settings.std))
        self.gradient.again(1.0, self._kl, 0)
        return moments

    def _check_sampler(self, first: Totals) -> None:
        """Check the sampler before the first update of the step, so that a refused step changes nothing.

        `first` compares the same weights if the current policy has sampled the answers. With `off_policy_steps` an
        earlier one has, once an update has changed the policy. Rank 0 then computes one micro-batch with that one's
        adapter, but only in the first steps of an attempt: in a new job, up to the first answers of an adapter that
        has learned.

        Raises:
            SamplerMismatch: they disagree. The step is dropped.
        """
        if self.gate is None:
            return
        gap = SamplerGap(first.gap / first.tokens, first.gap_max, first.tokens)
        if self._sampled_with is not None:
            if not self._to_judge:
                return
            self._to_judge -= 1
            with self.policy.with_adapter(self._sampled_with):
                gap = self.gradient.sampler_gap()
        try:
            self.gate.check(gap)
        except SamplerMismatch:
            self.trained.clear()
            if self.value_optimizer is not None:
                self.value_optimizer.clear()
            self.gradient.end()
            raise

    def _compute_waiting(self, std: float) -> None:
        self.gradient.add(_packs(self._waiting), std, self._kl)
        self._waiting = []

    def _refresh_reference(self) -> None:
        """Iterative GRPO (DeepSeekMath, Algorithm 1): copy the policy into the reference every
        `reference_refresh_steps` steps of the run."""
        every = self.settings.reference_refresh_steps
        if every and self.steps_taken % every == 0:
            self.start_from_policy()

    def start_from_policy(self) -> None:
        """Take the current policy for the reference of the KL, in place of the model that the job started from."""
        self.trained.keep_reference()

    def save(self, folder: Path) -> None:
        state: dict[str, Any] = {
            **self.trained.save(folder),
            "steps_taken": self.steps_taken,
            "torch_rng": torch.get_rng_state(),
        }
        if self.own.value_head is not None and self.value_optimizer is not None:
            state["value_head"] = self.own.value_head.state_dict()
            state["value_optimizer"] = self.value_optimizer.state_dict()
        torch.save(state, folder / "trainer.pt")
        if self._earlier and self.steps_taken < self.settings.total_steps:
            torch.save([*self._earlier], folder / EARLIER)

    def load(self, folder: Path) -> None:
        state = read_state(folder / "trainer.pt")
        earlier = read_state(folder / EARLIER) if (folder / EARLIER).exists() else ()
        self.trained.load(folder, state)
        self.steps_taken = state["steps_taken"]
        self._earlier.clear()
        self._earlier.extend(earlier)
        if self.settings.continue_in_flight:
            self._to_judge = 1  # one adapter samples all of the first step's answers
        if self.own.value_head is not None and self.value_optimizer is not None:
            self.own.value_head.load_state_dict(state["value_head"])
            self.value_optimizer.load_state_dict(state["value_optimizer"])
        torch.set_rng_state(state["torch_rng"])

    @contextmanager
    def policy_before(self, steps: int) -> Iterator[int]:
        steps = min(steps, len(self._earlier))
        if steps == 0:
            yield 0
            return
        with self.policy.with_adapter(self._earlier[-steps]):
            yield steps


def _packs(shares: Sequence[Share]) -> list[Pack]:
    return [share.pack for share in shares if share.pack is not None]
