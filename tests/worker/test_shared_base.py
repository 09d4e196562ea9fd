"""A base model that a process holds for several jobs: it is the same model, and it is in memory once."""

import copy
import os
import pickle
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from core import fingerprint
from core.registry import BaseModelEntry
from core.settings import Settings
from tests.families.zoo import FAMILIES
from worker.model.policy import Base, Policy, load_weights, read_shape
from worker.model.sizing import workload
from worker.prepare.memory_plan import plan_memory
from worker.prepare.model import BaseModel
from worker.refusals import InvalidModel, ModelUnavailable
from worker.sampling import Sampling
from worker.sampling.transformers import TransformersSampler
from worker.sharing import holder
from worker.sharing.base import BaseLost, Offer, RunsAlone, SharedBase
from worker.sharing.image import Image, opened
from worker.sharing.turns import DeviceTurns
from worker.supervisor.turn_server import TurnServer
from worker.types import Prompt

IDS = torch.arange(5, 25)[None]
FREE = 10_000


def shared_from(image: Image) -> PreTrainedModel:
    """The model as another process gets it."""
    return opened(pickle.loads(pickle.dumps(image.describe())), image.file)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


# A mixture of experts, whose products of matrices differ in the last bit at another place in memory; tied embeddings.
@pytest.mark.parametrize("title", ["JetMoE", "Gemma 2"])
def test_a_shared_model_computes_what_the_loaded_one_computes(title: str, tmp_path: Path) -> None:
    [family] = [family for family in FAMILIES if family.title == title]
    folder = family.save(tmp_path)
    model = load_weights(BaseModelEntry(path=folder, dtype="float32", context=128), folder, "cpu")
    expected = logits(model)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight

    shared = shared_from(Image(model))

    assert torch.equal(logits(shared), expected)
    assert not shared.training and not any(one.requires_grad for one in shared.parameters())
    assert (shared.get_input_embeddings().weight is shared.get_output_embeddings().weight) is tied


def test_a_policy_on_a_shared_model_is_the_same(tiny_base: Base) -> None:
    own = Policy(copy.deepcopy(tiny_base), rank=4, alpha=8, seed=3)
    image = Image(copy.deepcopy(tiny_base.model))

    policy = Policy(replace(tiny_base, model=shared_from(image)), rank=4, alpha=8, seed=3)

    positions, segment = torch.arange(20)[None], torch.zeros(1, 20, dtype=torch.int64)
    assert torch.equal(policy.hidden(IDS, positions, segment), own.hidden(IDS, positions, segment))


def resident_bytes(image: Image) -> int:
    """Memory in which the mappings of the image in this process are: a page that several have counts once."""
    assert image.file is not None
    inode = os.fstat(image.file).st_ino
    smaps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf" {inode} +/memfd:regraft-base.*?\nPss: +(\d+) kB", smaps, re.DOTALL)
    assert len(found) == 2, "two jobs have it"
    return 1024 * sum(map(int, found))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux only")
def test_two_jobs_have_the_weights_in_memory_once(tiny_base: Base) -> None:
    image = Image(copy.deepcopy(tiny_base.model))
    first, second = shared_from(image), shared_from(image)

    for model in (first, second):
        logits(model)

    assert 0.9 * image.file_bytes < resident_bytes(image) < 1.1 * image.file_bytes + 4096


def test_a_job_that_changes_a_weight_changes_no_other_job(tiny_base: Base) -> None:
    image = Image(copy.deepcopy(tiny_base.model))
    first, second = shared_from(image), shared_from(image)

    with torch.no_grad():
        first.get_input_embeddings().weight.zero_()

    assert torch.equal(logits(second), logits(tiny_base.model))
    assert not torch.equal(logits(first), logits(second))


def test_a_model_that_cannot_be_given_to_a_process_is_refused_by_name(tiny_base: Base) -> None:
    model = copy.deepcopy(tiny_base.model)
    model.register_forward_hook(lambda *called: None)

    with pytest.raises(RunsAlone, match="LlamaForCausalLM cannot be shared"):
        Image(model)


class CountedTurns(DeviceTurns):
    """Counts how often the process offers its turn."""

    offers = 0

    def offer(self) -> None:
        self.offers += 1
        super().offer()


def test_a_job_offers_its_turn_at_each_token_and_each_micro_batch(tmp_path: Path, tiny_base: Base) -> None:
    server, model = TurnServer(tmp_path / "turns"), copy.deepcopy(tiny_base.model)
    turns = CountedTurns(tmp_path / "turns")
    turns.offer_before_each_forward(model)
    policy = Policy(replace(tiny_base, model=model), rank=4, alpha=8, seed=3)
    sampling = Sampling(2, temperature=1.0, max_completion_tokens=6, job_seed=0, step=1)

    answers = list(TransformersSampler(policy).answers([Prompt(1, (5, 6, 7), {})], sampling))

    tokens = max(len(answer.rollout.output_ids_T) for answer in answers)
    assert turns.offers >= tokens > 1

    sampled = turns.offers
    policy.hidden(IDS, torch.arange(20)[None], torch.zeros(1, 20, dtype=torch.int64))
    assert turns.offers == sampled + 1
    server.close()


class Held:
    """What the process that holds a base offers and has loaded, with threads in place of that process."""

    def __init__(self, address: Path, entry: BaseModelEntry, failure: Exception | None = None) -> None:
        self.offer: Future[Offer] = Future()
        self.image: Future[Image] = Future()
        self.entry = entry
        self.files = fingerprint.of_folder(Path(str(entry.path)))
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(address))
        self.listener.listen()
        arguments = [self.listener, self.offer, self.image]
        threading.Thread(target=holder.accept, args=arguments, daemon=True).start()
        if failure is None:
            self.offer.set_result(Offer(entry, self.files, FREE))
        else:
            self.offer.set_exception(failure)


@pytest.fixture
def address(tmp_path: Path) -> Path:
    return tmp_path / "base"


@pytest.fixture
def held(address: Path, tiny_model: Path) -> Iterator[Held]:
    held = Held(address, BaseModelEntry(path=tiny_model, dtype="float32", context=128))
    yield held
    held.listener.close()


def test_jobs_get_the_model_once_it_is_loaded(held: Held, address: Path, tiny_base: Base) -> None:
    jobs = [SharedBase(address, 2) for _ in range(2)]
    for job in jobs:
        job.refuse_other(held.entry, held.entry.locate())  # before it is loaded
    held.image.set_result(Image(copy.deepcopy(tiny_base.model)))

    for job in jobs:
        assert torch.equal(logits(job.load()), logits(tiny_base.model))


def test_each_job_has_an_equal_part_of_the_memory_beside_the_weights(held: Held, address: Path) -> None:
    """Whether others run or not, so that the same job has the same plan."""
    job = SharedBase(address, 4)

    assert job.memory(weight_bytes=2_000) == 2_000 + (FREE - 2_000) // 4


def test_a_job_that_does_not_fit_in_its_part_runs_alone(held: Held, address: Path) -> None:
    shape = read_shape(held.entry, address.parent)
    base = BaseModel(held.entry, held.entry.locate(), shape, "cpu", "transformers", "1")
    work = workload(rank=4, prompt=5, completion=8, batch=2, group=4, valid_rows=4, eval_samples=1)

    with pytest.raises(RunsAlone, match=r"beside 3 others tiny at 13 tokens needs"):
        plan_memory("tiny", base, work, Settings(), 1, shared=SharedBase(address, 4))


@pytest.mark.parametrize("change", ["entry", "files"])
def test_a_job_does_not_share_another_model_than_its_own(held: Held, address: Path, change: str) -> None:
    job, entry, source = SharedBase(address, 2), held.entry, held.entry.locate()
    if change == "entry":
        entry = entry.model_copy(update={"dtype": "bfloat16"})
    else:
        source = address.parent  # other files

    with pytest.raises(RunsAlone, match="has changed since"):
        job.refuse_other(entry, source)


def test_a_model_that_cannot_be_loaded_is_refused_as_if_the_job_had_loaded_it(
    held: Held, address: Path
) -> None:
    job = SharedBase(address, 2)
    job.memory(0)
    held.image.set_exception(InvalidModel("The weights of the model's folder cannot be read."))

    with pytest.raises(InvalidModel, match="cannot be read"):
        job.load()


def test_a_model_that_cannot_be_found_is_refused_as_if_the_job_had_looked_for_it(
    address: Path, tiny_model: Path
) -> None:
    entry = BaseModelEntry(path=tiny_model, dtype="float32", context=128)
    held = Held(address, entry, ModelUnavailable("the hub does not answer"))

    with pytest.raises(ModelUnavailable, match="the hub does not answer"):
        SharedBase(address, 2).refuse_other(entry, entry.locate())
    held.listener.close()


def test_an_error_of_the_process_that_holds_the_base_is_a_crash(held: Held, address: Path) -> None:
    job = SharedBase(address, 2)
    job.memory(0)
    held.image.set_exception(ZeroDivisionError("something"))

    with pytest.raises(BaseLost, match="could not be loaded: ZeroDivisionError: something"):
        job.load()


def test_a_process_that_has_ended_is_a_crash(tmp_path: Path) -> None:
    with pytest.raises(BaseLost, match="has ended"):
        SharedBase(tmp_path / "nothing", 2).memory(0)
