"""Steps that are sampled ahead: which policy samples them, also after a restart, on a real small model."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyarrow import BufferReader
from torch import Tensor

from core.database.engine import Database
from core.database.tables import RolloutPage
from core.storage.manifests import EARLIER
from tests.worker.conftest import Bench, claimed_job
from tests.worker.test_resume import (
    Fate,
    Killed,
    MortalBlobs,
    MortalDatabase,
    MortalGrader,
    MortalTrainer,
    crash,
    die,
    left_by,
)
from tests.worker.test_training import asked
from worker.clock import Clock
from worker.model.policy import Policy
from worker.sampling import Answer, Sampling
from worker.sampling.transformers import TransformersSampler
from worker.sampling.weights import same
from worker.training.sampler_gate import SamplerGate
from worker.training.trainer import PeftTrainer
from worker.types import Prompt

pytestmark = pytest.mark.slow

STEPS = 7
MakePolicy = Callable[..., Policy]


class FateAt(Fate):
    """Ends the run at one moment of a kind, however sampling and learning take turns. Nothing works afterwards."""

    def __init__(self, kind: str = "", number: int = 0) -> None:
        super().__init__()
        self.kind, self.left, self.is_dead = kind, number, False

    def __call__(self, moment: str) -> None:
        if moment == self.kind:
            self.left -= 1
            self.is_dead |= self.left < 0
        if self.is_dead:
            raise Killed(moment)


class OwnCopySampler:
    """Samples with a copy of the model of its own, as vLLM does, with the adapter as it is at the call."""

    def __init__(self, policy: Policy, copy: Policy, fate: Fate) -> None:
        self.policy, self.copy, self.fate = policy, copy, fate
        self.adapters: dict[int, Mapping[str, Tensor]] = {}  # by step

    def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        adapter = self.policy.adapter()
        self.adapters[sampling.step] = adapter
        return self._answers(adapter, prompts_P, sampling)

    async def _answers(
        self, adapter: Mapping[str, Tensor], prompts_P: Sequence[Prompt], sampling: Sampling
    ) -> AsyncIterator[Answer]:
        with self.copy.with_adapter(adapter):
            async for answer in TransformersSampler(self.copy).sample(prompts_P, sampling):
                self.fate("sampling")
                yield answer


def ahead(bench: Bench, make_policy: MakePolicy, steps: int, fate: Fate | None = None) -> Any:
    """A run that samples `steps` steps ahead and dies when its fate says so."""
    fate = fate or FateAt()
    policy = make_policy()
    attempt = bench.attempt(
        database=MortalDatabase(bench.database, fate), blobs=MortalBlobs(bench.blobs, fate)
    )
    advanced = {"group_size": 4, "max_completion_tokens": 6, "off_policy_steps": steps, "learning_rate": 0.01}
    run = bench.run(MortalGrader(fate), attempt=attempt, advanced=advanced)
    settings = run.experience.settings.model_copy(update={"total_steps": STEPS})
    gate = SamplerGate(1e-3, "transformers", "float32")
    trainer = MortalTrainer(policy, settings, token_budget=512, gate=gate)
    trainer.fate = fate
    sampler = OwnCopySampler(policy, make_policy(), fate)
    experience = replace(run.experience, settings=settings, sampler=sampler, trainer=trainer)
    return replace(run, experience=experience)


def one_after_the_other(run: Any, make_policy: MakePolicy, steps: int) -> list[dict[str, Tensor]]:
    """The adapters after each step if nothing happens at once: what sampling ahead means, in ten lines."""
    policy = make_policy()
    trainer, copy = PeftTrainer(policy, run.experience.settings, token_budget=512), make_policy()
    adapters = [policy.adapter()]
    for step in range(1, STEPS + 1):
        prompts_P, sampling = (
            run.experience.train_prompts.batch(step),
            run.experience.collector.sampling(step),
        )
        with copy.with_adapter(adapters[max(0, step - 1 - steps)]):
            answers = TransformersSampler(copy).sample(prompts_P, sampling)
            grading = run.experience.rewards.grade(prompts_P, answers, sampling.group_size, Clock())
            groups_P = asyncio.run(grading)
        for group in groups_P:
            trainer.add(group)
        trainer.step()
        adapters.append(policy.adapter())
    return adapters


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_step_is_sampled_by_the_policy_of_so_many_updates_before(
    bench: Bench, make_policy: MakePolicy, steps: int
) -> None:
    run = ahead(bench, make_policy, steps)
    adapters = one_after_the_other(run, make_policy, steps)
    learned_from = [max(0, step - 1 - steps) for step in range(1, STEPS + 1)]

    asyncio.run(run.train())

    assert not any(map(same, adapters, adapters[1:])), "each update changes the policy"
    assert all(
        same(run.experience.sampler.adapters[at + 1], adapters[one]) for at, one in enumerate(learned_from)
    )
    assert same(run.experience.trainer.policy.adapter(), adapters[-1])
    assert [one.get("staleness") for one in bench.steps()] == [
        None,
        *(float(step - 1 - one) for step, one in enumerate(learned_from, start=1)),
    ]
    assert policy_steps(bench) == [{one} for step, one in enumerate(learned_from, start=1) if step], (
        "of each stored rollout"
    )
    assert not [key for key in bench.blobs.list("projects/") if key.endswith(EARLIER)], "the job has ended"


def test_only_checkpoints_with_steps_left_have_the_adapters_of_earlier_policies(
    make_policy: MakePolicy, tmp_path: Path
) -> None:
    settings = asked({"off_policy_steps": 1}).model_copy(update={"total_steps": 2})
    trainer = PeftTrainer(make_policy(), settings, token_budget=512)

    for step in (1, 2):
        trainer.step()
        folder = tmp_path / str(step)
        folder.mkdir()
        trainer.save(folder)
        assert (folder / EARLIER).exists() == (step == 1)


def policy_steps(bench: Bench) -> list[set[int]]:
    with bench.database.read() as session:
        pages = session.query(RolloutPage).filter_by(split="train").order_by(RolloutPage.step).all()
    return [
        set(pq.read_table(BufferReader(bench.blobs.read(page.blob_key)))["policy_step"].to_pylist())
        for page in pages
    ]


STAGES = [
    ("sampling", 3),  # of the first batches, before there is a checkpoint
    ("sampling", 40),
    ("grading", 45),
    ("before the update", 4),
    ("after the update", 3),
    ("before put_file", 12),
    ("after put_bytes", 7),
    ("after a transaction", 8),
]


@pytest.fixture
def make_bench(migrated_sqlite: Path, tmp_path: Path) -> Iterator[Callable[[str], Bench]]:
    """Makes jobs, each in a database of its own."""
    databases: list[Database] = []

    def make(name: str) -> Bench:
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(migrated_sqlite, folder / "regraft.db")
        databases.append(Database(f"sqlite:///{folder}/regraft.db"))
        return claimed_job(databases[-1], folder)

    yield make
    for database in databases:
        database.close()


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Any]:
    """What jobs leave that nothing happens to, by how many steps they sample ahead."""
    return {}


@pytest.mark.parametrize(
    ("steps", "kind", "number"),
    [*((2, *stage) for stage in STAGES), (1, "before the update", 4), (4, "before the update", 5)],
)
def test_a_run_that_is_killed_and_resumed_samples_with_the_same_policies(
    make_bench: Callable[[str], Bench],
    make_policy: MakePolicy,
    undisturbed: dict[int, Any],
    steps: int,
    kind: str,
    number: int,
) -> None:
    if steps not in undisturbed:
        whole = make_bench("whole")
        asyncio.run(ahead(whole, make_policy, steps).train())
        undisturbed[steps] = left_by(whole)
    bench = make_bench("killed")
    die(ahead(bench, make_policy, steps, FateAt(kind, number)))
    crash(bench)

    asyncio.run(ahead(bench, make_policy, steps).train())

    left = left_by(bench)
    for what, value in undisturbed[steps].items():
        assert left[what] == value, what
