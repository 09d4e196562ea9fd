"""Lay packs out as rows of micro-batches. Pure functions.

A pack is one row: the prompt once, then its answers one after the other.

    p p p p a a a b b c c c        each answer attends to the prompt and itself, not to siblings,
    0 1 2 3 4 5 6 4 5 4 5 6        and its positions continue those of the prompt

A prompt of 256 tokens with eight answers of 16 is 376 tokens this way and 2,168 without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from worker.model.sizing import bucket
from worker.types import Pack
from worker.types import TrainingSequence as Answer


@dataclass(frozen=True)
class RowCost:
    """FLOPs of a forward and backward pass, without the head: its tokens are the same in any division."""

    token: int  # of a token: products with weights
    pair: int  # of a pair of tokens: attention

    def flops(self, tokens: int) -> int:
        return self.token * tokens + self.pair * tokens**2


def micro_batches(
    packs: Sequence[Pack],
    token_budget: int,
    device: torch.device | str = "cpu",
    *,
    rows: bool = False,
    cost: RowCost | None = None,
    couples_answers: bool = False,
) -> Iterator[list[Pack]]:
    """Yield batches of packs of similar length, each of at most `token_budget` tokens including padding.

    A pack above the budget is split between answers (its prompt is then computed once per part); a single answer
    above the budget still gets its own batch.

    Args:
        rows: split every pack, so that each row has one answer.
        cost: split every pack as `cheapest_parts` does. None: only those above the budget.
        couples_answers: leave the answers of a pack in one batch, whatever the budget: a loss couples them.
    """
    batch: list[Pack] = []
    for unit in sorted(_units(packs, token_budget, rows, cost, couples_answers), key=_longest):
        # The newest unit is the longest, so it sets the width of the whole batch.
        if batch and (len(batch) + len(unit)) * row_width(_longest(unit), device) > token_budget:
            yield batch
            batch = []
        batch += unit
    if batch:
        yield batch


def _units(
    packs: Sequence[Pack], token_budget: int, rows: bool, cost: RowCost | None, couples_answers: bool
) -> list[list[Pack]]:
    """The parts of packs that share a batch."""
    if couples_answers:
        return [list(split(pack, 0)) if rows else [pack] for pack in packs]
    room = 0 if rows else token_budget
    if cost is None:
        return [[part] for pack in packs for part in split(pack, room)]
    return [[part] for pack in packs for part in cheapest_parts(pack, room, cost)]


def _longest(unit: Sequence[Pack]) -> int:
    return max(part.tokens for part in unit)


def split(pack: Pack, token_budget: int) -> Iterator[Pack]:
    """Yield parts of a pack with at least one answer each, of at most `token_budget` tokens otherwise."""
    room = token_budget - len(pack.prompt_ids)
    answers: list[Answer] = []
    used = 0
    for answer in pack.sequences:
        length = len(answer.output_ids_T) - 1
        if answers and used + length > room:
            yield Pack(pack.prompt_ids, tuple(answers))
            answers, used = [], 0
        answers.append(answer)
        used += length
    yield Pack(pack.prompt_ids, tuple(answers))


def cheapest_parts(pack: Pack, token_budget: int, cost: RowCost) -> list[Pack]:
    """Divide a pack into parts with as many answers each as cost the fewest FLOPs: all of them, one, or between.

    Depends on the lengths of this pack alone, so every rank and every attempt of a job divides it in the same way.
    Padding is not counted: parts of similar length share a micro-batch.
    """
    divisions = [
        [part for some in _in_parts_of(pack, answers) for part in split(some, token_budget)]
        for answers in range(len(pack.sequences), 0, -1)
    ]
    return min(divisions, key=lambda parts: sum(cost.flops(part.tokens) for part in parts))


def _in_parts_of(pack: Pack, answers: int) -> Iterator[Pack]:
    for first in range(0, len(pack.sequences), answers):
        yield Pack(pack.prompt_ids, pack.sequences[first : first + answers])


@dataclass(frozen=True)
class Tensors:
    """One micro-batch. B rows of T tokens, M trained tokens in all."""

    input_ids: Tensor  # int64 [B, T]
    position_ids: Tensor  # int64 [B, T]
    segment: Tensor  # int64 [B, T]: 0 the prompt, 1.. the answers, -1 padding
    row_M: Tensor  # int64 [M]: with column_M, the position whose hidden state predicts the token
    column_M: Tensor  # int64 [M]
    target_M: Tensor  # int64 [M]
    answer_M: Tensor  # int64 [M]: which answer the token is of, numbered from 0
    sampled_logp_M: Tensor  # float32 [M]
    advantage_M: Tensor  # float32 [M]
    weight_M: Tensor  # float32 [M]
    allowed_M: Tensor | None = None  # int32 [M, V / 32]: bits of the tokens that the sampler could have drawn
    teacher_logp_M: Tensor | None = None  # float32 [M], in jobs with a teacher
    score_M: Tensor | None = None  # float32 [M], of rows of a reward model


def row_width(tokens: int, device: torch.device | str) -> int:
    """Return the padded width of a row: `tokens` on a CPU, elsewhere rounded up to one of a few dozen widths."""
    return tokens if torch.device(device).type == "cpu" else bucket(tokens)


def padded_tokens(packs: Sequence[Pack], device: torch.device | str) -> int:
    """Return the tokens of a micro-batch, with padding."""
    return len(packs) * row_width(max(pack.tokens for pack in packs), device)


@dataclass
class _Targets:
    """The trained tokens of the answers laid out so far, a number of each in each list."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    sampled_logp: list[float] = field(default_factory=list)
    advantage: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    teacher_logp: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # trained tokens of each answer
    score: list[float] = field(default_factory=list)

    def add(self, answer: Answer, row: int, columns: Sequence[int]) -> None:
        """Add an answer of a row. `columns` are the positions that predict its tokens."""
        learned = list(answer.learned_T or (True,) * len(columns))
        self.lengths.append(sum(learned))
        self.row += [row] * self.lengths[-1]
        self.column += compress(columns, learned)
        self.target += compress(answer.output_ids_T, learned)
        self.sampled_logp += compress(answer.logprobs_T, learned)
        self.advantage += compress(answer.advantages_T, learned)
        self.weight += [answer.weight] * self.lengths[-1]
        self.teacher_logp += compress(answer.teacher_T, learned)
        self.score += answer.scores


def tensors_of(packs: Sequence[Pack], device: torch.device | str = "cpu") -> Tensors:
    """Lay the packs out as rows, padded on the right to `row_width` of the longest.

    Tensors here have only a few numbers per token; worker/model/attention.py makes the T^2 masks on the device.
    """

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    width = row_width(max(pack.tokens for pack in packs), device)
    input_ids = torch.zeros(len(packs), width, dtype=torch.int64)
    position_ids = torch.zeros(len(packs), width, dtype=torch.int64)
    segment = torch.full((len(packs), width), -1, dtype=torch.int64)
    targets = _Targets()
    for b, pack in enumerate(packs):
        prompt = len(pack.prompt_ids)
        input_ids[b, :prompt] = torch.tensor(pack.prompt_ids)
        position_ids[b, :prompt] = torch.arange(prompt)
        segment[b, :prompt] = 0
        at = prompt
        for number, answer in enumerate(pack.sequences, start=1):
            read = len(answer.output_ids_T) - 1
            input_ids[b, at : at + read] = torch.tensor(answer.output_ids_T[:-1], dtype=torch.int64)
            position_ids[b, at : at + read] = torch.arange(prompt, prompt + read)
            segment[b, at : at + read] = number
            # The last token of the prompt predicts the first of the answer; from there each predicts the next.
            targets.add(answer, b, [prompt - 1, *range(at, at + read)])
            at += read
    return Tensors(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        segment=segment.to(device),
        row_M=torch.tensor(targets.row, device=device),
        column_M=torch.tensor(targets.column, device=device),
        target_M=torch.tensor(targets.target, device=device),
        answer_M=torch.arange(len(targets.lengths))
        .repeat_interleave(torch.tensor(targets.lengths))
        .to(device),
        sampled_logp_M=floats(targets.sampled_logp),
        advantage_M=floats(targets.advantage),
        weight_M=floats(targets.weight),
        teacher_logp_M=floats(targets.teacher_logp) if targets.teacher_logp else None,
        score_M=floats(targets.score) if targets.score else None,
    )
