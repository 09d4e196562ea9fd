"""A judge that changes during a run: the same answers are graded again, and other scores are an alarm."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest

from core.jobs.alarm_sizes import ANCHORS
from graders.build import build
from graders.calls import ServerAway
from graders.judge.judges import HttpJudges, JudgeModel
from graders.spec import parse_grader
from graders.tools.episode import Episode
from graders.types import Grade, Item, Sample
from tests.fakes import Skill
from tests.worker.conftest import Bench
from worker.prepare.rollouts import judged_range
from worker.rollout.anchors import JudgeAnchors
from worker.types import Group, Prompt, Rollout

JUDGE = {
    "type": "score_model",
    "name": "judge",
    "model": "gpt",
    "input": [{"role": "user", "content": "{{sample.output_text}}"}],
}
EXACT = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "red",
}


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


def test_a_reward_that_an_agent_gave_is_no_score_of_the_judge() -> None:
    episode = Episode((), (), "final", "trace", reward=1.0)
    answer = replace(Rollout((1,), (-0.5,), "red", "stop"), episode=episode)
    by_agent = Group(Prompt(1, (1,), {"answer": "red"}), (answer,), (Grade(1.0),))
    graded = replace(answer, episode=replace(episode, reward=None))
    by_judge = Group(Prompt(2, (1,), {"answer": "red"}), (graded,), (Grade(0.6),))
    judge = Judge(0.0)
    anchors = JudgeAnchors(judge, looks=4)
    asyncio.run(anchors.drift([by_agent, by_judge]))

    assert asyncio.run(anchors.drift([by_agent, by_judge]))["judge_drift"] == 0.0
    assert judge.graded == 1


def test_a_judge_that_is_away_ends_no_run(bench: Bench) -> None:
    class Away(Judge):
        async def grade(self, sample: Sample, item: Item) -> Grade:
            raise ServerAway("away")

    anchors = JudgeAnchors(Away(0.0), looks=4)
    groups = asyncio.run(_graded(bench.run(Judge(0.0)), 10))
    asyncio.run(anchors.drift(groups))

    assert asyncio.run(anchors.drift(groups)) == {}


def test_a_judge_that_is_served_over_http_is_asked_again() -> None:
    """Its replies are remembered for equal answers of a group, and an anchor is an equal request."""
    scores = iter([0.2, 0.9])

    async def sent(body: bytes) -> AsyncIterator[bytes]:
        yield body

    def reply(request: httpx.Request) -> httpx.Response:
        message = {"content": json.dumps({"result": next(scores)})}
        choice = {"message": message, "finish_reason": "stop"}
        return httpx.Response(200, content=sent(json.dumps({"choices": [choice]}).encode()))

    async def drift() -> Mapping[str, float | None]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            judges = HttpJudges({"gpt": JudgeModel("http://judge/v1", explains=False)}, client=client)
            anchors = JudgeAnchors(build(parse_grader(JUDGE), judges), looks=4)
            grade = await anchors.grader.grade(Sample("red"), {})
            answer = Rollout((1,), (-0.5,), "red", "stop")
            groups_P = [Group(Prompt(1, (1,), {}), (answer,), (grade,))]
            await anchors.drift(groups_P)
            return await anchors.drift(groups_P)

    assert asyncio.run(drift())["judge_drift"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (JUDGE, 1.0),
        (JUDGE | {"range": [0, 10]}, 10.0),
        (
            {
                "type": "multi",
                "name": "both",
                "graders": {"judge": JUDGE | {"range": [0, 10]}, "same": EXACT},
                "calculate_output": "0.5 * judge + same",
            },
            5.0,
        ),
    ],
    ids=["one judge", "a wide range", "a part of a sum"],
)
def test_a_drift_is_in_units_of_what_the_judges_can_move(spec: dict[str, Any], expected: float) -> None:
    assert judged_range(parse_grader(spec)) == expected


def test_a_drift_is_divided_by_the_unit(bench: Bench) -> None:
    judge = Judge(0.3, after=40)
    run = bench.run(judge)
    groups = asyncio.run(_graded(run, 40))
    anchors = JudgeAnchors(judge, looks=4, unit=10.0)
    asyncio.run(anchors.drift(groups))

    assert asyncio.run(anchors.drift(groups))["judge_drift"] == pytest.approx(0.03)


async def _graded(run: Any, rows: int) -> Any:
    run.experience.valid_prompts = ([*run.experience.train_prompts.prompts] * 5)[:rows]
    return await run.experience.validate(0, run.clock())
