"""Convert graded groups to packs, masks and micro-batches for the trainer. Pure functions.

A pack is one row: the prompt once, then its answers one after the other.

    p p p p a a a b b c c c        each answer attends to the prompt and itself, not to siblings,
    0 1 2 3 4 5 6 4 5 4 5 6        and its positions continue those of the prompt

A prompt of 256 tokens with eight answers of 16 is 376 tokens this way and 2,168 without.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress

import torch
from torch import Tensor

from core.jobs.hyperparameters import Resolved
from worker.learn import grpo
from worker.model.sizing import bucket
from worker.rollout.steps import token_ends
from worker.types import Group, Pack, Rollout
from worker.types import TrainingSequence as Answer

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Share:
    """The contribution of one group to its step, available as soon as the group is graded.

    The weights and advantages in `pack` still have to be divided by values of the whole step: see `divisors`.
    """

    line: int  # of its prompt
    pack: Pack | None  # None: nothing to compute
    lengths: tuple[int, ...]  # tokens of each answer in the loss
    rewards_N: tuple[float | None, ...]  # the rewards behind its advantages: of answers, or of steps


def share_of(group: Group, settings: Resolved, decode: Decode) -> Share:
    """Return the answers with a gradient, each with its advantages and its weight in the step's loss.

    An answer with no advantage has exactly no gradient, so it is dropped, unless there is a KL penalty, which pulls
    on every graded answer. With `normalize` "papers" dropping changes nothing but the time: the loss is a mean over all
    graded answers, dropped ones too. With "signal" it is one over those of groups that are computed. Answers that
    `overlong` masks are in the baseline of their group, and neither in the loss nor in its normalisation (DAPO section
    3.4, overlong filtering). Under a teacher, and with rewards of tokens, each token has its own advantage, so every
    answer is computed.
    """
    keep_all = settings.kl > 0 or group.has_teacher or settings.has_token_rewards
    rewards_N, advantages_GT = _advantages(group, settings, decode)
    line = group.prompt.line
    if settings.normalize == "signal" and not keep_all and not any(map(any, advantages_GT)):
        return Share(line, None, (), rewards_N)
    counted = [
        (rollout, advantages_T)
        for (rollout, reward), advantages_T in zip(_pairs(group), advantages_GT, strict=True)
        if _counts(rollout, reward, settings)
    ]
    answers = tuple(
        Answer(
            rollout.output_ids_T,
            rollout.logprobs_T,
            advantages_T,
            grpo.token_weight(rollout.sampled_tokens, settings.loss),
            rollout.grammar_start,
            rollout.forced,
            teacher_T=rollout.teacher_T,
            key=id(rollout),
        )
        for rollout, advantages_T in counted
        if keep_all or any(advantages_T)
    )
    lengths = tuple(rollout.sampled_tokens for rollout, _ in counted)
    return Share(line, Pack(group.prompt.ids, answers) if answers else None, lengths, rewards_N)


def in_batch(groups_P: Sequence[tuple[int, Sequence[float | None]]], settings: Resolved) -> list[bool]:
    """Return which groups of a step its update uses.

    All of them, except with `resample_prompts` under the papers' rule: DAPO's dynamic sampling (section 3.2) filters
    zero-variance groups out of the batch and refills it. So each resampled group with signal replaces one of the
    step's own zero-variance groups, in the order of their lines, and resampled zero-variance groups are dropped.
    If the budget is spent before all are replaced, the remaining ones stay in the batch.

    Args:
        groups_P: for each group the line of its prompt and the rewards behind its advantages; the `batch_size` groups
            of the step's own prompts first, in any order.
    """
    mixed_P = [grpo.signal(rewards_N) == "mixed" for _, rewards_N in groups_P]
    if settings.normalize == "signal" or not settings.resample_prompts:
        return [True] * len(groups_P)
    silent = [number for number, mixed in enumerate(mixed_P[: settings.batch_size]) if not mixed]
    silent.sort(key=lambda number: groups_P[number][0])
    left = set(silent[sum(mixed_P[settings.batch_size :]) :])
    return [mixed or number in left for number, mixed in enumerate(mixed_P)]


def batch_of(shares: Sequence[Share], settings: Resolved) -> list[Share]:
    """Return the shares of the groups that the step's update uses: see `in_batch`."""
    chosen = in_batch([(share.line, share.rewards_N) for share in shares], settings)
    return [share for share, is_in in zip(shares, chosen, strict=True) if is_in]


def in_mini_batches(shares: Sequence[Share], parts: int, *, seed: int) -> list[list[Share]]:
    """Divide the groups of a step into `parts` of equal or nearly equal numbers, at random.

    They are sorted by line first, so that the division does not depend on the order in which they were graded. Parts
    without anything to compute are left out.
    """
    order = sorted(range(len(shares)), key=lambda number: shares[number].line)
    random.Random(seed).shuffle(order)
    divided = ([shares[number] for number in sorted(order[first::parts])] for first in range(parts))
    return [part for part in divided if any(share.pack is not None for share in part)]


def divisors(shares: Sequence[Share], settings: Resolved) -> tuple[float, float]:
    """Return the divisors of the step's gradient: its normaliser, and the std of its rewards.

    `shares` are those of `batch_of`.
    The second is 1 where the advantages have been divided already, or need not be. A penalty is not divided by it.
    """
    lengths = [length for share in shares for length in share.lengths]
    whole = grpo.normaliser(lengths, settings.loss, settings.max_completion_tokens)
    if settings.advantage_scale != "batch" or settings.has_token_rewards:
        return whole, 1.0
    assert settings.std is not None
    rewards_PN = [share.rewards_N for share in shares]
    return whole, grpo.batch_deviation(rewards_PN, settings.std, settings.normalize) or 1.0


@dataclass(frozen=True)
class Lesson:
    """The training signal of one answer."""

    # Of its first token; with outcome rewards of all tokens; under a teacher their mean. None: not trained on, or each
    # token has its own, which depends on the policy's log-probabilities.
    advantage: float | None
    steps_J: tuple[float, ...]  # under process supervision: of the tokens of each step
    is_trained: bool


def lessons(groups_P: Sequence[Group], settings: Resolved) -> list[list[Lesson]]:
    """Return the advantages of all answers of a step, for reports: `share_of` and `divisors` in readable form."""
    chosen = in_batch([(group.prompt.line, _taught(group, settings)) for group in groups_P], settings)
    batch = iter(
        _batch_lessons([group for group, is_in in zip(groups_P, chosen, strict=True) if is_in], settings)
    )
    return [
        next(batch) if is_in else [Lesson(None, (0.0,) * len(grade.steps), False) for grade in group.grades_G]
        for group, is_in in zip(groups_P, chosen, strict=True)
    ]


def _batch_lessons(groups_P: Sequence[Group], settings: Resolved) -> list[list[Lesson]]:
    scale, std, normalize = settings.advantage_scale, settings.std, settings.normalize
    if settings.has_token_rewards:
        return [[Lesson(None, (), _counts(*pair, settings)) for pair in _pairs(group)] for group in groups_P]
    if settings.supervision == "outcome":
        rewards_PG = [_taught(group, settings) for group in groups_P]
        steps_PGJ: list[list[tuple[float, ...]]] = [[()] * len(group.rollouts_G) for group in groups_P]
        first_PG = (
            [grpo.leave_one_out(rewards_G) for rewards_G in rewards_PG]
            if settings.loss == "rloo"
            else grpo.advantages(rewards_PG, scale, std, normalize)
        )
    else:
        rewards_PGJ = [
            [[step.score for step in grade.steps] for grade in group.grades_G] for group in groups_P
        ]
        normalised_PGJ = grpo.step_advantages(rewards_PGJ, scale, std, normalize)
        # DeepSeekMath's section 4.1.3 at each step's first token: the sum over this step and all later ones.
        steps_PGJ = [
            [tuple(accumulate(reversed(r)))[::-1] for r in rewards_GJ] for rewards_GJ in normalised_PGJ
        ]
        first_PG = [[steps_J[0] if steps_J else 0.0 for steps_J in steps_GJ] for steps_GJ in steps_PGJ]
    return [
        _lessons(group, first_G, steps_GJ, settings)
        for group, first_G, steps_GJ in zip(groups_P, first_PG, steps_PGJ, strict=True)
    ]


def _taught(group: Group, settings: Resolved) -> list[float | None]:
    """Return the training rewards of a group, of its answers or of their steps."""
    if settings.supervision == "process":
        return group.taught_by("process")
    return [_shaped(*pair, settings) for pair in _pairs(group)]


def _lessons(
    group: Group, first_G: Sequence[float], steps_GJ: Sequence[tuple[float, ...]], settings: Resolved
) -> list[Lesson]:
    if group.has_teacher:
        return [
            Lesson(grpo.mean_distillation_advantage(rollout.logprobs_T, rollout.teacher_T), (), True)
            for rollout in group.rollouts_G
        ]
    is_trained_G = [
        _counts(*pair, settings) and (settings.kl > 0 or bool(first) or any(steps_J))
        for pair, first, steps_J in zip(_pairs(group), first_G, steps_GJ, strict=True)
    ]
    return [
        Lesson(first if is_trained else None, steps_J, is_trained)
        for first, steps_J, is_trained in zip(first_G, steps_GJ, is_trained_G, strict=True)
    ]


def _counts(rollout: Rollout, reward: float | None, settings: Resolved) -> bool:
    """Return whether an answer is in the loss; `overlong` excludes some that are in their group's baseline.

    An answer of which a spent thinking budget forced every token was not sampled at all.
    """
    if reward is None or rollout.sampled_tokens == 0:
        return False
    return not (settings.overlong == "mask" and rollout.finish_reason == "length")


def _advantages(
    group: Group, settings: Resolved, decode: Decode
) -> tuple[tuple[float | None, ...], list[tuple[float, ...]]]:
    """Return the training rewards, and an advantage per token of each answer, before division by the batch's std.

    With rewards of tokens, the trainer computes the advantages: each token has the reward of its answer here.
    """
    if settings.has_token_rewards:
        rewards_G = _taught(group, settings)
        lengths = [len(rollout.output_ids_T) for rollout in group.rollouts_G]
        return tuple(rewards_G), [(reward or 0.0,) * n for reward, n in zip(rewards_G, lengths, strict=True)]
    scale = "none" if settings.advantage_scale == "batch" else settings.advantage_scale
    rewards_N = _taught(group, settings)
    if settings.supervision == "outcome":
        if settings.loss == "rloo":
            advantages_G = grpo.leave_one_out(rewards_N)
        else:
            [advantages_G] = grpo.advantages([rewards_N], scale, settings.std)
        lengths = [len(rollout.output_ids_T) for rollout in group.rollouts_G]
        spread = [(value,) * length for value, length in zip(advantages_G, lengths, strict=True)]
        return tuple(rewards_N), spread
    rewards_GJ = [[step.score for step in grade.steps] for grade in group.grades_G]
    [steps_GJ] = grpo.step_advantages([rewards_GJ], scale, settings.std)
    by_step = [
        _by_step(rollout, steps_J, [step.end for step in grade.steps], decode)
        for rollout, grade, steps_J in zip(group.rollouts_G, group.grades_G, steps_GJ, strict=True)
    ]
    return tuple(rewards_N), by_step


def _pairs(group: Group) -> Iterator[tuple[Rollout, float | None]]:
    return zip(group.rollouts_G, group.rewards_G, strict=True)


def _shaped(rollout: Rollout, reward: float | None, settings: Resolved) -> float | None:
    """Return the training reward. Reports show the grader's own reward."""
    if reward is None or settings.overlong_buffer is None:
        return reward
    length, longest = len(rollout.output_ids_T), settings.max_completion_tokens
    return reward + grpo.overlong_penalty(length, longest, settings.overlong_buffer)


def _by_step(
    rollout: Rollout, steps_J: Sequence[float], ends_J: Sequence[int], decode: Decode
) -> tuple[float, ...]:
    ends = token_ends(rollout.output_ids_T, rollout.text, ends_J, decode)
    return tuple(grpo.process_advantages(steps_J, ends, len(rollout.output_ids_T)))


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
) -> Iterator[list[Pack]]:
    """Yield batches of packs of similar length, each of at most `token_budget` tokens including padding.

    A pack above the budget is split between answers (its prompt is then computed once per part); a single answer
    above the budget still gets its own batch.

    Args:
        rows: split every pack, so that each row has one answer.
        cost: split every pack as `cheapest_parts` does. None: only those above the budget.
    """
    room = 0 if rows else token_budget
    if cost is None:
        divided = [part for pack in packs for part in split(pack, room)]
    else:
        divided = [part for pack in packs for part in cheapest_parts(pack, room, cost)]
    parts = sorted(divided, key=lambda part: part.tokens)
    batch: list[Pack] = []
    for part in parts:
        # The newest part is the longest, so it sets the width of the whole batch.
        if batch and (len(batch) + 1) * row_width(part.tokens, device) > token_budget:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


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


def tensors_of(packs: Sequence[Pack], device: torch.device | str = "cpu") -> Tensors:
    """Lay the packs out as rows, padded on the right to `row_width` of the longest.

    Tensors here have only a few numbers per token; worker/model/attention.py makes the T^2 masks on the device.
    """
    width = row_width(max(pack.tokens for pack in packs), device)
    input_ids = torch.zeros(len(packs), width, dtype=torch.int64)
    position_ids = torch.zeros(len(packs), width, dtype=torch.int64)
    segment = torch.full((len(packs), width), -1, dtype=torch.int64)
    row: list[int] = []
    column: list[int] = []
    target: list[int] = []
    lengths: list[int] = []
    sampled_logp: list[float] = []
    advantage: list[float] = []
    weight: list[float] = []
    teacher_logp: list[float] = []
    score: list[float] = []
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
            learned = list(answer.learned_T or (True,) * (read + 1))
            column += compress([prompt - 1, *range(at, at + read)], learned)
            target += compress(answer.output_ids_T, learned)
            sampled_logp += compress(answer.logprobs_T, learned)
            advantage += compress(answer.advantages_T, learned)
            teacher_logp += compress(answer.teacher_T, learned)
            lengths.append(sum(learned))
            row += [b] * lengths[-1]
            score += answer.scores
            weight += [answer.weight] * lengths[-1]
            at += read
    return Tensors(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        segment=segment.to(device),
        row_M=torch.tensor(row, device=device),
        column_M=torch.tensor(column, device=device),
        target_M=torch.tensor(target, device=device),
        answer_M=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device),
        sampled_logp_M=torch.tensor(sampled_logp, dtype=torch.float32, device=device),
        advantage_M=torch.tensor(advantage, dtype=torch.float32, device=device),
        weight_M=torch.tensor(weight, dtype=torch.float32, device=device),
        teacher_logp_M=torch.tensor(teacher_logp, dtype=torch.float32, device=device)
        if teacher_logp
        else None,
        score_M=torch.tensor(score, dtype=torch.float32, device=device) if score else None,
    )
