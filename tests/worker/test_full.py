"""Training of all weights against plain transformers: gradients, updates, checkpoints, and what is refused."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
)

from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.registry import BaseModelEntry
from graders.types import Grade
from tests.fakes import RecordingTrainer, learn
from tests.hyperparameters import in_groups
from tests.present import present
from tests.tiny import WORDS, make_tiny_model, tiny_tokenizer
from tests.worker.test_offline_training import conversations, pairs
from tests.worker.test_offline_training import settings as offline_settings
from tests.worker.test_training import drawn, prompt, sampling
from worker.checks import compatibility
from worker.model.full import FullPolicy, refuse, refuse_other_names
from worker.model.lowering import PlanSizes
from worker.model.policy import Base, load_base
from worker.refusals import InvalidModel, UnsupportedModel
from worker.training.contributions import contribution_of
from worker.training.gradient import LocalGradient
from worker.training.loss import StepValues
from worker.training.offline import OfflineTrainer
from worker.training.policy_loss import PolicyLoss
from worker.training.trainer import PeftTrainer
from worker.types import Group, Pack

MakeFull = Callable[..., FullPolicy]
RATE = 1e-3


def make_tied_model(folder: Path) -> Path:
    """One whose head is its embeddings."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, tie_word_embeddings=True,
        eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "untied": make_tiny_model(tmp_path_factory.mktemp("untied")),
        "tied": make_tied_model(tmp_path_factory.mktemp("tied")),
    }


def load(folder: Path, dtype: Any = "float32") -> Base:
    return load_base("tiny", BaseModelEntry(path=folder, dtype=dtype, context=512), folder, "cpu")


@pytest.fixture
def make_full(models: dict[str, Path]) -> MakeFull:
    def make(kind: str = "untied", dtype: str = "float32") -> FullPolicy:
        return FullPolicy(load(models[kind], dtype))

    return make


def offline(method: str = "supervised", **changes: Any) -> ResolvedOffline:
    """Full training with a learning rate, a gradient that nothing clips, and a step that nothing undoes."""
    optimizer = {"learning_rate": RATE, "max_grad_norm": 1e9, "schedule": "constant", "step_kl": 0}
    asked = {"advanced": {"train": "full", "optimizer": optimizer | changes}}
    return offline_settings(method, **asked)


def reinforcement(**advanced: Any) -> Resolved:
    common = {
        "learning_rate": RATE,
        "max_completion_tokens": 12,
        "max_grad_norm": 1e9,
        "train": "full",
        "step_kl": 0,
    }
    hyperparameters = Hyperparameters.model_validate({"advanced": in_groups(common | advanced)})
    return resolve(hyperparameters, rows=8, parameters=1000, context=128)


def logprobs(model: Any, prompt_ids: Sequence[int], answer: Sequence[int]) -> Tensor:
    """What transformers says of the answer's tokens, [T], in the precision of the model."""
    ids = torch.tensor([[*prompt_ids, *answer]])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def supervised_loss(model: Any, packs: Sequence[Pack]) -> Tensor:
    learned = []
    for pack in packs:
        [one] = pack.sequences
        logp = logprobs(model, pack.prompt_ids, one.output_ids_T)
        learned.append(logp[torch.tensor(one.learned_T)] if one.learned_T else logp)
    return -torch.cat(learned).mean()


def plain(folder: Path) -> Any:
    """transformers' own model in float64, with a gradient of every weight."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: present(one.grad).double() for name, one in model.named_parameters()}


def difference(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of a tensor, in its norm."""
    assert ours.keys() == expected.keys()
    largest: float = max(
        ((ours[name].detach().double() - one.detach()).norm() / one.detach().norm()).item()
        for name, one in expected.items()
        if one.any()
    )
    return largest


def masters(policy: FullPolicy) -> dict[str, Tensor]:
    names = [name for name, _ in policy.model.named_parameters()]
    return dict(zip(names, policy.trainable, strict=True))


@pytest.mark.parametrize("kind", ["untied", "tied"])
@pytest.mark.parametrize("rows", [1, 12], ids=["one chunk of the head", "two chunks"])
@pytest.mark.parametrize("budget", [10_000, 60], ids=["one micro-batch", "several"])
def test_the_gradient_is_that_of_transformers_in_float64(
    make_full: MakeFull, models: dict[str, Path], kind: str, rows: int, budget: int
) -> None:
    reference, packs = plain(models[kind]), conversations() * rows
    loss = supervised_loss(reference, packs)
    loss.backward()  # type: ignore[no-untyped-call]
    policy = make_full(kind)

    totals = OfflineTrainer(policy, offline(), token_budget=budget).add(packs)

    assert totals.loss / totals.tokens == pytest.approx(loss.item(), rel=1e-5)
    ours = {name: present(one.grad) / totals.tokens for name, one in masters(policy).items()}
    assert difference(ours, gradients(reference)) < 1e-5


def test_updates_are_those_of_adamw_on_all_weights_of_transformers(
    make_full: MakeFull, models: dict[str, Path]
) -> None:
    reference, policy = plain(models["untied"]), make_full()
    decays = [one for one in reference.parameters() if one.dim() > 1]
    others = [one for one in reference.parameters() if one.dim() == 1]
    adamw = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.999),
    )
    trainer = OfflineTrainer(policy, offline(weight_decay=0.1), token_budget=10_000)

    for _ in range(4):
        supervised_loss(reference, conversations()).backward()  # type: ignore[no-untyped-call]
        adamw.step()
        adamw.zero_grad()
        trainer.step(conversations())

    ours, start = masters(policy), dict(load(models["untied"]).model.named_parameters())
    moved = {name: (one - start[name]).double() for name, one in reference.named_parameters()}
    assert difference({name: one.detach() - start[name] for name, one in ours.items()}, moved) < 1e-3
    assert all(one.abs().max() > 1e-3 for one in moved.values())


def test_every_weight_of_the_preference_loss_is_compared_with_the_start(
    make_full: MakeFull, models: dict[str, Path]
) -> None:
    reference, start = plain(models["untied"]), plain(models["untied"])
    policy = make_full()
    trainer = OfflineTrainer(policy, offline("dpo"), token_budget=10_000)
    trainer.step(pairs())
    with torch.no_grad():
        for own, weight in zip(reference.parameters(), policy.trainable, strict=True):
            own.copy_(weight)
    losses = []
    for pack in pairs():
        h = []
        for one in pack.sequences:
            with torch.no_grad():
                base = logprobs(start, pack.prompt_ids, one.output_ids_T).sum()
            h.append(logprobs(reference, pack.prompt_ids, one.output_ids_T).sum() - base)
        losses.append(-torch.nn.functional.logsigmoid(0.1 * (h[0] - h[1])))
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]

    totals = trainer.add(pairs())

    ours = {name: present(one.grad) / totals.pairs for name, one in masters(policy).items()}
    assert difference(ours, gradients(reference)) < 1e-4


@pytest.fixture
def groups(make_full: MakeFull) -> list[Group]:
    policy = make_full()
    prompts = [prompt(policy, text, line) for line, text in enumerate(("say yes", "tell me a number"), 1)]
    rewards_PG = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.25]]
    sampled = drawn(policy, prompts, sampling())
    return [
        Group(one, rollouts, tuple(map(Grade, rewards)))
        for one, rollouts, rewards in zip(prompts, sampled, rewards_PG, strict=True)
    ]


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_step_of_reinforcement_is_that_of_the_policy_gradient_in_float64(
    make_full: MakeFull, models: dict[str, Path], groups: list[Group], kl: float
) -> None:
    """REINFORCE with the mean of the group as its baseline, and the k3 estimate of the KL to the start (here 0)."""
    reference = plain(models["untied"])
    start = copy.deepcopy(reference)
    tokens = sum(len(one.output_ids_T) for group in groups for one in group.rollouts_G)
    for group in groups:
        rewards = [present(grade.score) for grade in group.grades_G]
        for reward, rollout in zip(rewards, group.rollouts_G, strict=True):
            logp = logprobs(reference, group.prompt.ids, rollout.output_ids_T)
            with torch.no_grad():
                base = logprobs(start, group.prompt.ids, rollout.output_ids_T)
            penalty = torch.exp(base - logp) - (base - logp) - 1
            advantage = reward - sum(rewards) / len(rewards)
            (-(advantage * logp - kl * penalty).sum() / tokens).backward()  # type: ignore[no-untyped-call]
    policy = make_full()
    settings = reinforcement(advantage_scale="none", **({"kl": kl} if kl else {}))
    trainer = RecordingTrainer(policy, settings, token_budget=40)

    metrics = learn(trainer, groups)

    seen = dict(zip(masters(policy), trainer.gradients[-1], strict=True))
    assert difference(seen, gradients(reference)) < 1e-4
    assert metrics.kl == (pytest.approx(0.0, abs=1e-6) if kl else None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_a_supervised_or_preference_run_resumes_bit_for_bit(
    make_full: MakeFull, tmp_path: Path, method: str, dtype: str
) -> None:
    packs = pairs() if method == "dpo" else conversations()
    whole = OfflineTrainer(make_full(dtype=dtype), offline(method), token_budget=60)
    for _ in range(2):
        whole.step(packs)
    whole.save(tmp_path)
    resumed = OfflineTrainer(make_full(dtype=dtype), offline(method), token_budget=60)
    resumed.load(tmp_path)

    assert [resumed.step(packs) for _ in range(3)] == [whole.step(packs) for _ in range(3)]
    assert all(map(torch.equal, resumed.policy.trainable, whole.policy.trainable))
    assert all(map(torch.equal, resumed.policy.model.parameters(), whole.policy.model.parameters()))
    assert (tmp_path / "masters-00001.safetensors").exists() == (dtype == "bfloat16")


@pytest.mark.parametrize(
    "advanced",
    [{}, {"kl": 0.1}, {"kl": 0.1, "reference_refresh_steps": 1}, {"loss": "ppo", "updates_per_batch": 2}],
    ids=str,
)
def test_a_reinforcement_run_resumes_bit_for_bit(
    make_full: MakeFull, groups: list[Group], tmp_path: Path, advanced: dict[str, Any]
) -> None:
    whole = PeftTrainer(make_full(), reinforcement(**advanced), token_budget=40)
    for _ in range(2):
        learn(whole, groups)
    whole.save(tmp_path)
    resumed = PeftTrainer(make_full(), reinforcement(**advanced), token_budget=40)
    resumed.load(tmp_path)

    assert [learn(resumed, groups) for _ in range(2)] == [learn(whole, groups) for _ in range(2)]
    assert all(map(torch.equal, resumed.loss.trainable, whole.loss.trainable))


def test_the_reference_of_a_checkpoint_is_stored_only_if_it_is_not_the_start(
    make_full: MakeFull, groups: list[Group], tmp_path: Path
) -> None:
    def stored(**advanced: Any) -> bool:
        trainer = PeftTrainer(make_full(), reinforcement(kl=0.1, **advanced), token_budget=40)
        learn(trainer, groups)
        trainer.save(tmp_path)
        return (tmp_path / "reference-00001.safetensors").exists()

    assert not stored()
    assert stored(reference_refresh_steps=1)


def test_a_bfloat16_model_keeps_updates_that_it_cannot_tell_apart(make_full: MakeFull) -> None:
    policy = make_full(dtype="bfloat16")
    start = [one.detach().clone() for one in policy.model.parameters()]
    trainer = OfflineTrainer(policy, offline(learning_rate=1e-6), token_budget=60)

    for _ in range(3):
        trainer.step(conversations())

    lost = moved = 0
    for weight, master, before in zip(policy.model.parameters(), policy.trainable, start, strict=True):
        assert torch.equal(weight, master.bfloat16())
        moved += int((master != before.float()).sum())
        lost += int(((master != before.float()) & (weight == before)).sum())
    assert lost > 0.9 * moved > 0


def test_the_gradient_of_a_bfloat16_model_is_added_up_in_float32(
    make_full: MakeFull, models: dict[str, Path]
) -> None:
    reference, policy = plain(models["untied"]), make_full(dtype="bfloat16")
    supervised_loss(reference, conversations()).backward()  # type: ignore[no-untyped-call]

    totals = OfflineTrainer(policy, offline(), token_budget=60).add(conversations())

    assert {one.grad.dtype for one in policy.trainable if one.grad is not None} == {torch.float32}
    assert all(one.grad is None for one in policy.model.parameters())
    ours = {name: present(one.grad) / totals.tokens for name, one in masters(policy).items()}
    assert difference(ours, gradients(reference)) < 0.05


class FullAtHandOver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A device with no room for the float32 copy of the first gradient that there is."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = weights

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.name() == "aten::_to_copy" and any(args[0] is one.grad for one in self.weights):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return func(*args, **(kwargs or {}))


def test_a_gradient_that_was_never_handed_over_is_not_counted_twice(
    make_full: MakeFull, groups: list[Group]
) -> None:
    found = []
    for fails in (False, True):
        policy, settings = make_full(dtype="bfloat16"), reinforcement()
        shares = [contribution_of(group, settings, policy.text) for group in groups]
        gradient = LocalGradient(PolicyLoss(policy, settings), token_budget=40)
        with FullAtHandOver(policy.computing) if fails else nullcontext():
            gradient.add([present(share.pack) for share in shares], StepValues())
        assert (gradient.shortage is not None) == fails
        if fails:
            gradient.resize(PlanSizes(40, 0, sleeps=False, checkpointed=False))
        gradient.collect()
        found.append([present(one.grad) for one in policy.trainable])

    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_that_are_computed_twice_give_the_same_gradient(make_full: MakeFull, dtype: str) -> None:
    found = []
    for checkpointed in (False, True):
        policy = make_full(dtype=dtype)
        if checkpointed:
            policy.checkpoint_layers()
        OfflineTrainer(policy, offline(), token_budget=60).add(conversations())
        found.append([present(one.grad) for one in policy.trainable])

    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", ["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_for_a_sampler_are_those_that_compute_by_the_names_of_a_checkpoint(
    make_full: MakeFull, tmp_path: Path, kind: str, dtype: str
) -> None:
    policy = make_full(kind, dtype)
    OfflineTrainer(policy, offline(learning_rate=0.01), token_budget=10_000).step(conversations())
    for name in ("checkpoint", "weights"):
        (tmp_path / name).mkdir()
    policy.save(tmp_path / "checkpoint")

    policy.write_weights(tmp_path / "weights")

    written = files_in(tmp_path / "weights")
    saved = files_in(tmp_path / "checkpoint")
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name], saved[name]) for name in saved)
    assert {tensor.dtype for tensor in written.values()} == {getattr(torch, dtype)}


def test_the_version_of_the_weights_changes_with_each_step_and_each_checkpoint(
    make_full: MakeFull, tmp_path: Path
) -> None:
    policy = make_full()
    versions = [policy.weights_version]
    trainer = OfflineTrainer(policy, offline(), token_budget=60)

    trainer.step(conversations())
    versions.append(policy.weights_version)
    policy.save(tmp_path)
    policy.load(tmp_path)
    versions.append(policy.weights_version)

    assert len(set(versions)) == 3
    assert policy.weights_version == versions[-1]


def files_in(folder: Path) -> dict[str, Tensor]:
    return {name: one for file in folder.glob("model*.safetensors") for name, one in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_a_whole_model_that_transformers_loads(
    make_full: MakeFull, models: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    policy = make_full(dtype=dtype)
    compatibility.probe(policy, sampled=True)  # it computes with attention of its own from here on
    OfflineTrainer(policy, offline(learning_rate=0.01), token_budget=10_000).step(conversations())

    policy.save(tmp_path)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    ids = torch.tensor([policy.render([{"role": "user", "content": "say yes"}])])
    assert all(map(torch.equal, loaded.parameters(), policy.model.parameters()))
    assert AutoTokenizer.from_pretrained(tmp_path).decode(ids[0]) == policy.tokenizer.decode(ids[0])
    texts = [file.read_text() for file in tmp_path.iterdir() if file.suffix == ".json"]
    assert not any(str(models["untied"].parent) in text for text in texts)


def test_a_run_may_start_from_the_weights_of_a_whole_model(
    make_full: MakeFull, models: dict[str, Path], tmp_path: Path
) -> None:
    policy = make_full()
    OfflineTrainer(policy, offline(), token_budget=10_000).step(conversations())
    policy.save(tmp_path)

    entry = BaseModelEntry(path=models["untied"], dtype="float32", context=512)
    child = FullPolicy(load_base("tiny", entry, tmp_path, "cpu", weights=tmp_path))

    assert all(map(torch.equal, child.trainable, policy.trainable))
    assert child.source == models["untied"]


@pytest.mark.parametrize("name", ["masters-00001.safetensors", "moments-00001.safetensors", "trainer.pt"])
def test_a_damaged_checkpoint_is_refused(make_full: MakeFull, tmp_path: Path, name: str) -> None:
    trainer = OfflineTrainer(make_full(dtype="bfloat16"), offline(), token_budget=60)
    trainer.step(conversations())
    trainer.save(tmp_path)
    (tmp_path / name).write_bytes(b"no weights")

    with pytest.raises(InvalidModel, match="cannot be read"):
        OfflineTrainer(make_full(dtype="bfloat16"), offline(), token_budget=60).load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(make_full: MakeFull, tmp_path: Path) -> None:
    make_full("tied").save(tmp_path)

    with pytest.raises(InvalidModel, match="shape"):
        make_full().load(tmp_path)


def fp8() -> LlamaConfig:
    config = LlamaConfig()
    config.quantization_config = {"quant_method": "fp8"}
    return config


@pytest.mark.parametrize(
    ("config", "parameters", "said"),
    [
        (LlamaConfig(), 8_500_000_001, "at most 8B parameters, and this one has 8.5B"),
        (fp8(), 1000, r"quantized \(fp8\)"),
        (MixtralConfig(), 1000, "mixture of experts"),
    ],
)
def test_what_cannot_be_trained_whole_is_refused_by_name(config: Any, parameters: int, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        refuse(config, parameters)
    refuse(LlamaConfig(), 8_030_261_248)


def test_files_with_other_names_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    base = load(models["untied"])
    tensors = {f"old.{name}": one for name, one in base.model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")

    refuse_other_names(base)
    with pytest.raises(UnsupportedModel, match="other names for its weights, such as model"):
        refuse_other_names(replace(base, source=tmp_path))
    with pytest.raises(InvalidModel, match="no safetensors files"):
        refuse_other_names(replace(base, source=tmp_path.parent))
