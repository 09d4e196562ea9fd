import asyncio
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy.orm import Session

from core.claims import Claim
from core.database.engine import Database
from core.database.tables import Checkpoint, Event, File, Job, Project
from core.jobs import events, lifecycle
from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import BaseModelEntry
from core.retry import RetryPolicy
from core.settings import Settings
from core.storage.store import FolderBlobs
from graders.spec import parse_grader
from graders.types import Grader
from tests import factories
from tests.fakes import ExactGrader, GuessingSampler, Skill, SkillTrainer, WatchedRun
from tests.hyperparameters import in_groups
from tests.tiny import make_tiny_model
from worker.attempt import Attempt
from worker.child import Assemble, run_attempt
from worker.interfaces import Trainer
from worker.model.policy import Base, Policy, load_base
from worker.recording.checkpoints import JobCheckpoints
from worker.recording.exporters.threads import ExporterThreads
from worker.recording.recorder import JobRecorder
from worker.rollout.experience import Rewards, RolloutExperience, grader_parts
from worker.rollout.prompts import PromptStream
from worker.sampling import Sampler
from worker.types import Prompt


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_base(tiny_model: Path) -> Base:
    """Loaded once: each policy is on a copy, which takes a sixth of the time."""
    return load_base("tiny", BaseModelEntry(path=tiny_model, dtype="float32", context=128), tiny_model, "cpu")


@pytest.fixture(scope="session")
def make_policy(tiny_base: Base) -> Callable[..., Policy]:
    """A policy on the tiny model; `moved` gives its adapter random weights, as if it had learned something."""

    def make(*, moved: bool = False, seed: int = 0, rank: int = 4) -> Policy:
        policy = Policy(copy.deepcopy(tiny_base), rank=rank, alpha=2 * rank, seed=seed)
        if moved:
            torch.manual_seed(seed + 1)
            for parameter in policy.trainable:
                torch.nn.init.normal_(parameter, std=0.2)
        return policy

    return make


ANSWERS = ["red", "green", "blue", "cat"]
ROWS = [{"messages": [{"role": "user", "content": "a or b"}], "answer": "a"}]


@dataclass
class Bench:
    """A claimed job on SQLite and a folder, and everything needed to run the real loop on fakes."""

    database: Database
    blobs: FolderBlobs
    tmp_path: Path
    project: Project
    claim: Claim

    def attempt(self, **parts: Any) -> Attempt:
        """The attempt that holds the claim. Unless `parts` say otherwise, what fails in a test fails at once."""
        at_once = RetryPolicy(0.0, lambda incident: None)
        return replace(Attempt(self.claim, self.job(), self.database, self.blobs, at_once), **parts)

    def job(self) -> Job:
        with self.database.read() as session:
            return session.query(Job).where(Job.id == self.claim.job_id).one()

    def add_files(
        self, session: Session, blobs: FolderBlobs, rows: Sequence[Mapping[str, Any]] = ROWS
    ) -> None:
        """Store the job's files, of these rows each."""
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        stored = blobs.put_bytes("files/rows", lines.encode())
        for name in ("file-a", "file-b"):
            session.add(
                File(
                    id=name,
                    project_id=self.project.id,
                    blob_key="files/rows",
                    sha256=stored.sha256,
                    filename="a",
                    purpose="fine-tune",
                    bytes=1,
                )
            )

    def run_job(
        self, settings: Settings, assemble: Assemble | None = None, attempt: Attempt | None = None
    ) -> None:
        """Run the job on its real model in this process, as the worker's process for it does."""
        from worker import assemble as real

        asyncio.run(
            run_attempt(
                attempt or self.attempt(),
                settings,
                assemble or real.assemble,
                scratch=self.tmp_path,
                stop_requested=lambda: False,
                beat=lambda: None,
            )
        )

    def run(
        self,
        grader: Grader | None = None,
        *,
        skill: Skill | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        attempt: Attempt | None = None,
        kind: type[WatchedRun] = WatchedRun,
        experience: type[RolloutExperience] = RolloutExperience,
        sampler: Sampler | None = None,
        trainer: Trainer | None = None,
        **settings: Any,
    ) -> Any:  # a run of this kind on this experience, with the fakes' own attributes
        attempt = attempt or self.attempt()
        skill = skill or Skill()
        asked = {"batch_size": 2, "n_epochs": 1, "eval_interval": 2} | settings
        asked["advanced"] = in_groups(settings.get("advanced", {"group_size": 4}))
        resolved = resolve(Hyperparameters.model_validate(asked), rows=8, parameters=1000, context=128)
        prompts = [
            Prompt(line, (1, 2), {"messages": [], "answer": ANSWERS[line % 4]}) for line in range(1, 9)
        ]
        source = experience(
            settings=resolved,
            seed=3,
            graders=grader_parts(parse_grader(GRADER)),
            train_prompts=PromptStream(prompts, batch_size=resolved.batch_size, seed=3),
            valid_prompts=prompts[:4],
            sampler=sampler or GuessingSampler(skill),
            rewards=Rewards(grader or ExactGrader()),
            trainer=trainer or SkillTrainer(skill),
            sampled=attempt.sampled,
        )
        return kind(
            source,
            recorder=JobRecorder(attempt),
            checkpoints=JobCheckpoints(attempt, self.tmp_path),
            exporters=ExporterThreads(),
            stop_requested=stop_requested,
        )

    def train(self, grader: Grader | None = None, **options: Any) -> Job:
        asyncio.run(self.run(grader, **options).train())
        return self.job()

    def again(self) -> None:
        """The job goes back to the queue and another worker takes it."""
        with lifecycle.fenced(self.database, self.claim) as (session, job):
            lifecycle.release(session, job)
        with self.database.write() as session:
            claim = lifecycle.claim(session, gpu_class="cpu", owner="second", lease_seconds=60)
        assert claim is not None
        self.claim = claim

    def steps(self) -> list[dict[str, Any]]:
        with self.database.read() as session:
            return [row.data for row in events.steps(session, self.claim.job_id)]

    def events(self, level: str | None = None) -> list[str]:
        with self.database.read() as session:
            rows = session.query(Event).where(Event.job_id == self.claim.job_id).order_by(Event.seq)
            return [row.message for row in rows if level in (None, row.level)]

    def checkpoints(self) -> list[Checkpoint]:
        with self.database.read() as session:
            return session.query(Checkpoint).order_by(Checkpoint.step).all()


GRADER = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}


@pytest.fixture
def bench(sqlite_database: Database, tmp_path: Path) -> Bench:
    return claimed_job(sqlite_database, tmp_path)


def claimed_job(database: Database, folder: Path) -> Bench:
    """A new job and its claim, in a database that is migrated and empty."""
    blobs = FolderBlobs(folder / "blobs")
    with database.write() as session:
        project = factories.project(session, name="default")
        factories.job(
            session,
            project,
            training_file="file-a",
            validation_file="file-b",
            suffix="colours",
            seed=3,
            body={"grader": GRADER, "hyperparameters": {}, "response_format": None},
        )
    with database.write() as session:
        claim = lifecycle.claim(session, gpu_class="cpu", owner="first", lease_seconds=60)
    assert claim is not None
    return Bench(database, blobs, folder, project, claim)
