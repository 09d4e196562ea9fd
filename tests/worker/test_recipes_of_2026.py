"""Options of other trainers against numbers and loops in float64 that share no code with ours.

The fixture has two answers, of three and two tokens, in one group. Losses are sums over tokens, divided by 5.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from core.jobs.hyperparameter_groups import Divergence, KlEstimator
from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.step_metrics import StepMetrics
from graders.types import ErrorKind, Grade
from tests.hyperparameters import in_groups
from worker.recording import metrics
from worker.refusals import UserMistake
from worker.training import contributions, grpo, importance, reward_shaping
from worker.training.objective import Objective, Tokens, token_loss
from worker.training.objectives.clipped import ClippedObjective
from worker.training.objectives.dppo import DppoObjective
from worker.training.objectives.gspo import GspoObjective
from worker.training.objectives.registry import objective_of
from worker.training.objectives.rloo import RlooObjective
from worker.types import Group, Prompt, Rollout

ANSWER = torch.tensor([0, 0, 0, 1, 1])


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOGP = of(-0.2, -1.0, -0.1, -2.0, -0.5)
OLD = of(-0.3, -1.6, -0.4, -1.0, -0.7)
SAMPLED = of(-0.3, -1.5, -0.45, -0.9, -0.55)
ADVANTAGE = of(0.5, 0.5, 0.5, -0.5, -0.5)
REF = of(-0.5, -0.9, -0.3, -1.2, -1.0)
ONES = torch.ones(5, dtype=torch.float64)
DAPO = ClippedObjective(0.8, 1.28)


def computed(
    objective: Objective,
    anchor: Tensor,
    *,
    weight: Tensor = ONES,
    advantage: Tensor = ADVANTAGE,
    **penalties: Any,
) -> tuple[float, list[float]]:
    """The loss, and its gradient by the log-probability of each token."""
    logp = LOGP.clone().requires_grad_()
    loss = token_loss(logp, anchor, advantage, weight / 5, ANSWER, objective=objective, **penalties)
    [gradient] = torch.autograd.grad(loss, logp)
    return loss.item(), gradient.tolist()


def settings(**advanced: Any) -> Resolved:
    asked = Hyperparameters.model_validate({"advanced": in_groups(advanced)})
    return resolve(asked, rows=100, parameters=1, context=128)


def weights(**advanced: Any) -> Tensor:
    return importance.weights_of(OLD, SAMPLED, ANSWER, settings(**advanced))


def close(*values: float) -> Any:
    return pytest.approx(values, abs=1e-8)


# DPPO.


@pytest.mark.parametrize(
    ("penalty", "value", "gradient"),
    [
        (1e-3, -0.1699431092, (-0.11047709, -0.16467213, 0.00014, -0.00044, 0.10514711)),
        (0.0, -0.1702621092, (-0.11051709, -0.16487213, 0.0, 0.0, 0.10512711)),
    ],
)
def test_dppo_is_the_default_loss_of_prime_rl(
    penalty: float, value: float, gradient: tuple[float, ...]
) -> None:
    found, slopes = computed(DppoObjective(0.2, 0.2, "tv"), SAMPLED, log_ratio_penalty=penalty)

    assert found == pytest.approx(value, abs=1e-10)
    assert slopes == close(*gradient)


@pytest.mark.parametrize(
    ("divergence", "bound", "gradient"),
    [
        ("tv", 0.2, (-0.11051709, -0.18221188, 0.0, 0.0, 0.12214028)),
        ("kl", 0.05, (-0.11051709, 0.0, 0.0, 0.0, 0.12214028)),
    ],
)
def test_dppo_relative_to_the_old_policy_has_the_gradient_of_verl(
    divergence: Divergence, bound: float, gradient: tuple[float, ...]
) -> None:
    assert computed(DppoObjective(bound, bound, divergence), OLD)[1] == close(*gradient)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("seed", range(5))
def test_dppo_equals_a_loop_over_tokens(divergence: Divergence, seed: int) -> None:
    rng = random.Random(seed)
    now = [rng.uniform(-4, -0.01) for _ in range(40)]
    then = [min(-1e-3, logp + rng.gauss(0, 0.5)) for logp in now]
    advantages = [rng.choice([-1.5, -0.5, 0.0, 0.7]) for _ in now]
    low, high = 0.03, 0.05
    slopes, dropped = [], []
    for logp, old, advantage in zip(now, then, advantages, strict=True):
        p, q = math.exp(logp), math.exp(old)
        far = abs(p - q) if divergence == "tv" else q * (old - logp) + (1 - q) * math.log((1 - q) / (1 - p))
        drop = (p > q and far > high) if advantage > 0 else (p < q and far > low)
        dropped.append(drop)
        slopes.append((0.0 if drop else -advantage * math.exp(logp - old)) + 2e-3 * (logp - old))

    leaf = of(*now).requires_grad_()
    objective = DppoObjective(low, high, divergence)
    loss = token_loss(
        leaf, of(*then), of(*advantages), torch.ones_like(leaf), torch.zeros(40).long(), objective=objective,
        log_ratio_penalty=1e-3,
    )  # fmt: skip
    [gradient] = torch.autograd.grad(loss, leaf)

    assert gradient.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    tokens = Tokens(leaf.detach(), of(*then), of(*advantages), torch.zeros(40).long())
    assert objective.clipped(tokens).tolist() == dropped
    assert any(dropped)


def test_dppo_is_reinforce_on_the_policy_that_sampled() -> None:
    assert computed(DppoObjective(0.2, 0.2, "tv"), LOGP)[1] == close(*(-ADVANTAGE / 5).tolist())


def test_a_ratio_that_overflows_leaves_no_gradient_that_is_not_a_number() -> None:
    objective = DppoObjective(0.2, 0.2, "tv")
    logp = torch.tensor([-0.1], requires_grad=True)
    loss = token_loss(
        logp, torch.tensor([-500.0]), torch.ones(1), torch.ones(1), torch.zeros(1).long(), objective=objective
    )

    assert torch.autograd.grad(loss, logp)[0].tolist() == [0.0]


@pytest.mark.parametrize(("divergence", "bound"), [("tv", 0.2), ("kl", 0.05)])
def test_dppo_has_the_bounds_of_its_divergence_and_no_importance(divergence: str, bound: float) -> None:
    run = settings(loss="dppo", divergence=divergence)

    assert objective_of(run) == DppoObjective(bound, bound, divergence)  # type: ignore[arg-type]
    assert (run.importance, run.advantage_scale, run.log_ratio_penalty) == ("none", "none", 1e-3)
    assert settings(loss="dppo", off_policy_steps=2).importance == "none"


# Weights and masks of answers.


def test_weights_of_tokens_are_truncated_importance_sampling() -> None:
    assert weights().tolist() == close(1, 0.9048374180, 1.0512710964, 0.9048374180, 0.8607079764)


def test_the_weight_of_an_answer_is_the_product_of_those_of_its_tokens() -> None:
    found = weights(importance_level="answer", importance_cap=3.0)

    assert found.tolist() == close(*[0.9512294245] * 3, *[0.7788007831] * 2)
    value, gradient = computed(DAPO, OLD, weight=found)
    assert value == pytest.approx(-0.1912148372, abs=1e-10)
    assert gradient == close(-0.10512711, 0, 0, 0, 0.09512294)


@pytest.mark.parametrize(("kind", "expected"), [("mask", 0.0), ("truncate", 3.0)])
def test_an_answer_beyond_the_cap_is_left_out_or_cut_off(kind: Any, expected: float) -> None:
    assert importance.weight(of(1.2), kind, 3.0, 0.0).item() == pytest.approx(expected)


def test_the_default_of_trl_masks_answers_without_a_lower_bound() -> None:
    of_answers = {"importance": "mask", "importance_level": "answer"}
    run = settings(**of_answers)
    unlikely = SAMPLED + 2.0  # products e^-6 and e^-4

    assert importance.weights_of(OLD, unlikely, ANSWER, run).gt(0).all()
    floored = settings(**of_answers, importance_floor=1 / 3)
    assert importance.weights_of(OLD, unlikely, ANSWER, floored).eq(0).all()


def test_answers_are_rejected_by_the_geometric_mean() -> None:
    asked = {"importance_reject": "geometric", "reject_low": 0.9, "reject_high": 1.1}

    assert weights(**asked).tolist() == close(1, 0.9048374180, 1.0512710964, 0, 0)  # 0.98347, 0.88250
    assert weights(**asked | {"reject_low": 0.88}).gt(0).all()


def test_answers_are_rejected_by_the_mean_of_k3() -> None:
    def rejected(bound: float) -> list[bool]:
        return (weights(importance_reject="k3", reject_high=bound) == 0).tolist()

    assert rejected(0.0078) == [False] * 5  # 0.0020361715, 0.0077726972
    assert rejected(0.0077) == [False] * 3 + [True] * 2
    assert rejected(0.0020) == [True] * 5


def test_a_constant_gap_rejects_answers_of_any_length_alike() -> None:
    """The product over 100 tokens is e^1.2, beyond a cap of 3; the means are those of one token."""
    gap = torch.full((101,), 0.012, dtype=torch.float64)
    answer = torch.tensor([0] * 100 + [1])

    assert importance.weight(grpo.answer_sum(gap, answer), "mask", 3.0, 0.0).gt(0).tolist() == [
        False
    ] * 100 + [True]
    for by, bounds in (("geometric", (0.98, 1.02)), ("k3", (0.0, 1e-3))):
        assert importance.is_kept(gap, answer, by, bounds).all()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("threshold", "value", "gradient"),
    [
        (0.5, -0.3665170918, (-0.11051709, 0, 0, 0, 0)),  # means -0.3167 and 0.525
        (0.6, -0.1643768160, (-0.11051709, 0, 0, 0, 0.12214028)),
    ],
)
def test_the_off_policy_mask_drops_answers_that_have_become_unlikely(
    threshold: float, value: float, gradient: tuple[float, ...]
) -> None:
    kept = importance.is_recent(LOGP, SAMPLED, ADVANTAGE, ANSWER, threshold)

    found, slopes = computed(DAPO, OLD, advantage=ADVANTAGE * kept)

    assert found == pytest.approx(value, abs=1e-10)
    assert slopes == close(*gradient)


def test_the_off_policy_mask_keeps_every_answer_with_an_advantage() -> None:
    assert importance.is_recent(LOGP, SAMPLED, ADVANTAGE.abs(), ANSWER, 0.01).all()


# Bounds and estimators.


def test_a_negative_advantage_has_an_upper_bound_of_the_ratio() -> None:
    logp = of(3.0, 1.2, 3.0).log().requires_grad_()
    bounded = ClippedObjective(0.8, 1.28, 1.5)
    tokens = Tokens(logp, of(0, 0, 0), of(-1, -1, 1), torch.zeros(3).long())

    value = bounded(tokens)
    [gradient] = torch.autograd.grad(value.sum(), logp)

    assert value.tolist() == close(-1.5, -1.2, 1.28)
    assert gradient.tolist() == close(0.0, -1.2, 0.0)
    assert bounded.clipped(tokens).tolist() == [True, False, True]
    assert ClippedObjective(0.8, 1.28)(tokens).tolist() == close(-3.0, -1.2, 1.28)


@pytest.mark.parametrize(
    ("advantage", "objective", "value"),
    [
        (-1.0, ClippedObjective(0.8, 1.28, 3.0), 3.0),
        (1.0, ClippedObjective(0.8, 1.28), -1.28),
        (0.0, ClippedObjective(0.8, 1.28), 0.0),
        (0.0, GspoObjective(0.8, 1.28), 0.0),
        (1.0, RlooObjective(0.8, 1.28), -1.28),
    ],
)
def test_a_ratio_that_overflows_beyond_a_bound_has_no_gradient(
    advantage: float, objective: Objective, value: float
) -> None:
    logp = torch.tensor([-0.1], requires_grad=True)
    anchor, one = torch.tensor([-100.0]), torch.ones(1)
    loss = token_loss(logp, anchor, advantage * one, one, torch.zeros(1).long(), objective=objective)

    assert loss.item() == pytest.approx(value)
    assert torch.autograd.grad(loss, logp)[0].tolist() == [0.0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(5))
def test_a_penalty_adds_its_gradient_to_that_of_one_ratio(estimator: KlEstimator, seed: int) -> None:
    """Bit for bit: with two log-ratios the sums have another order, and a job another result."""
    torch.manual_seed(seed)
    old, ref = -torch.rand(64) * 4, -torch.rand(64) * 4
    logp = (old + 0.3 * torch.randn(64)).requires_grad_()
    advantage, weight = torch.randn(64), torch.rand(64)
    log_ratio = logp - old
    ratio = log_ratio.exp()
    value = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    log_x = ref - logp
    estimate = torch.expm1(log_x) - log_x if estimator == "k3" else logp - ref
    expected = -(weight * (value - 0.07 * (log_ratio.exp() * estimate))).sum()

    loss = token_loss(
        logp, old, advantage, weight, torch.zeros(64).long(), objective=DAPO,
        kl=0.07, kl_estimator=estimator, ref_logp=ref,
    )  # fmt: skip

    assert torch.equal(loss, expected)
    assert torch.equal(*(torch.autograd.grad(one, logp)[0] for one in (loss, expected)))


def test_the_bound_is_that_of_the_job() -> None:
    assert objective_of(settings(loss="dapo", ratio_max=3.0)) == ClippedObjective(0.8, 1.28, 3.0)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k2", 0.103, (0.06, -0.02, 0.04, -0.16, 0.10)),
        ("k1_plain", 0.02, (0.2,) * 5),
        ("k1", 0.1471417966, (0.28734444, 0.32798138, 0.32396611, 0.01471518, 0.36642083)),
    ],
)
def test_the_penalty_has_the_value_and_the_gradient_of_its_estimator(
    estimator: KlEstimator, value: float, gradient: tuple[float, ...]
) -> None:
    found, slopes = computed(
        DAPO, OLD, advantage=torch.zeros_like(ADVANTAGE), kl=1.0, kl_estimator=estimator, ref_logp=REF
    )

    assert found == pytest.approx(value, abs=1e-10)
    assert slopes == close(*gradient)


# Rewards and advantages.


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1, 0, 0, 0), (3, -1, -1, -1)),
        ((1, 1, 1, 0), (1 / 3, 1 / 3, 1 / 3, -1)),
        ((0, 0), (0, 0)),
        ((1, 1), (0, 0)),
    ],
)
def test_maxrl_divides_by_the_mean(rewards: Sequence[float], expected: Sequence[float]) -> None:
    [found] = grpo.advantages([rewards], "mean", None)

    assert found == pytest.approx(expected)


def test_the_length_penalty_is_that_of_prime_rl() -> None:
    rewards = reward_shaping.shortened([1, 1, 0, 0], [100, 50, 100, 80], 0.25)

    assert rewards == pytest.approx([0.875, 0.9375, -0.125, -0.1])
    assert grpo.centred(rewards) == pytest.approx([0.478125, 0.540625, -0.521875, -0.496875])


def test_a_group_that_never_succeeds_is_not_shortened() -> None:
    assert reward_shaping.shortened([0, 0, None], [100, 50, 10], 0.25) == [0, 0, None]
    assert reward_shaping.shortened([-1, -1], [100, 50], 0.25) == [-1, -1]


def grouped(scores: Sequence[Any], lengths: Sequence[int] = (3, 2, 3, 2), line: int = 1) -> Group:
    """A group of these scores: numbers, or those of the parts by name, whose sum is the score."""

    def grade(score: Any) -> Grade:
        if score is None:
            return Grade(None, "broken", ErrorKind.other_error)
        if not isinstance(score, dict):
            return Grade(float(score))
        return Grade(sum(score.values()), sub_grades={name: Grade(float(one)) for name, one in score.items()})

    rollouts = tuple(Rollout((7,) * n, (-0.5,) * n, "", "stop") for n in lengths[: len(scores)])
    return Group(Prompt(line, (0,), {}), rollouts, tuple(map(grade, scores)))


def advantages(groups: Sequence[Group], run: Resolved) -> list[list[float]]:
    """The advantage of the first token of each answer that is trained on, after the division by the std of the step."""
    shares = [contributions.contribution_of(group, run, str) for group in groups]
    _, std = contributions.divisors(shares, run)
    packs = [share.pack for share in shares]
    return [[] if pack is None else [one.advantages_T[0] / std for one in pack.sequences] for pack in packs]


@pytest.mark.parametrize("scale", ["none", "batch", "group"])
@pytest.mark.parametrize("weight", [0.25, 0.01])
def test_right_answers_of_other_lengths_teach_by_the_weight(scale: str, weight: float) -> None:
    run = settings(length={"weight": weight}, advantage_scale=scale)
    groups = [grouped([1, 1], lengths=[100, 50], line=line) for line in (1, 2)]

    assert advantages(groups, run) == [pytest.approx([-weight / 4, weight / 4])] * 2
    assert contributions.signal(groups[0], run) == "mixed"
    [first, _] = contributions.answer_signals(groups, run)
    assert [one.advantage for one in first] == pytest.approx([-weight / 4, weight / 4])


@pytest.mark.parametrize(("scale", "std"), [("batch", 0.5), ("group", 0.5)])
def test_the_std_of_advantages_is_that_of_the_rewards_without_length(scale: str, std: float) -> None:
    run = settings(length={"weight": 4.0}, advantage_scale=scale)
    group = grouped([1, 1, 0, 0], lengths=[100, 50, 100, 50])

    plain = settings(length={"weight": 4.0}, advantage_scale="none")
    [expected] = advantages([group], plain)
    assert advantages([group], run) == [pytest.approx([one / std for one in expected])]


def test_a_step_of_right_answers_that_length_compares_has_signal() -> None:
    """`stopping.after_silent_steps` would end a job that learns, and its reports would call it finished."""
    run = settings(length={"weight": 0.25})
    groups = [grouped([1, 1], lengths=[100, 50]), grouped([1, 1], lengths=[50, 50], line=2)]

    signals = contributions.step_signals(groups, run)
    shares = metrics.signal_shares(signals)

    assert shares["groups_mixed_share"] == 0.5
    assert shares["groups_all_one_share"] == 0.5
    assert StepMetrics(step=1, **shares).has_signal
    assert metrics.no_signal(groups, signals) is None


def test_a_negative_score_fails_a_job_that_divides_by_the_mean() -> None:
    run = settings(advantage_scale="mean")

    with pytest.raises(
        UserMistake, match=r"line 1 a negative score, and loss\.advantage_scale 'mean'"
    ) as failed:
        contributions.contribution_of(grouped([1, -0.5]), run, str)
    assert failed.value.param is not None
    assert failed.value.param.endswith("advanced.loss.advantage_scale")


BOTH = [{"accuracy": a, "format": f} for a, f in ((1, 1), (0, 1), (1, 1), (0, 0))]


def each(std: str = "population", **parts: float) -> Resolved:
    of_parts = {"part_weights": parts or {"accuracy": 1.0, "format": 1.0}}
    return settings(advantage_scale="each", std=std).model_copy(update=of_parts)


def test_gdpo_normalizes_each_grader_before_they_are_added() -> None:
    group = grouped(BOTH)

    assert contributions.compared_rewards(group, each()) == close(
        1.5773502692, -0.4226497308, 1.5773502692, -2.7320508076
    )
    assert advantages([group], each()) == [close(0.8880738340, -0.2379586666, 0.8880738340, -1.5381890013)]
    summed = settings(advantage_scale="group")
    assert advantages([group], summed) == [close(0.9045340337, -0.3015113446, 0.9045340337, -1.5075567229)]


def test_gdpo_with_the_std_of_trl() -> None:
    """TRL adds 1e-4 to each std."""
    [found] = advantages([grouped(BOTH)], each("sample"))

    assert found == pytest.approx([0.7690539540, -0.2060769477, 0.7690539540, -1.3320309603], rel=3e-4)


def test_one_grader_alone_is_the_group_scale_over_the_batch() -> None:
    groups = [grouped([{"accuracy": one} for one in scores]) for scores in ((1, 0, 0, 0), (9, 4, 4, 1))]
    run = each(accuracy=0.3)

    [first, second] = advantages(groups, run)
    plain = grpo.advantages([[1, 0, 0, 0], [9, 4, 4, 1]], "group")
    factor = first[0] / plain[0][0]

    assert [*first, *second] == pytest.approx([factor * one for group in plain for one in group])


def test_a_group_has_signal_where_a_part_varies_although_the_scores_are_equal() -> None:
    crossed = grouped([{"accuracy": 1, "format": 0}, {"accuracy": 0, "format": 1}])
    same = grouped([{"accuracy": 1, "format": 1}] * 2)

    assert contributions.signal(crossed, each(accuracy=1.0, format=0.5)) == "mixed"
    assert contributions.signal(same, each()) == "equal"
    assert advantages([same], each()) == [[]]


def test_parts_that_cancel_each_other_up_to_rounding_have_no_signal() -> None:
    scores = [{"accuracy": accuracy, "format": -3 * accuracy} for accuracy in (0.1, 0.3, 0.4, 0.9)]
    group = grouped(scores, lengths=[2] * 4)

    assert any(contributions.compared_rewards(group, each()))
    assert contributions.signal(group, each()) == "equal"
    assert advantages([group], each()) == [[]]


def test_an_answer_without_a_grade_is_left_out_of_every_part() -> None:
    with_one, without = (advantages([grouped(scores)], each())[0] for scores in ([*BOTH[:3], None], BOTH[:3]))

    assert with_one == pytest.approx(without)


def test_a_part_that_failed_has_the_score_of_the_graders_invalid_grade() -> None:
    broken = Grade(None, "broken", ErrorKind.other_error)
    grade = Grade(0.5, sub_grades={"accuracy": Grade(1.0), "format": broken})

    assert contributions.part_scores(grade, ["accuracy", "format"], -0.5) == [1.0, -0.5]


def test_reports_show_the_advantages_that_are_trained_on() -> None:
    groups = [grouped(BOTH), grouped([{"accuracy": 1, "format": 0}, {"accuracy": 0, "format": 0}], line=2)]

    signals = contributions.answer_signals(groups, each())

    shown = [one.advantage for of_group in signals for one in of_group]
    assert shown == pytest.approx([one for group in advantages(groups, each()) for one in group])
