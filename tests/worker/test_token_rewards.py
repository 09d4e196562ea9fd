"""Advantages of tokens against hand-checked numbers, and REINFORCE++ against its formulas written as loops."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.jobs.hyperparameters import Resolved
from graders.types import ErrorKind, Grade
from tests.fakes import RecordingTrainer, learn
from tests.present import present
from tests.worker.test_training import (
    asked,
    packed_gradients,
    plain_correction,
    plain_logprobs,
    relative_difference,
    with_gap,
)
from tests.worker.test_updates import MIXED, sampled, weights_of
from worker.model.policy import Policy
from worker.training import contributions, token_rewards
from worker.training.gradient import LocalGradient
from worker.training.policy_loss import PolicyLoss
from worker.training.token_rewards import Moments
from worker.training.trainer import PeftTrainer

# Two answers, of two tokens and of one.
ANSWER = torch.tensor([0, 0, 1])


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestFormulas:
    def test_a_token_is_charged_its_kl_and_the_last_one_gets_the_score(self) -> None:
        reward = token_rewards.token_rewards(float64(1, 1, 0), float64(0.2, -0.1, 0.3), ANSWER, 0.1)

        assert reward.tolist() == pytest.approx([-0.02, 1.01, -0.03], abs=1e-12)

    def test_the_reward_to_go_is_the_score_less_the_kl_from_here_on(self) -> None:
        reward = token_rewards.token_rewards(float64(1, 1, 0), float64(0.2, -0.1, 0.3), ANSWER, 0.1)

        assert token_rewards.reinforce_plus_plus(reward, ANSWER).tolist() == pytest.approx(
            [0.99, 1.01, -0.03]
        )

    @pytest.mark.parametrize(
        ("std", "expected"),
        [
            ("population", [0.6864144, 0.7275993, -1.4140137]),
            ("sample", [0.5604551, 0.5940823, -1.1545373]),
        ],
    )
    def test_advantages_are_normalized_over_all_tokens(self, std: Any, expected: list[float]) -> None:
        raw = float64(0.99, 1.01, -0.03)
        moments = Moments.of(raw)

        ours = token_rewards.normalized(raw, moments.mean, moments.std(std))

        assert moments.mean == pytest.approx(0.6566666667)
        assert ours.tolist() == pytest.approx(expected, abs=1e-7)

    def test_equal_advantages_are_normalized_to_zero(self) -> None:
        raw = float64(0.1, 0.1, 0.1)

        moments = Moments.of(raw)

        assert token_rewards.normalized(raw, moments.mean, moments.std("population")).tolist() == [0, 0, 0]

    def test_sums_are_discounted_and_end_with_their_answer(self) -> None:
        values, answer = float64(1, 2, 4, 8, 16, 32), torch.tensor([0, 1, 1, 1, 2, 2])

        assert token_rewards.discounted_sums(values, answer, 0.5).tolist() == [1, 6, 8, 8, 32, 32]

    @pytest.mark.parametrize("parts", [(1, 1, 1), (0, 1, 2), (3, 0), (3,)])
    def test_moments_of_parts_add_up_to_those_of_the_whole(self, parts: tuple[int, ...]) -> None:
        values = float64(0.99, 1.01, -0.03)

        moments, at = Moments(), 0
        for length in parts:
            part = values[at : at + length]
            moments += Moments.of(part) if length else Moments()
            at += length

        assert moments.mean == pytest.approx(values.mean().item(), rel=1e-14)
        assert moments.std("population") == pytest.approx(statistics.pstdev(values.tolist()), rel=1e-14)

    def test_one_value_has_no_std(self) -> None:
        assert Moments.of(float64(3)).std("sample") == 0.0 == Moments().std("population")


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    return make_policy(moved=True)


@pytest.fixture
def groups(policy: Policy) -> list[Any]:
    """Answers of uneven length; the second group agrees, one answer of the third is ungraded."""
    one, two, three = sampled(policy, [MIXED[0], [1.0] * 4, MIXED[1]])
    ungraded = Grade(None, "broken", ErrorKind.other_error)
    return [one, two, replace(three, grades_G=(ungraded, *three.grades_G[1:]))]


def plain_advantages(policy: Policy, groups: list[Any], settings: Resolved) -> dict[Any, list[float]]:
    """REINFORCE++'s normalized advantages as loops, in Python's float64, by answer."""
    raw = {}
    for group in groups:
        for rollout, reward in zip(group.rollouts_G, group.rewards_G, strict=True):
            if reward is None:
                continue
            with torch.no_grad():
                logp = plain_logprobs(policy, group.prompt.ids, rollout.output_ids_T).tolist()
                with policy.as_base():
                    ref = plain_logprobs(policy, group.prompt.ids, rollout.output_ids_T).tolist()
            k1 = [one - other for one, other in zip(logp, ref, strict=True)]
            raw[id(rollout)] = [reward - settings.kl * sum(k1[t:]) for t in range(len(k1))]
    every = [value for values in raw.values() for value in values]
    mean, std = statistics.fmean(every), statistics.pstdev(every)
    return {key: [(value - mean) / std for value in values] for key, values in raw.items()}


def plain_reinforce_plus_plus(policy: Policy, groups: list[Any], settings: Resolved) -> list[torch.Tensor]:
    """The gradient of the first update, an answer at a time."""
    advantages = plain_advantages(policy, groups, settings)
    tokens = sum(map(len, advantages.values()))
    policy.model.zero_grad()
    for group in groups:
        for rollout in group.rollouts_G:
            if id(rollout) not in advantages:
                continue
            advantage = torch.tensor(advantages[id(rollout)])
            logp = plain_logprobs(policy, group.prompt.ids, rollout.output_ids_T)
            old, correction = plain_correction(logp.detach(), torch.tensor(rollout.logprobs_T), settings)
            ratio = torch.exp(logp - old)
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            torch.autograd.backward(-(objective * correction).sum() / tokens)
    return [present(parameter.grad).clone() for parameter in policy.trainable]


class TestReinforcePlusPlus:
    @pytest.mark.parametrize("kl", [0.0, 0.5])
    @pytest.mark.parametrize("importance", ["truncate", "none"])
    @pytest.mark.parametrize("budget", [4096, 24])
    def test_the_gradient_is_that_of_the_formulas_written_as_loops(
        self, policy: Policy, groups: list[Any], kl: float, importance: str, budget: int
    ) -> None:
        settings = asked({"loss": "reinforce_plus_plus", "kl": kl, "importance": importance})
        gapped = [with_gap(group, seed) for seed, group in enumerate(groups)]

        ours = packed_gradients(policy, gapped, settings, budget)

        assert relative_difference(ours, plain_reinforce_plus_plus(policy, gapped, settings)) < 1e-5

    def test_groups_that_agree_are_trained_on(self, policy: Policy, groups: list[Any]) -> None:
        settings = asked({"loss": "reinforce_plus_plus"})

        metrics = learn(PeftTrainer(policy, settings, token_budget=4096), groups)

        assert (metrics.trained_sequences, metrics.dropped_sequences) == (11, 1)
        without = [groups[0], groups[2]]
        gradients = [packed_gradients(policy, some, settings, 4096) for some in (groups, without)]
        assert relative_difference(*gradients) > 0.1

    def test_equal_rewards_of_all_answers_teach_nothing(self, policy: Policy) -> None:
        before = weights_of(policy)
        trainer = PeftTrainer(policy, asked({"loss": "reinforce_plus_plus"}), token_budget=4096)

        metrics = learn(trainer, sampled(policy, [[1.0] * 4, [1.0] * 4]))

        assert metrics.grad_norm == 0
        assert all(map(torch.equal, before, policy.trainable))

    def test_mini_batches_share_the_statistics_of_the_step(self, policy: Policy, groups: list[Any]) -> None:
        """The first of two mini-batches has advantages from the moments of both."""
        settings = asked({"loss": "reinforce_plus_plus", "mini_batches": 2, "kl": 0.1})
        trainer = RecordingTrainer(policy, settings, token_budget=4096)
        learn(trainer, groups)
        halves = trainer.gradients
        whole = packed_gradients(policy, groups, asked({"loss": "reinforce_plus_plus", "kl": 0.1}), 4096)
        shares = [contributions.contribution_of(group, settings, policy.text) for group in groups]
        parts = contributions.in_mini_batches(shares, 2, seed=0)
        counts = [sum(length for share in part for length in share.lengths) for part in parts]

        both = [(a * counts[0] + b * counts[1]) / sum(counts) for a, b in zip(*halves, strict=True)]

        assert len(halves) == 2
        assert relative_difference(both, whole) < 1e-5

    def test_the_kl_is_charged_once(self, policy: Policy, groups: list[Any]) -> None:
        """A penalty in the reward is no term of the loss."""
        settings = asked({"loss": "reinforce_plus_plus", "kl": 0.5})

        metrics = learn(PeftTrainer(policy, settings, token_budget=4096), groups)

        advantages = plain_advantages(policy, groups, settings)
        every = [value for values in advantages.values() for value in values]
        assert metrics.loss == pytest.approx(-statistics.fmean(every), abs=1e-5)
        assert present(metrics.kl) > 0

    @pytest.mark.parametrize("advanced", [{}, {"kl": 0.1, "reference_refresh_steps": 1, "mini_batches": 2}])
    def test_a_saved_trainer_goes_on_exactly_where_it_was(
        self,
        make_policy: Callable[..., Policy],
        groups: list[Any],
        tmp_path: Path,
        advanced: dict[str, Any],
    ) -> None:
        settings = asked({"loss": "reinforce_plus_plus"} | advanced)
        first, second = (
            PeftTrainer(make_policy(moved=moved), settings, token_budget=4096) for moved in (True, False)
        )
        learn(first, groups)
        first.save(tmp_path)
        second.load(tmp_path)

        results = [learn(trainer, groups) for trainer in (first, second)]

        assert results[0] == results[1]
        assert all(map(torch.equal, first.policy.trainable, second.policy.trainable))

    def test_tokens_that_a_budget_forced_have_no_reward(self, policy: Policy, groups: list[Any]) -> None:
        """They were not sampled, so their KL is not that of the policy. The first answer has two of them."""
        settings = asked({"loss": "reinforce_plus_plus", "kl": 0.5})
        rollouts = groups[0].rollouts_G
        long = next(rollout for rollout in rollouts if len(rollout.output_ids_T) > 4)
        forced = tuple(replace(one, forced=2, grammar_start=3) if one is long else one for one in rollouts)
        own = LocalGradient(PolicyLoss(policy, settings), token_budget=4096)

        shares = [
            contributions.contribution_of(group, settings, policy.text)
            for group in (replace(groups[0], rollouts_G=forced), *groups[1:])
        ]
        own.remember([present(share.pack) for share in shares], 0)

        whole, _ = contributions.divisors(shares, settings)
        every = sum(len(one.output_ids_T) for group in groups for one in group.rollouts_G)
        ungraded = len(groups[2].rollouts_G[0].output_ids_T)
        assert (
            own.of_micro_batches(PolicyLoss.reward_tokens, settings.kl)[0].advantages.count
            == whole
            == every - ungraded - 2
        )

    def test_reports_say_who_was_trained_on_and_no_single_advantage(
        self, policy: Policy, groups: list[Any]
    ) -> None:
        found = contributions.answer_signals(groups, asked({"loss": "reinforce_plus_plus"}))

        assert [lesson.is_trained for answer_signals in found for lesson in answer_signals] == [True] * 8 + [
            False
        ] + [True] * 3
        assert {lesson.advantage for answer_signals in found for lesson in answer_signals} == {None}
