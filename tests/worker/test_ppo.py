"""PPO: advantages and losses against hand-checked numbers and loops, and its value head through updates and resumes."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.jobs.hyperparameters import Resolved
from graders.types import ErrorKind, Grade
from tests.fakes import learn
from tests.present import present, untyped
from tests.worker.test_training import asked, plain_correction, plain_logprobs, relative_difference, with_gap
from tests.worker.test_updates import MIXED, sampled, weights_of
from worker.model.policy import Policy
from worker.model.value_head import ValueHead
from worker.training import contributions, grpo, ppo, token_rewards
from worker.training.gradient import LocalGradient
from worker.training.loss import StepValues
from worker.training.policy_loss import PolicyLoss
from worker.training.token_rewards import Moments, StepMoments
from worker.training.trainer import PeftTrainer
from worker.types import Group

ONE_ANSWER = torch.zeros(3, dtype=torch.int64)
VALUES = (0.5, 0.6, 0.8)


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestAdvantages:
    """Three tokens with the values 0.5, 0.6, 0.8 and the score 1 at the last."""

    @pytest.mark.parametrize(
        ("gamma", "lam", "advantages", "returns"),
        [
            (1.0, 0.95, (0.4705, 0.39, 0.2), (0.9705, 0.99, 1)),
            (1.0, 1.0, (0.5, 0.4, 0.2), (1, 1, 1)),
            (1.0, 0.0, (0.1, 0.2, 0.2), (0.6, 0.8, 1)),
            (0.99, 0.95, (0.45148405, 0.3801, 0.2), (0.95148405, 0.9801, 1)),
        ],
    )
    def test_they_are_those_of_generalized_advantage_estimation(
        self, gamma: float, lam: float, advantages: tuple[float, ...], returns: tuple[float, ...]
    ) -> None:
        ours = ppo.gae(float64(0, 0, 1), float64(*VALUES), ONE_ANSWER, gamma, lam)

        assert ours.tolist() == pytest.approx(advantages, abs=1e-12)
        assert (ours + float64(*VALUES)).tolist() == pytest.approx(returns, abs=1e-12)

    def test_the_kl_is_a_part_of_the_reward(self) -> None:
        score, kl = float64(1, 1, 1), float64(0.2, -0.1, 0.3)
        reward = token_rewards.token_rewards(score, kl, ONE_ANSWER, 0.1)

        ours = ppo.gae(reward, float64(*VALUES), ONE_ANSWER, 1.0, 0.95)

        assert reward.tolist() == pytest.approx([-0.02, 0.01, 0.97], abs=1e-12)
        assert ours.tolist() == pytest.approx([0.432925, 0.3715, 0.17], abs=1e-12)

    @pytest.mark.parametrize(
        ("std", "expected"),
        [
            ("population", (1.0316816, 0.3218494, -1.3535310)),
            ("sample", (0.8423645, 0.2627889, -1.1051534)),
        ],
    )
    def test_they_are_whitened(self, std: Any, expected: tuple[float, ...]) -> None:
        raw = float64(0.4705, 0.39, 0.2)
        moments = Moments.of(raw)

        ours = token_rewards.normalized(raw, moments.mean, moments.std(std))

        assert ours.tolist() == pytest.approx(expected, abs=1e-7)

    def test_an_answer_knows_nothing_of_the_next_one(self) -> None:
        answer = torch.tensor([0, 0, 0, 1, 1])
        rewards, values = float64(0, 0, 1, 0, 5), float64(*VALUES, 3, 4)

        together = ppo.gae(rewards, values, answer, 0.99, 0.95)

        alone = [
            ppo.gae(rewards[part], values[part], torch.zeros(part.stop - part.start).long(), 0.99, 0.95)
            for part in (slice(0, 3), slice(3, 5))
        ]
        assert torch.equal(together, torch.cat(alone))

    def test_without_values_and_a_lambda_of_one_they_are_the_reward_to_go_of_reinforce_plus_plus(
        self,
    ) -> None:
        reward, answer = float64(0.1, -0.2, 1, 0.5), torch.tensor([0, 0, 0, 1])

        ours = ppo.gae(reward, torch.zeros(4), answer, 1.0, 1.0)

        assert torch.equal(ours, token_rewards.reinforce_plus_plus(reward, answer))


class TestLosses:
    def test_the_surrogate_is_that_of_the_paper(self) -> None:
        """PPO eq. 7: rho 1.5 and 0.5 with the advantages 1 and -1 have the terms 1.2 and -0.8."""
        log_ratio, advantage = float64(1.5, 0.5).log(), float64(1, -1)

        assert grpo.surrogate(log_ratio, advantage, 0.8, 1.2).tolist() == pytest.approx([1.2, -0.8])

    @pytest.mark.parametrize(
        ("value", "loss", "slope"),
        [
            (1.0, 0.02, 0.0),  # 0.005 without the clip
            (0.6, 0.045, -0.3),  # within it
            (1.3, 0.08, 0.4),  # so far beyond the return that the clipped value is the nearer one
            (0.2, 0.245, -0.7),  # away from the return
        ],
    )
    def test_a_value_beyond_the_clip_has_no_gradient(self, value: float, loss: float, slope: float) -> None:
        """The value of sampling was 0.5, the return is 0.9, the clip 0.2."""
        now = float64(value).requires_grad_()

        ours = ppo.value_loss(now, float64(0.5), float64(0.9), 0.2)

        assert ours.item() == pytest.approx(loss, abs=1e-12)
        assert torch.autograd.grad(ours.sum(), now)[0].item() == pytest.approx(slope, abs=1e-12)

    @pytest.mark.parametrize(
        ("values", "expected"), [((0.0, 1.0, 2.0), 1.0), ((1.0, 1.0, 1.0), 0.0), ((2.0, 1.0, 0.0), -3.0)]
    )
    def test_the_explained_variance_is_one_for_the_returns_and_zero_for_a_constant(
        self, values: tuple[float, ...], expected: float
    ) -> None:
        returns = float64(0, 1, 2)
        moments = StepMoments(Moments.of(returns - float64(*values)), Moments.of(returns))

        assert moments.explained_variance == pytest.approx(expected)

    def test_equal_returns_have_no_explained_variance(self) -> None:
        assert StepMoments(Moments.of(float64(1, 2)), Moments.of(float64(1, 1))).explained_variance is None


class TestValueHead:
    def test_it_starts_with_the_value_zero(self) -> None:
        assert ValueHead(4, "cpu", adapter_weight=0.1)(torch.randn(3, 4)).tolist() == [0, 0, 0]

    @pytest.mark.parametrize("weight", [0.0, 0.1, 1.0])
    def test_only_a_part_of_its_gradient_goes_on(self, weight: float) -> None:
        head, hidden = (
            ValueHead(2, "cpu", adapter_weight=weight),
            torch.tensor([[1.0, 2.0]], requires_grad=True),
        )
        head.weight.data = torch.tensor([0.5, 0.25])

        value = head(hidden)
        torch.autograd.backward(value.sum())

        assert value.item() == 1.0
        assert present(head.weight.grad).tolist() == [1, 2]
        assert present(hidden.grad)[0].tolist() == pytest.approx([0.5 * weight, 0.25 * weight])

    def test_values_of_a_model_in_bfloat16_are_not_rounded(self) -> None:
        head = ValueHead(2, "cpu", adapter_weight=0.1)
        head.weight.data = torch.tensor([0.7, 0.001])

        [value] = head(torch.ones(1, 2, dtype=torch.bfloat16)).tolist()

        assert value == pytest.approx(0.701, abs=1e-6)


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    return make_policy(moved=True)


@pytest.fixture
def groups(policy: Policy) -> list[Any]:
    """Answers of uneven length; the second group agrees, one answer of the third is ungraded."""
    one, two, three = sampled(policy, [MIXED[0], [1.0] * 4, MIXED[1]])
    ungraded = Grade(None, "broken", ErrorKind.other_error)
    three = Group(three.prompt, three.rollouts_G, (ungraded, *three.grades_G[1:]))
    return [with_gap(group, seed) for seed, group in enumerate((one, two, three))]


def random_head(loss: PolicyLoss) -> ValueHead:
    head = present(loss.value_head)
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return head


def plain_hidden(policy: Policy, prompt_ids: Any, output_ids: tuple[int, ...]) -> torch.Tensor:
    """The hidden states that predict each token of an answer, of transformers itself."""
    ids = torch.tensor([[*prompt_ids, *output_ids]])
    decoder = policy.model.get_base_model().model
    hidden: torch.Tensor = decoder(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[0, len(prompt_ids) - 1 : -1]


def plain_gradients(
    policy: Policy, head: ValueHead, groups: list[Any], settings: Resolved
) -> list[torch.Tensor]:
    """PPO's first update, an answer at a time and its advantages as loops in Python's float64."""
    answers = [
        (group.prompt.ids, rollout, reward)
        for group in groups
        for rollout, reward in zip(group.rollouts_G, group.rewards_G, strict=True)
        if reward is not None
    ]
    advantages, returns = [], []
    for ids, rollout, reward in answers:
        with torch.no_grad():
            logp = plain_logprobs(policy, ids, rollout.output_ids_T).tolist()
            value = (plain_hidden(policy, ids, rollout.output_ids_T) @ head.weight + head.bias).tolist()
            with policy.as_base():
                ref = plain_logprobs(policy, ids, rollout.output_ids_T).tolist()
        rewards = [-settings.kl * (one - other) for one, other in zip(logp, ref, strict=True)]
        rewards[-1] += reward
        next_value = [*value[1:], 0.0]
        delta = [
            r + present(settings.gamma) * n - v for r, n, v in zip(rewards, next_value, value, strict=True)
        ]
        factor = present(settings.gamma) * present(settings.gae_lambda)
        of_answer = [
            sum(factor ** (later - t) * delta[later] for later in range(t, len(delta)))
            for t in range(len(delta))
        ]
        advantages.append(of_answer)
        returns.append([a + v for a, v in zip(of_answer, value, strict=True)])
    every = [value for values in advantages for value in values]
    mean, std = statistics.fmean(every), statistics.pstdev(every)
    policy.model.zero_grad()
    head.zero_grad()
    for (ids, rollout, _), of_answer, targets in zip(answers, advantages, returns, strict=True):
        advantage = torch.tensor([(value - mean) / std for value in of_answer])
        logp_T = plain_logprobs(policy, ids, rollout.output_ids_T)
        old, correction = plain_correction(logp_T.detach(), torch.tensor(rollout.logprobs_T), settings)
        ratio = torch.exp(logp_T - old)
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * correction
        hidden = plain_hidden(policy, ids, rollout.output_ids_T)
        errors = [
            0.5 * (states @ head.weight + head.bias - torch.tensor(targets)) ** 2
            for states in (hidden, hidden.detach())
        ]
        c1 = present(settings.value_weight)
        # The adapter gets c1 of the gradient, the head all of it.
        loss = -objective.sum() + c1 * errors[0].sum() + (1 - c1) * errors[1].sum()
        torch.autograd.backward(loss / len(every))
    return [present(parameter.grad).clone() for parameter in [*policy.trainable, *head.parameters()]]


class TestUpdates:
    @pytest.mark.parametrize(
        "advanced",
        [
            {},
            {"kl": 0.5, "gamma": 0.9, "gae_lambda": 0.7},
            {"kl": 0.5, "importance": "none", "value_weight": 1.0},
            {"value_weight": 0.0},
        ],
    )
    @pytest.mark.parametrize("budget", [4096, 24])
    def test_the_gradient_is_that_of_the_formulas_written_as_loops(
        self, policy: Policy, groups: list[Any], advanced: dict[str, Any], budget: int
    ) -> None:
        settings = asked({"loss": "ppo"} | advanced)
        loss = PolicyLoss(policy, settings)
        own = LocalGradient(loss, token_budget=budget)
        head = random_head(loss)
        shares = [contributions.contribution_of(group, settings, policy.text) for group in groups]
        own.remember([present(share.pack) for share in shares], 0)
        [moments] = (
            found.advantages for found in own.of_micro_batches(PolicyLoss.reward_tokens, settings.kl)
        )
        own.of_micro_batches(PolicyLoss.normalize, moments.mean, moments.std("population"))
        own.repeat(StepValues(kl=settings.kl))
        totals = own.collect()
        whole, _ = contributions.divisors(shares, settings)
        ours = [present(parameter.grad) / whole for parameter in loss.trainable]

        expected = plain_gradients(policy, head, groups, settings)

        assert totals.tokens == whole
        assert relative_difference(ours[:-2], expected[:-2]) < 1e-5
        assert relative_difference(ours[-2:], expected[-2:]) < 1e-5

    def test_every_graded_answer_is_trained_on(self, policy: Policy, groups: list[Any]) -> None:
        metrics = learn(PeftTrainer(policy, asked({"loss": "ppo"}), token_budget=4096), groups)

        assert (metrics.trained_sequences, metrics.dropped_sequences) == (11, 1)
        assert metrics.explained_variance == pytest.approx(0, abs=1e-6)
        assert present(metrics.value_loss) > 0

    def test_values_come_to_explain_the_returns(self, policy: Policy) -> None:
        """The reward is known from the prompt, so the returns are as well."""
        groups = sampled(policy, [[1.0] * 4, [0.0] * 4, [0.5] * 4, [1.0] * 4])
        settings = asked(
            {"loss": "ppo", "learning_rate": 1e-4, "value_learning_rate": 0.02, "value_clip": 10.0}
        )
        trainer = PeftTrainer(policy, settings, token_budget=4096)

        explained = [learn(trainer, groups).explained_variance for _ in range(60)]

        assert explained[0] == pytest.approx(0, abs=1e-6)
        assert present(explained[-1]) > 0.5

    def test_returns_and_old_values_stay_those_of_sampling(self, policy: Policy, groups: list[Any]) -> None:
        settings = asked({"loss": "ppo", "gae_lambda": 1.0})
        loss = PolicyLoss(policy, settings)
        own = LocalGradient(loss, token_budget=24)
        shares = [contributions.contribution_of(group, settings, policy.text) for group in groups]
        own.remember([present(share.pack) for share in shares], 0)
        own.of_micro_batches(PolicyLoss.reward_tokens, settings.kl)
        own.of_micro_batches(PolicyLoss.normalize, 0.0, 1.0)

        present(loss.value_head).bias.data += 1.0
        own.repeat(StepValues(kl=settings.kl))

        rewards = [
            reward
            for share in shares
            for reward, length in zip(
                [r for r in share.rewards_N if r is not None], share.lengths, strict=True
            )
            for _ in range(length)
        ]
        expected = sum(0.5 * max((1.0 - r) ** 2, (0.2 - r) ** 2) for r in rewards)
        assert own.collect().value_loss == pytest.approx(expected, rel=1e-5)

    def test_the_values_learn_beside_a_policy_without_a_reason_to_move(self, policy: Policy) -> None:
        """All rewards are equal and the values are 0, so whitened advantages differ only by lambda's discount."""
        trainer = PeftTrainer(
            policy, asked({"loss": "ppo", "gae_lambda": 1.0, "value_weight": 0.0}), token_budget=4096
        )
        before = weights_of(policy)

        metrics = learn(trainer, sampled(policy, [[1.0] * 4, [1.0] * 4]))

        assert metrics.grad_norm == 0
        assert all(map(torch.equal, before, policy.trainable))
        assert all(weight.abs().max() > 0 for weight in trainer.loss.trainable[-2:])

    def test_the_values_warm_up_alone_before_the_policy_moves(self, policy: Policy) -> None:
        settings = asked({"loss": "ppo", "learning_rate": 0.01, "value_warmup_steps": 2})
        trainer = PeftTrainer(policy, settings, token_budget=4096)
        groups = sampled(policy, [[1.0, 0.0] * 2, [0.5, 1.0] * 2])
        before = weights_of(policy)

        for _ in range(2):
            metrics = learn(trainer, groups)
            assert metrics.grad_norm == 0
            assert not metrics.skipped
        assert all(map(torch.equal, before, policy.trainable))
        assert all(weight.abs().max() > 0 for weight in trainer.loss.trainable[-2:])

        assert present(learn(trainer, groups).grad_norm) > 0
        assert not all(map(torch.equal, before, policy.trainable))

    def test_the_policy_has_its_own_warm_up_after_that_of_the_values(self, policy: Policy) -> None:
        settings = asked(
            {"loss": "ppo", "learning_rate": 0.01, "value_warmup_steps": 2, "warmup_steps": 4}
        ).model_copy(update={"learning_rate_schedule": "linear", "total_steps": 8})
        trainer = PeftTrainer(policy, settings, token_budget=4096)
        groups = sampled(policy, [[1.0, 0.0] * 2, [0.5, 1.0] * 2])
        before = weights_of(policy)

        for _ in range(3):
            learn(trainer, groups)

        # AdamW's first step moves a weight by the learning rate.
        steps = [(new - old).abs().max().item() for new, old in zip(policy.trainable, before, strict=True)]
        assert max(steps) == pytest.approx(0.01 / 4, rel=1e-2)

    def test_a_gradient_that_is_not_finite_moves_neither_adapter_nor_head(
        self, policy: Policy, groups: list[Any]
    ) -> None:
        before = weights_of(policy)
        rollouts_G = tuple(
            replace(rollout, logprobs_T=(math.nan,) * len(rollout.logprobs_T))
            for rollout in groups[0].rollouts_G
        )
        broken = replace(groups[0], rollouts_G=rollouts_G)
        trainer = PeftTrainer(policy, asked({"loss": "ppo"}), token_budget=4096)

        metrics = learn(trainer, [broken])

        assert metrics.skipped
        assert all(map(torch.equal, before, policy.trainable))
        assert [weight.abs().max().item() for weight in trainer.loss.trainable[-2:]] == [0, 0]

    def test_a_gradient_of_the_head_that_is_not_finite_does_not_move_the_adapter(
        self, policy: Policy, groups: list[Any]
    ) -> None:
        before = weights_of(policy)
        trainer = PeftTrainer(policy, asked({"loss": "ppo"}), token_budget=4096)
        untyped(trainer).loss.value_head.weight.register_hook(lambda gradient: gradient * math.inf)

        metrics = learn(trainer, groups)

        assert metrics.skipped
        assert all(map(torch.equal, before, policy.trainable))
        assert [weight.abs().max().item() for weight in trainer.loss.trainable[-2:]] == [0, 0]


class TestCheckpoints:
    @pytest.mark.parametrize(
        "advanced", [{}, {"kl": 0.1, "reference_refresh_steps": 1, "mini_batches": 2, "updates_per_batch": 2}]
    )
    def test_a_saved_trainer_goes_on_exactly_where_it_was(
        self,
        make_policy: Callable[..., Policy],
        groups: list[Any],
        tmp_path: Path,
        advanced: dict[str, Any],
    ) -> None:
        settings = asked({"loss": "ppo"} | advanced)
        first, second = (
            PeftTrainer(make_policy(moved=moved), settings, token_budget=4096) for moved in (True, False)
        )
        learn(first, groups)
        first.save(tmp_path)
        second.load(tmp_path)

        results = [learn(trainer, groups) for trainer in (first, second)]

        assert results[0] == results[1]
        assert all(map(torch.equal, first.loss.trainable, second.loss.trainable))
        assert not math.isclose(present(results[0].explained_variance), 0)

    def test_the_adapter_that_users_get_has_no_value_head(
        self, policy: Policy, groups: list[Any], tmp_path: Path
    ) -> None:
        trainers = [PeftTrainer(policy, asked({"loss": loss}), token_budget=4096) for loss in ("dapo", "ppo")]
        names = []
        for trainer, folder in zip(trainers, (tmp_path / "dapo", tmp_path / "ppo"), strict=True):
            learn(trainer, groups)
            trainer.save(folder)
            from safetensors import safe_open

            with safe_open(folder / "adapter_model.safetensors", "pt") as file:
                names.append((sorted(file.keys()), sorted(path.name for path in folder.iterdir())))

        assert names[0] == names[1]
