"""Supervised and preference steps, ours beside TRL's trainers: the same model, tokens, batches and LoRA.

`sft_vs_trl.py` and `dpo_vs_trl.py` run this. Each side runs in a separate process, one after the other. TRL runs
twice: with gradient checkpointing, its default, and without, which is faster where memory allows it. All in float32 on
a CPU, with the loss on the same tokens. A first step warms up; tokens are those of the rows, without padding.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from random import Random
from typing import Any, Literal

from bench.models import smollm2, smollm2_folder
from bench.report import report
from bench.sizes import FORWARDED, sized
from bench.trl_side import ON_CPU, clock

Method = Literal["supervised", "dpo"]
Row = dict[str, list[int]]

STEPS, BATCH = sized((4, 8), (2, 2))  # the first step warms up and is not counted
RATE = 1e-4
SIDES = ("ours", "trl", "trl_without_checkpointing")
# Prompt and answer lengths, as those of Banking77 and GSM8K: most rows are short, some are long.
WORDS = "the bank card was lost on a train and found it near old stone with some money for two people".split()
LENGTHS = (20, 24, 28, 32, 40, 56, 88, 152)


def main(method: Method, name: str) -> None:
    if len(sys.argv) > 1:
        side = sys.argv[1]
        print(json.dumps(ours(method) if side == "ours" else trl(method, checkpointing=side == "trl")))
        return
    found = {side: measured(name, side) for side in SIDES}
    mine, theirs, best = (found[side] for side in SIDES)
    report(
        name,
        {
            "ratio": mine["tokens_per_second"] / theirs["tokens_per_second"],
            "ratio_without_checkpointing": mine["tokens_per_second"] / best["tokens_per_second"],
            "memory_ratio": mine["peak_memory_mb"] / theirs["peak_memory_mb"],
            "memory_ratio_without_checkpointing": mine["peak_memory_mb"] / best["peak_memory_mb"],
            "loss_difference": abs(mine["loss"] - theirs["loss"]) / theirs["loss"],
            **{f"{side}_{key}": value for side, figures in found.items() for key, value in figures.items()},
        },
    )


def measured(name: str, side: str) -> dict[str, float]:
    command = [sys.executable, "-m", f"bench.{name}", side, *FORWARDED]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(side, figures, flush=True)
    return figures


def rows(method: Method) -> list[Row]:
    """Token ids: those of common words, so that the text of a row has the same ones for both sides."""
    from transformers import AutoTokenizer

    draw, tokenizer = Random(0), AutoTokenizer.from_pretrained(smollm2_folder())
    words = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in WORDS]
    assert all(len(word) == 1 for word in words)

    def ids(count: int) -> list[int]:
        return [words[draw.randrange(len(words))][0] for _ in range(count)]

    made = []
    for number in range(STEPS * BATCH):
        length = LENGTHS[number % len(LENGTHS)]
        row = {"prompt": ids(length), "chosen": [*ids(length - 1), tokenizer.eos_token_id]}
        if method == "dpo":
            row["rejected"] = [*ids(length // 2), tokenizer.eos_token_id]
        made.append(row)
    return made


def tokens(rows: Sequence[Row]) -> int:
    return sum(len(part) for row in rows for part in row.values())


def figures(method: Method, seconds: Sequence[float], losses: Sequence[float]) -> dict[str, float]:
    counted = tokens(rows(method)[BATCH:])
    return {
        "tokens_per_second": counted / sum(seconds),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "loss": losses[0],
        "last_loss": losses[-1],
        "step_seconds": statistics.median(seconds),
    }


def ours(method: Method) -> dict[str, float]:
    from core.jobs.offline_hyperparameters import requested_hyperparameters, resolve
    from worker.model.policy import Policy
    from worker.model.sizing import CPU_TOKEN_BUDGET
    from worker.training.offline import OfflineTrainer
    from worker.types import Pack, TrainingSequence

    base = smollm2()
    policy = Policy(base, rank=16, alpha=32, seed=0)
    optimizer = {"learning_rate": RATE, "schedule": "constant"}
    given = requested_hyperparameters(
        method, {"batch_size": BATCH, "n_epochs": 1, "advanced": {"optimizer": optimizer}}
    )
    made = rows(method)
    trainer = OfflineTrainer(
        policy,
        resolve(method, given, rows=len(made), parameters=base.parameters),
        token_budget=CPU_TOKEN_BUDGET,
    )

    def sequence(ids: Sequence[int]) -> TrainingSequence:
        nothing = (0.0,) * len(ids)
        return TrainingSequence(tuple(ids), nothing, nothing, 1.0)

    packs = [
        Pack(tuple(row["prompt"]), tuple(sequence(part) for name, part in row.items() if name != "prompt"))
        for row in made
    ]
    seconds, losses = [], []
    for first in range(0, len(packs), BATCH):
        start = time.perf_counter()
        losses.append(trainer.step(packs[first : first + BATCH]).loss)
        seconds.append(time.perf_counter() - start)
    return figures(method, seconds[1:], losses)


def trl(method: Method, *, checkpointing: bool) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    folder, timed = smollm2_folder(), clock()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def in_order(kind: type[Any]) -> type[Any]:
        """The trainer without its shuffling, so that both sides have the same batches."""

        class InOrder(kind):  # type: ignore[misc, valid-type]
            def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
                return SequentialSampler(dataset or self.train_dataset)

        return InOrder

    made = rows(method)
    if method == "supervised":
        data = [
            {
                "input_ids": row["prompt"] + row["chosen"],
                "completion_mask": [0] * len(row["prompt"]) + [1] * len(row["chosen"]),
            }
            for row in made
        ]
        trainer_kind, config = in_order(SFTTrainer), SFTConfig
    else:
        data = [
            # The trainer itself adds the token that ends an answer.
            {name: tokenizer.decode(part if name == "prompt" else part[:-1]) for name, part in row.items()}
            for row in made
        ]
        trainer_kind, config = in_order(DPOTrainer), DPOConfig
    with tempfile.TemporaryDirectory() as output:
        arguments = config(
            **({"completion_only_loss": True} if method == "supervised" else {}),
            output_dir=output,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            **ON_CPU | {"gradient_checkpointing": checkpointing, "logging_steps": 1},
            seed=0,
        )
        trainer = trainer_kind(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=tokenizer,
            args=arguments,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            train_dataset=Dataset.from_list(data),
            callbacks=[timed],
        )
        trainer.train()
    return figures(method, timed.seconds[1:], timed.losses)
