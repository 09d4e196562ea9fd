"""What the tokens of a run taught: planted answers, and whole runs on fakes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from core.jobs.hyperparameters import Resolved
from core.results import ledger
from core.results.ledger import Ledger
from graders.tools.episode import Episode
from graders.types import ErrorKind, Grade
from tests.fakes import ExactGrader, GuessingSampler, Skill, crash_at
from tests.present import present
from tests.worker.conftest import Bench
from tests.worker.test_training import asked
from worker.child import booked_at_the_end
from worker.clock import Clock
from worker.gpu_ratio import GpuSplit
from worker.recording.ledger import answer_tokens
from worker.rollout.experience import Rewards
from worker.run import RunOutcome
from worker.sampling import Answer, Sampling
from worker.sampling.weight_sync import WEIGHT_SYNC, WeightSync
from worker.training.contributions import GroupSignal, step_signals
from worker.types import AnswerSignal, Group, Prompt, Rollout, UpdateMetrics

TAKEN = UpdateMetrics(0.0, 4, 8, 0, 1.0, 0.0, None, 1.0, 0.0, learning_rate=0.1)
LENGTH = 3  # of every answer


def rollout(**fields: Any) -> Rollout:
    answer = Rollout(tuple(range(LENGTH)), (-0.5,) * LENGTH, "a", "stop")
    return replace(answer, **fields)


def group(*scores: float | None, **fields: Any) -> Group:
    """Answers with these scores; `fields` are those of the first one."""
    rollouts = (rollout(**fields), *(rollout() for _ in scores[1:]))
    grades = tuple(
        Grade(score) if score is not None else Grade(None, "no", ErrorKind.other_error) for score in scores
    )
    return Group(Prompt(1, (1,), {}), rollouts, grades)


def tokens_of(
    groups: Sequence[Group], resampled: Sequence[Group], update: UpdateMetrics, settings: Resolved
) -> dict[str, int]:
    return answer_tokens(groups, resampled, step_signals([*groups, *resampled], settings), update, settings)


def answers(
    *groups: Group,
    resampled: Sequence[Group] = (),
    update: UpdateMetrics = TAKEN,
    settings: Resolved | None = None,
) -> dict[str, int]:
    """The number of answers in each bucket that has some."""
    tokens = tokens_of(groups, resampled, update, settings or asked({}))
    every = [one for group in (*groups, *resampled) for one in group.rollouts_G]
    assert sum(tokens.values()) == sum(len(one.output_ids_T) for one in every)
    return {name.removesuffix("_tokens"): count // LENGTH for name, count in tokens.items() if count}


LOST = Episode((), (), "discarded", "trace_1", "HTTP 500")


def test_each_answer_has_the_bucket_of_what_it_taught() -> None:
    assert answers(group(1.0, 0.0)) == {"learned": 2}
    assert answers(group(1.0, 0.5, 0.0)) == {"learned": 2, "no_advantage": 1}
    assert answers(group(0.3, 0.3)) == {"zero_variance": 2}
    assert answers(group(1.0, 0.0, None)) == {"learned": 2, "ungraded": 1}
    assert answers(group(1.0, None)) == {"ungraded": 2}
    assert answers(group(None, 1.0, 0.0, episode=LOST)) == {"discarded_episodes": 1, "learned": 2}


def test_answers_to_resampled_prompts_count_apart_unless_they_taught() -> None:
    found = answers(
        group(0.0, 0.0), resampled=[group(1.0, 1.0), group(1.0, 0.0)], settings=asked({"resample_prompts": 4})
    )

    assert found == {"zero_variance": 2, "resampled": 2, "learned": 2}


def test_a_truncated_answer_is_lost_if_it_is_masked_and_its_group_has_signal() -> None:
    mixed = group(0.0, 1.0, 1.0, finish_reason="length")
    masks = asked({"overlong": "mask"})

    assert answers(mixed, settings=masks) == {"truncated": 1, "learned": 2}
    assert answers(mixed) == {"learned": 3}
    assert answers(group(1.0, 1.0, finish_reason="length"), settings=masks) == {"zero_variance": 2}


def test_a_penalty_that_pulls_to_the_reference_is_no_signal() -> None:
    assert answers(group(1.0, 1.0), settings=asked({"kl": 0.1})) == {"zero_variance": 2}


def test_an_objective_with_rewards_of_tokens_learns_from_equal_scores_too() -> None:
    assert answers(group(1.0, 1.0, None), settings=asked({"loss": "ppo"})) == {"learned": 2, "ungraded": 1}


def test_answers_with_a_teacher_need_no_score() -> None:
    teacher = (-0.1,) * LENGTH
    taught = replace(group(None, None), rollouts_G=(rollout(teacher_T=teacher),) * 2)

    assert answers(taught) == {"learned": 2}


def test_forced_tokens_count_apart() -> None:
    tokens = tokens_of([group(1.0, 0.0, forced=2, grammar_start=2)], [], TAKEN, asked({}))

    assert {name: count for name, count in tokens.items() if count} == {
        "learned_tokens": 2 * LENGTH - 2,
        "forced_tokens": 2,
    }


@pytest.mark.parametrize(
    ("lost", "changed"),
    [
        ({"trained_sequences": 0}, False),  # the sampler gate
        ({"skipped": True, "learning_rate": None}, False),
        ({"skipped": True}, True),  # another pass before it was taken
        ({"rejected_updates": 2, "update_kl": None, "unmeasured_updates": 0}, False),
        ({"rejected_updates": 1, "update_kl": 0.01, "unmeasured_updates": 0}, True),
        ({"rejected_updates": 1, "update_kl": None, "unmeasured_updates": 1}, True),
    ],
)
def test_an_update_that_changed_nothing_taught_nothing(lost: dict[str, Any], changed: bool) -> None:
    found = answers(group(1.0, 0.0), group(1.0, 1.0), update=replace(TAKEN, **lost))

    assert found == {"learned" if changed else "not_updated": 2, "zero_variance": 2}


@pytest.mark.parametrize(("share", "masked"), [(1.0, 6), (0.9, 5), (0.5, 3), (0.01, 0), (None, 0)])
def test_tokens_that_importance_masks_taught_nothing(share: float | None, masked: int) -> None:
    """Of the two answers with signal; those of a zero-variance group stay in its bucket."""
    groups = [group(1.0, 0.0), group(1.0, 1.0)]

    tokens = tokens_of(groups, [], replace(TAKEN, teaching_masked_fraction=share), asked({}))

    assert (tokens["masked_tokens"], tokens["learned_tokens"]) == (masked, 6 - masked)
    assert sum(tokens.values()) == 4 * LENGTH


def test_masked_tokens_are_counted_among_those_that_teach() -> None:
    """With a KL penalty the trainer also computes a zero-variance group, and masks none of its tokens here."""
    groups = [group(1.0, 0.0), group(1.0, 1.0)]
    update = replace(TAKEN, masked_fraction=0.5, teaching_masked_fraction=1.0)

    tokens = tokens_of(groups, [], update, asked({"kl": 0.1}))

    assert (tokens["learned_tokens"], tokens["masked_tokens"], tokens["zero_variance_tokens"]) == (0, 6, 6)


def test_all_reports_of_a_step_read_the_same_signals(bench: Bench) -> None:
    """The step's metrics, its ledger and the stored answers have those that `learn` has computed."""
    run, clock = bench.run(skill=Skill(0.5)), Clock()
    learned = asyncio.run(run.experience.learn(1, clock))
    nothing = [
        GroupSignal("all_one", [AnswerSignal(None, (), False) for _ in group.rollouts_G])
        for group in learned.groups_P
    ]

    altered = replace(learned, signals_P=nothing)
    data = run.experience.measure(1, clock, run.history, altered, None)
    [stored] = run.experience.details(data, run.history, altered, None).stored

    assert data.groups_all_one_share == 1.0
    assert data.zero_variance_tokens == data.sampled_tokens
    assert stored.signals_PG == [signal.answers_G for signal in nothing]


def of_job(bench: Bench) -> Ledger:
    with bench.database.read() as session:
        return ledger.of_job(session, bench.job())


def assert_is_usage(bench: Bench) -> None:
    """The ledger has exactly the tokens of the job's usage, and its GPU-seconds up to the rounding of each phase."""
    job, found = bench.job(), of_job(bench)
    assert sum(found.tokens.values()) == present(job.usage)["sampled_tokens"]
    assert sum(found.gpu_time.values()) / 1e6 == pytest.approx(job.gpu_seconds, abs=1e-5)


def test_the_ledger_of_a_run_is_its_usage(bench: Bench) -> None:
    bench.train(skill=Skill(0.3), advanced={"group_size": 4, "resample_prompts": 2})

    assert_is_usage(bench)
    assert {"learned", "zero_variance", "validation"} <= {
        bucket for bucket, time in of_job(bench).gpu_time.items() if time
    }


def test_steps_that_a_resumed_job_repeats_count_once(bench: Bench) -> None:
    run = bench.run()
    run.before_step = crash_at(4)
    with pytest.raises(RuntimeError):
        asyncio.run(run.train())
    before = of_job(bench)

    bench.again()
    bench.train()

    assert [one.step for one in before.steps] == [0, 1, 2, 3]
    assert [one.step for one in of_job(bench).steps] == [0, 1, 2, 3, 4]
    assert_is_usage(bench)


def test_what_was_sampled_ahead_in_vain_is_a_bucket_of_the_job(bench: Bench) -> None:
    async_steps = {"group_size": 4, "off_policy_steps": 2}
    attempt = bench.attempt()
    run = bench.run(attempt=attempt, stop_requested=lambda: True, advanced=async_steps)

    async def train() -> RunOutcome:
        with booked_at_the_end(attempt):
            outcome: RunOutcome = await run.train()
            return outcome

    assert asyncio.run(train()) is RunOutcome.INTERRUPTED
    bench.again()
    bench.train(advanced=async_steps)

    assert of_job(bench).tokens["unused"] > 0
    assert_is_usage(bench)


class SyncingSampler(GuessingSampler):
    """Three seconds until its engines have the weights, and one for each answer."""

    def __init__(self, skill: Skill) -> None:
        super().__init__(skill)
        self.now = 0.0

    async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        self.now += 3.0
        WEIGHT_SYNC.seconds += 3.0
        async for answer in super().sample(prompts_P, sampling):
            self.now += 1.0
            yield answer


def test_the_time_until_engines_have_the_weights_is_measured(bench: Bench) -> None:
    sampler = SyncingSampler(Skill())
    clock = Clock(clock=lambda: sampler.now)
    experience = bench.run(sampler=sampler).experience

    learned = asyncio.run(experience.learn(1, clock))
    data = experience.measure(1, clock, bench.run().history, learned, None)

    assert data.weight_sync_seconds == 3.0
    assert data.timing.step.sampling == 3.0 + 2 * 4
    assert ledger.of_step(data).gpu_time["weight_sync"] == 3_000_000


def test_weights_are_synchronized_once_a_session() -> None:
    now = [0.0]
    sync = WeightSync(clock=lambda: now[0])

    for begins, ends in ((1.0, 3.0), (10.0, 11.5)):
        now[0] = begins
        sync.begin()
        now[0] = ends
        sync.end()
        now[0] += 5.0
        sync.end()  # another engine has them too

    assert sync.seconds == 3.5


def test_the_gpus_that_sample_and_those_that_learn_are_recorded(bench: Bench) -> None:
    run = bench.run()
    run.experience.gpus, run.experience.split = 4, GpuSplit(1, 3)

    asyncio.run(run.train())

    assert {(step["sampling_gpus"], step["learning_gpus"]) for step in bench.steps()} == {(1, 3)}
    assert of_job(bench).gpu_time["idle"] > 0
    assert_is_usage(bench)


class LateRewards(Rewards):
    """Of a batch that was sampled for 2 seconds and graded for 5, of which the trainer waits for the last 4."""

    now = 0.0

    async def grade(
        self, prompts_P: Any, answers: Any, group_size: int, clock: Clock, use: Any = None
    ) -> Any:
        groups_P = await super().grade(prompts_P, answers, group_size, Clock())
        clock.add("sampling", 2.0)
        clock.add("grading", 5.0)
        self.now += 4.0
        return groups_P


def test_a_step_sampled_ahead_that_waits_for_its_grades_waits_for_the_grader(bench: Bench) -> None:
    experience = bench.run(advanced={"group_size": 4, "off_policy_steps": 1}).experience
    rewards = LateRewards(ExactGrader())
    experience.collector.rewards = rewards
    clock = Clock(clock=lambda: rewards.now)

    asyncio.run(experience.learn(1, clock))

    assert (clock.seconds["sampling"], clock.seconds["grading"]) == (0.0, 4.0)
