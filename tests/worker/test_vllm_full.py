"""All weights of a policy in vLLM: from files, in place of those that the engine has started with."""

import asyncio
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.database.tables import Job
from core.registry import BaseModelEntry
from core.settings import Settings
from core.storage.store import FolderBlobs
from graders.spec import parse_grader
from tests.fakes import EverySecond
from tests.hyperparameters import in_groups
from tests.own_engines import engines_of, with_forked_engines
from tests.tiny import WORDS, make_tiny_model, tiny_tokenizer
from tests.worker.conftest import GRADER, Bench
from tests.worker.test_offline_training import conversations
from tests.worker.test_offline_training import settings as offline_settings
from tests.worker.test_vllm_sampler import drawn, gaps, prompt, sampling
from worker.assemble import assemble
from worker.model.full import FullPolicy
from worker.model.policy import load_base
from worker.packages import vllm_version
from worker.sampling.placement import Placement
from worker.sampling.published import PublishedWeights
from worker.sampling.transformers import TransformersSampler
from worker.sampling.vllm import VllmSampler
from worker.sampling.weights import WeightFiles
from worker.training.offline import OfflineTrainer
from worker.types import Prompt, Rollout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed"),
]
# Long ones, so that whole blocks of vLLM's cache are shared.
TEXTS = ["red green blue cat dog bird " * 20 + end for end in ("now", "please")]


def policy_on(folder: Path) -> FullPolicy:
    entry = BaseModelEntry(path=folder, dtype="float32", context=512)
    return FullPolicy(load_base("tiny", entry, folder, "cpu"))


@contextmanager
def sampling_from(policy: FullPolicy, folder: Path, **arguments: Any) -> Iterator[VllmSampler]:
    weights = WeightFiles(policy, PublishedWeights(policy, str(folder)))
    sampler = with_forked_engines(policy, weights=weights, kv_cache_bytes=1 << 24, threads=1, **arguments)
    try:
        yield sampler
    finally:
        sampler.close()


@pytest.fixture(autouse=True, scope="module")
def bytecode() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # or each engine would compile vLLM again
        yield


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> FullPolicy:
    return policy_on(make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=32))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that weights are written in."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def sampler(policy: FullPolicy, files: Path) -> Iterator[VllmSampler]:
    with sampling_from(policy, files) as sampler:
        yield sampler


@pytest.fixture
def prompts(policy: FullPolicy) -> list[Prompt]:
    return [prompt(policy, text, line) for line, text in enumerate(TEXTS, start=1)]


def take_a_step(policy: FullPolicy) -> None:
    """Move every weight by about 0.05."""
    advanced = {"train": "full", "optimizer": {"learning_rate": 0.05, "schedule": "constant"}}
    OfflineTrainer(policy, offline_settings("supervised", advanced=advanced), token_budget=60).step(
        conversations()
    )


def ids(groups: list[tuple[Rollout, ...]]) -> list[list[tuple[int, ...]]]:
    return [[rollout.output_ids_T for rollout in group] for group in groups]


def test_after_each_step_answers_are_sampled_from_the_new_weights(
    sampler: VllmSampler, policy: FullPolicy, prompts: list[Prompt], files: Path
) -> None:
    """And from keys and values that they have computed: the prompts are those of the step before."""
    before = drawn(sampler, prompts, sampling())
    assert gaps(policy, prompts, before).max() < 1e-4

    for _ in range(2):
        take_a_step(policy)
        assert gaps(policy, prompts, before).mean() > 1e-2
        before = drawn(sampler, prompts, sampling())
        assert gaps(policy, prompts, before).max() < 1e-4
    assert list(files.iterdir()) == [], "the files have no names, so a killed run leaves none"


def test_greedy_answers_are_those_of_the_trainers_own_model(
    sampler: VllmSampler, policy: FullPolicy, prompts: list[Prompt]
) -> None:
    greedy = sampling(group_size=1, temperature=0.0)

    assert ids(drawn(sampler, prompts, greedy)) == ids(drawn(TransformersSampler(policy), prompts, greedy))


# By day test_vllm_engines.py has an engine of two processes.
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_an_engine_that_starts_from_the_checkpoint_gives_the_same_answers(
    sampler: VllmSampler, policy: FullPolicy, prompts: list[Prompt], tmp_path: Path, processes: int
) -> None:
    take_a_step(policy)
    (tmp_path / "checkpoint").mkdir()
    policy.save(tmp_path / "checkpoint")
    expected = drawn(sampler, prompts, sampling())
    resumed = policy_on(tmp_path / "checkpoint")

    placement = Placement(tensor_parallel=processes, gpus_E=((),))
    with sampling_from(resumed, tmp_path, placement=placement) as fresh:
        assert ids(drawn(fresh, prompts, sampling())) == ids(expected)
        take_a_step(resumed)
        assert gaps(resumed, prompts, drawn(fresh, prompts, sampling())).max() < 1e-4


def test_an_engine_that_is_killed_comes_back_with_the_current_weights(
    sampler: VllmSampler, policy: FullPolicy, prompts: list[Prompt]
) -> None:
    take_a_step(policy)
    expected = drawn(sampler, prompts, sampling())
    pid = engines_of(sampler)[0].child.pid
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([process], [], [], 60.0)[0]
    os.close(process)

    assert ids(drawn(sampler, prompts, sampling())) == ids(expected)
    assert engines_of(sampler)[0].child.pid != pid


def test_engines_that_have_slept_load_the_weights_again(
    sampler: VllmSampler, policy: FullPolicy, prompts: list[Prompt]
) -> None:
    expected = drawn(sampler, prompts, sampling())

    sampler.sleep()

    assert engines_of(sampler)[0].is_asleep
    assert ids(drawn(sampler, prompts, sampling())) == ids(expected)


def make_tied_model(folder: Path) -> Path:
    """One whose head is its embeddings, of which vLLM has a packed copy on a CPU."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        head_dim=32, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15,
        tie_word_embeddings=True, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_job_with_tied_embeddings_runs_to_its_end(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each step the trainer gives the answers the probabilities that vLLM had."""
    blobs = FolderBlobs(tmp_path / "blobs")
    folder = make_tied_model(tmp_path / "tied")
    with bench.database.write() as session:
        bench.add_files(session, blobs)
        job = session.query(Job).one()
        job.model = "tiny"
        advanced = {"train": "full", "max_completion_tokens": 16, "learning_rate": 0.02}
        job.body = job.body | {
            "hyperparameters": {"n_epochs": 4, "eval_interval": 4, "advanced": in_groups(advanced)}
        }
    (tmp_path / "models.toml").write_text(
        f'[models.tiny]\npath = "{folder}"\ndtype = "float32"\ncontext = 512\nsampler = "vllm"\n'
    )
    settings = Settings(models_file=tmp_path / "models.toml", data_dir=tmp_path, torch_threads=1)
    parts: Any = (parse_grader(GRADER), EverySecond(), settings, tmp_path, lambda: False, lambda: None)

    run = assemble(bench.attempt(blobs=blobs), *parts)
    asyncio.run(run.train())

    steps = bench.steps()[1:]
    assert len(steps) == 4
    assert all(step["grad_norm"] > 0 for step in steps)
    assert max(step["logprob_gap_max"] for step in steps) < 1e-3
    assert any(event.startswith("Sampling with vllm") for event in bench.events())
