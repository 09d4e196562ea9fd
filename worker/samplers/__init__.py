"""What the loop needs of a sampler. Implementations: transformers.py; tests have a fake of their own."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.types import Prompt, Rollout


@dataclass(frozen=True)
class Sampling:
    """How to sample: `group_size` answers a prompt, each with a seed of its own."""

    group_size: int
    temperature: float  # 0 is greedy
    max_completion_tokens: int
    job_seed: int
    step: int

    def seed(self, prompt: Prompt, member: int) -> int:
        """The seed of one answer: the same again after a crash, whatever else is in the batch."""
        key = f"{self.job_seed}/{self.step}/{prompt.line}/{member}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


class Sampler(Protocol):
    async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> list[tuple[Rollout, ...]]:
        """`group_size` rollouts for each prompt, in order, all from the present policy."""
        ...
