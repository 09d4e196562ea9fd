"""Steps of training with the options of other trainers, on a tiny model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.jobs.hyperparameters import Resolved
from core.step_metrics import StepMetrics
from graders.types import Grade
from tests.fakes import learn
from tests.worker.test_training import asked, packed_gradients, packs_of, plain_logprobs, relative_difference
from tests.worker.test_trust_region import Heard
from tests.worker.test_updates import MIXED, sampled
from worker.model.policy import Policy
from worker.recording import alerts
from worker.training.loss import Batch, StepValues
from worker.training.policy_loss import PolicyLoss
from worker.training.trainer import PeftTrainer
from worker.types import Group, Pack, UpdateMetrics

MakePolicy = Callable[..., Policy]


def settings(advanced: dict[str, Any]) -> Resolved:
    return asked({"step_kl": 0.0, "learning_rate": 0.01, **advanced})


def stepped(
    make_policy: MakePolicy, advanced: dict[str, Any], *, gap: float = 0.0
) -> tuple[Policy, UpdateMetrics]:
    """One step on answers whose sampler claims to have found each token likelier by `gap` nats."""
    policy = make_policy(moved=True)
    groups = with_gap(sampled(policy, MIXED), gap)
    return policy, learn(PeftTrainer(policy, settings(advanced), token_budget=512), groups)


def with_gap(groups: Sequence[Group], gap: float) -> list[Group]:
    return [
        replace(
            group,
            rollouts_G=tuple(
                replace(one, logprobs_T=tuple(logprob + gap for logprob in one.logprobs_T))
                for one in group.rollouts_G
            ),
        )
        for group in groups
    ]


def distance(policy: Policy, other: Policy) -> float:
    pairs = zip(policy.trainable, other.trainable, strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


def test_dppo_takes_the_step_of_dapo_without_a_std_on_the_policy_that_sampled(
    make_policy: MakePolicy,
) -> None:
    dppo, update = stepped(make_policy, {"loss": "dppo", "importance": "none"})
    dapo, _ = stepped(make_policy, {"loss": "dapo", "advantage_scale": "none"})

    assert distance(dppo, dapo) < 1e-4
    assert update.clip_fraction == 0.0


def test_an_answer_beyond_its_bounds_does_not_move_the_policy(make_policy: MakePolicy) -> None:
    rejects = {"importance_reject": "geometric", "reject_low": 0.9, "reject_high": 1.1}
    near, moved = stepped(make_policy, rejects, gap=0.01)
    far, still = stepped(make_policy, rejects, gap=0.5)

    assert moved.masked_fraction == 0.0
    assert moved.grad_norm
    assert (still.masked_fraction, still.grad_norm) == (1.0, 0.0)
    assert distance(far, make_policy(moved=True)) == 0.0
    assert distance(near, far) > 0


def test_masked_tokens_are_also_counted_among_those_that_teach(make_policy: MakePolicy) -> None:
    """The KL penalty pulls the tokens of the second group, which have no advantage, to the reference."""
    policy = make_policy(moved=True)
    rejects = {"kl": 0.1, "importance_reject": "geometric", "reject_low": 0.9, "reject_high": 1.1}
    mixed, even = sampled(policy, [[1.0, 0.0, 1.0, 0.0], [1.0] * 4])

    update = learn(PeftTrainer(policy, settings(rejects), token_budget=512), [*with_gap([mixed], 0.5), even])

    assert update.masked_fraction is not None
    assert 0.0 < update.masked_fraction < 1.0
    assert update.teaching_masked_fraction == 1.0


def test_the_weight_of_an_answer_is_that_of_all_its_tokens(make_policy: MakePolicy) -> None:
    masks = {"importance": "mask", "importance_cap": 3.0, "importance_floor": 0.5}

    by_token = stepped(make_policy, masks, gap=0.5)[1].masked_fraction
    by_answer = stepped(make_policy, masks | {"importance_level": "answer"}, gap=0.5)[1].masked_fraction

    assert by_token == 0.0
    assert by_answer is not None
    assert by_answer > 0.5


def test_the_off_policy_mask_leaves_out_answers_of_another_policy_alone(make_policy: MakePolicy) -> None:
    threshold = {"off_policy_threshold": 0.3, "updates_per_batch": 2, "learning_rate": 1e-6}

    _, recent = stepped(make_policy, threshold)
    _, stale = stepped(make_policy, threshold, gap=0.6)

    assert recent.masked_fraction == 0.0
    assert stale.masked_fraction is not None
    assert 0.2 < stale.masked_fraction < 0.8  # those with an advantage stay


def test_the_off_policy_mask_is_computed_again_for_each_update(make_policy: MakePolicy) -> None:
    threshold = {"off_policy_threshold": 0.3, "updates_per_batch": 2, "learning_rate": 0.01}

    _, update = stepped(make_policy, threshold)

    assert update.masked_fraction is not None
    assert update.masked_fraction > 0  # the first update has moved the policy


def slopes(policy: Policy, packs: Sequence[Pack], run: Resolved) -> list[Tensor]:
    loss, _ = PolicyLoss(policy, run)(Batch(packs), StepValues(std=1.0, kl=run.kl))
    return list(torch.autograd.grad(loss, policy.trainable))


def without_advantage(pack: Pack) -> Pack:
    """Of answers with a negative one."""
    return replace(
        pack,
        sequences=tuple(
            replace(one, advantages_T=tuple(max(0.0, a) for a in one.advantages_T)) for one in pack.sequences
        ),
    )


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_the_off_policy_mask_removes_the_advantage_of_an_answer_and_no_penalty(
    make_policy: MakePolicy, kl: float
) -> None:
    policy = make_policy(moved=True)
    common = {"kl": kl, "updates_per_batch": 2}
    plain, masked = asked(common), asked(common | {"off_policy_threshold": 0.3})
    packs = packs_of(with_gap(sampled(policy, MIXED), 0.6), plain, str)

    found = slopes(policy, packs, masked)

    assert relative_difference(found, slopes(policy, [*map(without_advantage, packs)], plain)) < 1e-6
    assert relative_difference(found, slopes(policy, packs, plain)) > 0.01


def test_the_penalty_of_the_log_ratio_is_not_divided_by_the_std(make_policy: MakePolicy) -> None:
    policy = make_policy(moved=True)
    groups = with_gap(sampled(policy, MIXED), 0.1)
    loss = {"loss": "dppo", "importance": "none", "advantage_scale": "batch"}
    with_it, without = (
        packed_gradients(policy, groups, asked(loss | {"log_ratio_penalty": penalty}), 512)
        for penalty in (0.5, 0.0)
    )

    answers = [(group.prompt.ids, one) for group in groups for one in group.rollouts_G]
    penalty = sum(
        (0.5 * (plain_logprobs(policy, ids, one.output_ids_T) - torch.tensor(one.logprobs_T)) ** 2).sum()
        for ids, one in answers
    ) / sum(len(one.output_ids_T) for _, one in answers)
    expected = list(torch.autograd.grad(penalty, policy.trainable))

    assert relative_difference([a - b for a, b in zip(with_it, without, strict=True)], expected) < 1e-3


@pytest.mark.parametrize(
    "advanced",
    [
        {"loss": "dppo", "importance": "none", "divergence": "kl", "updates_per_batch": 2},
        {"ratio_max": 2.0, "updates_per_batch": 2},
        {"advantage_scale": "mean"},
        {"length": {"weight": 0.25}},
        {"kl": 0.1, "kl_estimator": "k2"},
    ],
    ids=str,
)
def test_a_step_has_a_gradient(make_policy: MakePolicy, advanced: dict[str, Any]) -> None:
    assert stepped(make_policy, advanced)[1].grad_norm


def test_each_part_of_a_grader_moves_the_policy(make_policy: MakePolicy) -> None:
    """The scores of all answers are equal, and their parts are not."""
    policy = make_policy(moved=True)
    run = settings({"advantage_scale": "each"}).model_copy(update={"part_weights": {"a": 1.0, "b": 0.2}})
    grades = tuple(Grade(1.0, sub_grades={"a": Grade(a), "b": Grade(1.0 - a)}) for a in (1.0, 0.0, 1.0, 0.0))
    groups = [replace(group, grades_G=grades) for group in sampled(policy, MIXED)]

    update = learn(PeftTrainer(policy, run, token_budget=512), groups)

    assert update.grad_norm
    assert torch.isfinite(torch.tensor(update.loss))


def test_the_first_step_that_leaves_out_most_of_its_tokens_is_a_warning() -> None:
    def warned(*shares: float | None) -> list[tuple[str, int]]:
        recorder = Heard()
        steps: list[StepMetrics] = []
        for number, share in enumerate(shares, start=1):
            steps.append(StepMetrics(step=number, masked_fraction=share))
            alerts.report_masked(steps, recorder)  # type: ignore[arg-type]
        return [(level, data["step"]) for level, _, data in recorder.said]

    assert warned(0.1, None, 0.5) == []
    assert warned(0.1, 1.0, 1.0, 0.2, 0.9) == [("warn", 2)]
