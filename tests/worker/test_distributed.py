"""One gradient in several processes: the adapter is that of one process, and a checkpoint fits any number of ranks."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from core.jobs.hyperparameters import Resolved
from core.registry import BaseModelEntry
from core.response_format import response_schema
from graders.types import Grade
from tests.fakes import learn
from tests.present import present, untyped
from tests.tiny import WORDS, make_byte_model
from tests.worker.process_group import followed
from tests.worker.rounding import NATS, assert_same
from tests.worker.test_json_schema import LETTER, sample
from tests.worker.test_training import asked, drawn, prompt, relative_difference, sampling
from worker.model.full import FullPolicy
from worker.model.policy import Policy
from worker.refusals import UnsupportedModel
from worker.sampling.transformers import TransformersSampler
from worker.training.distributed import LoadModel, load_checked, loading
from worker.training.rank_model import Model
from worker.training.sampler_gate import SamplerGate
from worker.training.trainer import PeftTrainer
from worker.training.world import World
from worker.types import Group, Prompt, Rollout

pytestmark = pytest.mark.slow

REWARDS = (1.0, 0.0, 0.5, 0.2)
# Tokens of the prompt, and of the longest of its answers.
UNEVEN = ((12, 9), (40, 30), (7, 6), (50, 35), (33, 12))


# Four ranks are several groups of shards with shards each. What two ranks show besides runs at night.
RANKS = [4, pytest.param(2, marks=pytest.mark.thorough)]


@pytest.fixture(scope="module", params=RANKS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A process group of so many ranks, of which this process is the first."""
    with followed(tmp_path_factory.mktemp("world"), request.param) as world:
        yield world


@dataclass(frozen=True)
class Pair:
    """Trainers that begin alike: one computes alone, one with all ranks."""

    alone: PeftTrainer
    together: PeftTrainer

    def movement(self) -> float:
        """How much the adapters' movements differ, relative to the movement."""
        moves = [
            [now.detach() - then for now, then in zip(one.policy.trainable, began(one.policy), strict=True)]
            for one in (self.together, self.alone)
        ]
        return float(relative_difference(*moves))


def began(policy: Policy) -> list[torch.Tensor]:
    """The random adapter that all trainers here begin with."""
    generator = torch.Generator().manual_seed(5)
    return [0.2 * torch.randn(parameter.shape, generator=generator) for parameter in policy.trainable]


@pytest.fixture(scope="module")
def tied_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, whose head is its embeddings."""
    folder = tmp_path_factory.mktemp("tied")
    for file in tiny_model.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(0)
    config = json.loads((tiny_model / "config.json").read_text()) | {"tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    return folder


@pytest.fixture
def pair(world: World) -> Callable[..., Pair]:
    def make(
        settings: Resolved,
        folder: Path,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        budget: int = 4096,
        checkpointed: bool = False,
        schema: str = "",
        degree: int = 1,
    ) -> Pair:
        entry = BaseModelEntry(path=folder, dtype=dtype, context=256)
        model = Model("tiny", entry, folder, settings, 0, checkpointed, sampled=True)
        with loading(world, LoadModel(model, "cpu", 1, budget, schema, degree)):
            together, _ = load_checked(model, "cpu", degree, world)
        policies = [model.load("cpu"), together]
        for policy in policies:
            with torch.no_grad():
                for parameter, value in zip(policy.trainable, began(policy), strict=True):
                    parameter.copy_(value)
        return Pair(
            *(
                PeftTrainer(
                    policy,
                    settings,
                    token_budget=budget,
                    response_schema=schema,
                    world=ranks,
                    keeps_tokens=True,
                )
                for policy, ranks in zip(policies, (None, world), strict=True)
            )
        )

    return make


class UnsupportedElsewhere(Model):
    """The machine of this rank lacks what the model needs."""

    def load(self, device: str) -> Policy:
        raise UnsupportedModel("not on this machine")


def test_a_model_that_another_rank_refuses_is_refused_by_rank_0(
    world: World, tiny_model: Path, pair: Callable[..., Pair]
) -> None:
    entry = BaseModelEntry(path=tiny_model, dtype="float32", context=256)
    model = UnsupportedElsewhere("tiny", entry, tiny_model, asked({}), 0, False, sampled=True)

    with (
        pytest.raises(UnsupportedModel, match="not on this machine"),
        loading(world, LoadModel(model, "cpu", 1, 4096, "")),
    ):
        pass

    assert learn(pair(like_the_policy({}), tiny_model).together, groups(1)).trained_tokens > 0


def like_the_policy(advanced: dict[str, Any]) -> Resolved:
    return asked({"lora_rank": 4, "lora_alpha": 8, "overlap": False} | advanced)


def groups(step: int) -> list[Group]:
    """Random answers of uneven length, as another engine would have sampled them."""
    draw = torch.Generator().manual_seed(step)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(6, len(WORDS), (length,), generator=draw).tolist())

    def rollout(length: int) -> Rollout:
        logprobs = -(4 + torch.rand(length, generator=draw))
        return Rollout(ids(length), tuple(logprobs.tolist()), "", "stop")

    return [
        Group(
            Prompt(line, ids(before), {}),
            tuple(rollout(longest - less) for less in range(4)),
            tuple(map(Grade, REWARDS)),
        )
        for line, (before, longest) in enumerate(UNEVEN)
    ]


def without_adam(*trainers: PeftTrainer) -> None:
    """AdamW makes a full step of a gradient that is nothing but rounding."""
    for trainer in trainers:
        untyped(trainer).optimizer.adamw = torch.optim.SGD(trainer.policy.trainable, lr=0.01)
        if trainer.value_optimizer is not None:
            untyped(trainer).value_optimizer.adamw = torch.optim.SGD(trainer.value_optimizer.weights, lr=0.01)


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss": "dapo"}, {}),
    ({"loss": "dapo", "updates_per_batch": 1}, {}),  # the KL is watched last, by a forward pass alone
    ({"loss": "grpo", "overlap": True}, {"budget": 48}),  # distributed while others are being sampled
    ({"loss": "grpo", "kl": 0.1, "kl_warmup_steps": 3, "mini_batches": 2}, {"budget": 48}),
    ({"loss": "reinforce_plus_plus", "kl": 0.1, "kl_warmup_steps": 3, "mini_batches": 2}, {"budget": 48}),
    ({"loss": "ppo", "kl": 0.1, "mini_batches": 2, "reference_refresh_steps": 1}, {"budget": 48}),
    ({"loss": "gspo", "kl": 0.1, "reference_refresh_steps": 1}, {"budget": 128, "checkpointed": True}),
]


# Ranks, degree and tied heads of each setting by day: each pair of their values is there.
BY_DAY = [
    (4, 1, False),
    (2, 1, True),
    (2, 1, False),
    (4, 2, True),
    (4, 1, True),
    (2, 2, False),
    (4, 2, False),
]


def cases() -> Iterator[Any]:
    """Each setting once by day, and at night with all ranks and degrees."""
    for case, by_day in zip(SETTINGS, BY_DAY, strict=True):
        yield pytest.param(by_day[0], *case, *by_day[1:])
        for ranks, degree in itertools.product((2, 4), (1, 2)):
            if (ranks, degree) != by_day[:2]:
                yield pytest.param(ranks, *case, degree, not by_day[2], marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("world", "advanced", "options", "degree", "tied"), list(cases()), indirect=["world"]
)
def test_all_ranks_together_learn_what_one_process_does(
    pair: Callable[..., Pair],
    tiny_model: Path,
    tied_model: Path,
    tmp_path: Path,
    tied: bool,
    degree: int,
    advanced: dict[str, Any],
    options: dict[str, Any],
) -> None:
    settings = like_the_policy({"updates_per_batch": 2} | advanced)
    both = pair(settings, tied_model if tied else tiny_model, degree=degree, **options)
    assert both.together.policy.is_sharded == (degree > 1)
    without_adam(both.alone, both.together)
    for step in range(3):
        answers = groups(step)
        expected, metrics = (learn(one, answers) for one in (both.alone, both.together))
        assert metrics.tokens.keys() == expected.tokens.keys()
        for key, values in expected.tokens.items():
            for mine, own in zip(vars(metrics.tokens[key]).values(), vars(values).values(), strict=True):
                assert list(mine) == pytest.approx(list(own), rel=1e-3, abs=1e-4)
        # Without a penalty, KL is only watched, on one pack, which may be another one.
        but = ("tokens",) if settings.kl else ("tokens", "kl")
        assert_same(metrics, expected, terms=NATS, but=but)
        both.together.save(tmp_path)  # on rank 0 alone, where a state dict shards what was gathered

    assert both.movement() < 1e-4
    if settings.loss == "ppo":
        together, alone = (one.loss.trainable[-2:] for one in (both.together, both.alone))
        assert relative_difference([*together], [*alone]) < 1e-4


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.parametrize("degree", [1, 2])
def test_ranks_undo_the_updates_that_one_process_undoes(
    pair: Callable[..., Pair], tiny_model: Path, degree: int
) -> None:
    """All learned tokens are measured, by each rank those of its share."""
    settings = like_the_policy({"loss": "dapo", "step_kl": 0.05, "updates_per_batch": 2})
    both = pair(settings.model_copy(update={"learning_rate": 3.0}), tiny_model, degree=degree)
    without_adam(both.alone, both.together)
    retries = 0
    for step in range(2):
        answers = groups(step)[::2]
        expected, metrics = (learn(one, answers) for one in (both.alone, both.together))
        retries += present(expected.update_retries)

        assert metrics.update_retries == expected.update_retries
        assert metrics.rejected_updates == expected.rejected_updates
        assert metrics.update_kl == pytest.approx(expected.update_kl, rel=0.01)
        assert metrics.learning_rate == pytest.approx(expected.learning_rate, rel=0.01)

    assert retries
    assert both.movement() < 0.01


@pytest.mark.parametrize("degree", [1, 2])
def test_bfloat16_differs_from_one_process_as_that_from_itself(
    pair: Callable[..., Pair], tied_model: Path, degree: int
) -> None:
    """Other micro-batches are rounded otherwise."""
    settings = like_the_policy({"loss": "dapo", "kl": 0.1, "updates_per_batch": 2})
    smaller, both = (
        pair(settings, tied_model, dtype="bfloat16", checkpointed=True, budget=budget, degree=degree)
        for budget in (128, 4096)
    )
    without_adam(smaller.alone, both.alone, both.together)

    for step in range(3):
        for trainer in (smaller.alone, both.alone, both.together):
            learn(trainer, groups(step))

    assert both.movement() < 2 * Pair(both.alone, smaller.alone).movement()


@pytest.mark.parametrize("degree", [1, 2])
def test_one_short_group_leaves_ranks_without_work(
    pair: Callable[..., Pair], tiny_model: Path, degree: int
) -> None:
    both = pair(like_the_policy({}), tiny_model, degree=degree)
    short = replace(groups(0)[0], rollouts_G=groups(0)[0].rollouts_G[:2], grades_G=(Grade(1.0), Grade(0.0)))

    expected, metrics = (learn(one, [short]) for one in (both.alone, both.together))

    assert metrics.trained_sequences == 2
    assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("together_first", [False, True])
def test_a_checkpoint_resumes_on_another_number_of_ranks(
    pair: Callable[..., Pair], tiny_model: Path, tmp_path: Path, together_first: bool, degree: int
) -> None:
    both = pair(like_the_policy({"kl": 0.1, "reference_refresh_steps": 1}), tiny_model, degree=degree)
    first, second = (both.together, both.alone) if together_first else (both.alone, both.together)
    learn(first, groups(1))
    first.save(tmp_path)

    second.load(tmp_path)

    assert all(map(torch.equal, first.policy.trainable, second.policy.trainable))
    expected, metrics = (learn(one, groups(2)) for one in (first, second))
    assert metrics.kl == pytest.approx(expected.kl, rel=1e-4)
    assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def test_the_gap_to_the_sampler_is_measured_on_all_ranks(pair: Callable[..., Pair], tiny_model: Path) -> None:
    both = pair(like_the_policy({}), tiny_model)
    expected = learn(both.alone, groups(1)).logprob_gap
    both.together.gate = SamplerGate(0.01, "other", "float32")
    before = [parameter.detach().clone() for parameter in both.together.policy.trainable]

    refused = learn(both.together, groups(1))

    assert refused.grad_norm is None
    assert refused.logprob_gap == pytest.approx(expected, rel=1e-3)
    assert all(map(torch.equal, before, both.together.policy.trainable))
    both.together.gate = None
    assert learn(both.together, groups(1)).trained_tokens > 0, "the refused step left nothing behind"


@pytest.mark.parametrize("degree", [1, 2])
def test_rank_0_compares_answers_of_an_earlier_policy_with_its_adapter(
    pair: Callable[..., Pair], tiny_model: Path, degree: int
) -> None:
    both = pair(like_the_policy({"off_policy_steps": 1}), tiny_model, degree=degree)
    both.together.gate = SamplerGate(1e-3, "other", "float32")
    policy = both.alone.policy
    prompts = [prompt(policy, text, line) for line, text in enumerate(("say yes", "name a bird"), start=1)]

    def sampled(off_by: float = 0.0, steps_ago: int = 1) -> list[Group]:
        with both.alone.policy_before(steps_ago):
            rollouts_PG = drawn(policy, prompts, sampling())
        return [
            Group(
                one,
                tuple(replace(r, logprobs_T=tuple(off_by + logp for logp in r.logprobs_T)) for r in rollouts),
                tuple(Grade(float(n % 2)) for n in range(len(rollouts))),
            )
            for one, rollouts in zip(prompts, rollouts_PG, strict=True)
        ]

    learn(both.together, sampled())
    learn(both.alone, sampled())
    gap = learn(both.together, sampled()).logprob_gap
    assert gap is not None and gap > both.together.gate.bound, "the current policy is another one"
    learn(both.alone, sampled())
    assert learn(both.together, sampled(off_by=0.25)).grad_norm is None
    # The refused step has changed nothing, so the policy before it is the current one.
    assert learn(both.together, sampled(steps_ago=0)).trained_tokens > 0, (
        "the refused step left nothing behind"
    )


def test_other_ranks_restrict_answers_to_the_schema(pair: Callable[..., Pair], tmp_path: Path) -> None:
    """Otherwise their probabilities would be over the whole vocabulary, which for bytes is another gradient."""
    settings = like_the_policy({"max_completion_tokens": 24})
    both = pair(settings, make_byte_model(tmp_path), schema=response_schema(LETTER))
    rollouts = sample(TransformersSampler(both.alone.policy), LETTER, tokens=24)
    letters = [
        Group(
            prompt(both.alone.policy, "?" * line, line),
            tuple(rollouts[4 * line - 4 : 4 * line]),
            tuple(map(Grade, REWARDS)),
        )
        for line in (1, 2)
    ]

    expected, metrics = (learn(one, letters) for one in (both.alone, both.together))

    assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def local_bytes(policy: Policy) -> int:
    """Bytes of the base model that this process keeps."""
    kept = {
        id(parameter): parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in policy.model.parameters()
        if not parameter.requires_grad
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in kept.values())


def test_a_sharded_base_is_kept_in_parts(pair: Callable[..., Pair], tiny_model: Path, world: World) -> None:
    """Everything but the head and the embeddings is divided by the number of ranks."""
    policy = pair(like_the_policy({}), tiny_model, degree=world.size).together.policy
    ends = sum(parameter.numel() for parameter in policy.outside_of_layers)
    whole = sum(parameter.numel() for parameter in policy.model.parameters() if not parameter.requires_grad)

    assert local_bytes(policy) == 4 * (ends + (whole - ends) // world.size)


def test_the_watched_kl_of_a_sharded_base_is_that_of_one_process(
    pair: Callable[..., Pair], tiny_model: Path
) -> None:
    both = pair(like_the_policy({}), tiny_model, degree=2)
    one = groups(1)[:1]

    expected, metrics = (learn(trainer, one) for trainer in (both.alone, both.together))

    assert metrics.kl is not None and metrics.kl > 0
    assert expected.kl is not None and expected.kl > 0


def test_a_fresh_adapter_on_a_sharded_base_is_drawn_as_on_a_whole_one(tiny_model: Path, world: World) -> None:
    settings = like_the_policy({})
    entry = BaseModelEntry(path=tiny_model, dtype="float32", context=256)
    model = Model("tiny", entry, tiny_model, settings, 7, False, sampled=False)
    with loading(world, LoadModel(model, "cpu", 1, 4096, "", 2)):
        sharded, verdict = load_checked(model, "cpu", 2, world)

    whole = model.load("cpu")

    for fresh, like in zip(sharded.trainable, whole.trainable, strict=True):
        assert fresh.any() == like.any(), "B is zero"
        assert torch.allclose(fresh.abs().max(), like.abs().max(), rtol=0.1, atol=0)
    assert verdict.route.forward == "packed"
    assert str(sharded.coverage) == str(whole.coverage)


@pytest.mark.parametrize(
    ("dtype", "advanced"), [("float32", {"kl": 0.1, "reference_refresh_steps": 1}), ("bfloat16", {})]
)
def test_all_weights_learn_on_all_ranks_what_they_learn_on_one(
    world: World, tiny_model: Path, dtype: Literal["float32", "bfloat16"], advanced: dict[str, Any]
) -> None:
    settings = asked({"train": "full", "learning_rate": 0.001, "updates_per_batch": 2} | advanced)
    model = Model(
        "tiny",
        BaseModelEntry(path=tiny_model, dtype=dtype, context=256),
        tiny_model,
        settings,
        0,
        False,
        True,
    )
    with loading(world, LoadModel(model, "cpu", 1, 60, "")):
        together, _ = load_checked(model, "cpu", 1, world)
    alone = model.load("cpu")
    assert isinstance(together, FullPolicy) and isinstance(alone, FullPolicy)
    start = alone.snapshot()

    trainers = [
        PeftTrainer(policy, settings, token_budget=60, world=ranks)
        for policy, ranks in ((together, world), (alone, None))
    ]
    without_adam(*trainers)
    metrics = [[learn(trainer, groups(step)) for step in range(3)] for trainer in trainers]

    # Three steps of two updates: what rank 0 sends to the others has not changed.
    assert [policy.weights_version for policy in (together, alone)] == [7, 7]
    moves = [
        [now.detach() - then.float() for now, then in zip(policy.trainable, start, strict=True)]
        for policy in (together, alone)
    ]
    near = 1e-4 if dtype == "float32" else 0.05  # gradients of micro-batches are rounded to bfloat16
    assert relative_difference(*moves) < near
    for mine, own in zip(*metrics, strict=True):
        assert mine.loss == pytest.approx(own.loss, rel=near, abs=near)
        assert mine.kl == (None if not settings.kl else pytest.approx(own.kl, rel=near, abs=near))
