"""Seconds of a step as groups, prompts and answers grow: a prompt is paid for once, whatever its group's size.

One prompt with its group on SmolLM2, sampling and training apart: every size of group with every length of prompt and
short answers, and with long answers to the short prompt. Each cell is the quietest of ROUNDS rounds over all cells.

`prompt_cost_group_16_over_2` is what going from the shortest to the longest prompt adds at group 16 over what it adds
at group 2: near 1 is ideal, and 8 is what computing the prompt for every answer comes to.
"""

import hashlib
import itertools
import time
from dataclasses import dataclass

import torch

from bench.models import settings_for, smollm2
from bench.report import report
from bench.sizes import sized
from graders.types import Grade
from worker.model.policy import Policy
from worker.model.sizing import CPU_TOKEN_BUDGET
from worker.sampling import Sampling, grouped
from worker.sampling.transformers import TransformersSampler
from worker.training.trainer import PeftTrainer
from worker.types import Group, Prompt, Rollout

GROUPS, PROMPTS = sized(((2, 4, 8, 16), (64, 256, 512)), ((2, 16), (16, 32)))
ANSWERS, ROUNDS = sized(((8, 32), 2), ((2, 4), 1))
Cell = tuple[int, int, int]  # group size, tokens of the prompt, tokens of each answer
SHORT_PROMPT, LONG_PROMPT, SHORT_ANSWER, LONG_ANSWER = PROMPTS[0], PROMPTS[-1], ANSWERS[0], ANSWERS[-1]


@dataclass(frozen=True)
class Seconds:
    sampling: float
    training: float


def main() -> None:
    base = smollm2()
    policy = Policy(base, rank=16, alpha=32, seed=0)
    policy.stop_ids = frozenset()  # every answer runs to its full length
    # Next to no learning: every round samples the same answers.
    settings = settings_for(
        base, optimizer={"learning_rate": 1e-12}, sampling={"max_completion_tokens": LONG_ANSWER}
    )
    trainer = PeftTrainer(policy, settings, token_budget=CPU_TOKEN_BUDGET)
    cells = [
        *itertools.product(GROUPS, PROMPTS, [SHORT_ANSWER]),
        *((group, SHORT_PROMPT, LONG_ANSWER) for group in GROUPS),
    ]
    step(policy, trainer, cells[-1])  # warms up, and is not counted
    rounds = [{cell: step(policy, trainer, cell) for cell in cells} for _ in range(ROUNDS)]
    best = {
        cell: Seconds(min(one[cell].sampling for one in rounds), min(one[cell].training for one in rounds))
        for cell in cells
    }
    print("group prompt answer   sampling   training")
    for (group, prompt, answer), seconds in best.items():
        print(f"{group:5} {prompt:6} {answer:6} {seconds.sampling:10.3f} {seconds.training:10.3f}")

    sampling = {cell: seconds.sampling for cell, seconds in best.items()}
    training = {cell: seconds.training for cell, seconds in best.items()}
    both = {cell: seconds.sampling + seconds.training for cell, seconds in best.items()}
    report(
        "scaling",
        {
            "prompt_cost_group_16_over_2": prompt_cost(both, 16) / prompt_cost(both, 2),
            "prompt_cost_sampling": prompt_cost(sampling, 16) / prompt_cost(sampling, 2),
            "prompt_cost_training": prompt_cost(training, 16) / prompt_cost(training, 2),
            "answer_cost_group_16_over_2": answer_cost(both, 16) / answer_cost(both, 2),
            "step_seconds_group_2_prompt_64": both[2, 64, 8],
            "step_seconds_group_2_prompt_512": both[2, 512, 8],
            "step_seconds_group_16_prompt_64": both[16, 64, 8],
            "step_seconds_group_16_prompt_512": both[16, 512, 8],
        },
    )


def prompt_cost(seconds: dict[Cell, float], group: int) -> float:
    """Seconds that the longest prompt costs more than the shortest."""
    return seconds[group, LONG_PROMPT, SHORT_ANSWER] - seconds[group, SHORT_PROMPT, SHORT_ANSWER]


def answer_cost(seconds: dict[Cell, float], group: int) -> float:
    """Seconds that the longest answers cost more than the shortest. Answers cannot be shared, so 8 is expected."""
    return seconds[group, SHORT_PROMPT, LONG_ANSWER] - seconds[group, SHORT_PROMPT, SHORT_ANSWER]


def step(policy: Policy, trainer: PeftTrainer, cell: Cell) -> Seconds:
    size, length, answer = cell
    ids = tuple(
        torch.randint(100, 20_000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    )
    prompt = Prompt(0, ids, {})
    start = time.perf_counter()
    answers = TransformersSampler(policy).answers([prompt], Sampling(size, 1.0, answer, job_seed=0, step=0))
    [rollouts] = grouped(answers, 1, size)
    between = time.perf_counter()
    trainer.add(Group(prompt, rollouts, tuple(Grade(score(rollout)) for rollout in rollouts)))
    metrics = trainer.step()
    end = time.perf_counter()
    assert metrics.trained_sequences == size, "an answer without an advantage would be left out"
    return Seconds(between - start, end - between)


def score(rollout: Rollout) -> float:
    """A reward that tells any two answers apart."""
    return int.from_bytes(hashlib.sha256(repr(rollout.output_ids_T).encode()).digest()[:4], "big") / 2**32


if __name__ == "__main__":
    main()
