"""The methods of a job, by OpenAI's names."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

Method = Literal["supervised", "dpo", "reward_model", "reinforcement", "distillation"]
METHODS: tuple[Method, ...] = get_args(Method)

# Its result scores answers, and gives none.
REWARD_MODEL = "reward_model"

# Distillation in the mode `logits`, which learns from a file as the other modes do not.
LOGITS = "distillation_logits"

# These learn from the answers in their file; no answers are sampled.
OFFLINE: frozenset[str] = frozenset({"supervised", "dpo", REWARD_MODEL, LOGITS})

# OpenAI's names for the formats of rows, and ours for scored answers.
FORMATS = {"supervised": "fine-tune-chat", "dpo": "fine-tune-preference", REWARD_MODEL: "scored answers"}


def variant(method: str, parameters: Mapping[str, Any]) -> str:
    """The method, or its mode where that decides what a job reads and runs.

    Args:
        parameters: the object of the method, which is a job's `body`.
    """
    return LOGITS if method == "distillation" and parameters.get("mode") == "logits" else method
