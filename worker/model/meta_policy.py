"""A policy before its base model is loaded: what a rollout fleet needs to sample a job's first answers."""

from pathlib import Path

import torch
from torch import Tensor

from core.jobs.hyperparameters import Resolved
from core.registry import BaseModelEntry
from worker.model.architecture import refusing, without_weights
from worker.model.policy import Base, Policy, read_config, read_generation_config, read_tokenizer


class UnloadedPolicy(Policy):
    """A fresh policy on a base model without weights: names, shapes and tokens. It computes nothing."""

    def adapter(self) -> dict[str, Tensor]:
        """Zeros in the shape of the adapter. A fresh one adds nothing, whatever its A is."""
        tensors = self._parameters()
        zeros = {name: torch.zeros(tensor.shape, dtype=torch.float32) for name, tensor in tensors.items()}
        return self._to_file(zeros)


def unloaded_policy(
    name: str, entry: BaseModelEntry, source: Path | str, settings: Resolved
) -> UnloadedPolicy:
    """Return the policy of a job that has not learned yet.

    Raises:
        UnsupportedModel, InvalidModel, InvalidTargets: as loading it does.
    """
    config = read_config(source)
    tokenizer = read_tokenizer(entry, source, settings.chat_template, settings.chat_template_kwargs)
    with refusing(config):
        model = without_weights(config)
        read_generation_config(model, source)
        with torch.device("meta"):  # or PEFT would draw the adapter, and drop it
            return UnloadedPolicy(
                Base(name, source, model.requires_grad_(False).eval(), tokenizer, entry.context),
                rank=settings.lora_rank,
                alpha=settings.lora_alpha,
                seed=0,
                targets=settings.lora_targets,
            )
