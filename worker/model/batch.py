"""Lay packs out as rows of micro-batches. Pure functions.

A pack is one row: the prompt once, then its answers one after the other.

    p p p p a a a b b c c c        each answer attends to the prompt and itself, not to siblings,
    0 1 2 3 4 5 6 4 5 4 5 6        and its positions continue those of the prompt

A prompt of 256 tokens with eight answers of 16 is 376 tokens this way and 2,168 without. An answer of several calls may
have branches, which worker/model/tree.py shows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import torch
from torch import Tensor

from worker.model import tree
from worker.model.sizing import bucket
from worker.types import NEW_ROOT, Pack, Rollout
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
    couples_calls: bool = True,
) -> Iterator[list[Pack]]:
    """Yield batches of packs of similar length, each of at most `token_budget` tokens including padding.

    A pack above the budget is split between answers (its prompt is then computed once per part); a single answer
    above the budget still gets its own batch.

    Args:
        rows: split every pack, so that each row has one path of one answer.
        cost: split every pack as `cheapest_parts` does. None: only those above the budget.
        couples_answers: leave the answers of a pack in one batch, whatever the budget: a loss couples them.
        couples_calls: leave the branches of an answer in one batch, whatever the budget and the memory.
    """
    batch: list[Pack] = []
    units = _units(packs, token_budget, rows, cost, couples_answers, couples_calls)
    for unit in sorted(units, key=_longest):
        # The newest unit is the longest, so it sets the width of the whole batch.
        if batch and (len(batch) + len(unit)) * row_width(_longest(unit), device) > token_budget:
            yield batch
            batch = []
        batch += unit
    if batch:
        yield batch


def _units(
    packs: Sequence[Pack],
    token_budget: int,
    rows: bool,
    cost: RowCost | None,
    couples_answers: bool,
    couples_calls: bool,
) -> Iterator[list[Pack]]:
    """The parts of packs that share a batch."""
    if rows and not couples_answers:
        yield from _row_units(packs, couples_calls)
        return
    for pack in packs:
        if couples_answers:
            yield in_rows(pack) if rows else [pack]
        else:
            whole = pack if couples_calls else _in_parts(pack, token_budget)
            divided = (
                split(whole, token_budget) if cost is None else cheapest_parts(whole, token_budget, cost)
            )
            yield from ([part] for part in divided)


def _row_units(packs: Sequence[Pack], couples_calls: bool) -> Iterator[list[Pack]]:
    """Each row, or those of one answer with branches. They stay together if they are divided again."""
    branched: dict[int, list[Pack]] = {}
    for row in (row for pack in packs for row in in_rows(pack)):
        piece = row.sequences[0].piece
        if couples_calls and piece is not None:
            branched.setdefault(id(piece.undivided), []).append(row)
        else:
            yield [row]
    yield from branched.values()


def in_rows(pack: Pack) -> list[Pack]:
    """Return a pack for each path of each answer, whose row needs no mask but a causal one."""
    return [_row(pack.prompt_ids, path) for answer in pack.sequences for path in tree.paths(answer)]


def _row(prompt_ids: tuple[int, ...], path: Answer) -> Pack:
    if not path.branches:
        return Pack(prompt_ids, (path,))
    parents = [branch.parent for branch in path.branches]
    assert parents == [NEW_ROOT, *range(len(parents) - 1)], "a path is a chain"
    return Pack((), (replace(path, branches=()),))


def rows_read(prompt_ids: tuple[int, ...], rollout: Rollout) -> list[Pack]:
    """Return the rows in which a teacher reads an answer; none if the answer has no tokens."""
    if not rollout.output_ids_T:
        return []
    return in_rows(Pack(prompt_ids, (tree.read_sequence(rollout),)))


def ids_of(row: Pack) -> tuple[int, ...]:
    """Return the tokens of a row, with the last one, which is no input."""
    [path] = row.sequences
    return (*row.prompt_ids, *path.output_ids_T)


def _in_parts(pack: Pack, token_budget: int) -> Pack:
    """The pack with answers that are cut between subtrees where one alone is above the budget."""
    room = token_budget - len(pack.prompt_ids)
    return replace(
        pack, sequences=tuple(part for answer in pack.sequences for part in tree.parts(answer, room))
    )


def _longest(unit: Sequence[Pack]) -> int:
    return max(part.tokens for part in unit)


def split(pack: Pack, token_budget: int) -> Iterator[Pack]:
    """Yield parts of a pack with at least one answer each, of at most `token_budget` tokens otherwise."""
    room = token_budget - len(pack.prompt_ids)
    answers: list[Answer] = []
    used = 0
    for answer in pack.sequences:
        length = answer.read_tokens
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
    segment: Tensor  # int64 [B, T]: 0 the prompt, 1.. the answers or their branches depth first, -1 padding
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
    # int64 [B, T], with branches: tokens whose segment is from the token's own up to here, exclusive, may see it.
    seen_until: Tensor | None = None


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
    answer: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)  # among the trained tokens of the whole answer
    sampled_logp: list[float] = field(default_factory=list)
    advantage: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    teacher_logp: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)

    def add(self, answer: Answer, number: int, row: int, columns: Sequence[int]) -> None:
        """Add an answer of a row. `columns` are the positions that predict its tokens."""
        learned = answer.is_trained_T
        count = sum(learned)
        self.row += [row] * count
        self.column += compress(columns, learned)
        self.target += compress(answer.output_ids_T, learned)
        self.answer += [number] * count
        self.place += range(count) if answer.piece is None else answer.piece.places
        self.sampled_logp += compress(answer.logprobs_T, learned)
        self.advantage += compress(answer.advantages_T, learned)
        self.weight += [answer.weight] * count
        self.teacher_logp += compress(answer.teacher_T, learned)
        self.score += answer.scores

    def sort(self) -> None:
        """Put the tokens of each answer in the order that they have in it."""
        order = sorted(range(len(self.answer)), key=lambda at: (self.answer[at], self.place[at]))
        for values in vars(self).values():
            values[:] = [values[at] for at in order] if values else []


@dataclass(frozen=True)
class TrainedAnswer:
    """An answer before any division of its pack, and which of its trained tokens a micro-batch has; None: all."""

    undivided: Answer
    places: Sequence[int] | None = None

    @property
    def tokens(self) -> int:
        return self.undivided.trained_tokens if self.places is None else len(self.places)

    @property
    def index(self) -> slice | list[int]:
        """Of its tokens in a tensor of all trained tokens of the answer."""
        return slice(None) if self.places is None else [*self.places]


def answers_of(packs: Iterable[Pack]) -> list[TrainedAnswer]:
    """Return the answers of a micro-batch as `Tensors.answer_M` numbers them. The tokens [M] are in their order."""
    found: dict[int, TrainedAnswer] = {}
    for answer, number in _numbered(packs):
        piece = answer.piece
        if piece is None:
            found[number] = TrainedAnswer(answer)
        else:
            before = found[number].places or () if number in found else ()
            found[number] = TrainedAnswer(piece.undivided, sorted((*before, *piece.places)))
    return list(found.values())


def by_answer(packs: Iterable[Pack], values: Tensor) -> Iterator[tuple[TrainedAnswer, Tensor]]:
    """Return each answer of a micro-batch with its part of the values [..., M]."""
    answers = answers_of(packs)
    return zip(answers, torch.split(values, [answer.tokens for answer in answers], dim=-1), strict=True)


def _numbered(packs: Iterable[Pack]) -> Iterator[tuple[Answer, int]]:
    """Each answer or piece, with the number of the answer in the micro-batch."""
    count = 0
    cut: dict[int, int] = {}  # answers in pieces
    for answer in (answer for pack in packs for answer in pack.sequences):
        number = count if answer.piece is None else cut.setdefault(id(answer.piece.undivided), count)
        count = max(count, number + 1)
        yield answer, number


class _Rows:
    """The inputs of a micro-batch, filled row by row."""

    def __init__(self, packs: Sequence[Pack], width: int) -> None:
        shape = len(packs), width
        self.input_ids = torch.zeros(shape, dtype=torch.int64)
        self.position_ids = torch.zeros(shape, dtype=torch.int64)
        self.segment = torch.full(shape, -1, dtype=torch.int64)
        has_branches = any(answer.branches for pack in packs for answer in pack.sequences)
        self.seen_until = torch.zeros(shape, dtype=torch.int64) if has_branches else None

    def fill(self, row: int, pack: Pack) -> Iterator[list[int]]:
        """Lay out a pack. Yields for each answer the columns that predict its tokens."""
        prompt = len(pack.prompt_ids)
        placed = [tree.placed(answer) for answer in pack.sequences]
        # Branches that do not see the prompt are numbered behind those that do.
        seeing = [sum(branch.sees_prompt for branch in branches) for branches in placed]
        first, first_root = 1, 1 + sum(seeing)
        self._put(row, 0, pack.prompt_ids, 0, (0, first_root))
        at = prompt
        for answer, branches, count in zip(pack.sequences, placed, seeing, strict=True):
            start, columns = at, []
            for branch in branches:
                ids = answer.output_ids_T[branch.inputs.start : branch.inputs.stop]
                position = branch.position + (prompt if branch.sees_prompt else 0)
                offset = first if branch.sees_prompt else first_root - count
                self._put(row, at, ids, position, (offset + branch.number, offset + branch.until))
                # The last token of the path so far predicts the first; from there each predicts the next.
                before = prompt - 1 if branch.before is None else start + branch.before
                columns += [before, *range(at, at + len(ids))][: branch.tokens]
                at += len(ids)
            yield columns
            first, first_root = first + count, first_root + len(branches) - count

    def _put(self, row: int, at: int, ids: Sequence[int], position: int, seen_by: tuple[int, int]) -> None:
        """Put tokens of the segment `seen_by[0]`, which the segments up to `seen_by[1]` see."""
        place = slice(at, at + len(ids))
        self.input_ids[row, place] = torch.tensor(ids, dtype=torch.int64)
        self.position_ids[row, place] = torch.arange(position, position + len(ids))
        self.segment[row, place] = seen_by[0]
        if self.seen_until is not None:
            self.seen_until[row, place] = seen_by[1]


def tensors_of(packs: Sequence[Pack], device: torch.device | str = "cpu") -> Tensors:
    """Lay the packs out as rows, padded on the right to `row_width` of the longest.

    Tensors here have only a few numbers per token; worker/model/attention.py makes the T^2 masks on the device.
    """

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    rows = _Rows(packs, row_width(max(pack.tokens for pack in packs), device))
    targets = _Targets()
    numbers = (number for _, number in _numbered(packs))
    for b, pack in enumerate(packs):
        for answer, columns in zip(pack.sequences, rows.fill(b, pack), strict=True):
            targets.add(answer, next(numbers), b, columns)
    if any(answer.piece for pack in packs for answer in pack.sequences):
        targets.sort()
    return Tensors(
        input_ids=rows.input_ids.to(device),
        position_ids=rows.position_ids.to(device),
        segment=rows.segment.to(device),
        row_M=torch.tensor(targets.row, device=device),
        column_M=torch.tensor(targets.column, device=device),
        target_M=torch.tensor(targets.target, device=device),
        answer_M=torch.tensor(targets.answer, dtype=torch.int64, device=device),
        sampled_logp_M=floats(targets.sampled_logp),
        advantage_M=floats(targets.advantage),
        weight_M=floats(targets.weight),
        teacher_logp_M=floats(targets.teacher_logp) if targets.teacher_logp else None,
        score_M=floats(targets.score) if targets.score else None,
        seen_until=None if rows.seen_until is None else rows.seen_until.to(device),
    )
