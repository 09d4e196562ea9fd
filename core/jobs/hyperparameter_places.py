"""The path in `hyperparameters.advanced` of each value of `Resolved`, which the loop reads as plain values."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails, InitErrorDetails

from core.jobs import hyperparameter_groups as groups


@dataclass(frozen=True)
class GroupField:
    """A field of a group of `advanced`."""

    group: str
    field: str
    absent: Any = None  # in a run whose group, or whose variant of it, does not have the field

    def __str__(self) -> str:
        return f"{self.group}.{self.field}"

    def value_in(self, advanced: BaseModel) -> Any:
        group = getattr(advanced, self.group)
        return getattr(group, self.field, self.absent)


PLACES = {
    "loss": GroupField("loss", "type"),
    "advantage_scale": GroupField("loss", "advantage_scale"),
    "std": GroupField("loss", "std"),
    "normalize": GroupField("loss", "normalize"),
    "supervision": GroupField("loss", "supervision", "outcome"),
    "group_size": GroupField("sampling", "group_size"),
    "prompt_order": GroupField("sampling", "order"),
    "learning_rate": GroupField("optimizer", "learning_rate"),
    "lora_rank": GroupField("lora", "rank"),
    "lora_alpha": GroupField("lora", "alpha"),
    "lora_targets": GroupField("lora", "targets"),
    "temperature": GroupField("sampling", "temperature"),
    "max_completion_tokens": GroupField("sampling", "max_completion_tokens"),
    "overlong": GroupField("overlong", "type"),
    "overlong_buffer": GroupField("overlong", "buffer"),
    "resample_prompts": GroupField("schedule", "resample_prompts", 0),
    "off_policy_steps": GroupField("schedule", "steps", 0),
    "continue_in_flight": GroupField("schedule", "continue_in_flight", False),
    "stop_after_flat_evals": GroupField("stopping", "after_flat_evals"),
    "stop_after_silent_steps": GroupField("stopping", "after_silent_steps"),
    "stop_above_kl": GroupField("stopping", "above_kl"),
    "stop_below_entropy": GroupField("stopping", "below_entropy"),
    "on_alarm": GroupField("stopping", "on_alarm", "inform"),
    "fail_below_signal": GroupField("stopping", "fail_below_signal"),
    "require_improvement": GroupField("evaluation", "require_improvement"),
    "updates_per_batch": GroupField("optimizer", "updates_per_batch"),
    "mini_batches": GroupField("optimizer", "mini_batches"),
    "clip_low": GroupField("loss", "clip_low"),
    "clip_high": GroupField("loss", "clip_high"),
    "cispo_cap": GroupField("loss", "cap"),
    "ratio_max": GroupField("loss", "ratio_max"),
    "divergence": GroupField("loss", "divergence"),
    "log_ratio_penalty": GroupField("loss", "log_ratio_penalty", 0.0),
    "gae_lambda": GroupField("loss", "gae_lambda"),
    "gamma": GroupField("loss", "gamma"),
    "value_clip": GroupField("loss", "value_clip"),
    "value_weight": GroupField("loss", "value_weight"),
    "value_learning_rate": GroupField("loss", "value_learning_rate"),
    "value_warmup_steps": GroupField("loss", "value_warmup_steps"),
    "overlap": GroupField("schedule", "overlap", False),
    "importance": GroupField("importance", "type"),
    "importance_cap": GroupField("importance", "cap"),
    "importance_floor": GroupField("importance", "floor"),
    "importance_level": GroupField("importance", "level", "token"),
    "importance_reject": GroupField("importance", "reject"),
    "reject_low": GroupField("importance", "reject_low"),
    "reject_high": GroupField("importance", "reject_high"),
    "off_policy_threshold": GroupField("importance", "off_policy_threshold"),
    "length_weight": GroupField("length", "weight", 0.0),
    "kl": GroupField("kl", "weight", 0.0),
    "kl_estimator": GroupField("kl", "estimator"),
    "kl_warmup_steps": GroupField("kl", "warmup_steps", 0),
    "reference_refresh_steps": GroupField("kl", "reference_refresh_steps", 0),
    "max_grad_norm": GroupField("optimizer", "max_grad_norm"),
    "warmup_steps": GroupField("optimizer", "warmup_steps"),
    "step_kl": GroupField("optimizer", "step_kl"),
    "rollback": GroupField("optimizer", "rollback"),
    "learning_rate_schedule": GroupField("optimizer", "schedule"),
    "chat_template": GroupField("sampling", "chat_template"),
    "chat_template_kwargs": GroupField("sampling", "chat_template_kwargs"),
    "thinking_budget": GroupField("sampling", "thinking_budget"),
    "eval_temperature": GroupField("evaluation", "temperature"),
    "eval_pass_score": GroupField("evaluation", "pass_score"),
}
GROUPS = tuple(dict.fromkeys(place.group for place in PLACES.values()))


def _variants(union: Any) -> dict[str, type[BaseModel]]:
    return {cls.model_fields["type"].default: cls for cls in get_args(get_args(union)[0])}


# The variants of a group, by their `type`.
VARIANTS = {
    "loss": _variants(groups.LossGroup),
    "overlong": _variants(groups.OverlongGroup),
    "schedule": _variants(groups.ScheduleGroup),
    "importance": _variants(groups.ImportanceGroup),
}


# Paths in `advanced` that are the place of no value of `Resolved`.
OtherPath = Literal["train", "loss.top_k", "loss.temperature"]


def param_of(method: str, name: str) -> str:
    """The path in a job's request of this value of `Resolved`.

    Raises:
        KeyError: a value without a place in `advanced`.
    """
    return _in_request(method, str(PLACES[name]))


def param_at(method: str, path: OtherPath) -> str:
    """The path in a job's request of what has this path in `advanced`.

    Raises:
        KeyError: another path. That of a value of `Resolved` is for `param_of`.
    """
    if path not in get_args(OtherPath):
        raise KeyError(path)
    return _in_request(method, path)


def _in_request(method: str, path: str) -> str:
    return f"method.{method}.hyperparameters.advanced.{path}"


def with_values(advanced: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The stored `advanced` of a job with its resolved values in place of each "auto"."""
    filled = {name: dict(group) if isinstance(group, Mapping) else group for name, group in advanced.items()}
    for name, place in PLACES.items():
        group = filled.get(place.group)
        if isinstance(group, dict) and place.field in group and resolved.get(name) is not None:
            group[place.field] = resolved[name]
    return filled


def as_sent(error: ErrorDetails) -> InitErrorDetails:
    """An error inside `advanced` at the path that the request has, which does not name the variant of a group."""
    loc, kind, context = list(error["loc"]), error["type"], dict(error.get("ctx", {}))
    value = error["input"]
    if len(loc) > 1 and loc[1] in VARIANTS.get(str(loc[0]), {}):
        del loc[1]  # pydantic adds the branch of a union
    if kind == "union_tag_invalid":
        loc.append("type")
        kind, value = "literal_error", value["type"]
        context = {"expected": " or ".join(context["expected_tags"].rsplit(", ", 1))}
    elif kind == "union_tag_not_found":
        loc.append("type")
        kind, context = "missing", {}
    elif len(loc) == 1 and loc[0] in GROUPS and not isinstance(value, Mapping) and kind != "value_error":
        example = _example(str(loc[0]), value)
        kind, context = "value_error", {"error": ValueError(f"expected an object such as {example}")}
    return InitErrorDetails(type=kind, loc=tuple(loc), input=value, ctx=context)


# A group of each kind that is accepted, for refusals of another value.
_EXAMPLES: dict[str, dict[str, Any]] = {
    "loss": {"type": "dapo"},
    "overlong": {"type": "mask"},
    "schedule": {"type": "on_policy", "resample_prompts": 8},
    "importance": {"type": "truncate"},
    "length": {"type": "pass_rate"},
    "kl": {"weight": 0.01},
    "sampling": {"group_size": 8},
    "optimizer": {"learning_rate": 1e-4},
    "lora": {"rank": 16},
    "stopping": {"after_flat_evals": 3},
    "evaluation": {"pass_score": 0.5},
}


def _example(group: str, value: Any) -> str:
    """A group that is accepted: with the value, if it names a variant or is the weight of a KL penalty."""
    if isinstance(value, str) and value in VARIANTS.get(group, {}):
        return json.dumps({"type": value})
    if group == "kl" and isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps({"weight": value}) if value > 0 else f"{json.dumps(_EXAMPLES[group])}, or none"
    return json.dumps(_EXAMPLES[group])
