"""Budgets in the real loop, on fakes: every step takes ten seconds, and what a user sees is what they count."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from torch._C._distributed_c10d import FileStore

from core.database.engine import Work
from core.database.tables import Checkpoint, Event, File, Job, Project, ProjectUsage, TunedModel
from core.errors import BudgetReached
from core.jobs import budgets, events, lifecycle, usage
from core.jobs.budgets import Price
from core.results import tuned_models
from core.settings import Settings
from core.step_metrics import StepMetrics
from graders.backends import Backends
from tests.fakes import crash_at
from tests.present import present
from tests.worker.conftest import Bench
from worker.prepare.training_plan import occupied_gpus
from worker.rollout.experience import RolloutExperience
from worker.run import RunOutcome
from worker.supervisor.validation import validate_next
from worker.training.world import World

pytestmark = pytest.mark.slow  # runs whole jobs

PRICE = Price(None, "USD")


@pytest.fixture
def timed(bench: Bench) -> Callable[..., Any]:
    """A run of eight steps of which each takes ten seconds of the GPU, and those with a validation five more."""

    class TenSeconds(RolloutExperience):
        def measure(self, step: int, *args: Any) -> StepMetrics:
            seconds = 5.0 if step == 0 else 15.0 if self.schedule.is_validated(step) else 10.0
            return StepMetrics.load(
                super().measure(step, *args).to_data() | {"timing": {"step": {"full_iteration": seconds}}}
            )

    def make(**settings: Any) -> Any:
        return bench.run(experience=TenSeconds, **{"n_epochs": 2} | settings)

    return make


def change(bench: Bench, **columns: Any) -> None:
    with bench.database.write() as session:
        session.execute(update(Job).values(**columns))


def cap(bench: Bench, gpu_seconds: float) -> None:
    change(bench, budget=budgets.to_row({"gpu_seconds": gpu_seconds}, PRICE))


def train(run: Any) -> Any:
    return asyncio.run(run.train())


def pause(bench: Bench) -> None:
    """What the supervisor does with a run that says it was interrupted."""
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.release(session, job)


def resume(bench: Bench) -> None:
    with bench.database.write() as session:
        lifecycle.resume(Work(session), session.get_one(Job, bench.job().seq))
    take(bench)


def take(bench: Bench) -> None:
    with bench.database.write() as session:
        claim = lifecycle.claim(session, gpu_class="cpu", owner="second", lease_seconds=60)
    assert claim is not None
    bench.claim = claim


def callable_steps(bench: Bench) -> list[Any]:
    """The steps whose checkpoints have a name."""
    with bench.database.read() as session:
        names = [model.name for model in session.query(TunedModel)]
    return sorted(int(name.rsplit("-", 1)[1]) for name in names if ":ckpt-step-" in name)


def test_a_job_pauses_before_the_step_that_would_pass_its_cap(
    bench: Bench, timed: Callable[..., Any]
) -> None:
    cap(bench, 44.0)  # steps 0, 1 and 2 take 5 + 10 + 15; a third ten more, a fourth fifteen more

    assert train(timed()) is RunOutcome.INTERRUPTED
    pause(bench)

    job = bench.job()
    assert (job.status, job.gpu_seconds) == ("paused", 40.0)
    assert [step["step"] for step in bench.steps()] == [0, 1, 2, 3]
    assert bench.checkpoints()[-1].step == 3
    assert bench.events("warn") == [
        "Pausing fine-tuning job at its budget: 40 of 44 GPU-seconds are used, and the next step would take about "
        "15 more"
    ]
    with bench.database.read() as session:
        told = session.query(Event).where(Event.level == "warn").one().data
    assert (told["used_gpu_seconds"], told["cap_gpu_seconds"]) == (40.0, 44.0)


def test_what_it_leaves_behind_is_a_model_that_was_not_validated(
    bench: Bench, timed: Callable[..., Any]
) -> None:
    cap(bench, 44.0)
    train(timed())
    pause(bench)

    with bench.database.read() as session:
        kept = tuned_models.checkpoints(session, bench.job(), limit=10).items
        names = tuned_models.names(session, kept)
        found = tuned_models.find(session, bench.project.id, names[kept[0].id])
    assert [one.step for one in kept] == [3, 2]
    assert kept[0].valid_reward is None
    assert found is not None
    assert found.checkpoint_id == kept[0].id
    assert found.name.endswith(":ckpt-step-3")
    assert any(e.endswith(f"Snapshot ID: {found.name}") for e in bench.events())
    manifest = json.loads(bench.blobs.read(f"{kept[0].blob_prefix}/manifest.json"))
    assert manifest["step"] == 3


def test_at_its_cap_it_is_not_resumed_and_with_a_higher_one_it_ends_as_if_it_had_never_paused(
    bench: Bench, timed: Callable[..., Any]
) -> None:
    cap(bench, 44.0)
    train(timed())
    pause(bench)
    with pytest.raises(BudgetReached):
        resume(bench)

    cap(bench, 1000.0)
    resume(bench)
    resumed = timed()
    assert train(resumed) is RunOutcome.DONE

    job = bench.job()
    assert (job.status, job.gpu_seconds) == ("succeeded", 5.0 + 4 * 10.0 + 4 * 15.0)
    validations = [call for call in resumed.experience.sampler.calls if call.group_size == 1]
    trained = [call.step for call in resumed.experience.sampler.calls if call.group_size == 4]
    assert (trained, len(validations)) == ([4, 5, 6, 7, 8], 3)
    assert resumed.experience.trainer.updates == 8


def test_a_pause_changes_nothing_of_what_is_learned(bench: Bench, timed: Callable[..., Any]) -> None:
    rewards = {}
    for limit in (1000.0, 44.0):
        cap(bench, limit)
        change(bench, status="running", finished_at=None, result_file=None, usage=None, fine_tuned_model=None)
        change(bench, lease_owner=bench.claim.owner)
        with bench.database.write() as session:
            session.query(Checkpoint).delete()
            session.query(TunedModel).delete()
            events.discard_steps_after(session, bench.claim.job_id, -1)
        if train(timed()) is RunOutcome.INTERRUPTED:
            pause(bench)
            cap(bench, 1000.0)
            resume(bench)
            train(timed())
        rewards[limit] = [step.get("train_mean_reward") for step in bench.steps()]

    assert "Resuming from the checkpoint of step 3" in bench.events()
    assert len(rewards[44.0]) == 9
    assert rewards[44.0] == rewards[1000.0]


def test_the_model_of_a_pause_stays_until_its_name_is_deleted(
    bench: Bench, timed: Callable[..., Any]
) -> None:
    """Somebody may be using it, whatever becomes of the job."""
    cap(bench, 44.0)
    train(timed())
    pause(bench)
    cap(bench, 80.0)  # to step 5: 40 + 15 + 10, and 15 more would be 80; that fits, so to step 6
    resume(bench)
    train(timed())
    pause(bench)
    assert callable_steps(bench) == [2, 3, 4, 6]

    with bench.database.write() as session:
        [name] = [m.name for m in session.query(TunedModel) if m.name.endswith("-3")]
        assert tuned_models.delete(Work(session), bench.project.id, name)
    change(bench, budget=None)
    resume(bench)
    train(timed())

    assert 3 not in [one.step for one in bench.checkpoints()]


def test_a_drain_leaves_no_model_behind(bench: Bench, timed: Callable[..., Any]) -> None:
    run = timed()
    run.stop_requested = lambda: run.experience.trainer.updates == 3

    assert train(run) is RunOutcome.INTERRUPTED

    assert bench.checkpoints()[-1].step == 3
    assert callable_steps(bench) == [2]


def test_the_model_of_a_users_own_pause_can_be_called_too(bench: Bench, timed: Callable[..., Any]) -> None:
    run = timed()

    def paused_during_three(number: int) -> None:
        if number == 3:
            with bench.database.write() as session:
                lifecycle.pause(Work(session), session.get_one(Job, bench.job().seq))

    run.before_step = paused_during_three
    assert train(run) is RunOutcome.INTERRUPTED

    assert callable_steps(bench) == [2, 3]


def test_a_cap_below_the_first_validation_pauses_before_anything_is_learned(
    bench: Bench, timed: Callable[..., Any]
) -> None:
    cap(bench, 4.0)
    run = timed()

    assert train(run) is RunOutcome.INTERRUPTED
    pause(bench)

    assert (bench.job().status, run.experience.trainer.updates, bench.checkpoints()) == ("paused", 0, [])
    change(bench, budget=None)
    resume(bench)
    assert train(timed()) is RunOutcome.DONE
    assert [step["step"] for step in bench.steps()] == list(range(9))


def test_a_cap_that_the_last_step_reaches_pauses_nothing(bench: Bench, timed: Callable[..., Any]) -> None:
    cap(bench, 105.0)

    assert train(timed()) is RunOutcome.DONE

    assert (bench.job().status, bench.job().gpu_seconds) == ("succeeded", 105.0)
    assert not bench.events("warn")


def test_steps_that_a_crash_lost_count_once_for_the_job_and_twice_for_the_project(
    bench: Bench, timed: Callable[..., Any]
) -> None:
    run = timed()
    run.before_step = crash_at(4)
    with pytest.raises(RuntimeError):
        train(run)
    assert bench.job().gpu_seconds == 40.0
    bench.again()

    resumed = timed()
    resumed.checkpoints.restore(resumed.experience.trainer)
    assert (
        bench.job().gpu_seconds == present(bench.job().usage)["gpu_seconds"] == 30.0
    )  # back at the checkpoint of step 2
    train(resumed)

    assert bench.job().gpu_seconds == 105.0
    with bench.database.read() as session:
        [today] = session.query(ProjectUsage).all()
    assert today.gpu_seconds == 105.0 + 10.0


def test_usage_and_estimate_live_on_the_row_while_the_job_runs(
    bench: Bench, timed: Callable[..., Any]
) -> None:
    run = timed()
    run.stop_requested = lambda: run.experience.trainer.updates == 4
    train(run)

    shown = usage.render(bench.job(), Price(0.5, "EUR"))
    assert shown is not None
    assert (shown["gpu_seconds"], shown["sampled_tokens"]) == (55.0, 4 * 2 * 8)
    assert shown["cost"] == {"amount": 27.5, "currency": "EUR"}
    estimate = usage.render_estimate(bench.job(), PRICE)
    assert estimate is not None
    assert estimate["remaining_seconds"] == {"low": 37.5, "expected": 50.0, "high": 62.5}
    assert estimate["total_gpu_seconds"]["expected"] == 105.0
    assert estimate["based_on"] == "this job's steps"


def test_a_run_on_several_gpus_says_so_with_each_step(bench: Bench, timed: Callable[..., Any]) -> None:
    run = bench.run()
    run.experience.gpus = 4
    train(run)

    used = bench.job().usage
    assert used is not None
    assert 0 < used["gpu_seconds"] == pytest.approx(4 * used["training_seconds"])
    assert {step["gpus"] for step in bench.steps()} == {4}


def test_the_expected_finish_knows_which_steps_are_validated(bench: Bench, timed: Callable[..., Any]) -> None:
    run = timed()
    run.stop_requested = lambda: run.experience.trainer.updates == 4
    train(run)

    with bench.database.read() as session:
        last = session.query(Event).where(Event.type == "metrics").order_by(Event.seq.desc()).first()
    assert last is not None
    assert present(bench.job().estimated_finish) - last.created_at in (50, 51)


class TestBeforeTheStart:
    @pytest.fixture
    def validate(self, bench: Bench, timed: Callable[..., Any]) -> Callable[..., Job]:
        """Validate the files of a job, after another one of its model has run or not. Returns the job."""

        def run(*, after_another: Any) -> Job:
            if after_another:
                train(timed())
            models = bench.tmp_path / "models.toml"
            models.write_text('[models.tiny]\nhub = "x/tiny"\ncontext = 128\n')
            settings = Settings(data_dir=bench.tmp_path, models_file=models)
            row = json.dumps({"messages": [{"role": "user", "content": "say red"}], "answer": "red"}) + "\n"
            with bench.database.write() as session:
                for name, rows in (("file-t", 8), ("file-v", 2)):
                    info = bench.blobs.put_bytes(f"files/{name}", (row * rows).encode())
                    kept = {"project_id": bench.project.id, "filename": name, "purpose": "fine-tune"}
                    stored = {"bytes": info.size, "sha256": info.sha256, "blob_key": info.key}
                    session.add(File(id=name, **kept, **stored))
                job = Job(
                    organization_id=bench.project.organization_id,
                    project_id=bench.project.id,
                    model="tiny",
                    training_file="file-t",
                    validation_file="file-v",
                    seed=1,
                    body=bench.job().body,
                    gpu_class="cpu",
                )
                session.add(job)
                session.flush()
                job_id = job.id
            validate_next(settings, bench.database, bench.blobs, Backends.none(), "tester")
            with bench.database.read() as session:
                return session.query(Job).where(Job.id == job_id).one()

        return run

    def test_a_validated_job_has_the_estimate_that_earlier_jobs_give(
        self, validate: Callable[..., Job]
    ) -> None:
        job = validate(after_another=True)

        estimate = usage.render_estimate(job, PRICE)
        assert job.status == "queued"
        assert estimate is not None
        assert estimate["based_on"] == "8 steps of 1 earlier job"
        ranges = estimate["remaining_seconds"]
        # 8 rows, 10 epochs, 8 answers each, and 11 greedy validations of 2 rows, at two tokens an answer.
        answers = 8 * 10 * 8 + 11 * 2
        assert answers * 2 / 1.6 <= ranges["low"] <= ranges["expected"] <= ranges["high"]
        assert ranges["high"] <= answers * 64 / 1.0
        assert usage.render(job, PRICE) is None

    def test_where_no_job_has_run_there_is_none(self, validate: Callable[..., Job]) -> None:
        job = validate(after_another=False)

        assert (job.status, job.usage) == ("queued", None)


def test_a_job_pauses_when_its_project_has_used_what_it_may(bench: Bench, timed: Callable[..., Any]) -> None:
    with bench.database.write() as session:
        project = session.get_one(Project, bench.project.id)
        project.limits = {"gpu_seconds_per_30_days": 40}

    assert asyncio.run(timed().train()) is RunOutcome.INTERRUPTED

    assert bench.job().status == "pausing"
    assert [step["step"] for step in bench.steps()] == [0, 1, 2, 3]  # 5 + 10 + 15 + 10 seconds
    assert "limit of its project" in bench.events("warn")[-1]
    assert "gpu_seconds_per_30_days" in bench.events("warn")[-1]
    assert [one.step for one in bench.checkpoints()] == [2, 3]


@pytest.mark.parametrize(("size", "local_size", "gpus"), [(5, 5, 8), (10, 5, 16), (1, 1, 4)])
def test_each_machine_of_a_run_occupies_its_sampling_gpus(
    tmp_path: Path, size: int, local_size: int, gpus: int
) -> None:
    world = World(0, size, local_size, 0, FileStore(str(tmp_path / "store"), size))

    assert occupied_gpus(world, 3) == gpus
    assert occupied_gpus(None, 3) == 4
