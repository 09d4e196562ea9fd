"""The parts of a TrainingSequence of an episode: its branches, and the piece that a division made of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.types import TrainingSequence


@dataclass(frozen=True)
class Branch:
    """Consecutive tokens of a branched episode, which see the prompt, the branches before them on their path, and
    themselves."""

    parent: int | None  # the index of an earlier branch; None: the prompt; NEW_ROOT: nothing
    tokens: int


@dataclass(frozen=True)
class AnswerPiece:
    """The part of an episode that a TrainingSequence has, after its pack was divided."""

    undivided: "TrainingSequence"
    places: tuple[int, ...]  # of its trained tokens, among the trained tokens of the undivided one
