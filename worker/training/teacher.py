"""The teacher of a distillation job: what log-probability it gives to each token that the student sampled."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graders.types import TokenUsage
from worker.model.batch import by_answer, micro_batches, tensors_of
from worker.model.policy import Policy
from worker.model.token_logprobs import logprobs
from worker.model.tree import read_sequence
from worker.training.row_cost import row_cost
from worker.types import Pack, Prompt, Rollout


class Teacher(Protocol):
    def logprobs(
        self, answers_P: Sequence[tuple[Prompt, Sequence[Rollout]]], temperature: float
    ) -> list[list[tuple[float, ...]]]:
        """For each answer to each prompt, the log-probabilities of its tokens at this temperature."""
        ...


class TopTeacher(Protocol):
    """A teacher that tells its likeliest tokens, and not the probabilities of its whole vocabulary."""

    def with_top(self, packs: Sequence[Pack], top_k: int) -> list[Pack]:
        """The packs, with this many tokens of the teacher (`TrainingSequence.top`) at each token that is learned."""
        ...

    def usage(self) -> TokenUsage:
        """The tokens that it has read and written since the last call."""
        ...


@dataclass(frozen=True)
class TeacherPolicy:
    """The policy that is the teacher inside of `teaching`: the student's own under other weights, or a second one."""

    policy: Policy
    adapter: list[Tensor] | None = None  # on the policy's base model; None: that is the teacher itself

    def teaching(self) -> AbstractContextManager[None]:
        return self.policy.as_base() if self.adapter is None else self.policy.with_weights(self.adapter)


@dataclass
class PolicyTeacher:
    """Implements Teacher by a policy: the student's own under other weights, or a second one.

    Must not be called while the policy samples or learns.
    """

    policy: Policy
    teaching: Callable[[], AbstractContextManager[None]]  # the policy is the teacher inside of this context
    token_budget: int
    beat: Callable[[], None] = lambda: None

    @torch.no_grad()
    def logprobs(
        self, answers_P: Sequence[tuple[Prompt, Sequence[Rollout]]], temperature: float
    ) -> list[list[tuple[float, ...]]]:
        policy = self.policy
        sequences_PG = [[read_sequence(rollout) for rollout in rollouts_G] for _, rollouts_G in answers_P]
        packs = [
            Pack(prompt.ids, read_G)
            for (prompt, _), sequences_G in zip(answers_P, sequences_PG, strict=True)
            if (read_G := tuple(sequence for sequence in sequences_G if sequence.trained_tokens))
        ]
        # Micro-batches order packs by length and divide them between answers, which stay the same objects.
        found: dict[int, tuple[float, ...]] = {}
        rows = policy.route.forward == "rows"
        with self.teaching():
            for part in micro_batches(
                packs, self.token_budget, policy.device, rows=rows, cost=row_cost(policy)
            ):
                logp_M = logprobs(policy, tensors_of(part, policy.device), temperature).cpu()
                for answer, logp_T in by_answer(part, logp_M):
                    found[id(answer.undivided)] = tuple(logp_T.tolist())
                self.beat()
        return [[found.get(id(sequence), ()) for sequence in sequences_G] for sequences_G in sequences_PG]
