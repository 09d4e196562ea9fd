"""Sampling with the trainer's own model: no second engine, no copy of the weights, any machine.

Each prompt is computed once for its whole group, all groups decode in one batch, and an answer that has ended
leaves the batch at once and is graded while the others are still being sampled. worker/model/generation.py has the
loop, and worker/model/decoding.py what is different for models whose cache cannot be copied.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.generation import DecodingBatch, RowSettings, choose
from worker.model.policy import Policy, Route
from worker.model.sizing import MAX_TOKENS_IN_FLIGHT
from worker.rollout.samplers import Answer, Sampling, from_thread
from worker.rollout.samplers.steering import Steering, rollout_of
from worker.sharing.turns import TURNS
from worker.types import Prompt


@dataclass(frozen=True)
class Wave:
    """Answers that are sampled together: these members of the groups of some prompts."""

    prompts: range
    members: range


def waves(
    prompts_P: Sequence[Prompt], sampling: Sampling, route: Route, most: int, row_tokens: int = 0
) -> Iterator[Wave]:
    """Divide all answers, so that the cache holds at most `most` tokens: whole groups, or else parts of one.

    Args:
        row_tokens: what a row takes beside its tokens (recurrent states), in tokens.
    """
    size = sampling.group_size
    longest = max(len(prompt.ids) for prompt in prompts_P)
    copied = route.forward == "rows"  # each answer has a copy of its prompt in the cache
    each = sampling.max_completion_tokens + row_tokens + (longest if copied else 0)
    shared = 0 if copied else longest
    groups = 1 if route.decode == "alone" else max(1, most // (shared + size * each))
    members = min(size, max(1, (most - shared) // each)) if groups == 1 else size
    for at in range(0, len(prompts_P), groups):
        for first in range(0, size, members):
            yield Wave(range(at, min(at + groups, len(prompts_P))), range(first, min(first + members, size)))


class TransformersSampler:
    """Implements worker.rollout.samplers.Sampler over a Policy."""

    def __init__(
        self, policy: Policy, *, max_tokens_in_flight: int = MAX_TOKENS_IN_FLIGHT, row_tokens: int = 0
    ) -> None:
        """`max_tokens_in_flight` bounds the cache: more rows than fit are sampled in several waves.

        `row_tokens`: what a row takes in the cache beside its tokens, in tokens.
        """
        self.policy = policy
        self.max_tokens_in_flight = max_tokens_in_flight
        self.row_tokens = row_tokens

    def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        return from_thread(self.answers(prompts_P, sampling))

    def answers(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> Iterator[Answer]:
        """The same without the event loop: each answer as it ends, so the shortest first."""
        most, row_tokens = self.max_tokens_in_flight, self.row_tokens
        for wave in waves(prompts_P, sampling, self.policy.route, most, row_tokens):
            yield from self._sample_wave([prompts_P[place] for place in wave.prompts], wave, sampling)

    def _sample_wave(self, prompts_P: Sequence[Prompt], wave: Wave, sampling: Sampling) -> Iterator[Answer]:
        with TURNS:
            yield from self._decode(prompts_P, wave, sampling)

    @torch.inference_mode()
    def _decode(self, prompts_P: Sequence[Prompt], wave: Wave, sampling: Sampling) -> Iterator[Answer]:
        policy, size, most = self.policy, len(wave.members), sampling.max_completion_tokens
        rows = len(prompts_P) * size
        batch = DecodingBatch(
            policy,
            policy.decoding([prompt.ids for prompt in prompts_P], size),
            [RowSettings(sampling.temperature, most, policy.stop_ids)] * rows,
            Steering.of(policy, sampling, rows),
            self._choose,
        )
        draws_RT = self._draws([sampling.seed(prompt, g) for prompt in prompts_P for g in wave.members], most)
        draws_RT = draws_RT.to(policy.device)
        row_R = torch.arange(rows, device=policy.device)  # which answer each live row is
        tokens = torch.zeros(rows, most, dtype=torch.int64, device=policy.device)
        logprobs = torch.zeros(rows, most, device=policy.device)
        for t in range(most):
            step = batch.step(batch.logits(), draws_RT[row_R, t])
            for cause in step.failed.values():
                raise cause
            tokens[row_R, t], logprobs[row_R, t] = step.token_R, step.logprob_R
            for row in row_R[step.last_R].tolist():
                ids, logps = tokens[row, : t + 1].tolist(), logprobs[row, : t + 1].tolist()
                rollout = rollout_of(policy, ids, logps, sampling)
                yield Answer(wave.prompts[row // size], wave.members[row % size], rollout)
            live = (~step.last_R).nonzero()[:, 0]
            if len(live) == 0:
                return
            if len(live) < len(row_R):
                batch.keep(live)
                row_R = row_R[live]
            batch.advance()
            TURNS.offer()

    def _draws(self, seeds: Sequence[int], tokens: int) -> Tensor:
        """Uniform numbers [R, T], a row from each answer's own seed: its text depends on its batch by rounding only.

        worker/model/support.py replays given tokens by replacing this and `_choose`.
        """
        rows = [torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(rows)

    _choose = staticmethod(choose)
