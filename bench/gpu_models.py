"""Models with random weights of the shape of real ones, so that a bench on a GPU needs no network."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from worker.doctor.exact import RANK, words
from worker.model import attention
from worker.model.policy import Base
from worker.model.sizing import Workload, workload
from worker.types import Prompt


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes, and how much of it to sample at once."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    prompts: int
    group: int
    prompt: int
    answer: int
    token_budget: int
    matrix: int  # side of the matrices whose product is the yardstick


SHAPES = {
    "tiny": Shape(512, 64, 128, 2, 2, 1, 2, 4, 24, 8, 256, 256),
    "0.5b": Shape(151_936, 896, 4864, 24, 14, 2, 16, 16, 256, 128, 16_384, 8192),
    "1.5b": Shape(151_936, 1536, 8960, 28, 12, 2, 16, 16, 256, 128, 16_384, 8192),
    "8b": Shape(128_256, 4096, 14_336, 32, 32, 8, 8, 16, 256, 128, 8192, 8192),
}


def random_base(shape: Shape, device: str, source: str = "", context: int = 2048) -> Base:
    """A Llama of this shape in bfloat16, made on the device, and a tokenizer of that many words."""
    tokenizer = words(shape.vocabulary)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=max(4096, context),
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention.NAME
        )
    model.requires_grad_(False)
    if source:
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
    return Base("random", source, model.eval(), tokenizer, context=context)


def write_base(shape: Shape, device: str, folder: str, context: int) -> None:
    """Write the model to a folder that a job's processes load it from."""
    random_base(shape, device, folder, context)


def prompt(shape: Shape, line: int) -> Prompt:
    generator = torch.Generator().manual_seed(line)
    return Prompt(
        line, tuple(torch.randint(3, shape.vocabulary, (shape.prompt,), generator=generator).tolist()), {}
    )


def workload_of(shape: Shape, *, full: bool = False) -> Workload:
    """The memory plan's view of a job of this shape."""
    return workload(
        rank=RANK,
        prompt=shape.prompt,
        completion=shape.answer,
        batch=shape.prompts,
        group=shape.group,
        valid_rows=1,
        eval_samples=1,
        full=full,
    )
