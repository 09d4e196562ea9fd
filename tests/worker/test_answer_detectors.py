"""The warnings about answers that become the same or mix languages: their metrics, and 1,000 healthy runs per shape.

A rule may fire in at most 5 % of the healthy runs (docs/howto/signal.md).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from scipy.stats import binom

from core.jobs.alarm_sizes import ALARMS
from core.step_metrics import StepMetrics
from core.thresholds import Thresholds
from graders.tools.episode import Episode
from graders.types import Grade
from worker.history import RECENT
from worker.recording import answer_statistics, monitors
from worker.recording.answer_statistics import MIN_PROMPTS
from worker.types import Group, Prompt, Rollout

RUNS, STEPS, GROUP = 1000, 40, 4
FEW = int(binom.ppf(0.999, RUNS, 0.05))


def group(line: int, texts: Sequence[str], question: str = "q") -> Group:
    rollouts = tuple(Rollout((1,), (-0.5,), text, "stop") for text in texts)
    item = {"messages": [{"role": "user", "content": question}]}
    return Group(Prompt(line, (line,), item), rollouts, (Grade(1.0),) * len(texts))


def fired(rule: str, metric: str, values_RS: np.ndarray) -> int:
    """In how many runs the rule holds at any step, of the metric's values by run and step."""
    rules, thresholds = monitors.only(rule), Thresholds()
    bound = getattr(thresholds, rules[rule][1])
    # The rule needs a rise of the means by more than the threshold: other steps need no check.
    means_RS = sliding_window_view(values_RS, RECENT, axis=1).mean(axis=2)
    rises_RS = (means_RS - means_RS[:, :1] > bound)[:, RECENT:]
    count = 0
    for values, rises in zip(values_RS.tolist(), rises_RS, strict=True):
        ends = [2 * RECENT + late for late in np.flatnonzero(rises)]
        steps = [
            StepMetrics.model_construct(step=number, total_steps=STEPS, **{metric: value})
            for number, value in enumerate(values[: max(ends, default=0)], start=1)
        ]
        count += any(monitors.check(steps[:end], thresholds, rules=rules) for end in ends)
    return count


def same_shares(answers_RSPG: np.ndarray) -> np.ndarray:
    """The metric of each run and step, from the numbers of answers."""
    *_, prompts, members = answers_RSPG.shape
    same = np.zeros(answers_RSPG.shape[:2])
    for answer in np.unique(answers_RSPG):
        counts = (answers_RSPG == answer).sum(axis=3)
        everywhere = counts.sum(axis=2)
        same += everywhere * (everywhere - 1) / 2 - (counts * (counts - 1) / 2).sum(axis=2)
    number = prompts * members
    shares: np.ndarray = same / (number * (number - 1) / 2 - prompts * members * (members - 1) / 2)
    return shares


def learned(dice: np.random.Generator, prompts: int, odds: Sequence[float], start: float) -> np.ndarray:
    """Runs that learn a task of few answers: those of the right class become more from `start` to 97 %.

    A wrong answer is another class. Without a format (`start` below 0) the first ones are all different.
    """
    shape = (RUNS, STEPS, prompts, GROUP)
    right = dice.choice(len(odds), size=shape[:3], p=odds)[..., None]
    other = dice.integers(0, len(odds), size=shape)
    skill = np.linspace(max(start, 0.0), 0.97, STEPS)[None, :, None, None]
    answers = np.where(dice.random(shape) < skill, right, other)
    if start < 0:
        free = dice.random(shape) < np.clip(1 - np.arange(STEPS) / 8, 0, 1)[None, :, None, None]
        answers = np.where(free, len(odds) + dice.integers(0, 20, size=shape), answers)
    return answers


@pytest.mark.parametrize(
    ("prompts", "odds", "start"),
    [
        (MIN_PROMPTS, [0.5, 0.5], 0.5),
        (MIN_PROMPTS, [0.8, 0.2], 0.5),
        (MIN_PROMPTS, [0.8, 0.2], -1.0),
        (32, [0.8, 0.2], -1.0),
        (MIN_PROMPTS, [0.25] * 4, -1.0),
        (MIN_PROMPTS, [0.05] * 20, 0.1),
    ],
    ids=[
        "two labels",
        "a skewed label",
        "a skewed label after free text",
        "a skewed label of many prompts",
        "four labels",
        "many answers",
    ],
)
def test_answers_of_a_run_that_learns_its_task_are_seldom_a_template(
    prompts: int, odds: Sequence[float], start: float
) -> None:
    shares = same_shares(learned(np.random.default_rng(7), prompts, odds, start))

    assert fired("template_collapse", "same_answers_share", shares) <= FEW


@pytest.mark.parametrize("answers", [8, 64, 512])
@pytest.mark.parametrize(
    ("first", "last"),
    [(0.0, 0.0), (0.02, 0.02), (0.5, 0.5), (1.0, 1.0), (0.3, 0.05), (0.0, 0.2)],
    ids=["none", "few", "half", "all", "fewer", "some more"],
)
def test_a_run_whose_languages_stay_seldom_mixes_them(answers: int, first: float, last: float) -> None:
    dice = np.random.default_rng(7)
    shares = dice.binomial(answers, np.linspace(first, last, STEPS), size=(RUNS, STEPS)) / answers

    assert fired("language_mix", "foreign_script_share", shares) <= FEW


@pytest.mark.parametrize(
    ("rule", "metric"),
    [("template_collapse", "same_answers_share"), ("language_mix", "foreign_script_share")],
)
def test_a_run_that_becomes_so_is_a_warning_and_no_alarm(rule: str, metric: str) -> None:
    shares = np.clip(np.linspace(-0.2, 1.6, STEPS), 0.02, 0.98)[None]

    assert fired(rule, metric, shares) == 1
    assert rule not in ALARMS


def test_the_simulated_share_of_same_answers_is_that_of_a_step() -> None:
    answers = np.random.default_rng(3).integers(0, 3, size=(1, 1, 9, GROUP))
    step = [group(line, [f"answer {one}" for one in row]) for line, row in enumerate(answers[0, 0].tolist())]

    expected = same_shares(answers)[0, 0]
    assert answer_statistics.same_answers_share(step) == pytest.approx(expected)


def test_answers_to_one_prompt_or_of_few_prompts_are_not_compared() -> None:
    alone = [group(1, ["yes"] * GROUP) for _ in range(20)]
    few = [group(line, ["yes"] * GROUP) for line in range(MIN_PROMPTS - 1)]
    enough = [group(line, [" Yes", "yes "]) for line in range(MIN_PROMPTS)]

    assert answer_statistics.same_answers_share(alone) is None
    assert answer_statistics.same_answers_share(few) is None
    assert answer_statistics.same_answers_share([*enough, group(99, ["", ""])]) == 1.0


@pytest.mark.parametrize(
    ("question", "answer", "is_mixed"),
    [
        ("What is 2 + 2?", "It is four.", False),
        ("What is 2 + 2?", "Это четыре, так как два плюс два.", True),
        ("What is 2 + 2?", "First 首先我们计算二加二 then four.", True),
        ("Сколько будет 2 + 2?", "Четыре.", False),
        ("请计算", "答案是四。Use python: print(2 + 2)", False),
        ("What is the area?", "θ + δ = λ, so π r² with Δx", False),
        ("Translate 'four' to Russian: четыре is expected.", "четыре", False),
        ("What is sugar?", "It is C₆H₁₂O₆", False),
        ("How many?", "6.02 * 10²³ per mol", False),
        ("How?", "①②③ done it ❶❷❸", False),
        ("How?", "\U0001d41b\U0001d428\U0001d425\U0001d41d answer", False),
        ("コーヒーは何々ですか", "コーーヒー", False),
        ("什么", "コーヒー 々々", False),
        ("What is a book?", "It is किताब", True),
    ],
)
def test_an_answer_with_words_in_a_script_of_another_language_is_mixed(
    question: str, answer: str, is_mixed: bool
) -> None:
    assert answer_statistics.mixed_scripts([group(1, [answer], question)]) == [is_mixed]


def test_a_thought_belongs_to_the_answer() -> None:
    thought = Rollout((1,), (-0.5,), "four", "stop", reasoning="首先我们计算二加二")

    assert mixed(thought) == [True]


def test_an_answer_may_quote_the_result_of_a_tool() -> None:
    results = ({"role": "tool", "tool_call_id": "c", "content": "Это четыре"},)
    quoting = Rollout(
        (1,), (-0.5,), "It says: четыре", "stop", episode=Episode(results, (), "final", "trace")
    )

    assert mixed(quoting) == [False]
    assert mixed(replace(quoting, episode=None)) == [True]


def mixed(answer: Rollout) -> list[bool]:
    asked = group(1, ["a"])
    return answer_statistics.mixed_scripts([replace(asked, rollouts_G=(answer,))])


def test_an_answer_without_words_is_neither() -> None:
    assert answer_statistics.mixed_scripts([group(1, ["4", "", "x = 4"])]) == []
