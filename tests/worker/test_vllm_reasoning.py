"""A reasoning model sampled with vLLM: its grammar and budget, as the trainer computes them again."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from core.response_format import response_schema
from graders.types import Grade
from tests.fakes import learn
from tests.own_engines import with_forked_engines
from tests.present import present
from tests.worker.test_token_constraints import LETTER, load_thinking
from tests.worker.test_training import asked
from worker.model.policy import Policy
from worker.packages import vllm_version
from worker.sampling import Sampling, grouped
from worker.sampling.vllm import VllmSampler
from worker.training.trainer import PeftTrainer
from worker.types import Group, Prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_thinking("distill", tmp_path_factory.mktemp("distill"))


@pytest.fixture(scope="module")
def sampler(policy: Policy) -> Iterator[VllmSampler]:
    sampler = with_forked_engines(policy, kv_cache_bytes=1 << 25, threads=1)
    yield sampler
    sampler.close()


@pytest.mark.parametrize(("schema", "budget"), [(LETTER, 8), (LETTER, None), (None, 8)])
def test_the_trainer_gives_its_tokens_the_probabilities_that_vllm_had(
    policy: Policy, sampler: VllmSampler, schema: dict[str, Any] | None, budget: int | None
) -> None:
    prompt = Prompt(1, tuple(policy.render([{"role": "user", "content": "?"}])), {})
    how = Sampling(
        8,
        1.0,
        64,
        job_seed=1,
        step=1,
        response_schema=response_schema(schema) if schema else "",
        thinking_budget=budget,
    )

    [rollouts] = grouped(sampler.answers([prompt], how), 1, 8)

    answered = [one for one in rollouts if not one.cut_thought and one.finish_reason == "stop"]
    if budget is not None:
        assert all(one.grammar_start <= budget + 1 for one in rollouts)
    if schema is not None and budget is not None:
        assert len(answered) >= 4
        assert any(one.forced for one in rollouts)
    if schema is not None:
        assert all(json.loads(one.text)["letter"] in ("a", "b") for one in answered)
    grades = tuple(Grade(float(number % 2)) for number in range(8))
    trainer = PeftTrainer(
        policy, asked({"max_completion_tokens": 64}), token_budget=4096, response_schema=how.response_schema
    )
    assert present(learn(trainer, [Group(prompt, tuple(rollouts), grades)]).logprob_gap_max) < 1e-4
