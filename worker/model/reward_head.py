"""The head of a reward model: from the last hidden state of an answer to one number.

It is saved beside the adapter as PEFT saves a sequence classifier with one label, so that transformers'
AutoModelForSequenceClassification loads both. `reward_model.json` has what turns its output into a score.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from worker.model.batch import Tensors
from worker.model.policy import REWARD_HEAD, Policy
from worker.refusals import InvalidModel

SCALE_FILE = "reward_model.json"
_ADAPTER, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


class RewardHead:
    """A float32 weight without bias. It starts at zero, so that all answers have the reward 0."""

    def __init__(self, width: int, device: torch.device | str) -> None:
        self.weight = nn.Parameter(torch.zeros(width, device=device))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, h] -> rewards [N]."""
        return hidden.float() @ self.weight


@dataclass(frozen=True)
class Scale:
    """A score is (reward - mean) / std: rewards that are learned from pairs have neither a zero nor a unit."""

    mean: float
    std: float

    @classmethod
    def of(cls, rewards: Tensor) -> "Scale":
        """By which these rewards [N] have the mean 0 and the standard deviation 1, or all are 0 if they are equal."""
        std = rewards.std(correction=0).item()
        return cls(rewards.mean().item(), std or 1.0)

    @classmethod
    def undoing(cls, mean: float, std: float) -> "Scale":
        """By which rewards that were learned as (score - mean) / std are scores again."""
        return cls(-mean / std, 1 / std)

    @classmethod
    def of_steps(cls) -> "Scale":
        """By which rewards stay as they are."""
        return cls(0.0, 1.0)

    def score(self, reward: float) -> float:
        return (reward - self.mean) / self.std


def rewards(policy: Policy, head: RewardHead, tensors: Tensors) -> Tensor:
    """The rewards [N] at the learned tokens of packs, which end answers or steps."""
    hidden = policy.hidden(tensors.input_ids, tensors.position_ids, tensors.segment)
    return head(hidden[tensors.row_M, tensors.column_M])


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of its chat template."""
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()


def write(folder: Path, head: RewardHead, scale: Scale, template: str) -> None:
    """Add the head to the adapter that `Policy.save` wrote. `template`: the hash of the chat template."""
    tensors = load_file(folder / _ADAPTER)
    tensors[REWARD_HEAD] = head.weight.detach().to("cpu", copy=True).reshape(1, -1)
    save_file(tensors, folder / _ADAPTER, metadata={"format": "pt"})
    config = json.loads((folder / _CONFIG).read_text())
    config |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    (folder / _CONFIG).write_text(json.dumps(config, indent=2))
    described = {**asdict(scale), "chat_template_sha256": template}
    (folder / SCALE_FILE).write_text(json.dumps(described, indent=2))


def read_head(folder: Path, device: torch.device | str) -> RewardHead:
    """Raises InvalidModel if the adapter has no head."""
    weight = load_file(folder / _ADAPTER).get(REWARD_HEAD)
    if weight is None:
        raise InvalidModel("The adapter is not that of a reward model: it has no head.")
    head = RewardHead(weight.shape[1], device)
    with torch.no_grad():
        head.weight.copy_(weight[0])
    return head


def read_scale(folder: Path) -> tuple[Scale, str]:
    """The scale, and the hash of the chat template that the answers were rendered with."""
    read = json.loads((folder / SCALE_FILE).read_text())
    return Scale(read["mean"], read["std"]), read["chat_template_sha256"]
