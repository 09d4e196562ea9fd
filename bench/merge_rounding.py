"""Measure how much of an update the sampler sees: a separate adapter against one merged into bfloat16 weights.

Merging rounds each weight to the bfloat16 grid, on which a small step is less than half a unit and gets lost. The base
is rounded to bfloat16 values first (a float32 base would hide the defect) and everything is computed in float32, so the
rounding of the merge is the only difference. `captured`: the change in log-probabilities of the sampled tokens from the
base to what the sampler reports, projected on the change from the base to the exact policy (the trainer's). 1 is all.

The steps are the trainer's own: Adam at 1e-5 along the gradient of one batch, again and again.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor

from bench.models import settings_for, smollm2
from bench.report import report
from bench.sizes import sized
from graders.types import Grade
from worker.model.batch import tensors_of
from worker.model.policy import Base, Policy
from worker.sampling import Sampling, grouped
from worker.sampling.transformers import TransformersSampler
from worker.training.trainer import PeftTrainer
from worker.types import Group, Pack, Prompt, Rollout
from worker.types import TrainingSequence as Answer

RANK = ALPHA = 32
LEARNING_RATE = 1e-5
TEXTS = tuple(
    f"Say something about {topic}." for topic in ("rivers", "cats", "music", "trains")[: sized(4, 1)]
)


def main() -> None:
    answers, tokens = sized((8, 16), (2, 4))
    sampling = Sampling(answers, 1.0, tokens, job_seed=0, step=0)
    report("merge_rounding", measure(smollm2, TEXTS, sampling, after=(1, sized(10, 2))))


def measure(
    load: Callable[[], Base], texts: Sequence[str], sampling: Sampling, after: Sequence[int]
) -> dict[str, float]:
    """`captured_step_N` and `merged_step_N` for each N of `after`. `load` gives a fresh float32 base each time."""
    base = rounded(load())
    settings = settings_for(
        base,
        optimizer={"learning_rate": LEARNING_RATE},
        sampling={"group_size": sampling.group_size},
        lora={"rank": RANK, "alpha": ALPHA},
    )
    policy = Policy(base, rank=RANK, alpha=ALPHA, seed=0)
    trainer = PeftTrainer(policy, settings, token_budget=2048)
    prompts = [
        Prompt(n, tuple(policy.render([{"role": "user", "content": text}])), {})
        for n, text in enumerate(texts)
    ]
    batch = [
        Group(prompt, rollouts, tuple(Grade(score(rollout)) for rollout in rollouts))
        for prompt, rollouts in zip(prompts, sampled(policy, prompts, sampling), strict=True)
    ]
    figures: dict[str, float] = {}
    for step in range(1, max(after) + 1):
        for group in batch:
            trainer.add(group)
        trainer.step()
        if step in after:
            seen_by = {"captured": policy, "merged": merged(load(), policy)}
            for name, sampler in seen_by.items():
                moved, seen = movements(trainer, sampler, prompts, sampling)
                figures[f"{name}_step_{step}"] = float(seen @ moved / (moved @ moved))
            figures[f"moved_step_{step}"] = moved.abs().mean().item()
    return figures


def rounded(base: Base) -> Base:
    """The same model with every weight on the bfloat16 grid, still in float32."""
    for parameter in base.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return base


def merged(base: Base, trained: Policy) -> Policy:
    """A policy whose base is bf16(W + scale B A) and whose own adapter does nothing: what a merging sync samples."""
    weights = {
        name: layer.weight for name, layer in rounded(base).model.named_modules() if hasattr(layer, "weight")
    }
    for name, layer in trained.model.get_base_model().named_modules():
        if isinstance(layer, LoraLinear):
            weight = weights[name]
            weight.data = (weight + layer.get_delta_weight("default")).detach().bfloat16().float()
    return Policy(base, rank=RANK, alpha=ALPHA, seed=0)


def movements(
    trainer: PeftTrainer, sampler: Policy, prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Of the tokens that `sampler` draws: how far the exact policy has moved [M], and how far `sampler` has [M]."""
    packs = [
        Pack(
            prompt.ids,
            tuple(Answer(r.output_ids_T, r.logprobs_T, (1.0,) * len(r.output_ids_T), 1.0) for r in rollouts),
        )
        for prompt, rollouts in zip(prompts, sampled(sampler, prompts, sampling), strict=True)
    ]
    batch = tensors_of(packs)
    with torch.no_grad():
        exact = trainer.loss.logprobs(batch).double()
        with trainer.policy.as_base():
            start = trainer.loss.logprobs(batch).double()
    return exact - start, batch.sampled_logp_M.double() - start


def sampled(policy: Policy, prompts: Sequence[Prompt], sampling: Sampling) -> list[tuple[Rollout, ...]]:
    answers = TransformersSampler(policy).answers(prompts, sampling)
    return grouped(answers, len(prompts), sampling.group_size)


def score(rollout: Rollout) -> float:
    """A reward that tells nearly any two answers apart."""
    return hashlib.sha256(repr(rollout.output_ids_T).encode()).digest()[0] / 255


if __name__ == "__main__":
    main()
