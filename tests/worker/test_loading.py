"""A job with a fleet samples its first answers while its base model is being loaded."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from core.chat import Adapter
from core.database.tables import Job
from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.registry import BaseModelEntry
from core.results.lineage import Parent
from core.settings import Settings
from graders.spec import parse_grader
from graders.types import Grade
from tests.fakes import EverySecond, GuessingSampler, Skill, SkillTrainer
from tests.graders.servers import serving
from tests.worker.conftest import GRADER, Bench
from worker.assemble import assemble
from worker.child import trained
from worker.engine.names import NOTHING
from worker.engine.protocol import (
    FACTS,
    SAMPLE,
    AdapterBytes,
    AnswerFrame,
    EndFrame,
    Frame,
    GroupRequest,
    pack,
    pack_ids,
    pack_logprobs,
)
from worker.heartbeat import Beat
from worker.interfaces import Trainer
from worker.model.meta_policy import unloaded_policy
from worker.model.policy import Policy, load_base
from worker.model.sharding import load_bases
from worker.prepare.loaded import samples_while_loading
from worker.prepare.teachers import TeacherModel
from worker.recording.checkpoints import JobCheckpoints
from worker.refusals import InvalidModel, UserMistake
from worker.run import Run
from worker.sampling import Answer, Sampling
from worker.sampling.fleet import FleetConfig
from worker.sampling.vllm import with_fleet
from worker.training.loading import LoadingTrainer, SamplerMeanwhile
from worker.types import Group, Prompt, Rollout

LONG_ENOUGH = 60.0  # seconds; a wait that only ends early on success
KEY = "the-secret-of-this-fleet"


@dataclass
class Member:
    """Stands in for a process of the fleet: every answer is the same two tokens."""

    left_out: list[str] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    models: list[str] = field(default_factory=list)  # of the requests for answers

    def __call__(self, path: str, sent: Any) -> tuple[int, str | bytes]:
        if path == FACTS:
            facts = {"model": "tiny", "dtype": "float32", "context": 512, "max_lora_rank": 64}
            facts |= {"logprobs_mode": "processed_logprobs", "vllm": "0"}
            left_out = [name for name in sent["tensors"] if name.rpartition(".lora_")[0] in self.left_out]
            return 200, json.dumps(facts | {"left_out": left_out})
        if path == SAMPLE:
            group = msgspec.msgpack.decode(sent, type=GroupRequest)
            self.models += [group.adapter for _ in group.answers]
            self.asked.set()
            ids, logprobs = pack_ids((5, 6)), pack_logprobs((-1.0, -1.0))
            frames: list[Frame] = [AnswerFrame(one.id, ids, logprobs, "length") for one in group.answers]
            return 200, b"".join(map(pack, [*frames, EndFrame()]))
        return 200, ""


@pytest.fixture
def member() -> Member:
    return Member()


@pytest.fixture
def address(member: Member) -> Iterator[str]:
    with serving(member) as address:
        yield address


@dataclass
class FleetJob:
    """A job of one step on a model with a fleet of one member, or with none."""

    bench: Bench
    model: Path
    folder: Path

    def assemble(self, *addresses: str, beat: Beat = lambda: None) -> Run:
        (self.folder / "models.toml").write_text(
            f'[models.tiny]\npath = "{self.model}"\ndtype = "float32"\ncontext = 512\n'
        )
        settings = Settings(
            models_file=self.folder / "models.toml",
            data_dir=self.folder,
            samplers={"tiny": addresses} if addresses else {},
            samplers_key=KEY,
            max_logprob_gap=0.0,  # the answers are not the model's
            _env_file=None,
        )
        return assemble(
            self.bench.attempt(),
            parse_grader(GRADER),
            EverySecond(),
            settings,
            self.folder,
            lambda: False,
            beat,
        )


@pytest.fixture
def job(bench: Bench, tiny_model: Path, tmp_path: Path) -> FleetJob:
    with bench.database.write() as session:
        bench.add_files(session, bench.blobs)
        job = session.scalars(select(Job)).one()
        job.model = "tiny"
        job.resolved = {"lora_rank": 4, "total_steps": 1, "group_size": 4, "max_completion_tokens": 8}
    return FleetJob(bench, shutil.copytree(tiny_model, tmp_path / "model"), tmp_path)


def test_the_first_prompts_are_sent_before_the_base_is_loaded(
    job: FleetJob, member: Member, address: str
) -> None:
    """The worker's heartbeat comes between loading and checking: here it waits for a prompt at the fleet."""
    waited: list[bool] = []

    def beat() -> None:
        if threading.current_thread().name == "loading":
            waited.append(member.asked.wait(LONG_ENOUGH))

    run = job.assemble(address, beat=beat)
    asyncio.run(run.train())

    assert waited == [True, True]
    assert [step["step"] for step in job.bench.steps()] == [0, 1]
    assert job.bench.steps()[1]["trained_tokens"] > 0
    assert sum("The adapter is on" in message for message in job.bench.events()) == 1


def test_a_model_that_cannot_be_loaded_ends_the_attempt_with_the_error_of_a_job_without_a_fleet(
    job: FleetJob, address: str
) -> None:
    (job.model / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InvalidModel) as alone:
        job.assemble()

    run = job.assemble(address)
    with pytest.raises(UserMistake) as with_fleet:
        asyncio.run(trained(run))

    assert with_fleet.value.code == alone.value.code
    assert with_fleet.value.message == str(alone.value)


def test_a_job_that_starts_from_an_adapter_resumes_or_is_scored_by_its_own_models_loads_first(
    bench: Bench, address: str, tmp_path: Path
) -> None:
    fleet = fleet_at(address)
    fresh = JobCheckpoints(bench.attempt(), tmp_path)
    parent = Parent("ft:tiny", "ftjob-1", 1, "ftckpt-1", "projects/p/adapter", {})
    teacher = TeacherModel("tiny", None, None)

    def samples(
        fleet: FleetConfig | None = fleet,
        parent: Parent | None = None,
        teacher: TeacherModel | None = None,
        *,
        has_judges: bool = False,
        has_episodes: bool = False,
    ) -> bool:
        return samples_while_loading(
            bench.attempt(),
            fleet,
            parent,
            fresh,
            teacher,
            has_judges=has_judges,
            has_episodes=has_episodes,
        )

    assert samples()
    assert not any(
        (
            samples(None),
            samples(parent=parent),
            samples(teacher=teacher),
            samples(has_judges=True),
            samples(has_episodes=True),
        )
    )
    bench.train()
    assert not samples(), "it has a checkpoint"


class TestLoadingTrainer:
    def test_the_trainer_gets_the_groups_in_their_order_once_it_is_loaded(self) -> None:
        may_load, own = threading.Event(), AddingTrainer()

        def load() -> Trainer:
            assert may_load.wait(LONG_ENOUGH)
            return own

        trainer = LoadingTrainer(load)
        groups = [group_of_line(line) for line in range(4)]
        for early in groups[:3]:
            trainer.add(early)
        with trainer.policy_before(1) as steps_ago:
            assert steps_ago == 0
        assert own.added == []
        may_load.set()
        trainer.step()
        trainer.add(groups[3])

        assert own.updates == 1
        assert own.added == groups

    def test_the_step_and_the_next_answer_raise_the_error_of_loading(self) -> None:
        def load() -> Trainer:
            raise InvalidModel("the files lack a weight")

        trainer = LoadingTrainer(load)

        async def answers() -> list[Answer]:
            sampler = SamplerMeanwhile(GuessingSampler(Skill()), trainer)
            return [answer async for answer in sampler.sample([prompt_of_line(1)], HOW)]

        with pytest.raises(InvalidModel, match="lack a weight"):
            trainer.step()
        with pytest.raises(InvalidModel, match="lack a weight"):
            asyncio.run(answers())


class TestUnloadedPolicy:
    @pytest.fixture
    def settings(self) -> Resolved:
        resolved = resolve(Hyperparameters(), rows=8, parameters=1000, context=128)
        return resolved.model_copy(update={"lora_rank": 4, "lora_alpha": 8})

    def test_it_has_the_names_shapes_and_stop_tokens_of_the_loaded_policy(
        self, tiny_model: Path, tmp_path: Path, settings: Resolved
    ) -> None:
        folder = shutil.copytree(tiny_model, tmp_path / "model")
        ends = {"eos_token_id": [1, 7]}  # as chat models have it, beside one in config.json
        (folder / "generation_config.json").write_text(json.dumps(ends))
        entry = BaseModelEntry(path=folder, dtype="float32", context=128)
        loaded = Policy(load_base("tiny", entry, tmp_path, "cpu"), rank=4, alpha=8, seed=0)

        unloaded = unloaded_policy("tiny", entry, folder, settings)
        to_shard, _ = load_bases("tiny", entry, tmp_path, "cpu")

        assert unloaded.stop_ids == loaded.stop_ids >= {1, 7}
        assert Policy(to_shard, rank=4, alpha=8, seed=0).stop_ids == loaded.stop_ids
        assert shapes(unloaded) == shapes(loaded)
        assert unloaded.text([5, 6]) == loaded.text([5, 6])
        assert all(parameter.is_meta for parameter in unloaded.model.parameters())

    def test_nothing_is_stored_for_it_and_the_loaded_policy_leaves_out_what_the_fleet_does(
        self,
        tiny_model: Path,
        make_policy: Callable[..., Policy],
        settings: Resolved,
        member: Member,
        address: str,
    ) -> None:
        entry = BaseModelEntry(path=tiny_model, dtype="float32", context=128)
        loaded, store, reported = make_policy(), Kept(), []
        member.left_out = sorted({name.rpartition(".lora_")[0] for name in loaded.adapter()})[:2]

        def report(policy: Policy, modules: Sequence[str]) -> None:
            reported.append((policy, list(modules)))

        sampler = with_fleet(
            unloaded_policy("tiny", entry, tiny_model, settings), fleet_at(address), store, on_left_out=report
        )

        async def sample() -> None:
            async for _ in sampler.sample([prompt_of_line(1)], HOW):
                pass

        asyncio.run(sample())
        assert reported == []
        sampler.use(loaded)
        assert loaded.left_out == member.left_out
        asyncio.run(sample())

        assert reported == [(loaded, member.left_out)]
        assert set(member.models) == {NOTHING}
        assert store.adapters == []


def shapes(policy: Policy) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in policy.adapter().items()}


def fleet_at(address: str) -> FleetConfig:
    return FleetConfig("tiny", "float32", 128, 4, (address,), KEY, patience=LONG_ENOUGH)


HOW = Sampling(group_size=2, temperature=1.0, max_completion_tokens=8, job_seed=5, step=1)


def prompt_of_line(line: int) -> Prompt:
    return Prompt(line, (3, 4), {"answer": "red"})


def group_of_line(line: int) -> Group:
    rollout = Rollout((1, 2), (-0.5, -0.5), "red", "stop")
    return Group(prompt_of_line(line), (rollout,), (Grade(1.0),))


class AddingTrainer(SkillTrainer):
    """Remembers all groups that it has ever had."""

    def __init__(self) -> None:
        super().__init__(Skill())
        self.added: list[Group] = []

    def add(self, group: Group) -> None:
        super().add(group)
        self.added.append(group)


class Kept:
    """An AdapterStore in memory."""

    def __init__(self) -> None:
        self.adapters: list[AdapterBytes] = []

    def put(self, adapter: AdapterBytes) -> Adapter:
        self.adapters.append(adapter)
        return Adapter(prefix="projects/p/adapter", manifest_sha256=f"{len(self.adapters):064}")
