"""The loop in worker/run.py, whole jobs at a time, on fakes: what a user sees of a run."""

import asyncio
import csv
import io
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.claims import LeaseLost
from core.database.engine import Work
from core.database.tables import File, RolloutPage, TunedModel
from core.jobs import lifecycle
from core.registry import Registry
from core.response_format import SchemaTooLarge
from core.results import model_aliases
from graders.types import Grade, Item, Sample, StepScore, TokenUsage
from tests.fakes import (
    EveryFourthFails,
    ExactGrader,
    GuessingSampler,
    Halves,
    MeasuredTrainer,
    NeverGrades,
    SameForAll,
    Skill,
    SkillTrainer,
    crash_at,
)
from tests.present import present
from tests.worker.conftest import ANSWERS, Bench
from worker.child import trained
from worker.clock import Clock
from worker.gpu_ratio import RatioMeasurement
from worker.recording import alerts
from worker.refusals import TrainingDiverged, UserMistake
from worker.rollout.experience import RolloutExperience
from worker.rollout.prompts import PromptStream
from worker.run import RunOutcome
from worker.sampling import Answer, Sampling
from worker.types import GraderPart, Group, Prompt, Rollout, UpdateMetrics


@pytest.mark.slow
def test_a_job_learns_and_ends_with_a_model(bench: Bench) -> None:
    job = bench.train(n_epochs=4)

    steps = bench.steps()
    assert job.status == "succeeded"
    assert job.fine_tuned_model is not None
    assert job.fine_tuned_model.startswith("ft:tiny:acme:colours:")
    assert [step["step"] for step in steps] == list(range(17))
    assert steps[-1]["full_valid_mean_reward"] > steps[0]["full_valid_mean_reward"]
    assert bench.events()[-2:] == [
        f"New fine-tuned model created: {job.fine_tuned_model}",
        "The job has successfully completed",
    ]


def test_a_metrics_event_carries_both_spellings_and_openais_words(bench: Bench) -> None:
    bench.train()

    step_2 = bench.steps()[2]
    assert step_2["train_mean_reward"] == step_2["train_reward_mean"] == step_2["scores"]["train_reward_mean"]
    assert step_2["full_valid_mean_reward"] == step_2["scores"]["valid_reward_mean"]
    assert any(e.startswith("Step 2/4 , train mean reward=") for e in bench.events())
    assert "full validation mean reward" in next(e for e in bench.events() if e.startswith("Step 2/4"))
    assert "full validation" not in next(e for e in bench.events() if e.startswith("Step 1/4"))


def test_the_shares_of_groups_add_up(bench: Bench) -> None:
    bench.train()

    for step in bench.steps()[1:]:
        shares = [
            step[f"groups_{kind}_share"] for kind in ("mixed", "all_zero", "all_one", "equal", "ungraded")
        ]
        assert sum(shares) == pytest.approx(1.0)


def test_a_failing_grader_drops_the_sample_and_keeps_the_run(bench: Bench) -> None:
    """An unjudged rollout is no zero: it leaves the mean alone and is reported with its reason."""
    job = bench.train(EveryFourthFails(), skill=Skill(1.0))

    assert job.status == "succeeded"
    assert all(step["train_mean_reward"] == 1.0 for step in bench.steps()[1:])
    assert all(step["mean_unresponsive_rewards"] == 0.25 for step in bench.steps()[1:])
    assert "2 of 8 samples could not be graded" in bench.events("warn")[0]
    assert "the judge is asleep" in bench.events("warn")[0]


@pytest.mark.slow
def test_a_run_without_signal_says_so_and_not_at_every_step(bench: Bench) -> None:
    bench.train(SameForAll(0.0), n_epochs=2)

    warnings = [e for e in bench.events("warn") if e.startswith("No signal")]
    assert len(warnings) == 2  # at the first step in a row, and at the fifth of eight
    assert "all answers scored 0: the task is too hard" in warnings[0]


class OneTopic:
    """Scores all answers to a prompt alike, and those to some prompts higher."""

    name, type = "topic", "string_check"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        return Grade(float(item["answer"] in ("red", "blue")))


@pytest.mark.parametrize(("loss", "warnings"), [("dapo", 1), ("reinforce_plus_plus", 0), ("ppo", 0)])
def test_rewards_of_tokens_have_signal_where_only_prompts_differ(
    bench: Bench, loss: str, warnings: int
) -> None:
    bench.train(OneTopic(), n_epochs=2, batch_size=8, advanced={"group_size": 4, "loss": loss})

    assert all(step["groups_mixed_share"] == 0 for step in bench.steps()[1:])
    assert sum(event.startswith("No signal") for event in bench.events("warn")) == warnings


@pytest.mark.parametrize("loss", ["reinforce_plus_plus", "ppo"])
def test_rewards_of_tokens_that_are_all_equal_are_reported(bench: Bench, loss: str) -> None:
    bench.train(SameForAll(0.0), advanced={"group_size": 4, "loss": loss})

    [warning] = [event for event in bench.events("warn") if event.startswith("No signal")]
    assert "all answers scored 0" in warning


def test_a_grader_that_fails_most_answers_step_after_step_fails_the_job(bench: Bench) -> None:
    with pytest.raises(UserMistake, match="In 3 steps in a row most answers could not be graded") as failed:
        bench.train(NeverGrades(), n_epochs=4)

    assert failed.value.code == "grader_failed"
    assert "no opinion" in failed.value.message
    assert [s["step"] for s in bench.steps()] == [0, 1, 2, 3]


def test_a_schema_that_cannot_be_followed_fails_the_job_for_good(bench: Bench) -> None:
    class TooLarge(GuessingSampler):
        def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
            raise SchemaTooLarge("The schema allows too much at once.")

    run = bench.run()
    run.experience.sampler = TooLarge(Skill())
    with pytest.raises(UserMistake, match="allows too much") as failed:
        asyncio.run(trained(run))

    assert failed.value.code == "schema_too_large"
    assert failed.value.param == "method.reinforcement.response_format"


def test_a_short_job_that_was_never_graded_has_no_best_model(bench: Bench) -> None:
    with pytest.raises(UserMistake, match="Not one validation answer could be graded"):
        bench.train(NeverGrades(), batch_size=4)


def test_answers_are_graded_while_others_are_still_sampled(bench: Bench) -> None:
    """The second answer is only drawn once the first has its grade, so a step that graded last would never end."""
    graded = asyncio.Event()

    class Watched(ExactGrader):
        async def grade(self, sample: Sample, item: Mapping[str, Any]) -> Grade:
            graded.set()
            return await super().grade(sample, item)

    class WaitingForEachGrade(GuessingSampler):
        async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
            async for answer in super().sample(prompts_P, sampling):
                yield answer
                await graded.wait()
                graded.clear()

    run = bench.run(Watched(), sampler=WaitingForEachGrade(Skill()), batch_size=4)
    asyncio.run(asyncio.wait_for(run.train(), 30))

    assert bench.job().status == "succeeded"


@pytest.mark.slow
def test_the_best_three_checkpoints_are_kept_and_the_last(bench: Bench) -> None:
    class BestInTheMiddle:
        """Scores by the clock of validations: the middle of the run is the best of it."""

        name, type = "exact", "string_check"
        score: float
        scores = iter([0.0, 0.3, 0.8, 0.9, 0.7, 0.2, 0.1, 0.4])

        def __init__(self) -> None:
            self.seen = 0

        async def grade(self, sample: Sample, item: Item) -> Grade:
            from graders.types import Grade

            return Grade(self.score)

    grader = BestInTheMiddle()

    class NextScoreInEachValidation(RolloutExperience):
        async def validate(self, step: int, clock: Clock) -> list[Group]:
            grader.score = next(grader.scores)
            return await super().validate(step, clock)

    grader.score = 0.5
    run = bench.run(grader, experience=NextScoreInEachValidation, n_epochs=3)
    asyncio.run(run.train())

    kept = bench.checkpoints()
    assert [c.step for c in kept] == [4, 6, 8, 12]
    with bench.database.read() as session:
        names = {m.name: m.checkpoint_id for m in session.query(TunedModel)}
        best = names[present(bench.job().fine_tuned_model)]
    assert best == kept[1].id
    assert sorted(n.rsplit(":", 1)[1] for n in names if "ckpt" in n) == [
        "ckpt-step-12",
        "ckpt-step-4",
        "ckpt-step-6",
        "ckpt-step-8",
    ]


def test_a_checkpoint_at_which_an_alias_points_is_kept(bench: Bench) -> None:
    run = bench.run(n_epochs=3)

    def promoted_before_seven(number: int) -> None:
        if number == 7:
            with bench.database.write() as session:
                [second] = [one for one in bench.checkpoints() if one.step == 2]
                model = session.query(TunedModel).filter_by(checkpoint_id=second.id).one()
                model_aliases.promote(
                    Work(session), model.project_id, "production", model.name, Registry(models={})
                )

    run.before_step = promoted_before_seven
    asyncio.run(run.train())

    assert 2 in [one.step for one in bench.checkpoints()]


@pytest.mark.slow
def test_the_blobs_of_a_retired_checkpoint_are_gone_and_those_of_a_kept_one_verify(bench: Bench) -> None:
    bench.train(n_epochs=4)

    prefixes = {key.rsplit("/", 1)[0] for key in bench.blobs.list("projects") if "/checkpoints/" in key}
    assert prefixes == {c.blob_prefix for c in bench.checkpoints()}
    for prefix in prefixes:
        manifest = json.loads(bench.blobs.read(f"{prefix}/manifest.json"))
        for file in manifest["files"]:
            bench.blobs.download(f"{prefix}/{file['name']}", bench.tmp_path / "x", sha256=file["sha256"])


@pytest.mark.slow
def test_an_interrupted_run_goes_on_from_its_checkpoint_and_ends_the_same(
    bench: Bench, tmp_path: Path
) -> None:
    run = bench.run(n_epochs=2)
    run.stop_requested = lambda: run.experience.trainer.updates == 3
    assert asyncio.run(run.train()) is RunOutcome.INTERRUPTED
    bench.again()

    resumed = bench.run(n_epochs=2)
    asyncio.run(resumed.train())

    assert bench.job().status == "succeeded"
    assert [s["step"] for s in bench.steps()] == list(range(9))
    assert resumed.experience.trainer.updates == 8
    assert [call.step for call in resumed.experience.sampler.calls if call.group_size == 4] == [4, 5, 6, 7, 8]
    assert bench.events().count("Resuming from the checkpoint of step 3") == 1


@pytest.mark.slow
def test_steps_after_the_last_checkpoint_are_done_again_once(bench: Bench) -> None:
    """A crash between checkpoints loses their steps, and their rows with them."""
    run = bench.run(n_epochs=2)
    run.before_step = crash_at(4)
    with pytest.raises(RuntimeError):
        asyncio.run(run.train())
    bench.again()

    resumed = bench.run(n_epochs=2)
    asyncio.run(resumed.train())

    assert [s["step"] for s in bench.steps()] == list(range(9))
    assert resumed.experience.trainer.updates == 8
    with bench.database.read() as session:
        assert session.query(RolloutPage).where(RolloutPage.split == "train").count() == 8


def test_a_cancelled_run_writes_nothing_more(bench: Bench) -> None:
    run = bench.run(n_epochs=2)

    def cancelled_during_three(number: int) -> None:
        if number == 3:
            with bench.database.write() as session:
                lifecycle.cancel(Work(session), present(session.get(type(bench.job()), bench.job().seq)))

    run.before_step = cancelled_during_three
    with pytest.raises(LeaseLost):
        asyncio.run(run.train())

    assert bench.job().status == "cancelled"
    assert [s["step"] for s in bench.steps()] == [0, 1, 2]
    assert [c.step for c in bench.checkpoints()] == [2]


def test_a_pause_stops_at_the_next_step_with_a_checkpoint(bench: Bench) -> None:
    run = bench.run(n_epochs=2)

    def paused_during_three(number: int) -> None:
        if number == 3:
            with bench.database.write() as session:
                lifecycle.pause(Work(session), present(session.get(type(bench.job()), bench.job().seq)))

    run.before_step = paused_during_three
    assert asyncio.run(run.train()) is RunOutcome.INTERRUPTED

    assert [s["step"] for s in bench.steps()] == [0, 1, 2, 3]
    assert bench.checkpoints()[-1].step == 3


def test_the_result_file_has_a_row_for_each_step_with_blanks_where_nothing_was_measured(bench: Bench) -> None:
    job = bench.train()

    with bench.database.read() as session:
        file = session.query(File).where(File.id == job.result_file).one()
    rows = list(csv.DictReader(io.StringIO(bench.blobs.read(file.blob_key).decode())))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[0]["train_mean_reward"] == rows[1]["full_valid_mean_reward"] == ""
    assert float(rows[2]["full_valid_mean_reward"]) == bench.steps()[2]["full_valid_mean_reward"]
    assert float(rows[2]["scores/graders/string_check/exact/valid_reward_mean"]) >= 0
    assert job.trained_tokens == 4 * 2 * 8
    assert job.usage is not None
    assert job.usage["sampled_tokens"] == 4 * 2 * 8


def test_with_process_supervision_answers_without_steps_teach_nothing_and_say_so(bench: Bench) -> None:
    with pytest.raises(UserMistake, match="gave no steps"):
        bench.train(advanced={"group_size": 4, "supervision": "process"})

    assert bench.steps()[1]["groups_ungraded_share"] == 1.0
    assert bench.steps()[0]["full_valid_mean_reward"] is not None  # validation asks for the score only


def test_with_process_supervision_equal_scores_with_unequal_steps_are_signal(bench: Bench) -> None:
    class Stepper:
        name, type = "steps", "python"

        async def grade(self, sample: Sample, item: Item) -> Grade:
            right = float(sample.output_text == item["answer"])
            return Grade(0.5, steps=(StepScore(right, 1), StepScore(0.0, 2)))

    bench.train(Stepper(), advanced={"group_size": 4, "supervision": "process"})

    assert all(step["groups_mixed_share"] > 0 for step in bench.steps()[1:])
    assert not bench.events("warn")


@pytest.mark.slow
def test_how_far_sampler_and_trainer_are_apart_is_in_the_events_and_the_result_file(bench: Bench) -> None:
    measured = UpdateMetrics(0.0, 8, 16, 0, 1.0, 0.0, 0.0, 1.0, 0.01, 0.2, 0.003, 0.004, 0.95)
    run = bench.run(trainer=MeasuredTrainer(Skill(), measured))
    asyncio.run(run.train())

    with bench.database.read() as session:
        file = session.query(File).where(File.id == bench.job().result_file).one()
    last = list(csv.DictReader(io.StringIO(bench.blobs.read(file.blob_key).decode())))[-1]
    expected = {"": 0.01, "_max": 0.2, "_k1": 0.003, "_k3": 0.004, "_ess": 0.95}
    for ending, value in expected.items():
        assert bench.steps()[-1][f"logprob_gap{ending}"] == float(last[f"logprob_gap{ending}"]) == value


def test_validation_draws_the_same_numbers_every_time(bench: Bench) -> None:
    run = bench.run(eval_samples=3)
    asyncio.run(run.train())

    validations = [call for call in run.experience.sampler.calls if call.group_size == 3]
    assert len(validations) == 3
    assert len({replace(call, batch="") for call in validations}) == 1
    assert all(call.temperature == 1.0 for call in validations)


def test_every_epoch_sees_every_row_once_in_an_order_of_its_own(bench: Bench) -> None:
    stream = bench.run().experience.train_prompts

    first, second = ([p.line for s in range(a, a + 4) for p in stream.batch(s)] for a in (1, 5))

    assert sorted(first) == sorted(second) == list(range(1, 9))
    assert first != second


def test_numbers_that_are_none_are_stored_as_null(bench: Bench) -> None:
    """A skipped update has a loss that is not a number; JSON has no word for it and PostgreSQL refuses it."""
    broken = UpdateMetrics(math.nan, 8, 16, 0, None, 0.0, math.inf, math.nan, 0.0, skipped=True)
    run = bench.run(trainer=MeasuredTrainer(Skill(), broken))

    with pytest.raises(TrainingDiverged):
        asyncio.run(run.train())

    assert [(s["loss"], s["kl"], s["skipped_updates"]) for s in bench.steps()[1:]] == [(None, None, 1)] * 3


def test_a_run_fails_after_three_skipped_updates_in_a_row(bench: Bench) -> None:
    broken = UpdateMetrics(math.nan, 8, 16, 0, None, 0.0, math.inf, math.nan, 0.0, skipped=True)
    run = bench.run(trainer=MeasuredTrainer(Skill(), broken))

    with pytest.raises(TrainingDiverged, match="In 3 steps in a row the gradient was not finite"):
        asyncio.run(run.train())

    assert bench.events("warn").count(alerts.SKIPPED) == 1


def test_a_run_whose_model_has_no_probabilities_fails_before_it_is_checkpointed(bench: Bench) -> None:
    class Ruined(GuessingSampler):
        async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
            async for answer in super().sample(prompts_P, sampling):
                rollout = answer.rollout
                if sampling.step:
                    rollout = replace(rollout, logprobs_T=(math.nan,) * len(rollout.logprobs_T))
                yield replace(answer, rollout=rollout)

    run = bench.run()
    run.experience.sampler = run.experience.collector.sampler = Ruined(run.experience.sampler.skill)

    with pytest.raises(TrainingDiverged, match="not numbers"):
        asyncio.run(run.train())

    assert len(bench.steps()) == 2
    assert not bench.checkpoints()


def test_groups_reach_the_trainer_while_the_rest_is_still_sampled(bench: Bench) -> None:
    sampled: list[Any] = []
    seen: list[Any] = []

    class Waiting(GuessingSampler):
        async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
            async for answer in super().sample(prompts_P, sampling):
                yield answer
                sampled.append(answer)
                if answer.member == 0 and answer.prompt == 0 and sampling.step:
                    while not any(
                        step == sampling.step for step, _ in seen
                    ):  # the last group waits for the first
                        await asyncio.sleep(0)

    class Watched(SkillTrainer):
        def add(self, group: Group) -> None:
            seen.append((run.experience.sampler.calls[-1].step, len(sampled)))
            super().add(group)

    waiting, watched = Waiting(Skill()), Watched(Skill())
    run = bench.run(sampler=waiting, trainer=watched, advanced={"group_size": 4, "overlap": True})
    asyncio.run(run.train())

    assert bench.job().status == "succeeded"
    assert run.experience.trainer.updates == 4
    assert len(seen) == 8


class Ticking(GuessingSampler):
    """A second passes with each answer. Later steps than the first wait to be `released`."""

    def __init__(self, skill: Skill) -> None:
        super().__init__(skill)
        self.now, self.released = 0.0, asyncio.Event()

    async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        if sampling.step > 1:
            await self.released.wait()
        async for answer in super().sample(prompts_P, sampling):
            self.now += 1.0
            yield answer


def test_the_wait_for_answers_in_flight_before_a_validation_is_sampling_time(bench: Bench) -> None:
    sampler = Ticking(Skill())
    clock = Clock(clock=lambda: sampler.now)
    advanced = {"group_size": 4, "off_policy_steps": 1}
    experience = bench.run(sampler=sampler, advanced=advanced).experience

    async def one_step() -> None:
        await experience.learn(1, clock)
        sampler.released.set()
        await experience.validate(1, clock)

    asyncio.run(one_step())

    answers, validated = 2 * 4, len(experience.valid_prompts)
    # The grades of the batch, which has a real clock, take microseconds of it.
    assert clock.seconds["sampling"] + clock.seconds["grading"] == pytest.approx(2 * answers)
    assert clock.seconds["eval"] == validated


class FirstTwo(PromptStream):
    """Has the same two rows in each step."""

    def batch(self, step: int) -> list[Prompt]:
        return [*self.prompts[:2]]


class FirstTwoSolved(Halves):
    """All answers to those rows are right."""

    async def grade(self, sample: Sample, item: Item) -> Grade:
        if item["answer"] in (ANSWERS[1], ANSWERS[2]):
            return Grade(1.0)
        return await super().grade(sample, item)


class Judged(SameForAll):
    """Reads 100 tokens for each answer."""

    async def grade(self, sample: Sample, item: Item) -> Grade:
        return Grade(self.score, usage={"gpt": TokenUsage(100, 10, 0)})


class Rambling(GuessingSampler):
    """The first answer to each prompt is as long as it may be."""

    def _answer(self, prompt: Prompt, sampling: Sampling, member: int) -> Rollout:
        rollout = super()._answer(prompt, sampling, member)
        length = len(rollout.output_ids_T) if member else sampling.max_completion_tokens
        return replace(rollout, output_ids_T=(1,) * length, logprobs_T=(-0.5,) * length)


class TestResampling:
    def test_a_group_that_only_the_penalty_for_length_makes_differ_has_signal(self, bench: Bench) -> None:
        """It is in the update, so another group in its place would make the batch larger."""
        soft = {"group_size": 4, "resample_prompts": 6, "max_completion_tokens": 16, "overlong": "soft"}
        run = bench.run(SameForAll(1.0), sampler=Rambling(Skill()), advanced=soft)
        asyncio.run(run.train())

        steps = bench.steps()[1:]
        assert all(step["groups_mixed_share"] == 1.0 for step in steps)
        assert all("resampled_prompts" not in step for step in steps)
        assert not [event for event in bench.events("warn") if event.startswith("No signal")]

    def test_silent_groups_are_replaced_and_what_that_cost_is_counted(self, bench: Bench) -> None:
        run = bench.run(skill=Skill(chance=0.15), advanced={"group_size": 4, "resample_prompts": 6})
        asyncio.run(run.train())

        [step] = [s for s in bench.steps() if s["step"] == 1]
        assert 1 <= step["resampled_prompts"] <= 6
        assert step["discarded_groups"] >= 1
        assert step["discarded_tokens"] == step["discarded_groups"] * 4 * 2
        assert step["discarded_seconds"] > 0
        assert (
            step["trained_sequences"] == (2 + step["resampled_prompts"]) * 4
        )  # the fake counts all it was given

    def test_the_reported_reward_is_that_of_the_steps_own_prompts(self, bench: Bench) -> None:
        rewards = []
        for resample in (0, 6):
            run = bench.run(
                skill=Skill(chance=0.15), advanced={"group_size": 4, "resample_prompts": resample}
            )
            learned = asyncio.run(run.experience.learn(1, Clock()))
            data = run.experience.measure(1, Clock(), run.history, learned, None)
            rewards.append(data.train_mean_reward)
            assert bool(learned.resampled_P) == bool(resample)

        assert rewards[0] == rewards[1]

    @pytest.mark.parametrize(("grader", "stops"), [(FirstTwoSolved(), False), (SameForAll(1.0), True)])
    def test_a_job_that_learns_from_resampled_groups_is_not_stopped_as_silent(
        self, bench: Bench, grader: FirstTwoSolved | SameForAll, stops: bool
    ) -> None:
        advanced = {"group_size": 4, "resample_prompts": 6, "stop_after_silent_steps": 2}
        run = bench.run(grader, n_epochs=2, advanced=advanced)
        run.experience.collector.prompts = FirstTwo(
            run.experience.train_prompts.prompts, batch_size=2, seed=3
        )
        asyncio.run(run.train())

        silent = [event for event in bench.events() if event.startswith(("No signal", "Stopped early"))]
        assert all(step["groups_mixed_share"] == 0.0 for step in bench.steps()[1:])
        assert (bench.steps()[-1]["step"] < 8) is stops
        assert bool(silent) is stops

    def test_what_judges_read_of_resampled_answers_is_counted(self, bench: Bench) -> None:
        run = bench.run(Judged(0.5), advanced={"group_size": 4, "resample_prompts": 5})
        run.experience.graders = [GraderPart(None, "judge", "score_model", "gpt")]
        asyncio.run(run.train())

        step = bench.steps()[1]
        assert step["model_graders_token_usage"]["gpt"]["train_prompt_tokens"] == (2 + 5) * 4 * 100
        [judge] = step["usage"]["graders"]
        assert judge["train_prompt_tokens_count"] == (2 + 5) * 4 * 100
        assert judge["train_prompt_tokens_mean"] == 100

    @pytest.mark.parametrize(("grader", "resample"), [(SameForAll(0.5), 0), (Halves(), 6)])
    def test_without_a_budget_or_a_need_no_order_of_stand_ins_is_made(
        self, bench: Bench, grader: SameForAll | Halves, resample: int
    ) -> None:
        """It costs a shuffle of the whole file."""

        class NoStandIns(PromptStream):
            def others(self, step: int) -> list[Prompt]:
                raise AssertionError("nobody needs them")

        run = bench.run(grader, advanced={"group_size": 4, "resample_prompts": resample})
        prompts = run.experience.train_prompts
        run.experience.collector.prompts = NoStandIns(
            prompts.prompts, batch_size=prompts.batch_size, seed=prompts.seed
        )

        _, resampled_P = asyncio.run(run.experience.collector.collect(1, Clock()))

        assert resampled_P == []

    def test_a_step_with_signal_everywhere_draws_nobody(self, bench: Bench) -> None:
        run = bench.run(Halves(), advanced={"group_size": 4, "resample_prompts": 6})

        _, resampled_P = asyncio.run(run.experience.collector.collect(1, Clock()))

        assert resampled_P == []

    def test_the_budget_is_kept_and_no_prompt_is_drawn_twice(self, bench: Bench) -> None:
        run = bench.run(SameForAll(0.5), advanced={"group_size": 4, "resample_prompts": 5})

        groups_P, resampled_P = asyncio.run(run.experience.collector.collect(1, Clock()))

        lines = [group.prompt.line for group in [*groups_P, *resampled_P]]
        assert len(resampled_P) == 5
        assert len(set(lines)) == len(lines)


class Killed(BaseException):
    """Stands in for the end of the process."""


class KilledAtTheEnd(RolloutExperience):
    async def conclude(self, *args: Any) -> int:
        raise Killed


class TestStoppingEarly:
    def stopped(self, bench: Bench, grader: SameForAll | None = None, **advanced: Any) -> tuple[str, Any]:
        job = bench.train(grader, n_epochs=10, eval_interval=1, advanced={"group_size": 4} | advanced)
        [message] = [event for event in bench.events() if event.startswith("Stopped early")]
        assert job.status == "succeeded"
        assert job.fine_tuned_model
        return message, bench.steps()[-1]["step"]

    def test_when_no_group_has_signal_any_more(self, bench: Bench) -> None:
        message, last = self.stopped(bench, SameForAll(0.5), stop_after_silent_steps=3)

        assert last == 3
        assert "no group of the last 3 steps" in message

    def test_when_validation_has_stopped_rising(self, bench: Bench) -> None:
        message, last = self.stopped(bench, SameForAll(0.5), stop_after_flat_evals=4)

        assert last == 4
        assert "not risen above 0.500 (step 0) in 4 validations" in message

    @pytest.mark.parametrize(
        ("bound", "says"),
        [
            ({"stop_above_kl": 0.005}, "0.01 nats a token from its reference, beyond the bound of 0.005"),
            ({"stop_below_entropy": 1.5}, "entropy is 1 nats a token, below the bound of 1.5"),
        ],
    )
    def test_when_the_policy_has_left_its_bounds(
        self, bench: Bench, bound: dict[str, Any], says: str
    ) -> None:
        message, last = self.stopped(bench, **bound)

        assert last == 1
        assert says in message

    def test_and_an_attempt_that_ended_before_the_job_did_is_not_continued(self, bench: Bench) -> None:
        settings: dict[str, Any] = {
            "n_epochs": 10,
            "eval_interval": 1,
            "advanced": {"group_size": 4, "stop_after_silent_steps": 3},
        }
        killed = bench.run(SameForAll(0.5), experience=KilledAtTheEnd, **settings)
        with pytest.raises(Killed):
            asyncio.run(killed.train())
        bench.again()

        _, last = self.stopped(bench, SameForAll(0.5), stop_after_silent_steps=3)

        assert last == 3

    def test_not_while_all_is_well(self, bench: Bench) -> None:
        bounds = {"stop_above_kl": 1.0, "stop_below_entropy": 0.1, "stop_after_silent_steps": 30}

        bench.train(advanced={"group_size": 4} | bounds)

        assert len(bench.steps()) == 5

    def test_a_job_that_asked_for_a_gate_fails_after_its_first_step_without_signal(
        self, bench: Bench
    ) -> None:
        with pytest.raises(
            UserMistake, match=r"0% of the groups had signal, less than fail_below_signal \(25%\)"
        ) as failed:
            bench.train(SameForAll(0.5), n_epochs=10, eval_interval=1, advanced={"fail_below_signal": 0.25})

        assert failed.value.code == "no_signal"
        assert [step["step"] for step in bench.steps()] == [0, 1]
        assert bench.checkpoints() == []

    @pytest.mark.slow
    def test_the_gate_is_open_where_there_is_enough_signal_and_later_steps_may_have_less(
        self, bench: Bench
    ) -> None:
        advanced = {"group_size": 8, "fail_below_signal": 0.5}

        job = bench.train(skill=Skill(0.5), n_epochs=3, advanced=advanced)

        assert job.status == "succeeded"
        assert bench.steps()[1]["groups_mixed_share"] >= 0.5
        assert bench.steps()[-1]["groups_mixed_share"] < 0.5

    def test_the_last_policy_is_validated_and_kept_where_it_stops_between_validations(
        self, bench: Bench
    ) -> None:
        bench.train(n_epochs=10, eval_interval=40, advanced={"group_size": 4, "stop_above_kl": 0.001})

        assert [s["step"] for s in bench.steps()] == [0, 1]
        assert bench.steps()[-1]["full_valid_mean_reward"] is not None
        assert [c.step for c in bench.checkpoints()] == [1]


class TestOffPolicy:
    @pytest.mark.slow
    def test_the_next_step_is_sampled_before_this_one_is_learned(self, bench: Bench) -> None:
        order = []

        class Noting(GuessingSampler):
            def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
                order.append(("sample", sampling.step, trainer.updates))
                return super().sample(prompts_P, sampling)

        class Learning(SkillTrainer):
            def step(self) -> UpdateMetrics:
                order.append(("learn", self.updates + 1, self.updates))
                return super().step()

        trainer, off_policy = Learning(Skill()), {"group_size": 4, "off_policy_steps": 1}
        run = bench.run(sampler=Noting(Skill()), trainer=trainer, advanced=off_policy)
        asyncio.run(run.train())

        training = [entry for entry in order if entry[0] == "learn" or entry[1] > 0]
        assert training == [
            ("sample", 1, 0), ("sample", 2, 0), ("learn", 1, 0),
            ("sample", 3, 1), ("learn", 2, 1), ("sample", 4, 2), ("learn", 3, 2), ("learn", 4, 3),
        ]  # fmt: skip
        assert bench.job().status == "succeeded"
        assert [s["step"] for s in bench.steps()] == [0, 1, 2, 3, 4]

    def test_the_better_ratio_of_gpus_is_measured_in_the_first_steps_that_sample_ahead(
        self, bench: Bench
    ) -> None:
        run = bench.run(advanced={"group_size": 4, "off_policy_steps": 1})
        run.experience.ratio = RatioMeasurement(sampling_gpus=2, learning_gpus=6)

        asyncio.run(run.train())

        [said] = [
            event for event in bench.events() if event.startswith("Measured in 3 steps: sampling takes")
        ]
        assert "on 2 GPUs" in said
        ahead = [step.get("ahead_seconds") for step in bench.steps()]
        assert ahead[:2] == [None, None]
        assert len(ahead[2:]) == 3 and None not in ahead[2:]

    def test_no_token_is_older_than_one_update_and_the_share_of_the_older_ones_is_reported(
        self, bench: Bench
    ) -> None:
        class Continuing(GuessingSampler):
            """Half of each answer is sampled before the update that happens meanwhile, if one does."""

            async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
                steps = sampling.policy_steps
                began.append((sampling.step, steps))
                async for answer in super().sample(prompts_P, sampling):
                    rollout = answer.rollout
                    if steps is not None:
                        newer = min(steps + 1, sampling.step - 1)
                        rollout = replace(rollout, policy_steps_T=(steps, newer))
                    yield replace(answer, rollout=rollout)

        began: list[tuple[int, int | None]] = []
        advanced = {"group_size": 4, "off_policy_steps": 1, "continue_in_flight": True}
        asyncio.run(bench.run(sampler=Continuing(Skill()), advanced=advanced).train())

        training = [entry for entry in began if entry[0] > 0]
        assert training == [(1, 0), (2, 0), (3, 1), (4, 2)]
        assert all(steps is None for step, steps in began if step == 0), "validations are not continued"
        assert [one.get("stale_tokens_share") for one in bench.steps()] == [None, 0.0, 0.5, 0.5, 0.5]

    def test_the_next_batch_is_sampled_while_one_is_graded(self, bench: Bench) -> None:
        samples_the_second = asyncio.Event()

        class Noting(GuessingSampler):
            async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
                if sampling.step == 2:
                    samples_the_second.set()
                async for answer in super().sample(prompts_P, sampling):
                    yield answer

        class Waiting(ExactGrader):
            async def grade(self, sample: Sample, item: Item) -> Grade:
                if sampler.calls[-1].step:
                    async with asyncio.timeout(60):
                        await samples_the_second.wait()
                return await super().grade(sample, item)

        sampler = Noting(Skill())
        run = bench.run(Waiting(), sampler=sampler, advanced={"group_size": 4, "off_policy_steps": 2})

        asyncio.run(run.train())

        assert bench.job().status == "succeeded"

    @pytest.mark.parametrize("steps", [1, 3])
    def test_one_batch_is_sampled_at_a_time_and_validation_waits_for_all(
        self, bench: Bench, steps: int
    ) -> None:
        sampling_now, most = 0, 0

        class Counting(GuessingSampler):
            async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
                nonlocal sampling_now, most
                sampling_now += 1
                most = max(most, sampling_now)
                async for answer in super().sample(prompts_P, sampling):
                    await asyncio.sleep(0)
                    yield answer
                sampling_now -= 1

        off_policy = {"group_size": 4, "off_policy_steps": steps}
        run = bench.run(sampler=Counting(Skill()), eval_interval=1, advanced=off_policy)
        asyncio.run(run.train())

        assert most == 1
