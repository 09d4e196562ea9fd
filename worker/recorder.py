"""What a run tells the world, in short transactions that a run which lost its job cannot make."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core import events, jobs
from core.blobs import BlobStore
from core.db import Database
from core.jobs import Claim
from core.methods import Resolved
from core.models import Checkpoint, Job, RolloutPage
from worker import grpo, metrics, results
from worker.checkpoints import job_prefix, publish_best
from worker.types import Group


@dataclass(frozen=True)
class GradedStep:
    """One split of one step, ready to be stored."""

    split: str  # train | valid
    groups_P: Sequence[Group]


class Recorder:
    def __init__(self, database: Database, blobs: BlobStore, claim: Claim, job: Job) -> None:
        self.database = database
        self.blobs = blobs
        self.claim = claim
        self.job = job

    def resolved(self, settings: Resolved, sampler: str) -> None:
        """Show on the job what "auto" became, and say what it is sampled with."""
        with jobs.fenced(self.database, self.claim) as (session, job):
            job.resolved = settings.model_dump()
            events.append(session, job.id, f"Sampling with {sampler}", data={"sampler": sampler})

    def has_step(self, step: int) -> bool:
        with self.database.read() as session:
            return any(row.step == step for row in events.steps(session, self.job.id))

    def steps(self, *, before: int) -> list[dict[str, Any]]:
        """The metrics of the steps that were recorded before this one, in order."""
        with self.database.read() as session:
            return [row.data for row in events.steps(session, self.job.id) if row.step < before]

    def step(self, data: dict[str, Any], stored: Sequence[GradedStep], *, remaining_steps: int) -> bool:
        """Record one finished step. Returns whether the user has asked the job to pause.

        Raises:
            LeaseLost: the job was cancelled or given to somebody else; nothing was recorded.
        """
        step = data["step"]
        pages = [self._write_page(step, one) for one in stored]
        with jobs.fenced(self.database, self.claim) as (session, job):
            for page in pages:
                session.merge(page)
            events.record_step(session, self.claim, step, data)
            events.append(session, job.id, metrics.message(data), type="metrics", data=data)
            done = [row.data["timing"]["step"]["full_iteration"] for row in events.steps(session, job.id)]
            job.estimated_finish = round(time.time() + remaining_steps * sum(done) / len(done))
            return job.status == "pausing"

    def warn(self, message: str, data: dict[str, Any]) -> None:
        with jobs.fenced(self.database, self.claim) as (session, job):
            events.append(session, job.id, message, level="warn", data=data)

    def inform(self, message: str, data: dict[str, Any]) -> None:
        with jobs.fenced(self.database, self.claim) as (session, job):
            events.append(session, job.id, message, data=data)

    def succeed(self, best: Checkpoint) -> None:
        """The job's end: its result file, its model and its status, in one transaction."""
        file = results.prepare(self.database, self.blobs, self.job)
        with jobs.fenced(self.database, self.claim) as (session, job):
            results.attach(session, job, file)
            jobs.succeed(session, job, fine_tuned_model=publish_best(session, job, best))

    def fail(self, *, code: str, message: str, param: str | None = None) -> None:
        file = results.prepare(self.database, self.blobs, self.job)
        with jobs.fenced(self.database, self.claim) as (session, job):
            results.attach(session, job, file)
            jobs.fail(session, job, code=code, message=message, param=param)

    def _write_page(self, step: int, graded: GradedStep) -> RolloutPage:
        lines = [json.dumps(sample, ensure_ascii=False) for sample in _samples(step, graded)]
        key = f"{job_prefix(self.job)}/attempts/{self.claim.epoch}/rollouts/{graded.split}-{step:06d}.jsonl"
        self.blobs.put_bytes(key, "".join(line + "\n" for line in lines).encode())
        return RolloutPage(
            job_id=self.job.id,
            step=step,
            split=graded.split,
            epoch=self.claim.epoch,
            blob_key=key,
            samples=len(lines),
        )


def _samples(step: int, graded: GradedStep) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "split": graded.split,
            "line": group.prompt.line,
            "member": member,
            "messages": group.prompt.item["messages"],
            "output_text": rollout.text,
            "completion_tokens": len(rollout.output_ids_T),
            "finish_reason": rollout.finish_reason,
            "score": grade.score,
            "reason": grade.reason,
            "output": grade.output,
            "sub_scores": {name: sub.score for name, sub in grade.sub_grades.items()},
            "centred_reward": centred,
        }
        for group in graded.groups_P
        for member, (rollout, grade, centred) in enumerate(
            zip(group.rollouts_G, group.grades_G, grpo.centred(group.rewards_G), strict=True)
        )
    ]
