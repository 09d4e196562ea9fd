"""Checkpoints: written whole or not at all, resumed from the newest, the best ones kept and named.

A checkpoint is a blob prefix with the adapter in PEFT format, the trainer's state, and manifest.json, which
lists every file with its hash and is written last: without it the prefix is litter, not a checkpoint.
"""

import errno
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Select, delete, select
from sqlalchemy.orm import Session

from core import events, jobs, manifests, pages, tuned, usage
from core.blobs import BlobExists, BlobStore, check_not_empty
from core.db import Database
from core.jobs import Claim
from core.manifests import MANIFEST, Damaged
from core.models import Checkpoint, Job, Organization, RolloutPage, TunedModel
from worker.patience import Patience

log = logging.getLogger(__name__)

# Of the manifest and the files it lists, trainer.pt included. Raise it when an older version could not go on from what
# this one writes, and not before a release that reads both is out: two versions take turns during a rollout.
FORMAT = 1
KEPT_BEST = 3
# Marks, among its metrics, a checkpoint that somebody may be using since a pause.
_FOR_PAUSE = "made_for_pause"


class UnknownFormat(Exception):
    """The checkpoint was written by a later version of the code."""


class Savable(Protocol):
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


class Checkpoints:
    """The checkpoints of one job, as its present attempt may write them."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        claim: Claim,
        job: Job,
        scratch: Path,
        patience: Patience,
    ) -> None:
        self.database = database
        self.blobs = blobs
        self.claim = claim
        self.job = job
        self.scratch = scratch
        self.patience = patience
        self._reading = MANIFEST  # the file of a checkpoint that was asked for last

    def restore(self, trainer: Savable) -> int:
        """Load the newest whole checkpoint into the trainer and return its step; 0 when there is none.

        Every object of a checkpoint is checked against the manifest before anything is loaded. Damaged checkpoints
        are passed over and withdrawn, with a warning that names the object. Whatever was recorded beyond the returned
        step is forgotten: it will be done again.

        Raises:
            StoreEmpty: the store has no blobs at all. Nothing was loaded or forgotten.
            UnknownFormat: this version cannot read it. Nothing was loaded or forgotten.
            InvalidModel: its files are as they were stored, and do not fit the model. Nothing was forgotten.
        """
        damaged: list[tuple[Checkpoint, Damaged]] = []
        whole = None
        for checkpoint in self.patience(self._newest_first):
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
                try:
                    self._fetch(checkpoint, Path(folder))
                except Damaged as damage:
                    log.warning("the checkpoint %s is damaged: %s", checkpoint.blob_prefix, damage)
                    damaged.append((checkpoint, damage))
                    continue
                trainer.load(Path(folder))
            whole = checkpoint
            break
        return self.patience(partial(self._resume, whole, damaged))

    def _newest_first(self) -> Sequence[Checkpoint]:
        with self.database.read() as session:
            return session.scalars(_of_job(self.job.id).order_by(Checkpoint.step.desc())).all()

    def _fetch(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Download all files of a checkpoint. Raise Damaged unless each is what was stored."""
        prefix = checkpoint.blob_prefix
        try:
            self.patience(partial(self._download, prefix, folder))
        except OSError as cause:
            # A disk that cannot read a sector says so for ever. Anything else that lasts is not about this checkpoint.
            if cause.errno != errno.EIO:
                raise
            raise Damaged(self._reading, unreadable=True) from cause

    def _resume(self, whole: Checkpoint | None, damaged: Sequence[tuple[Checkpoint, Damaged]]) -> int:
        """Have the job go on from the whole checkpoint, or from its first step."""
        step = whole.step if whole else 0
        with jobs.fenced(self.database, self.claim) as (session, job):
            jobs.resumed_from(session, self.claim, step)
            for checkpoint, _ in damaged:
                # Its step is done again and stored under the same number and name. The sweep removes the objects.
                if (row := session.get(Checkpoint, checkpoint.seq)) is not None:
                    tuned.delete_names_of(session, row.id)
                    pages.delete_row(session, row, owner=row.job_id)
            if damaged:
                message, data = _described(damaged, step)
                events.append(session, job.id, message, level="warn", data=data)
            if whole:
                events.append(
                    session, job.id, f"Resuming from the checkpoint of step {step}", data={"step": step}
                )
            # A crash between step 0 and the first checkpoint leaves step 0 done; it stays.
            events.discard_steps_after(session, job.id, step)
            session.execute(delete(RolloutPage).where(RolloutPage.job_id == job.id, RolloutPage.step > step))
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
    ) -> None:
        """Store the trainer's state as the checkpoint of this step, and let go of those it replaces.

        With a validation reward the checkpoint is a model of its own, `…:ckpt-step-N`, and so is the one that a
        pause leaves behind; any other serves resuming only.
        """
        released = self.patience(lambda: self._save(trainer, step, valid_reward, metrics, for_pause))
        for old in released:  # after the commit: a row must never point at what is gone
            self.patience(partial(self.blobs.delete_prefix, f"{old}/"))

    def _save(
        self,
        trainer: Savable,
        step: int,
        valid_reward: float | None,
        metrics: dict[str, Any],
        for_pause: bool,
    ) -> list[str]:
        """Store it, unless that has been done; returns the prefixes of those that it replaces."""
        prefix = f"{job_prefix(self.job)}/attempts/{self.claim.epoch}/checkpoints/step-{step:06d}"
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            trainer.save(Path(folder))
            self._upload(Path(folder), prefix, step)
        with jobs.fenced(self.database, self.claim) as (session, job):
            stored = session.scalar(_of_job(job.id).where(Checkpoint.step == step))
            if stored is not None:  # the connection broke after the commit
                return _retire(session, job)
            job.failures = 0  # whatever it met with, it got further
            checkpoint = Checkpoint(
                job_id=job.id,
                step=step,
                epoch=self.claim.epoch,
                blob_prefix=prefix,
                valid_reward=valid_reward,
                metrics=metrics | ({_FOR_PAUSE: True} if for_pause else {}),
            )
            session.add(checkpoint)
            session.flush()
            if valid_reward is not None or for_pause:
                name = f"{model_name(session, job)}:ckpt-step-{step}"
                _publish(session, job, checkpoint, name)
                events.append(session, job.id, f"Checkpoint created at step {step} with Snapshot ID: {name}")
            return _retire(session, job)

    def best(self) -> Checkpoint | None:
        """The one with the highest validation reward; of equals the earliest, which moved least from the base."""
        return self.patience(self._best)

    def _best(self) -> Checkpoint | None:
        with self.database.read() as session:
            return session.scalar(
                _of_job(self.job.id)
                .where(Checkpoint.valid_reward.is_not(None))
                .order_by(Checkpoint.valid_reward.desc(), Checkpoint.step)
                .limit(1)
            )

    def _upload(self, folder: Path, prefix: str, step: int) -> None:
        files = []
        for path in sorted(folder.iterdir()):
            info = self.blobs.put_file(f"{prefix}/{path.name}", path)
            files.append({"name": path.name, "bytes": info.size, "sha256": info.sha256})
        manifest = {
            "format": FORMAT,
            "job": self.job.id,
            "base_model": self.job.model,
            "step": step,
            "epoch": self.claim.epoch,
            "files": files,
        }
        key, content = f"{prefix}/{MANIFEST}", json.dumps(manifest, indent=2).encode()
        try:
            self.blobs.put_bytes(key, content, if_absent=True)
        except BlobExists:
            # No other attempt writes under this prefix, so it was this one. The same manifest means that its
            # checkpoint is whole already; another one that these files have just been written over.
            if self.blobs.read(key) != content:
                raise

    def _download(self, prefix: str, folder: Path) -> None:
        try:
            self._download_all(prefix, folder)
        except Damaged as damage:
            if damage.problem == "missing":
                check_not_empty(self.blobs)
            raise

    def _download_all(self, prefix: str, folder: Path) -> None:
        self._reading = MANIFEST
        manifest = manifests.read(self.blobs, prefix)
        if manifest.format > FORMAT:
            raise UnknownFormat(
                f"The checkpoint {prefix} has format {manifest.format}, and this worker reads formats up to "
                f"{FORMAT}: run the job on workers of the version of regraft that wrote it, or of a later one."
            )
        for file in manifest.files:
            self._reading = file.name
            manifests.download(self.blobs, prefix, file, folder)


def _described(damaged: Sequence[tuple[Checkpoint, Damaged]], step: int) -> tuple[str, dict[str, Any]]:
    """The warning about checkpoints that were passed over."""
    which = "; ".join(f"of step {one.step} ({one.id}): {damage}" for one, damage in damaged)
    what = "Checkpoint" if len(damaged) == 1 else "Checkpoints"
    if step:
        then = (
            f"The job resumes from step {step}, the newest whole checkpoint, and repeats the steps after it."
        )
    else:
        then = "No whole checkpoint is left: the job starts again from its first step."
    objects = [
        {"step": one.step, "checkpoint": one.id, "file": damage.file, "problem": damage.problem}
        for one, damage in damaged
    ]
    return f"{what} damaged: {which}. {then}", {"step": step, "damaged": objects}


def job_prefix(job: Job) -> str:
    return f"projects/{job.project_id}/jobs/{job.id}"


def model_name(session: Session, job: Job) -> str:
    """ft:<base>:<organization>:<suffix>:<8 characters>, as OpenAI names them.

    The 8 characters make it unique. The suffix is as the user sent it, with each run of other characters than letters,
    digits, _ and - replaced by one -, so that the name is one segment of a URL.
    """
    organization = session.get_one(Organization, job.organization_id)
    tail = hashlib.sha256(job.id.encode()).hexdigest()[:8]
    suffix = re.sub(r"[^A-Za-z0-9_-]+", "-", job.suffix or "").strip("-")
    return f"ft:{job.model}:{organization.name}:{suffix}:{tail}"


def publish_best(session: Session, job: Job, best: Checkpoint) -> str:
    """Give the best checkpoint the job's own model name, and return it."""
    name = model_name(session, job)
    _publish(session, job, best, name)
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
    """Delete the rows of checkpoints that nobody needs any more; return their prefixes.

    Kept are the newest, the best, and what pauses left behind until its name is deleted: a job that goes on must not
    take away the model that was used while it paused.
    """
    present: Sequence[Checkpoint] = session.scalars(_of_job(job.id)).all()
    newest = max(present, key=lambda one: one.step)
    measured = [one for one in present if one.valid_reward is not None]
    best = sorted(measured, key=lambda one: (-(one.valid_reward or 0.0), one.step))[:KEPT_BEST]
    named = set(session.scalars(select(TunedModel.checkpoint_id).where(TunedModel.job_id == job.id)))
    paused = [one for one in present if _FOR_PAUSE in one.metrics and one.id in named]
    retired = [one for one in present if one is not newest and one not in best and one not in paused]
    for one in retired:
        tuned.delete_names_of(session, one.id)
        pages.delete_row(session, one, owner=one.job_id)
    return [one.blob_prefix for one in retired]
