"""Count the pathologies that the alarms catch on runs that are made to have one, and the alarms of healthy runs.

Each run is the real loop of sampling, grading, update and validation on a tiny word model with random weights, on the
CPU, without a database. A pathology is a grader, a file or a setting that the model can game or is ruined by, and the
rules that should say so. `--tiny` makes one short run of each kind; tests run it. `--scale` multiplies the thresholds
of the smallest effects: runs at several scales are the points of an ROC curve.

Figures: `caught` of `pathologies`, `false_alarms` of `healthy` runs (runs with any alarm or warning), the mean
`steps_to_alarm`, and of each rule how often it was the first of the expected ones.
"""

import argparse
import asyncio
import copy
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.report import report
from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.registry import BaseModelEntry
from core.thresholds import Thresholds
from graders.types import Grade, Grader, Item, Sample
from tests.hyperparameters import in_groups
from tests.tiny import make_tiny_model
from worker.clock import Clock
from worker.history import History
from worker.model.policy import Base, Policy, load_base
from worker.recording import metrics
from worker.rollout.anchors import JudgeAnchors
from worker.rollout.experience import Rewards, RolloutExperience
from worker.rollout.prompts import PromptStream
from worker.rollout.shadow import Shadow
from worker.sampling.transformers import TransformersSampler
from worker.training.trainer import PeftTrainer
from worker.types import GraderPart, Prompt

ANSWERS = "red green blue cat dog bird north south".split()
FILLERS = "what colour animal is my your name now".split()
TOKENS = 10  # of the longest answer
EFFECTS = (
    "shadow_divergence",
    "shadow_unshared",
    "part_gain",
    "length_reward",
    "copied_prompt",
    "repetition",
    "judge_drift",
)


class Scored:
    """A grader that is a function of the words of the answer and of the row."""

    name, type = "scored", "python"

    def __init__(self, score: Callable[[list[str], Item], float | dict[str, float]]) -> None:
        self.score = score

    async def grade(self, sample: Sample, item: Item) -> Grade:
        found = self.score(sample.output_text.split(), item)
        if isinstance(found, dict):
            parts = {name: Grade(score) for name, score in found.items()}
            return Grade(fmean(found.values()), sub_grades=parts)
        return Grade(found)


class DriftingJudge:
    """A judge that becomes lenient after `after` grades."""

    name, type = "judge", "score_model"

    def __init__(self, inner: Grader, shift: float, after: int) -> None:
        self.inner, self.shift, self.after, self.seen = inner, shift, after, 0

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.seen += 1
        grade = await self.inner.grade(sample, item)
        return Grade((grade.score or 0.0) + (self.shift if self.seen > self.after else 0.0))


def exact(words: list[str], item: Item) -> float:
    return float(words[:1] == [item["answer"]])


def present(words: list[str], item: Item) -> float:
    return float(item["answer"] in words)


def words_of_prompt(words: list[str], item: Item) -> float:
    """The share of the prompt's words in the answer: a similarity to the wrong text."""
    known = {*item["messages"][0]["content"].split()}
    return sum(word in known for word in words) / TOKENS


def most_repeated(words: list[str], item: Item) -> float:
    return max(Counter(words).values(), default=0) / TOKENS


@dataclass(frozen=True)
class Case:
    """A run, and the rules of which one should fire; none for a healthy run."""

    name: str
    grader: Callable[[], Grader]
    expected: tuple[str, ...] = ()
    shadow: Callable[[], Grader] | None = None
    parts: tuple[str, ...] = ()  # of the grader
    judged: bool = False
    advanced: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 16  # to train on
    steps: int = 40


def scored(score: Callable[[list[str], Item], float | dict[str, float]]) -> Callable[[], Grader]:
    return lambda: Scored(score)


STRICT = scored(exact)
PATHOLOGIES = (
    Case(
        "keyword that pleases the judge",
        scored(lambda words, item: float("please" in words)),
        (
            "shadow_divergence",
            "shadow_unshared",
        ),
        STRICT,
    ),
    Case(
        "any of all labels counts",
        scored(lambda words, item: len({*words} & {*ANSWERS}) / len(ANSWERS)),
        ("shadow_divergence", "shadow_unshared", "length_reward"),
        STRICT,
    ),
    Case(
        "one word again and again",
        scored(most_repeated),
        ("repetition", "shadow_divergence", "shadow_unshared"),
        STRICT,
    ),
    Case(
        "the prompt is accepted",
        scored(words_of_prompt),
        ("shadow_divergence", "shadow_unshared", "copied_prompt", "repetition"),
        STRICT,
    ),
    Case(
        "one part of two is easy to please",
        scored(lambda words, item: {"polite": float("please" in words), "right": exact(words, item)}),
        ("one_sided_gain", "shadow_divergence", "shadow_unshared"),
        STRICT,
        parts=("polite", "right"),
    ),
    Case(
        "a part that never differs",
        scored(lambda words, item: {"right": present(words, item), "judge": 1.0}),
        ("inert_part",),
        parts=("right", "judge"),
    ),
    Case(
        "a judge that becomes lenient",
        lambda: DriftingJudge(Scored(present), 0.3, 1200),
        ("judge_drift",),
        judged=True,
    ),
    Case("a reward that is always 1", scored(lambda words, item: 1.0), ("no_signal",)),
    Case(
        "rewards that differ by rounding",
        scored(lambda words, item: 0.5 + 1e-9 * len(words)),
        ("alike_rewards", "no_signal"),
    ),
    Case(
        "an exploding rate",
        scored(present),
        ("collapse", "kl_jump", "no_signal"),
        advanced={"learning_rate": 1.0, "step_kl": 0.0},
    ),
    Case("two rows and many epochs", scored(present), ("overfitting", "validation_falls"), rows=2),
)
TINY = next(case for case in PATHOLOGIES if case.expected == ("inert_part",))
HEALTHY = (
    Case("the right word", scored(present)),
    Case("the right word, watched", scored(present), shadow=scored(present)),
    Case("a strict shadow", scored(present), shadow=STRICT),
    Case(
        "two parts that are learned",
        scored(lambda words, item: {"short": float(len(words) < 6), "right": present(words, item)}),
        parts=("short", "right"),
    ),
    Case("a judge that stays the same", scored(present), judged=True),
    Case("partial credit", scored(lambda words, item: (present(words, item) + exact(words, item)) / 2)),
)


def prompts_of(rows: int, seed: int) -> list[Prompt]:
    """Rows that name a word, which is the answer, among others."""
    dice = random.Random(seed)
    made = []
    for line in range(1, rows + 1):
        answer = ANSWERS[line % len(ANSWERS)]
        others = [dice.choice(FILLERS) for _ in range(3)]
        text = " ".join(["say", "the", "word", answer, *others])
        made.append(Prompt(line, (), {"messages": [{"role": "user", "content": text}], "answer": answer}))
    return made


def settings_of(case: Case, steps: int) -> Resolved:
    asked = {"group_size": 8, "max_completion_tokens": TOKENS, "learning_rate": 0.003, "step_kl": 0.3}
    epochs = max(1, steps * 8 // max(8, case.rows))
    hyperparameters = {"batch_size": min(8, case.rows), "n_epochs": 50, "eval_interval": 5}
    resolved = resolve(
        Hyperparameters.model_validate(
            hyperparameters | {"advanced": in_groups(asked | dict(case.advanced))}
        ),
        rows=case.rows,
        parameters=1000,
        context=128,
    )
    return resolved.model_copy(update={"total_steps": steps, "n_epochs": epochs})


def experience_of(case: Case, base: Base, seed: int, steps: int, thresholds: Thresholds) -> RolloutExperience:
    policy = Policy(copy.deepcopy(base), rank=8, alpha=16, seed=seed)
    settings, grader = settings_of(case, steps), case.grader()
    train, valid = (
        [Prompt(one.line, tuple(policy.render(one.item["messages"])), one.item) for one in rows]
        for rows in (prompts_of(case.rows, seed), prompts_of(32, seed + 1000))
    )
    parts = [GraderPart(name, name, "python", weight=1 / len(case.parts)) for name in case.parts] or [
        GraderPart(None, "scored", "python")
    ]
    made = RolloutExperience(
        settings=settings,
        seed=seed,
        graders=parts,
        train_prompts=PromptStream(train, batch_size=settings.batch_size, seed=seed),
        valid_prompts=valid,
        sampler=TransformersSampler(policy),
        rewards=Rewards(grader),
        trainer=PeftTrainer(policy, settings, token_budget=4096),
        thresholds=thresholds,
        shadow=None if case.shadow is None else Shadow(case.shadow()),
    )
    made.anchors = JudgeAnchors(grader, settings.validations) if case.judged else None
    return made


async def alarms(experience: RolloutExperience) -> tuple[dict[str, int], History]:
    """The rules that fire, each with its first step, and the steps."""
    history, found = History(), {}
    for step in range(experience.settings.total_steps + 1):
        clock = Clock()
        learned = await experience.learn(step, clock) if step else None
        validated = await experience.validate(step, clock) if experience.schedule.is_measured(step) else None
        data = experience.measure(step, clock, history, learned, validated)
        details = experience.details(data, history, learned, validated)
        silent = learned and metrics.no_signal(learned.all_P, learned.signals_P, history.steps)
        if silent and not silent.is_success:
            found.setdefault("no_signal", step)
        for finding in details.findings:
            found.setdefault(finding.rule, step)
        history.add(data, [finding.rule for finding in details.findings])
        history.keep_scores(step, details.valid_scores, details.shadow_scores)
    return found, history


def run(
    case: Case, base: Base, seed: int, thresholds: Thresholds, steps: int | None = None
) -> dict[str, int]:
    experience = experience_of(case, base, seed, steps or case.steps, thresholds)
    found, history = asyncio.run(alarms(experience))
    rewards = [step.train_mean_reward for step in history.steps if step.train_mean_reward is not None]
    print(f"{case.name}, seed {seed}: reward {rewards[0]:.2f} -> {rewards[-1]:.2f}, {found}", flush=True)
    return found


def first_of(case: Case, found: Mapping[str, int]) -> str | None:
    """The first of the expected rules that fired."""
    return min((rule for rule in case.expected if rule in found), key=found.__getitem__, default=None)


def figures(
    pathologies: Sequence[tuple[Case, Mapping[str, int]]], healthy: Sequence[Mapping[str, int]]
) -> dict[str, float]:
    first = [(first_of(case, found), found) for case, found in pathologies]
    caught = [(rule, found[rule]) for rule, found in first if rule is not None]
    counts = Counter(rule for rule, _ in caught)
    return {
        "pathologies": len(pathologies),
        "caught": len(caught),
        "healthy": len(healthy),
        "false_alarms": sum(bool(found) for found in healthy),
        "steps_to_alarm": fmean(step for _, step in caught) if caught else 0.0,
        **{f"caught_by_{rule}": count for rule, count in sorted(counts.items())},
    }


def scaled(scale: float) -> Thresholds:
    """The thresholds with the smallest effects of the alarms times `scale`, shares at most 1.

    Without that of truncation: a model with random weights seldom ends an answer.
    """
    defaults = Thresholds().model_dump() | {"truncated_share": None}
    return Thresholds(**defaults | {name: min(1.0, scale * defaults[name]) for name in EFFECTS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--tiny", action="store_true", help="two short runs, of one seed")
    parser.add_argument("--only", help="runs whose names contain this")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(Path(folder))
        base = load_base("tiny", BaseModelEntry(path=path, dtype="float32", context=128), path, "cpu")
    broken, sound = PATHOLOGIES, HEALTHY
    if args.tiny:
        broken, sound, args.seeds = (TINY,), HEALTHY[:1], [1]
    thresholds, steps = scaled(args.scale), 5 if args.tiny else None
    wanted = [case for case in (*broken, *sound) if args.only is None or args.only in case.name]
    runs = [(case, run(case, base, seed, thresholds, steps)) for case in wanted for seed in args.seeds]
    made = figures(
        [one for one in runs if one[0].expected], [found for case, found in runs if not case.expected]
    )
    report("pathologies", made)


if __name__ == "__main__":
    main()
