"""Distribute the packs of a step over the ranks of a run. Pure functions.

Ranks wait for the slowest one at the end of each pass, so the largest share decides. Whole groups are too coarse: with
the default batch of eight prompts and 60 % of groups with signal, ranks 6 to 8 have nothing to do. So a pack is cut
between answers, and its prompt is computed once more on each rank that has a part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.model.tree import row_tokens
from worker.types import Pack
from worker.types import TrainingSequence as Answer


@dataclass
class _RankShare:
    """The share of one rank while packs are dealt."""

    packs: list[tuple[tuple[int, ...], list[Answer]]] = field(default_factory=list)
    tokens: int = 0  # that are computed for them


def deal(packs: Sequence[Pack], ranks: int, *, rows: bool = False) -> list[list[Pack]]:
    """Return a share for each rank, so that the largest one has as few tokens as possible. Rank 0 gets the first.

    A binary search finds the least capacity with which `ranks` bins hold all answers; `_fill` fills the bins one after
    the other with the packs in order, so that at most one pack is cut at each border between two ranks. Whole packs
    are better where they happen to fill the ranks evenly.

    Args:
        rows: each path of an answer is computed in a separate row, with its prompt.
    """
    if not packs:
        return [[] for _ in range(ranks)]
    ordered = sorted(packs, key=lambda pack: pack.tokens, reverse=True)
    choices = [_whole_packs(ordered, ranks, rows), _fit(ordered, ranks, rows), _fit(packs, ranks, rows)]
    best = min(choices, key=_largest)
    shares = [[Pack(prompt, tuple(answers)) for prompt, answers in share.packs] for share in best]
    return shares + [[] for _ in range(ranks - len(shares))]


def deal_whole(packs: Sequence[Pack], ranks: int, *, rows: bool = False) -> list[list[Pack]]:
    """As `deal`, but no pack is cut: a loss couples its answers."""
    ordered = sorted(packs, key=lambda pack: _tokens(pack, rows), reverse=True)
    return [
        [Pack(prompt, tuple(answers)) for prompt, answers in share.packs]
        for share in _whole_packs(ordered, ranks, rows)
    ]


def _largest(shares: Sequence[_RankShare]) -> int:
    return max(share.tokens for share in shares)


def _whole_packs(packs: Sequence[Pack], ranks: int, rows: bool) -> list[_RankShare]:
    """Give each pack to the rank with the fewest tokens."""
    shares = [_RankShare() for _ in range(ranks)]
    for pack in packs:
        share = min(shares, key=lambda share: share.tokens)
        share.packs.append((pack.prompt_ids, list(pack.sequences)))
        share.tokens += _tokens(pack, rows)
    return shares


def _tokens(pack: Pack, rows: bool) -> int:
    if rows:
        return sum(row_tokens(answer, len(pack.prompt_ids)) for answer in pack.sequences)
    return len(pack.prompt_ids) + sum(answer.read_tokens for answer in pack.sequences)


@dataclass(frozen=True)
class _Costs:
    """The answers of a pack, longest first."""

    pack: Pack
    prompt: int  # tokens that a rank computes before its first answer of the pack
    answers: list[tuple[int, Answer]]  # with the tokens that are computed for each, in rows with its prompts

    @classmethod
    def of(cls, pack: Pack, rows: bool) -> "_Costs":
        prompt = len(pack.prompt_ids)
        costs = [
            (row_tokens(answer, prompt) if rows else answer.read_tokens, answer) for answer in pack.sequences
        ]
        return cls(pack, 0 if rows else prompt, sorted(costs, key=lambda cost: cost[0], reverse=True))


def _fit(packs: Sequence[Pack], ranks: int, rows: bool) -> list[_RankShare]:
    high = sum(_tokens(pack, rows) for pack in packs)
    low = -(-sum(answer.read_tokens for pack in packs for answer in pack.sequences) // ranks)
    costs = [_Costs.of(pack, rows) for pack in packs]
    best = _fill(costs, 1, high)
    assert best is not None, "one rank holds everything"
    while low < high:
        capacity = (low + high) // 2
        shares = _fill(costs, ranks, capacity)
        if shares is None:
            low = capacity + 1
        else:
            high, best = capacity, shares
    return best


def _fill(packs: Sequence[_Costs], ranks: int, capacity: int) -> list[_RankShare] | None:
    """Fill ranks of this capacity one after the other, with the longest answer that fits; None: they do not suffice."""
    shares = [_RankShare()]
    for costs in packs:
        left = [*costs.answers]
        begun = False  # whether the last rank has a part of this pack
        while left:
            share = shares[-1]
            again = 0 if begun else costs.prompt
            room = capacity - share.tokens - again
            fits = next((number for number, (tokens, _) in enumerate(left) if tokens <= room), None)
            if fits is None:
                if not share.packs or len(shares) == ranks:
                    return None
                shares.append(_RankShare())
                begun = False
                continue
            tokens, answer = left.pop(fits)
            if not begun:
                share.packs.append((costs.pack.prompt_ids, []))
                begun = True
            share.packs[-1][1].append(answer)
            share.tokens += again + tokens
    return shares
