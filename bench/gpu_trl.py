"""The steps of gpu_steps.py by TRL's GRPOTrainer: with vLLM colocated on a GPU that has it, else with transformers."""

import hashlib
import statistics
import tempfile
from typing import Any

import torch

from bench.gpu_models import RANK, Shape, prompt, random_base
from bench.trl_side import clock
from core.units import GIB
from worker.packages import vllm_version

VLLM_SHARE = 0.3  # of the GPU's memory: TRL's default
ANSWERS_AT_ONCE = 32  # more would not fit: TRL computes the logits of a micro-batch as one tensor


def measure(shape: Shape, device: str, steps: int) -> dict[str, float]:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        """Tells nearly any two answers apart, so that no group is skipped."""
        return [hashlib.sha256(text.encode()).digest()[0] / 255 for text in completions]

    on_gpu, timed = device == "cuda", clock()
    with_vllm = on_gpu and vllm_version() is not None
    answers = shape.prompts * shape.group
    at_once = min(ANSWERS_AT_ONCE, answers)
    with tempfile.TemporaryDirectory() as folder:
        base = random_base(shape, device, f"{folder}/model", shape.prompt + shape.answer)
        texts = [base.tokenizer.decode(prompt(shape, line).ids) for line in range(shape.prompts)]
        del base
        if on_gpu:
            torch.cuda.empty_cache()
        trainer = GRPOTrainer(
            model=f"{folder}/model",
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=f"{folder}/trained",
                model_init_kwargs={"dtype": "bfloat16"},
                per_device_train_batch_size=at_once,
                gradient_accumulation_steps=answers // at_once,
                num_generations=shape.group,
                max_completion_length=shape.answer,
                max_steps=steps,
                learning_rate=1e-12,
                bf16=on_gpu,
                use_cpu=not on_gpu,
                use_vllm=with_vllm,
                vllm_mode="colocate",
                vllm_gpu_memory_utilization=VLLM_SHARE,
                generation_kwargs={"ignore_eos": True} if with_vllm else {"min_new_tokens": shape.answer},
                report_to="none",
                save_strategy="no",
                logging_steps=1000,
                disable_tqdm=True,
            ),
            peft_config=LoraConfig(
                r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
            callbacks=[timed],
        )
        trainer.train()
    step = statistics.median(timed.seconds[1:])
    return {
        "step_seconds": step,
        "tokens_per_second": shape.prompts * shape.group * shape.answer / step,
        **({"peak_memory_gib": torch.cuda.max_memory_reserved() / GIB} if on_gpu else {}),
    }
