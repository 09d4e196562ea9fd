"""The shadow grader: it scores validations, never trains, and says whether a gain is the training grader's alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from core.database.tables import Job
from core.settings import Settings
from core.statistics import sequential_low
from core.step_metrics import StepMetrics
from core.thresholds import Thresholds
from graders.types import ErrorKind, Grade, Grader, Item, Sample
from tests.fakes import ExactGrader, Skill
from tests.present import present
from tests.worker.conftest import GRADER, Bench, claimed_job
from worker.attempt import Attempt
from worker.child import opened_shadow
from worker.recording import monitors, shadow
from worker.recording.exporters.threads import ExporterThreads
from worker.refusals import UserMistake
from worker.rollout.shadow import Shadow
from worker.run import RunOutcome
from worker.types import Group, Prompt, Rollout


class Opposite:
    """A grader that likes only what the training grader does not."""

    name, type = "opposite", "python"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        return Grade(float(sample.output_text != item["answer"]))


class Constant:
    """A grader that is not moved by any answer."""

    name, type = "constant", "python"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        return Grade(0.5)


class Broken:
    name, type = "broken", "python"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        raise RuntimeError("its server is away")


def trained(bench: Bench, grader: Grader | None, **settings: Any) -> list[dict[str, Any]]:
    """The steps of a job that learns its 24 validation rows."""
    run = bench.run(skill=Skill(0.2), n_epochs=6, **settings)
    run.experience.valid_prompts = [*run.experience.train_prompts.prompts] * 3
    run.experience.shadow = None if grader is None else Shadow(grader)
    asyncio.run(run.train())
    return bench.steps()


def rules(bench: Bench) -> set[str]:
    return {message.partition(":")[0] for message in bench.events("warn")}


def test_a_gain_that_the_shadow_grader_does_not_share_is_a_warning(bench: Bench) -> None:
    steps = trained(bench, Constant())

    assert "The shadow grader does not share the gain" in rules(bench)
    assert "Shadow divergence" not in rules(bench)
    assert steps[-1]["full_valid_shadow_mean_reward"] == 0.5
    assert steps[-1]["full_valid_shadow_difference"] == 0.0
    verdict = present(bench.job().verdict)
    assert (verdict["outcome"], verdict["shadow_difference"]) == ("improved", 0.0)
    assert any("By the shadow grader" in one and "does not confirm it" in one for one in bench.events())


def test_a_gain_where_the_shadow_grader_sees_a_loss_is_an_alarm(bench: Bench) -> None:
    trained(bench, Opposite())

    assert "Shadow divergence" in rules(bench)


def test_a_gain_that_it_shares_is_none(bench: Bench) -> None:
    steps = trained(bench, ExactGrader())

    assert not rules(bench) & {"Shadow divergence"}
    assert steps[-1]["full_valid_shadow_difference"] == pytest.approx(steps[-1]["full_valid_difference"])
    assert present(bench.job().verdict)["shadow_ci_low"] > 0


def curve(steps: Sequence[dict[str, Any]]) -> list[tuple[float | None, float | None]]:
    return [(step.get("train_mean_reward"), step.get("full_valid_mean_reward")) for step in steps]


def test_training_and_its_curve_are_the_same_without_it(bench: Bench, tmp_path: Path) -> None:
    without = trained(bench, None)
    assert not any(name.startswith("full_valid_shadow") for step in without for name in step)
    assert present(bench.job().verdict)["shadow_difference"] is None

    watched = trained(claimed_job(bench.database, tmp_path / "watched"), Opposite())

    assert curve(watched) == curve(without)
    assert curve(without)[-1] != curve(without)[1]


def test_a_shadow_grader_that_fails_warns_and_the_job_succeeds(bench: Bench) -> None:
    steps = trained(bench, Broken())

    assert bench.job().status == "succeeded"
    assert steps[0]["full_valid_shadow_unresponsive"] == 1.0
    [message] = [
        one for one in bench.events("warn") if one.startswith("The shadow grader could not grade 100%")
    ]
    assert message.endswith("No later validation can be compared with step 0 on these rows.")


def test_a_resumed_run_compares_with_the_shadow_scores_of_step_0(bench: Bench) -> None:
    first = bench.run(skill=Skill(0.2), n_epochs=6, stop_requested=lambda: True)
    first.experience.shadow = Shadow(ExactGrader())
    asyncio.run(first.train())
    bench.again()
    second = bench.run(skill=Skill(0.2), n_epochs=6)
    second.experience.shadow = Shadow(ExactGrader())

    asyncio.run(second.train())

    assert bench.steps()[-1]["full_valid_shadow_difference"] is not None


def test_a_run_opens_the_shadow_grader_of_its_job(bench: Bench) -> None:
    with bench.database.write() as session:
        job = session.get_one(Job, bench.job().seq)
        job.body = {**job.body, "shadow_grader": GRADER | {"name": "strict"}}
    seen: list[Any] = []

    class Ends:
        exporters = ExporterThreads()

        async def train(self) -> RunOutcome:
            return RunOutcome.DONE

    def assemble(attempt: Attempt, *_: Any) -> Any:
        seen.append(attempt.shadow_grader)
        return Ends()

    bench.run_job(Settings(data_dir=bench.tmp_path), assemble)

    [grader] = seen
    assert grader.name == "strict"


def test_a_shadow_grader_that_cannot_be_built_is_blamed_by_its_own_path(bench: Bench) -> None:
    with bench.database.write() as session:
        job = session.get_one(Job, bench.job().seq)
        job.body = {**job.body, "shadow_grader": GRADER | {"operation": "nope"}}

    async def opens() -> None:
        async with opened_shadow(bench.attempt(), Settings(data_dir=bench.tmp_path), lambda: None):
            raise AssertionError("it was built")

    bench.again()
    with pytest.raises(UserMistake) as caught:
        asyncio.run(opens())
    assert caught.value.param is not None
    assert caught.value.param.startswith("method.reinforcement.shadow_grader")


def groups(training: Sequence[float], shadows: Sequence[float | None]) -> list[Group]:
    answer = Rollout((1,), (-0.5,), "a", "stop")
    missing = Grade(None, "no score", ErrorKind.other_error)
    return [
        Group(
            Prompt(line, (1,), {}),
            (answer,),
            (Grade(score),),
            (missing if seen is None else Grade(seen),),
        )
        for line, (score, seen) in enumerate(zip(training, shadows, strict=True))
    ]


def measured(
    base: Sequence[float],
    base_shadow: Sequence[float],
    now: Sequence[float],
    now_shadow: Sequence[float | None],
) -> StepMetrics:
    """A validation at step 5, one of ten."""
    valid_P = groups(now, now_shadow)
    data = shadow.of_validation(valid_P, now, base, base_shadow, 10)
    gain = sum(now) / len(now) - sum(base) / len(base)
    return StepMetrics(step=5, full_valid_difference=gain, **data)


def alarms(*arguments: Any) -> list[str]:
    return [finding.rule for finding in monitors.check([measured(*arguments)], Thresholds())]


def test_half_of_the_gain_is_enough_for_a_stricter_shadow() -> None:
    zeros, ones = [0.0] * 16, [1.0] * 16

    assert alarms(zeros, zeros, ones, [0.5] * 16) == []
    assert alarms(zeros, zeros, ones, [0.0] * 16) == ["shadow_unshared"]


def test_a_loss_by_the_shadow_is_an_alarm() -> None:
    zeros, ones = [0.0] * 16, [1.0] * 16

    assert alarms(zeros, ones, ones, [0.5] * 16) == ["shadow_divergence", "shadow_unshared"]
    assert alarms(zeros, ones, ones, [0.96] * 16) == ["shadow_unshared"]


def test_a_few_rows_are_no_evidence() -> None:
    assert alarms([0.0] * 7, [1.0] * 7, [1.0] * 7, [0.0] * 7) == []
    assert "shadow_divergence" in alarms([0.0] * 8, [1.0] * 8, [1.0] * 8, [0.0] * 8)


def test_rows_that_one_of_the_graders_left_out_do_not_count() -> None:
    now = [1.0] * 9

    assert alarms([0.0] * 9, [1.0] * 9, now, [None, None, *[0.0] * 7]) == []


RUNS, ROWS, LOOKS = 40, 100, 5


@pytest.mark.parametrize(("right", "later"), [(0.8, 0.9), (0.3, 0.6)])
def test_a_format_that_is_learned_first_is_no_alarm(right: float, later: float) -> None:
    """The grader gives half for the format and half for the answer, of which the shadow grader reads the second."""
    fired = 0
    for seed in range(RUNS):
        dice, base, found = np.random.default_rng(seed), None, False
        for look in range(LOOKS + 1):
            exact = dice.random(ROWS) < right + (later - right) * look / LOOKS
            format_ok = dice.random(ROWS) < min(1.0, 0.1 + 4 * look / LOOKS)
            now = ((exact + format_ok * 1.0) / 2).tolist(), exact.astype(float).tolist()
            base = now if base is None else base
            found = found or (look > 0 and "shadow_divergence" in alarms(base[0], base[1], *now))
        fired += found

    assert fired <= binom.ppf(0.999, RUNS, 0.05)


def test_scores_of_a_wide_range_count_in_units_of_it() -> None:
    found = measured([0.0] * 16, [0.0] * 16, [100.0] * 8 + [0.0] * 8, [1.0] * 8 + [0.0] * 8)

    assert found.full_valid_shadow_shortfall == pytest.approx(-0.25)


def test_where_both_fall_other_rules_speak() -> None:
    assert alarms([0.9] * 16, [0.9] * 16, [0.5] * 16, [0.1] * 16) == []


def test_the_threshold_can_switch_it_off() -> None:
    step = measured([0.0] * 16, [1.0] * 16, [1.0] * 16, [0.0] * 16)

    assert monitors.check([step], Thresholds(shadow_divergence=None, shadow_unshared=None)) == []


def test_the_bound_pays_for_every_look() -> None:
    values = [0.1, 0.3, 0.2, 0.4, 0.0, 0.5, 0.2, 0.3, 0.1, 0.4, 0.2, 0.3]

    once, often = present(sequential_low(values, 1)), present(sequential_low(values, 100))

    # t quantiles of 11 degrees of freedom at 0.95 and 0.9995
    assert once == pytest.approx(0.25 - 1.795885 * 0.041742, abs=1e-5)
    assert often == pytest.approx(0.25 - 4.436979 * 0.041742, abs=1e-5)


def test_a_discarded_episode_is_not_graded() -> None:
    class Episode:
        stop = "discarded"

    discarded = replace(Rollout((1,), (-0.5,), "a", "stop"), episode=Episode())  # type: ignore[arg-type]
    group = Group(Prompt(1, (1,), {}), (discarded,), (Grade(1.0),))

    [graded] = asyncio.run(Shadow(Broken()).grade([group]))

    assert graded.shadow_G[0].reason == "the episode was discarded"
