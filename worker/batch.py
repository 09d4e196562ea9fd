"""Graded groups to what the trainer computes: which answers, in what packs, with what mask. Pure.

A pack is one row: the prompt once, then its answers one after the other.

    p p p p a a a b b c c c        every answer sees the prompt and itself, never a sibling,
    0 1 2 3 4 5 6 4 5 4 5 6        and its positions go on where the prompt's end

A prompt of 256 tokens with eight answers of 16 is 376 tokens this way and 2,168 without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker import grpo
from worker.types import Group, Pack
from worker.types import Sequence as Answer


def packs_of(
    groups_P: Sequence[Group],
    *,
    loss: grpo.Loss,
    scale: grpo.Scale,
    max_completion_tokens: int,
    keep_all: bool,
) -> list[Pack]:
    """The answers worth computing, each with its advantage and its share of the step's loss.

    An answer with no advantage has exactly no gradient, so it is dropped, unless `keep_all` (a KL penalty
    pulls on every graded answer). The normalisation counts all graded answers of the groups that have
    signal, dropped ones too, so that dropping changes nothing but the time.
    """
    advantages_PG = grpo.advantages([group.rewards_G for group in groups_P], scale)
    counted = [
        (row, member)
        for row, group in enumerate(groups_P)
        for member, reward in enumerate(group.rewards_G)
        if reward is not None and (keep_all or any(advantages_PG[row]))
    ]
    lengths = [len(groups_P[row].rollouts_G[member].output_ids_T) for row, member in counted]
    weights = (
        dict(zip(counted, grpo.token_weights(lengths, loss, max_completion_tokens), strict=True))
        if counted
        else {}
    )

    packs = []
    for row, group in enumerate(groups_P):
        answers = tuple(
            Answer(rollout.output_ids_T, rollout.logprobs_T, advantages_PG[row][member], weights[row, member])
            for member, rollout in enumerate(group.rollouts_G)
            if (row, member) in weights and (keep_all or advantages_PG[row][member] != 0.0)
        )
        if answers:
            packs.append(Pack(group.prompt.ids, answers))
    return packs


def micro_batches(packs: Sequence[Pack], token_budget: int) -> Iterator[list[Pack]]:
    """Packs of like length together, each batch at most `token_budget` tokens with its padding.

    A pack longer than the budget is split between answers (its prompt is then computed once a part); a
    single answer longer than the budget still gets a batch of its own.
    """
    parts = sorted(
        (part for pack in packs for part in _split(pack, token_budget)), key=lambda part: part.tokens
    )
    batch: list[Pack] = []
    for part in parts:
        # The newest part is the longest, so it sets the width of the whole batch.
        if batch and (len(batch) + 1) * part.tokens > token_budget:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _split(pack: Pack, token_budget: int) -> Iterator[Pack]:
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


@dataclass(frozen=True)
class Tensors:
    """One micro-batch. B rows of T tokens, M trained tokens in all."""

    input_ids: Tensor  # int64 [B, T]
    position_ids: Tensor  # int64 [B, T]
    mask: Tensor  # bool [B, 1, T, T]; True: the query (third axis) may look at the key (fourth)
    row_M: Tensor  # int64 [M]: with column_M, the position whose hidden state predicts the token
    column_M: Tensor  # int64 [M]
    target_M: Tensor  # int64 [M]
    old_logp_M: Tensor  # float32 [M]
    advantage_M: Tensor  # float32 [M]
    weight_M: Tensor  # float32 [M]


def tensors_of(packs: Sequence[Pack], device: torch.device | str = "cpu") -> Tensors:
    """Lay the packs out as rows, padded on the right to the longest."""
    width = max(pack.tokens for pack in packs)
    input_ids = torch.zeros(len(packs), width, dtype=torch.int64)
    position_ids = torch.zeros(len(packs), width, dtype=torch.int64)
    segment = torch.full(
        (len(packs), width), -1, dtype=torch.int64
    )  # 0 the prompt, 1.. the answers, -1 padding
    row: list[int] = []
    column: list[int] = []
    target: list[int] = []
    old_logp: list[float] = []
    advantage: list[float] = []
    weight: list[float] = []
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
            column += [prompt - 1, *range(at, at + read)]
            row += [b] * (read + 1)
            target += answer.output_ids_T
            old_logp += answer.logprobs_T
            advantage += [answer.advantage] * (read + 1)
            weight += [answer.weight] * (read + 1)
            at += read
    return Tensors(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        mask=group_mask(segment).to(device),
        row_M=torch.tensor(row, device=device),
        column_M=torch.tensor(column, device=device),
        target_M=torch.tensor(target, device=device),
        old_logp_M=torch.tensor(old_logp, dtype=torch.float32, device=device),
        advantage_M=torch.tensor(advantage, dtype=torch.float32, device=device),
        weight_M=torch.tensor(weight, dtype=torch.float32, device=device),
    )


def group_mask(segment: Tensor) -> Tensor:
    """[B, T] segment numbers -> bool [B, 1, T, T]: look back at the prompt (0) and at your own segment.

    Padding (-1) sees itself only: a query that sees nothing would be NaN, and NaN spreads through the batch.
    """
    width = segment.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=segment.device).tril()
    query, key = segment[:, :, None], segment[:, None, :]
    visible = ((key == 0) & (query >= 0)) | ((key == query) & (query >= 0))
    itself = torch.eye(width, dtype=torch.bool, device=segment.device)
    return ((causal & visible) | itself)[:, None]
