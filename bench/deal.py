"""How evenly a step's answers are distributed over the ranks of a run (worker/training/partition.py).

Batches of the default size, of which 60 % of the groups have signal: eight prompts of 100 to 300 tokens with eight
answers each of 50 to 700 tokens. All ranks wait for the one with the most tokens.

`busy_N` is the share of the time that the average of N ranks computes. `useful_N` leaves out prompts that are computed
once more because their group was cut. `whole_N` is `busy_N` if groups were not cut.
"""

import random
from collections.abc import Sequence

from bench.report import report
from bench.sizes import sized
from worker.training.partition import deal
from worker.types import Pack, TrainingSequence

STEPS, GROUPS, GROUP_SIZE, MIXED = sized(200, 2), 8, 8, 0.6
RANKS = (2, 4, 8)


def main() -> None:
    draw = random.Random(0)
    steps = [packs for packs in (step(draw) for _ in range(STEPS)) if packs]
    figures = {}
    for ranks in RANKS:
        shares = [[tokens(hand) for hand in deal(packs, ranks)] for packs in steps]
        figures[f"busy_{ranks}"] = mean([sum(share) / (ranks * max(share)) for share in shares])
        figures[f"useful_{ranks}"] = mean(
            [tokens(packs) / (ranks * max(share)) for packs, share in zip(steps, shares, strict=True)]
        )
        figures[f"whole_{ranks}"] = mean([tokens(packs) / (ranks * longest(packs, ranks)) for packs in steps])
    report("deal", figures)


def step(draw: random.Random) -> list[Pack]:
    return [group(draw) for _ in range(GROUPS) if draw.random() < MIXED]


def group(draw: random.Random) -> Pack:
    answers = [answer(draw.randint(50, 700)) for _ in range(GROUP_SIZE)]
    return Pack((0,) * draw.randint(100, 300), tuple(answers))


def answer(tokens: int) -> TrainingSequence:
    return TrainingSequence((0,) * tokens, (0.0,) * tokens, (1.0,) * tokens, 1.0)


def longest(packs: Sequence[Pack], ranks: int) -> int:
    """Tokens of the largest share if whole groups are dealt: the longest first, each to the rank with the fewest."""
    shares = [0] * ranks
    for pack in sorted(packs, key=lambda pack: pack.tokens, reverse=True):
        shares[shares.index(min(shares))] += pack.tokens
    return max(shares)


def tokens(packs: Sequence[Pack]) -> int:
    return sum(pack.tokens for pack in packs)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
