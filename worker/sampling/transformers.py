"""Sampling with the trainer's own model: no second engine, no copy of the weights, any machine.

Each prompt is computed once for its whole group, all groups decode in one batch, and an answer that has ended
leaves the batch at once and is graded while the others are still being sampled. worker/model/generation.py has the
loop, and worker/model/decoding.py what is different for models whose cache cannot be copied.
"""

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.device_work import DEVICE_WORK
from worker.model.generation import DecodingBatch, RowSettings, choose
from worker.model.policy import Policy, Route
from worker.model.sizing import MAX_TOKENS_IN_FLIGHT
from worker.model.token_constraints import TokenConstraints, rollout_of
from worker.out_of_memory import naming_place
from worker.sampling import Answer, SampledTurns, Sampling, from_thread
from worker.types import Prompt, Rollout


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
    """Implements worker.sampling.TurnSampler over a Policy."""

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

    @asynccontextmanager
    async def turns(self, sampling: Sampling) -> AsyncIterator[SampledTurns]:
        """As worker.sampling.TurnSampler does. The policy must not change in the context."""
        turns = TransformersTurns(self, sampling)
        working = asyncio.create_task(asyncio.to_thread(turns.work))
        try:
            yield turns
        finally:
            turns.close()
            await working

    def _sample_wave(self, prompts_P: Sequence[Prompt], wave: Wave, sampling: Sampling) -> Iterator[Answer]:
        size = len(wave.members)
        seeds = [sampling.seed(prompt, member) for prompt in prompts_P for member in wave.members]
        with naming_place("sampler", self.policy.device.type):
            for step in self.steps(prompts_P, size, seeds, sampling):
                for row, rollout in step:
                    yield Answer(wave.prompts[row // size], wave.members[row % size], rollout)

    @torch.inference_mode()
    def steps(
        self, prompts_P: Sequence[Prompt], size: int, seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[list[tuple[int, Rollout]]]:
        """Decode `size` answers to each prompt. Yields the rows that have ended after each token, often none."""
        policy, most = self.policy, sampling.max_completion_tokens
        rows = len(prompts_P) * size
        batch = DecodingBatch(
            policy,
            policy.decoding([prompt.ids for prompt in prompts_P], size),
            [RowSettings(sampling.temperature, most, policy.stop_ids)] * rows,
            TokenConstraints.of(policy, sampling, rows),
            self._choose,
        )
        draws_RT = self._draws(seeds, most).to(policy.device)
        row_R = torch.arange(rows, device=policy.device)  # which answer each live row is
        tokens = torch.zeros(rows, most, dtype=torch.int64, device=policy.device)
        logprobs = torch.zeros(rows, most, device=policy.device)
        for t in range(most):
            step = batch.step(batch.logits(), draws_RT[row_R, t])
            for cause in step.failed.values():
                raise cause
            tokens[row_R, t], logprobs[row_R, t] = step.token_R, step.logprob_R
            ended = []
            for row in row_R[step.last_R].tolist():
                ids, logps = tokens[row, : t + 1].tolist(), logprobs[row, : t + 1].tolist()
                ended.append((row, rollout_of(policy, ids, logps, sampling)))
            yield ended
            live = (~step.last_R).nonzero()[:, 0]
            if len(live) == 0:
                return
            if len(live) < len(row_R):
                batch.keep(live)
                row_R = row_R[live]
            batch.advance()

    def _draws(self, seeds: Sequence[int], tokens: int) -> Tensor:
        """Uniform numbers [R, T], a row from each answer's own seed: its text depends on its batch by rounding only.

        worker/checks/compatibility.py replays given tokens by replacing this and `_choose`.
        """
        rows = [torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(rows)

    _choose = staticmethod(choose)


@dataclass(frozen=True)
class WantedTurn:
    """A call of `SampledTurns.next`."""

    prompt: Prompt
    member: int
    rollout: "Future[Rollout]" = field(default_factory=Future)

    def fail(self, cause: Exception) -> None:
        """Raise the error in `next`, unless the turn has ended."""
        if not self.rollout.done() and self.rollout.set_running_or_notify_cancel():
            self.rollout.set_exception(cause)


class TransformersTurns:
    """Implements worker.sampling.SampledTurns. `work` computes in a thread.

    Turns that are requested together are a wave. A later one is a new wave, and each wave computes a token in turn.
    """

    def __init__(self, sampler: TransformersSampler, sampling: Sampling) -> None:
        self._sampler, self._sampling = sampler, sampling
        self._device = sampler.policy.device.type
        self._calls: queue.SimpleQueue[WantedTurn | None] = queue.SimpleQueue()
        self._waiting: deque[WantedTurn] = deque()
        self._waves: dict[Iterator[list[tuple[int, Rollout]]], list[WantedTurn]] = {}
        self._failure: Exception | None = None  # of `work`

    async def next(self, prompt: Prompt, member: int) -> Rollout:
        wanted = WantedTurn(prompt, member)
        self._calls.put(wanted)
        if self._failure is not None:  # read after the call is in the queue, which `_fail` empties later
            raise self._failure
        return await asyncio.wrap_future(wanted.rollout)

    def close(self) -> None:
        self._calls.put(None)

    def work(self) -> None:
        """Compute until `close` is called. An error outside of a wave ends this, and is raised in every `next`."""
        try:
            while self._take_calls():
                with DEVICE_WORK, naming_place("sampler", self._device):
                    self._begin()
                    for wave in [*self._waves]:
                        self._step(wave)
        except Exception as cause:
            self._fail(cause)
        for wanted in self._unfinished():
            wanted.rollout.cancel()

    def _fail(self, cause: Exception) -> None:
        self._failure = cause
        with suppress(queue.Empty):
            while True:
                wanted = self._calls.get_nowait()
                if wanted is not None:
                    self._waiting.append(wanted)
        for wanted in self._unfinished():
            wanted.fail(cause)

    def _unfinished(self) -> list[WantedTurn]:
        return [*self._waiting, *(one for wave in self._waves.values() for one in wave)]

    def _take_calls(self) -> bool:
        """Take the calls so far; wait for one if there is nothing to compute. False: there will be none."""
        waits = not self._waves and not self._waiting
        while True:
            try:
                wanted = self._calls.get(block=waits)
            except queue.Empty:
                return True
            if wanted is None:
                return False
            self._waiting.append(wanted)
            waits = False

    def _begin(self) -> None:
        """Begin a wave of those that fit beside the others."""
        most = self._sampler.max_tokens_in_flight
        used = sum(
            self._tokens(len(wave), max(len(one.prompt.ids) for one in wave)) for wave in self._waves.values()
        )
        self._waiting = deque(one for one in self._waiting if not one.rollout.cancelled())
        begun: list[WantedTurn] = []
        longest = 0
        for wanted in self._waiting:
            if begun and self._sampler.policy.route.decode == "alone":
                break
            longest = max(longest, len(wanted.prompt.ids))
            if used + self._tokens(len(begun) + 1, longest) > most and (begun or self._waves):
                break
            begun.append(wanted)
        if begun:
            seeds = [self._sampling.turn_seed(one.prompt, one.member) for one in begun]
            wave = self._sampler.steps([one.prompt for one in begun], 1, seeds, self._sampling)
            self._waves[wave] = begun
            for _ in begun:  # not before: an error leaves no turn out
                self._waiting.popleft()

    def _tokens(self, rows: int, longest: int) -> int:
        """The tokens in the cache of a wave, whose rows are all as long as the one with its longest prompt."""
        return rows * (longest + self._sampling.max_completion_tokens + self._sampler.row_tokens)

    def _step(self, wave: Iterator[list[tuple[int, Rollout]]]) -> None:
        wanted = self._waves[wave]
        try:
            with naming_place("sampler", self._device):
                step = next(wave)
            for row, rollout in step:
                if wanted[row].rollout.set_running_or_notify_cancel():
                    wanted[row].rollout.set_result(rollout)
            if all(one.rollout.done() for one in wanted):
                del self._waves[wave]
        except Exception as cause:
            del self._waves[wave]
            for one in wanted:
                one.fail(cause)
