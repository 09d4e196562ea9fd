"""The sampler interface of the training loop. Implementations: transformers.py, vllm.py, and a fake in the tests."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.types import Prompt, Rollout


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: `group_size` answers for each prompt, each with its own seed."""

    group_size: int
    temperature: float  # 0 is greedy
    max_completion_tokens: int
    job_seed: int
    step: int
    held_to: str = ""  # a schema (core/response_format.py): answers are JSON of it, and stop where it ends
    thinking_budget: int | None = None  # tokens after which a thought is closed
    # The steps that the policy has learned from, if answers in flight may continue with a newer one.
    policy_steps: int | None = None

    def seed(self, prompt: Prompt, member: int) -> int:
        """Return the seed of one answer. It does not depend on the batch, so it is the same after a crash."""
        key = f"{self.job_seed}/{self.step}/{prompt.line}/{member}"
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


def grouped(answers: Iterable[Answer], prompts: int, group_size: int) -> list[tuple[Rollout, ...]]:
    """Answers in any order -> the rollouts of each prompt, members in order."""
    placed = {(answer.prompt, answer.member): answer.rollout for answer in answers}
    return [tuple(placed[prompt, member] for member in range(group_size)) for prompt in range(prompts)]


async def from_thread(answers: Iterator[Answer]) -> AsyncIterator[Answer]:
    """Run a blocking iterator in its own thread and yield its items.

    Its errors are raised here. If the consumer stops early, the thread stops at its next item.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Answer | BaseException | None] = asyncio.Queue()
    abandoned = threading.Event()

    def put(item: Answer | BaseException | None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, item)

    def work() -> None:
        try:
            for answer in answers:
                if abandoned.is_set():
                    break
                put(answer)
            put(None)
        except BaseException as cause:
            put(cause)
        finally:
            # In this thread, which may have a turn on the device (worker/sharing/turns.py).
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
