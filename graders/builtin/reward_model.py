"""reward_model: the score of a reward model of the project. An extension of OpenAI's API.

The worker of a job computes the scores of all answers of a step at once, on the device that trains; they are in
`sample.model_scores` when the answers are graded. Of a process reward model, the score of an answer is that of its
worst step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graders.template import quoted
from graders.types import ErrorKind, Grade, Item, Sample


@dataclass(frozen=True)
class RewardModel:
    name: str
    model: str
    type: ClassVar[str] = "reward_model"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        score = sample.model_scores.get(self.model)
        if isinstance(score, float):
            return Grade(score)
        if isinstance(score, tuple):
            return Grade(min(step.score for step in score), steps=score)
        why = score or "answers are scored in reinforcement jobs only"
        return Grade(
            None, f"The reward model {quoted(self.model)} gave no score: {why}", ErrorKind.other_error
        )
