"""The losses of preferences, reward models and RLOO against those of TRL's trainers, where TRL is installed.

TRL's own `_compute_loss` runs on a model of single tokens: the log-probability of each token is a number of its own,
wherever the token stands. So loss and gradient are compared with nothing of either trainer in between.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.jobs.offline_hyperparameters import DpoHyperparameters, resolve
from tests.present import untyped
from worker.learn import grpo, preference
from worker.learn.offline import Pairs, pair_loss
from worker.learn.reward import bradley_terry

# Two pairs, preferred answers first as in TRL: a prompt token, then answers of different lengths and padding.
INPUT_IDS = torch.tensor([[0, 1, 2, 3], [0, 4, 5, 0], [0, 6, 0, 0], [0, 7, 8, 9]])
ANSWERS = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1]])
PAIRED_TOKENS = [1, 2, 3, 6, 4, 5, 7, 8, 9]  # ours: the answers of a pair stand together
PAIRED_ANSWER = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3])


class Unigrams:
    """log p of a token, whatever comes before it."""

    training = False

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logp = -3 * torch.rand(10, generator=generator, dtype=torch.float64) - 0.1
        self.logp.requires_grad_()

    def __call__(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        logp = self.logp[input_ids[:, 1:]] * (labels[:, 1:] != -100)
        zeros = torch.zeros_like(logp)
        return SimpleNamespace(log_probs=logp, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    def of_answers(self) -> Tensor:
        """The sum over the tokens of each answer, in the order of INPUT_IDS."""
        return (self.logp[INPUT_IDS] * ANSWERS).sum(1)


class OneProcess:
    device = torch.device("cpu")
    num_processes = 1

    def gather(self, values: Tensor) -> Tensor:
        return values

    def gather_for_metrics(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


def trainer_of(model: Any, **settings: Any) -> Any:
    """What TRL's `_compute_loss` reads of its trainer."""
    return SimpleNamespace(
        model=model,
        accelerator=OneProcess(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        **settings,
    )


def same(ours: Tensor, theirs: Tensor, weight: Tensor) -> None:
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    [expected] = torch.autograd.grad(theirs, weight)
    [found] = torch.autograd.grad(ours, weight)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-15)
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize(
    ("loss", "theirs"),
    [
        ({"type": "sigmoid"}, {"loss_types": ["sigmoid"]}),
        ({"type": "sigmoid", "length_normalize": True}, {"loss_types": ["sigmoid_norm"]}),
        ({"type": "ipo", "length_normalize": True}, {"loss_types": ["ipo"]}),
    ],
)
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_the_losses_of_pairs_are_those_of_trl(
    loss: dict[str, Any], theirs: dict[str, Any], beta: float
) -> None:
    trl = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    policy, reference = Unigrams(1), Unigrams(2)
    chosen, rejected = reference.of_answers().detach().chunk(2)
    stub = trainer_of(
        policy,
        beta=beta,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_weights=[1.0],
        **theirs,
    )
    expected = trl._compute_loss(
        stub,
        policy,
        {
            "input_ids": INPUT_IDS,
            "completion_mask": ANSWERS,
            "ref_chosen_logps": chosen,
            "ref_rejected_logps": rejected,
        },
        False,
    )

    asked = DpoHyperparameters.model_validate({"beta": beta, "advanced": {"loss": loss}})
    pairs = Pairs.of(policy.logp[PAIRED_TOKENS], reference.logp[PAIRED_TOKENS].detach(), PAIRED_ANSWER)
    found = pair_loss(resolve("dpo", asked, rows=100, parameters=1000), pairs).mean()

    same(found, expected, policy.logp)


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 1.33)])
def test_kto_is_that_of_trl(weights: tuple[float, float], seed: int) -> None:
    trl = pytest.importorskip("trl.trainer.kto_trainer").KTOTrainer
    policy, reference = Unigrams(1), Unigrams(seed)
    desirable = torch.tensor([True, False, True, False])
    # The estimate of the KL is over the answers in another order, which single tokens do not see.
    other = {"KL_input_ids": INPUT_IDS, "KL_attention_mask": ANSWERS, "KL_completion_mask": ANSWERS}
    ref_logps = reference.of_answers().detach()
    stub: Any = trainer_of(
        policy,
        beta=0.5,
        loss_type="kto",
        _compute_kl_logps=lambda model, batch: trl._compute_kl_logps(stub, model, batch),
        calculate_KL=True,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
    )
    batch = {
        "input_ids": INPUT_IDS,
        "attention_mask": ANSWERS,
        "completion_mask": ANSWERS,
        "label": desirable,
    }
    expected = trl._compute_loss(
        stub, policy, batch | other | {"ref_logps": ref_logps, "ref_KL_logps": ref_logps}, False
    )

    h = policy.of_answers() - ref_logps
    found = preference.kto(
        h,
        desirable,
        beta=0.5,
        z0=max(0.0, h.mean().item()),
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
    ).mean()

    same(found, expected, policy.logp)


@pytest.mark.parametrize("margin", [None, 0.4])
@pytest.mark.parametrize("centering", [None, 0.01])
def test_the_loss_of_reward_models_is_that_of_trl(margin: float | None, centering: float | None) -> None:
    trl = pytest.importorskip("trl.trainer.reward_trainer").RewardTrainer
    rewards = torch.tensor([0.4, -1.0, 0.9, 0.7], dtype=torch.float64, requires_grad=True)

    class Rewards:
        training = False

        def __call__(self, **_: Any) -> Any:
            return SimpleNamespace(logits=rewards.unsqueeze(-1))

    stub = trainer_of(Rewards(), args=SimpleNamespace(center_rewards_coefficient=centering))
    margins = torch.full((2,), margin or 0.0, dtype=torch.float64)
    expected = trl.compute_loss(stub, stub.model, {} if margin is None else {"margin": margins})

    chosen, rejected = rewards.chunk(2)
    found = bradley_terry(chosen, rejected, margins, centering=centering or 0.0).mean()

    same(found, expected, rewards)


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.6])
def test_rloo_is_that_of_trl(spread: float) -> None:
    trl = pytest.importorskip("trl.trainer.rloo_trainer").RLOOTrainer
    policy = Unigrams(1)
    generator = torch.Generator().manual_seed(5)
    old = policy.logp.detach() + spread * torch.randn(10, generator=generator, dtype=torch.float64)
    advantages = untyped(grpo.leave_one_out([1.0, 0.0, 0.3, 0.9]))
    per_token, mask = policy.logp[INPUT_IDS], ANSWERS.double()
    stub = trainer_of(
        policy,
        epsilon_low=0.2,
        epsilon_high=0.2,
        _get_per_token_logps_and_entropies=lambda *_, **__: (per_token, torch.zeros_like(mask), None),
    )
    expected = trl._compute_loss(
        stub,
        policy,
        {
            "prompt_ids": INPUT_IDS[:, :1],
            "prompt_mask": ANSWERS[:, :1],
            "completion_ids": INPUT_IDS,
            "completion_mask": mask,
            "old_logps": (old[INPUT_IDS] * mask).sum(1),
            "advantages": torch.tensor(advantages, dtype=torch.float64),
        },
    )

    answer, place = mask.nonzero(as_tuple=True)
    token = INPUT_IDS[answer, place]
    lengths = [int(length) for length in mask.sum(1)]
    share = 1 / grpo.normaliser(lengths, "rloo", 9)
    found = grpo.loss(
        policy.logp[token],
        old[token],
        torch.tensor(advantages, dtype=torch.float64)[answer],
        torch.tensor([share * grpo.token_weight(n, "rloo") for n in lengths], dtype=torch.float64)[answer],
        answer,
        name="rloo",
        bounds=(0.8, 1.2),
    )

    same(found, expected, policy.logp)
