"""The contribution of a graded group to its step: a pack of answers with their advantages and weights.

A group's rewards become advantages (grpo.py), and its answers sequences with a weight for each token. It
needs no tensors, so that the ledger and a run without a model can use it. policy_loss.py is the loss of the packs.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from core.jobs.hyperparameter_places import param_of
from core.jobs.hyperparameters import Resolved
from graders.types import Grade
from worker.model.tree import sequence_of
from worker.refusals import UserMistake
from worker.training import grpo, reward_shaping
from worker.training.objectives.registry import OBJECTIVES
from worker.training.steps import ends_in_text, token_ends
from worker.types import AnswerSignal, Group, Pack, Rollout

# Scales whose advantages are divided by a std of the whole batch.
OF_BATCH = ("batch", "each")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class GroupContribution:
    """The contribution of one group to its step, available as soon as the group is graded.

    The weights and advantages in `pack` still have to be divided by values of the whole step: see `divisors`.
    """

    line: int  # of its prompt
    pack: Pack | None  # None: nothing to compute
    lengths: tuple[int, ...]  # tokens of each answer in the loss
    rewards_N: tuple[float | None, ...]  # the rewards behind its advantages: of answers, or of steps
    scores_N: tuple[float | None, ...]  # those whose std divides the advantages: see `_with_spread`


@dataclass(frozen=True)
class GroupSignal:
    """The training signal of a group of a step, for reports."""

    kind: grpo.Signal
    answers_G: Sequence[AnswerSignal]

    @property
    def is_mixed(self) -> bool:
        return self.kind == "mixed"


def contribution_of(group: Group, settings: Resolved, decode: Decode) -> GroupContribution:
    """Return the answers with a gradient, each with its advantages and its weight in the step's loss.

    An answer with no advantage has exactly no gradient, so it is dropped, unless there is a KL penalty, which pulls
    on every graded answer. With `normalize` "papers" dropping changes nothing but the time: the loss is a mean over all
    graded answers, dropped ones too. With "signal" it is one over those of groups that are computed. Answers that
    `overlong` masks are in the baseline of their group, and neither in the loss nor in its normalisation (DAPO section
    3.4, overlong filtering). Under a teacher, and with rewards of tokens, each token has its own advantage, so every
    answer is computed.
    """
    objective = OBJECTIVES[settings.loss]
    keep_all = settings.kl > 0 or group.has_teacher or settings.has_token_rewards
    rewards_N, advantages_GT = _advantages(group, settings, decode)
    scores_N = tuple(_with_spread(group, rewards_N, settings))
    line = group.prompt.line
    if settings.normalize == "signal" and not keep_all and not any(map(any, advantages_GT)):
        return GroupContribution(line, None, (), rewards_N, scores_N)
    counted = [
        (rollout, advantages_T)
        for (rollout, reward), advantages_T in zip(_pairs(group), advantages_GT, strict=True)
        if _counts(rollout, reward, settings)
    ]
    answers = tuple(
        sequence_of(rollout, advantages_T, objective.token_weight(rollout.sampled_tokens))
        for rollout, advantages_T in counted
        if keep_all or any(advantages_T)
    )
    lengths = tuple(rollout.sampled_tokens for rollout, _ in counted)
    pack = Pack(group.prompt.ids, answers) if answers else None
    return GroupContribution(line, pack, lengths, rewards_N, scores_N)


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


def batch_of(shares: Sequence[GroupContribution], settings: Resolved) -> list[GroupContribution]:
    """Return the shares of the groups that the step's update uses: see `in_batch`."""
    chosen = in_batch([(share.line, share.rewards_N) for share in shares], settings)
    return [share for share, is_in in zip(shares, chosen, strict=True) if is_in]


def in_mini_batches(
    shares: Sequence[GroupContribution], parts: int, *, seed: int
) -> list[list[GroupContribution]]:
    """Divide the groups of a step into `parts` of equal or nearly equal numbers, at random.

    They are sorted by line first, so that the division does not depend on the order in which they were graded. Parts
    without anything to compute are left out.
    """
    order = sorted(range(len(shares)), key=lambda number: shares[number].line)
    random.Random(seed).shuffle(order)
    divided = ([shares[number] for number in sorted(order[first::parts])] for first in range(parts))
    return [part for part in divided if any(share.pack is not None for share in part)]


def divisors(shares: Sequence[GroupContribution], settings: Resolved) -> tuple[float, float]:
    """Return the divisors of the step's gradient: its normaliser, and the std of its rewards.

    `shares` are those of `batch_of`.
    The second is 1 where the advantages have been divided already, or need not be. A penalty is not divided by it.
    """
    lengths = [length for share in shares for length in share.lengths]
    whole = OBJECTIVES[settings.loss].normaliser(lengths, settings.longest_answer)
    if settings.advantage_scale not in OF_BATCH or settings.has_token_rewards:
        return whole, 1.0
    assert settings.std is not None
    rewards_PN, scores_PN = [share.rewards_N for share in shares], [share.scores_N for share in shares]
    return whole, grpo.batch_deviation(rewards_PN, settings.std, settings.normalize, scores_PN) or 1.0


def step_signals(groups_P: Sequence[Group], settings: Resolved) -> list[GroupSignal]:
    """Return what each group of a step teaches. Computed once a step: metrics, ledger, rows and warnings read it."""
    answers_PG = answer_signals(groups_P, settings)
    return [
        GroupSignal(signal(group, settings), answers_G)
        for group, answers_G in zip(groups_P, answers_PG, strict=True)
    ]


def answer_signals(groups_P: Sequence[Group], settings: Resolved) -> list[list[AnswerSignal]]:
    """Return the advantages of all answers of a step, for reports: `contribution_of` and `divisors` made readable."""
    chosen = in_batch(
        [(group.prompt.line, compared_rewards(group, settings)) for group in groups_P], settings
    )
    batch = iter(
        _batch_signals([group for group, is_in in zip(groups_P, chosen, strict=True) if is_in], settings)
    )
    return [
        next(batch)
        if is_in
        else [AnswerSignal(None, (0.0,) * len(grade.steps), False) for grade in group.grades_G]
        for group, is_in in zip(groups_P, chosen, strict=True)
    ]


def _batch_signals(groups_P: Sequence[Group], settings: Resolved) -> list[list[AnswerSignal]]:
    scale, std, normalize = settings.advantage_scale, settings.std, settings.normalize
    scale = "batch" if scale == "each" else scale
    if settings.has_token_rewards:
        return [
            [AnswerSignal(None, (), _counts(*pair, settings)) for pair in _pairs(group)] for group in groups_P
        ]
    if settings.supervision == "outcome":
        rewards_PG = [compared_rewards(group, settings) for group in groups_P]
        scores_PG = [_with_spread(*one, settings) for one in zip(groups_P, rewards_PG, strict=True)]
        steps_PGJ: list[list[tuple[float, ...]]] = [[()] * len(group.rollouts_G) for group in groups_P]
        first_PG = (
            [grpo.leave_one_out(rewards_G) for rewards_G in rewards_PG]
            if settings.loss == "rloo"
            else grpo.advantages(rewards_PG, scale, std, normalize, scores_PG)
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
        _group_signals(group, first_G, steps_GJ, settings)
        for group, first_G, steps_GJ in zip(groups_P, first_PG, steps_PGJ, strict=True)
    ]


def training_rewards(group: Group, settings: Resolved) -> list[float | None]:
    """Return the rewards of a group in training: of its answers, with what `overlong` and `length` take off, or of
    their steps."""
    if settings.supervision == "process":
        return [step.score for grade in group.grades_G for step in grade.steps]
    fined_G = [_shaped(*pair, settings) for pair in _pairs(group)]
    if not settings.length_weight:
        return fined_G
    lengths_G = [_length(rollout) for rollout in group.rollouts_G]
    short_G = reward_shaping.shortened(group.rewards_G, lengths_G, settings.length_weight)
    return [
        None if reward is None or fined is None or short is None else fined + short - reward
        for reward, fined, short in zip(group.rewards_G, fined_G, short_G, strict=True)
    ]


def compared_rewards(group: Group, settings: Resolved) -> list[float | None]:
    """Return the numbers that become advantages: the training rewards, or with the scale `each` their normalized parts,
    added up.

    Raises:
        UserMistake: the scale `mean` has a negative score.
    """
    rewards_N = training_rewards(group, settings)
    if settings.advantage_scale == "mean" and any(reward is not None and reward < 0 for reward in rewards_N):
        message = (
            f"The grader gave an answer to line {group.prompt.line} a negative score, and loss.advantage_scale 'mean' "
            "divides by the mean score of a prompt. Choose another scale, or have the grader give scores of at least 0."
        )
        raise UserMistake("invalid_value", message, param_of("reinforcement", "advantage_scale"))
    if settings.advantage_scale != "each":
        return rewards_N
    assert settings.part_weights is not None and settings.std is not None, (
        "worker/prepare/task.py sets the weights"
    )
    names, weights_K = [*settings.part_weights], [*settings.part_weights.values()]
    scores_GK = [part_scores(grade, names, settings.part_invalid_grade) for grade in group.grades_G]
    return reward_shaping.each_normalized(scores_GK, weights_K, settings.std)


def _with_spread(
    group: Group, rewards_N: Sequence[float | None], settings: Resolved
) -> Sequence[float | None]:
    """Return the rewards whose std divides the advantages: the compared ones, without what `length` takes off.

    With it, right answers of different lengths would have a std of lengths alone, and its weight no effect.
    """
    return [_shaped(*pair, settings) for pair in _pairs(group)] if settings.length_weight else rewards_N


def part_scores(grade: Grade, names: Sequence[str], stand_in: float | None) -> list[float] | None:
    """Return the scores of the parts of a multi grader with these names. None: the answer is not graded.

    Args:
        stand_in: the score of a part that failed.
    """
    if grade.score is None:
        return None
    scores = [grade.sub_grades[name].score for name in names]
    known = [stand_in if score is None else score for score in scores]
    return [score for score in known if score is not None] if None not in known else None


def signal(group: Group, settings: Resolved) -> grpo.Signal:
    """Return what the training rewards of a group teach: see `grpo.signal`.

    Right answers of different lengths have signal where `length` counts: they are trained on. With the scale `each` a
    group has signal if the sum of its normalized parts varies by more than rounding, although the scores of its answers
    may be equal.
    """
    rewards_N = training_rewards(group, settings)
    kind = grpo.signal(rewards_N)
    if settings.length_weight and kind == "equal":  # right answers of equal length are all right
        by_score = grpo.signal(_with_spread(group, rewards_N, settings))
        return kind if by_score == "mixed" else by_score
    if settings.advantage_scale != "each" or kind == "ungraded":
        return kind
    if grpo.signal(compared_rewards(group, settings)) == "mixed":
        return "mixed"
    return "equal" if kind == "mixed" else kind


def _group_signals(
    group: Group, first_G: Sequence[float], steps_GJ: Sequence[tuple[float, ...]], settings: Resolved
) -> list[AnswerSignal]:
    if group.has_teacher:
        return [
            AnswerSignal(grpo.mean_distillation_advantage(rollout.logprobs_T, rollout.teacher_T), (), True)
            for rollout in group.rollouts_G
        ]
    is_trained_G = [
        _counts(*pair, settings) and (settings.kl > 0 or bool(first) or any(steps_J))
        for pair, first, steps_J in zip(_pairs(group), first_G, steps_GJ, strict=True)
    ]
    return [
        AnswerSignal(first if is_trained else None, steps_J, is_trained)
        for first, steps_J, is_trained in zip(first_G, steps_GJ, is_trained_G, strict=True)
    ]


def _counts(rollout: Rollout, reward: float | None, settings: Resolved) -> bool:
    """Return whether an answer is in the loss; `overlong` excludes some that are in their group's baseline.

    An answer of which a spent thinking budget forced every token was not sampled at all.
    """
    if reward is None or rollout.sampled_tokens == 0:
        return False
    return not (settings.overlong == "mask" and rollout.is_truncated)


def _advantages(
    group: Group, settings: Resolved, decode: Decode
) -> tuple[tuple[float | None, ...], list[tuple[float, ...]]]:
    """Return the training rewards, and an advantage per token of each answer, before division by the batch's std.

    With rewards of tokens, the trainer computes the advantages: each token has the reward of its answer here.
    """
    if settings.has_token_rewards:
        rewards_G = training_rewards(group, settings)
        lengths = [len(rollout.output_ids_T) for rollout in group.rollouts_G]
        return tuple(rewards_G), [(reward or 0.0,) * n for reward, n in zip(rewards_G, lengths, strict=True)]
    scale = "none" if settings.advantage_scale in OF_BATCH else settings.advantage_scale
    rewards_N = compared_rewards(group, settings)
    if settings.supervision == "outcome":
        if settings.loss == "rloo":
            advantages_G = grpo.leave_one_out(rewards_N)
        else:
            scores_G = _with_spread(group, rewards_N, settings)
            [advantages_G] = grpo.advantages([rewards_N], scale, settings.std, scores_PG=[scores_G])
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
    return reward + grpo.overlong_penalty(_length(rollout), settings.longest_answer, settings.overlong_buffer)


def _length(rollout: Rollout) -> int:
    """Of an episode only sampled tokens are limited, which tokens that close a thought at its budget are not."""
    return rollout.sampled_tokens if rollout.nodes else len(rollout.output_ids_T)


def _by_step(
    rollout: Rollout, steps_J: Sequence[float], ends_J: Sequence[int], decode: Decode
) -> tuple[float, ...]:
    if len(rollout.nodes) > 1:
        raise ValueError("steps are of the text of one call: train episodes with supervision 'outcome'")
    ends_J = ends_in_text(ends_J, rollout.content, rollout.text)
    ends = token_ends(rollout.output_ids_T, rollout.text, ends_J, decode)
    return tuple(grpo.process_advantages(steps_J, ends, len(rollout.output_ids_T)))
