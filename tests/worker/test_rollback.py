"""A job whose model has collapsed continues from its last healthy checkpoint, once, at a third of the rate."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from core.database.tables import ModelAlias, TunedModel
from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.step_metrics import StepMetrics
from core.thresholds import Thresholds
from tests.fakes import Skill, SkillTrainer
from tests.present import present
from tests.worker.conftest import Bench
from worker.history import History
from worker.recording.monitors import has_lost_signal
from worker.recording.rollback import ALARM_RULE, RULE, rollback
from worker.run import RunOutcome
from worker.types import Rollback, UpdateMetrics

COLLAPSED = json.loads((Path(__file__).parent / "recorded" / "demo-seed-5.json").read_text())


def settings(**fields: Any) -> Resolved:
    asked = Hyperparameters.model_validate({"n_epochs": 4, "batch_size": 8} | fields)
    return resolve(asked, rows=48, parameters=135_000_000, context=2048)


def decided(
    recorded: list[dict[str, Any]], step: int, *, saved: tuple[int, ...] = (), **history: Any
) -> Rollback | None:
    """The decision after this step of a recorded run of the demo."""
    steps = [StepMetrics.load(one) for one in recorded[: step + 1]]
    return rollback(History.of(steps, **history), lambda: saved, settings(), Thresholds())


def collapse() -> int:
    """The first step of the recorded run in which it is certain."""
    return next(step for step in range(1, 24) if decided(COLLAPSED, step))


def test_the_recorded_run_that_collapsed_continues_from_the_start_at_a_third_of_the_rate() -> None:
    step = collapse()

    found = decided(COLLAPSED, step)

    assert found is not None
    assert step <= 8
    assert found.step == 0
    assert found.learning_rates["learning_rate"] == pytest.approx(1e-4)
    assert found.data["collapsed_at_step"] == step
    assert found.data["sampling_entropy"] < 0.01 < found.data["first_sampling_entropy"]
    assert found.evidence.startswith("Collapse: ")


@pytest.mark.parametrize(("batch_size", "steps"), [(1, [3, 4, 8]), (2, [3, 4, 8]), (4, [2])])
def test_a_few_prompts_are_no_certain_collapse(batch_size: int, steps: list[int]) -> None:
    """An easy prompt may come before hard ones."""
    easy = {"step": 1, "train_mean_reward": 0.5, "groups_mixed_share": 1.0, "sampling_entropy": 4.7}
    hard = {"train_mean_reward": 0.0, "groups_mixed_share": 0.0, "sampling_entropy": 4.6}
    seen = [StepMetrics.load(one) for one in [easy, *(hard | {"step": step} for step in range(2, 9))]]

    for step in steps:
        history = History.of(seen[:step])
        assert rollback(history, tuple, settings(batch_size=batch_size), Thresholds()) is None
        assert rollback(history, tuple, settings(batch_size=8), Thresholds()) is not None


def test_a_hard_prompt_after_a_checkpoint_is_no_damage_and_a_collapse_is() -> None:
    rewards = [0.5, 0.5, 0.0, 0.6, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    steps = [
        StepMetrics.load({"step": step, "train_mean_reward": reward, "groups_mixed_share": float(reward > 0)})
        for step, reward in enumerate(rewards, start=1)
    ]

    assert [step for step in range(1, 10) if has_lost_signal(steps, step)] == [6, 7, 8, 9]


def test_it_continues_from_the_newest_checkpoint_without_evidence_of_damage() -> None:
    step = collapse()

    found = decided(COLLAPSED, step, saved=(1, step - 1))

    assert found is not None
    assert found.step == 1


def test_of_ten_recorded_runs_only_the_one_that_collapsed_is_rolled_back() -> None:
    folder = Path(__file__).parent / "recorded"
    runs = {path.stem: json.loads(path.read_text()) for path in folder.glob("demo-seed-*.json")}

    rolled_back = [name for name, run in runs.items() if any(decided(run, step) for step in range(1, 24))]

    assert (len(runs), rolled_back) == (10, ["demo-seed-5"])


def silent(rewards: Sequence[float], **newest: float) -> list[dict[str, Any]]:
    """A run that has become one answer to each prompt in its last three steps, with a validation of 0.4 at step 0."""
    steps: list[dict[str, Any]] = [{"step": 0, "full_valid_mean_reward": 0.4}]
    for number, reward in enumerate(rewards, start=1):
        steps.append(
            {"step": number, "train_mean_reward": reward, "sampling_entropy": 2.0, "groups_mixed_share": 1.0}
        )
    for step in steps[-3:]:
        step |= {"sampling_entropy": 0.1, "groups_mixed_share": 0.0}
    steps[-1] |= newest
    return steps


@pytest.mark.parametrize(
    "rewards",
    [
        (0.6, 0.7, 0.8, 0.85, 0.85, 0.85),  # the best score of the grader is 0.85
        (0.4, 0.45, 0.5, 0.5, 0.5),
        (0.05, 0.2, 0.4, 0.4, 0.4),
        (3.0, 3.5, 4.0, 4.0, 4.0),
    ],
)
def test_a_policy_that_has_learned_what_its_grader_scores_is_not_rolled_back(
    rewards: Sequence[float],
) -> None:
    assert decided(silent(rewards), len(rewards)) is None


def test_validation_decides_whether_the_model_is_lost() -> None:
    rose, fell = (0.4, 0.5, 0.5, 0.5), (0.4, 0.4, 0.3, 0.3)

    assert decided(silent(rose, full_valid_mean_reward=0.4), 4) is not None
    assert decided(silent(fell, full_valid_mean_reward=0.5), 4) is None
    assert decided(silent(fell), 4) is not None


def test_a_checkpoint_that_validation_has_shown_to_be_better_is_kept() -> None:
    run = silent((0.4, 0.5, 0.4, 0.3, 0.3, 0.3))
    run[3]["kl"] = 50.0  # of the answers by the model of step 2
    better = [one | ({"full_valid_difference_low": 0.1} if one["step"] == 2 else {}) for one in run]

    assert present(decided(run, 6, saved=(1, 2))).step == 1
    assert present(decided(better, 6, saved=(1, 2))).step == 2


def test_the_rate_of_the_values_is_lowered_too() -> None:
    steps = History.of([StepMetrics.load(one) for one in COLLAPSED[: collapse() + 1]])
    ppo = settings(advanced={"loss": {"type": "ppo"}})

    rates = present(rollback(steps, tuple, ppo, Thresholds())).learning_rates

    assert rates == {"learning_rate": pytest.approx(1e-4), "value_learning_rate": pytest.approx(1e-4)}


def test_a_job_with_the_switch_off_is_not_rolled_back() -> None:
    steps = History.of([StepMetrics.load(one) for one in COLLAPSED[: collapse() + 1]])
    off = settings(advanced={"optimizer": {"rollback": False}})

    assert rollback(steps, tuple, off, Thresholds()) is None


def test_a_job_is_rolled_back_once_and_not_after_its_last_step() -> None:
    assert decided(COLLAPSED, collapse(), warned={RULE}) is None
    assert decided(COLLAPSED, settings().total_steps) is None


def test_the_rollback_of_an_alarm_leaves_that_of_a_collapse() -> None:
    steps = COLLAPSED[: collapse() + 1]
    alarmed = settings(advanced={"stopping": {"on_alarm": "rollback"}})

    found = rollback(
        History.of([StepMetrics.load(one) for one in steps], warned={ALARM_RULE}),
        tuple,
        alarmed,
        Thresholds(),
    )

    assert present(found).rule == RULE


def test_a_judge_that_drifts_rolls_nothing_back() -> None:
    step = {"step": 5, "total_steps": 40, "judge_drift": 0.3, "judge_drift_low": 0.2, "judge_drift_high": 0.4}
    alarmed = settings(advanced={"stopping": {"on_alarm": "rollback"}})

    assert rollback(History.of([StepMetrics.load(step)]), tuple, alarmed, Thresholds()) is None


class Collapsing(SkillTrainer):
    """Loses all skill from its third update on, unless it has been told to learn slowly."""

    slow = False

    def step(self) -> UpdateMetrics:
        update = super().step()
        if self.updates >= 3 and not self.slow:
            self.skill.chance = 0.0
        return update


def test_the_next_attempt_continues_from_there_and_the_event_stays(bench: Bench) -> None:
    asked: dict[str, Any] = {
        "n_epochs": 8,
        "batch_size": 4,
        "eval_interval": 2,
        "advanced": {"group_size": 4},
    }
    skill = Skill()
    run = bench.run(trainer=Collapsing(skill), skill=skill, **asked)
    run.recorder.resolved(run.experience.settings)
    rate = run.experience.settings.learning_rate

    assert asyncio.run(run.train()) is RunOutcome.ROLLED_BACK

    [event] = [one for one in bench.events("warn") if "a third of the one before" in one]
    assert "continues from the checkpoint of step 2" in event
    assert "Collapse: " in event
    assert [row.step for row in bench.checkpoints()] == [2]
    assert bench.job().resolved["learning_rate"] == pytest.approx(rate / 3)  # type: ignore[index]

    bench.again()
    skill = Skill()
    trainer = Collapsing(skill)
    trainer.slow = True
    again = bench.run(trainer=trainer, skill=skill, **asked)
    assert asyncio.run(again.train()) is RunOutcome.DONE
    assert event in bench.events("warn")
    assert [step["step"] for step in bench.steps()] == list(range(17))


def test_a_checkpoint_in_use_is_kept_and_the_job_goes_on(bench: Bench) -> None:
    skill = Skill()
    run = bench.run(trainer=SkillTrainer(skill), skill=skill, eval_interval=1)
    asyncio.run(run.step(1))
    with bench.database.write() as session:
        name = session.query(TunedModel.name).scalar()
        session.add(ModelAlias(project_id=bench.project.id, name="live", model=name))

    assert not run.checkpoints.roll_back(Rollback(0, "half", {"learning_rate": 1e-5}, "", {}, RULE))

    assert [row.step for row in bench.checkpoints()] == [1]
