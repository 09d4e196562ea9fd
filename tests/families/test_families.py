"""Every model family is either computed as transformers computes it, or refused before its first step.

Tiny random models; prompts longer than their attention windows. The reference is transformers' own `generate` with
eager attention on a model of its own, one sequence at a time.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.jobs.hyperparameters import Hyperparameters, resolve
from graders.types import Grade
from tests.fakes import learn
from tests.families.conftest import policy_on
from tests.families.zoo import CONTEXT, FAMILIES, SHORT, Family
from worker.learn.batch import tensors_of
from worker.learn.trainer import PeftTrainer
from worker.model import support
from worker.refusals import UnsupportedModel
from worker.rollout.samplers import Sampling
from worker.rollout.samplers.transformers import TransformersSampler
from worker.types import Group, Pack, Prompt
from worker.types import Sequence as Answer

LENGTHS = (40, 23)  # of the prompts
ANSWER = 10
SETTINGS = resolve(
    Hyperparameters.model_validate({"advanced": {"learning_rate": 0.01, "group_size": 4}}),
    rows=2,
    parameters=1000,
    context=CONTEXT,
)


@pytest.fixture(params=[*FAMILIES, *SHORT.values()], ids=lambda family: family.title)
def family(request) -> Family:
    return request.param


def test_a_family_is_computed_as_transformers_does_or_refused_by_name(family, load):
    """Never accepted and wrong."""
    folder, loaded = load(family)
    if loaded.policy is None:
        assert " is not supported" in loaded.refusal
        return

    policy = loaded.policy
    prompts = [
        Prompt(line, tuple((7 * line + 5 * n) % 68 + 3 for n in range(length)), {})
        for line, length in enumerate(LENGTHS, start=1)
    ]
    greedy = Sampling(group_size=2, temperature=0, max_completion_tokens=ANSWER, job_seed=0, step=0)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for answer in TransformersSampler(policy).answers(prompts, greedy):
        prompt, sampled = prompts[answer.prompt], answer.rollout
        ids, logprobs = plainly_generated(reference.eval(), prompt.ids)
        assert sampled.output_ids_T == ids
        assert sampled.logprobs_T == pytest.approx(logprobs, abs=1e-4)

        pack = Pack(prompt.ids, (as_trained(ids), as_trained(ids[::-1])))
        trained, _ = PeftTrainer(policy, SETTINGS, token_budget=512).own.logprobs(tensors_of([pack]))
        assert trained[: len(ids)].tolist() == pytest.approx(logprobs, abs=1e-4)


def plainly_generated(model, prompt_ids):
    """The greedy answer to one prompt and its tokens' log-probabilities."""
    output = model.generate(
        torch.tensor([prompt_ids]),
        max_new_tokens=ANSWER,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = output.sequences[0, len(prompt_ids) :].tolist()
    logprobs = torch.cat(output.logits).float().log_softmax(-1)
    return tuple(ids), [logprobs[t, token].item() for t, token in enumerate(ids)]


def as_trained(ids):
    return Answer(tuple(ids), (0.0,) * len(ids), (1.0,) * len(ids), 1.0)


def test_a_step_changes_the_adapter_of_a_supported_family(family, load):
    _, loaded = load(family)
    if loaded.policy is None:
        pytest.skip("refused")
    policy = loaded.policy
    before = [parameter.detach().clone() for parameter in policy.trainable]
    prompt = Prompt(1, tuple(range(3, 33)), {})
    how = Sampling(group_size=4, temperature=1.0, max_completion_tokens=8, job_seed=1, step=1)
    rollouts = sorted(TransformersSampler(policy).answers([prompt], how), key=lambda one: one.member)
    group = Group(
        prompt, tuple(one.rollout for one in rollouts), tuple(Grade(float(n % 2)) for n in range(4))
    )

    try:
        metrics = learn(PeftTrainer(policy, SETTINGS, token_budget=512), [group])

        assert metrics.logprob_gap < 1e-4
        assert metrics.grad_norm > 0
        moved = [not torch.equal(a, b.detach()) for a, b in zip(before, policy.trainable, strict=True)]
        # The gradient of A is zero while B is; every B moves, so no layer has an adapter that learns nothing.
        assert sum(moved) == len(moved) // 2
    finally:
        with torch.no_grad():
            for parameter, weight in zip(policy.trainable, before, strict=True):
                parameter.copy_(weight)


def test_what_its_config_refuses_the_numbers_refuse_too(family, load):
    """The check before the weights is only the cheaper one: it turns away no model that would have been right."""
    folder, loaded = load(family)
    if not loaded.by_config:
        pytest.skip("its config alone says nothing against it")

    with pytest.raises(UnsupportedModel, match=r"not supported"):
        support.probe(policy_on(folder), sampled=True)


def test_a_mixture_of_experts_has_its_router_and_experts_left_alone(load):
    families = [one for one in FAMILIES if one.title in ("Qwen 3 MoE", "Mixtral", "OLMoE", "Qwen 2 MoE")]
    for one in families:
        policy = load(one)[1].policy
        names = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
        assert names
        assert not [name for name in names if ".experts." in name or ".gate." in name or "_gate." in name]
