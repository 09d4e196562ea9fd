"""One run in several processes: the result is that of one process, and it ends when one of them does."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from core.jobs.hyperparameters import Resolved
from core.registry import BaseModelEntry
from core.response_format import held_to
from graders.types import Grade
from tests.fakes import learn
from tests.tiny import make_byte_model
from tests.worker.test_json_schema import LETTER, sample
from tests.worker.test_training import asked, drawn, prompt, relative_difference, sampling, with_gap
from worker.assemble import load_policy
from worker.learn.rank import serve, start
from worker.learn.ranks import Line, Model, Ranks, Start
from worker.learn.trainer import PeftTrainer
from worker.model import support
from worker.model.policy import Policy, Route
from worker.refusals import SamplerMismatch
from worker.rollout.sampler_gate import SamplerGate
from worker.rollout.samplers.transformers import TransformersSampler
from worker.types import Group

pytestmark = pytest.mark.slow

# Of uneven length, and more than one for each rank.
TEXTS = [
    "say yes",
    "what colour is it now please tell me the name of the animal",
    "tell me a number",
    "say cat",
]
MIXED = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.2], [0.3, 0.2, 0.9, 0.0], [0.0, 0.0, 1.0, 0.0]]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def trainers(make_policy: Callable[..., Policy], tiny_model: Path, two: Ranks) -> Callable[..., list[Any]]:
    """Two trainers on policies that are alike: one alone, one with a helper."""

    def make(settings: Any, budget: int = 4096) -> list[Any]:
        model = Model(
            "tiny",
            BaseModelEntry(path=tiny_model, dtype="float32", context=128),
            tiny_model,
            settings,
            0,
            False,
            sampled=True,
        )
        two.start(model, device="cpu", threads=1, token_budget=budget, held_to="")
        two.wait()
        return [
            PeftTrainer(make_policy(moved=True), settings, token_budget=budget, helpers=helpers)
            for helpers in ((), two.helpers)
        ]

    return make


def like_the_policy(advanced: dict[str, Any]) -> Resolved:
    return asked({"lora_rank": 4, "lora_alpha": 8} | advanced)


def sampled(policy: Policy, step: int = 1) -> list[Any]:
    prompts = [prompt(policy, text, line) for line, text in enumerate(TEXTS, start=1)]
    answers_PG = drawn(policy, prompts, sampling(step=step))
    return [
        Group(one, rollouts, tuple(map(Grade, rewards)))
        for one, rollouts, rewards in zip(prompts, answers_PG, MIXED, strict=True)
    ]


@pytest.mark.parametrize(
    ("advanced", "budget"),
    [
        ({"loss": "dapo", "overlap": False}, 4096),
        (
            {"loss": "grpo", "overlap": True},
            24,
        ),  # handed out in several parts, while others are still to come
        # Several passes over what each rank keeps, and a reference that moves.
        ({"loss": "gspo", "updates_per_batch": 3, "kl": 0.1, "reference_refresh_steps": 1}, 64),
    ],
)
def test_two_ranks_learn_what_one_does(
    trainers: Callable[..., list[Any]], advanced: dict[str, Any], budget: int
) -> None:
    alone, together = trainers(like_the_policy(advanced), budget)
    # The optimizer that all are equal before: AdamW makes a full step of what is nothing but rounding.
    for one in (alone, together):
        one.optimizer.adamw = torch.optim.SGD(one.policy.trainable, lr=0.01)
    began = [parameter.detach().clone() for parameter in alone.policy.trainable]

    for step in (1, 2):
        groups = [with_gap(group, n) for n, group in enumerate(sampled(alone.policy, step))]
        expected, metrics = learn(alone, groups), learn(together, groups)
        for name, value in vars(expected).items():
            if name != "kl" or alone.settings.kl:  # otherwise only watched, on one pack, which may be another
                assert getattr(metrics, name) == pytest.approx(value, rel=1e-4, abs=1e-6), name

    moves = [
        [now.detach() - then for now, then in zip(one.policy.trainable, began, strict=True)]
        for one in (together, alone)
    ]
    assert relative_difference(*moves) < 1e-4


def test_the_sampler_is_judged_by_the_numbers_of_all_ranks(trainers: Callable[..., list[Any]]) -> None:
    """Two of four groups come from another policy, by the sampler's own account; both ranks have some of each."""
    _, together = trainers(like_the_policy({"overlap": False}))
    together.gate = SamplerGate(0.01, "other", "float32")
    before = [parameter.detach().clone() for parameter in together.policy.trainable]
    groups = sampled(together.policy)
    off = [
        replace(
            g,
            rollouts_G=tuple(
                replace(r, logprobs_T=tuple(x + 0.25 for x in r.logprobs_T)) for r in g.rollouts_G
            ),
        )
        for g in groups[:2]
    ]
    tokens = [
        sum(
            len(r.output_ids_T)
            for r, advantage in zip(g.rollouts_G, centred(rewards), strict=True)
            if advantage
        )
        for g, rewards in zip(groups, MIXED, strict=True)
    ]

    with pytest.raises(SamplerMismatch) as refused:
        learn(together, [*off, *groups[2:]])

    assert f"differ by {0.25 * sum(tokens[:2]) / sum(tokens):.3g} nats" in str(refused.value)
    assert all(map(torch.equal, before, together.policy.trainable))


def centred(rewards: list[float]) -> list[Any]:
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


def test_a_run_on_two_ranks_samples_the_answers_of_one(trainers: Callable[..., list[Any]]) -> None:
    """As AdamW has it, and each from the policy that its own steps have made."""
    answers = []
    for trainer in trainers(like_the_policy({"learning_rate": 0.02})):
        texts = []
        for step in (1, 2, 3):
            groups = sampled(trainer.policy, step)
            texts.append([[rollout.text for rollout in group.rollouts_G] for group in groups])
            learn(trainer, groups)
        answers.append(texts)

    assert answers[0] == answers[1]


def test_a_helper_holds_answers_to_the_schema_too(two: Ranks, tmp_path: Path) -> None:
    """Its probabilities would otherwise be over the whole vocabulary, which for bytes is another gradient."""
    folder = make_byte_model(tmp_path)
    entry = BaseModelEntry(path=folder, dtype="float32", context=256)
    settings = like_the_policy({"max_completion_tokens": 24})
    model, schema = Model("bytes", entry, folder, settings, 0, False, sampled=True), held_to(LETTER)
    two.start(model, device="cpu", threads=1, token_budget=4096, held_to=schema)
    two.wait()
    policy = model.load("cpu")
    rollouts = sample(TransformersSampler(policy), LETTER, tokens=24)
    groups = [
        Group(
            prompt(policy, "?" * line, line),
            tuple(rollouts[4 * line - 4 : 4 * line]),
            tuple(map(Grade, rewards)),
        )
        for line, rewards in enumerate(MIXED[:2], start=1)
    ]

    alone, together = (
        PeftTrainer(model.load("cpu"), settings, token_budget=4096, held_to=schema, helpers=helpers)
        for helpers in ((), two.helpers)
    )

    assert learn(together, groups).grad_norm == pytest.approx(learn(alone, groups).grad_norm, rel=1e-4)


def test_all_ranks_compute_as_the_decode_of_rank_0_allows(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed pass is right here, but no decode is that belongs to it."""
    monkeypatch.setattr(support, "DECODES", {**support.DECODES, "packed": ()})
    entry = BaseModelEntry(path=tiny_model, dtype="float32", context=128)
    ranks = RanksInThisProcess()

    policy, _ = load_policy(
        cast(Any, SimpleNamespace(job=SimpleNamespace(model="tiny", seed=0))),
        cast(Any, SimpleNamespace(entry=entry, device="cpu", sampler="transformers")),
        cast(Any, SimpleNamespace(settings=like_the_policy({}), held_to="")),
        cast(Any, SimpleNamespace(checkpointed=False, token_budget=4096)),
        cast(Any, SimpleNamespace(model_cache=tmp_path, torch_threads=0)),
        cast(Any, ranks),
        lambda: None,
    )

    assert ranks.helper.policy.route == policy.route == Route("rows", "forked")


class RanksInThisProcess:
    """One helper, which is started at once."""

    def start(self, model: Model, *, device: str, threads: int, token_budget: int, held_to: str) -> None:
        self.helper = start(Start(model, device, 0, token_budget, held_to), 0)

    def wait(self) -> None:
        pass


def test_a_helper_that_has_nothing_to_compute_is_not_asked(trainers: Callable[..., list[Any]]) -> None:
    alone, together = trainers(like_the_policy({}))
    groups = sampled(alone.policy)[:1]

    assert learn(together, groups).grad_norm == pytest.approx(learn(alone, groups).grad_norm)


def test_one_rank_is_this_process_and_no_other() -> None:
    with Ranks(1) as ranks:
        assert ranks.helpers == []


def test_a_helper_ends_when_its_run_does() -> None:
    ours, theirs = socket.socketpair()
    ours.close()

    serve(Line(theirs))  # it returns


def test_arrays_of_other_sizes_arrive_as_they_were_sent() -> None:
    ours, theirs = map(Line, socket.socketpair())

    for sizes in ((3, 2), (3, 2), (5,), (0, 1), ()):
        sent = [np.arange(size, dtype=np.float32) for size in sizes]
        ours.send(("arrays", sent))
        word, received = theirs.receive()
        assert word == "arrays"
        assert [one.tolist() for one in received] == [one.tolist() for one in sent]
