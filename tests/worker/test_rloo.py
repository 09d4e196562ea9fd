"""RLOO against hand-checked numbers, a reference in float64, and the gradient of REINFORCE."""

import math
import random
from typing import Any

import pytest
import torch

from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from tests.hyperparameters import in_groups
from tests.present import untyped
from worker.training import grpo
from worker.training.objective import Tokens, token_loss
from worker.training.objectives.registry import OBJECTIVES


def settings(**advanced: Any) -> Resolved:
    asked = Hyperparameters.model_validate({"advanced": in_groups({"loss": "rloo"} | advanced)})
    return resolve(asked, rows=100, parameters=1, context=128)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 1.0, 0.0], [2 / 3, -2 / 3, 2 / 3, -2 / 3]),
        ([3.0, 1.0], [2.0, -2.0]),
        ([0.95, 0.0, 1.02, -0.01], [0.6133333, -0.6533333, 0.7066667, -0.6666667]),
        ([1.0, None, 0.0], [1.0, 0.0, -1.0]),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        ([1.0, None], [0.0, 0.0]),
    ],
)
def test_an_answer_is_compared_with_the_mean_of_its_graded_siblings(
    rewards: list[float | None], expected: list[float]
) -> None:
    assert grpo.leave_one_out(rewards) == pytest.approx(expected, abs=1e-7)


def test_the_baseline_is_that_of_the_definition() -> None:
    rewards = [random.Random(3).random() for _ in range(7)]

    by_definition = [r - (sum(rewards) - r) / 6 for r in rewards]

    assert grpo.leave_one_out([*rewards]) == pytest.approx(by_definition)


LENGTHS = [4, 1, 6]
ADVANTAGES = [1.0, -0.5, 0.25]


def drawn(spread: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = sum(LENGTHS)
    logp = -torch.rand(tokens, generator=generator, dtype=torch.float64) - 0.1
    old = logp + spread * torch.randn(tokens, generator=generator, dtype=torch.float64)
    ref = logp + 0.3 * torch.randn(tokens, generator=generator, dtype=torch.float64)
    weight = 0.5 + torch.rand(tokens, generator=generator, dtype=torch.float64)
    counts = torch.tensor(LENGTHS)
    return {
        "logp": logp.requires_grad_(),
        "old_logp": old,
        "ref_logp": ref,
        "weight": weight / len(LENGTHS),
        "advantage": torch.tensor(ADVANTAGES).double().repeat_interleave(counts),
        "answer": torch.arange(len(LENGTHS)).repeat_interleave(counts),
    }


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("kl", [0.0, 0.2])
def test_the_loss_is_that_of_a_loop_over_answers(spread: float, kl: float) -> None:
    drawn_M = drawn(spread)
    loss = token_loss(**untyped(drawn_M), objective=OBJECTIVES["rloo"](0.8, 1.2), kl=kl, kl_estimator="k3")

    expected, first = 0.0, 0
    for length, advantage in zip(LENGTHS, ADVANTAGES, strict=True):
        logp, old, ref, weight = (
            drawn_M[name].detach()[first : first + length].tolist()
            for name in ("logp", "old_logp", "ref_logp", "weight")
        )
        ratio = math.exp(sum(logp) - sum(old))
        objective = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        for now, before, reference, share in zip(logp, old, ref, weight, strict=True):
            penalty = math.exp(now - before) * (math.exp(reference - now) - (reference - now) - 1)
            expected -= share * (objective / length - kl * penalty)
        first += length
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_the_first_gradient_is_that_of_reinforce_without_a_division_by_the_length() -> None:
    drawn_M = drawn(0.0)
    drawn_M["weight"] = torch.full_like(
        drawn_M["weight"], OBJECTIVES["rloo"].token_weight(6) / OBJECTIVES["rloo"].normaliser(LENGTHS, 9)
    )
    loss = token_loss(**untyped(drawn_M), objective=OBJECTIVES["rloo"](0.8, 1.2))

    [gradient] = torch.autograd.grad(loss, drawn_M["logp"])

    assert torch.allclose(gradient, -drawn_M["advantage"] / 3, rtol=1e-12)


def test_an_answer_is_clipped_by_the_product_of_its_tokens_ratios() -> None:
    """Two tokens at 1.15 each are below the bound, together they are above it."""
    logp = torch.tensor(
        [math.log(1.15)] * 2 + [math.log(1.15), -math.log(1.15)], dtype=torch.float64, requires_grad=True
    )
    answer, advantage = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.float64)
    old = torch.zeros(4, dtype=torch.float64)

    loss = token_loss(
        logp, old, advantage, torch.ones_like(old), answer, objective=OBJECTIVES["rloo"](0.8, 1.2)
    )
    [gradient] = torch.autograd.grad(loss, logp)

    assert gradient.tolist() == pytest.approx([0, 0, -1, -1])
    clipped = OBJECTIVES["rloo"](0.8, 1.2).clipped(Tokens(logp.detach(), old, advantage, answer))
    assert clipped.tolist() == [True, True, False, False]


def test_rloo_has_its_own_bounds_and_no_other_scale() -> None:
    run = settings()

    assert (run.advantage_scale, run.std, run.supervision) == ("none", None, "outcome")
    assert run.ratio_bounds == (0.8, 1.2)
    for wrong in (
        {"advantage_scale": "group"},
        {"std": "sample"},
        {"supervision": "process"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
            settings(**wrong)
