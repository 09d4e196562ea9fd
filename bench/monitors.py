"""Measure false and true warnings on healthy and broken runs of the demo's task, one run for each seed.

Each run is the whole loop with its database, in the sizes of the demo unless `--epochs` says less. `--keep FOLDER`
writes what the rules read of the recorded steps, and `--read FOLDER` applies the rules to those again without
training: thresholds can be compared in a second. `alarms` is the number of warnings that the rules gave in all runs,
`warning_events` that of all events above level info.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import report
from bench.sizes import sized
from core.claims import Claim
from core.database.engine import Database
from core.database.tables import Event, Job, Table
from core.jobs import events, lifecycle
from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import Registry
from core.retry import RetryPolicy
from core.settings import Settings
from core.step_metrics import StepMetrics
from core.storage import datasets
from core.storage.store import FolderBlobs
from core.thresholds import Thresholds
from graders.build import build
from graders.spec import parse_grader
from tests import factories
from worker.attempt import Attempt
from worker.history import History
from worker.interfaces import Checkpoints
from worker.model.policy import Policy, load_base, render
from worker.recording.checkpoints import JobCheckpoints
from worker.recording.exporters.threads import ExporterThreads
from worker.recording.monitors import check
from worker.recording.recorder import JobRecorder
from worker.rollout.experience import Rewards, RolloutExperience, grader_parts
from worker.rollout.prompts import PromptStream, tokenize
from worker.run import Run
from worker.sampling.transformers import TransformersSampler
from worker.training.trainer import PeftTrainer
from worker.types import Finding, Rollback

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # its scripts import each other by bare names
from demo import DATA, GRADER, HYPERPARAMETERS

MODEL = "SmolLM2-135M-Instruct"
ROWS = sized(None, 8)  # of each file; None: all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=sized(list(range(1, 11)), [1]))
    parser.add_argument("--learning-rate", type=float, help="the automatic one is 3e-4; 0.05 ruins the model")
    parser.add_argument("--epochs", type=int, default=sized(HYPERPARAMETERS["n_epochs"], 1))
    parser.add_argument("--eval-interval", type=int, default=HYPERPARAMETERS["eval_interval"])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--read", type=Path)
    args = parser.parse_args()
    if args.read:
        runs = {path.name: json.loads(path.read_text()) for path in sorted(args.read.glob("*.json"))}
        seen = {}
    else:
        trained = {}
        for seed in args.seeds:
            name = f"{args.learning_rate or 'auto'}-{seed}.json"
            trained[name] = trained_run = train(seed, hyperparameters(args))
            print(seed, trained_run.warned, flush=True)
            if args.keep:
                args.keep.mkdir(parents=True, exist_ok=True)
                (args.keep / name).write_text(json.dumps(trained_run.steps))
        runs = {name: one.steps for name, one in trained.items()}
        seen = {"warning_events": sum(len(one.warned) for one in trained.values())}
    alarms = {name: list(warnings(steps)) for name, steps in runs.items()}
    for name in runs:
        for step, finding in alarms[name]:
            print(f"{name} step {step}: {finding.message}")
    report("monitors", {"runs": len(runs), "alarms": sum(map(len, alarms.values())), **seen})


def warnings(steps: list[dict[str, Any]]) -> Iterator[tuple[int, Finding]]:
    """Yield the findings of the rules after each step."""
    history = History()
    for step in map(StepMetrics.load, steps):
        history.add(step)
        for finding in check(history.steps, Thresholds(), history.warned):
            history.warned.add(finding.rule)
            yield step.step, finding


@dataclass(frozen=True)
class DemoRun:
    """A run of the demo's task."""

    steps: list[dict[str, Any]]  # as recorded
    warned: list[str]  # its events above level info


class WithoutRollback(RolloutExperience):
    """Continues after a collapse, on which the rules are measured."""

    def rollback(self, history: History, checkpoints: Checkpoints) -> Rollback | None:
        return None


def hyperparameters(args: argparse.Namespace) -> dict[str, Any]:
    optimizer = {} if args.learning_rate is None else {"learning_rate": args.learning_rate}
    changes = {"n_epochs": args.epochs, "eval_interval": args.eval_interval}
    return HYPERPARAMETERS | changes | {"advanced": HYPERPARAMETERS["advanced"] | {"optimizer": optimizer}}


def train(seed: int, requested: Mapping[str, Any]) -> DemoRun:
    """Run the demo's job with these hyperparameters."""
    train_rows, valid_rows = (
        datasets.read_examples(iter([(DATA / f"{split}.jsonl").read_bytes()]))[:ROWS]
        for split in ("train", "valid")
    )
    entry, cache = Registry.load(None).get(MODEL), Settings().model_cache
    policy = Policy(load_base(MODEL, entry, cache, "cpu"), rank=16, alpha=32, seed=seed)
    settings = resolve(
        Hyperparameters.model_validate(requested),
        rows=len(train_rows),
        parameters=135_000_000,
        context=entry.context,
    )
    room = {"context": entry.context, "max_completion_tokens": settings.max_completion_tokens}
    prompts, valid = (
        tokenize(
            rows, lambda messages, tools: render(policy.tokenizer, messages, tools=tools), file="", **room
        )
        for rows in (train_rows, valid_rows)
    )
    with tempfile.TemporaryDirectory() as folder, database_in(Path(folder)) as (database, claim):
        with database.read() as session:
            job = session.query(Job).one()
        attempt = Attempt(claim, job, database, FolderBlobs(Path(folder, "blobs")), RetryPolicy(0.0, print))
        experience = WithoutRollback(
            settings=settings,
            seed=seed,
            graders=grader_parts(parse_grader(GRADER)),
            train_prompts=PromptStream(prompts, batch_size=settings.batch_size, seed=seed),
            valid_prompts=valid,
            sampler=TransformersSampler(policy),
            rewards=Rewards(build(parse_grader(GRADER))),
            trainer=PeftTrainer(policy, settings, token_budget=2048),
        )
        checkpoints = JobCheckpoints(attempt, Path(folder))
        run = Run(experience, JobRecorder(attempt), checkpoints, ExporterThreads())
        asyncio.run(run.train())
        with database.read() as session:
            warned = [
                e.message for e in session.query(Event).where(Event.level != "info").order_by(Event.seq)
            ]
            steps = [step.without_sections().to_data() for step in events.metrics(session, job.id)]
            return DemoRun(steps, warned)


@contextmanager
def database_in(folder: Path) -> Iterator[tuple[Database, Claim]]:
    """A database with one claimed job."""
    database = Database(f"sqlite:///{folder}/regraft.db")
    Table.metadata.create_all(database.engine)
    reinforcement = {"grader": GRADER, "hyperparameters": {}, "response_format": None}
    with database.write() as session:
        factories.job(session, factories.project(session), model=MODEL, body=reinforcement)
    with database.write() as session:
        claim = lifecycle.claim(session, gpu_class="cpu", owner="bench", lease_seconds=86400)
    assert claim is not None
    yield database, claim
    database.close()


if __name__ == "__main__":
    main()
