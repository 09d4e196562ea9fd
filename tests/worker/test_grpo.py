"""Every vector of the papers' worked examples, by hand-checked numbers."""

import math

import pytest
import torch

from worker.training import grpo
from worker.training.objective import Tokens, token_loss
from worker.training.objectives.registry import OBJECTIVES


def log(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def objective(rho: float, advantage: float, low: float = 0.2, high: float = 0.2) -> float:
    return grpo.surrogate(log(rho), torch.tensor([advantage]).double(), 1 - low, 1 + high).item()


def test_a_good_answer_gains_nothing_beyond_the_clip() -> None:
    assert objective(1.5, +1.0) == pytest.approx(1.2)


def test_a_bad_answer_that_became_likelier_is_punished_in_full() -> None:
    assert objective(1.5, -1.0) == pytest.approx(-1.5)


def test_inside_the_band_nothing_is_clipped() -> None:
    assert objective(1.1, +1.0) == pytest.approx(1.1)


def test_the_upper_bound_may_be_wider_than_the_lower() -> None:
    assert objective(1.5, +1.0, low=0.2, high=0.28) == pytest.approx(1.28)
    assert objective(0.5, -1.0, low=0.2, high=0.28) == pytest.approx(-0.8)


def test_the_clip_silences_only_tokens_that_left_the_band_in_the_direction_of_gain() -> None:
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()

    clipped = OBJECTIVES["dapo"](0.8, 1.28).clipped(
        Tokens(log(1.5, 1.5, 0.5, 0.5), torch.zeros(4), advantage, torch.zeros(4))
    )

    assert clipped.tolist() == [True, False, False, True]


def test_population_std_makes_a_split_group_plus_and_minus_one() -> None:
    assert grpo.advantages([[1, 0, 1, 0]], "group") == [[1, -1, 1, -1]]
    assert grpo.advantages([[1, 1, 0, 1, 0, 0, 1, 0]], "group") == [[1, 1, -1, 1, -1, -1, 1, -1]]


def test_sample_std_is_a_different_scale() -> None:
    [advantages] = grpo.advantages([[1, 0, 1, 0]], "group", "sample")

    assert advantages == pytest.approx([0.8660, -0.8660, 0.8660, -0.8660], abs=1e-4)


def test_a_group_that_agrees_teaches_nothing() -> None:
    for scale in ("group", "batch", "none"):
        assert grpo.advantages([[0.3] * 4, [0.1 + 0.2, 0.3, 0.3, 0.3]], scale) == [[0.0] * 4] * 2


def test_one_answer_has_no_sibling_to_beat() -> None:
    assert grpo.advantages([[0.7]], "group") == [[0.0]]


def test_without_scale_the_advantage_is_the_distance_to_the_mean() -> None:
    assert grpo.advantages([[1, 0, 0, 0]], "none") == [[0.75, -0.25, -0.25, -0.25]]


def test_batch_scale_keeps_two_groups_in_proportion() -> None:
    wide, narrow = grpo.advantages([[1.0, 0.0], [0.6, 0.4]], "batch")

    assert wide[0] / narrow[0] == pytest.approx(5.0)
    assert wide[0] == pytest.approx(0.5 / math.sqrt((2 * 0.25 + 2 * 0.01) / 4))


def test_an_ungraded_answer_leaves_the_mean_alone_and_gets_no_advantage() -> None:
    assert grpo.advantages([[1.0, None, 0.0, None]], "group") == [[1.0, 0.0, -1.0, 0.0]]


def test_a_token_is_credited_with_every_step_that_ends_after_it() -> None:
    advantages = grpo.process_advantages([0.5, -0.3, 0.8], [10, 20, 30], length=33)

    assert advantages == pytest.approx([1.0] * 10 + [0.5] * 10 + [0.8] * 10 + [0.0] * 3)


@pytest.mark.parametrize(("policy", "reference", "expected"), [(0.6, 0.4, 0.072), (0.9, 0.1, 1.308)])
def test_k3_is_the_papers_number(policy: float, reference: float, expected: float) -> None:
    assert grpo.kl_k3(log(policy), log(reference)).item() == pytest.approx(expected, abs=1e-3)


def test_k3_is_zero_where_they_agree_and_never_negative() -> None:
    logp, ref = torch.randn(1000), torch.randn(1000)

    assert grpo.kl_k3(logp, logp).abs().max() == 0
    assert grpo.kl_k3(logp, ref).min() >= 0


def test_the_first_step_on_a_fresh_snapshot_has_no_loss_but_a_gradient() -> None:
    logp = torch.full((6,), -1.0, requires_grad=True)
    advantage = torch.tensor([1.0] * 3 + [-1.0] * 3)
    weight = torch.tensor([1 / 6] * 6)

    loss = token_loss(
        logp,
        logp.detach(),
        advantage,
        weight,
        torch.tensor([0, 0, 0, 1, 1, 1]),
        objective=OBJECTIVES["grpo"](0.8, 1.2),
        kl=0.04,
        kl_estimator="k3",
        ref_logp=logp.detach(),
    )
    torch.autograd.backward(loss)

    assert loss.item() == pytest.approx(0.0)
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-1 / 6] * 3 + [1 / 6] * 3)


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [
        ([0, 0, 0], "all_zero"),
        ([1, 1], "all_one"),
        ([0.5, 0.5], "equal"),
        ([0, 1], "mixed"),
        ([None, 1], "ungraded"),
        ([None, 0, 0], "all_zero"),
    ],
)
def test_a_group_says_what_it_has_to_teach(rewards: list[float | None], kind: str) -> None:
    assert grpo.signal(rewards) == kind
