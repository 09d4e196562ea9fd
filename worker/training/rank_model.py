"""The model that every rank of a run loads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from core.jobs.hyperparameters import Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.registry import BaseModelEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from worker.checks.compatibility import ForwardVerdict
    from worker.model.policy import Policy


@dataclass(frozen=True)
class Model:
    """The model and settings that every rank of a run loads."""

    name: str
    entry: BaseModelEntry
    cache: Path
    settings: Resolved | ResolvedOffline
    seed: int
    checkpointed: bool  # activations are computed twice
    sampled: bool  # by rank 0 with the transformers sampler, whose decode limits the choice of a forward pass
    weights: Path | None = (
        None  # a whole model that the job trains further, in place of the base's own weights
    )
    # Gets a base model that another process has loaded; None: each rank loads its own.
    shared: "Callable[[], PreTrainedModel] | None" = None

    def load(self, device: str) -> "Policy":
        from worker.model.full import FullPolicy, refuse_other_names
        from worker.model.policy import Policy, load_base

        base = load_base(
            self.name,
            self.entry,
            self.cache,
            device,
            self.settings.chat_template,
            self.settings.chat_template_kwargs,
            weights=self.weights,
            shared=self.shared,
        )
        policy: Policy
        if self.settings.train == "full":
            refuse_other_names(base)
            policy = FullPolicy(base)
        else:
            policy = Policy(
                base,
                rank=self.settings.lora_rank,
                alpha=self.settings.lora_alpha,
                seed=self.seed,
                targets=self.settings.lora_targets,
            )
        if self.checkpointed:
            policy.checkpoint_layers()
        return policy

    def check(self, policy: "Policy") -> "ForwardVerdict":
        """Choose the forward pass, by the same rule on every rank.

        Raises:
            UnsupportedModel: none is right.
        """
        from worker.checks import compatibility, compatibility_cache

        if self.settings.train == "full":  # stored verdicts are those of a model with an adapter
            return compatibility.probe(policy, sampled=self.sampled)
        return compatibility_cache.probed(
            policy, self.entry, self.cache, sampled=self.sampled, targets=self.settings.lora_targets
        )
