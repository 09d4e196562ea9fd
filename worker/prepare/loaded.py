"""The policy of a run: loaded before its first answer, or in the background while a fleet samples the first ones."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from core import fingerprint
from core.jobs.hyperparameters import Resolved
from core.results.lineage import Parent
from worker.attempt import Attempt
from worker.checks.compatibility import ForwardVerdict
from worker.interfaces import Trainer
from worker.model.memory import later_if_memory_is_taken
from worker.model.meta_policy import unloaded_policy
from worker.model.parent import start_from, whole_weights
from worker.model.policy import Policy
from worker.prepare import teachers
from worker.prepare.model import shared_by
from worker.prepare.scorers import scores_here
from worker.prepare.task import PromptTask
from worker.prepare.teachers import TeacherModel
from worker.prepare.training_plan import TrainingPlan
from worker.recording.checkpoints import JobCheckpoints
from worker.recording.recorder import JobRecorder
from worker.sampling import Sampler
from worker.sampling.fleet import FleetConfig
from worker.sampling.vllm import VllmSampler
from worker.sharing.memory_request import MemoryRequest
from worker.training.distributed import LoadModel, RankTeacher, load_checked, loading
from worker.training.gradient import keep_memory
from worker.training.loading import LoadingTrainer, SamplerMeanwhile
from worker.training.offline import OfflineTrainer
from worker.training.rank_model import Model
from worker.training.teacher import TeacherPolicy
from worker.training.trainer import PeftTrainer

SomeTrainer = TypeVar("SomeTrainer", bound=PeftTrainer | OfflineTrainer)


@dataclass(frozen=True)
class LoadedPolicy:
    """The policy of a run whose weights are loaded before anything is sampled."""

    plan: TrainingPlan
    policy: Policy
    verdict: ForwardVerdict
    teaching: TeacherPolicy | None  # a teacher whose probabilities all ranks compute

    def report(self, recorder: JobRecorder) -> None:
        trained = self.policy.trained
        data = self.verdict.as_data(trained) | base_files(self.policy)
        recorder.inform(self.verdict.described(trained), data)

    def connect(
        self, sampler: Sampler, trainer_of: Callable[[Policy], PeftTrainer], recorder: JobRecorder
    ) -> tuple[Sampler, Trainer]:
        """The sampler and the trainer of the run."""
        return sampler, self.continued(trainer_of(self.policy))

    def continued(self, trainer: SomeTrainer, *also: Callable[[Path], None]) -> SomeTrainer:
        """The trainer, from the tuned model that the job trains further if it does. `also`: as `start_from`."""
        parent = self.plan.parent
        if parent is not None and start_from(parent, self.policy, self.plan.checkpoints, *also):
            trainer.start_from_policy()
        return trainer


def base_files(policy: Policy) -> dict[str, str]:
    """Which files the base model is, for the passports of the job: a hash of a folder's, or the revision of the hub."""
    if isinstance(policy.source, Path):
        found = fingerprint.of_copies(policy.source)
        return {"base_sampled_sha256": found} if found else {}
    revision = getattr(policy.causal.config, "_commit_hash", None)
    return {"base_revision": revision} if revision else {}


class BackgroundPolicy:
    """The policy of a run whose first answers a fleet samples, of the base model, while the weights load."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan = plan
        settings = plan.task.settings
        assert isinstance(settings, Resolved), "a fleet samples"
        self.policy: Policy = unloaded_policy(plan.job.model, plan.base.entry, plan.base.source, settings)

    def report(self, recorder: JobRecorder) -> None:
        """Nothing is known yet: `connect` reports it later."""

    def connect(
        self, sampler: Sampler, trainer_of: Callable[[Policy], PeftTrainer], recorder: JobRecorder
    ) -> tuple[Sampler, Trainer]:
        """As that of LoadedPolicy. The trainer waits for the weights."""
        assert isinstance(sampler, VllmSampler), "others need the loaded policy"

        def load() -> Trainer:
            # A job that shares its base is never loaded in the background.
            ask = MemoryRequest.of(self.plan.settings).make
            with later_if_memory_is_taken(self.plan.base.device, beside_others=False, ask=ask):
                loaded = load_policy(self.plan)
            loaded.report(recorder)
            sampler.use(loaded.policy)
            return trainer_of(loaded.policy)

        trainer = LoadingTrainer(load)
        return SamplerMeanwhile(sampler, trainer), trainer


def samples_while_loading(
    attempt: Attempt,
    fleet: FleetConfig | None,
    parent: Parent | None,
    checkpoints: JobCheckpoints,
    teacher: TeacherModel | None,
    *,
    has_judges: bool,
    has_episodes: bool,
) -> bool:
    """Whether the job's first answers are sampled and scored without the loaded policy: by the base model, in a fleet.

    A job that starts from an adapter or resumes has other first answers. One that shares its base does not load it.
    """
    starts_fresh = parent is None and checkpoints.is_empty
    alone = attempt.shared is None and not scores_here(teacher, has_judges=has_judges)
    return fleet is not None and starts_fresh and alone and not has_episodes


def start_of(plan: TrainingPlan) -> LoadedPolicy | BackgroundPolicy:
    """Load the policy, unless the first answers need none.

    Raises:
        UnsupportedModel: no forward pass has the log-probabilities of transformers.
        UserMistake: the files of a tuned model that the job starts from or learns from are gone.
    """
    early = samples_while_loading(
        plan.attempt,
        plan.fleet,
        plan.parent,
        plan.checkpoints,
        plan.teacher,
        has_judges=bool(plan.judges),
        has_episodes=isinstance(plan.task, PromptTask) and plan.task.episodes is not None,
    )
    return BackgroundPolicy(plan) if early else load_policy(plan)


def load_policy(plan: TrainingPlan) -> LoadedPolicy:
    """Load the model on all ranks, and find the forward pass whose log-probabilities are those of transformers.

    Raises: as `start_of`.
    """
    base, settings, resolved, memory = plan.base, plan.settings, plan.task.settings, plan.memory
    samples, release = isinstance(plan.task, PromptTask), release_of(plan)
    teacher = None if samples else plan.teacher  # one of sampled answers is loaded beside the policy
    teaching: TeacherPolicy | None = None
    with whole_weights(plan.parent, plan.checkpoints, resolved) as weights:
        model = Model(
            plan.job.model,
            base.entry,
            settings.model_cache,
            resolved,
            plan.job.seed,
            memory.checkpointed,
            sampled=samples and base.sampler == "transformers",
            weights=weights,
            shared=shared_by(plan.attempt, base),
        )
        order = LoadModel(
            model,
            base.device,
            settings.torch_threads,
            memory.token_budget,
            plan.task.response_schema,
            degree=memory.degree,
            teacher=on_ranks(teacher, plan),
            release=release,
        )
        with loading(plan.world, order):
            policy, verdict = load_checked(model, base.device, memory.degree, plan.world, plan.beat)
            if teacher is not None and teacher.server is None:
                teaching = teachers.load_teacher(
                    teacher, policy, resolved, plan.checkpoints, settings.model_cache, plan.beat
                )
            release()
    return LoadedPolicy(plan, policy, verdict, teaching)


def on_ranks(teacher: TeacherModel | None, plan: TrainingPlan) -> RankTeacher | None:
    """The teacher as the ranks above 0 load it. None: there is none, or only rank 0 calls its server."""
    if teacher is None or teacher.server is not None:
        return None
    second = teachers.second_model(teacher, plan.task.settings, plan.settings.model_cache)
    return RankTeacher(second, has_adapter=teacher.adapter is not None)


def release_of(plan: TrainingPlan) -> Callable[[], None]:
    """The function to call at the end of a step: vLLM wakes in the memory that PyTorch would keep for the next one."""
    return torch.cuda.empty_cache if plan.memory.sleeps else keep_memory
