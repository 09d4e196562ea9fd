"""Answers that are held to a JSON schema, by a model that writes noise."""

import json

import pytest

from core.registry import BaseModelEntry
from tests.tiny import make_byte_model
from worker.policy import Policy, load_base
from worker.samplers import Sampling, grouped
from worker.samplers.json_schema import UnsupportedSchema
from worker.samplers.transformers import TransformersSampler
from worker.types import Prompt

SCORE = {
    "type": "object",
    "properties": {"label": {"type": "string", "enum": ["good", "bad"]}, "result": {"type": "integer"}},
    "required": ["label", "result"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    folder = make_byte_model(tmp_path_factory.mktemp("bytes"))
    base = load_base("bytes", BaseModelEntry(path=folder, dtype="float32", context=256), folder, "cpu")
    return TransformersSampler(Policy(base, rank=1, alpha=1, seed=0))


def sample(sampler, schema, *, tokens=48, temperature=1.0):
    prompts = [
        Prompt(n, tuple(sampler.policy.render([{"role": "user", "content": "?" * n}])), {}) for n in (1, 2)
    ]
    grammar = sampler.vocabulary.grammar(schema) if schema else ""
    sampling = Sampling(4, temperature, tokens, job_seed=1, step=1, grammar=grammar)
    return [one for group in grouped(sampler.answers(prompts, sampling), 2, 4) for one in group]


def test_every_finished_answer_is_json_of_the_schema(sampler):
    answers = [json.loads(one.text) for one in sample(sampler, SCORE) if one.finish_reason == "stop"]

    assert len(answers) >= 4  # noise may be a number without end
    assert all(answer["label"] in ("good", "bad") and type(answer["result"]) is int for answer in answers)
    assert len({answer["result"] for answer in answers}) > 1


def test_without_a_schema_the_same_model_writes_none(sampler):
    with pytest.raises(ValueError, match=r"Expecting|Invalid|Extra"):
        json.loads(sample(sampler, None)[0].text)


def test_an_answer_may_end_only_where_the_schema_does(sampler):
    label = {
        "type": "object",
        "properties": {"l": {"enum": ["x"]}},
        "required": ["l"],
        "additionalProperties": False,
    }

    assert {(one.text, one.finish_reason) for one in sample(sampler, label)} == {('{"l": "x"}', "stop")}
    assert {one.finish_reason for one in sample(sampler, label, tokens=4)} == {"length"}


def test_the_best_allowed_token_is_taken_at_temperature_0(sampler):
    first, *others = sample(sampler, SCORE, temperature=0)[:4]

    assert all(other == first for other in others)
    assert first.text.startswith('{"label": "')


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"type": "object", "properties": 5}])
def test_what_is_no_schema_is_refused(sampler, schema):
    with pytest.raises(UnsupportedSchema):
        sampler.vocabulary.grammar(schema)
