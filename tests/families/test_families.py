"""Every model family is either computed as transformers computes it, or refused before its first step.

Tiny random models; prompts longer than their attention windows. The reference is transformers' own `generate` with
eager attention on a model of its own, one sequence at a time.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer

from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import BaseModelEntry
from graders.types import Grade
from tests.fakes import learn
from tests.families.conftest import Loaded, policy_on
from tests.families.table import in_docs, table
from tests.families.zoo import CONTEXT, FAMILIES, Family
from tests.present import present
from worker.model.architecture import class_of
from worker.model.batch import split, tensors_of
from worker.model.policy import read_config
from worker.sampling import Sampling
from worker.sampling.transformers import TransformersSampler
from worker.serving.export import TEXTS, merge
from worker.training.trainer import PeftTrainer
from worker.types import Group, Pack, Prompt
from worker.types import TrainingSequence as Answer

LENGTHS = (40, 23)  # of the prompts
ANSWER = 10
SETTINGS = resolve(
    Hyperparameters.model_validate(
        {"advanced": {"optimizer": {"learning_rate": 0.01, "step_kl": 0}, "sampling": {"group_size": 4}}}
    ),
    rows=2,
    parameters=1000,
    context=CONTEXT,
)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.title)
def family(request: pytest.FixtureRequest) -> Family:
    family: Family = request.param
    return family


def test_a_family_is_computed_as_transformers_does_or_refused_by_name(
    family: Family, load: Callable[..., tuple[Path, Loaded]]
) -> None:
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
    # A scan in chunks is rounded differently with each length (Zamba 2); otherwise only the order of sums differs.
    near = 1e-3 if policy.route.forward == "rows" else 1e-4
    greedy = Sampling(group_size=2, temperature=0, max_completion_tokens=ANSWER, job_seed=0, step=0)
    reference = class_of(read_config(folder)).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for answer in TransformersSampler(policy).answers(prompts, greedy):
        prompt, sampled = prompts[answer.prompt], answer.rollout
        ids, logprobs = plainly_generated(
            reference.eval(), prompt.ids, cached=policy.route.decode != "recomputed"
        )
        assert sampled.output_ids_T == ids
        assert sampled.logprobs_T == pytest.approx(logprobs, abs=near)

        pack = Pack(prompt.ids, (as_trained(ids), as_trained(ids[::-1])))
        packs = [pack] if policy.route.forward == "packed" else list(split(pack, 0))
        trained = PeftTrainer(policy, SETTINGS, token_budget=512).loss.logprobs(tensors_of(packs))
        assert trained[: len(ids)].tolist() == pytest.approx(logprobs, abs=near)


def plainly_generated(
    model: Any, prompt_ids: tuple[int, ...], *, cached: bool
) -> tuple[tuple[Any, ...], list[float]]:
    """The greedy answer to one prompt and its tokens' log-probabilities."""
    output = model.generate(
        torch.tensor([prompt_ids]),
        max_new_tokens=ANSWER,
        do_sample=False,
        use_cache=cached,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = output.sequences[0, len(prompt_ids) :].tolist()
    logprobs = torch.cat(output.logits).float().log_softmax(-1)
    return tuple(ids), [logprobs[t, token].item() for t, token in enumerate(ids)]


def as_trained(ids: tuple[Any, ...]) -> Answer:
    return Answer(tuple(ids), (0.0,) * len(ids), (1.0,) * len(ids), 1.0)


@pytest.mark.parametrize(
    "family",
    # The test above computes the gradient's forward pass of each.
    [
        pytest.param(family, id=family.title, marks=() if number % 5 == 0 else pytest.mark.thorough)
        for number, family in enumerate(FAMILIES)
    ],
)
def test_a_step_changes_the_adapter_of_a_supported_family(
    family: Family, load: Callable[..., tuple[Path, Loaded]]
) -> None:
    _, loaded = load(family)
    if loaded.policy is None:
        pytest.skip("the family is refused on creation, so no step is taken")
    policy = loaded.policy
    # Nothing else has one, such as the experts' fused weights, which PEFT may take in place of a shared expert.
    adapted = [module for module in policy.model.modules() if isinstance(module, LoraLayer)]
    assert adapted and all(isinstance(module.get_base_layer(), torch.nn.Linear) for module in adapted)
    before = [parameter.detach().clone() for parameter in policy.trainable]
    prompt = Prompt(1, tuple(range(3, 33)), {})
    how = Sampling(group_size=4, temperature=1.0, max_completion_tokens=8, job_seed=1, step=1)
    rollouts = sorted(TransformersSampler(policy).answers([prompt], how), key=lambda one: one.member)
    group = Group(
        prompt, tuple(one.rollout for one in rollouts), tuple(Grade(float(n % 2)) for n in range(4))
    )

    try:
        metrics = learn(PeftTrainer(policy, SETTINGS, token_budget=512), [group])

        assert present(metrics.logprob_gap) < 1e-4
        assert present(metrics.grad_norm) > 0
        moved = [not torch.equal(a, b.detach()) for a, b in zip(before, policy.trainable, strict=True)]
        # The gradient of A is zero while B is. Nearly every B moves; those of Gemma 3n's gates for the embeddings of
        # a layer do not in its tiny model.
        assert sum(moved) >= 0.8 * len(moved) / 2
    finally:
        with torch.no_grad():
            for parameter, weight in zip(policy.trainable, before, strict=True):
                parameter.copy_(weight)


def test_nearly_every_family_is_supported(load: Callable[..., tuple[Path, Loaded]]) -> None:
    supported = [family.model_type for family in FAMILIES if load(family)[1].policy is not None]

    assert len(set(supported)) >= 115


def test_the_page_says_of_each_family_what_the_checks_at_load_say(
    load: Callable[..., tuple[Path, Loaded]],
) -> None:
    """If it differs, `python -m tests.families.table` writes the table anew."""
    assert in_docs() == table(lambda family: load(family)[1])


def test_a_mixture_of_experts_has_its_router_and_experts_left_alone(
    load: Callable[..., tuple[Path, Loaded]],
) -> None:
    families = [
        one
        for one in FAMILIES
        if one.title in ("Qwen 3 MoE", "Mixtral", "OLMoE", "Qwen 2 MoE", "JetMoE", "ZAYA")
    ]
    assert len(families) == 6
    for one in families:
        policy = load(one)[1].policy
        assert policy is not None
        names = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
        assert names
        left_alone = (".experts.", ".gate.", "_gate.", "router")
        assert not [name for name in names if any(part in name for part in left_alone)]
        assert re.search(r"; experts, \d+% of the parameters, have none\)$", str(policy.coverage))


def test_a_merged_model_is_the_base_with_its_adapter_whichever_class_loads_it(
    load: Callable[..., tuple[Path, Loaded]], tmp_path: Path
) -> None:
    """Mistral 4's automatic class is that of a multimodal model."""
    [family] = [one for one in FAMILIES if one.title == "Mistral 4"]
    folder, loaded = load(family)
    policy = policy_on(folder)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    policy.save(tmp_path / "adapter")
    for name in TEXTS:  # an export has them
        (tmp_path / "adapter" / name).touch()

    entry = BaseModelEntry(path=folder, dtype="float32", context=CONTEXT)
    merge(entry, tmp_path, tmp_path / "adapter", tmp_path / "merged")

    merged = class_of(read_config(tmp_path / "merged")).from_pretrained(tmp_path / "merged")
    ids = torch.tensor([list(range(3, 23))])
    with torch.no_grad():
        assert loaded.policy is not None
        expected, base = policy.model(input_ids=ids).logits, loaded.policy.model(input_ids=ids).logits
        torch.testing.assert_close(merged.eval()(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
        assert (expected - base).abs().max() > 1e-2
