"""GRPO on a sparse task, ours beside TRL's GRPOTrainer: a reward of 0 or 1 that few answers get at first, many seeds.

A tiny random Llama is to write the color that the prompt names. Both sides have the same model, prompts, LoRA, loss
(dapo, rewards divided by the std of the batch), learning rate and number of steps; a seed decides the adapter and the
samples. At first one answer in twenty is right, so most groups have no signal.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import report
from bench.sizes import FORWARDED, sized
from bench.trl_side import ON_CPU

COLORS = ("red", "green", "blue", "iron")
SEEDS, STEPS = sized((30, 80), (2, 4))
GROUP, ANSWER, RATE, RANK = 8, 4, 3e-3, 8
QUARTERS = 4
STUDENT_95 = 2.045  # of 29 degrees of freedom


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["ours", "trl"])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    asked = parser.parse_args()
    if asked.side:
        print(json.dumps([{"ours": ours, "trl": trl}[asked.side](seed) for seed in range(asked.seeds)]))
        return
    curves = {side: measured(side, asked.seeds) for side in ("ours", "trl")}
    mine, theirs = ([quarters(curve)[-1] for curve in curves[side]] for side in ("ours", "trl"))
    differences = [a - b for a, b in zip(mine, theirs, strict=True)]
    error = STUDENT_95 * statistics.stdev(differences) / math.sqrt(len(differences))
    difference = statistics.fmean(differences)
    report(
        "sparse",
        {
            "ours_last_quarter": statistics.fmean(mine),
            "trl_last_quarter": statistics.fmean(theirs),
            "difference": difference,
            "difference_low": difference - error,
            "difference_high": difference + error,
            "ours_worst_seed": min(mine),
            "trl_worst_seed": min(theirs),
            **{
                f"{side}_quarter_{number + 1}": statistics.fmean(quarters(curve)[number] for curve in of_side)
                for side, of_side in curves.items()
                for number in range(QUARTERS)
            },
        },
    )


def measured(side: str, seeds: int) -> list[list[float]]:
    """The mean reward of each step, by seed."""
    command = [sys.executable, "-m", "bench.sparse", "--side", side, "--seeds", str(seeds), *FORWARDED]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=one_thread)
    curves: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return curves


def quarters(curve: Sequence[float]) -> list[float]:
    each = STEPS // QUARTERS
    return [statistics.fmean(curve[first : first + each]) for first in range(0, STEPS, each)]


def asked_for(color: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say the word {color} again"}]


def score(text: str, color: str) -> float:
    return float(color in text.split())


def ours(seed: int) -> list[float]:
    """The mean reward of each step."""
    from core.jobs.hyperparameters import Hyperparameters, resolve
    from core.registry import BaseModelEntry
    from graders.types import Grade
    from tests.tiny import make_tiny_model
    from worker.model.policy import Policy, load_base
    from worker.model.sizing import CPU_TOKEN_BUDGET
    from worker.sampling import Sampling, grouped
    from worker.sampling.transformers import TransformersSampler
    from worker.training.trainer import PeftTrainer
    from worker.types import Group, Prompt

    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_model(Path(scratch))
        base = load_base("tiny", BaseModelEntry(path=folder, dtype="float32", context=128), folder, "cpu")
    policy = Policy(base, rank=RANK, alpha=2 * RANK, seed=seed)
    advanced = {
        "loss": {"type": "dapo"},
        "optimizer": {"learning_rate": RATE},
        "sampling": {"group_size": GROUP, "max_completion_tokens": ANSWER},
        "lora": {"rank": RANK, "alpha": 2 * RANK},
    }
    hyperparameters = Hyperparameters.model_validate({"batch_size": len(COLORS), "advanced": advanced})
    resolved = resolve(hyperparameters, rows=len(COLORS), parameters=base.parameters, context=base.context)
    sampler = TransformersSampler(policy)
    trainer = PeftTrainer(policy, resolved, token_budget=CPU_TOKEN_BUDGET)
    prompts = [
        Prompt(n, tuple(policy.render(asked_for(color))), {"color": color}) for n, color in enumerate(COLORS)
    ]
    means = []
    for step in range(STEPS):
        sampling = Sampling(GROUP, 1.0, ANSWER, job_seed=seed, step=step)
        rollouts_PG = grouped(sampler.answers(prompts, sampling), len(prompts), GROUP)
        rewards_PG = [
            [score(rollout.text, color) for rollout in rollouts]
            for rollouts, color in zip(rollouts_PG, COLORS, strict=True)
        ]
        for prompt, rollouts, rewards in zip(prompts, rollouts_PG, rewards_PG, strict=True):
            trainer.add(Group(prompt, rollouts, tuple(map(Grade, rewards))))
        trainer.step()
        means.append(statistics.fmean(reward for rewards in rewards_PG for reward in rewards))
    return means


def trl(seed: int) -> list[float]:
    import torch
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from tests.tiny import make_tiny_model

    disable_progress_bars()
    means: list[float] = []

    def reward(completions: list[list[dict[str, str]]], color: list[str], **kwargs: Any) -> list[float]:
        scores = [score(one[0]["content"], wanted) for one, wanted in zip(completions, color, strict=True)]
        means.append(statistics.fmean(scores))
        return scores

    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_model(Path(scratch, "model"))
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=str(Path(scratch, "out")),
                per_device_train_batch_size=len(COLORS) * GROUP,
                num_generations=GROUP,
                max_completion_length=ANSWER,
                max_steps=STEPS,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                adam_beta2=0.95,
                weight_decay=0.0,
                loss_type="dapo",
                scale_rewards="batch",
                **ON_CPU,
                seed=seed,
            ),
            peft_config=LoraConfig(
                r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            train_dataset=Dataset.from_list(
                [{"prompt": asked_for(color), "color": color} for color in COLORS]
            ),
        )
        trainer.train()
    return means


if __name__ == "__main__":
    main()
