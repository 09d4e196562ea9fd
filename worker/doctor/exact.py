"""Tiny random models, and FlexAttention against dense masks on them: bench/gpu_exact.py does it for six families."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from worker.model import attention
from worker.model.batch import tensors_of
from worker.model.policy import Base, Policy, Route
from worker.model.token_logprobs import logprobs
from worker.types import Pack, TrainingSequence

RANK = 16
SIZES: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": None,
}
PROMPT, ANSWERS = 300, (40, 130, 200)
# ||blocks - dense|| / ||dense||: rounding of the device's own products; a mask that lets one token too many through
# differs by 1e-1.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def words(count: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the words w0 (unknown), w1 (padding), w2 (end), w3, ..."""
    spaced = Tokenizer(WordLevel({f"w{number}": number for number in range(count)}, unk_token="w0"))
    spaced.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=spaced, unk_token="w0", pad_token="w1", eos_token="w2")


def tiny_policy(
    family: str, sizes: Mapping[str, Any], device: str, dtype: torch.dtype, source: Path | None = None
) -> Policy:
    """A model with random weights and an adapter, and its files in `source`, if that is given."""
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME).to(
        device
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # larger than usual, so that an error shows
                parameter.normal_(0.0, 0.06)
    model.requires_grad_(False)
    tokenizer = words(sizes["vocab_size"])
    if source is not None:
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
    base = Base("tiny", str(source or ""), model.eval(), tokenizer, context=2048)
    return Policy(base, rank=RANK, alpha=2 * RANK, seed=0)


def gradient_difference(policy: Policy) -> float:
    """||blocks - dense|| / ||dense|| over all weights of the adapter."""
    with policy.moved():
        blocks, dense = (gradients(policy, Route("packed", blocks=value)) for value in (True, False))
    return float((blocks - dense).norm() / dense.norm())


def logprob_difference(policy: Policy) -> float:
    """The same of the log-probabilities, where FlexAttention has no backward pass: on a CPU."""
    pack = tensors_of([random_pack(policy.causal.config.vocab_size)], policy.device)
    found = []
    with policy.moved(), torch.no_grad():
        for blocks in (True, False):
            policy.use(Route("packed", blocks=blocks))
            found.append(logprobs(policy, pack, 1.0).double())
    return float((found[0] - found[1]).norm() / found[1].norm())


def gradients(policy: Policy, route: Route) -> Tensor:
    policy.use(route)
    pack = random_pack(policy.causal.config.vocab_size)
    logprobs(policy, tensors_of([pack], policy.device), 1.0).sum().backward()  # type: ignore[no-untyped-call]
    found = torch.cat([p.grad.double().flatten() for p in policy.trainable if p.grad is not None])
    for parameter in policy.trainable:
        parameter.grad = None
    return found


def random_pack(vocabulary: int) -> Pack:
    """A prompt with three answers of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocabulary, (length,), generator=generator).tolist())

    def answers() -> Iterator[TrainingSequence]:
        for length in ANSWERS:
            yield TrainingSequence(draw(length), (0.0,) * length, (1.0,) * length, 1.0)

    return Pack(draw(PROMPT), tuple(answers()))
