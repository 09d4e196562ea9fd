"""`stopping.on_alarm`: what a job does at an alarm of gaming."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import select

from core.database.tables import Event
from graders.types import ErrorKind, Grade, Item, Sample
from tests.fakes import Skill
from tests.worker.conftest import Bench
from worker.recording.exploits import SHOWN, pause_of
from worker.rollout.shadow import Shadow
from worker.run import RunOutcome
from worker.types import Finding, Group, Prompt, Rollout


class Opposite:
    """A shadow grader that sees a loss where the training grader sees a gain."""

    name, type = "opposite", "python"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        return Grade(0.25 if sample.output_text == item["answer"] else 0.75)


def run(bench: Bench, on_alarm: str) -> Any:
    """A job whose gain its shadow grader does not share."""
    advanced = {"group_size": 4, "stopping": {"on_alarm": on_alarm}}
    made = bench.run(skill=Skill(0.2), n_epochs=6, advanced=advanced)
    made.experience.valid_prompts = [*made.experience.train_prompts.prompts] * 3
    made.experience.shadow = Shadow(Opposite())
    return made


def told(bench: Bench, start: str) -> list[Event]:
    with bench.database.read() as session:
        events = session.scalars(select(Event).order_by(Event.seq)).all()
        return [event for event in events if event.message.startswith(start)]


def test_by_default_the_job_goes_on(bench: Bench) -> None:
    asyncio.run(run(bench, "inform").train())

    assert told(bench, "Shadow divergence")
    assert bench.job().status == "succeeded"


def test_pause_pauses_once_with_the_answers_that_the_shadow_grader_disagrees_with(bench: Bench) -> None:
    assert asyncio.run(run(bench, "pause").train()) is RunOutcome.INTERRUPTED

    assert bench.job().status == "pausing"
    [paused] = told(bench, "Pausing fine-tuning job at an alarm (stopping.on_alarm). Shadow divergence")
    assert paused.data["rule"] == "shadow_divergence"  # which outlives the events of steps that are repeated
    [first, *_] = paused.data["answers"]
    assert (first["score"], first["shadow_score"]) == (1.0, 0.25)
    assert first["text"] in ("red", "green", "blue", "cat")
    assert bench.checkpoints()


def test_rollback_continues_once_at_half_of_the_rate(bench: Bench) -> None:
    first = run(bench, "rollback")
    rate = first.experience.settings.learning_rate

    assert asyncio.run(first.train()) is RunOutcome.ROLLED_BACK

    [event] = told(bench, "The job continues from ")
    assert event.data["alarm"] == "shadow_divergence"
    assert event.data["learning_rate"] == pytest.approx(rate / 2)
    assert event.data["continues_from_step"] < event.data["alarm_at_step"]
    assert "half of the one before. Shadow divergence" in event.message

    bench.again()
    assert asyncio.run(run(bench, "rollback").train()) is RunOutcome.DONE


def test_the_answers_of_a_pause_are_clusters_with_their_numbers() -> None:
    texts = ["great great great answer friend"] * 4 + [f"words{n} of{n} the{n} kind{n}" for n in range(9)]
    group = Group(
        Prompt(7, (1,), {}),
        tuple(Rollout((1,), (-0.5,), text, "stop") for text in texts),
        tuple(Grade(1.0 - place / 100) for place in range(len(texts))),
    )

    pause = pause_of(Finding("repetition", "Repetition.", {}), [group], [])

    answers = pause.data["answers"]
    assert [one["alike"] for one in answers] == [4, 1, 1, 1, 1]
    assert len(answers) == SHOWN
    assert (answers[0]["line"], answers[0]["score"]) == (7, 1.0)
    assert "shadow_score" not in answers[0]


def test_answers_that_the_shadow_grader_could_not_grade_are_not_shown() -> None:
    answers = tuple(Rollout((1,), (-0.5,), text, "stop") for text in ("ungraded", "gamed"))
    shadows = (Grade(None, "its server is away", ErrorKind.other_error), Grade(0.5))
    group = Group(Prompt(7, (1,), {}), answers, (Grade(1.0), Grade(0.9)), shadows)

    pause = pause_of(Finding("shadow_divergence", "It diverges.", {}), [], [group])

    assert [one["text"] for one in pause.data["answers"]] == ["gamed"]
