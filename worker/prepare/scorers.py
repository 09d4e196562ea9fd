"""Teachers and reward models that score the answers of a job: which there are, and how they are loaded."""

from dataclasses import replace
from functools import partial

from sqlalchemy.orm import Session

from core.database.tables import Job
from core.errors import InvalidRequest, ModelNotFound, NotFound, TunedModelNotFound
from core.jobs.distillation import teacher_of, top_of
from core.jobs.params import GRADER_PARAM, TEACHER_PARAM
from core.registry import Registry
from core.results.lineage import Parent, grading_model, start_of
from core.settings import Settings
from graders.build import reward_model_parts
from graders.judge.judges import JudgeModel
from graders.judge.usage import TokenLedger
from graders.spec import GraderSpec
from worker.attempt import Attempt
from worker.backends import open_backends, patience_of_run
from worker.heartbeat import Beat
from worker.model.policy import Policy, read_tokenizer, source_of
from worker.model.sizing import MemoryPlan
from worker.offline.templates import template_of
from worker.prepare import teachers
from worker.prepare.model import BaseModel
from worker.prepare.task import PromptTask
from worker.prepare.teachers import TeacherModel
from worker.recording.checkpoints import JobCheckpoints
from worker.refusals import UserMistake
from worker.rollout.distillation_rewards import TeacherRewards
from worker.rollout.reward_models import LoadedRewardModel, read_reward_model
from worker.rollout.served_teacher import RETRIES, ServedTeacher
from worker.training.teacher import PolicyTeacher


def teacher_model(attempt: Attempt, settings: Settings, beat: Beat) -> TeacherModel | None:
    """The teacher of a distillation job; None for other jobs. Waits for one on a server.

    Raises:
        UserMistake: there is none of this name any more, or it does not share the student's tokens.
        ModelNotFound: the operator's files have no model of this name, or not its base model.
        ModelUnavailable: its server does not answer.
    """
    job = attempt.job
    name = teacher_of(job)
    if name is None:
        return None
    registry = Registry.load(settings.models_file)
    try:
        base, parent = attempt.read(
            lambda session: start_of(session, job.project_id, name, registry, param=TEACHER_PARAM)
        )
    except NotFound as absent:
        server = open_backends(settings).models.get(name)
        if server is None and not isinstance(absent, ModelNotFound):
            raise UserMistake("model_not_available", str(absent), TEACHER_PARAM) from absent
        if server is None:
            raise
        student = registry.get(job.model)
        tokenizer = read_tokenizer(student, source_of(student, settings.model_cache))
        served = served_teacher(name, server, settings, beat, attempt.ledger)
        served.refuse_other_tokens(tokenizer)
        if (top_k := top_of(job)) is not None:
            served.refuse_top(tokenizer, top_k)
        return TeacherModel(name, None, None, server=server)
    except InvalidRequest as cause:
        raise UserMistake("model_not_available", str(cause), TEACHER_PARAM) from cause
    entries = {one: registry.get(one) for one in (base, job.model)}
    return teachers.inspect_teacher(name, base, parent, job.model, entries, settings.model_cache)


def served_teacher(
    name: str, server: JudgeModel, settings: Settings, beat: Beat, ledger: TokenLedger
) -> ServedTeacher:
    """One whose outages a run waits for as for those of database and blob store.

    A server that accepts requests in silence would hold the worker for hours if each retry waited for it, so such a
    request is sent once more only.
    """
    patience = patience_of_run(settings, beat, "teacher")
    patience = replace(patience, retries=RETRIES, retries_after_silence=1)
    return ServedTeacher(name, server, beat, patience, ledger)


def reward_models(attempt: Attempt, spec: GraderSpec | None, settings: Settings) -> list[Parent]:
    """The reward models that the grader reads.

    Raises:
        UserMistake: there is none of this name any more, or it is on another base model.
        ModelNotFound: the registry does not have its base model.
    """
    job = attempt.job
    registry = Registry.load(settings.models_file)
    found: dict[str, Parent] = {}
    for param, part in () if spec is None else reward_model_parts(spec, GRADER_PARAM):
        try:
            found[part.model] = attempt.read(
                partial(reward_model_of, registry=registry, job=job, name=part.model, param=f"{param}.model")
            )
        except (TunedModelNotFound, InvalidRequest) as cause:
            raise UserMistake("model_not_available", str(cause), f"{param}.model") from cause
    return list(found.values())


def reward_model_of(session: Session, *, registry: Registry, job: Job, name: str, param: str) -> Parent:
    return grading_model(session, job.project_id, name, job.model, registry, param=param)


def load_reward_model(
    parent: Parent, policy: Policy, base: BaseModel, checkpoints: JobCheckpoints
) -> LoadedRewardModel:
    """Read a reward model's weights, and the chat template that it learned with.

    Raises:
        UserMistake: the weights of the base model are divided over GPUs, or its files were deleted or do not fit.
    """
    if policy.is_sharded:
        raise UserMistake(
            "not_enough_memory",
            "The model does not fit on one GPU, and a model whose weights are divided over GPUs cannot have a reward "
            "model as a grader in this version.",
            "model",
        )
    tokenizer = read_tokenizer(
        base.entry,
        base.source,
        parent.settings["chat_template"],
        parent.settings["chat_template_kwargs"],
    )
    return read_reward_model(parent, policy, tokenizer, template_of(base.source, tokenizer), checkpoints)


def training_rewards(
    teacher: TeacherModel,
    policy: Policy,
    task: PromptTask,
    plan: MemoryPlan,
    checkpoints: JobCheckpoints,
    settings: Settings,
    beat: Beat,
    ledger: TokenLedger,
) -> TeacherRewards:
    """Load the teacher beside the policy, unless it is on a server.

    Raises:
        UserMistake: the student's weights are divided over GPUs and the teacher is not on a server, or the teacher's
            adapter is gone.
        UnsupportedModel: a second model whose forward pass is not right here.
    """
    if teacher.server is not None:
        served = served_teacher(teacher.name, teacher.server, settings, beat, ledger)
        return TeacherRewards(served, temperature=task.settings.temperature, paid=teacher.name)
    if policy.is_sharded:
        raise UserMistake(
            "not_enough_memory",
            "The model does not fit on one GPU, and a model whose weights are divided over GPUs cannot have a teacher "
            "in its memory: one on a server can teach it.",
            "model",
        )
    loaded = teachers.load_teacher(teacher, policy, task.settings, checkpoints, settings.model_cache, beat)
    own = PolicyTeacher(loaded.policy, loaded.teaching, plan.token_budget, beat)
    return TeacherRewards(own, temperature=task.settings.temperature)


def scores_here(teacher: TeacherModel | None, *, has_judges: bool) -> bool:
    """Whether the worker's own models score answers."""
    return has_judges or (teacher is not None and teacher.server is None)
