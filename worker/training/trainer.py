"""Train a policy on graded groups: optimizer steps with a GRPO-family loss."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from core.jobs.hyperparameters import Resolved
from core.storage.manifests import EARLIER
from worker.model.policy import Policy
from worker.refusals import SamplerMismatch
from worker.sampling.weights import same
from worker.training import grpo
from worker.training.contributions import (
    GroupContribution,
    batch_of,
    contribution_of,
    divisors,
    in_mini_batches,
)
from worker.training.distributed import gradient_of
from worker.training.gradient import StepMemory, keep_memory
from worker.training.loss import GradientSums, StepValues
from worker.training.optimizer import BETAS, AdapterOptimizer, ValueOptimizer, optimizer_of
from worker.training.policy_loss import PolicyLoss
from worker.training.sampler_gate import SamplerGap, SamplerGate
from worker.training.token_rewards import StepMoments
from worker.training.trainable_weights import read_state, save_state, trained_of
from worker.training.trust_region import StepTaken, TrustRegion, step_metrics
from worker.training.world import World
from worker.types import AnswerKey, Group, Pack, TokenValues, UpdateMetrics


class Reports(Protocol):
    """Receives events of the job. worker/recording/recorder.py: JobRecorder."""

    def inform(self, message: str, data: dict[str, Any]) -> None: ...

    def warn(self, message: str, data: dict[str, Any]) -> None: ...


class PeftTrainer:
    """Implements Trainer: AdamW on the policy's trainable weights in float32: the adapter's, or all of the model."""

    def __init__(
        self,
        policy: Policy,
        settings: Resolved,
        *,
        token_budget: int,
        response_schema: str = "",
        gate: SamplerGate | None = None,
        reports: Reports | None = None,
        world: World | None = None,
        keeps_tokens: bool = False,
        release: Callable[[], None] = keep_memory,
        memory: StepMemory | None = None,
    ) -> None:
        """`response_schema` is that of the sampler; the ranks of `world` compute a share of the gradient.

        With `keeps_tokens`, `step` returns what it computed with for each token. `release` is called on all ranks at
        the end of each step. `reports` receives what `gate` finds. `memory`: as `gradient_of` says.
        """
        self.policy = policy
        self.settings = settings
        self.loss = PolicyLoss(policy, settings, response_schema=response_schema)
        self.gradient = gradient_of(self.loss, token_budget, world, release, memory)
        self.trust = TrustRegion(settings.step_kl)
        self.waits = settings.waits
        self.trained = trained_of(self.loss, optimizer_of(policy, settings, world), world)
        self.value_optimizer: ValueOptimizer | None = None
        if self.loss.value_head is not None:
            self.value_optimizer = ValueOptimizer(self.loss.value_head, settings, betas=BETAS)
        self.steps_taken = 0
        self.gate, self.reports = gate, reports
        self._is_measured = False  # whether the gate knows the gap of this attempt's first step
        self._is_doubtful = False  # whether the step before was not taken because of the gate
        self.keeps_tokens = keeps_tokens
        # The adapters before each of the last steps, the oldest first, as the sampler reads them.
        self._earlier: deque[dict[str, Tensor]] = deque(maxlen=settings.off_policy_steps)
        # The adapter that sampled the step's answers, if it is not the current one.
        self._sampled_with: Mapping[str, Tensor] | None = None
        # How many more steps of this attempt the gate judges under an adapter that is not the current one.
        self._to_judge = 0 if settings.continue_in_flight else settings.off_policy_steps + 1
        # State of the current step.
        self._shares: list[GroupContribution] = []
        self._answers = 0
        self._waiting: list[GroupContribution] = []

    @property
    def _kl(self) -> float:
        """The weight of the penalty in the current step."""
        return grpo.kl_weight(self.settings.kl, self.settings.kl_warmup_steps, self.steps_taken)

    def _values(self, std: float = 1.0) -> StepValues:
        return StepValues(std=std, kl=self._kl)

    @property
    def optimizer(self) -> AdapterOptimizer:
        return self.trained.optimizer

    def add(self, group: Group) -> None:
        """Add a group. With `overlap`, computes its part of the gradient as soon as a micro-batch is full."""
        share = contribution_of(group, self.settings, self.policy.text)
        self._shares.append(share)
        self._answers += len(group.rollouts_G)
        if share.pack is not None:
            self._waiting.append(share)
        if (
            self.settings.overlap
            and sum(pack.tokens for pack in _packs(self._waiting)) >= self.gradient.capacity
        ):
            self._compute_waiting(std=1.0)

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
        moments = self._first_pass(parts, std)
        before = self.gradient.collect()
        if not self._agrees(before):
            return _untaken(before, answers, kl_weight)
        watched = self._watched_kl() if settings.kl == 0 else None
        passes, losses, taken = self._passes(before, parts, std)
        tokens = self._token_values(std) if self.keeps_tokens else {}
        self.gradient.end()

        first, total = sum(passes[1 : len(parts)], passes[0]), sum(passes[1:], passes[0])
        return UpdateMetrics(
            loss=sum(losses) / len(losses),
            trained_sequences=trained,
            trained_tokens=total.tokens,
            dropped_sequences=answers - trained,
            grad_norm=_mean(one.norm for one in taken),
            clip_fraction=total.clipped / total.tokens,
            masked_fraction=total.masked / total.tokens,
            teaching_masked_fraction=total.teaching_masked / max(total.teaching, 1),
            kl=total.kl / total.tokens if settings.kl > 0 else watched,
            kl_weight=kl_weight,
            **_of_first_pass(first),
            value_loss=None if self.loss.value_head is None else total.value_loss / total.tokens,
            explained_variance=moments.explained_variance,
            skipped=len(taken) < len(passes),
            **step_metrics(taken),
            tokens=tokens,
        )

    def _first_pass(self, parts: Sequence[Sequence[GroupContribution]], std: float) -> StepMoments:
        """Compute the gradient of the first mini-batch, and remember the answers of the others."""
        if self.settings.has_token_rewards:
            return self._reward_tokens(parts)
        if len(parts) > 1:
            self._waiting = [*parts[0]]
            for number, part in enumerate(parts[1:], start=1):
                self.gradient.remember(_packs(part), number)
        self._compute_waiting(std)
        return StepMoments()

    def _passes(
        self, first: GradientSums, parts: Sequence[Sequence[GroupContribution]], std: float
    ) -> tuple[list[GradientSums], list[float], list[StepTaken]]:
        """Descend along the gradient of each mini-batch, `updates_per_batch` times: sums, losses and steps.

        There is a step less than there are sums if a gradient was not finite.
        """
        wholes = [divisors(part, self.settings)[0] for part in parts]
        passes = [first]
        steps: list[StepTaken] = []
        losses: list[float] = []
        for number in range(self.settings.updates_per_batch * len(parts)):
            part_number = number % len(parts)
            if number > 0:
                self.gradient.repeat(self._values(std), part_number)
                passes.append(self.gradient.collect())
            divisor = wholes[part_number] * std
            losses.append(passes[-1].loss / divisor)
            # Warm-up counts steps of the run, however many updates each makes.
            taken = self._descend(divisor, part_number)
            if taken.norm is None:  # another pass over the same answers would not be finite either
                break
            steps.append(taken)
        return passes, losses, steps

    def _descend(self, divisor: float, part: int) -> StepTaken:
        """Take a step of the adapter and of a value head, or of neither. The norm is 0 where the adapter waits."""
        if self.value_optimizer is None:
            return self._policy_step(divisor, part)
        if not self.value_optimizer.prepare(divisor):
            self.trained.clear()
            return StepTaken(None)
        if self.steps_taken < self.waits:
            self.trained.clear()
            taken = StepTaken(0.0)
        else:
            taken = self._policy_step(divisor, part)
        if taken.norm is None or taken.is_rejected:
            self.value_optimizer.clear()
        else:
            self.value_optimizer.descend(self.steps_taken)
        return taken

    def _policy_step(self, divisor: float, part: int) -> StepTaken:
        steps_taken = self.steps_taken - self.waits
        return self.trust.measured_step(self.gradient, self.trained, divisor, steps_taken, part)

    def _reward_tokens(self, parts: Sequence[Sequence[GroupContribution]]) -> StepMoments:
        """Compute the advantages of all tokens of the step, then the gradient of the first mini-batch."""
        assert self.settings.std is not None
        for number, part in enumerate(parts):
            self.gradient.remember(_packs(part), number)
        self._waiting = []
        moments = sum(self.gradient.of_micro_batches(PolicyLoss.reward_tokens, self._kl), StepMoments())
        advantages = moments.advantages
        self.gradient.of_micro_batches(
            PolicyLoss.normalize, advantages.mean, advantages.std(self.settings.std)
        )
        self.gradient.repeat(self._values())
        return moments

    def _agrees(self, first: GradientSums) -> bool:
        """Whether the sampler agrees with the trainer, before the first update of the step.

        If not, the step is dropped and changes nothing. The answers of the next one, to other prompts, decide.

        Raises:
            SamplerMismatch: they disagree in two steps in a row.
        """
        gap = None if self.gate is None else self._gap(first)
        if gap is None or self.gate is None:
            return True
        problem = self.gate.problem(gap)
        if problem is None:
            self._is_doubtful = False
            self._measure(gap)
            return True
        self._discard()
        if self._is_doubtful:
            raise SamplerMismatch(
                f"{problem} The same holds for the step before. The sampler may compute this architecture differently, "
                "or may not have the same weights."
            )
        self._is_doubtful = True
        if self.reports is not None:
            data = {"logprob_gap": gap.mean, "logprob_gap_max": gap.largest, "bound": self.gate.bound}
            self.reports.warn(f"{problem} If the next one disagrees too, the job fails.", data)
        return False

    def _gap(self, first: GradientSums) -> SamplerGap | None:
        """Compare the step's answers with the policy that has sampled them. None: it is not known any more.

        `first` compares the same weights if the current policy has sampled the answers. With `off_policy_steps` an
        earlier one has, once an update has changed the policy. Rank 0 then computes one micro-batch with that one's
        adapter, but only in the first steps of an attempt (in a new job, up to the first answers of an adapter that
        has learned) and after a step that was not taken.
        """
        if self._sampled_with is None:
            return SamplerGap(first.gap / first.tokens, first.gap_max, first.tokens)
        if not (self._to_judge or self._is_doubtful):
            return None
        self._to_judge = max(0, self._to_judge - 1)
        with self.policy.with_adapter(self._sampled_with):
            of_rank_0 = self.gradient.of_micro_batches(PolicyLoss.sampler_gap)[0]
        assert of_rank_0 is not None, "it has answers"
        return of_rank_0

    def _measure(self, gap: SamplerGap) -> None:
        """Set the bound by the first step of the attempt, and report both."""
        if self._is_measured or self.gate is None:
            return
        self._is_measured = True
        self.gate = self.gate.measured(gap)
        if self.reports is not None:
            self.reports.inform(self.gate.described(gap), {"logprob_gap": gap.mean, "bound": self.gate.bound})

    def _discard(self) -> None:
        """Drop the gradient and the answers of the step."""
        self.trained.clear()
        if self.value_optimizer is not None:
            self.value_optimizer.clear()
        self.gradient.end()

    def _watched_kl(self) -> float | None:
        """The estimate of rank 0."""
        return self.gradient.of_micro_batches(PolicyLoss.watched_kl)[0]

    def _token_values(self, std: float) -> dict[AnswerKey, TokenValues]:
        values_R = self.gradient.of_micro_batches(PolicyLoss.token_values, std)
        return {key: value for values in values_R for key, value in values.items()}

    def _compute_waiting(self, std: float) -> None:
        self.gradient.add(_packs(self._waiting), self._values(std))
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
            "step_rate": self.trust.rate,
            "torch_rng": torch.get_rng_state(),
        }
        if self.loss.value_head is not None and self.value_optimizer is not None:
            state["value_head"] = self.loss.value_head.state_dict()
            state["value_optimizer"] = self.value_optimizer.state_dict()
        save_state(state, folder / "trainer.pt")
        if self._earlier and self.steps_taken < self.settings.total_steps:
            save_state([*self._earlier], folder / EARLIER)

    def load(self, folder: Path) -> None:
        state = read_state(folder / "trainer.pt")
        earlier = read_state(folder / EARLIER) if (folder / EARLIER).exists() else ()
        self.trained.load(folder, state)
        self.steps_taken = state["steps_taken"]
        self.trust.rate = state["step_rate"]
        self._earlier.clear()
        self._earlier.extend(earlier)
        if self.settings.continue_in_flight:
            self._to_judge = 1  # one adapter samples all of the first step's answers
        if self.loss.value_head is not None and self.value_optimizer is not None:
            self.loss.value_head.load_state_dict(state["value_head"])
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


def _of_first_pass(first: GradientSums) -> dict[str, Any]:
    """Return the entropy and the distance to the sampler, which are of the policy before the first update."""
    return {
        "entropy": first.entropy / first.tokens,
        "logprob_gap": first.gap / first.tokens,
        "logprob_gap_max": first.gap_max,
        "logprob_gap_k1": first.gap_k1 / first.tokens,
        "logprob_gap_k3": first.gap_k3 / first.tokens,
        "logprob_gap_ess": first.effective_sample_size,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _untaken(first: GradientSums, answers: int, kl_weight: float | None) -> UpdateMetrics:
    """Of a step that the gate has refused."""
    return UpdateMetrics(
        loss=0.0,
        trained_sequences=0,
        trained_tokens=0,
        dropped_sequences=answers,
        grad_norm=None,
        clip_fraction=None,
        kl=None,
        **_of_first_pass(first),
        kl_weight=kl_weight,
    )


def _packs(shares: Sequence[GroupContribution]) -> list[Pack]:
    return [share.pack for share in shares if share.pack is not None]
