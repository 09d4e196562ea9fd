"""The strings that parameters of the server may have.

Written by .ci/client_literals.py from the OpenAPI document; do not edit.
"""

from typing import Literal

AdvantageScale = Literal["none", "group", "batch"]
Change = Literal["flipped", "higher", "lower", "same", "gained", "lost"]
FileMethod = Literal["reinforcement", "supervised", "dpo", "reward_model"]
FinishReason = Literal["stop", "length"]
Format = Literal["jsonl", "parquet"]
Method = Literal["supervised", "dpo", "reward_model", "reinforcement", "distillation"]
Order = Literal["asc", "desc"]
Outcome = Literal["learned", "kept", "forgotten", "stuck", "ungraded"]
Projects = Literal["own", "all"]
PromptSort = Literal["line", "change", "last_mean"]
Sort = Literal["score", "advantage", "centered_reward", "completion_tokens"]
Split = Literal["train", "valid"]
