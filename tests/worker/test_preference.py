"""The losses of pairs and of rewards against values computed by hand, and against the papers' formulas in float64."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from core.jobs.offline_hyperparameters import DpoHyperparameters, ResolvedOffline, resolve
from worker.training import preference, reward
from worker.training.preference import Pairs, pair_loss, pair_rewards

LN2 = math.log(2)


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("beta", "loss"), [(1.0, 0.2231435513), (0.5, 0.4054651081), (0.1, 0.6262328064)])
def test_dpo_is_the_papers_equation_7(beta: float, loss: float) -> None:
    assert preference.dpo(one(LN2), one(-LN2), beta=beta).item() == pytest.approx(loss, abs=1e-9)


@pytest.mark.parametrize(("beta", "slope"), [(1.0, 0.2), (0.5, 0.1666666667), (0.1, 0.0465398039)])
def test_the_gradient_of_dpo_pushes_both_answers_alike(beta: float, slope: float) -> None:
    chosen, rejected = one(LN2), one(-LN2)

    preference.dpo(chosen, rejected, beta=beta).backward()  # type: ignore[no-untyped-call]

    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(-slope, abs=1e-9)
    assert rejected.grad is not None and rejected.grad.item() == pytest.approx(slope, abs=1e-9)


def test_label_smoothing_expects_some_pairs_the_wrong_way_round() -> None:
    loss = preference.dpo(one(LN2), one(-LN2), beta=1.0, label_smoothing=0.1)

    assert loss.item() == pytest.approx(0.3617729874, abs=1e-9)


@pytest.mark.parametrize(("tau", "loss"), [(0.1, 13.05886844), (1.0, 0.7855176946)])
def test_ipo_is_the_papers_equation_17(tau: float, loss: float) -> None:
    assert preference.ipo(one(LN2), one(-LN2), beta=tau).item() == pytest.approx(loss, abs=1e-8)


@pytest.mark.parametrize(("gamma", "loss"), [(1.0, 0.5185380804), (0.5, 0.3451348347)])
def test_simpo_is_the_papers_objective(gamma: float, loss: float) -> None:
    value = preference.simpo(one(-LN2), one(-2 * LN2), beta=2.0, gamma=gamma)

    assert value.item() == pytest.approx(loss, abs=1e-9)


def test_orpo_is_the_papers_equations_6_and_7() -> None:
    chosen, rejected = one(-LN2), one(-2 * LN2)

    loss = preference.orpo(chosen, rejected, beta=0.1)
    only_odds = loss + chosen
    only_odds.backward()  # type: ignore[no-untyped-call]

    assert loss.item() == pytest.approx(0.7219153878, abs=1e-9)
    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(-0.05, abs=1e-9)
    assert rejected.grad is not None and rejected.grad.item() == pytest.approx(0.03333333333, abs=1e-9)


def test_orpo_is_finite_where_an_answer_is_certain() -> None:
    assert math.isfinite(preference.orpo(one(0.0), one(-1.0), beta=0.1).item())


# Two pairs: h = (ln 2, -ln 2) of 2 and 1 tokens, and h = (0, 0) of 1 token each.
LOGP_M = torch.tensor([-1.0, -1.0 + LN2, -3.0 - LN2, -2.0, -2.0], dtype=torch.float64)
REFERENCE_M = torch.tensor([-1.0, -1.0, -3.0, -2.0, -2.0], dtype=torch.float64)
ANSWER_M = torch.tensor([0, 0, 1, 2, 3])


def settings(**loss: Any) -> ResolvedOffline:
    beta = loss.pop("beta", 1.0)
    return resolve(
        "dpo",
        DpoHyperparameters.model_validate({"beta": beta, "advanced": {"loss": loss}}),
        rows=100,
        parameters=1000,
    )


@pytest.mark.parametrize(
    ("loss", "first", "second"),
    [
        ({"type": "sigmoid"}, 0.2231435513, LN2),
        ({"type": "sigmoid", "length_normalize": True}, 0.3027332756, LN2),
        ({"type": "ipo", "length_normalize": True}, 0.2912985105, 0.25),
    ],
)
def test_tokens_are_added_up_by_answer(loss: dict[str, Any], first: float, second: float) -> None:
    pairs = Pairs.of(LOGP_M, REFERENCE_M, ANSWER_M)

    assert pair_loss(settings(**loss), pairs).tolist() == pytest.approx([first, second], abs=1e-9)


def test_an_equal_pair_is_no_accurate_one() -> None:
    chosen, rejected = pair_rewards(
        settings(type="sigmoid", beta=0.5), Pairs.of(LOGP_M, REFERENCE_M, ANSWER_M)
    )

    assert chosen.tolist() == pytest.approx([0.5 * LN2, 0.0])
    assert (chosen > rejected).tolist() == [True, False]


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_a_reference_compare_means(name: str) -> None:
    resolved = settings(type=name, beta=2.0)

    assert not resolved.has_reference
    assert pair_loss(resolved, Pairs.of(LOGP_M, None, ANSWER_M)).shape == (2,)


def kto(h: float, *, desirable: bool, z0: float, **weights: float) -> Tensor:
    return preference.kto(one(h), torch.tensor([desirable]), beta=1.0, z0=z0, **weights)


@pytest.mark.parametrize(
    ("h", "desirable", "z0", "loss"),
    [(math.log(4), True, LN2, 1 / 3), (0.0, False, LN2, 1 / 3), (math.log(4), True, 0.0, 0.2)],
)
def test_kto_is_the_papers_equation_8(h: float, desirable: bool, z0: float, loss: float) -> None:
    assert kto(h, desirable=desirable, z0=z0).item() == pytest.approx(loss, abs=1e-9)


def test_kto_weighs_desirable_and_undesirable_answers() -> None:
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.33}
    first = kto(math.log(4), desirable=True, z0=LN2, **weights)
    second = kto(0.0, desirable=False, z0=LN2, **weights)

    assert (first + second).item() / 2 == pytest.approx(0.3883333333, abs=1e-9)


def sigma(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def odds(mean_logp: float) -> float:
    return math.exp(mean_logp) / (1 - math.exp(mean_logp))


# Of two numbers, those of the preferred answer and of the other, in Python's floats as the papers write them.
NAIVE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[float, float], float]]] = {
    "DPO eq. 7": (
        partial(preference.dpo, beta=0.3),
        lambda w, r: -math.log(sigma(0.3 * w - 0.3 * r)),
    ),
    "conservative DPO": (
        partial(preference.dpo, beta=0.3, label_smoothing=0.2),
        lambda w, r: -0.8 * math.log(sigma(0.3 * (w - r))) - 0.2 * math.log(sigma(0.3 * (r - w))),
    ),
    "IPO eq. 17": (
        partial(preference.ipo, beta=0.3),
        lambda w, r: (w - r - 1 / (2 * 0.3)) ** 2,
    ),
    "SimPO": (
        partial(preference.simpo, beta=2.5, gamma=0.7),
        lambda w, r: -math.log(sigma(2.5 * w - 2.5 * r - 0.7)),
    ),
    "ORPO eqs. 6 and 7": (
        partial(preference.orpo, beta=0.3),
        lambda w, r: -w - 0.3 * math.log(sigma(math.log(odds(w) / odds(r)))),
    ),
    "KTO eq. 8, desirable and undesirable": (
        lambda w, r: preference.kto(
            torch.cat([w, r]), torch.tensor([True, False]), beta=0.3, z0=0.4, undesirable_weight=1.5
        ).sum(),
        lambda w, r: (1 - sigma(0.3 * (w - 0.4))) + 1.5 * (1 - sigma(0.3 * (0.4 - r))),
    ),
    "Bradley-Terry with a margin and centering": (
        lambda w, r: reward.bradley_terry(w, r, torch.tensor([0.2], dtype=torch.float64), centering=0.05),
        lambda w, r: -math.log(sigma(w - r - 0.2)) + 0.05 * (w + r) ** 2,
    ),
    "squared error": (
        reward.squared_error,
        lambda w, r: (w - r) ** 2,
    ),
}


@pytest.mark.parametrize("name", NAIVE)
def test_loss_and_gradient_are_those_of_the_formula_in_float64(name: str) -> None:
    ours, naive = NAIVE[name]
    draw, step = random.Random(name), 1e-6
    for _ in range(20):
        w, r = (-3 * draw.random() - 0.05 for _ in range(2))
        chosen, rejected = one(w), one(r)

        loss = ours(chosen, rejected).squeeze()
        loss.backward()  # type: ignore[no-untyped-call]

        assert loss.item() == pytest.approx(naive(w, r), rel=1e-12)
        slopes = [
            (naive(w + step, r) - naive(w - step, r)) / (2 * step),
            (naive(w, r + step) - naive(w, r - step)) / (2 * step),
        ]
        assert chosen.grad is not None and rejected.grad is not None
        assert [chosen.grad.item(), rejected.grad.item()] == pytest.approx(slopes, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("label", [0.0, 0.3, 1.0])
def test_the_loss_of_a_step_is_the_cross_entropy_in_float64(label: float) -> None:
    for logit in (-4.0, -0.5, 0.0, 2.0):
        p = sigma(logit)
        naive = -label * math.log(p) - (1 - label) * math.log(1 - p)
        value = one(logit)

        loss = reward.cross_entropy(value, torch.tensor([label], dtype=torch.float64))
        loss.backward()  # type: ignore[no-untyped-call]

        assert loss.item() == pytest.approx(naive, rel=1e-12)
        assert value.grad is not None and value.grad.item() == pytest.approx(p - label, rel=1e-12)
