"""Sampling with the trainer's own model: no second engine, no copy of the weights, any machine.

Each prompt is computed once for its whole group, all groups decode in one batch, and an answer that has ended
leaves the batch at once and is graded while the others are still being sampled.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from worker.model.attention import GroupCache
from worker.model.policy import Policy
from worker.model.sizing import MAX_TOKENS_IN_FLIGHT
from worker.rollout.samplers import Answer, Sampling, from_thread
from worker.rollout.samplers.json_schema import Held
from worker.types import FinishReason, Prompt, Rollout


class TransformersSampler:
    """Implements worker.rollout.samplers.Sampler over a Policy."""

    def __init__(self, policy: Policy, *, max_tokens_in_flight: int = MAX_TOKENS_IN_FLIGHT) -> None:
        """`max_tokens_in_flight` bounds the cache: more rows than fit are sampled in several waves."""
        self.policy = policy
        self.max_tokens_in_flight = max_tokens_in_flight

    def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        return from_thread(self.answers(prompts_P, sampling))

    def answers(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> Iterator[Answer]:
        """The same without the event loop: each answer as it ends, so the shortest first."""
        first = 0
        for wave in self._waves(prompts_P, sampling):
            for answer in self._sample_wave(wave, sampling):
                yield replace(answer, prompt=first + answer.prompt)
            first += len(wave)

    def _waves(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> Iterator[Sequence[Prompt]]:
        longest = max(len(prompt.ids) for prompt in prompts_P)
        cost = longest + sampling.group_size * sampling.max_completion_tokens
        size = max(1, self.max_tokens_in_flight // cost)
        for at in range(0, len(prompts_P), size):
            yield prompts_P[at : at + size]

    @torch.inference_mode()
    def _sample_wave(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> Iterator[Answer]:
        policy, size = self.policy, sampling.group_size
        cache, hidden_P = self._prefill(prompts_P)
        group_R = torch.arange(len(prompts_P), device=policy.device).repeat_interleave(size)
        cache.expand(group_R)
        position_R = torch.tensor([len(prompt.ids) for prompt in prompts_P], device=policy.device)[group_R]

        draws_RT = _draws([sampling.seed(prompt, g) for prompt in prompts_P for g in range(size)], sampling)
        draws_RT = draws_RT.to(policy.device)
        stop = torch.tensor(sorted(policy.stop_ids), device=policy.device)
        row_R = torch.arange(len(group_R), device=policy.device)  # which answer each live row is
        tokens = torch.zeros(
            len(group_R), sampling.max_completion_tokens, dtype=torch.int64, device=policy.device
        )
        logprobs = torch.zeros(len(group_R), sampling.max_completion_tokens, device=policy.device)
        hidden = hidden_P[group_R]
        held = Held(policy.vocabulary, sampling.held_to, len(group_R)) if sampling.held_to else None
        for t in range(sampling.max_completion_tokens):
            logits = policy.logits(hidden)
            if held is not None:
                logits = held.masked(logits, row_R.tolist())
            token, logprob = self._choose(logits, row_R, t, draws_RT, sampling.temperature)
            if held is not None:
                held.take(row_R.tolist(), token.tolist())
            tokens[row_R, t], logprobs[row_R, t] = token, logprob
            stopped = torch.isin(token, stop)
            last = t + 1 == sampling.max_completion_tokens
            for row in (row_R if last else row_R[stopped]).tolist():
                yield self._answer(row, tokens[row, : t + 1], logprobs[row, : t + 1], size)
            live = (~stopped).nonzero()[:, 0]
            if last or len(live) == 0:
                return
            if len(live) < len(row_R):
                cache.keep(live)
                row_R, position_R, token = row_R[live], position_R[live], token[live]
            cache.start_token()
            hidden = policy.hidden(token[:, None], position_R[:, None], None, cache)[:, 0]
            position_R = position_R + 1

    def _prefill(self, prompts_P: Sequence[Prompt]) -> tuple[GroupCache, Tensor]:
        """The prompts' keys and values, and the hidden state [P, h] that predicts each first token."""
        device = self.policy.device
        lengths = torch.tensor([len(prompt.ids) for prompt in prompts_P], device=device)
        width = int(lengths.max())
        input_ids = torch.zeros(len(prompts_P), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts_P):
            input_ids[row, : len(prompt.ids)] = torch.tensor(prompt.ids)
        # Padding stands on the right: causal attention alone keeps it out of every real token's sight.
        mask = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None, None]
        positions = torch.arange(width, device=device)[None].expand(len(prompts_P), -1)
        cache = GroupCache(lengths)
        hidden = self.policy.hidden(
            input_ids.to(device), positions, mask.expand(len(prompts_P), 1, -1, -1), cache
        )
        return cache, hidden[torch.arange(len(prompts_P), device=device), lengths - 1]

    def _choose(
        self, logits_RV: Tensor, row_R: Tensor, t: int, draws_RT: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Token t of each live row and its log-probability; worker/model/support.py replays given tokens here."""
        return choose(logits_RV, draws_RT[row_R, t], temperature)

    def _answer(self, row: int, tokens: Tensor, logprobs: Tensor, group_size: int) -> Answer:
        ids = tokens.tolist()
        reason: FinishReason = "stop" if ids[-1] in self.policy.stop_ids else "length"
        rollout = Rollout(tuple(ids), tuple(logprobs.tolist()), self.policy.text(ids), reason)
        return Answer(row // group_size, row % group_size, rollout)


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
