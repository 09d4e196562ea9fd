"""A job that is killed, wherever, and resumed ends as if nothing had happened: bit for bit, on a real small model."""

import asyncio
import csv
import io
import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from core.claims import LeaseLost
from core.database.engine import Database, Work
from core.database.tables import Attempt, File, Job, RolloutPage
from core.jobs import events, lifecycle
from core.storage.manifests import MANIFEST
from core.storage.store import FolderBlobs
from graders.types import Grade, Item, Sample
from tests.fakes import WatchedGradient
from tests.present import present
from tests.worker.conftest import Bench, claimed_job
from worker.model.policy import Policy
from worker.sampling import Answer, Sampling
from worker.sampling.transformers import TransformersSampler
from worker.training.trainer import PeftTrainer
from worker.types import Prompt, UpdateMetrics

pytestmark = pytest.mark.slow  # runs whole jobs again and again

STEPS = 4
LONG = 100  # tokens, behind prompts of about ten: the answers of a group share no row then
TIMES = ("timing", "created_at", "ahead_seconds")


class Killed(BaseException):
    """As abrupt as it gets without a process of its own: nothing in the run catches it."""


class Fate:
    """Counts the moments at which a run could die, and ends it at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.moments: list[Any] = []

    def __call__(self, moment: str) -> None:
        self.moments.append(moment)
        if len(self.moments) - 1 == self.at:
            raise Killed(moment)


class MortalGrader:
    """Likes long words, so that any two answers are likely to differ in score."""

    name, type = "long_words", "string_check"

    def __init__(self, fate: Fate) -> None:
        self.fate = fate

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.fate("grading")
        words = sample.output_text.split()
        return Grade(sum(len(word) > 3 for word in words) / max(1, len(words)))


class MortalSampler(TransformersSampler):
    fate: Fate

    async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        async for answer in super().sample(prompts_P, sampling):
            self.fate("sampling")
            yield answer


class MortalTrainer(PeftTrainer):
    fate: Fate

    def step(self) -> UpdateMetrics:
        self.fate("before the update")
        update = super().step()
        self.fate("after the update")
        return update


class MortalDatabase:
    def __init__(self, real: Database, fate: Fate) -> None:
        self.real, self.fate = real, fate

    def read(self) -> Any:
        return self.real.read()

    def write(self) -> "MortalTransaction":
        return MortalTransaction(self.real.write(), self.fate)


class MortalTransaction:
    def __init__(self, inner: AbstractContextManager[Session, bool | None], fate: Fate) -> None:
        self.inner, self.fate = inner, fate

    def __enter__(self) -> Session:
        self.fate("before a transaction")
        return self.inner.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        suppressed = self.inner.__exit__(*raised)
        if raised[0] is None:
            self.fate("after a transaction")
        return suppressed


class MortalBlobs:
    def __init__(self, real: FolderBlobs, fate: Fate) -> None:
        self.real, self.fate = real, fate

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.real, name)
        if not name.startswith(("put", "delete")):
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.fate(f"before {name}")
            done = real(*args, **kwargs)
            self.fate(f"after {name}")
            return done

        return call


def mortal(
    bench: Bench, make_policy: Callable[..., Policy], fate: Fate, longest: int = 6, **advanced: Any
) -> Any:
    """A run on the real sampler and trainer that dies when its fate says so. Answers have up to `longest` tokens."""
    policy = make_policy()
    attempt = bench.attempt(
        database=MortalDatabase(bench.database, fate), blobs=MortalBlobs(bench.blobs, fate)
    )
    asked = {"group_size": 4, "max_completion_tokens": longest} | advanced
    run = bench.run(MortalGrader(fate), attempt=attempt, advanced=asked)
    settings = run.experience.settings.model_copy(update={"total_steps": STEPS})
    sampler, trainer = MortalSampler(policy), MortalTrainer(policy, settings, token_budget=512)
    sampler.fate = trainer.fate = fate
    experience = replace(run.experience, settings=settings, sampler=sampler, trainer=trainer)
    return replace(run, experience=experience)


def crash(bench: Bench) -> None:
    """What the supervisor and the next worker do after a kill -9."""
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.crashed(session, job, reason="killed", max_failures=99)
        job.next_run_at = 0.0
    with bench.database.write() as session:
        bench.claim = present(lifecycle.claim(session, gpu_class="cpu", owner="next", lease_seconds=60))


def left_by(bench: Bench) -> dict[Any, Any]:
    """All that a job leaves behind, without its times and the names that are made up anew for every job."""
    job = bench.job()
    with bench.database.read() as session:
        pages = session.query(RolloutPage).order_by(RolloutPage.step, RolloutPage.split).all()
        table = session.query(File).where(File.id == job.result_file).one()
    adapters = {
        one.step: {
            name: bench.blobs.read(f"{one.blob_prefix}/{name}")
            for name in ("adapter_model.safetensors", "adapter_config.json", "trainer.pt")
        }
        for one in bench.checkpoints()
    }
    rows = csv.DictReader(io.StringIO(bench.blobs.read(table.blob_key).decode()))
    return {
        "status": job.status,
        "adapters": adapters,
        "rewards": [(one.step, one.valid_reward) for one in bench.checkpoints()],
        "metrics": [without_times(step) for step in bench.steps()],
        "rollouts": [bench.blobs.read(page.blob_key) for page in pages],
        "csv": [{k: v for k, v in row.items() if "duration" not in k and "timing/" not in k} for row in rows],
        "tokens": job.trained_tokens,
        "steps told of": sorted(e.split(",")[0] for e in listed(bench) if e.startswith("Step ")),
    }


def without_times(step: dict[str, Any]) -> str:
    counted = {k: v for k, v in step.items() if k not in TIMES and not k.endswith("_per_second")}
    return json.dumps(counted, sort_keys=True)


def listed(bench: Bench) -> list[Any]:
    with bench.database.read() as session:
        return [event.message for event in events.page(session, bench.claim.job_id, limit=100).items]


@dataclass
class Undisturbed:
    """What the job leaves when nothing happens to it, and every moment at which something could have."""

    left: dict[str, Any]
    moments: list[Any]


@pytest.fixture(scope="module")
def undisturbed(
    migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory, make_policy: Callable[..., Policy]
) -> Undisturbed:
    return measured_in(tmp_path_factory.mktemp("undisturbed"), migrated_sqlite, make_policy)


def measured_in(
    folder: Path, migrated_sqlite: Path, make_policy: Callable[..., Policy], longest: int = 6, **advanced: Any
) -> Undisturbed:
    """In a database of its own."""
    shutil.copy(migrated_sqlite, folder / "regraft.db")
    database = Database(f"sqlite:///{folder}/regraft.db")
    result = measured(claimed_job(database, folder), make_policy, longest, **advanced)
    database.close()
    return result


def measured(
    bench: Bench, make_policy: Callable[..., Policy], longest: int = 6, **advanced: Any
) -> Undisturbed:
    fate = Fate()
    asyncio.run(mortal(bench, make_policy, fate, longest, **advanced).train())
    return Undisturbed(left_by(bench), fate.moments)


def moment(undisturbed: Undisturbed, kind: Any, number: int) -> int:
    places = [place for place, name in enumerate(undisturbed.moments) if name == kind]
    return places[number % len(places)]


def test_two_undisturbed_runs_are_equal(
    bench: Bench, make_policy: Callable[..., Policy], undisturbed: Undisturbed
) -> None:
    """The control. The adapters also have to have moved, or all others would hold of anything."""
    left = measured(bench, make_policy).left

    assert left == undisturbed.left
    assert left["status"] == "succeeded"
    assert left["adapters"][2] != left["adapters"][4]
    assert any(json.loads(step)["grad_norm"] for step in left["metrics"] if "grad_norm" in json.loads(step))


# Of the moments four are enough after each change: one of each kind of place. Each takes a second.
MOMENTS = [("sampling", 5), ("before the update", 2), ("before put_file", 1), ("after a transaction", 5)]
MORE_MOMENTS = [
    ("sampling", -20),
    ("grading", 40),
    ("after the update", 1),
    ("after the update", -1),
    ("before put_bytes", 3),
    ("after put_bytes", -3),
    ("after put_file", -1),
    ("before a transaction", 4),
    ("after a transaction", -2),
    ("before a transaction", -1),
]


@pytest.mark.parametrize(
    ("kind", "number"), [*MOMENTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_MOMENTS)]
)
def test_a_run_that_is_killed_and_resumed_leaves_the_same(
    bench: Bench, make_policy: Callable[..., Policy], undisturbed: Undisturbed, kind: Any, number: Any
) -> None:
    die(mortal(bench, make_policy, Fate(moment(undisturbed, kind, number))))
    crash(bench)

    asyncio.run(mortal(bench, make_policy, Fate()).train())

    left = left_by(bench)
    for what, value in undisturbed.left.items():
        assert left[what] == value, what


def test_a_run_whose_long_answers_share_no_row_resumes_bit_for_bit(
    bench: Bench, make_policy: Callable[..., Policy], migrated_sqlite: Path, tmp_path: Path
) -> None:
    (tmp_path / "undisturbed").mkdir()
    whole = measured_in(tmp_path / "undisturbed", migrated_sqlite, make_policy, LONG)
    die(mortal(bench, make_policy, Fate(moment(whole, "before the update", 2)), LONG))
    crash(bench)

    run = mortal(bench, make_policy, Fate(), LONG)
    trainer, settings = run.experience.trainer, run.experience.settings
    trainer.gradient = own = WatchedGradient(trainer.policy, settings, token_budget=512)
    asyncio.run(run.train())

    assert 1 in own.rows  # a group with signal has at least two answers to train on
    assert left_by(bench) == whole.left


@pytest.mark.parametrize("loss", ["reinforce_plus_plus", "ppo"])
def test_a_run_with_rewards_of_tokens_resumes_bit_for_bit(
    bench: Bench, make_policy: Callable[..., Policy], migrated_sqlite: Path, tmp_path: Path, loss: str
) -> None:
    """With a KL in the reward, and for ppo with the value head of the checkpoint and its optimizer."""
    advanced: dict[str, Any] = {"loss": loss, "kl": 0.1, "mini_batches": 2}
    (tmp_path / "undisturbed").mkdir()
    whole = measured_in(tmp_path / "undisturbed", migrated_sqlite, make_policy, **advanced)
    die(mortal(bench, make_policy, Fate(moment(whole, "before the update", 3)), **advanced))
    crash(bench)

    asyncio.run(mortal(bench, make_policy, Fate(), **advanced).train())

    assert left_by(bench) == whole.left
    steps = [json.loads(step) for step in whole.left["metrics"]]
    assert all((step["value_loss"] is not None) == (loss == "ppo") for step in steps if step["step"])


def die(run: Any) -> None:
    try:
        asyncio.run(run.train())
    except BaseException as end:
        assert killed(end), end
    else:
        pytest.fail("it lived")


def killed(error: BaseException) -> bool:
    """Task groups wrap what their tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        return any(killed(inner) for inner in error.exceptions)
    return isinstance(error, Killed)


def test_a_run_that_dies_again_and_again_leaves_the_same(
    bench: Bench, make_policy: Callable[..., Policy], undisturbed: Undisturbed
) -> None:
    for at in (30, 60, 20, 75):
        die(mortal(bench, make_policy, Fate(at)))
        crash(bench)

    asyncio.run(mortal(bench, make_policy, Fate()).train())

    assert left_by(bench) == undisturbed.left
    with bench.database.read() as session:
        attempts = lifecycle.attempts(session, bench.claim.job_id)
    assert [one.outcome for one in attempts] == ["crashed"] * 4 + ["succeeded"]
    assert attempts[0].resumed_from == 0
    assert [one.worker for one in attempts] == ["first"] + ["next"] * 4


def test_a_pause_and_a_resume_leave_the_same_adapter(
    bench: Bench, make_policy: Callable[..., Policy], undisturbed: Undisturbed
) -> None:
    """A pause adds a checkpoint, and nothing else."""
    run = mortal(bench, make_policy, Fate())
    run.stop_requested = lambda: True  # at the first boundary

    asyncio.run(run.train())
    bench.again()
    asyncio.run(mortal(bench, make_policy, Fate()).train())

    left, expected = left_by(bench), undisturbed.left
    assert left["adapters"][4] == expected["adapters"][4]
    assert left["metrics"] == expected["metrics"]
    assert left["rollouts"] == expected["rollouts"]


def test_whoever_lost_the_job_writes_nothing_more(bench: Bench) -> None:
    """The worker was given up for dead, another took over, and the first comes back in the middle of a step."""
    back_from_the_dead = bench.run()
    crash(bench)
    bench.train()
    left = left_by_rows(bench)

    with pytest.raises(LeaseLost):
        asyncio.run(back_from_the_dead.train())

    assert left_by_rows(bench) == left


def left_by_rows(
    bench: Bench,
) -> tuple[list[dict[str, Any]], list[str], list[str], list[tuple[int, str | None]]]:
    with bench.database.read() as session:
        attempts = [(one.epoch, one.outcome) for one in session.query(Attempt)]
    return bench.steps(), bench.events(), [one.id for one in bench.checkpoints()], attempts


def test_a_cancel_keeps_the_checkpoints_that_there_are(
    bench: Bench, make_policy: Callable[..., Policy]
) -> None:
    run = mortal(bench, make_policy, Fate())
    run.stop_requested = lambda: len(bench.steps()) == 3  # after step 2
    asyncio.run(run.train())

    with bench.database.write() as session:
        lifecycle.cancel(Work(session), session.get_one(Job, bench.job().seq))

    assert [one.step for one in bench.checkpoints()] == [2]
    assert bench.blobs.read(f"{bench.checkpoints()[0].blob_prefix}/{MANIFEST}")
