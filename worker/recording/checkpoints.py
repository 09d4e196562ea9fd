"""Write checkpoints atomically, resume from the newest, and keep and name the best ones.

A checkpoint is a blob prefix with the adapter in PEFT format or a whole model, the trainer's state, and manifest.json,
which lists every file with its hash and is written last. A prefix without a manifest is not a checkpoint. Files that
only a run that resumes reads are deleted when the job has succeeded.
"""

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Select, delete, select
from sqlalchemy.orm import Session

from core.database import pages
from core.database.tables import Checkpoint, Job, Organization, RolloutPage, TunedModel
from core.jobs import events, lifecycle, usage
from core.results import lineage, model_aliases, tuned_models
from core.storage import manifests
from core.storage.disk import writing_to
from core.storage.manifests import EARLIER, MANIFEST, Damaged, is_trainers
from core.storage.store import BlobExists, check_not_empty, is_bad_sector
from worker.attempt import Attempt
from worker.interfaces import Savable
from worker.refusals import refusing_too_large
from worker.types import Rollback

log = logging.getLogger(__name__)

# Format of the manifest and its files, including trainer.pt. Raise it when older versions cannot resume from a new
# checkpoint, and only after a release that reads both: both versions run side by side during a rollout.
FORMAT = 1
KEEP_BEST = 3
# Key in the metrics that marks the checkpoint of a pause, which users may be serving.
_FOR_PAUSE = "made_for_pause"
# The same of the checkpoint at the end of an epoch, of a job that learns from the answers in its file.
_FOR_EPOCH = "end_of_epoch"
KEEP_EPOCHS = 3


class UnknownFormat(Exception):
    """The checkpoint was written by a later version of the code."""


class JobCheckpoints:
    """Reads and writes the checkpoints of one job on behalf of its current attempt."""

    def __init__(self, attempt: Attempt, scratch: Path) -> None:
        self.attempt = attempt
        self.blobs = attempt.blobs
        self.job = attempt.job
        self.scratch = scratch
        self._reading = MANIFEST  # the last requested file of a checkpoint

    def restore(self, trainer: Savable) -> int | None:
        """Verify every object against the manifest before loading any.

        Skips and deletes damaged checkpoints, with a warning that names the object. Deletes all records after the
        returned step, which will be repeated. Returns None if all checkpoints of a job that trains a tuned model
        further were damaged, and are deleted: the trainer has the base model then, because the tuned model is loaded
        only for a job without checkpoints.
        """
        damaged: list[tuple[Checkpoint, Damaged]] = []
        intact, is_exact = None, True
        for checkpoint in self._newest_first():
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
                try:
                    is_exact = self._fetch(checkpoint, Path(folder))
                except Damaged as damage:
                    log.warning("the checkpoint %s is damaged: %s", checkpoint.blob_prefix, damage)
                    damaged.append((checkpoint, damage))
                    continue
                trainer.load(Path(folder))
            intact = checkpoint
            break
        step = self.attempt.write(partial(self._resume, intact, damaged, is_exact))
        has_base = intact is None and bool(damaged) and self.job.parent is not None
        return None if has_base else step

    def _newest_first(self) -> Sequence[Checkpoint]:
        newest_first = _of_job(self.job.id).order_by(Checkpoint.step.desc())
        return self.attempt.read(lambda session: session.scalars(newest_first).all())

    def _fetch(self, checkpoint: Checkpoint, folder: Path) -> bool:
        """Download all files of a checkpoint, as `_download_to_resume`. Raises Damaged if one fails verification."""
        try:
            return self.attempt.retry(partial(self._download_to_resume, checkpoint.blob_prefix, folder))
        except OSError as cause:
            if not is_bad_sector(cause):
                raise
            raise Damaged(self._reading, unreadable=True) from cause

    def _resume(
        self,
        intact: Checkpoint | None,
        damaged: Sequence[tuple[Checkpoint, Damaged]],
        is_exact: bool,
        session: Session,
        job: Job,
    ) -> int:
        """Record that the job resumes from this checkpoint, or from its first step. Returns the step."""
        step = intact.step if intact else 0
        lifecycle.resumed_from(session, self.attempt.claim, step)
        for checkpoint, _ in damaged:
            # The repeated step is stored under the same number and name. The sweep removes the old objects.
            if (row := session.get(Checkpoint, checkpoint.seq)) is not None:
                tuned_models.delete_names_of(session, row.id)
                pages.delete_row(session, row, owner=row.job_id)
        if damaged:
            message, data = _described(damaged, step)
            events.append(session, job.id, message, level="warn", data=data)
        if intact:
            events.append(
                session, job.id, f"Resuming from the checkpoint of step {step}", data={"step": step}
            )
        if not is_exact:
            missing = f"The checkpoint's {EARLIER} is missing: answers in flight are sampled again with its own adapter"
            events.append(session, job.id, missing, level="warn", data={"step": step})
        # A crash between step 0 and the first checkpoint leaves step 0 done; it stays.
        events.discard_steps_after(session, job.id, step)
        session.execute(delete(RolloutPage).where(RolloutPage.job_id == job.id, RolloutPage.step > step))
        usage.settle_pending(session, job)
        usage.recount(session, job)
        return step

    def save(
        self,
        trainer: Savable,
        *,
        step: int,
        valid_reward: float | None,
        metrics: dict[str, Any],
        for_pause: bool = False,
        for_epoch: bool = False,
        is_last: bool = False,
    ) -> None:
        marks = [mark for mark, is_so in ((_FOR_PAUSE, for_pause), (_FOR_EPOCH, for_epoch)) if is_so]
        is_named = not is_last and (valid_reward is not None or bool(marks))
        marked = metrics | dict.fromkeys(marks, True)
        released = self.attempt.retry(lambda: self._save(trainer, step, valid_reward, marked, is_named))
        for old in released:  # after the commit: a row must not refer to deleted objects
            self.blobs.discard_prefix(f"{old}/")

    def _save(
        self,
        trainer: Savable,
        step: int,
        valid_reward: float | None,
        metrics: dict[str, Any],
        is_named: bool,
    ) -> list[str]:
        """Store the row unless it exists; return the prefixes of the checkpoints that it replaces."""
        prefix = f"{self.attempt.prefix}/checkpoints/step-{step:06d}"
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            trainer.save(Path(folder))
            self._upload(Path(folder), prefix, step)
        with lifecycle.fenced(self.attempt.database, self.attempt.claim) as (session, job):
            stored = session.scalar(_of_job(job.id).where(Checkpoint.step == step))
            if stored is not None:  # the connection broke after the commit
                return _retire(session, job)
            job.failures = 0  # progress resets the count of failures in a row
            checkpoint = Checkpoint(
                job_id=job.id,
                step=step,
                epoch=self.attempt.claim.epoch,
                blob_prefix=prefix,
                valid_reward=valid_reward,
                metrics=metrics,
            )
            session.add(checkpoint)
            session.flush()
            if is_named:
                name = f"{model_name(session, job)}:ckpt-step-{step}"
                _publish(session, job, checkpoint, name)
                events.append(session, job.id, f"Checkpoint created at step {step} with Snapshot ID: {name}")
            return _retire(session, job)

    def best(self) -> int | None:
        job = self.job.id
        measured = select(Checkpoint.step).where(
            Checkpoint.job_id == job, Checkpoint.valid_reward.is_not(None)
        )
        best = measured.order_by(Checkpoint.valid_reward.desc(), Checkpoint.step).limit(1)
        return self.attempt.read(lambda session: session.scalar(best))

    def steps(self) -> Sequence[int]:
        return [checkpoint.step for checkpoint in self._newest_first()]

    def roll_back(self, rollback: Rollback) -> bool:
        return self.attempt.write(partial(self._roll_back, rollback))

    def _roll_back(self, rollback: Rollback, session: Session, job: Job) -> bool:
        later = session.scalars(_of_job(job.id).where(Checkpoint.step > rollback.step)).all()
        in_use = model_aliases.checkpoints_in_use(session, job.id) | set(
            session.scalars(lineage.checkpoints_in_use())
        )
        if any(checkpoint.id in in_use for checkpoint in later):
            return False
        for checkpoint in later:  # the sweep removes their objects
            tuned_models.delete_names_of(session, checkpoint.id)
            pages.delete_row(session, checkpoint, owner=checkpoint.job_id)
        # An attempt trains with what the first one has resolved.
        job.resolved = {**(job.resolved or {}), **rollback.learning_rates}
        learning_rate = rollback.learning_rates["learning_rate"]
        target = f"checkpoint of step {rollback.step}, the last healthy one" if rollback.step else "start"
        events.append(
            session,
            job.id,
            f"The job continues from the {target}, with the learning rate {learning_rate:.3g}, {rollback.share} of the "
            f"one before. {rollback.evidence}",
            level="warn",
            data={
                "rule": rollback.rule,
                "continues_from_step": rollback.step,
                "learning_rate": learning_rate,
                **rollback.data,
            },
        )
        return True

    @property
    def is_empty(self) -> bool:
        """Whether the job has no checkpoint yet."""
        return not self._newest_first()

    def newest(self) -> int:
        return self._newest_first()[0].step

    def _upload(self, folder: Path, prefix: str, step: int) -> None:
        files: list[dict[str, Any]] = []
        resume_files: list[dict[str, Any]] = []
        for path in sorted(folder.iterdir()):
            info = self.blobs.put_file(f"{prefix}/{path.name}", path)
            listed = resume_files if path.name == EARLIER else files
            listed.append({"name": path.name, "bytes": info.size, "sha256": info.sha256})
        manifest = {
            "format": FORMAT,
            "job": self.job.id,
            "base_model": self.job.model,
            "step": step,
            "epoch": self.attempt.claim.epoch,
            "files": files,
        }
        if resume_files:
            manifest["resume_files"] = resume_files
        key, content = f"{prefix}/{MANIFEST}", json.dumps(manifest, indent=2).encode()
        try:
            self.blobs.put_bytes(key, content, if_absent=True)
        except BlobExists:
            # No other attempt writes under this prefix, so it was this one. The same manifest means that its
            # checkpoint is whole already; another one that these files have just been written over.
            if self.blobs.read(key) != content:
                raise

    def delete_resume_files(self) -> None:
        """Delete the files of all checkpoints that only a run that resumes reads."""
        keys = [f"{checkpoint.blob_prefix}/{EARLIER}" for checkpoint in self._newest_first()]
        self.blobs.discard(*keys)

    def _download_to_resume(self, prefix: str, folder: Path) -> bool:
        """As `download`, with the files that only a run that resumes reads. Returns whether none of them is missing."""
        self.download(prefix, folder)
        for file in manifests.read(self.blobs, prefix).resume_files:
            self._reading = file.name
            try:
                manifests.download(self.blobs, prefix, file, folder)
            except Damaged as damage:
                if damage.problem != "missing":
                    raise
                check_not_empty(self.blobs)
                return False
        return True

    def download(self, prefix: str, folder: Path) -> None:
        """Download all files of a checkpoint that stay. Raises Damaged if one is missing or does not match its hash."""
        self._download(prefix, folder, lambda name: False)

    def download_model(self, prefix: str, folder: Path) -> None:
        """As `download`, without the state of the trainer."""
        self._download(prefix, folder, is_trainers)

    def _download(self, prefix: str, folder: Path, without: Callable[[str], bool]) -> None:
        try:
            self._download_all(prefix, folder, without)
        except Damaged as damage:
            if damage.problem == "missing":
                check_not_empty(self.blobs)
            raise

    def _download_all(self, prefix: str, folder: Path, without: Callable[[str], bool]) -> None:
        self._reading = MANIFEST
        manifest = manifests.read(self.blobs, prefix)
        if manifest.format > FORMAT:
            raise UnknownFormat(
                f"The checkpoint {prefix} has format {manifest.format}, and this worker reads formats up to "
                f"{FORMAT}: run the job on workers of the version of regraft that wrote it, or of a later one."
            )
        files = [file for file in manifest.files if not without(file.name)]
        with refusing_too_large(), writing_to(folder, "TMPDIR", sum(file.bytes for file in files)):
            for file in files:
                self._reading = file.name
                manifests.download(self.blobs, prefix, file, folder)


def _described(damaged: Sequence[tuple[Checkpoint, Damaged]], step: int) -> tuple[str, dict[str, Any]]:
    """Return the warning about skipped checkpoints."""
    which = "; ".join(f"of step {one.step} ({one.id}): {damage}" for one, damage in damaged)
    what = "Checkpoint" if len(damaged) == 1 else "Checkpoints"
    if step:
        then = (
            f"The job resumes from step {step}, the newest valid checkpoint, and repeats the steps after it."
        )
    else:
        then = "No valid checkpoint is left: the job restarts from its first step."
    objects = [
        {"step": one.step, "checkpoint": one.id, "file": damage.file, "problem": damage.problem}
        for one, damage in damaged
    ]
    return f"{what} damaged: {which}. {then}", {"step": step, "damaged": objects}


def model_name(session: Session, job: Job) -> str:
    """Return ft:<base>:<organization>:<suffix>:<8 characters>, OpenAI's format.

    The 8 characters make it unique. The suffix is as the user sent it, with each run of other characters than letters,
    digits, _ and - replaced by one -, so that the name is one segment of a URL.
    """
    organization = session.get_one(Organization, job.organization_id)
    tail = hashlib.sha256(job.id.encode()).hexdigest()[:8]
    suffix = re.sub(r"[^A-Za-z0-9_-]+", "-", job.suffix or "").strip("-")
    return f"ft:{job.model}:{organization.name}:{suffix}:{tail}"


def publish(session: Session, job: Job, step: int) -> str:
    """Give the checkpoint of this step the job's own model name, and return it."""
    name = model_name(session, job)
    _publish(session, job, session.scalars(_of_job(job.id).where(Checkpoint.step == step)).one(), name)
    return name


def _publish(session: Session, job: Job, checkpoint: Checkpoint, name: str) -> None:
    session.add(
        TunedModel(
            name=name,
            project_id=job.project_id,
            job_id=job.id,
            checkpoint_id=checkpoint.id,
            base_model=job.model,
        )
    )


def _of_job(job_id: str) -> Select[Checkpoint]:
    return select(Checkpoint).where(Checkpoint.job_id == job_id)


def _retire(session: Session, job: Job) -> list[str]:
    """Delete the rows of checkpoints that are no longer needed; return their prefixes.

    Keeps the newest, the best, those of the last epochs, those at which an alias points or from which another job
    starts, and those of pauses until their names are deleted, so that a resumed job does not delete a model that was in
    use during the pause.
    """
    pages.keep_order(
        session, job.project_id
    )  # an alias that is being pointed at one of them comes before, or fails
    present: Sequence[Checkpoint] = session.scalars(_of_job(job.id)).all()
    newest = max(present, key=lambda one: one.step)
    measured = [one for one in present if one.valid_reward is not None]
    best = sorted(measured, key=lambda one: (-(one.valid_reward or 0.0), one.step))[:KEEP_BEST]
    named = set(session.scalars(select(TunedModel.checkpoint_id).where(TunedModel.job_id == job.id)))
    paused = [one for one in present if _FOR_PAUSE in one.metrics and one.id in named]
    epochs = sorted((one for one in present if _FOR_EPOCH in one.metrics), key=lambda one: -one.step)
    aliased = model_aliases.checkpoints_in_use(session, job.id)
    parents = set(session.scalars(lineage.checkpoints_in_use()))
    in_use = [one for one in present if one.id in aliased or one.id in parents]
    kept = [newest, *best, *paused, *in_use, *epochs[:KEEP_EPOCHS]]
    retired = [one for one in present if one not in kept]
    for one in retired:
        tuned_models.delete_names_of(session, one.id)
        pages.delete_row(session, one, owner=one.job_id)
    return [one.blob_prefix for one in retired]
