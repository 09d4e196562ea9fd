"""Every loss against a reference written as loops over floats, with the gradient worked out by hand."""

import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.jobs.hyperparameter_groups import Importance, KlEstimator, Loss
from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from graders.types import ErrorKind, Grade
from tests.hyperparameters import in_groups
from tests.present import untyped
from worker.training import contributions, grpo
from worker.training.importance import weight as importance_weight
from worker.training.objective import token_loss
from worker.training.objectives.registry import OBJECTIVES
from worker.types import Group, Prompt, Rollout

LOSSES: list[Loss] = ["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "gspo"]
BOUNDS = {
    "grpo": (0.8, 1.2),
    "dr_grpo": (0.8, 1.2),
    "bnpo": (0.8, 1.2),
    "dapo": (0.8, 1.28),
    "cispo": (0.0, 1.5),
    "gspo": (0.9, 1.1),
}
LONGEST = 9


@dataclass
class Token:
    logp: float
    old: float
    sampled: float
    ref: float


@dataclass
class Answer:
    reward: float | None
    tokens: list[Token]


def ragged_groups(seed: int) -> list[list[Answer]]:
    """Groups of uneven size with answers of uneven length; some answers ungraded, one group without signal."""
    rng = random.Random(seed)

    def token() -> Token:
        logp = rng.uniform(-3, 0)
        return Token(logp, logp + rng.gauss(0, 0.3), logp + rng.gauss(0, 0.4), logp + rng.gauss(0, 0.5))

    def answer(reward: float | None) -> Answer:
        return Answer(reward, [token() for _ in range(rng.randint(1, LONGEST))])

    mixed = [
        [answer(None if rng.random() < 0.2 else rng.random()) for _ in range(rng.randint(3, 6))]
        for _ in range(4)
    ]
    return [*mixed[:2], [answer(0.25) for _ in range(4)], *mixed[2:]]


# The reference: no tensors, no autograd, nothing of worker.grpo.


def graded(group: list[Answer]) -> list[Any]:
    return [a.reward for a in group if a.reward is not None]


def has_signal(group: list[Answer]) -> bool:
    return len(set(graded(group))) > 1


def reference_advantages(
    groups: list[list[Answer]], scale: str, std: str, normalize: str = "papers"
) -> list[list[float]]:
    def deviation(values: list[Any]) -> float:
        mean = sum(values) / len(values)
        return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - (std == "sample")))

    counted = groups if normalize == "papers" else [group for group in groups if has_signal(group)]
    everything = [reward for group in counted for reward in graded(group)]
    result = []
    for group in groups:
        rewards = graded(group)
        by: dict[str, Callable[[], float]] = {
            "group": partial(deviation, rewards),
            "batch": lambda: deviation(everything),
            "none": lambda: 1.0,
        }
        row = []
        for a in group:
            if a.reward is None or not has_signal(group):
                row.append(0.0)
            else:
                row.append((a.reward - sum(rewards) / len(rewards)) / by[scale]())
        result.append(row)
    return result


def reference(
    groups: list[list[Answer]],
    name: str,
    scale: str,
    std: Any,
    kl: Any,
    estimator: Any,
    importance: Any,
    cap: Any,
    normalize: str = "papers",
) -> tuple[float, list[Any]]:
    """(loss, its derivative by the log-probability of each token of a graded answer), in the order of the tokens."""
    advantages = reference_advantages(groups, scale, std, normalize)
    answers = [
        (g, a, A) for g, row in zip(groups, advantages, strict=True) for a, A in zip(g, row, strict=True)
    ]
    answers = [(g, a, A) for g, a, A in answers if a.reward is not None]
    # papers: 1/G sum over the G answers, 1/(sum of |o_i|) sum over all tokens, whatever an answer's advantage is.
    counted = [a for g, a, _ in answers if normalize == "papers" or kl > 0 or has_signal(g)]
    low, high = BOUNDS[name]
    loss, slopes = 0.0, []
    for _, a, advantage in answers:
        n = len(a.tokens)
        share = {
            "grpo": 1 / n / len(counted),
            "gspo": 1 / n / len(counted),
            "dr_grpo": 1 / (len(counted) * LONGEST),
        }.get(name, 1 / sum(len(b.tokens) for b in counted))
        weights = []
        for t in a.tokens:
            w = 1.0 if importance == "none" else math.exp(t.old - t.sampled)
            if importance == "truncate":
                w = min(w, cap)
            if importance == "mask" and not 1 / cap <= w <= cap:
                w = 0.0
            weights.append(w)
        together = math.exp(sum(t.logp - t.old for t in a.tokens) / n)
        for t, w in zip(a.tokens, weights, strict=True):
            rho = math.exp(t.logp - t.old)
            x = math.exp(t.ref - t.logp)
            k1 = t.logp - t.ref
            if name == "cispo":
                value, slope = min(rho, high) * advantage * t.logp, w * min(rho, high) * advantage
            elif name == "gspo":
                value = min(together * advantage, min(max(together, low), high) * advantage)
                free = value == together * advantage
                # All tokens of the answer carry the same objective, each with its own weight.
                slope = sum(weights) / n * together * advantage * free
            else:
                value = min(rho * advantage, min(max(rho, low), high) * advantage)
                slope = w * rho * advantage * (value == rho * advantage)
            if estimator == "k3_plain":
                penalty, penalty_slope = x - 1 - math.log(x), 1 - x
            elif estimator == "k1_plain":
                penalty, penalty_slope = k1, 1.0
            else:
                penalty = rho * (k1 if estimator == "k1" else x - 1 - math.log(x))
                penalty_slope = rho * (k1 + 1 if estimator == "k1" else k1)
            loss -= share * w * (value - kl * penalty)
            slopes.append(-share * (slope - kl * w * penalty_slope))
    return loss, slopes


def settings_of(
    name: str, scale: str, std: str | None, kl: float, normalize: str, *, batch_size: int = 8, **more: Any
) -> Resolved:
    advanced = {"loss": name, "advantage_scale": scale, "kl": kl, "normalize": normalize} | more
    advanced |= {"max_completion_tokens": LONGEST} | ({} if std is None else {"std": std})
    asked = Hyperparameters.model_validate({"batch_size": batch_size, "advanced": in_groups(advanced)})
    return resolve(asked, rows=100, parameters=1, context=128)


def trained_on(groups: list[list[Answer]]) -> list[Any]:
    """The groups as the worker has them. A token's number is its place among all tokens."""
    number = iter(range(10**6))

    def rollout(answer: Any) -> Rollout:
        ids = tuple(next(number) for _ in answer.tokens)
        return Rollout(ids, tuple(t.sampled for t in answer.tokens), "", "stop")

    def grade(answer: Any) -> Grade:
        return (
            Grade(answer.reward)
            if answer.reward is not None
            else Grade(None, "broken", ErrorKind.other_error)
        )

    return [
        Group(Prompt(line, (0,), {}), tuple(map(rollout, group)), tuple(map(grade, group)))
        for line, group in enumerate(groups, start=1)
    ]


def ours(
    groups: list[list[Answer]],
    name: Loss,
    scale: str,
    std: str | None,
    kl: float,
    estimator: KlEstimator | None,
    importance: Importance,
    cap: float | None,
    normalize: str = "papers",
) -> tuple[float, list[Any]]:
    """The same as `reference` by the worker's own code, from the grades on, in float64."""
    settings = settings_of(name, scale, std, kl, normalize)
    shares = contributions.batch_of(
        [contributions.contribution_of(group, settings, str) for group in trained_on(groups)], settings
    )
    whole, divisor = contributions.divisors(shares, settings)
    answers = [answer for share in shares if share.pack is not None for answer in share.pack.sequences]
    tokens = [t for group in groups for a in group for t in a.tokens]
    values = torch.tensor([[t.logp, t.old, t.sampled, t.ref] for t in tokens], dtype=torch.float64)
    leaf = values[:, 0].clone().requires_grad_()
    at = torch.tensor([i for answer in answers for i in answer.output_ids_T])
    lengths = torch.tensor([len(answer.output_ids_T) for answer in answers])
    _, old, sampled, ref = values[at].T
    advantage = torch.tensor([A for answer in answers for A in answer.advantages_T], dtype=torch.float64)
    weight = torch.tensor([answer.weight for answer in answers], dtype=torch.float64).repeat_interleave(
        lengths
    )
    loss = token_loss(
        leaf[at],
        old,
        advantage,
        weight * importance_weight(old - sampled, importance, cap, None if cap is None else 1 / cap),
        torch.arange(len(answers)).repeat_interleave(lengths),
        objective=OBJECTIVES[name](*BOUNDS[name]),
        kl=kl * divisor,  # as worker/training/gradient.py: all of it is divided in the end
        kl_estimator=estimator,
        ref_logp=ref,
    ) / (whole * divisor)
    [gradient] = torch.autograd.grad(loss, leaf)
    is_graded = [a.reward is not None for group in groups for a in group for _ in a.tokens]
    return loss.item(), gradient[torch.tensor(is_graded)].tolist()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("scale", "std"),
    [
        ("group", "population"),
        ("group", "sample"),
        ("batch", "population"),
        ("batch", "sample"),
        ("none", None),
    ],
)
@pytest.mark.parametrize("normalize", ["papers", "signal"])
def test_each_loss_and_scale_equals_its_formula_written_as_loops(
    name: str, scale: str, std: str | None, normalize: str
) -> None:
    for seed in range(5):
        groups = ragged_groups(seed)
        how: tuple[Any, ...] = (name, scale, std, 0.0, None, "none", None, normalize)

        loss, gradient = ours(groups, *how)

        expected_loss, expected_gradient = reference(groups, *how)
        assert loss == pytest.approx(expected_loss, rel=1e-10)
        assert gradient == pytest.approx(expected_gradient, rel=1e-10, abs=1e-16)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("kl", "estimator"), [(0.0, None), (0.3, "k1"), (0.3, "k3"), (0.3, "k1_plain"), (0.3, "k3_plain")]
)
@pytest.mark.parametrize(("importance", "cap"), [("truncate", 1.3), ("mask", 1.3), ("none", None)])
@pytest.mark.parametrize("normalize", ["papers", "signal"])
def test_penalty_and_correction_equal_their_formulas_written_as_loops(
    name: str,
    kl: float,
    estimator: KlEstimator | None,
    importance: Importance,
    cap: float | None,
    normalize: str,
) -> None:
    groups = ragged_groups(7)
    how: tuple[Any, ...] = (name, "batch", "population", kl, estimator, importance, cap, normalize)

    loss, gradient = ours(groups, *how)

    expected_loss, expected_gradient = reference(groups, *how)
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    assert gradient == pytest.approx(expected_gradient, rel=1e-10, abs=1e-16)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.slow
def test_the_comparison_fails_when_the_old_numbers_are_off_by_one(name: str) -> None:
    """The control of the tests above: whoever shifts a list by one token is seen."""
    groups = ragged_groups(7)
    how: tuple[Any, ...] = (name, "batch", "population", 0.0, None, "none", None)
    expected = reference(groups, *how)
    tokens = [t for group in groups for answer in group for t in answer.tokens]
    shifted = [t.old for t in tokens[1:] + tokens[:1]]
    for t, old in zip(tokens, shifted, strict=True):
        t.old = old

    assert ours(groups, *how)[1] != pytest.approx(expected[1], rel=1e-3)


# What a step is a mean over, when only some of its groups have signal.


def one_of_four_has_signal(seed: int) -> list[Any]:
    """A sparse task: one group of eight answers has signal, three have none, with other rewards and lengths."""
    rng = random.Random(seed)

    def answer(reward: float) -> Answer:
        logp = [rng.uniform(-3, 0) for _ in range(rng.randint(1, LONGEST))]
        return Answer(reward, [Token(p, p + rng.gauss(0, 0.1), p, p + rng.gauss(0, 0.5)) for p in logp])

    rewards_PG = [[0.0] * 8, [1.0, 0, 0, 1, 0, 0, 0, 0], [1.0] * 8, [0.0] * 8]
    return [[answer(reward) for reward in rewards] for rewards in rewards_PG]


def norm(gradient: list[Any]) -> float:
    return math.sqrt(sum(g * g for g in gradient))


def difference(ours: list[Any], expected: list[Any]) -> float:
    return norm([a - b for a, b in zip(ours, expected, strict=True)]) / norm(expected)


SCALES = [("group", "population"), ("batch", "sample"), ("none", None)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("scale", "std"), SCALES)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_vanishing_penalty_vanishes_from_the_step(
    name: Loss, scale: str, std: str | None, estimator: KlEstimator
) -> None:
    """It has groups computed that would not be without it, and so it may change nothing else."""
    groups = one_of_four_has_signal(3)

    _, without = ours(groups, name, scale, std, 0.0, None, "none", None)
    _, with_it = ours(groups, name, scale, std, 1e-9, estimator, "none", None)

    assert difference(with_it, without) < 1e-6


@pytest.mark.parametrize("name", LOSSES)
def test_groups_without_signal_shrink_the_step_by_the_papers_rule_and_by_the_other_do_not(name: Loss) -> None:
    """One group of four: under "signal" a step is as large as if nothing else had been sampled, 4 times the papers'."""
    groups = one_of_four_has_signal(3)
    lengths = [[len(a.tokens) for a in group] for group in groups]
    by_answers = name in ("grpo", "gspo", "dr_grpo")
    factor = 4.0 if by_answers else sum(map(sum, lengths)) / sum(lengths[1])
    how: tuple[str, str, float, None, Importance, None] = ("group", "population", 0.0, None, "none", None)

    papers, signal = (norm(ours(groups, name, *how, rule)[1]) for rule in ("papers", "signal"))
    alone = norm(ours(groups[1:2], name, *how)[1])

    assert signal / papers == pytest.approx(factor, rel=1e-12)
    assert signal == pytest.approx(alone, rel=1e-12)


def test_the_std_of_the_batch_is_that_of_all_graded_rewards_or_of_those_in_groups_with_signal() -> None:
    rewards_PG: Any = [[1.0, 0.0, None], [1.0, 1.0, 1.0], [0.0, 0.5, 1.0]]

    papers, signal = (grpo.batch_deviation(rewards_PG, "population", rule) for rule in ("papers", "signal"))

    assert papers**2 == pytest.approx(5.25 / 8 - (5.5 / 8) ** 2)
    assert signal**2 == pytest.approx(2.25 / 5 - (2.5 / 5) ** 2)
    assert grpo.batch_deviation([[0.0, 0.0], [1.0, 1.0]], "population", "papers") == 0.0, "nothing to divide"


def test_the_gradient_is_the_slope_of_the_loss_with_groups_that_have_no_signal() -> None:
    groups = one_of_four_has_signal(5)
    how: tuple[Any, ...] = ("grpo", "batch", "population", 0.1, "k3", "none", None)
    _, gradient = ours(groups, *how)
    tokens = [t for group in groups for a in group for t in a.tokens]

    learned = sum(len(a.tokens) for a in groups[0])  # the first token of the group with signal
    for index in (0, learned, learned + 10, len(tokens) - 1):
        here = tokens[index].logp
        losses = []
        for shift in (1e-6, -1e-6):
            tokens[index].logp = here + shift
            losses.append(ours(groups, *how)[0])
        tokens[index].logp = here
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(gradient[index], rel=1e-5, abs=1e-9)


# Dynamic sampling: its batch is what is left when groups without signal have been filtered out and others filled it up.


def drawn(rewards_PG: list[Any]) -> list[Any]:
    rng = random.Random(1)

    def answer(reward: Any) -> Answer:
        return Answer(reward, [Token(-1.0, -1.0, -1.0, -1.2) for _ in range(rng.randint(1, LONGEST))])

    return trained_on([[answer(reward) for reward in rewards] for rewards in rewards_PG])


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize(
    ("others", "counted"),
    [
        ([], [0, 1, 2]),  # no budget was left: as without dynamic sampling
        ([[0.0, 1.0]], [0, 2, 3]),  # stands in for the first without signal
        ([[1.0, 1.0], [0.0, 1.0]], [0, 2, 4]),  # what was drawn without signal never counts
        ([[0.0, 1.0], [1.0, 1.0], [0.0, 0.5]], [0, 3, 5]),
        ([[0.5, 0.5]], [0, 1, 2]),
    ],
)
def test_the_batch_of_dynamic_sampling_is_full_and_has_no_group_that_was_replaced(
    kl: float, others: list[list[float]], counted: list[int]
) -> None:
    settings = settings_of("dapo", "batch", "population", kl, "papers", resample_prompts=8, batch_size=3)
    groups = drawn([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], *others])
    shares = [contributions.contribution_of(group, settings, str) for group in groups]

    chosen = contributions.batch_of(shares, settings)

    assert chosen == [shares[number] for number in counted]
    assert untyped(contributions.divisors(chosen, settings)) == (
        sum(len(r.output_ids_T) for number in counted for r in groups[number].rollouts_G),
        pytest.approx(grpo.deviation([r for n in counted for r in groups[n].rewards_G], "population")),
    )
    shown = contributions.answer_signals(groups, settings)
    learned = [n for n, group in enumerate(shown) if any(lesson.advantage is not None for lesson in group)]
    assert learned == (counted if kl else [n for n in counted if len(set(groups[n].rewards_G)) > 1])


def test_which_groups_are_replaced_does_not_depend_on_the_order_in_which_they_were_sampled() -> None:
    settings = settings_of("dapo", "batch", "population", 0.0, "papers", resample_prompts=8, batch_size=3)
    *own, stand_in = drawn([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]])

    lines = {
        tuple(sorted(share.line for share in contributions.batch_of(shares, settings)))
        for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0])
        for shares in [
            [
                contributions.contribution_of(one, settings, str)
                for one in [*(own[n] for n in order), stand_in]
            ]
        ]
    }

    assert lines == {(2, 3, 4)}


def toy(theta: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of two answers, of three tokens and one, under a policy of two parameters a token."""
    picked = torch.stack([theta, torch.zeros_like(theta)], -1).log_softmax(-1)
    return picked[:, 0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("estimator", ["k1", "k3", "k1_plain", "k3_plain"])
def test_the_gradient_is_the_slope_of_the_loss(name: Loss, estimator: KlEstimator) -> None:
    theta = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    # With cispo every ratio is above the cap: there the factor that has no gradient is a constant.
    moved = 1.0 if name == "cispo" else 0.05
    old = (
        toy(theta).detach() - torch.tensor([1.0, 0.5, 2.0, -0.3]) * moved - (1.0 if name == "cispo" else 0.0)
    )
    ref = old - 0.2

    def loss_at(parameters: torch.Tensor) -> torch.Tensor:
        return token_loss(
            toy(parameters),
            old,
            torch.tensor([0.7, 0.7, 0.7, -0.4]).double(),
            torch.tensor([0.1, 0.1, 0.1, 0.3]).double(),
            torch.tensor([0, 0, 0, 1]),
            objective=OBJECTIVES[name](*BOUNDS[name]),
            kl=0.1,
            kl_estimator=estimator,
            ref_logp=ref,
        )

    [gradient] = torch.autograd.grad(loss_at(theta), theta)

    for index in range(4):
        step = torch.zeros(4).double()
        step[index] = 1e-6
        slope = (loss_at(theta + step) - loss_at(theta - step)).item() / 2e-6
        assert slope == pytest.approx(gradient[index].item(), rel=1e-6)


# What the papers say of the first update, when the policy is still the one that sampled.


def first_update(
    name: Loss, advantage: list[Any], lengths: list[Any]
) -> tuple[float, torch.Tensor, torch.Tensor]:
    weights = [
        OBJECTIVES[name].token_weight(n) / OBJECTIVES[name].normaliser(lengths, LONGEST) for n in lengths
    ]
    counts = torch.tensor(lengths)
    logp = torch.linspace(-2, -0.5, sum(lengths), dtype=torch.float64, requires_grad=True)
    advantages, weight = (
        torch.tensor(values).double().repeat_interleave(counts) for values in (advantage, weights)
    )
    answer = torch.arange(len(lengths)).repeat_interleave(counts)
    loss = token_loss(
        logp, logp.detach(), advantages, weight, answer, objective=OBJECTIVES[name](*BOUNDS[name]), kl=0.0
    )
    [gradient] = torch.autograd.grad(loss, logp)
    return loss.item(), gradient, weight * advantages


@pytest.mark.parametrize("name", LOSSES)
def test_the_first_update_is_reinforce_with_a_baseline(name: Loss) -> None:
    _, gradient, weighted = first_update(name, [1.0, -0.5, 0.25], [3, 1, 4])

    if name == "gspo":  # one objective an answer, shared out evenly, which comes to the same
        assert gradient.sum().item() == pytest.approx(-weighted.sum().item())
    assert torch.allclose(gradient, -weighted, rtol=1e-12)


def test_on_the_policy_itself_losses_with_the_same_mean_agree() -> None:
    gradients = {name: first_update(name, [1.0, -0.5, 0.25], [3, 1, 4])[1] for name in LOSSES}

    assert torch.allclose(gradients["dapo"], gradients["cispo"], rtol=1e-12)
    assert torch.allclose(gradients["dapo"], gradients["bnpo"], rtol=1e-12)
    assert torch.allclose(gradients["grpo"], gradients["gspo"], rtol=1e-12)
    assert torch.allclose(gradients["dr_grpo"] * 3 * LONGEST, gradients["dapo"] * 8, rtol=1e-12)
    assert not torch.allclose(gradients["dapo"], gradients["grpo"], rtol=1e-2)


# CISPO, GSPO and the KL where they differ from GRPO.


def gradient_of(
    name: Loss, log_ratio: list[float], advantage: float, bounds: tuple[float, float]
) -> list[Any]:
    logp = torch.full((len(log_ratio),), -1.0, dtype=torch.float64, requires_grad=True)
    loss = token_loss(
        logp,
        logp.detach() - torch.tensor(log_ratio).double(),
        torch.full_like(logp, advantage),
        torch.ones_like(logp),
        torch.zeros(len(log_ratio), dtype=torch.int64),
        objective=OBJECTIVES[name](*bounds),
    )
    return torch.autograd.grad(loss, logp)[0].tolist()


def test_cispo_shrinks_a_token_that_grpo_silences() -> None:
    far = [math.log(8.0), math.log(2.0)]

    assert gradient_of("dapo", far, 1.0, (0.8, 1.28)) == [0.0, 0.0]
    assert gradient_of("cispo", far, 1.0, (0.0, 5.0)) == pytest.approx([-5.0, -2.0])


def test_gspo_clips_an_answer_and_not_its_tokens() -> None:
    balanced, gone = [math.log(2.0), -math.log(2.0)], [math.log(2.0), math.log(1.1)]

    assert gradient_of("gspo", balanced, 1.0, (0.9997, 1.0004)) == pytest.approx([-1.0, -1.0])
    assert gradient_of("gspo", gone, 1.0, (0.9997, 1.0004)) == [0.0, 0.0]
    assert gradient_of("gspo", gone, -1.0, (0.9997, 1.0004)) == pytest.approx([math.sqrt(2.2)] * 2)


@pytest.mark.parametrize(
    ("estimator", "right"), [("k1", True), ("k3", True), ("k1_plain", False), ("k3_plain", False)]
)
def test_the_penalty_has_the_gradient_of_the_kl_in_the_mean_even_off_policy(
    estimator: KlEstimator, right: bool
) -> None:
    """Over all tokens of a small vocabulary, weighted by how often the old policy draws them: exact, no samples."""
    theta = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    old, ref = (torch.tensor(v).double().log_softmax(-1) for v in ([0.2, 0.4, -0.3], [-1.0, 0.6, 0.2]))
    logp = theta.log_softmax(-1)
    [true] = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), theta, retain_graph=True)

    each = grpo.kl_penalty(logp, logp - old, ref, estimator)
    [mean] = torch.autograd.grad((old.exp() * each).sum(), theta)

    assert torch.allclose(mean, true, rtol=1e-10) is right


def test_the_plain_k3_is_deepseekmaths_as_printed() -> None:
    """Its gradient coefficient is A + beta (x - 1) (eq. 21), and its mean gradient that of KL(reference || policy)."""
    logp = torch.tensor([0.5], dtype=torch.float64).log().requires_grad_()
    ref = torch.tensor([0.25], dtype=torch.float64).log()
    one, first = torch.ones(1).double(), torch.tensor([0])
    loss = token_loss(
        logp,
        logp.detach(),
        one,
        one,
        first,
        objective=OBJECTIVES["grpo"](0.8, 1.2),
        kl=0.04,
        kl_estimator="k3_plain",
        ref_logp=ref,
    )

    [coefficient] = torch.autograd.grad(-loss, logp)

    assert coefficient.item() == pytest.approx(0.98, abs=1e-12)
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    policy = theta.log_softmax(-1)
    reference = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    each = grpo.kl_penalty(policy, policy - policy.detach(), reference, "k3_plain")
    [mean] = torch.autograd.grad((policy.exp().detach() * each).sum(), theta)
    assert mean.tolist() == pytest.approx([0.25, -0.25], abs=1e-12)


def test_the_plain_k1_is_the_log_ratio() -> None:
    """For each token beta (log pi - log pi_ref) with the slope beta, whatever the ratio of the policies."""
    logp = torch.tensor([-1.3, -0.2, -4.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0, -0.5, -3.0], dtype=torch.float64)
    ref = torch.tensor([-0.7, -0.9, -4.9], dtype=torch.float64)
    weight = torch.tensor([0.5, 0.25, 0.25]).double()

    def loss_with(kl: float) -> torch.Tensor:
        return token_loss(
            logp,
            old,
            torch.tensor([1.0, -1.0, 0.5]).double(),
            weight,
            torch.tensor([0, 0, 1]),
            objective=OBJECTIVES["grpo"](0.8, 1.2),
            kl=kl,
            kl_estimator="k1_plain",
            ref_logp=ref,
        )

    penalty = loss_with(0.04) - loss_with(0.0)
    [gradient] = torch.autograd.grad(penalty, logp)

    by_hand = 0.04 * (0.5 * -0.6 + 0.25 * 0.7 + 0.25 * 0.9)
    assert penalty.item() == pytest.approx(by_hand, rel=1e-12, abs=1e-15)
    assert gradient.tolist() == pytest.approx([0.02, 0.01, 0.01], rel=1e-12)


# A bandit: three positions, six tokens, 0 stops; the reward is the share of positions that hold the right token.

WANTED = torch.tensor([3, 1, 4])


def expected_reward(theta: torch.Tensor) -> float:
    p = theta.softmax(-1)
    alive, total = torch.tensor(1.0), torch.tensor(0.0)
    for position in range(3):
        total = total + alive * p[position, WANTED[position]] / 3
        alive = alive * (1 - p[position, 0])
    return total.item()


def played(
    name: Loss, *, shuffled: bool = False, steps: int = 40, groups: int = 4, size: int = 16, passes: int = 2
) -> float:
    generator = torch.Generator().manual_seed(3)
    theta = torch.zeros(3, 6, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=0.2)
    for _ in range(steps):
        with torch.no_grad():
            draws = torch.stack(
                [
                    torch.multinomial(row, groups * size, True, generator=generator)
                    for row in theta.softmax(-1)
                ],
                1,
            )
        stopped = (draws == 0).int().cumsum(1)
        read = (stopped - (draws == 0).int()) == 0  # the stop token itself is a part of the answer
        rewards = ((draws == WANTED) & read).float().mean(1)
        advantages = grpo.advantages(rewards.reshape(groups, size).tolist(), "batch")
        flat = torch.tensor(advantages).flatten()
        if shuffled:
            flat = flat[torch.randperm(len(flat), generator=generator)]
        lengths = read.sum(1).tolist()
        whole = OBJECTIVES[name].normaliser(lengths, 3)
        weight = torch.tensor([OBJECTIVES[name].token_weight(n) / whole for n in lengths])
        answer, position = read.nonzero(as_tuple=True)
        old = None
        for _ in range(passes):
            logp = theta.log_softmax(-1)[position, draws[answer, position]]
            old = logp.detach() if old is None else old
            loss = token_loss(
                logp, old, flat[answer], weight[answer], answer, objective=OBJECTIVES[name](*BOUNDS[name])
            )
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    return expected_reward(theta.detach())


@pytest.mark.parametrize("name", LOSSES)
def test_a_bandit_is_solved_and_with_shuffled_advantages_it_is_not(name: Loss) -> None:
    assert played(name) > 0.95
    assert played(name, shuffled=True) < 0.5


# TRL, where it is installed.


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("extra", ["plain", "kl", "kl_plain", "gap"])
@pytest.mark.parametrize(
    "sample", [lambda: ragged_groups(5), lambda: one_of_four_has_signal(5)], ids=["4_of_5", "1_of_4"]
)
def test_each_loss_equals_that_of_trl(name: Loss, extra: str, sample: Callable[..., Any]) -> None:
    """However few groups have signal: `_compute_loss` gets all answers, as in TRL's own step."""
    trainer = import_module("trl.trainer.grpo_trainer").GRPOTrainer
    if (name, extra) == ("gspo", "kl"):
        pytest.skip("TRL weighs each token's KL with the ratio of its answer, we with its own")
    groups = [[answer for answer in group if answer.reward is not None] for group in sample()]
    answers = [answer for group in groups for answer in group]
    kl: float
    estimator: KlEstimator | None
    penalties: dict[str, KlEstimator] = {"kl": "k3", "kl_plain": "k3_plain"}
    kl, estimator = (0.3, penalties[extra]) if extra in penalties else (0.0, None)
    importance: Importance
    cap: float | None
    importance, cap = ("truncate", 1.3) if extra == "gap" else ("none", None)

    def padded(field: str) -> torch.Tensor:
        rows = [[getattr(t, field) for t in a.tokens] + [0.0] * (LONGEST - len(a.tokens)) for a in answers]
        return torch.tensor(rows, dtype=torch.float64)

    logp, old, ref, sampled = (padded(field) for field in ("logp", "old", "ref", "sampled"))
    logp.requires_grad_()
    mask = torch.tensor([[t < len(a.tokens) for t in range(LONGEST)] for a in answers]).double()
    advantages = [A for row in reference_advantages(groups, "batch", "population") for A in row]
    low, high = BOUNDS[name]
    stub = SimpleNamespace(
        loss_type="grpo" if name == "gspo" else name,
        importance_sampling_level="sequence" if name == "gspo" else "token",
        epsilon_low=1 - low,
        epsilon_high=high if name == "cispo" else high - 1,
        beta=kl,
        args=SimpleNamespace(use_bias_correction_kl=extra == "kl", delta=None, steps_per_generation=1),
        use_vllm=extra == "gap",
        vllm_importance_sampling_correction=True,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=False),
        _metrics={"eval": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logp, torch.zeros_like(logp), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(answers), 1),
        "prompt_mask": torch.ones(len(answers), 1),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "importance_sampling_ratio": torch.exp(old - sampled).clamp(max=1.3),
        "num_items_in_batch": mask.sum(),
    }

    theirs = trainer._compute_loss(stub, None, inputs)
    [gradient] = torch.autograd.grad(theirs, logp)

    loss, slopes = ours(groups, name, "batch", "population", kl, estimator, importance, cap)
    assert loss == pytest.approx(theirs.item(), rel=1e-9)
    assert slopes == pytest.approx(gradient[mask.bool()].tolist(), rel=1e-9, abs=1e-16)
