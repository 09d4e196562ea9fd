"""The methods of a job, by OpenAI's names."""

from typing import Literal, get_args

Method = Literal["supervised", "dpo", "reinforcement", "distillation"]
METHODS: tuple[Method, ...] = get_args(Method)

# These learn from the answers in their file; no answers are sampled.
OFFLINE: frozenset[str] = frozenset({"supervised", "dpo"})

# OpenAI's names for the formats of rows.
FORMATS = {"supervised": "fine-tune-chat", "dpo": "fine-tune-preference"}
