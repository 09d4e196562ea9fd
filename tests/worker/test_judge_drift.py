"""A judge that changes during a run: the same answers are graded again, and other scores are an alarm."""

import asyncio
from typing import Any

import pytest

from graders.calls import ServerAway
from graders.types import Grade, Item, Sample
from tests.fakes import Skill
from tests.worker.conftest import Bench
from worker.rollout.anchors import ANCHORS, JudgeAnchors


class Judge:
    """Scores right answers 0.6, and everything `shift` higher after so many grades."""

    name, type = "judge", "score_model"

    def __init__(self, shift: float, after: int = 0) -> None:
        self.shift, self.after, self.graded = shift, after, 0

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.graded += 1
        right = 0.6 * (sample.output_text == item["answer"])
        return Grade(right + (self.shift if self.graded > self.after else 0.0))


def trained(bench: Bench, judge: Judge) -> list[dict[str, Any]]:
    run = bench.run(judge, skill=Skill(0.4), n_epochs=4)
    run.experience.valid_prompts = [*run.experience.train_prompts.prompts] * 3
    run.experience.anchors = JudgeAnchors(judge, looks=8)
    asyncio.run(run.train())
    return bench.steps()


def drifts(bench: Bench) -> list[str]:
    return [message for message in bench.events("warn") if message.startswith("Judge drift")]


def test_a_judge_that_becomes_lenient_is_an_alarm(bench: Bench) -> None:
    steps = trained(bench, Judge(0.3, after=150))

    assert steps[-1]["judge_drift"] == pytest.approx(0.3)
    [message] = drifts(bench)
    assert "have changed by +0.30 (mean)" in message


def test_a_judge_that_stays_the_same_is_none(bench: Bench) -> None:
    steps = trained(bench, Judge(0.0))

    assert "judge_drift" not in steps[0]
    assert steps[-1]["judge_drift"] == 0.0
    assert drifts(bench) == []


def test_each_validation_asks_for_a_bounded_number_of_grades_more(bench: Bench) -> None:
    judge = Judge(0.0)
    run = bench.run(judge)
    groups = asyncio.run(_graded(run, 40))
    before = judge.graded

    anchors = JudgeAnchors(judge, looks=4)
    asyncio.run(anchors.drift(groups))
    asyncio.run(anchors.drift(groups))

    assert judge.graded - before == ANCHORS


def test_a_judge_that_is_away_ends_no_run(bench: Bench) -> None:
    class Away(Judge):
        async def grade(self, sample: Sample, item: Item) -> Grade:
            raise ServerAway("away")

    anchors = JudgeAnchors(Away(0.0), looks=4)
    groups = asyncio.run(_graded(bench.run(Judge(0.0)), 10))
    asyncio.run(anchors.drift(groups))

    assert asyncio.run(anchors.drift(groups)) == {}


async def _graded(run: Any, rows: int) -> Any:
    run.experience.valid_prompts = ([*run.experience.train_prompts.prompts] * 5)[:rows]
    return await run.experience.validate(0, run.clock())
