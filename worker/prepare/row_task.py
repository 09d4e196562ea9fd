"""The rows of a job that samples nothing, as tokens, and the hyperparameters that it trains with."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from core.jobs import methods, offline_hyperparameters
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.storage.offline_rows import reward_kind
from worker.attempt import Attempt
from worker.heartbeat import Beat
from worker.model import sizing
from worker.model.parent import continuing
from worker.model.reward_head import Scale
from worker.model.sizing import Workload
from worker.offline.rows import TokenizedRow, tokenize
from worker.offline.templates import template_of
from worker.prepare.model import BaseModel
from worker.prepare.task import start_of_adapter, with_tokenizer
from worker.prepare.teachers import TeacherModel
from worker.refusals import UserMistake
from worker.rollout.rows import Rows
from worker.types import Pack


@dataclass(frozen=True)
class RowTask:
    """The training and validation rows of a job, and the settings that it trains with."""

    settings: ResolvedOffline
    train: list[TokenizedRow]
    valid: list[TokenizedRow]
    workload: Workload
    scale: Scale | None  # of the rewards of a reward model; None: it is measured, or it is not one
    response_schema: str = ""  # nothing is sampled


def prepare_rows(
    attempt: Attempt, rows: Rows, base: BaseModel, teacher: TeacherModel | None, beat: Beat
) -> RowTask:
    """Resolve the hyperparameters and render the rows.

    Raises:
        UserMistake: a row is too long, or all scores of a reward model are equal.
        ChatTemplateFailed: the chat template does not render a row.
    """
    job = attempt.job
    kind = methods.variant(job.method, job.body)
    rewards = reward_kind(rows.train[0].item)
    resolved = offline_hyperparameters.resolve(
        kind,
        offline_hyperparameters.requested_hyperparameters(kind, job.body["hyperparameters"]),
        rows=len(rows.train),
        parameters=base.shape.parameters,
        reward_kind=rewards,
    )
    resolved = continuing(resolved, start_of_adapter(job, teacher))
    resolved = offline_hyperparameters.with_first_values(resolved, job.resolved)
    resolved, tokenizer = with_tokenizer(resolved, base, job)
    template = template_of(base.source, tokenizer)
    added = 0 if teacher is None else teacher.added_tokens
    tokens = partial(tokenize, kind, template=template, context=base.entry.context, added=added, beat=beat)
    train = tokens(rows.train, file=job.training_file, field="training_file")
    valid = tokens(rows.valid, file=job.validation_file or "", field="validation_file")
    scale = Scale.of_steps() if rewards == "steps" else None
    if resolved.reward_kind == "scores":
        scale, [train, valid] = standardized([train, valid])
    return RowTask(resolved, train, valid, workload_of(resolved, [*train, *valid]), scale)


def workload_of(settings: ResolvedOffline, rows: Sequence[TokenizedRow]) -> Workload:
    return sizing.workload(
        rank=settings.lora_rank,
        targets=settings.lora_targets,
        full=settings.train == "full",
        references=settings.reference_copies,
        prompt=max(row.longest for row in rows),
        completion=1,
        batch=1,
        group=1,
        valid_rows=0,
        eval_samples=1,
        undoes=settings.step_kl > 0,
    )


def standardized(files: Sequence[Sequence[TokenizedRow]]) -> tuple[Scale, list[list[TokenizedRow]]]:
    """The rows of both files with scores whose mean over the first is 0 and whose standard deviation is 1.

    Raises:
        UserMistake: all scores of the first file are equal.
    """
    scores = [
        score for row in files[0] for pack in row.packs for one in pack.sequences for score in one.scores
    ]
    mean, std = statistics.fmean(scores), statistics.pstdev(scores)
    if std == 0.0:
        same = "All answers have the same score: there is nothing to learn."
        raise UserMistake("invalid_value", same, "training_file")

    def changed(pack: Pack) -> Pack:
        return replace(
            pack,
            sequences=tuple(
                replace(one, scores=tuple((score - mean) / std for score in one.scores))
                for one in pack.sequences
            ),
        )

    return Scale.undoing(mean, std), [
        [replace(row, packs=tuple(map(changed, row.packs))) for row in rows] for rows in files
    ]
