"""Whole steps, sampled by vLLM: parts of bench/gpu.py. Each scenario is planned as a job is, with the same code.

colocated: every GPU samples, then every GPU learns. split: half of the GPUs sample the next step while the others
learn. ahead: as split, with four steps that are sampled ahead. parallel: one engine is divided over all GPUs. sleep:
colocated, and vLLM sleeps while the job learns. fleet: the last GPU runs a process of `regraft-server sampler`, and the
others learn. long: colocated, with longer answers. full: colocated, and all weights are trained, in parts if the plan
says so. Except in split, ahead and fleet, vLLM sleeps where it would in a job: if it has to, or to make a step faster.

`planned_gib` is what the memory plan counts on the first GPU. `sampling_gib` and `learning_gib` are the memory of that
GPU which all processes had in use together in each phase, so that the margin of the plan can be checked. A CPU has
neither: there each GPU of a scenario is a process.
"""

import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx
import torch

from bench.gpu_models import Shape, prompt, workload_of, write_base
from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.registry import BaseModelEntry
from core.settings import Settings
from core.storage.store import FolderBlobs
from core.units import GIB
from graders.types import Grade
from worker import process
from worker.attempt import Attempt
from worker.doctor.exact import RANK
from worker.interfaces import Trainer
from worker.model import memory, sizing
from worker.model.full import FullPolicy
from worker.model.policy import Policy, read_config
from worker.model.sizing import MemoryPlan
from worker.sampling import Answer, Sampler, Sampling, grouped, published
from worker.sampling.fleet import FleetConfig
from worker.sampling.placement import NO_ENGINE, Placement, gpus_of_job, place
from worker.sampling.published import PublishedWeights
from worker.sampling.vllm import VllmSampler, with_fleet, with_own_engines
from worker.sampling.weights import BlobAdapters, WeightFiles
from worker.training.distributed import LoadModel, follow, load_checked, loading
from worker.training.gradient import keep_memory
from worker.training.launch import launch
from worker.training.rank_model import Model
from worker.training.step_hooks import HookedTrainer
from worker.training.trainer import PeftTrainer
from worker.training.world import World
from worker.types import Group

KEY = "of-a-bench-on-one-machine"
LONG = 32  # times the answers of the shape
SECONDS = 600.0


@dataclass(frozen=True)
class Scenario:
    """GPUs of one machine; on a CPU, processes."""

    ranks: int
    sampling: int = 0  # GPUs that only sample
    ahead: int = 1  # steps that these sample ahead
    tensor_parallel: int = 1
    sleeps: bool = False
    fleet: bool = False
    answer: int = 1  # times the answers of the shape
    full: bool = False
    steps: int = 4  # the first one warms up and is not counted


def scenario_of(part: str, gpus: int) -> Scenario | None:
    """None: it needs more GPUs."""
    if part in ("split", "ahead", "parallel", "fleet") and gpus < 2:
        return None
    return {
        "colocated": Scenario(gpus),
        "split": Scenario(gpus - gpus // 2, sampling=gpus // 2),
        "ahead": Scenario(gpus - gpus // 2, sampling=gpus // 2, ahead=4),
        "parallel": Scenario(gpus, tensor_parallel=gpus),
        "sleep": Scenario(gpus, sleeps=True),
        "fleet": Scenario(gpus - 1, fleet=True),
        "long": Scenario(gpus, answer=LONG),
        "full": Scenario(gpus, full=True),
    }[part]


def measure(scenario: Scenario, shape: Shape, device: str) -> dict[str, float]:
    """Run the steps in other processes, so that nothing here is on a GPU."""
    shape = replace(shape, answer=shape.answer * scenario.answer)
    with tempfile.TemporaryDirectory() as folder:
        writing = multiprocessing.get_context("spawn").Process(
            target=write_base, args=(shape, device, f"{folder}/model", shape.prompt + shape.answer)
        )
        writing.start()
        writing.join()
        assert writing.exitcode == 0, "the model could not be written"
        with sampler_process(Path(folder), scenario, shape) as address:
            launch(run_rank, scenario, shape, device, Path(folder), address, ranks=scenario.ranks)
        figures: dict[str, float] = json.loads(Path(folder, "figures.json").read_text())
        return figures


@contextmanager
def sampler_process(folder: Path, scenario: Scenario, shape: Shape) -> Iterator[str]:
    """A member of a fleet on the GPU after those of the ranks, if there is to be one: its address."""
    if not scenario.fleet:
        yield ""
        return
    (folder / "models.toml").write_text(
        f'[models.random]\npath = "{folder}/model"\ndtype = "bfloat16"\ncontext = {shape.prompt + shape.answer}\n'
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = subprocess.Popen(
        [sys.executable, "-m", "worker.cli", "sampler", "--model", "random", "--port", str(port)],
        env=os.environ
        | {
            "CUDA_VISIBLE_DEVICES": gpus_of_job(os.environ, scenario.ranks + 1)[-1],
            "REGRAFT_DATA_DIR": str(folder / "sampler"),
            "REGRAFT_BLOB_URL": str(folder / "blobs"),
            "REGRAFT_MODELS_FILE": str(folder / "models.toml"),
            "REGRAFT_SAMPLERS_KEY": KEY,
        },
    )
    address = f"http://127.0.0.1:{port}"
    try:
        while child.poll() is None:
            try:
                httpx.get(f"{address}/health", trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield address
    finally:
        child.terminate()
        child.wait()


def run_rank(scenario: Scenario, shape: Shape, device: str, folder: Path, address: str) -> None:
    """Rank 0 writes the figures and ends the others."""
    if device == "cpu":
        torch.set_num_threads(1)
    world = World.join(SECONDS)
    if world.rank > 0:
        follow(world)
    figures = Steps(scenario, shape, device, folder, address, world).run()
    (folder / "figures.json").write_text(json.dumps(figures))
    os._exit(process.ENDED)


@dataclass
class FolderAttempt:
    """What BlobAdapters uses of an attempt."""

    blobs: FolderBlobs
    prefix: str = "projects/bench"

    def put(self, key: str, content: bytes) -> None:
        self.blobs.put_bytes(key, content)

    def retry(self, work: Callable[[], Any]) -> Any:
        return work()


class Steps:
    """Steps of one scenario, on rank 0."""

    def __init__(
        self, scenario: Scenario, shape: Shape, device: str, folder: Path, address: str, world: World
    ) -> None:
        self.scenario, self.shape, self.device, self.folder = scenario, shape, device, folder
        self.prompts = [prompt(shape, line) for line in range(shape.prompts)]
        self.entry = BaseModelEntry(
            path=folder / "model", dtype="bfloat16", context=shape.prompt + shape.answer
        )
        self.sizes = memory.shape_of(read_config(folder / "model"), torch.bfloat16)
        self.engines = self._placement()
        self.plan = self._plan()
        self.policy, settings, release = self._load(world)
        self.sampler = self._sampler(address)
        self.trainer: Trainer = PeftTrainer(
            self.policy,
            settings,
            token_budget=self.plan.token_budget,
            world=world if world.size > 1 else None,
            release=release,
        )
        if self.plan.sleeps:
            assert isinstance(self.sampler, VllmSampler)
            self.trainer = HookedTrainer(self.trainer, before_step=self.sampler.sleep)
        self.sampling_seconds: list[float] = []
        self.learning_seconds: list[float] = []
        self.used = {"sampling_gib": 0.0, "learning_gib": 0.0}
        self.trained = 0

    def run(self) -> dict[str, float]:
        run = self._split if self.scenario.sampling else self._in_turn
        seconds = run()[1:]
        if isinstance(self.sampler, VllmSampler):
            self.sampler.close()
        step = statistics.median(seconds)
        sampled = self.shape.prompts * self.shape.group * self.shape.answer
        return {
            "step_seconds": step,
            "sampling_seconds": statistics.median(self.sampling_seconds[1:]),
            "learning_seconds": statistics.median(self.learning_seconds[1:]),
            "tokens_per_second": sampled / step,
            "trained_tokens": self.trained,
            "engines": self.engines.engines,
            "degree": self.plan.degree,
            "planned_gib": self.plan.estimate.total / GIB,
            "cache_gib": self.plan.cache_bytes / GIB,
            **(self.used if self.device == "cuda" else {}),
        }

    def _in_turn(self) -> list[float]:
        seconds = []
        for step in range(self.scenario.steps):
            began = time.perf_counter()
            self._learn(self._collect(self._begin(step)))
            seconds.append(time.perf_counter() - began)
        return seconds

    def _split(self) -> list[float]:
        """Later steps are sampled one after the other with the policy before the update, as with `off_policy`."""
        seconds = []
        steps, ahead = range(self.scenario.steps), self.scenario.ahead
        with ThreadPoolExecutor(1) as pool:
            batches = deque(pool.submit(self._collect, self._begin(step)) for step in steps[:ahead])
            for step in steps:
                began = time.perf_counter()
                answers = batches.popleft().result()
                if step + ahead in steps:
                    batches.append(pool.submit(self._collect, self._begin(step + ahead)))
                self._learn(answers)
                seconds.append(time.perf_counter() - began)
        return seconds

    def _begin(self, step: int) -> AsyncIterator[Answer]:
        how = Sampling(self.shape.group, 1.0, self.shape.answer, job_seed=0, step=step)
        return self.sampler.sample(self.prompts, how)  # reads the policy at once

    def _collect(self, answers: AsyncIterator[Answer]) -> list[Answer]:
        began = time.perf_counter()
        sampled = asyncio.run(collected(answers))
        self.sampling_seconds.append(time.perf_counter() - began)
        self._note("sampling_gib", 0)
        return sampled

    def _learn(self, answers: Sequence[Answer]) -> None:
        began = time.perf_counter()
        rollouts_PG = grouped(answers, self.shape.prompts, self.shape.group)
        for one, rollouts in zip(self.prompts, rollouts_PG, strict=True):
            self.trainer.add(Group(one, rollouts, tuple(Grade(float(n)) for n in range(len(rollouts)))))
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.trained = self.trainer.step().trained_tokens
        self.learning_seconds.append(time.perf_counter() - began)
        if self.device == "cuda":
            self._note("learning_gib", torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved())

    def _note(self, name: str, more: int) -> None:
        """Keep the largest use of the first GPU by all processes; `more` than now, at this process's peak."""
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            self.used[name] = max(self.used[name], (total - free + more) / GIB)

    def _placement(self) -> Placement:
        scenario, count = self.scenario, self.scenario.ranks + self.scenario.sampling
        if scenario.fleet:
            return NO_ENGINE
        on_gpus = self.device == "cuda"
        return place(
            engines="auto" if on_gpus or scenario.sampling else max(1, count // scenario.tensor_parallel),
            tensor_parallel=scenario.tensor_parallel,
            device="cuda" if on_gpus else "cpu",
            gpus=gpus_of_job(os.environ, count) if on_gpus else (),
            sampling_gpus=scenario.sampling,
            off_policy=scenario.sampling > 0,
        )

    def _plan(self) -> MemoryPlan:
        shape, scenario = self.shape, self.scenario
        work = workload_of(shape, full=scenario.full)
        on_gpus = self.device == "cuda"
        processes = 1 if on_gpus else scenario.ranks + scenario.sampling + scenario.fleet
        machine = sizing.machine(
            Settings(),
            "cuda" if on_gpus else "cpu",
            memory.available(self.device) // processes,
            "vllm",
            engines=self.engines.engines,
            tensor_parallel=self.engines.tensor_parallel,
            split=self.engines.kind == "split",
            may_sleep=not scenario.sampling and not scenario.fleet,  # nothing is sampled during the update
            main_memory=memory.available("cpu"),
        )
        if scenario.sleeps:  # also where it would fit without, or be faster
            return sizing.plan("random", self.sizes, work, replace(machine, sleeps=True))
        return sizing.plan_sharded("random", self.sizes, work, machine, scenario.ranks)

    def _load(self, world: World) -> tuple[Policy, Resolved, Callable[[], None]]:
        advanced = {
            "optimizer": {"learning_rate": 1e-12},
            **({"train": "full"} if self.scenario.full else {"lora": {"rank": RANK}}),
            "sampling": {"group_size": self.shape.group, "max_completion_tokens": self.shape.answer},
            **(
                {"schedule": {"type": "off_policy", "steps": self.scenario.ahead}}
                if self.scenario.sampling
                else {}
            ),
        }
        settings = resolve(
            Hyperparameters.model_validate({"advanced": advanced}),
            rows=self.shape.prompts,
            parameters=self.sizes.parameters,
            context=self.entry.context,
        )
        model = Model("random", self.entry, self.folder, settings, 0, self.plan.checkpointed, sampled=False)
        release = torch.cuda.empty_cache if self.plan.sleeps else keep_memory
        threads = 1 if self.device == "cpu" else 0
        order = LoadModel(
            model, self.device, threads, self.plan.token_budget, "", self.plan.degree, release=release
        )
        with loading(world, order):
            policy, _ = load_checked(model, self.device, self.plan.degree, world)
            release()
        policy.stop_ids = frozenset()  # every answer runs to its full length
        return policy, settings, release

    def _sampler(self, address: str) -> Sampler:
        if not address:
            engines: dict[str, Any] = {
                "placement": self.engines,
                "sizes": self.plan.engine,
                "kv_cache_bytes": self.plan.cache_bytes,
                "threads": 1 if self.device == "cpu" else 0,
                "sleeps": self.plan.sleeps,
            }
            if not isinstance(self.policy, FullPolicy):
                return with_own_engines(self.policy, **engines)
            parent = published.parent_for(self.sizes.weight_bytes, self.device, self.plan.main_memory)
            weights = WeightFiles(self.policy, PublishedWeights(self.policy, parent))
            return with_own_engines(self.policy, weights=weights, **engines)
        config = FleetConfig(
            "random", "bfloat16", self.entry.context, RANK, (address,), KEY, patience=SECONDS
        )
        attempt = cast(Attempt, FolderAttempt(FolderBlobs(self.folder / "blobs")))
        return with_fleet(self.policy, config, BlobAdapters(attempt))


async def collected(answers: AsyncIterator[Answer]) -> list[Answer]:
    return [answer async for answer in answers]
