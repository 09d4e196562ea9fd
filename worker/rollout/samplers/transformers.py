"""Sampling with the trainer's own model: no second engine, no copy of the weights, any machine.

Each prompt is computed once for its whole group, all groups decode in one batch, and an answer that has ended
leaves the batch at once and is graded while the others are still being sampled. worker/model/decoding.py has what is
different for models whose cache cannot be copied.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.policy import Policy, Route
from worker.model.sizing import MAX_TOKENS_IN_FLIGHT
from worker.rollout.samplers import Answer, Sampling, from_thread
from worker.rollout.samplers.steering import Steering, rollout_of
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

    @torch.inference_mode()
    def _sample_wave(self, prompts_P: Sequence[Prompt], wave: Wave, sampling: Sampling) -> Iterator[Answer]:
        policy, size = self.policy, len(wave.members)
        decoding = policy.decoding([prompt.ids for prompt in prompts_P], size)
        hidden = decoding.start()
        rows = len(prompts_P) * size

        draws_RT = _draws([sampling.seed(prompt, g) for prompt in prompts_P for g in wave.members], sampling)
        draws_RT = draws_RT.to(policy.device)
        stop = torch.tensor(sorted(policy.stop_ids), device=policy.device)
        row_R = torch.arange(rows, device=policy.device)  # which answer each live row is
        tokens = torch.zeros(rows, sampling.max_completion_tokens, dtype=torch.int64, device=policy.device)
        logprobs = torch.zeros(rows, sampling.max_completion_tokens, device=policy.device)
        steering = Steering.of(policy, sampling, rows)
        for t in range(sampling.max_completion_tokens):
            logits = policy.logits(hidden)
            if steering is not None:
                logits = steering.masked(logits, row_R.tolist())
            token, logprob = self._choose(logits, row_R, t, draws_RT, sampling.temperature)
            if steering is not None:
                steering.take(row_R.tolist(), token.tolist())
            tokens[row_R, t], logprobs[row_R, t] = token, logprob
            stopped = torch.isin(token, stop)
            last = t + 1 == sampling.max_completion_tokens
            for row in (row_R if last else row_R[stopped]).tolist():
                ids, logps = tokens[row, : t + 1].tolist(), logprobs[row, : t + 1].tolist()
                rollout = rollout_of(policy, ids, logps, sampling)
                yield Answer(wave.prompts[row // size], wave.members[row % size], rollout)
            live = (~stopped).nonzero()[:, 0]
            if last or len(live) == 0:
                return
            if len(live) < len(row_R):
                decoding.keep(live)
                row_R, token = row_R[live], token[live]
            hidden = decoding.next(token)

    def _choose(
        self, logits_RV: Tensor, row_R: Tensor, t: int, draws_RT: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Token t of each live row and its log-probability; worker/model/support.py replays given tokens here."""
        return choose(logits_RV, draws_RT[row_R, t], temperature)


def _draws(seeds: Sequence[int], sampling: Sampling) -> Tensor:
    """Uniform numbers [R, T], a row from each answer's own seed: its text depends on its batch by rounding only."""
    rows = [
        torch.rand(sampling.max_completion_tokens, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    return torch.stack(rows)


def choose(logits_RV: Tensor, draw_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The next token [R] and its log-probability [R] under the distribution it was drawn from.

    By inversion: the first token at which the cumulative probability passes the draw. Greedy (temperature 0)
    takes the best one and reports its log-probability at temperature 1.
    """
    if temperature == 0:
        logp_RV = logits_RV.log_softmax(-1)
        token_R = logits_RV.argmax(-1)
    else:
        logp_RV = (logits_RV / temperature).log_softmax(-1)
        cumulative = logp_RV.exp().cumsum(-1)
        # Scaled by the last entry, because a rounded sum may stop short of 1 and leave a draw nowhere to land.
        token_R = torch.searchsorted(cumulative, (draw_R * cumulative[:, -1])[:, None], right=True)[:, 0]
        token_R = token_R.clamp(max=logits_RV.shape[-1] - 1)
    return token_R, logp_RV.gather(-1, token_R[:, None])[:, 0]
