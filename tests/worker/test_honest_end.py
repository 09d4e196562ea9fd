"""How a job ends: it says whether the model that it delivers is better than its base, and why if it is not."""

import asyncio
import csv
import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import Connection, event

from core.database.engine import Work
from core.database.tables import Event, File, Project, TunedModel, WebhookDelivery
from core.jobs import events, lifecycle
from core.outbound import webhooks
from core.step_metrics import StepMetrics
from core.thresholds import Thresholds
from graders.types import Grade, Grader, Item, Sample
from tests.fakes import (
    ExactGrader,
    IdleTrainer,
    NeverGrades,
    RuiningTrainer,
    SameForAll,
    Skill,
    WatchedRun,
    crash_at,
)
from tests.present import present
from tests.worker.conftest import Bench
from worker.clock import Clock
from worker.recording.metrics import no_signal
from worker.recording.recorder import JobRecorder, Quota
from worker.refusals import UserMistake
from worker.run import RunOutcome
from worker.training.contributions import step_signals

pytestmark = pytest.mark.slow  # runs whole jobs


def trained(
    bench: Bench,
    *,
    trainer: type[RuiningTrainer | IdleTrainer] | None = None,
    grader: "Grader | None" = None,
    chance: float = 0.3,
    **settings: Any,
) -> Any:
    """A job on 24 validation rows, enough to tell a difference."""
    run = bench.run(grader, skill=Skill(chance), **settings)
    run.experience.valid_prompts = [*run.experience.train_prompts.prompts] * 3
    if trainer is not None:
        run.experience.trainer = trainer(run.experience.trainer.skill)
    return run


def ruined(bench: Bench, **settings: Any) -> Any:
    """A job that ruins its model, in the run after its one rollback."""
    first = trained(bench, trainer=RuiningTrainer, chance=0.6, n_epochs=2, **settings)
    assert asyncio.run(first.train()) is RunOutcome.ROLLED_BACK
    bench.again()
    return trained(bench, trainer=RuiningTrainer, chance=0.6, n_epochs=2, **settings)


def told(bench: Bench, level: str) -> list[Any]:
    with bench.database.read() as session:
        rows = session.query(Event).where(Event.level == level).order_by(Event.seq)
        return [(row.message, row.data) for row in rows if not row.superseded]


def test_a_job_that_learned_ends_improved_with_the_numbers_everywhere(bench: Bench) -> None:
    asyncio.run(trained(bench, n_epochs=6).train())

    job, verdict = bench.job(), bench.job().verdict
    assert verdict is not None
    assert verdict["outcome"] == "improved"
    assert verdict["ci_low"] > 0
    assert verdict["wins"] + verdict["losses"] + verdict["ties"] == verdict["rows"] == 24
    assert verdict["difference"] == pytest.approx(verdict["tuned_reward"] - verdict["base_reward"])
    [sentence, created, done] = bench.events()[-3:]
    assert sentence.startswith("Compared with the base model on 24 validation rows: 0.")
    assert sentence.endswith(": improved.")
    assert created == f"New fine-tuned model created: {job.fine_tuned_model}"
    assert done == "The job has successfully completed"
    [(_, data)] = [one for one in told(bench, "info") if one[0] == done]
    assert data == {"verdict": verdict}
    assert not told(bench, "error")
    [delivered] = [row for row in result(bench) if row["verdict/outcome"]]
    assert delivered["step"] == str(verdict["step"])
    assert delivered["verdict/outcome"] == "improved"
    assert float(delivered["verdict/ci_low"]) == verdict["ci_low"]
    assert float(delivered["full_valid_difference"]) == pytest.approx(verdict["difference"])


def test_a_ruined_job_ends_worse_with_an_error_that_names_the_cause(bench: Bench) -> None:
    asyncio.run(ruined(bench).train())

    assert bench.job().status == "succeeded"
    assert present(bench.job().verdict)["outcome"] == "worse"
    assert present(bench.job().verdict)["tuned_reward"] == 0.0
    [(message, data)] = told(bench, "error")
    assert message.startswith(
        "The delivered model is worse than the base model. Compared with the base model on 24 validation rows: 0."
    )
    assert message.count(" -> 0.00, difference") == 1
    assert "Likely cause: Collapse: training reward fell from " in message
    assert data["cause"] == "collapse"
    assert data["verdict"] == bench.job().verdict
    rules = [data["rule"] for _, data in told(bench, "warn") if "rule" in data]
    assert sorted(rules) == ["below_base", "collapse", "rollback"]


def test_a_ruined_job_without_rollback_goes_on_to_its_end_with_the_warning(bench: Bench) -> None:
    advanced = {"group_size": 4, "optimizer": {"rollback": False}}
    run = trained(bench, trainer=RuiningTrainer, chance=0.6, n_epochs=2, advanced=advanced)

    assert asyncio.run(run.train()) is RunOutcome.DONE

    assert present(bench.job().verdict)["outcome"] == "worse"
    rules = [data["rule"] for _, data in told(bench, "warn") if "rule" in data]
    assert sorted(rules) == ["below_base", "collapse"]


def test_a_model_that_did_not_move_makes_no_difference(bench: Bench) -> None:
    asyncio.run(trained(bench, trainer=IdleTrainer, chance=0.5).train())

    verdict = bench.job().verdict
    assert verdict is not None
    assert (verdict["outcome"], verdict["difference"], verdict["ties"]) == ("no_difference", 0.0, 24)
    assert not told(bench, "error")


def test_a_model_a_little_below_its_base_is_not_silent(bench: Bench) -> None:
    """One row of 24: no difference beyond chance, and still an event that says so."""
    run = trained(bench, grader=LosesOneRow(), trainer=IdleTrainer, eval_interval=4)
    asyncio.run(run.train())

    assert present(bench.job().verdict)["outcome"] == "no_difference"
    assert present(bench.job().verdict)["losses"] == 1
    [(message, data)] = told(bench, "error")
    assert message.startswith(
        "The delivered model is below the base model, not significantly. Compared with the base model on 24 "
    )
    assert message.count("1.00 -> 0.96") == 1
    assert ": not significantly different. Likely cause" in message
    assert message.endswith("Likely cause: No cause was found in the metrics.")
    assert data["cause"] == "unknown"


class LosesOneRow:
    """Right for every answer, until after the 24 of the base's validation and the 32 of four steps."""

    name, type = "exact", "string_check"

    def __init__(self) -> None:
        self.seen = 0

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.seen += 1
        return Grade(0.0 if self.seen == 24 + 32 + 1 else 1.0)


class TestRequireImprovement:
    ADVANCED = {"group_size": 4, "require_improvement": True}

    def test_fails_a_job_that_is_not_better_and_keeps_its_checkpoints(self, bench: Bench) -> None:
        run = ruined(bench, advanced=self.ADVANCED)
        with pytest.raises(
            UserMistake, match=r"not significantly above that of the base model.* 0 wins.*: worse\."
        ) as failed:
            asyncio.run(run.train())
        run.recorder.fail(code=failed.value.code, message=failed.value.message, param=failed.value.param)

        job = bench.job()
        assert job.error is not None
        assert failed.value.code == job.error["code"] == "no_improvement"
        assert (
            job.error["param"]
            == "method.reinforcement.hyperparameters.advanced.evaluation.require_improvement"
        )
        assert (job.status, job.fine_tuned_model) == ("failed", None)
        assert job.verdict is not None
        assert job.verdict["outcome"] == "worse"
        assert len(bench.checkpoints()) == 4
        with bench.database.read() as session:
            assert all(":ckpt-step-" in model.name for model in session.query(TunedModel))
        assert [row["verdict/outcome"] for row in result(bench) if row["verdict/outcome"]] == ["worse"]

    def test_fails_a_job_that_makes_no_difference(self, bench: Bench) -> None:
        run = trained(bench, trainer=IdleTrainer, chance=0.5, advanced=self.ADVANCED)

        with pytest.raises(UserMistake, match=r"24 ties: no difference\. The checkpoints are kept"):
            asyncio.run(run.train())

    def test_lets_a_job_succeed_that_is_better(self, bench: Bench) -> None:
        asyncio.run(trained(bench, n_epochs=6, advanced=self.ADVANCED).train())

        assert bench.job().status == "succeeded"


def test_a_base_that_could_not_be_graded_has_no_verdict_and_a_warning(bench: Bench) -> None:
    class GradesLater(ExactGrader):
        def __init__(self) -> None:
            self.seen = 0

        async def grade(self, sample: Sample, item: Mapping[str, Any]) -> Grade:
            self.seen += 1
            return await (NeverGrades() if self.seen <= 24 else ExactGrader()).grade(sample, item)

    asyncio.run(trained(bench, grader=GradesLater()).train())

    assert bench.job().status == "succeeded"
    assert bench.job().verdict is None
    assert told(bench, "warn")[-1][0] == (
        "The model cannot be compared with the base model: no validation row was graded for both."
    )


def test_the_verdict_needs_no_stored_rollouts(bench: Bench) -> None:
    """The quota of samples is 0: not one answer is stored, and every row is compared."""
    run = trained(bench, n_epochs=6)
    run.recorder.quota = Quota(bytes_per_job=0, samples_per_page=0)
    asyncio.run(run.train())

    assert present(bench.job().verdict)["rows"] == 24


def test_a_run_that_resumes_comes_to_the_same_verdict_and_warns_once(bench: Bench) -> None:
    first = ruined(bench)
    first.stop_requested = lambda: first.experience.trainer.updates == 5
    assert asyncio.run(first.train()) is RunOutcome.INTERRUPTED
    bench.again()
    asyncio.run(trained(bench, trainer=RuiningTrainer, chance=0.6, n_epochs=2).train())

    assert present(bench.job().verdict)["outcome"] == "worse"
    rules = [data["rule"] for _, data in told(bench, "warn") if "rule" in data]
    assert sorted(rules) == ["below_base", "collapse", "rollback"]


def test_a_warning_of_a_step_that_is_done_again_is_told_again_and_listed_once(bench: Bench) -> None:
    run = ruined(bench, eval_interval=4)
    run.before_step = crash_at(3)
    with pytest.raises(RuntimeError):
        asyncio.run(run.train())
    assert [data["rule"] for _, data in told(bench, "warn") if "rule" in data] == ["rollback", "collapse"]
    bench.again()
    again = trained(bench, trainer=RuiningTrainer, chance=0.6, n_epochs=2, eval_interval=4)
    asyncio.run(again.train())

    rules = [data["rule"] for _, data in told(bench, "warn") if "rule" in data]
    assert rules.count("collapse") == 1


def test_a_crash_between_the_verdict_and_the_end_tells_the_verdict_once(bench: Bench) -> None:
    class Killed(JobRecorder):
        def succeed(self, step: int) -> None:
            raise RuntimeError("killed")

    run = trained(bench, n_epochs=2)
    run.recorder = Killed(bench.attempt())
    with pytest.raises(RuntimeError):
        asyncio.run(run.train())
    bench.again()
    asyncio.run(trained(bench, n_epochs=2).train())

    assert bench.job().status == "succeeded"
    assert len([message for message in bench.events() if message.startswith("Compared with")]) == 1


def test_thresholds_can_be_changed_and_switched_off(bench: Bench) -> None:
    run = trained(bench, trainer=RuiningTrainer, chance=0.6, n_epochs=2)
    run.experience.thresholds = Thresholds(entropy_share=None, below_base=None)
    asyncio.run(run.train())

    assert not [data for _, data in told(bench, "warn") if "rule" in data]
    assert present(bench.job().verdict)["outcome"] == "worse"


def test_validations_have_a_standard_error_and_a_difference_to_the_base(bench: Bench) -> None:
    asyncio.run(trained(bench, n_epochs=2, eval_samples=2).train())

    base, later = bench.steps()[0], bench.steps()[-1]
    assert 0 < base["full_valid_stderr"] < 0.2
    assert "full_valid_difference" not in base
    low, high = later["full_valid_difference_low"], later["full_valid_difference_high"]
    assert low < later["full_valid_difference"] < high


def test_a_webhook_of_a_job_that_ended_has_the_verdict(bench: Bench) -> None:
    with bench.database.write() as session:
        webhooks.create(
            session,
            session.get_one(Project, bench.project.id),
            name="ends",
            url="https://hooks.example.com",
            event_types=["fine_tuning.job.succeeded"],
            thresholds=None,
        )
    asyncio.run(trained(bench, n_epochs=2).train())

    with bench.database.read() as session:
        [delivery] = session.query(WebhookDelivery).all()
    assert json.loads(delivery.body)["data"] == {"id": bench.job().id, "verdict": bench.job().verdict}


def test_the_no_signal_text_names_no_cause_once_the_collapse_rule_has_warned(bench: Bench) -> None:
    run = trained(bench, trainer=RuiningTrainer, chance=0.6, n_epochs=2)
    run.history.warned.add("collapse")
    asyncio.run(run.train())

    [silence, *_] = [message for message in bench.events("warn") if message.startswith("No signal")]
    assert silence.endswith("groups did the answers differ in score.")


def test_the_no_signal_text_blames_collapse_where_the_model_was_better_before(bench: Bench) -> None:
    run = trained(bench, trainer=RuiningTrainer, chance=0.6, n_epochs=2)
    run.experience.thresholds = Thresholds(entropy_share=None)
    asyncio.run(run.train())

    [silence, *_] = [message for message in bench.events("warn") if message.startswith("No signal")]
    assert "The model has collapsed: its mean reward is 0.00, and " in silence
    assert "too hard" not in silence


def test_the_no_signal_text_blames_the_task_where_the_model_never_was_better(bench: Bench) -> None:
    run = trained(bench, grader=SameForAll(0.0))
    groups_P, _ = asyncio.run(run.experience.collector.collect(1, Clock()))

    # A better validation says nothing: its rows are others, and its answers greedy.
    steps = [StepMetrics(step=0, full_valid_mean_reward=0.3), StepMetrics(step=1, train_mean_reward=0.0)]
    silence = no_signal(groups_P, step_signals(groups_P, run.experience.settings), steps)

    assert silence is not None
    assert "all answers scored 0: the task is too hard" in silence.message


@pytest.mark.parametrize(
    ("mean", "spread", "blames"),
    [
        (0.03, 0.17, False),  # one right answer of 32
        (0.5, 0.5, True),
    ],
)
def test_a_few_right_answers_in_the_first_step_are_no_sign_of_a_collapse(
    bench: Bench, mean: float, spread: float, blames: bool
) -> None:
    experience = trained(bench, grader=SameForAll(0.0)).experience
    groups_P = asyncio.run(experience.collector.collect(1, Clock()))[0] * 4
    before = StepMetrics(step=1, train_mean_reward=mean, train_reward_std=spread)

    silence = present(no_signal(groups_P, step_signals(groups_P, experience.settings), [before])).message

    assert ("collapsed" in silence) is blames
    assert ("too hard" in silence) is not blames


@pytest.mark.parametrize(("earlier_share", "is_success"), [(0.5, True), (0.0, False)])
def test_full_scores_after_steps_with_signal_are_no_reason_for_a_warning(
    bench: Bench, earlier_share: float, is_success: bool
) -> None:
    run = trained(bench, grader=SameForAll(1.0))
    groups_P, _ = asyncio.run(run.experience.collector.collect(1, Clock()))
    steps = [
        StepMetrics(step=0, full_valid_mean_reward=0.4),
        StepMetrics(step=1, train_mean_reward=0.5, groups_mixed_share=earlier_share),
    ]

    silence = no_signal(groups_P, step_signals(groups_P, run.experience.settings), steps)

    assert silence is not None
    assert silence.is_success == is_success
    assert ("the model has learned the prompts" in silence.message) == is_success
    assert ("too easy" in silence.message) != is_success


def test_a_step_reads_no_metrics_of_earlier_steps(bench: Bench) -> None:
    """Counted in rows, so that it holds for 3,000 steps as for 8."""
    statements = []

    def note(connection: Connection, cursor: Any, statement: Any, *rest: Any) -> None:
        statements.append(statement)

    counts = []

    class Counted(WatchedRun):
        async def step(self, step: int) -> RunOutcome | None:
            statements.clear()
            ended = await super().step(step)
            counts.append(len(statements))
            assert not [one for one in statements if one.startswith("SELECT") and "FROM step_metrics" in one
                        and "step_metrics.step = " not in one]  # fmt: skip
            return ended

    run = trained(bench, kind=Counted, n_epochs=2)
    event.listen(bench.database.engine, "before_cursor_execute", note)
    try:
        asyncio.run(run.train())
    finally:
        event.remove(bench.database.engine, "before_cursor_execute", note)

    assert len(counts) == 8
    assert counts[6] == counts[2]  # both without a validation


def test_a_paused_job_that_was_cancelled_has_no_verdict(bench: Bench) -> None:
    run = trained(bench, n_epochs=2)
    run.stop_requested = lambda: run.experience.trainer.updates == 2
    asyncio.run(run.train())
    with bench.database.write() as session:
        lifecycle.cancel(Work(session), session.merge(bench.job()))

    assert bench.job().verdict is None


def test_row_scores_stay_out_of_the_listed_metrics(bench: Bench) -> None:
    asyncio.run(trained(bench).train())

    with bench.database.read() as session:
        assert len(present(events.valid_scores(session, bench.claim.job_id, 0))) == 24
        assert "valid_scores" not in events.steps(session, bench.claim.job_id)[0].__dict__


def result(bench: Bench) -> list[Any]:
    with bench.database.read() as session:
        file = session.query(File).where(File.id == bench.job().result_file).one()
    return list(csv.DictReader(io.StringIO(bench.blobs.read(file.blob_key).decode())))
