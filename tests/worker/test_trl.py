"""The losses of given answers, reward models and RLOO against those of TRL's trainers.

TRL's own `compute_loss` runs on a model of single tokens: the log-probability of each token is a number of its own,
wherever the token stands. So loss and gradient are compared with nothing of either trainer in between. The supervised
loss is compared on a small model.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.jobs.offline_hyperparameters import (
    DpoHyperparameters,
    ResolvedOffline,
    SupervisedHyperparameters,
    resolve,
)
from tests.present import untyped
from tests.worker.rounding import assert_same_gradient
from tests.worker.test_offline_training import conversations
from worker.model.policy import Policy
from worker.training import grpo, preference
from worker.training.objective import token_loss
from worker.training.objectives.registry import OBJECTIVES
from worker.training.offline import OfflineTrainer
from worker.training.preference import Pairs, pair_loss
from worker.training.reward import bradley_terry
from worker.types import Pack

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


def trainer_of(model: Any, metrics: dict[str, list[float]] | None = None, **settings: Any) -> Any:
    """What TRL's `_compute_loss` reads of its trainer. It adds to `metrics`."""
    return SimpleNamespace(
        model=model,
        accelerator=OneProcess(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics={"eval": defaultdict(list) if metrics is None else metrics},
        _total_train_tokens=0,
        **settings,
    )


def same(ours: Tensor, theirs: Tensor, weight: Tensor, *, rel: float = 1e-9) -> None:
    assert ours.item() == pytest.approx(theirs.item(), rel=rel)
    [expected] = torch.autograd.grad(theirs, weight)
    [found] = torch.autograd.grad(ours, weight)
    assert torch.allclose(found, expected, rtol=rel, atol=rel * 1e-6)
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
    trl = import_module("trl.trainer.dpo_trainer").DPOTrainer
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
    trl = import_module("trl.trainer.kto_trainer").KTOTrainer
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
    trl = import_module("trl.trainer.reward_trainer").RewardTrainer
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
    trl = import_module("trl.trainer.rloo_trainer").RLOOTrainer
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
    share = 1 / OBJECTIVES["rloo"].normaliser(lengths, 9)
    found = token_loss(
        policy.logp[token],
        old[token],
        torch.tensor(advantages, dtype=torch.float64)[answer],
        torch.tensor([share * OBJECTIVES["rloo"].token_weight(n) for n in lengths], dtype=torch.float64)[
            answer
        ],
        answer,
        objective=OBJECTIVES["rloo"](0.8, 1.2),
    )

    same(found, expected, policy.logp)


class Logits(torch.nn.Module):
    """A model with the same logits at each position, as transformers' models give them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(10, generator=generator, dtype=torch.float64))

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.weight.expand(*input_ids.shape, 10))

    @property
    def logp(self) -> Tensor:
        return self.weight.log_softmax(-1)


def without_reference(kind: Any, model: Logits, pair: int, **settings: Any) -> Tensor:
    """The loss of a pair by a trainer of TRL's that has no reference, from the logits on."""
    rows: dict[str, Tensor] = {}
    for name, row in (("chosen", pair), ("rejected", 2 + pair)):
        ids, mask = INPUT_IDS[row : row + 1], ANSWERS[row : row + 1]
        attended = mask.clone()
        attended[:, 0] = 1  # the prompt
        rows |= {
            f"{name}_input_ids": ids,
            f"{name}_attention_mask": attended,
            f"{name}_labels": torch.where(mask == 1, ids, -100),
        }
    stub = trainer_of(model, is_encoder_decoder=False, padding_value=0, pad_token_id=0, **settings)
    for name in ("concatenated_inputs", "get_batch_logps"):
        setattr(stub, name, getattr(kind, name))  # static methods
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(kind, name):
            setattr(stub, name, MethodType(getattr(kind, name), stub))
    loss: Tensor = kind.get_batch_loss_metrics(stub, model, rows)[0]
    return loss


def own_loss_of(model: Logits, pair: int, beta: float, **loss: Any) -> Tensor:
    asked = DpoHyperparameters.model_validate({"beta": beta, "advanced": {"loss": loss}})
    pairs = Pairs.of(model.logp[PAIRED_TOKENS], None, PAIRED_ANSWER)
    return pair_loss(resolve("dpo", asked, rows=100, parameters=1000), pairs)[pair]


@pytest.mark.parametrize("pair", [0, 1])
@pytest.mark.parametrize(("beta", "gamma"), [(2.0, 1.0), (2.5, 0.5)])
def test_simpo_is_that_of_trl(pair: int, beta: float, gamma: float) -> None:
    trl = import_module("trl.experimental.cpo").CPOTrainer
    model = Logits(1)
    settings = {"beta": beta, "loss_type": "simpo", "simpo_gamma": gamma, "label_smoothing": 0.0}
    expected = without_reference(trl, model, pair, cpo_alpha=0.0, alpha=0.0, **settings)

    found = own_loss_of(model, pair, beta, type="simpo", gamma=gamma)

    same(found, expected, model.weight)


@pytest.mark.parametrize("pair", [0, 1])
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_orpo_is_that_of_trl(pair: int, beta: float) -> None:
    """One pair at a time: TRL's supervised term is a mean over the tokens of all pairs, and of their prompts.

    The only token of a prompt here is the first one, which is not predicted. TRL computes the odds in float32.
    """
    trl = import_module("trl.experimental.orpo").ORPOTrainer
    model = Logits(1)
    expected = without_reference(trl, model, pair, beta=beta)

    found = own_loss_of(model, pair, beta, type="orpo")

    same(found, expected, model.weight, rel=1e-6)


@pytest.mark.parametrize("budget", [10_000, 30])
def test_the_supervised_loss_is_that_of_trl(make_policy: Callable[..., Policy], budget: int) -> None:
    """The loss and the gradient of a step with several answers and masks in a row, on a real model."""
    trl = import_module("trl.trainer.sft_trainer").SFTTrainer
    ours, theirs = make_policy(moved=True), make_policy(moved=True)
    rows = conversations()
    width = max(len(pack.prompt_ids) + len(pack.sequences[0].output_ids_T) for pack in rows)
    input_ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    for number, pack in enumerate(rows):
        [one] = pack.sequences
        start, end = len(pack.prompt_ids), len(pack.prompt_ids) + len(one.output_ids_T)
        input_ids[number, :end] = torch.tensor([*pack.prompt_ids, *one.output_ids_T])
        learned = torch.tensor(one.learned_T or [True] * len(one.output_ids_T))
        labels[number, start:end] = torch.where(learned, input_ids[number, start:end], -100)

    class Fused:
        """What TRL's fused head gives, by transformers' own logits."""

        training = False

        def __call__(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
            logits = theirs.model(input_ids=input_ids, use_cache=False).logits[:, :-1]
            target = labels[:, 1:]
            mask = target != -100
            logp = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0] * mask
            is_top1 = (logits.argmax(-1) == target) & mask
            zeros = torch.zeros_like(logp)
            return SimpleNamespace(log_probs=logp, label_mask=mask, entropy=zeros, is_top1=is_top1)

    options = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False)
    metrics: dict[str, list[float]] = defaultdict(list)
    stub = trainer_of(Fused(), metrics, args=options, compute_loss_func=None, label_smoother=None)
    stub.accelerator.parallelism_config = None
    loss = trl.compute_loss(stub, stub.model, {"input_ids": input_ids, "labels": labels})
    loss.backward()

    trainer = OfflineTrainer(ours, resolve_supervised(rows), token_budget=budget)
    totals = trainer.add(rows)

    assert totals.loss / totals.counted == pytest.approx(loss.item(), rel=1e-5)
    [accuracy] = metrics["mean_token_accuracy"]
    assert totals.correct / totals.tokens == pytest.approx(accuracy)
    for own, other in zip(ours.trainable, theirs.trainable, strict=True):
        assert own.grad is not None
        assert_same_gradient(own.grad / totals.counted, other.grad)


def resolve_supervised(rows: Sequence[Pack]) -> ResolvedOffline:
    return resolve("supervised", SupervisedHyperparameters(), rows=len(rows), parameters=1000)
