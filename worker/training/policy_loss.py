"""The loss of sampled answers with rewards: GRPO and its relatives, PPO, and distillation of sampled answers.

First a graded group becomes a pack, whose answers have advantages and weights (`contribution_of`). Then the loss of a
micro-batch of packs is computed (`PolicyLoss`). Formulas are in worker/training/objectives/, grpo.py, token_rewards.py
and ppo.py.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import Parameter

from core.jobs.hyperparameter_places import param_of
from core.jobs.hyperparameters import Resolved
from graders.types import Grade
from worker.model import token_constraints
from worker.model.batch import Tensors, answers_of, by_answer, tensors_of
from worker.model.policy import Policy
from worker.model.token_logprobs import logprobs, logprobs_and_entropy, predicting
from worker.model.tree import sequence_of
from worker.model.value_head import ValueHead
from worker.refusals import UserMistake
from worker.training import grpo, importance, ppo, reward_shaping, token_rewards
from worker.training.loss import Batch, GradientSums, KeptValues, Loss, StepValues
from worker.training.objective import Tokens, token_loss
from worker.training.objectives.registry import OBJECTIVES, objective_of
from worker.training.sampler_gate import SamplerGap
from worker.training.steps import ends_in_text, token_ends
from worker.training.token_rewards import Moments, StepMoments
from worker.types import AnswerKey, AnswerSignal, Group, Pack, Rollout, TokenValues

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


class PolicyLoss(Loss):
    """A sum over the trained tokens of a step.

    With rewards of tokens, the order is: `remember` of all micro-batches, `reward_tokens`, `normalize`, then the loss.
    """

    couples_answers = False

    def __init__(self, policy: Policy, settings: Resolved, *, response_schema: str = "") -> None:
        super().__init__(policy, has_reference=settings.has_reference)
        self._settings = settings
        self.objective = objective_of(settings)
        # These take a ratio, a mean, or a sum of rewards, over the tokens of a whole episode.
        self.couples_calls = (
            self.objective.couples_calls or settings.has_token_rewards or settings.couples_importance
        )
        self.response_schema = response_schema
        self.value_head: ValueHead | None = None
        if settings.value_weight is not None:
            self.value_head = ValueHead(
                policy.hidden_size, policy.device, adapter_weight=settings.value_weight
            )

    @property
    def settings(self) -> Resolved:
        return self._settings

    @property
    def trainable(self) -> list[Parameter]:
        """Of the policy, and of a value head."""
        head = [] if self.value_head is None else list(self.value_head.parameters())
        return [*super().trainable, *head]

    @property
    def filler(self) -> Pack:
        pack = super().filler
        return replace(pack, sequences=(replace(pack.sequences[0], weight=0.0),))

    def remember(self, batch: Batch) -> None:
        """Keep the log-probabilities under the policy that sampled, and under the reference."""
        tensors = self.laid_out(batch)
        batch.ref_logp = self._reference_logprobs(tensors) if self.settings.kl > 0 else None
        batch.old_logp, _, batch.old_value = self.forward(tensors)

    def reward_tokens(self, batches: Iterable[Batch], kl: float) -> StepMoments:
        """Compute the advantages of all remembered tokens, and return their moments.

        Args:
            kl: the weight of the penalty in this step.
        """
        moments = StepMoments()
        for batch in batches:
            of_batch = self._reward_tokens(batch, kl)
            if not batch.is_filler:
                moments += of_batch
        return moments

    def _reward_tokens(self, batch: Batch, kl: float) -> StepMoments:
        settings, tensors = self.settings, self.laid_out(batch)
        assert batch.old_logp is not None, "the micro-batches are remembered"
        kl_M = torch.zeros_like(batch.old_logp)
        if batch.ref_logp is not None:
            kl_M = grpo.kl_k1(batch.old_logp, batch.ref_logp)
        answer_M = tensors.answer_M
        reward_M = token_rewards.token_rewards(tensors.advantage_M, kl_M, answer_M, kl)
        if batch.old_value is None:
            batch.advantage = token_rewards.reinforce_plus_plus(reward_M, answer_M)
            return StepMoments(Moments.of(batch.advantage))
        assert settings.gamma is not None and settings.gae_lambda is not None
        batch.advantage = ppo.gae(reward_M, batch.old_value, answer_M, settings.gamma, settings.gae_lambda)
        return_M = batch.advantage + batch.old_value.double()
        batch.returns = return_M.float()
        return StepMoments(Moments.of(batch.advantage), Moments.of(return_M))

    def normalize(self, batches: Iterable[Batch], mean: float, std: float) -> None:
        """Normalize the advantages of all remembered tokens. After an out-of-memory error it can be called again."""
        for batch in batches:
            assert batch.advantage is not None, "`reward_tokens` comes first"
            batch.normalized_advantage = token_rewards.normalized(batch.advantage, mean, std).float()

    def __call__(self, batch: Batch, values: StepValues) -> tuple[Tensor, GradientSums]:
        settings = self.settings
        tensors = self.laid_out(batch)
        if settings.kl > 0 and batch.ref_logp is None:
            batch.ref_logp = self._reference_logprobs(tensors)
        logp_M, entropy_M, value_M = self.forward(tensors, batch)
        if batch.old_logp is None:
            # The policy of the first pass is the one that sampled, so its log-probabilities are the old ones.
            batch.old_logp = logp_M.detach()
        sampled_M, answer_M = tensors.sampled_logp_M, tensors.answer_M
        # Without a correction the ratio is to the sampler's probabilities, so the clip also acts on their gap.
        old_M = batch.old_logp if settings.importance != "none" else sampled_M
        importance_M = importance.weights_of(old_M, sampled_M, answer_M, settings)
        advantage_M = (
            tensors.advantage_M if batch.normalized_advantage is None else batch.normalized_advantage
        )
        if tensors.teacher_logp_M is not None:
            advantage_M = grpo.distillation_advantages(batch.old_logp, tensors.teacher_logp_M)
        batch.used_advantage = advantage_M
        is_recent_M = self._is_recent(logp_M, sampled_M, advantage_M, answer_M)
        loss = token_loss(
            logp_M,
            old_M,
            advantage_M * is_recent_M,
            tensors.weight_M * importance_M,
            answer_M,
            objective=self.objective,
            # A penalty in the reward is in the advantages already.
            kl=0.0 if settings.has_token_rewards else values.kl * values.std,
            kl_estimator=settings.kl_estimator,
            ref_logp=batch.ref_logp,
            log_ratio_penalty=settings.log_ratio_penalty * values.std,
        )
        value_loss = self._value_loss(batch, value_M, tensors.weight_M)
        with torch.no_grad():
            clipped = self.objective.clipped(Tokens(logp_M, old_M, advantage_M, answer_M))
            sums = GradientSums(
                loss=loss.item(),
                value_loss=value_loss.item(),
                tokens=len(logp_M),
                clipped=clipped.sum().item(),
                masked=((importance_M == 0) | ~is_recent_M).sum().item(),
                entropy=entropy_M.sum().item(),
                kl=0.0 if batch.ref_logp is None else grpo.kl_k3(logp_M, batch.ref_logp).sum().item(),
            )
            sums += _gap_sums(batch.old_logp, sampled_M)
        return loss + value_loss, sums

    def _is_recent(self, logp_M: Tensor, sampled_M: Tensor, advantage_M: Tensor, answer_M: Tensor) -> Tensor:
        """Which tokens the off-policy mask keeps under the current policy."""
        threshold = self.settings.off_policy_threshold
        if not threshold:
            return torch.ones_like(answer_M, dtype=torch.bool)
        return importance.is_recent(logp_M, sampled_M, advantage_M, answer_M, threshold)

    def _value_loss(self, batch: Batch, value_M: Tensor | None, weight_M: Tensor) -> Tensor:
        """The sum over the tokens; 0 without a value head."""
        if value_M is None:
            return torch.zeros((), device=weight_M.device)
        assert (
            batch.old_value is not None and batch.returns is not None and self.settings.value_clip is not None
        )
        losses_M = ppo.value_loss(value_M, batch.old_value, batch.returns, self.settings.value_clip)
        return (weight_M * losses_M).sum()

    def token_values(self, batches: Iterable[Batch], std: float) -> dict[AnswerKey, TokenValues]:
        """Return what the step's passes computed with, for each token of each answer.

        Args:
            std: of the step, as in `divisors`. With `overlap` it is not known in the first pass.
        """
        found: dict[AnswerKey, Tensor] = {}  # [2, T]
        for batch in batches:
            if batch.is_filler or batch.old_logp is None or batch.used_advantage is None:
                continue  # a mini-batch after a gradient that was not finite
            values = torch.stack([batch.old_logp.cpu(), batch.used_advantage.cpu() / std])
            for answer, part in by_answer(batch.packs, values):
                unknown = torch.full((2, answer.undivided.trained_tokens), math.nan)
                found.setdefault(answer.undivided.key, unknown)[:, answer.index] = part
        return {key: TokenValues(*values.numpy()) for key, values in found.items()}

    def watched_kl(self, batches: Sequence[Batch]) -> float | None:
        """Estimate the KL of the sampling policy for monitoring, from one forward pass: of the first pack, or of the
        rows of the first answer.

        Not during sampling, because the reference is the same model with its adapter disabled.

        Returns:
            None: this rank has no pack, or all weights are trained and no copy of the first ones is kept.
        """
        if not batches or (self.reference is None and not self.policy.has_base):
            return None
        batch = Batch(_first_whole(batches[0].packs), is_filler=batches[0].is_filler)
        ref_logp = self._reference_logprobs(self.laid_out(batch))
        KeptValues.of(batches[:1]).restore([batch])
        assert batch.old_logp is not None
        return grpo.kl_k3(batch.old_logp, ref_logp).mean().item()

    def sampler_gap(self, batches: Sequence[Batch]) -> SamplerGap | None:
        """Compare a micro-batch of the step with the sampler, under the current adapter. None: there is none."""
        if not batches:
            return None
        tensors = self.laid_out(batches[0])
        gap_M = (self.logprobs(tensors).double() - tensors.sampled_logp_M.double()).abs()
        return SamplerGap(gap_M.mean().item(), gap_M.max().item(), len(gap_M))

    @torch.no_grad()
    def _reference_logprobs(self, tensors: Tensors) -> Tensor:
        """Compute log-probabilities [M] under the reference."""
        with self.as_reference():
            return self.logprobs(tensors)

    @property
    def temperature(self) -> float:
        return self.settings.temperature

    def laid_out(self, batch: Batch) -> Tensors:
        # A filler need not be an answer that the schema allows.
        return tensors_of(batch.packs, self.policy.device) if batch.is_filler else self.tensors(batch.packs)

    def tensors(self, packs: Sequence[Pack]) -> Tensors:
        tensors = tensors_of(packs, self.policy.device)
        if not self.response_schema:
            return tensors
        allowed = [
            token_constraints.allowed(self.policy, self.response_schema, answer.undivided)[answer.index]
            for answer in answers_of(packs)
        ]
        return replace(tensors, allowed_M=torch.cat(allowed).to(self.policy.device))

    def logprobs(self, tensors: Tensors) -> Tensor:
        """Compute the log-probability [M] of each trained token."""
        return logprobs(self.policy, tensors, self.settings.temperature)

    def forward(self, tensors: Tensors, batch: Batch | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the log-probability [M] of each trained token, and the entropy [M] and value [M] at its position.

        There is no value without a value head. `batch` is that of a pass before an update, which is measured.
        """
        hidden = predicting(self.policy, tensors)
        if batch is not None:
            self.keep_output(batch, hidden)
        value_M = None if self.value_head is None else self.value_head(hidden)
        return *logprobs_and_entropy(self.policy, hidden, tensors, self.settings.temperature), value_M


def _first_whole(packs: Sequence[Pack]) -> list[Pack]:
    """The first pack of a micro-batch, with the other rows of its answers."""
    first = {id(answer.undivided) for answer in answers_of(packs[:1])}
    return [pack for pack in packs if any(id(answer.undivided) in first for answer in answers_of([pack]))]


def _gap_sums(old_M: Tensor, sampled_M: Tensor) -> GradientSums:
    """How far the sampler's log-probabilities are from the trainer's."""
    # In float64, because the weight of a broken sampler may overflow float32.
    gap_M = old_M.double() - sampled_M.double()
    ratio_M = gap_M.exp()
    return GradientSums(
        gap=gap_M.abs().sum().item(),
        gap_max=gap_M.abs().max().item(),
        gap_k1=-gap_M.sum().item(),
        gap_k3=(torch.expm1(gap_M) - gap_M).sum().item(),
        ratio=ratio_M.sum().item(),
        ratio_squared=(ratio_M**2).sum().item(),
    )
