"""A policy's prompts and adapter as messages to vLLM: to a job's own engines (vllm.py) or a fleet (fleet.py)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from safetensors.torch import save
from torch import Tensor

from worker.model.policy import Policy
from worker.rollout.samplers import Sampling, steering
from worker.rollout.samplers.dealing import RequestGroup
from worker.rollout.samplers.wire import AdapterBytes, Request
from worker.types import Prompt


def group_of(policy: Policy, place: int, prompt: Prompt, sampling: Sampling) -> RequestGroup:
    """All answers to the prompt at this place."""
    return tuple(_request(policy, place, member, prompt, sampling) for member in range(sampling.group_size))


def _request(policy: Policy, place: int, member: int, prompt: Prompt, sampling: Sampling) -> Request:
    return Request(
        prompt=place,
        member=member,
        prompt_ids=prompt.ids,
        seed=sampling.seed(prompt, member),
        temperature=sampling.temperature,
        max_tokens=sampling.max_completion_tokens,
        stop_ids=tuple(sorted(policy.stop_ids)),
        held_to=sampling.held_to,
        grammar=steering.grammar_of(policy.reasoning, sampling),
    )


def adapter_of(policy: Policy, tensors: Mapping[str, Tensor], namespace: str) -> AdapterBytes:
    """The adapter without the layers that vLLM leaves out: it ignores some of these, and fails at others."""
    config = policy.model.peft_config["default"]
    left_out = set(policy.left_out)
    applied = {
        name: tensor for name, tensor in tensors.items() if name.rpartition(".lora_")[0] not in left_out
    }
    return AdapterBytes(
        namespace=namespace,
        tensors=save(applied),
        rank=config.r,
        alpha=config.lora_alpha,
        modules=tuple(sorted(config.target_modules)),
    )


def dtype_of(policy: Policy) -> str:
    """The precision of its weights, as vLLM names it."""
    return str(policy.model.dtype).removeprefix("torch.")


def rank_of(policy: Policy) -> int:
    """The rank of its adapter; 0 if all weights are trained."""
    return policy.model.peft_config["default"].r if policy.has_base else 0


def leave_out(policy: Policy, tensors: Sequence[str], on_left_out: Callable[[Sequence[str]], None]) -> None:
    """Do not train the layers of these adapter tensors, and report them unless the policy knows."""
    modules = sorted({name.rpartition(".lora_")[0] for name in tensors})
    if modules and modules != policy.left_out:
        policy.leave_out(modules)
        on_left_out(modules)


def is_fresh(tensors: Mapping[str, Tensor]) -> bool:
    """Whether an adapter adds nothing, as before the first update: all of its B are zero."""
    return not any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)


def same(have: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> bool:
    return have.keys() == want.keys() and all(
        torch.equal(have[name], tensor) for name, tensor in want.items()
    )
