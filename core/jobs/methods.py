"""The methods of a job, by OpenAI's names."""

from typing import Literal, get_args

Method = Literal["supervised", "dpo", "reward_model", "reinforcement", "distillation"]
METHODS: tuple[Method, ...] = get_args(Method)

# Its result scores answers, and gives none.
REWARD_MODEL = "reward_model"

# These learn from the answers in their file; no answers are sampled.
OFFLINE: frozenset[str] = frozenset({"supervised", "dpo", REWARD_MODEL})

# OpenAI's names for the formats of rows, and ours for scored answers.
FORMATS = {"supervised": "fine-tune-chat", "dpo": "fine-tune-preference", REWARD_MODEL: "scored answers"}
