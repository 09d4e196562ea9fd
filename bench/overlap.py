"""Measure the saving of `overlap`, which trains on a group while others are still being sampled, in whole steps.

4 prompts, 8 answers each of up to 64 tokens that end where the model ends them, so that groups finish one by one. The
learning rate is close to 0, so that every step samples the same answers. `step_ratio` is seconds without over
seconds with; below 1 it costs time, as where sampler and trainer share cores that are busy already.
"""

import asyncio
import statistics

from bench.report import report
from bench.sizes import sized
from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import Registry
from core.settings import Settings
from graders.build import build
from graders.spec import parse_grader
from worker.clock import Clock
from worker.model.policy import Policy, load_base
from worker.rollout.experience import Rewards
from worker.sampling import Sampling
from worker.sampling.transformers import TransformersSampler
from worker.training.trainer import PeftTrainer
from worker.types import Prompt

MODEL, ROUNDS = "SmolLM2-135M-Instruct", sized(4, 1)
ANSWERS, TOKENS = sized((8, 64), (2, 4))
TOPICS = ("rivers", "cats", "music", "trains")[: sized(4, 1)]
GRADER = {
    "type": "string_check",
    "name": "the",
    "operation": "like",
    "input": "{{sample.output_text}}",
    "reference": "the",
}


def main() -> None:
    settings = Settings()
    base = load_base(MODEL, Registry.load(None).get(MODEL), settings.model_cache, "cpu")
    policy = Policy(base, rank=16, alpha=32, seed=0)
    sampler, grader = TransformersSampler(policy), build(parse_grader(GRADER))
    prompts = [
        Prompt(line, tuple(policy.render([{"role": "user", "content": f"Say a word about {topic}."}])), {})
        for line, topic in enumerate(TOPICS, start=1)
    ]
    sampling = Sampling(group_size=ANSWERS, temperature=1.0, max_completion_tokens=TOKENS, job_seed=1, step=1)
    trainers = {overlap: trainer(policy, overlap) for overlap in (False, True)}

    def step(overlap: bool) -> float:
        clock, learner = Clock(), trainers[overlap]
        answers = sampler.sample(prompts, sampling)
        use = learner.add if overlap else None
        groups = asyncio.run(Rewards(grader).grade(prompts, answers, ANSWERS, clock, use))
        with clock("training"):
            for group in [] if overlap else groups:
                learner.add(group)
            learner.step()
        return sum(clock.seconds.values())

    seconds: dict[bool, list[float]] = {False: [], True: []}
    for round_ in range(ROUNDS + 1):
        for overlap in (False, True):
            took = step(overlap)
            if round_ > 0:  # the first is a warm-up
                seconds[overlap].append(took)
    ratios = [without / with_ for without, with_ in zip(seconds[False], seconds[True], strict=True)]
    report(
        "overlap",
        {
            "step_ratio": statistics.median(ratios),
            "seconds_without": statistics.median(seconds[False]),
            "seconds_with": statistics.median(seconds[True]),
        },
    )


def trainer(policy: Policy, overlap: bool) -> PeftTrainer:
    advanced = {
        "optimizer": {"learning_rate": 1e-12},
        "sampling": {"max_completion_tokens": TOKENS},
        "schedule": {"type": "on_policy", "overlap": overlap},
    }
    resolved = resolve(
        Hyperparameters.model_validate({"advanced": advanced}), rows=8, parameters=1000, context=512
    )
    # Small micro-batches, so that a group alone makes one.
    return PeftTrainer(policy, resolved, token_budget=256)


if __name__ == "__main__":
    main()
