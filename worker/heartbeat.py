"""Progress heartbeat, by which the supervisor tells a hung run from a long step.

A live process may still hang. Every answer, grade and update touches a file, and a run that stops touching it is hung.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from graders.types import Grade, Grader, Item, Sample
from worker.types import Group, Prompt, UpdateMetrics

# These modules import torch, and worker/supervisor/validation.py imports this module without torch.
if TYPE_CHECKING:
    from graders.tools.protocol import ToolRequest, ToolResult, Tools
    from worker.interfaces import Trainer
    from worker.sampling import Answer, Sampler, Sampling

Beat = Callable[[], None]


def heartbeat_to(path: Path) -> Beat:
    """Touches the file at `path`."""
    return lambda: os.utime(path)


class ProgressFile:
    """Tells for how long the file of `heartbeat_to` is untouched, by our own clock: that of the file may jump."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._seen = path.stat().st_mtime_ns
        self._since = clock()

    def still_for(self) -> float:
        """Return the seconds since the call that first saw the latest progress."""
        now = self.path.stat().st_mtime_ns
        if now != self._seen:
            self._seen, self._since = now, self._clock()
        return self._clock() - self._since


class HeartbeatSampler:
    def __init__(self, sampler: "Sampler", beat: Beat) -> None:
        self._sampler, self._beat = sampler, beat

    def sample(self, prompts_P: Sequence[Prompt], sampling: "Sampling") -> "AsyncIterator[Answer]":
        # Called here and not when the first answer is wanted: it reads the policy as it is now.
        return self._watched(self._sampler.sample(prompts_P, sampling))

    async def _watched(self, answers: "AsyncIterator[Answer]") -> "AsyncIterator[Answer]":
        async for answer in answers:
            self._beat()
            yield answer


class HeartbeatGrader:
    """Drops what models were asked and replied: a step has thousands of grades, and only evals show it."""

    def __init__(self, grader: Grader, beat: Beat) -> None:
        self._grader, self._beat = grader, beat
        self.name, self.type = grader.name, grader.type

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            return (await self._grader.grade(sample, item)).without_judges()
        finally:
            self._beat()


TOOL_BEAT_S = 30.0


class HeartbeatTools:
    """Beats while a tool works, which may take minutes."""

    def __init__(self, tools: "Tools", beat: Beat) -> None:
        self._tools, self._beat = tools, beat

    async def call(self, call: "ToolRequest") -> "ToolResult":
        calling = asyncio.create_task(self._tools.call(call))
        try:
            while not calling.done():
                await asyncio.wait([calling], timeout=TOOL_BEAT_S)
                self._beat()
            return calling.result()
        finally:
            calling.cancel()

    async def end(self, trace_id: str) -> None:
        await self._tools.end(trace_id)


class HeartbeatTrainer:
    def __init__(self, trainer: "Trainer", beat: Beat) -> None:
        self._trainer, self._beat = trainer, beat

    def add(self, group: Group) -> None:
        self._trainer.add(group)
        self._beat()

    def step(self) -> UpdateMetrics:
        update = self._trainer.step()
        self._beat()
        return update

    def save(self, folder: Path) -> None:
        self._trainer.save(folder)
        self._beat()

    def load(self, folder: Path) -> None:
        self._trainer.load(folder)
        self._beat()

    def policy_before(self, steps: int) -> AbstractContextManager[int]:
        return self._trainer.policy_before(steps)
