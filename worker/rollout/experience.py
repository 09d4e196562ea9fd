"""The experience of a run that samples: answers of the policy, scored by a grader or by a teacher.

`Collector` samples and grades the groups of a step, and passes them to the trainer. There are three schedules. With
`overlap`, the trainer gets each group as soon as it is graded, while others are still being sampled. With
`off_policy_steps`, the groups of as many later steps are sampled during an update. Otherwise the trainer gets all
groups at once.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from core.jobs.alarm_sizes import ALARMS
from core.jobs.hyperparameters import Resolved
from core.step_metrics import StepMetrics
from core.thresholds import Thresholds
from graders.run import grade_one
from graders.spec import GraderSpec, LabelModelSpec, MathSpec, ScoreModelSpec, parts_of
from graders.types import ErrorKind, Grade, Grader
from graders.weighted_sum import weights_of_parts
from worker.clock import Clock
from worker.device_work import DEVICE_WORK
from worker.gpu_ratio import GpuSplit, RatioMeasurement
from worker.history import History, Steps
from worker.interfaces import Checkpoints, Recorder, Scorer, StepDetails, Trainer
from worker.model.tool_calls import CallReader
from worker.progress import PROGRESS
from worker.recording import alerts, delivery, divergence, metrics, monitors, shadow, stopping
from worker.recording.exploits import pause_of
from worker.recording.rollback import rollback
from worker.recording.verdict import row_scores
from worker.refusals import first_error
from worker.rollout.anchors import JudgeAnchors
from worker.rollout.prompts import PromptStream
from worker.rollout.samples import sample_of
from worker.rollout.shadow import Shadow
from worker.sampled_tokens import SampledTokens
from worker.sampling import Answer, Sampler, Sampling
from worker.sampling.weight_sync import WEIGHT_SYNC
from worker.training import contributions
from worker.training.contributions import GroupSignal
from worker.training.steps import with_steps_only
from worker.types import (
    Finding,
    GradedStep,
    GraderPart,
    Group,
    Pause,
    Prompt,
    Rollback,
    Rollout,
    Schedule,
    Stop,
    UpdateMetrics,
)

if TYPE_CHECKING:
    from worker.rollout.reward_models import AnswerScores, Scores


@dataclass
class AsyncBatch:
    """A batch that is sampled before its step."""

    clock: Clock = field(default_factory=Clock)
    waited: float = 0.0  # seconds until the batches before it were sampled, which `clock` counts too
    groups: asyncio.Task[list[Group]] = field(init=False)

    @property
    def sampling_seconds(self) -> float:
        return self.clock.seconds["sampling"] - self.waited


@dataclass
class Collector:
    """Collects for one run. `seed` is the job's."""

    settings: Resolved
    seed: int
    prompts: PromptStream
    sampler: Sampler
    rewards: Scorer
    trainer: Trainer
    response_schema: str = ""  # response schema of the answers
    sampled: SampledTokens = field(default_factory=SampledTokens)
    # With `off_policy_steps`: seconds in which the step's answers were sampled, while the trainer could learn from
    # those of the steps before. None: nothing else was done meanwhile.
    ahead_seconds: float | None = field(default=None, init=False)
    # The part of the step's sampling in which engines got the weights. None: the step was sampled ahead.
    weight_sync_seconds: float | None = field(default=None, init=False)
    _ahead: dict[int, AsyncBatch] = field(default_factory=dict, init=False)  # by step
    # Of the batches at the sampler, in the order of their steps. A batch is graded while the next one is sampled.
    _sampling_turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def collect(self, step: int, clock: Clock) -> tuple[list[Group], list[Group]]:
        """Return the step's own groups and the resampled ones, after the trainer has received all of them."""
        if self.settings.off_policy_steps:
            return await self._from_before(step, clock), []
        synced = WEIGHT_SYNC.seconds
        groups_P = await self._learn(self.prompts.batch(step), step, clock)
        resampled_P = await self._resample_zero_variance(step, groups_P, clock)
        self.weight_sync_seconds = WEIGHT_SYNC.seconds - synced
        return groups_P, resampled_P

    async def sampler_is_free(self, clock: Clock) -> None:
        """Wait until sampling ahead has completed, and keep its groups."""
        if self._ahead:
            with clock("sampling"):
                await asyncio.wait([batch.groups for batch in self._ahead.values()])

    async def _learn(self, prompts_P: Sequence[Prompt], step: int, clock: Clock) -> list[Group]:
        if not self.settings.overlap:
            return await self._hand_over(await self._sample(prompts_P, step, clock), clock)

        def hand_over(group: Group) -> None:
            self.trainer.add(self._as_trained(group))

        sampling = self.sampling(step)
        answers = self._counted(self.sampler.sample(prompts_P, sampling))
        groups_P = await self.rewards.grade(prompts_P, answers, sampling.group_size, clock, hand_over)
        return [self._as_trained(group) for group in groups_P]

    async def _from_before(self, step: int, clock: Clock) -> list[Group]:
        """Return the groups of the step, and start to sample the last step that may be ahead of it.

        Step s is sampled with the policy after step s - 1 - `off_policy_steps`, regardless of timing and restarts.
        """
        most = self.settings.off_policy_steps
        is_first = not self._ahead  # of the run, or after a restart
        if is_first:
            for later in range(most):
                self._begin(step + later, learned=step - 1, steps_ago=most - later)
        before = clock.seconds.get("sampling", 0.0)
        with clock("sampling"):  # the remaining time
            groups_P = await self._ahead[step].groups
        batch = self._ahead.pop(step)
        graded = min(batch.clock.seconds.get("grading", 0.0), clock.seconds["sampling"] - before)
        clock.add("sampling", -graded)  # a batch is graded in the last part of its time
        clock.add("grading", graded)
        self.ahead_seconds = None if is_first else batch.sampling_seconds
        self._begin(step + most, learned=step - 1, steps_ago=0)
        return await self._hand_over(groups_P, clock)

    def _begin(self, step: int, *, learned: int, steps_ago: int) -> None:
        """Have the batch of a step sampled, with the policy of `steps_ago` steps before `learned`."""
        if step > self.settings.total_steps:
            return
        batch, prompts_P = AsyncBatch(), self.prompts.batch(step)
        with self.trainer.policy_before(steps_ago) as really_ago:
            policy_step, sampling = learned - really_ago, self.sampling(step)
            if self.settings.continue_in_flight:
                sampling = replace(sampling, policy_steps=policy_step)
            # `sample` reads the policy when it is called.
            answers = self._counted(self.sampler.sample(prompts_P, sampling))
        in_turn = self._in_turn(answers, batch, policy_step)
        grading = self.rewards.grade(prompts_P, in_turn, sampling.group_size, batch.clock)
        batch.groups = asyncio.create_task(grading)
        self._ahead[step] = batch

    async def _in_turn(
        self, answers: AsyncIterator[Answer], batch: AsyncBatch, policy_step: int
    ) -> AsyncIterator[Answer]:
        """The answers, once those of the batches before it are sampled."""
        began = time.perf_counter()
        async with self._sampling_turn:
            batch.waited = time.perf_counter() - began
            async for answer in answers:
                yield replace(answer, rollout=replace(answer.rollout, policy_step=policy_step))

    async def _counted(self, answers: AsyncIterator[Answer]) -> AsyncIterator[Answer]:
        """The answers, whose tokens count as sampled, whatever becomes of them."""
        async for answer in answers:
            self.sampled.add(len(answer.rollout.output_ids_T))
            yield answer

    async def _sample(self, prompts_P: Sequence[Prompt], step: int, clock: Clock) -> list[Group]:
        sampling = self.sampling(step)
        answers = self._counted(self.sampler.sample(prompts_P, sampling))
        return await self.rewards.grade(prompts_P, answers, sampling.group_size, clock)

    async def _hand_over(self, groups_P: Sequence[Group], clock: Clock) -> list[Group]:
        trained_P = [self._as_trained(group) for group in groups_P]
        with clock("training"):
            for group in trained_P:
                await DEVICE_WORK.run(self.trainer.add, group)
        return trained_P

    async def _resample_zero_variance(
        self, step: int, groups_P: Sequence[Group], clock: Clock
    ) -> list[Group]:
        """Replace zero-variance groups by DAPO's dynamic sampling (section 3.2), within a budget."""
        resampled_P: list[Group] = []
        silent = sum(not self._has_signal(group) for group in groups_P)
        if not self.settings.resample_prompts or not silent:
            return resampled_P
        # In a thread, because the shuffle of a large file would block the event loop.
        others = (await asyncio.to_thread(self.prompts.others, step))[: self.settings.resample_prompts]
        while others and silent:
            learned_P = await self._learn(others[:silent], step, clock)
            others = others[silent:]
            silent -= sum(self._has_signal(group) for group in learned_P)
            resampled_P += learned_P
        return resampled_P

    def _has_signal(self, group: Group) -> bool:
        return contributions.signal(group, self.settings) == "mixed"

    def _as_trained(self, group: Group) -> Group:
        return with_steps_only(group) if self.settings.supervision == "process" else group

    def sampling(self, step: int) -> Sampling:
        settings = self.settings
        return Sampling(
            group_size=settings.group_size,
            temperature=settings.temperature,
            max_completion_tokens=settings.max_completion_tokens,
            job_seed=self.seed,
            step=step,
            response_schema=self.response_schema,
            thinking_budget=settings.thinking_budget,
            batch=f"train/{step}",
        )


@dataclass(frozen=True)
class RolloutBatch:
    """The groups that a step learned from, and its update."""

    groups_P: Sequence[Group]  # of the step's own prompts
    resampled_P: Sequence[Group]  # in place of zero-variance groups
    signals_P: Sequence[GroupSignal]  # of `all_P`
    update: UpdateMetrics

    @property
    def all_P(self) -> list[Group]:
        return [*self.groups_P, *self.resampled_P]


@dataclass
class RolloutExperience:
    """Implements Experience, of which a validation is the graded groups of the validation file."""

    settings: Resolved
    seed: int
    graders: Sequence[GraderPart]  # by name in the metrics; none if a teacher scores the answers
    train_prompts: PromptStream
    valid_prompts: Sequence[Prompt]
    sampler: Sampler
    rewards: Scorer
    trainer: Trainer
    # The job fails when more than half of the grades of this many steps in a row do.
    failing_steps: int = 3
    response_schema: str = ""  # the schema that answers are JSON of (core/response_format.py)
    gpus: int = 1  # GPU-seconds in each second of this run
    thresholds: Thresholds = field(default_factory=Thresholds)  # of the warnings
    split: GpuSplit | None = None  # if some GPUs sample while others learn
    ratio: RatioMeasurement | None = None  # if some GPUs sample while others learn
    sampled: SampledTokens = field(default_factory=SampledTokens)  # of the attempt
    shadow: Shadow | None = None  # scores validations beside the grader
    anchors: JudgeAnchors | None = None  # if the grader has a judge
    drift: Mapping[str, float | None] = field(default_factory=dict, init=False)  # of the newest validation
    collector: Collector = field(init=False)

    def __post_init__(self) -> None:
        self.collector = Collector(
            self.settings,
            self.seed,
            self.train_prompts,
            self.sampler,
            self.rewards,
            self.trainer,
            self.response_schema,
            self.sampled,
        )

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.settings.total_steps, self.settings.eval_interval)

    async def learn(self, step: int, clock: Clock) -> RolloutBatch:
        """Sample and grade the groups of the step, and update the policy with them."""
        groups_P, resampled_P = await self.collector.collect(step, clock)
        with clock("training"), PROGRESS.phase("training"):
            update = await DEVICE_WORK.run(self.trainer.step)
        signals_P = contributions.step_signals([*groups_P, *resampled_P], self.settings)
        return RolloutBatch(groups_P, resampled_P, signals_P, update)

    async def validate(self, step: int, clock: Clock) -> list[Group]:
        await self.collector.sampler_is_free(clock)
        settings = self.settings
        sampling = Sampling(
            group_size=settings.eval_samples,
            temperature=settings.eval_temperature,
            max_completion_tokens=settings.max_completion_tokens,
            # The same numbers are drawn every time, so that its curve shows the policy and not the dice.
            job_seed=self.seed + 1,
            step=0,
            response_schema=self.response_schema,
            thinking_budget=settings.thinking_budget,
            batch=f"valid/{step}",
        )
        answers = self.sampler.sample(self.valid_prompts, sampling)
        with clock("eval"):
            groups_P = await self.rewards.grade(self.valid_prompts, answers, sampling.group_size, Clock())
            if self.anchors is not None:
                self.drift = await self.anchors.drift(groups_P)
            return groups_P if self.shadow is None else await self.shadow.grade(groups_P)

    def measure(
        self,
        step: int,
        clock: Clock,
        history: History,
        learned: RolloutBatch | None,
        validated: Sequence[Group] | None,
    ) -> StepMetrics:
        return metrics.of_step(
            step=step,
            total_steps=self.settings.total_steps,
            graders=self.graders,
            settings=self.settings,
            train_P=[] if learned is None else learned.groups_P,
            resampled_P=[] if learned is None else learned.resampled_P,
            signals_P=[] if learned is None else learned.signals_P,
            valid_P=validated,
            update=None if learned is None else learned.update,
            seconds=clock.seconds,
            ahead_seconds=None if learned is None else self.collector.ahead_seconds,
            weight_sync_seconds=None if learned is None else self.collector.weight_sync_seconds,
            gpus=self.gpus,
            gpu_split=self.split,
            base_scores=history.base_scores,
            base_shadow_scores=history.base_shadow_scores,
            best_scores=history.best_scores,
            judge_drift={} if validated is None else self.drift,
            pass_score=self.settings.eval_pass_score,
        )

    def reason_to_stop(self, steps: Steps) -> Stop | None:
        return stopping.reason_to_stop(steps, self.settings)

    def rollback(self, history: History, checkpoints: Checkpoints) -> Rollback | None:
        return rollback(history, checkpoints.steps, self.settings, self.thresholds)

    def details(
        self,
        data: StepMetrics,
        history: History,
        learned: RolloutBatch | None,
        validated: Sequence[Group] | None,
    ) -> StepDetails:
        stored: list[GradedStep] = []
        if learned is not None:
            own, tokens = len(learned.groups_P), learned.update.tokens
            signals_PG = [signal.answers_G for signal in learned.signals_P]
            stored.append(GradedStep("train", learned.all_P, signals_PG, own=own, tokens=tokens))
        if validated is not None:
            stored.append(GradedStep("valid", validated))
        found = monitors.check(history.with_newest(data), self.thresholds, history.warned)
        if learned is not None:
            found += monitors.alike_rewards(self._compared_rewards(learned.groups_P), history.warned)
        pause = self._pause(found, [] if learned is None else learned.groups_P, validated or [])
        if validated is None:
            return StepDetails(stored, findings=found, alarm=pause)
        return StepDetails(stored, row_scores(validated), shadow.row_scores(validated), found, pause)

    def _pause(
        self, found: Sequence[Finding], train_P: Sequence[Group], valid_P: Sequence[Group]
    ) -> Pause | None:
        """The pause for the first alarm among the findings, if the job asks for one."""
        alarm = next((one for one in found if one.rule in ALARMS), None)
        if alarm is None or self.settings.on_alarm != "pause":
            return None
        return pause_of(alarm, train_P, valid_P)

    def _compared_rewards(self, train_P: Sequence[Group]) -> list[Sequence[float | None]]:
        """The rewards that the loss compares with each other, by group; none if it compares those of all groups."""
        if self.settings.has_token_rewards:
            return []
        return [
            contributions.compared_rewards(group, self.settings) for group in train_P if not group.has_teacher
        ]

    def check(
        self,
        history: History,
        recorder: Recorder,
        clock: Clock,
        learned: RolloutBatch | None,
        validated: Sequence[Group] | None,
    ) -> None:
        groups_P = list(validated or [])
        if learned is None:
            alerts.require_grades(groups_P)
        else:
            data = history.steps[-1]
            alerts.report(
                learned.groups_P,
                learned.resampled_P,
                learned.signals_P,
                history,
                recorder,
                self.settings,
                self.failing_steps,
            )
            alerts.require_signal(data, recorder, self.settings)
            alerts.report_ratio(self.ratio, data, clock.seconds["training"], recorder)
            groups_P = [*learned.all_P, *groups_P]
        divergence.check_answers(rollout for group in groups_P for rollout in group.rollouts_G)
        divergence.check_updates(history.steps, self.settings.total_steps)

    async def conclude(self, history: History, recorder: Recorder, checkpoints: Checkpoints) -> int:
        best = delivery.best_checkpoint(checkpoints, recorder, history, self.settings, self.thresholds)
        if self.settings.off_policy_steps:
            checkpoints.delete_resume_files()
        return best


class Rewards:
    """Implements Scorer: grades answers with the job's grader as they are sampled.

    A failed grade is None with a reason, never 0. An ungraded answer has no reward, not a reward of 0.
    """

    def __init__(
        self,
        grader: Grader,
        *,
        concurrency: int = 64,
        parse_json: bool = False,
        models: "AnswerScores | None" = None,
        call_reader: CallReader | None = None,
    ) -> None:
        """`concurrency` limits grades in flight, of all calls of `grade` together. A sandbox, a judge or an endpoint
        may have its own lower limit.

        `parse_json` also gives graders the answer as `sample.output_json`. `models` are the reward models that the
        grader reads; they score the answers when all of them are there, because they may share the policy's weights.
        `call_reader` reads the calls in the answers to rows with tools.

        There is no deadline here, because it would include queueing; each grader that can hang has its own.
        """
        self.grader = grader
        self._slots = asyncio.Semaphore(concurrency)
        self.parse_json = parse_json
        self.models = models
        self.call_reader = call_reader

    async def grade(
        self,
        prompts_P: Sequence[Prompt],
        answers: AsyncIterator[Answer],
        group_size: int,
        clock: Clock,
        use: Callable[[Group], None] | None = None,
    ) -> list[Group]:
        """Grade while other answers are sampled: the clock's "grading" is only the time beyond that, and its "training"
        the time of `use` beyond both.

        Groups are used in the order in which they completed sampling, so that a run is bit-reproducible.
        """
        scores: dict[tuple[int, int], Scores] = {}
        if self.models is not None:
            answers, scores = await self._scored(self.models, prompts_P, answers, clock)
        grading_P: list[dict[int, tuple[Rollout, asyncio.Task[Grade]]]] = [{} for _ in prompts_P]
        sampled: asyncio.Queue[int | None] = asyncio.Queue()
        groups: dict[int, Group] = {}

        async def read(tasks: asyncio.TaskGroup) -> None:
            async for answer in answers:
                of_models = scores.get((answer.prompt, answer.member), {})
                rollout = self._parsed(prompts_P[answer.prompt], answer.rollout)
                task = tasks.create_task(self._grade(prompts_P[answer.prompt], rollout, of_models))
                grading_P[answer.prompt][answer.member] = rollout, task
                if len(grading_P[answer.prompt]) == group_size:
                    sampled.put_nowait(answer.prompt)
            sampled.put_nowait(None)

        async def put_together() -> None:
            while (place := await sampled.get()) is not None:
                members = [grading_P[place][member] for member in range(group_size)]
                grades_G = [await task for _, task in members]
                rollouts_G = tuple(rollout for rollout, _ in members)
                groups[place] = Group(prompts_P[place], rollouts_G, tuple(grades_G))
                if use is not None:
                    await DEVICE_WORK.run(use, groups[place])

        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(read(tasks))
                putting = tasks.create_task(put_together())
                with clock("sampling"):
                    await reading
                with clock("grading"):
                    await asyncio.gather(*(task for grading in grading_P for _, task in grading.values()))
                with clock("training"):
                    await putting
        except BaseExceptionGroup as several:
            raise first_error(several) from None  # a Refusal of the sampler fails the job by its own name
        return [groups[place] for place in range(len(prompts_P))]

    @staticmethod
    async def _scored(
        models: "AnswerScores", prompts_P: Sequence[Prompt], answers: AsyncIterator[Answer], clock: Clock
    ) -> "tuple[AsyncIterator[Answer], dict[tuple[int, int], Scores]]":
        """All answers, and the scores of the reward models by prompt and member."""
        with clock("sampling"):
            sampled = [answer async for answer in answers]
        with clock("grading"):
            texts = [(prompts_P[answer.prompt], [answer.rollout.text]) for answer in sampled]
            scores_PG = await models.score(texts)

        async def replayed() -> AsyncIterator[Answer]:
            for answer in sampled:
                yield answer

        scores = zip(sampled, scores_PG, strict=True)
        return replayed(), {(answer.prompt, answer.member): one for answer, [one] in scores}

    def _parsed(self, prompt: Prompt, rollout: Rollout) -> Rollout:
        if self.call_reader is None or rollout.episode is not None:
            return rollout
        read = self.call_reader.parsed(rollout.last_call, prompt.item)
        return replace(rollout, parsed=read.parsed) if rollout.nodes else read

    async def _grade(self, prompt: Prompt, rollout: Rollout, of_models: "Scores") -> Grade:
        if rollout.episode is not None and rollout.is_discarded:
            return Grade(None, f"the episode was discarded: {rollout.episode.problem}", ErrorKind.other_error)
        if rollout.episode is not None and rollout.episode.reward is not None:
            return Grade(rollout.episode.reward)
        async with self._slots:
            sample = sample_of(rollout, parse_json=self.parse_json, model_scores=of_models)
            return await grade_one(self.grader, sample, prompt.item)


def grader_parts(spec: GraderSpec | None) -> tuple[GraderPart, ...]:
    """Those inside a multi or a select, or the only one. Empty for None: a teacher scores the answers."""
    if spec is None:
        return ()
    weights = weights_of_parts(spec)
    return tuple(
        GraderPart(
            key,
            part.name,
            part.type,
            part.model if isinstance(part, ScoreModelSpec | LabelModelSpec) else None,
            _compares_numbers(part),
            None if key is None else weights.get(key),
        )
        for key, part in parts_of(spec).items() or [(None, spec)]
    )


def _compares_numbers(spec: GraderSpec) -> bool:
    return isinstance(spec, MathSpec) or any(map(_compares_numbers, parts_of(spec).values()))
