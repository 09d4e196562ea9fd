"""Alarms of gaming: for each a run that games its grader, and healthy ones that look alike."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from core.jobs.alarm_sizes import ALARMS
from core.step_metrics import StepMetrics
from core.thresholds import Thresholds
from graders.types import Grade
from worker.history import History
from worker.recording import answer_statistics, monitors
from worker.recording.gaming import change
from worker.recording.metrics import below_best
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


def parts(weights: dict[str, float] | None = None, **scores: list[float]) -> list[dict[str, Any]]:
    """The section of scores of each step, from the mean of each part; weights are 1 unless given."""
    return [
        {
            "graders": [
                {
                    "name": name,
                    "type": "python",
                    "train_reward_mean": values[number],
                    "train_reward_std": 0.4,
                    "weight": 1.0 if weights is None else weights.get(name),
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


@pytest.mark.parametrize(
    ("style", "right"),
    [
        (noisy(0.2, 0.9), noisy(0.2, 0.8, seed=1)),
        (noisy(0.3, 0.3), noisy(0.3, 0.3, seed=1)),
        (noisy(0.5, 0.55, noise=0.2), noisy(0.5, 0.4, seed=1, noise=0.2)),
        ([0.2] * 5 + [1.0] * 35, [0.2] * 15 + noisy(0.2, 0.9, seed=1)[:25]),
        (noisy(0.2, 0.9), noisy(0.2, 0.2, seed=1)),
    ],
    ids=["both learn", "nothing changes", "noise", "the format is learned first", "one part is not learned"],
)
def test_parts_of_a_healthy_run_are_not(style: list[float], right: list[float]) -> None:
    assert raised(scores=parts(style=style, right=right)) == {}


def test_longer_answers_that_score_higher_for_it_are_a_warning() -> None:
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
def test_a_share_that_rises_is_a_warning_and_one_that_was_high_is_not(metric: str, rule: str) -> None:
    assert list(raised(**{metric: noisy(0.05, 0.9)})) == [rule]
    assert raised(**{metric: noisy(0.8, 0.85)}) == {}
    assert raised(**{metric: noisy(0.1, 0.1, noise=0.1)}) == {}


def test_a_part_of_negative_weight_gains_where_it_falls() -> None:
    falls, rises = noisy(0.6, 0.1), noisy(0.3, 0.7, seed=1)
    weights = {"right": 1.0, "too_long": -0.5}

    assert raised(scores=parts(weights, right=rises, too_long=falls)) == {}
    found = raised(scores=parts(weights, right=rises, too_long=noisy(0.1, 0.6)))
    assert list(found) == ["one_sided_gain"]


def test_parts_of_a_formula_that_is_no_weighted_sum_are_not_compared() -> None:
    assert raised(scores=parts({}, style=noisy(0.2, 0.9), right=noisy(0.5, 0.1, seed=1))) == {}


def test_parts_with_one_name_are_both_compared() -> None:
    scores = parts(style=noisy(0.2, 0.9), right=noisy(0.5, 0.1, seed=1))
    for step in scores:
        step["graders"] = [row | {"name": "judge"} for row in step["graders"]]

    assert list(raised(scores=scores)) == ["one_sided_gain"]


RUNS = 200
FEW = int(binom.ppf(0.999, RUNS, 0.05))  # alarms of as many runs, if each has one with a probability of 5 %


def fired(rule: str, make: Callable[[np.random.Generator], list[StepMetrics]]) -> int:
    """In how many simulated runs the rule holds at any step."""
    rules = {rule: monitors.RULES[rule]}
    found = 0
    for seed in range(RUNS):
        steps = make(np.random.default_rng(seed))
        found += any(check(steps[:end], Thresholds(), rules=rules) for end in range(1, len(steps) + 1))
    return found


@pytest.mark.parametrize(
    "shares",
    [{"format": (0.97, 0.975), "right": (0.3, 0.6)}, {"right": (0.93, 0.94), "style": (0.2, 0.9)}],
    ids=["the format is full from the start", "most answers were right"],
)
def test_a_part_that_is_full_from_the_start_is_no_one_sided_gain(
    shares: dict[str, tuple[float, float]],
) -> None:
    def run(dice: np.random.Generator) -> list[StepMetrics]:
        scores = parts(
            **{
                name: (dice.binomial(64, np.linspace(start, end, STEPS)) / 64).tolist()
                for name, (start, end) in shares.items()
            }
        )
        return [
            StepMetrics.model_validate({"step": number, "total_steps": STEPS, "scores": section})
            for number, section in enumerate(scores, start=1)
        ]

    assert fired("one_sided_gain", run) <= FEW


def validated(rewards: Sequence[Sequence[float]], training: Sequence[float]) -> list[StepMetrics]:
    """Step 0 and a validation every fourth step, with these scores of the rows."""
    history = History()
    looks = len(rewards) - 1
    for step in range(4 * looks + 1):
        scores = rewards[step // 4] if step % 4 == 0 else None
        data: dict[str, Any] = {"step": step, "total_steps": 4 * looks}
        if step:
            data["train_mean_reward"] = training[step - 1]
        if scores is not None:
            data |= {"full_valid_mean_reward": fmean(scores)} | below_best(history.best_scores, scores, looks)
        history.add(StepMetrics(**data))
        history.keep_scores(step, scores, None)
    return history.steps


def falling(steps: list[StepMetrics]) -> list[int]:
    rules = {"validation_falls": monitors.RULES["validation_falls"]}
    return [step.step for end, step in enumerate(steps, 1) if check(steps[:end], Thresholds(), rules=rules)]


def test_validation_that_falls_while_training_rises_is_an_alarm() -> None:
    rewards = [[float(row < right) for row in range(40)] for right in (16, 30, 28, 10, 8)]

    assert falling(validated(rewards, noisy(0.3, 0.95))) == [12, 16]


def test_a_plateau_of_validation_is_none() -> None:
    rewards = [[float(row < right) for row in range(40)] for right in (16, 30, 28, 29, 30)]

    assert falling(validated(rewards, noisy(0.3, 0.95))) == []


def test_validation_that_falls_with_training_is_none() -> None:
    rewards = [[float(row < right) for row in range(40)] for right in (16, 30, 28, 10, 8)]

    assert falling(validated(rewards, noisy(0.9, 0.3))) == []


@pytest.mark.parametrize("rows", [2, 3, 8, 12, 24])
def test_validation_without_an_effect_seldom_falls(rows: int) -> None:
    def run(dice: np.random.Generator) -> list[StepMetrics]:
        rewards = (dice.random((11, rows)) < 0.7).astype(float).tolist()
        return validated(rewards, noisy(0.3, 0.9))

    assert fired("validation_falls", run) <= FEW


@pytest.mark.parametrize(
    "metrics",
    [
        {"copied_prompt_share": noisy(0.05, 0.9)},
        {"repeated_tokens_share": noisy(0.05, 0.9)},
        {
            "completion_tokens_mean": noisy(20, 55),
            "length_reward_correlation": noisy(0.7, 0.8),
            "length_reward_z": noisy(5, 6),
        },
    ],
    ids=["copied prompts", "repetition", "length"],
)
def test_what_healthy_runs_do_as_well_is_no_alarm_and_no_warning_if_the_shadow_confirms_it(
    metrics: dict[str, list[float]],
) -> None:
    found = raised(**metrics)

    assert found
    assert not found.keys() & ALARMS.keys()
    assert raised(**metrics, full_valid_shadow_difference_low=[0.1] * STEPS) == {}


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


def test_an_answer_that_was_cut_off_is_not_in_the_correlation() -> None:
    answers = (((1,) * 4, 1.0), ((1, 2), 0.0), ((1,) * 9, 0.0))
    made = group((9,), *answers)
    cut = replace(
        made, rollouts_G=(*made.rollouts_G[:2], replace(made.rollouts_G[2], finish_reason="length"))
    )

    data = answer_statistics.of_answers([cut])

    assert data["length_reward_correlation"] == pytest.approx(1.0)


def test_a_copy_that_is_the_reference_of_the_row_does_not_count() -> None:
    prompt = tuple(range(20))
    made = group(prompt, (prompt[2:14], 1.0))
    [answer] = made.rollouts_G
    named = replace(
        made,
        prompt=replace(made.prompt, item={"answer": "the span"}),
        rollouts_G=(replace(answer, text=" the span"),),
    )

    assert answer_statistics.of_answers([made])["copied_prompt_share"] == 1.0
    assert "copied_prompt_share" not in answer_statistics.of_answers([named])


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
    assert ALARMS.keys() < monitors.RULES.keys()
