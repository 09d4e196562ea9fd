"""Alarms of gaming: for each a run that games its grader, and healthy ones that look alike."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from core.step_metrics import StepMetrics
from core.thresholds import Thresholds
from graders.types import Grade
from worker.history import History
from worker.recording import answer_statistics, monitors
from worker.recording.gaming import change
from worker.recording.monitors import check
from worker.types import Group, Prompt, Rollout

STEPS = 40


def noisy(start: float, end: float, *, seed: int = 0, noise: float = 0.03) -> list[float]:
    """A metric that goes in a line from `start` to `end`, with the noise of batches."""
    dice = random.Random(seed)
    return [
        start + (end - start) * number / (STEPS - 1) + dice.uniform(-noise, noise) for number in range(STEPS)
    ]


def raised(**metrics: list[Any]) -> dict[str, int]:
    """The rules that fire in a run with these metrics by step, and the step of each."""
    history, found = History(), {}
    for number in range(STEPS):
        values = {name: values[number] for name, values in metrics.items()}
        history.add(StepMetrics(step=number + 1, total_steps=STEPS, **values))
        for finding in check(history.steps, Thresholds(), history.warned):
            history.warned.add(finding.rule)
            found[finding.rule] = number + 1
    return found


def parts(**scores: list[float]) -> list[dict[str, Any]]:
    """The section of scores of each step, from the mean of each part."""
    return [
        {
            "graders": [
                {
                    "name": name,
                    "type": "python",
                    "train_reward_mean": values[number],
                    "train_reward_std": 0.4,
                }
                for name, values in scores.items()
            ]
        }
        for number in range(STEPS)
    ]


def test_a_part_that_rises_while_another_falls_is_named() -> None:
    found = raised(scores=parts(style=noisy(0.2, 0.9), right=noisy(0.5, 0.1, seed=1)))

    assert list(found) == ["one_sided_gain"]
    assert found["one_sided_gain"] < STEPS / 2


def test_a_part_that_rises_alone_is_named_after_half_of_the_job() -> None:
    found = raised(scores=parts(style=noisy(0.2, 0.9), right=noisy(0.2, 0.2, seed=1)))

    assert found["one_sided_gain"] == STEPS / 2


@pytest.mark.parametrize(
    ("style", "right"),
    [
        (noisy(0.2, 0.9), noisy(0.2, 0.8, seed=1)),
        (noisy(0.3, 0.3), noisy(0.3, 0.3, seed=1)),
        (noisy(0.5, 0.55, noise=0.2), noisy(0.5, 0.4, seed=1, noise=0.2)),
        ([0.2] * 5 + [1.0] * 35, [0.2] * 15 + noisy(0.2, 0.9, seed=1)[:25]),
    ],
    ids=["both learn", "nothing changes", "noise", "the format is learned first"],
)
def test_parts_of_a_healthy_run_are_not(style: list[float], right: list[float]) -> None:
    assert raised(scores=parts(style=style, right=right)) == {}


def test_longer_answers_that_score_higher_for_it_are_an_alarm() -> None:
    found = raised(
        completion_tokens_mean=noisy(20, 55),
        length_reward_correlation=noisy(0.7, 0.8),
        length_reward_z=noisy(5, 6),
    )

    assert list(found) == ["length_reward"]


@pytest.mark.parametrize(
    ("length", "correlation", "z"),
    [(50, 0.1, 1.0), (20, 0.8, 6.0), (50, 0.8, 1.0)],
    ids=["longer for the task", "long answers were right from the start", "few answers"],
)
def test_length_alone_or_its_correlation_alone_is_not(length: float, correlation: float, z: float) -> None:
    found = raised(
        completion_tokens_mean=noisy(20, length),
        length_reward_correlation=noisy(correlation, correlation),
        length_reward_z=noisy(z, z),
    )

    assert found == {}


@pytest.mark.parametrize(
    ("metric", "rule"), [("copied_prompt_share", "copied_prompt"), ("repeated_tokens_share", "repetition")]
)
def test_a_share_that_rises_is_an_alarm_and_one_that_was_high_is_not(metric: str, rule: str) -> None:
    assert list(raised(**{metric: noisy(0.05, 0.9)})) == [rule]
    assert raised(**{metric: noisy(0.8, 0.85)}) == {}
    assert raised(**{metric: noisy(0.1, 0.1, noise=0.1)}) == {}


def validations(*rewards: float, stderr: float = 0.03) -> dict[str, list[Any]]:
    """A validation every eight steps."""
    means: list[float | None] = [None] * STEPS
    means[7::8] = rewards
    return {
        "full_valid_mean_reward": means,
        "full_valid_stderr": [None if mean is None else stderr for mean in means],
    }


def test_validation_that_falls_while_training_rises_is_an_alarm() -> None:
    training = noisy(0.3, 0.95)

    found = raised(train_mean_reward=training, **validations(0.4, 0.6, 0.5, 0.35, 0.3))

    assert found["validation_falls"] == 32


@pytest.mark.parametrize(
    ("training", "rewards", "stderr"),
    [
        (noisy(0.3, 0.9), (0.4, 0.6, 0.55, 0.62, 0.6), 0.03),
        (noisy(0.3, 0.6), (0.4, 0.6, 0.5, 0.5, 0.5), 0.06),
    ],
    ids=["a plateau", "a fall within the noise"],
)
def test_validation_of_a_healthy_run_is_not(
    training: list[float], rewards: tuple[float, ...], stderr: float
) -> None:
    found = raised(train_mean_reward=training, **validations(*rewards, stderr=stderr))

    assert "validation_falls" not in found


def test_a_rule_that_fails_is_logged_and_the_others_are_applied(caplog: pytest.LogCaptureFixture) -> None:
    def fails(steps: Any, bound: float) -> None:
        raise ZeroDivisionError

    def holds(steps: Any, bound: float) -> tuple[str, dict[str, Any]]:
        return "It holds.", {}

    rules = {"broken": (fails, "entropy_share"), "sound": (holds, "entropy_share")}
    found = check([StepMetrics(step=1)], Thresholds(), rules=rules)

    assert [finding.rule for finding in found] == ["sound"]
    assert "the rule broken failed at step 1" in caplog.text


def test_of_a_thousand_runs_without_an_effect_few_have_an_alarm() -> None:
    """The level holds for all looks of a run together. Step means vary by a tenth, as in small batches."""
    dice = random.Random(7)
    alarms = 0
    for _ in range(1000):
        values = [dice.gauss(0.5, 0.1) for _ in range(STEPS)]
        ends = range(10, STEPS + 1)
        alarms += any(
            (found := change(values[:end], len(ends))) is not None and found.low > 0 for end in ends
        )

    assert alarms <= 50


def group(prompt: tuple[int, ...], *answers: tuple[tuple[int, ...], float]) -> Group:
    return Group(
        Prompt(1, prompt, {}),
        tuple(Rollout(ids, (-0.5,) * len(ids), "", "stop") for ids, _ in answers),
        tuple(Grade(score) for _, score in answers),
    )


def test_the_correlation_of_length_and_reward_is_within_the_groups() -> None:
    short, long = (1, 2), (1, 2, 3, 4)
    rewarded = group((9,), (short, 0.0), (long, 1.0))
    other = group((9,), (long * 3, 0.5), (short * 5, 0.5))

    data = answer_statistics.of_answers([rewarded, other])

    assert data["length_reward_correlation"] == pytest.approx(1.0)
    assert data["length_reward_z"] == pytest.approx(1.0)
    assert "length_reward_correlation" not in answer_statistics.of_answers([other])


def test_copies_of_the_prompt_and_repeated_tokens_are_measured() -> None:
    prompt = tuple(range(20))
    copied, own, loop = prompt[4:14], tuple(range(50, 62)), (7, 8) * 8

    data = answer_statistics.of_answers(
        [group(prompt, (copied, 1.0), (own, 0.0), (loop, 0.0), ((1, 2), 0.0))]
    )

    assert data["copied_prompt_share"] == pytest.approx(1 / 3)
    assert data["repeated_tokens_share"] == pytest.approx((0 + 0 + 11 / 13) / 3)


def test_every_rule_is_in_the_documentation_with_its_threshold() -> None:
    page = (Path(__file__).parents[2] / "docs/howto/signal.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| `(\w+`, [\d.]+) \|", page, flags=re.M))

    documented = {rule: threshold.replace("`", "") for rule, threshold in rows.items()}

    defaults = Thresholds().model_dump()
    assert documented == {rule: f"{name}, {defaults[name]:g}" for rule, (_, name) in monitors.RULES.items()}
    assert set(monitors.ALARMS) < monitors.RULES.keys()
