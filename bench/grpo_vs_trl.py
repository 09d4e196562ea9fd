"""GRPO steps, ours against TRL's GRPOTrainer: same model, prompts, group size, lengths and LoRA, in two shapes.

Long prompt: about 240 tokens, answers of 16. Long completion: a prompt of about 36 tokens (most of it the template's),
answers of 96. Each side and shape runs in a separate process, one after the other, so that peak memory is measured
separately. Both sample with transformers; TRL gets float32, no KL, and no gradient checkpointing (which would slow it
down). A first step warms up and is not counted.

Then a race to a reward: both learn to write words with an "e" in them (dr_grpo, the same learning rate and rank) until
the mean over the last three steps is 0.7. Seconds count from the start of the first step.

TRL with vLLM colocated was not run: vLLM 0.32 is installed, and TRL 1.16 says that it supports up to 0.31.
"""

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from bench.models import smollm2, smollm2_folder
from bench.report import report
from bench.sizes import FORWARDED, sized
from bench.trl_side import ON_CPU, clock

WORDS = tuple("the bank card was lost on a train and a friend found it near the old stone bridge".split())
STEPS = 2  # the first warms up and is not counted
GROUP = 8


@dataclass(frozen=True)
class Shape:
    prompts: int
    words: int  # of a prompt
    answer: int  # tokens


SHAPES = sized(
    {"long_prompt": Shape(2, 210, 16), "long_completion": Shape(1, 6, 96)},
    {"long_prompt": Shape(1, 6, 2)},
)

TOPICS = ("rivers", "cats", "music", "trains")
RACE_ANSWER, RACE_RATE, RACE_RANK, FINISH = 8, 1e-3, 8, 0.7
RACE_GROUP, RACE_STEPS = sized((16, 60), (2, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["ours", "trl"])
    parser.add_argument("--shape", choices=[*SHAPES, "race"])
    asked = parser.parse_args()
    if asked.side and asked.shape == "race":
        print(json.dumps({"ours": race_ours, "trl": race_trl}[asked.side]()))
        return
    if asked.side:
        print(json.dumps({"ours": run_ours, "trl": run_trl}[asked.side](SHAPES[asked.shape])))
        return
    results: dict[str, float] = {}
    for shape in SHAPES:
        ours, trl = (measured(side, shape) for side in ("ours", "trl"))
        results |= {
            f"ratio_{shape}": ours["samples_per_second"] / trl["samples_per_second"],
            f"memory_ratio_{shape}": ours["peak_memory_mb"] / trl["peak_memory_mb"],
            **{f"ours_{name}_{shape}": value for name, value in ours.items()},
            **{f"trl_{name}_{shape}": value for name, value in trl.items()},
        }
    ours, trl = (measured(side, "race") for side in ("ours", "trl"))
    results |= {
        # 0 if ours never got there: the goal is missed then. If only TRL did not, its time is the least it can be.
        "ratio_seconds_to_reward": trl["seconds"] / ours["seconds"] * ours["reached"],
        **{f"ours_race_{name}": value for name, value in ours.items()},
        **{f"trl_race_{name}": value for name, value in trl.items()},
    }
    report("grpo_vs_trl", results)


def measured(side: str, shape: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.grpo_vs_trl", "--side", side, "--shape", shape, *FORWARDED]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(side, shape, found, flush=True)
    return found


def chats(shape: Shape) -> list[list[dict[str, str]]]:
    """The same prompts for both sides: plain words, so that any tokenizer makes about as many tokens."""
    return [
        [
            {
                "role": "user",
                "content": " ".join(WORDS[(i * 7 + k * (k + n)) % len(WORDS)] for k in range(shape.words)),
            }
        ]
        for n, i in enumerate(range(shape.prompts))
    ]


def score(text: str) -> float:
    """A reward that tells nearly any two answers apart, so that no side may skip a group."""
    return hashlib.sha256(text.encode()).digest()[0] / 255


def figures(shape: Shape, seconds: list[float]) -> dict[str, float]:
    samples = shape.prompts * GROUP * len(seconds) / sum(seconds)
    return {
        "samples_per_second": samples,
        "answer_tokens_per_second": samples * shape.answer,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def run_ours(shape: Shape) -> dict[str, float]:
    from core.jobs.hyperparameters import Hyperparameters, resolve
    from graders.types import Grade
    from worker.model.policy import Policy
    from worker.model.sizing import CPU_TOKEN_BUDGET
    from worker.sampling import Sampling, grouped
    from worker.sampling.transformers import TransformersSampler
    from worker.training.trainer import PeftTrainer
    from worker.types import Group, Prompt

    base = smollm2()
    policy = Policy(base, rank=16, alpha=32, seed=0)
    policy.stop_ids = frozenset()  # every answer runs to its full length, as on the other side
    asked = {
        "batch_size": shape.prompts,
        "advanced": {"sampling": {"group_size": GROUP, "max_completion_tokens": shape.answer}},
    }
    resolved = resolve(
        Hyperparameters.model_validate(asked),
        rows=shape.prompts,
        parameters=base.parameters,
        context=base.context,
    )
    sampler = TransformersSampler(policy)
    trainer = PeftTrainer(policy, resolved, token_budget=CPU_TOKEN_BUDGET)
    prompts = [Prompt(n, tuple(policy.render(chat)), {}) for n, chat in enumerate(chats(shape))]
    seconds = []
    for step in range(STEPS):
        start = time.perf_counter()
        answers = sampler.answers(prompts, Sampling(GROUP, 1.0, shape.answer, job_seed=0, step=step))
        rollouts_PG = grouped(answers, shape.prompts, GROUP)
        for prompt, rollouts in zip(prompts, rollouts_PG, strict=True):
            trainer.add(Group(prompt, rollouts, tuple(Grade(score(r.text)) for r in rollouts)))
        trainer.step()
        seconds.append(time.perf_counter() - start)
    return figures(shape, seconds[1:])


def run_trl(shape: Shape) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    folder, timed = smollm2_folder(), clock()
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            reward_funcs=lambda completions, **kwargs: [score(c[0]["content"]) for c in completions],
            args=GRPOConfig(
                output_dir=output,
                per_device_train_batch_size=shape.prompts * GROUP,
                num_generations=GROUP,
                max_completion_length=shape.answer,
                generation_kwargs={"min_new_tokens": shape.answer},
                max_steps=STEPS,
                learning_rate=1e-3,
                **ON_CPU,
            ),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            train_dataset=Dataset.from_list([{"prompt": chat} for chat in chats(shape)]),
            callbacks=[timed],
        )
        trainer.train()
    return figures(shape, timed.seconds[1:])


@dataclass
class Race:
    """The mean reward of each step so far, and the clock."""

    means: list[float] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)

    def finished(self, rewards: list[float]) -> bool:
        self.means.append(statistics.fmean(rewards))
        return self.reached or len(self.means) == RACE_STEPS

    @property
    def reached(self) -> bool:
        return len(self.means) >= 3 and statistics.fmean(self.means[-3:]) >= FINISH

    def result(self) -> dict[str, float]:
        seconds = time.perf_counter() - self.start
        return {
            "seconds": seconds,
            "steps": len(self.means),
            "reached": self.reached,
            "reward": self.means[-1],
        }


def topic(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Say something about {name}."}]


def share_of_e(text: str) -> float:
    words = text.split()
    return sum("e" in word for word in words) / max(1, len(words))


def race_ours() -> dict[str, float]:
    from core.jobs.hyperparameters import Hyperparameters, resolve
    from graders.types import Grade
    from worker.model.policy import Policy
    from worker.model.sizing import CPU_TOKEN_BUDGET
    from worker.sampling import Sampling, grouped
    from worker.sampling.transformers import TransformersSampler
    from worker.training.trainer import PeftTrainer
    from worker.types import Group, Prompt

    base = smollm2()
    policy = Policy(base, rank=RACE_RANK, alpha=2 * RACE_RANK, seed=0)
    asked = {
        "loss": {"type": "dr_grpo"},
        "optimizer": {"learning_rate": RACE_RATE},
        "sampling": {"group_size": RACE_GROUP, "max_completion_tokens": RACE_ANSWER},
        "lora": {"rank": RACE_RANK, "alpha": 2 * RACE_RANK},
    }
    resolved = resolve(
        Hyperparameters.model_validate({"batch_size": len(TOPICS), "advanced": asked}),
        rows=len(TOPICS),
        parameters=base.parameters,
        context=base.context,
    )
    sampler = TransformersSampler(policy)
    trainer = PeftTrainer(policy, resolved, token_budget=CPU_TOKEN_BUDGET)
    prompts = [Prompt(n, tuple(policy.render(topic(name))), {}) for n, name in enumerate(TOPICS)]
    race = Race()
    while True:
        sampling = Sampling(RACE_GROUP, 1.0, RACE_ANSWER, job_seed=0, step=len(race.means))
        rollouts_PG = grouped(sampler.answers(prompts, sampling), len(prompts), RACE_GROUP)
        rewards_PG = [[share_of_e(rollout.text) for rollout in rollouts] for rollouts in rollouts_PG]
        for prompt, rollouts, rewards in zip(prompts, rollouts_PG, rewards_PG, strict=True):
            trainer.add(Group(prompt, rollouts, tuple(map(Grade, rewards))))
        trainer.step()
        if race.finished([reward for rewards in rewards_PG for reward in rewards]):
            return race.result()


def race_trl() -> dict[str, float]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    folder, race = smollm2_folder(), Race()
    rewards: list[float] = []

    def reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        rewards[:] = [share_of_e(one[0]["content"]) for one in completions]
        return list(rewards)

    class Referee(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            race.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = race.finished(rewards)

    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=output,
                per_device_train_batch_size=len(TOPICS) * RACE_GROUP,
                num_generations=RACE_GROUP,
                max_completion_length=RACE_ANSWER,
                max_steps=RACE_STEPS,
                learning_rate=RACE_RATE,
                lr_scheduler_type="constant",
                loss_type="dr_grpo",
                scale_rewards="none",
                **ON_CPU,
            ),
            peft_config=LoraConfig(
                r=RACE_RANK, lora_alpha=2 * RACE_RANK, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            train_dataset=Dataset.from_list([{"prompt": topic(name)} for name in TOPICS]),
            callbacks=[Referee()],
        )
        trainer.train()
    return race.result()


if __name__ == "__main__":
    main()
