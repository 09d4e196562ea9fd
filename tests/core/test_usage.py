"""What a job and its project have used, and what a budget makes of it."""

import time
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.claims import Claim
from core.database.engine import Database, Work
from core.database.states import JOB
from core.database.tables import Checkpoint, Event, Job, ModelUsage, Project, ProjectUsage
from core.errors import BudgetReached, InvalidJobState, InvalidRequest
from core.jobs import budgets, lifecycle, usage
from core.jobs.budgets import Price
from core.jobs.remaining import RemainingSteps
from core.step_metrics import StepMetrics
from core.tenancy import usage_report
from core.tenancy.usage_report import DAY, MAX_ROWS, Grouping
from tests import factories
from tests.present import present

pytestmark = pytest.mark.both_databases

FREE, PAID = Price(None, "USD"), Price(0.01, "EUR")
MANY = RemainingSteps(plain=10, validated=0, next_is_validated=False)


@pytest.fixture
def job(session: Session) -> Job:
    return factories.job(session, factories.project(session), status="running", started_at=1)


def record(
    session: Session,
    job: Job,
    number: int,
    seconds: float = 10.0,
    ahead: RemainingSteps = MANY,
    grader_tokens: int = 0,
    **more: Any,
) -> None:
    row = factories.step(session, job, number, seconds=seconds, **more)
    usage.record(session, job, StepMetrics.load(row.data), ahead, grader_tokens=grader_tokens)


class TestCounting:
    def test_a_job_without_a_step_has_used_nothing_worth_showing(self, job: Job) -> None:
        assert usage.render(job, PAID) is None
        assert usage.render_estimate(job, PAID) is None

    def test_steps_are_summed_as_they_are_recorded(self, session: Session, job: Job) -> None:
        judged = {"train_prompt_tokens": 5, "train_cached_tokens": 3, "train_completion_tokens": 1}
        record(session, job, 1, tokens=40, model_graders_token_usage={"wise": judged})
        record(session, job, 2, tokens=60, model_graders_token_usage={"wise": judged})

        assert usage.render(job, FREE) == {
            "training_seconds": 20.0,
            "gpu_seconds": 20.0,
            "sampled_tokens": 100,
            "trained_tokens": 100,
            "model_grader_tokens": {
                "wise": {"prompt_tokens": 10, "cached_tokens": 6, "completion_tokens": 2}
            },
        }
        assert job.gpu_seconds == 20.0

    def test_waiting_for_other_jobs_on_the_device_takes_time_and_no_gpu_time(
        self, session: Session, job: Job
    ) -> None:
        """A job that shares the device has used as much as one that ran alone, and takes longer."""
        timing = {"step": {"full_iteration": 30.0, "waiting": 20.0}}
        record(session, job, 1, timing=timing)

        used = present(usage.render(job, FREE))
        assert (used["training_seconds"], used["gpu_seconds"]) == (30.0, 10.0)
        estimate = present(usage.render_estimate(job, FREE))
        assert estimate["remaining_seconds"]["expected"] == 300.0
        assert estimate["total_gpu_seconds"]["expected"] == pytest.approx(110.0)
        assert present(job.usage)["next_step_gpu_seconds"] == pytest.approx(10.0)

    def test_with_a_price_usage_and_estimate_have_a_cost(self, session: Session, job: Job) -> None:
        record(session, job, 1)

        assert present(usage.render(job, PAID))["cost"] == {"amount": 0.1, "currency": "EUR"}
        estimate = usage.render_estimate(job, PAID)
        assert estimate is not None
        assert estimate["remaining_seconds"] == {"low": 50.0, "expected": 100.0, "high": 150.0}
        assert estimate["total_gpu_seconds"] == {"low": 60.0, "expected": 110.0, "high": 160.0}
        assert estimate["cost"] == {"low": 0.6, "expected": 1.1, "high": 1.6, "currency": "EUR"}
        assert present(usage.render_estimate(job, FREE))["cost"] is None

    def test_a_second_on_several_gpus_is_several_gpu_seconds(self, session: Session, job: Job) -> None:
        record(session, job, 1, gpus=4)

        assert present(usage.render(job, FREE))["training_seconds"] == 10.0
        assert present(usage.render(job, PAID))["cost"]["amount"] == 0.4
        estimate = usage.render_estimate(job, FREE)
        assert estimate is not None
        assert estimate["remaining_seconds"]["expected"] == 100.0
        assert estimate["total_gpu_seconds"]["expected"] == 440.0
        assert "gpus" not in estimate

    def test_a_recount_is_what_was_counted_step_by_step(self, session: Session, job: Job) -> None:
        for number in (1, 2, 3):
            record(session, job, number, seconds=0.1 * number)
        counted, seconds = job.usage, job.gpu_seconds

        usage.recount(session, job)

        assert (job.usage, job.gpu_seconds) == (counted, seconds)

    def test_an_estimate_from_earlier_jobs_shrinks_by_the_first_validation(
        self, session: Session, job: Job
    ) -> None:
        job.usage = {
            "estimate": {"gpus": 1, "remaining_seconds": {"low": 5.0, "expected": 50.0, "high": 99.0}}
        }
        record(session, job, 0, seconds=10.0)

        estimate = usage.render_estimate(job, FREE)
        assert estimate is not None
        assert estimate["remaining_seconds"] == {"low": 0.0, "expected": 40.0, "high": 89.0}
        assert estimate["total_gpu_seconds"]["expected"] == 50.0
        assert job.estimated_finish is not None

    def test_a_settled_job_keeps_its_sums_only(self, session: Session, job: Job) -> None:
        record(session, job, 1, tokens=40)
        usage.settle(session, job)

        assert job.usage is not None
        assert set(job.usage) == set(present(usage.render(job, FREE)))
        assert job.trained_tokens == 40


class TestOfAnAttemptThatEnded:
    def running(self, database: Database, *, pending: int = 0) -> Claim:
        """A job after a step of 40 tokens, with more that are sampled for the next one; or before its first step."""
        with database.write() as session:
            job = factories.job(session, factories.project(session), status="running", started_at=1)
            if pending:
                step = StepMetrics.load(factories.step(session, job, 1, tokens=40).data)
                usage.record(session, job, step, MANY, grader_tokens=0, pending_tokens=pending)
            return Claim(job.id, job.epoch, "worker")

    def settle(self, database: Database, claim: Claim) -> None:
        with database.write() as session:
            usage.settle(session, session.query(Job).one())

    def shown(self, database: Database) -> dict[str, Any]:
        with database.read() as session:
            return present(usage.render(session.query(Job).one(), FREE))

    def test_one_without_a_step_has_every_sum(self, database: Database) -> None:
        claim = self.running(database)
        usage.book_unused(database, claim, 30, retry=None)

        sums = {"training_seconds": 0.0, "gpu_seconds": 0.0, "trained_tokens": 0, "model_grader_tokens": {}}
        sums |= {"sampled_tokens": 30, "unused_tokens": 30}
        assert self.shown(database) == sums
        self.settle(database, claim)
        assert self.shown(database) == sums

    def test_what_a_killed_one_had_sampled_is_counted_when_no_other_follows(self, database: Database) -> None:
        self.settle(database, self.running(database, pending=30))

        used = self.shown(database)
        assert (used["sampled_tokens"], used["unused_tokens"]) == (70, 30)
        with database.read() as session:
            assert session.scalars(select(ModelUsage)).one().unused_tokens == 30

    def test_one_that_books_after_its_job_is_settled_counts_the_rest(self, database: Database) -> None:
        claim = self.running(database, pending=30)
        self.settle(database, claim)
        usage.book_unused(database, claim, 35, retry=None)

        used = self.shown(database)
        assert (used["sampled_tokens"], used["unused_tokens"]) == (75, 35)


class TestOfAProject:
    def test_it_adds_up_by_day(self, session: Session, job: Job) -> None:
        for _ in range(2):
            usage.add_usage(session, job.project_id, model="tiny", gpu_seconds=1.5, grader_tokens=7)

        [row] = session.scalars(select(ProjectUsage)).all()
        assert (row.project_id, row.gpu_seconds, row.grader_tokens) == (job.project_id, 3.0, 14)

    def test_tokens_of_judges_count_when_they_are_used_and_not_when_their_grades_are(
        self, session: Session, job: Job
    ) -> None:
        judged = {"train_prompt_tokens": 5, "train_cached_tokens": 3, "train_completion_tokens": 1}
        record(session, job, 1, grader_tokens=18)
        record(session, job, 2, grader_tokens=0, model_graders_token_usage={"wise": judged})

        assert session.scalars(select(ProjectUsage.grader_tokens)).all() == [18]
        assert present(usage.render(job, FREE))["model_grader_tokens"]["wise"]["prompt_tokens"] == 5

    def test_it_adds_up_by_model(self, session: Session, job: Job) -> None:
        record(session, job, 1, tokens=40)
        record(session, job, 2, tokens=60)
        usage.add_usage(session, job.project_id, model="other", grader_tokens=7)
        usage.add_usage(session, job.project_id, model=None, grader_tokens=5)

        rows = {row.model: row for row in session.scalars(select(ModelUsage))}
        assert set(rows) == {job.model, "other"}
        mine = rows[job.model]
        assert (mine.gpu_seconds, mine.sampled_tokens, mine.trained_tokens) == (20.0, 100, 100)
        assert rows["other"].grader_tokens == 7
        assert session.scalars(select(ProjectUsage.grader_tokens)).all() == [12]


class TestReport:
    TODAY = int(time.time() // DAY)

    def stored(self, session: Session, project: Project, **fields: Any) -> None:
        session.add(ModelUsage(**{"project_id": project.id, "day": self.TODAY} | fields))

    def of_project(self, session: Session, project: Project, **fields: Any) -> None:
        session.add(ProjectUsage(**{"project_id": project.id, "day": self.TODAY} | fields))

    def test_days_models_and_projects_are_summed(self, session: Session) -> None:
        one, other = factories.project(session), factories.project(session, name="other")
        for project, model, day, seconds in (
            (one, "a", self.TODAY, 1.0),
            (one, "b", self.TODAY, 2.0),
            (one, "a", self.TODAY - 1, 4.0),
            (other, "a", self.TODAY, 8.0),
        ):
            self.stored(session, project, model=model, day=day, gpu_seconds=seconds, sampled_tokens=10)
        session.flush()

        def sums(project: Project | None, *by: Grouping, days: int = 30) -> list[tuple[Any, ...]]:
            rows = usage_report.report(session, None if project is None else project.id, by, days=days)
            return [(row.day, row.model, row.project_name, row.gpu_seconds) for row in rows]

        assert sums(one, "day") == [
            (self.TODAY - 1, None, None, 4.0),
            (self.TODAY, None, None, 3.0),
        ]
        assert sums(one, "model") == [(None, "a", None, 5.0), (None, "b", None, 2.0)]
        assert sums(one, "model", days=1) == [(None, "b", None, 2.0), (None, "a", None, 1.0)]
        assert sums(None, "project") == [(None, None, "other", 8.0), (None, None, "support", 7.0)]
        assert sums(other, "day", "model", "project") == [(self.TODAY, "a", "other", 8.0)]

    def test_usage_that_is_not_known_by_model_is_a_row_of_its_own(self, session: Session) -> None:
        """Some usage has no model, such as that of grader runs."""
        project = factories.project(session)
        self.of_project(session, project, gpu_seconds=10.0, grader_tokens=5)
        self.stored(session, project, model="a", gpu_seconds=4.0, grader_tokens=5)
        self.of_project(session, project, day=self.TODAY - 1, gpu_seconds=1.0)
        session.flush()

        rows = usage_report.report(session, project.id, ("model",), days=30)

        assert [(row.model, row.gpu_seconds, row.grader_tokens) for row in rows] == [
            (None, 7.0, 0),
            ("a", 4.0, 5),
        ]

    def test_usage_that_is_wholly_known_has_no_such_row(self, session: Session) -> None:
        project = factories.project(session)
        for seconds in (0.1, 0.2, 0.3):
            usage.add_usage(session, project.id, model=f"m{seconds}", gpu_seconds=seconds)

        rows = usage_report.report(session, project.id, ("model",), days=1)

        assert [row.model for row in rows] == ["m0.3", "m0.2", "m0.1"]

    def test_a_report_with_too_many_rows_is_refused(self, session: Session) -> None:
        project = factories.project(session)
        session.add_all(
            ModelUsage(project_id=project.id, day=self.TODAY, model=str(number), gpu_seconds=1.0)
            for number in range(MAX_ROWS + 1)
        )
        session.flush()

        with pytest.raises(InvalidRequest, match="more than 10000 rows"):
            usage_report.report(session, project.id, ("model",), days=1)


class TestCap:
    def test_seconds_are_kept_as_they_are_and_money_is_turned_into_them(self) -> None:
        assert budgets.to_row({"gpu_seconds": 60.0}, FREE) == {
            "asked": {"gpu_seconds": 60.0},
            "gpu_seconds": 60.0,
        }
        money = {"amount": 12.5, "currency": "EUR"}
        assert budgets.to_row(money, PAID) == {"asked": money, "gpu_seconds": 1250.0}

    def test_money_needs_a_price_and_its_currency(self) -> None:
        with pytest.raises(InvalidRequest, match="price_per_gpu_second") as no_price:
            budgets.to_row({"amount": 1.0, "currency": "USD"}, FREE)
        with pytest.raises(InvalidRequest, match="currency in the hardware file") as other:
            budgets.to_row({"amount": 1.0, "currency": "USD"}, PAID)

        assert (no_price.value.param, other.value.param) == ("budget.amount", "budget.currency")

    def test_an_amount_without_end_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="too large"):
            budgets.to_row({"amount": 1e12, "currency": "EUR"}, Price(1e-300, "EUR"))

    @pytest.mark.parametrize(
        ("cap", "reached"), [(19.9, True), (20.0, True), (29.9, True), (30.0, False), (100.0, False)]
    )
    def test_it_is_reached_when_the_next_step_would_pass_it(
        self, session: Session, job: Job, cap: float, reached: bool
    ) -> None:
        record(session, job, 1)
        record(session, job, 2)
        job.budget = budgets.to_row({"gpu_seconds": cap}, FREE)

        assert (budgets.reached(job, job.gpu_seconds) is not None) == reached

    def test_without_a_cap_nothing_is_ever_reached(self, session: Session, job: Job) -> None:
        record(session, job, 1, seconds=1e9)

        assert budgets.reached(job, job.gpu_seconds) is None
        assert budgets.render(job) is None

    def test_a_job_shows_what_it_may_what_it_has_used_and_what_remains(
        self, session: Session, job: Job
    ) -> None:
        record(session, job, 1)
        job.budget = budgets.to_row({"amount": 1.0, "currency": "EUR"}, PAID)

        assert budgets.render(job) == {
            "asked": {"amount": 1.0, "currency": "EUR"},
            "gpu_seconds": 100.0,
            "used_gpu_seconds": 10.0,
            "remaining_gpu_seconds": 90.0,
        }


class TestPausingAtTheCap:
    def test_a_running_job_is_pausing_and_says_why_once(self, session: Session, job: Job) -> None:
        for _ in range(2):
            lifecycle.pause_by_service(session, job, "enough", {"used": 1})

        assert job.status == "pausing"
        assert [(e.message, e.level, e.data) for e in session.scalars(select(Event))] == [
            ("enough", "warn", {"used": 1})
        ]

    @pytest.fixture
    def paused(self, session: Session, job: Job) -> Job:
        """At step 3 of 60 GPU-seconds, with a checkpoint, and no room for a fourth step."""
        for number in (1, 2, 3):
            record(session, job, number, seconds=18.0)
        session.add(Checkpoint(job_id=job.id, step=3, epoch=1, blob_prefix="p"))
        job.budget, job.status = budgets.to_row({"gpu_seconds": 60.0}, FREE), "paused"
        return job

    def test_a_job_at_its_cap_is_not_resumed(self, session: Session, paused: Job) -> None:
        with pytest.raises(BudgetReached, match="54 of 60 GPU-seconds are used") as refused:
            lifecycle.resume(Work(session), paused)

        assert refused.value.status_code == 400
        assert f"/v1/fine_tuning/jobs/{paused.id}/budget" in refused.value.message
        assert paused.status == "paused"

    def test_with_a_higher_cap_or_none_it_is(self, session: Session, paused: Job) -> None:
        lifecycle.set_budget(Work(session), paused, budgets.to_row({"gpu_seconds": 90.0}, FREE))
        lifecycle.resume(Work(session), paused)
        assert paused.status == "queued"

        lifecycle.set_budget(Work(session), paused, None)
        assert list(session.scalars(select(Event.message))) == [
            "The budget is now 90 GPU-seconds",
            "Resuming fine-tuning job, moving job to queued state",
            "The budget was removed",
        ]

    def test_steps_that_a_crash_lost_do_not_keep_it_from_going_on(
        self, session: Session, paused: Job
    ) -> None:
        """The step after the newest checkpoint will be done again, so it does not count twice."""
        session.execute(update(Checkpoint).values(step=2))

        lifecycle.resume(Work(session), paused)

        assert paused.status == "queued"

    @pytest.mark.parametrize("status", sorted(JOB.final))
    def test_a_job_that_ended_has_no_use_for_a_budget(self, session: Session, job: Job, status: str) -> None:
        job.status = status

        with pytest.raises(InvalidJobState, match="already"):
            lifecycle.set_budget(Work(session), job, None)
