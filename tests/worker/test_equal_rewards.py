"""Rewards that differ by rounding only are equal in training and in everything that describes it."""

import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from regraft.resources.graders import Case, judged

from core import golden_cases
from core.database.tables import GoldenCase
from core.jobs.hyperparameter_groups import Scale
from core.pipelines import rows
from core.pipelines.rows import Selection
from core.results import what_if
from core.results.preview_report import with_signal
from core.rewards import all_equal
from core.statistics import paired_difference
from core.step_metrics import StepMetrics
from core.thresholds import Thresholds
from worker.recording import monitors, verdict
from worker.training import grpo, token_rewards
from worker.training.token_rewards import Moments

ROUNDED = [
    [1, 1, 1, 0.9999999],
    [23.456789, 23.456791, 23.456790, 23.456789],
    [0.1 + 0.2, 0.3, 0.3, 0.3],
    [0.3 - 3 * 0.1, 0.0, 0.0, 0.0],
    [1e7, 1e7 + 1, 1e7, 1e7],
    [-1e12, -1e12 - 1e4, -1e12, -1e12],
]
DIFFERENT = [
    [1, 1, 1, 0.99999],
    [0, 0, 0, 0.0001],
    [1e7, 1e7 + 1000, 1e7, 1e7],
    [1e12, -1e12, 1e12, 1e12],
]
CASES = [*((rewards, False) for rewards in ROUNDED), *((rewards, True) for rewards in DIFFERENT)]


@given(st.floats(-(2.0**40), 2.0**40, width=32), st.lists(st.integers(-2, 2), min_size=2, max_size=8))
def test_scores_that_differ_in_the_last_bits_of_float32_are_equal(reward: float, bits: list[int]) -> None:
    base = torch.tensor(reward, dtype=torch.float32)
    rounded = [(base * (1 + bit * 2.0**-23)).item() for bit in bits]

    assert all_equal(rounded)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(("rewards", "differ"), CASES)
def test_training_takes_a_rounding_error_for_no_difference(
    rewards: list[float], differ: bool, scale: Scale
) -> None:
    [advantages] = grpo.advantages([rewards], scale)
    [[steps]] = grpo.step_advantages([[rewards]], scale)

    assert any(advantages) == any(grpo.leave_one_out(rewards)) == any(steps) == differ
    assert (grpo.signal(rewards) == "mixed") == differ


@pytest.mark.parametrize(("rewards", "differ"), CASES)
def test_advantages_of_tokens_are_not_normalized_by_a_rounding_error(
    rewards: list[float], differ: bool
) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    moments = Moments.of(values)

    normalized = token_rewards.normalized(values, moments.mean, moments.std("population"))

    assert bool(normalized.any()) == differ


@pytest.mark.parametrize(("rewards", "differ"), CASES)
def test_reports_have_the_same_rule_as_training(rewards: list[float], differ: bool) -> None:
    stored = [what_if.Rescored((1, "train", 0), reward, rewards[0]) for reward in rewards]
    compared = what_if.compare(stored, 0.5)
    sizes, _ = what_if.advantage_sizes(stored, "group")
    samples = [sample(reward, f"answer {index}") for index, reward in enumerate(rewards)]

    assert (with_signal([(reward,) for reward in rewards], len(rewards)) == 1.0) == differ
    assert (compared.before.groups_with_signal == 1) == differ
    assert (compared.same < len(rewards)) == differ
    assert bool(sizes.largest) == differ
    assert bool(list(rows.selected(samples, Selection(form="dpo")))) == differ
    assert (paired_difference([(max(rewards), min(rewards))])["ties"] == 0) == differ
    paired = verdict.compare([max(rewards)], [min(rewards)])
    assert paired is not None
    assert (paired.ties == 0) == differ


@pytest.mark.parametrize(("rewards", "differ"), CASES)
def test_checks_of_a_grader_have_the_same_rule_as_training(rewards: list[float], differ: bool) -> None:
    low, high = min(rewards), max(rewards)
    case = Case(line=1, sample="4", item={}, expect=high)
    tested = judged(case, {"reward": low, "metadata": {"errors": {}}})

    assert golden_cases.passes(GoldenCase(min_score=high, max_score=None), low) == (not differ)
    assert golden_cases.passes(GoldenCase(min_score=None, max_score=low), high) == (not differ)
    assert golden_cases.passes(GoldenCase(min_score=low, max_score=high), low)
    assert tested.passed == (not differ)


@pytest.mark.parametrize(("rewards", "differ"), CASES)
def test_a_part_whose_scores_differ_by_rounding_only_is_inert(rewards: list[float], differ: bool) -> None:
    part = {
        "type": "math",
        "train_reward_mean": statistics.fmean(rewards),
        "train_reward_std": statistics.pstdev(rewards),
    }
    other = {"name": "other", "type": "math", "train_reward_mean": 0.5, "train_reward_std": 0.5}
    scores: Any = {"graders": [{"name": "part", **part}, other]}
    steps = [StepMetrics(step=number, scores=scores) for number in (1, 2, 3)]

    assert bool(monitors.check(steps, Thresholds())) == (not differ)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_what_if_has_the_advantages_that_training_has(scale: Any) -> None:
    """Both rewards are nearer to their mean than two equal rewards may be to each other."""
    rewards = [0.0, 1.5e-6]
    stored = [what_if.Rescored((1, "train", 0), reward, reward) for reward in rewards]

    sizes, _ = what_if.advantage_sizes(stored, scale)

    [trained] = grpo.advantages([rewards], scale)
    assert sizes.largest == pytest.approx(max(trained), rel=1e-9)


@pytest.mark.parametrize("rewards", [*ROUNDED, *DIFFERENT])
def test_rewards_that_differ_and_count_as_equal_are_warned_of_once(rewards: list[float]) -> None:
    is_float64 = rewards in ([0.1 + 0.2, 0.3, 0.3, 0.3], [0.3 - 3 * 0.1, 0.0, 0.0, 0.0])
    findings = monitors.alike_rewards([[None, *rewards], [1.0, 0.0], [1.0, 1.0], []])

    assert bool(findings) == (rewards in ROUNDED and not is_float64)
    for finding in findings:
        assert "In 1 of 4 groups the rewards differ by less than 1e-06" in finding.message
        assert f"such as {min(rewards)!r} and {max(rewards)!r}" in finding.message
        assert monitors.alike_rewards([rewards], {finding.rule}) == []


def sample(score: float, answer: str) -> rows.Row:
    return {
        "messages": [{"role": "user", "content": "?"}],
        "sample": {"answer": answer, "score": score, "finish_reason": "stop", "prompt": 1},
    }
