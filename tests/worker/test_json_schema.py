"""Answers that are held to a JSON schema, by a model that writes noise."""

import json
from typing import Any

import pytest
import torch

from core.registry import BaseModelEntry
from core.response_format import response_schema
from graders.types import Grade
from tests.fakes import learn
from tests.present import present
from tests.tiny import make_byte_model
from tests.worker.test_training import asked
from worker.model.json_schema import every_token, forbidden
from worker.model.policy import Policy, load_base
from worker.sampling import Sampling, grouped
from worker.sampling.transformers import TransformersSampler
from worker.training.trainer import PeftTrainer
from worker.types import Group, Pack, Prompt, TrainingSequence

SCORE = {
    "type": "object",
    "properties": {"label": {"type": "string", "enum": ["good", "bad"]}, "result": {"type": "integer"}},
    "required": ["label", "result"],
    "additionalProperties": False,
}


LETTER = {
    "type": "object",
    "properties": {"letter": {"enum": ["a", "b", "c", "d", "e", "f"]}},
    "required": ["letter"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> TransformersSampler:
    folder = make_byte_model(tmp_path_factory.mktemp("bytes"))
    base = load_base("bytes", BaseModelEntry(path=folder, dtype="float32", context=256), folder, "cpu")
    return TransformersSampler(Policy(base, rank=1, alpha=1, seed=0))


def sample(
    sampler: TransformersSampler, schema: dict[str, Any] | None, *, tokens: int = 48, temperature: float = 1.0
) -> list[Any]:
    prompts = [
        Prompt(n, tuple(sampler.policy.render([{"role": "user", "content": "?" * n}])), {}) for n in (1, 2)
    ]
    sampling = Sampling(
        4, temperature, tokens, job_seed=1, step=1, response_schema=response_schema(schema) if schema else ""
    )
    return [one for group in grouped(sampler.answers(prompts, sampling), 2, 4) for one in group]


def test_every_finished_answer_is_json_of_the_schema(sampler: TransformersSampler) -> None:
    answers = [json.loads(one.text) for one in sample(sampler, SCORE) if one.finish_reason == "stop"]

    assert len(answers) >= 4  # noise may be a number without end
    assert all(answer["label"] in ("good", "bad") and type(answer["result"]) is int for answer in answers)
    assert len({answer["result"] for answer in answers}) > 1


def test_without_a_schema_the_same_model_writes_none(sampler: TransformersSampler) -> None:
    with pytest.raises(ValueError, match=r"Expecting|Invalid|Extra"):
        json.loads(sample(sampler, None)[0].text)


def test_an_answer_may_end_only_where_the_schema_does(sampler: TransformersSampler) -> None:
    label = {
        "type": "object",
        "properties": {"l": {"enum": ["x"]}},
        "required": ["l"],
        "additionalProperties": False,
    }

    assert {(one.text, one.finish_reason) for one in sample(sampler, label)} == {('{"l": "x"}', "stop")}
    assert {one.finish_reason for one in sample(sampler, label, tokens=4)} == {"length"}


def test_the_best_allowed_token_is_taken_at_temperature_0(sampler: TransformersSampler) -> None:
    first, *others = sample(sampler, SCORE, temperature=0)[:4]

    assert all(other == first for other in others)
    assert first.text.startswith('{"label": "')


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_has_the_samplers_probabilities_over_what_the_schema_allows(
    sampler: TransformersSampler, temperature: float
) -> None:
    """And not over the whole vocabulary: that is the control, and it is far off."""
    rollouts = sample(sampler, SCORE, tokens=24, temperature=temperature)
    one = Prompt(1, tuple(sampler.policy.render([{"role": "user", "content": "?"}])), {})
    answers = tuple(
        TrainingSequence(r.output_ids_T, r.logprobs_T, (1.0,) * len(r.output_ids_T), 1.0)
        for r in rollouts[:4]
    )
    sampled = torch.tensor([logprob for r in rollouts[:4] for logprob in r.logprobs_T])
    settings = asked({"temperature": temperature})

    gaps = []
    for schema in (response_schema(SCORE), ""):
        trainer = PeftTrainer(sampler.policy, settings, token_budget=4096, response_schema=schema)
        logp, entropy, _ = trainer.loss.forward(trainer.loss.tensors([Pack(one.ids, answers)]))
        gaps.append((logp - sampled).abs().max().item())
        assert entropy.isfinite().all()

    assert gaps[0] < 1e-4
    assert gaps[1] > 1.0


@pytest.mark.slow
def test_a_step_under_a_schema_makes_the_good_answers_likelier(sampler: TransformersSampler) -> None:
    rollouts = sample(sampler, LETTER, tokens=32)
    good = min({r.text for r in rollouts}, key=[r.text for r in rollouts].count)
    rewards = [float(r.text == good) for r in rollouts]
    assert 0 < sum(rewards) < len(rewards)
    one = Prompt(1, tuple(sampler.policy.render([{"role": "user", "content": "?"}])), {})
    settings = asked({"learning_rate": 0.02})
    trainer = PeftTrainer(
        sampler.policy, settings, token_budget=4096, response_schema=response_schema(LETTER)
    )

    for _ in range(3):
        metrics = learn(trainer, [Group(one, tuple(rollouts), tuple(map(Grade, rewards)))])

    after = [r.text for r in sample(sampler, LETTER, tokens=32)]
    assert after.count(good) > sum(rewards)
    assert present(metrics.entropy) < 0.3  # nats a token: one choice among six letters, all else is given


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
def test_where_memory_cannot_be_pinned_a_mask_is_in_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a driver, but no pinned memory

    assert every_token(2, 33).tolist() == [[-1, -1], [-1, -1]]


def test_no_positions_have_no_forbidden_tokens() -> None:
    assert forbidden(torch.zeros(0, 3, dtype=torch.int32), 70).shape == (0, 70)
