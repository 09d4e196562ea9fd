"""The experience of a job that samples nothing: the rows of its file, and the trainer of its loss."""

from typing import Any

from worker.model.reward_head import RewardHead
from worker.offline.experience import RowExperience
from worker.offline.stream import RowStream, sample
from worker.prepare.loaded import LoadedPolicy
from worker.prepare.row_task import RowTask
from worker.prepare.scorers import served_teacher
from worker.prepare.training_plan import TrainingPlan
from worker.recording.recorder import JobRecorder
from worker.rollout.served_teacher import ServedTeacher
from worker.training.offline import OfflineTrainer, RewardTrainer, SoftTargetTrainer
from worker.training.teacher import TeacherPolicy

# Rows whose answers tell the scale of a reward model's rewards.
SCALED_ROWS = 256


def row_experience(
    plan: TrainingPlan, task: RowTask, model: LoadedPolicy, recorder: JobRecorder
) -> RowExperience:
    resolved, seed = task.settings, plan.job.seed
    divided = sum(len(row.packs) > 1 for row in task.train)
    if plan.is_first and divided:
        recorder.inform(
            f"{divided} conversations are learned answer by answer: the chat template renders their earlier answers "
            "differently once others follow.",
            {"divided_rows": divided},
        )
    stream = RowStream(
        task.train, batch_size=resolved.batch_size, steps_per_epoch=resolved.steps_per_epoch, seed=seed
    )
    return RowExperience(
        settings=resolved,
        seed=seed,
        train_rows=stream,
        valid_rows=task.valid,
        trainer=trainer_of(plan, task, model),
        gpus=plan.gpus,
        teacher=None if plan.teacher is None else plan.teacher.name,
    )


def trainer_of(plan: TrainingPlan, task: RowTask, model: LoadedPolicy) -> OfflineTrainer:
    """The trainer of the job's loss, from the tuned model that the job trains further if it does."""
    policy, resolved = model.policy, task.settings
    computing: dict[str, Any] = {
        "token_budget": plan.memory.token_budget,
        "beat": plan.beat,
        "world": plan.world,
        "memory": plan.run_memory,
    }
    teacher = teacher_of(plan, model)
    if teacher is not None:
        return model.continued(SoftTargetTrainer(policy, teacher, resolved, **computing))
    if resolved.reward_kind is None:
        return model.continued(OfflineTrainer(policy, resolved, **computing))
    trainer = RewardTrainer(
        policy,
        RewardHead(policy.hidden_size, policy.device),
        resolved,
        scale=task.scale,
        measured=sample(task.train, SCALED_ROWS, seed=plan.job.seed, step=0),
        **computing,
    )
    has_head = plan.parent is not None and plan.parent.is_reward_model
    return model.continued(trainer, *([trainer.start_from_head] if has_head else []))


def teacher_of(plan: TrainingPlan, model: LoadedPolicy) -> TeacherPolicy | ServedTeacher | None:
    """The teacher whose probabilities the job learns."""
    teacher = plan.teacher
    if teacher is None or teacher.server is None:
        return model.teaching
    return served_teacher(teacher.name, teacher.server, plan.settings, plan.beat, plan.attempt.ledger)
