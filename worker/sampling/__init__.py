"""The sampler interface of the training loop. Implementations: transformers.py, vllm.py, and a fake in the tests."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from worker.device_work import DEVICE_WORK
from worker.types import Prompt, Rollout


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: `group_size` answers for each prompt, each with its own seed."""

    group_size: int
    temperature: float  # 0 is greedy
    max_completion_tokens: int
    job_seed: int
    step: int
    response_schema: str = (
        ""  # a schema (core/response_format.py): answers are JSON of it, and stop where it ends
    )
    thinking_budget: int | None = None  # tokens after which a thought is closed
    # The steps that the policy has learned from, if answers in flight may continue with a newer one.
    policy_steps: int | None = None
    batch: str = ""  # names the prompts of the step among all that the job samples, in the ids of episodes

    def seed(self, prompt: Prompt, member: int) -> int:
        """Return the seed of one answer. It does not depend on the batch, so it is the same after a crash.

        A row that the batch repeats has other seeds each time: otherwise its groups would be equal.
        """
        return _seed(self._key(prompt, member))

    def turn_seed(self, prompt: Prompt, member: int) -> int:
        """Return the seed of one turn, which depends on the tokens before it too."""
        ask = f"/ask-{prompt.ask}" if prompt.ask else ""
        return _seed(f"{self._key(prompt, member)}/{prompt.ids}{ask}")

    def _key(self, prompt: Prompt, member: int) -> str:
        repeat = f"/repeat-{prompt.repeat}" if prompt.repeat else ""
        return f"{self.job_seed}/{self.step}/{prompt.line}/{member}{repeat}"


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Answer:
    """A rollout and its place: member `member` of the group of prompt number `prompt`."""

    prompt: int
    member: int
    rollout: Rollout


class Sampler(Protocol):
    def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        """Yield `group_size` answers per prompt, each as it completes, all from the current policy."""
        ...


class SampledTurns(Protocol):
    """Requests for single answers, all from the policy as it was when `turns` was called."""

    async def next(self, prompt: Prompt, member: int) -> Rollout:
        """Sample one answer, also while others are being sampled.

        It depends on the prompt, its line and the member, and not on the time of the call. Canceling it aborts it.
        """
        ...


class TurnSampler(Sampler, Protocol):
    """Also samples the turns of conversations. One `sample` or `turns` at a time."""

    def turns(self, sampling: Sampling) -> AbstractAsyncContextManager[SampledTurns]:
        """Sample turns in the context. Of `sampling`, the size of groups does not matter."""
        ...


def grouped(answers: Iterable[Answer], prompts: int, group_size: int) -> list[tuple[Rollout, ...]]:
    """Answers in any order -> the rollouts of each prompt, members in order."""
    placed = {(answer.prompt, answer.member): answer.rollout for answer in answers}
    return [tuple(placed[prompt, member] for member in range(group_size)) for prompt in range(prompts)]


async def from_thread(answers: Iterator[Answer]) -> AsyncIterator[Answer]:
    """Run an iterator that computes in its own thread and yield its items.

    Its errors are raised here. If the consumer stops early, the thread stops at its next item.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Answer | BaseException | None] = asyncio.Queue()
    abandoned = threading.Event()

    def put(item: Answer | BaseException | None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, item)

    def work() -> None:
        try:
            with DEVICE_WORK:
                for answer in answers:
                    if abandoned.is_set():
                        break
                    put(answer)
            put(None)
        except BaseException as cause:
            put(cause)
        finally:
            # Its memory is free before the consumer continues.
            if isinstance(answers, Generator):
                answers.close()

    running = asyncio.create_task(asyncio.to_thread(work))
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        abandoned.set()
        await running
