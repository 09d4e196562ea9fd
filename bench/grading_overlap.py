"""Measure the cost of a slow grader in a step. Grading overlaps with sampling, so most of it should be hidden.

One step of 4 prompts, 8 answers each of up to 64 tokens, with a grader that takes no time, and with python graders
that take 20 ms a grade: one that waits and one that computes (which takes that time from the sampler on a machine
whose cores are all busy). The learning rate is close to 0, so that every step samples the same answers.
"""

import asyncio
import statistics
from typing import Any

from bench.report import report
from bench.sizes import sized
from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import Registry
from core.settings import Settings
from graders.build import build
from graders.spec import parse_grader
from graders.types import Grader
from worker.clock import Clock
from worker.model.policy import Policy, load_base
from worker.model.sizing import CPU_TOKEN_BUDGET
from worker.rollout.experience import Rewards
from worker.sampling import Sampling
from worker.sampling.transformers import TransformersSampler
from worker.training.trainer import PeftTrainer
from worker.types import Prompt

MODEL, ROUNDS = "SmolLM2-135M-Instruct", sized(3, 1)
ANSWERS, TOKENS = sized((8, 64), (2, 4))
TOPICS = ("rivers", "cats", "music", "trains")[: sized(4, 1)]
WAIT = "import time\ndef grade(sample, item):\n    time.sleep(0.02)\n    return float('the' in sample['output_text'])\n"
COMPUTE = """import time
def grade(sample, item):
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass
    return float('the' in sample['output_text'])
"""
QUICK = {"type": "string_check", "name": "e", "operation": "like", "input": "{{sample.output_text}}"}
GRADERS: dict[str, dict[str, Any]] = {
    "quick": QUICK | {"reference": "the"},
    "waiting": {"type": "python", "name": "waiting", "source": WAIT},
    "computing": {"type": "python", "name": "computing", "source": COMPUTE},
}


def main() -> None:
    settings = Settings()
    base = load_base(MODEL, Registry.load(None).get(MODEL), settings.model_cache, "cpu")
    policy = Policy(base, rank=16, alpha=32, seed=0)
    asked = {
        "advanced": {"optimizer": {"learning_rate": 1e-12}, "sampling": {"max_completion_tokens": TOKENS}}
    }
    resolved = resolve(Hyperparameters.model_validate(asked), rows=8, parameters=base.parameters, context=512)
    trainer = PeftTrainer(policy, resolved, token_budget=CPU_TOKEN_BUDGET)
    sampler = TransformersSampler(policy)
    prompts = [
        Prompt(
            line,
            tuple(policy.render([{"role": "user", "content": f"Say something short about {topic}."}])),
            {},
        )
        for line, topic in enumerate(TOPICS, start=1)
    ]
    sampling = Sampling(group_size=ANSWERS, temperature=1.0, max_completion_tokens=TOKENS, job_seed=1, step=1)
    graders = {name: build(parse_grader(raw)) for name, raw in GRADERS.items()}

    def step(grader: Grader) -> Clock:
        clock = Clock()
        answers = sampler.sample(prompts, sampling)
        groups = asyncio.run(Rewards(grader).grade(prompts, answers, ANSWERS, clock))
        with clock("training"):
            for group in groups:
                trainer.add(group)
            trainer.step()
        assert all(grade.score is not None for group in groups for grade in group.grades_G)
        return clock

    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in graders}
    for round_ in range(ROUNDS + 1):
        for name, grader in graders.items():
            clock = step(grader)
            if round_ > 0:  # the first is a warm-up
                seconds[name].append(dict(clock.seconds))
    figures = {}
    for name, rounds in seconds.items():
        for phase in ("sampling", "grading", "training"):
            figures[f"{name}_{phase}_seconds"] = statistics.median(one[phase] for one in rounds)
    # Round by round: the machine's mood is the same for the three steps of one round.
    for name in ("waiting", "computing"):
        ratios = [
            sum(a.values()) / sum(b.values()) for a, b in zip(seconds[name], seconds["quick"], strict=True)
        ]
        figures[f"step_lengthened_by_{name}"] = statistics.median(ratios) - 1
    report("grading_overlap", figures)


if __name__ == "__main__":
    main()
