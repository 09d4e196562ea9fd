"""The flat names of `hyperparameters.advanced`, such as `cispo_cap` for `loss.cap`.

Jobs were written with flat names before the groups of core/jobs/hyperparameter_groups.py existed, and still may be. A
job that was sent with flat names is stored and shown with them, and so is the result of `resolve`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails, InitErrorDetails

from core.jobs import hyperparameter_groups as groups

Place = tuple[str, str]
"""A group of `advanced` and a field in it."""


@dataclass(frozen=True)
class Flat:
    """A flat name: the place of its value, its default, and the reason if the chosen variant has no such place."""

    place: Place
    default: Any
    refusal: str = ""
    unset: tuple[Any, ...] = ()  # values besides the default that are accepted where there is no such place
    types: tuple[str, ...] = ("string", "number", "boolean")  # in a JSON schema

    def is_unset(self, value: Any) -> bool:
        return any(_same(value, idle) for idle in (self.default, *self.unset))

    @property
    def absent(self) -> Any:
        """The value of a run in which this is not used."""
        return (*self.unset, None)[0] if self.default == "auto" else self.default


_CLIP = "clip_low and clip_high have no effect with loss 'cispo': use cispo_cap"
_PPO = "{} is only for loss 'ppo'"
_KL = "kl_estimator, kl_warmup_steps and reference_refresh_steps have no effect with kl 0"
_OFF_POLICY = "{} and off_policy_steps cannot be combined"

# In the order in which the API shows them.
FLAT = {
    "loss": Flat(("loss", "type"), "dapo"),
    "advantage_scale": Flat(("loss", "advantage_scale"), "auto"),
    "std": Flat(("loss", "std"), "auto"),
    "normalize": Flat(("loss", "normalize"), "papers"),
    "supervision": Flat(
        ("loss", "supervision"),
        "outcome",
        "losses 'gspo' and 'rloo' have one ratio per answer, and 'reinforce_plus_plus' and 'ppo' have one reward per "
        "answer, so they need supervision 'outcome'",
    ),
    "group_size": Flat(("sampling", "group_size"), "auto"),
    "prompt_order": Flat(("sampling", "order"), "shuffled"),
    "learning_rate": Flat(("optimizer", "learning_rate"), "auto"),
    "lora_rank": Flat(("lora", "rank"), 16),
    "lora_alpha": Flat(("lora", "alpha"), 32),
    "lora_targets": Flat(("lora", "targets"), "auto", types=("string", "array")),
    "temperature": Flat(("sampling", "temperature"), 1.0),
    "max_completion_tokens": Flat(("sampling", "max_completion_tokens"), "auto"),
    "overlong": Flat(("overlong", "type"), "score"),
    "overlong_buffer": Flat(("overlong", "buffer"), "auto", "overlong_buffer needs overlong 'soft'"),
    "resample_prompts": Flat(("schedule", "resample_prompts"), 0, _OFF_POLICY.format("resample_prompts")),
    "off_policy_steps": Flat(("schedule", "steps"), 0),
    "continue_in_flight": Flat(
        ("schedule", "continue_in_flight"), False, "continue_in_flight needs off_policy_steps 1"
    ),
    "stop_after_flat_evals": Flat(("stopping", "after_flat_evals"), 0),
    "stop_after_silent_steps": Flat(("stopping", "after_silent_steps"), 0),
    "stop_above_kl": Flat(("stopping", "above_kl"), 0.0),
    "stop_below_entropy": Flat(("stopping", "below_entropy"), 0.0),
    "fail_below_signal": Flat(("stopping", "fail_below_signal"), 0.0),
    "require_improvement": Flat(("evaluation", "require_improvement"), False),
    "updates_per_batch": Flat(("optimizer", "updates_per_batch"), 1),
    "mini_batches": Flat(("optimizer", "mini_batches"), 1),
    "clip_low": Flat(("loss", "clip_low"), "auto", _CLIP),
    "clip_high": Flat(("loss", "clip_high"), "auto", _CLIP),
    "cispo_cap": Flat(
        ("loss", "cap"), "auto", "cispo_cap is only for loss 'cispo': use clip_low and clip_high"
    ),
    "gae_lambda": Flat(("loss", "gae_lambda"), "auto", _PPO.format("gae_lambda")),
    "gamma": Flat(("loss", "gamma"), "auto", _PPO.format("gamma")),
    "value_clip": Flat(("loss", "value_clip"), "auto", _PPO.format("value_clip")),
    "value_weight": Flat(("loss", "value_weight"), "auto", _PPO.format("value_weight")),
    "value_learning_rate": Flat(("loss", "value_learning_rate"), "auto", _PPO.format("value_learning_rate")),
    "value_warmup_steps": Flat(("loss", "value_warmup_steps"), "auto", _PPO.format("value_warmup_steps")),
    "overlap": Flat(("schedule", "overlap"), "auto", _OFF_POLICY.format("overlap"), unset=(False,)),
    "importance": Flat(("importance", "type"), "truncate"),
    "importance_cap": Flat(
        ("importance", "cap"), "auto", "importance_cap has no effect with importance 'none'"
    ),
    "kl": Flat(("kl", "weight"), 0.0),
    "kl_estimator": Flat(("kl", "estimator"), "auto", _KL),
    "kl_warmup_steps": Flat(("kl", "warmup_steps"), 0, _KL),
    "reference_refresh_steps": Flat(("kl", "reference_refresh_steps"), 0, _KL),
    "max_grad_norm": Flat(("optimizer", "max_grad_norm"), 1.0),
    "warmup_steps": Flat(("optimizer", "warmup_steps"), 0),
    "learning_rate_schedule": Flat(("optimizer", "schedule"), "constant"),
    "chat_template": Flat(("sampling", "chat_template"), "auto"),
    "chat_template_kwargs": Flat(("sampling", "chat_template_kwargs"), {}, types=("object",)),
    "thinking_budget": Flat(("sampling", "thinking_budget"), "auto"),
    "eval_temperature": Flat(("evaluation", "temperature"), "auto"),
    "eval_pass_score": Flat(("evaluation", "pass_score"), 1.0),
}
GROUPS = tuple(dict.fromkeys(flat.place[0] for flat in FLAT.values()))

# Names that select the variant of a group, so they are read before the others.
_SELECTORS = ("loss", "overlong", "importance", "kl", "off_policy_steps")
_NAME_AT = {flat.place: name for name, flat in FLAT.items()}


def _variants(union: Any) -> dict[str, type[BaseModel]]:
    return {cls.model_fields["type"].default: cls for cls in get_args(get_args(union)[0])}


VARIANTS = {
    "loss": _variants(groups.LossGroup),
    "overlong": _variants(groups.OverlongGroup),
    "schedule": _variants(groups.ScheduleGroup),
    "importance": _variants(groups.ImportanceGroup),
}
_DEFAULT_TYPE = {"loss": "dapo", "overlong": "score", "schedule": "on_policy", "importance": "truncate"}


def names_in(sent: Mapping[str, Any]) -> frozenset[str]:
    """The flat names in `advanced`. `loss` and others are also names of groups: an object is one, a plain value not."""
    return frozenset(name for name in sent if name in FLAT and not _is_group(name, sent[name]))


def has_groups(sent: Mapping[str, Any]) -> bool:
    return any(name in GROUPS and _is_group(name, value) for name, value in sent.items())


def as_sent(value: Any) -> Any:
    """A group that Python code built, as a request has it."""
    if not isinstance(value, BaseModel):
        return value
    given = value.model_fields_set | ({"type"} & type(value).model_fields.keys())
    return {name: getattr(value, name) for name in given}


def to_groups(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the flat names in `advanced` to groups; everything else stays as it is.

    Raises:
        ValueError: a flat name has no effect with the others, or its group has the same field.
    """
    sent = _once(sent)
    flat = names_in(sent)
    result = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in sent.items()
        if name not in flat
    }
    for name in filter(flat.__contains__, _SELECTORS):
        _select(result, name, sent[name])
    for name in filter(flat.difference(_SELECTORS).__contains__, FLAT):
        if FLAT[name].default != "auto" or sent[name] != "auto":
            _put(result, FLAT[name], sent[name])
    return result


def to_flat(advanced: BaseModel, *, requested: bool) -> dict[str, Any]:
    """The values of all flat names.

    Args:
        requested: as in the request, with "auto" for fields that were left out. Otherwise as the run uses them, with
            None for "auto"s without effect.
    """
    return {name: _value(advanced, flat, requested) for name, flat in FLAT.items()}


def at_flat_names(error: ErrorDetails, sent: Mapping[str, Any]) -> Iterator[InitErrorDetails]:
    """The errors to report for an error in the groups that `to_groups` made from `sent`: at the names in `sent`."""
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
    name = _NAME_AT.get(tuple(loc[:2]))  # type: ignore[arg-type]
    if name is None or name not in names_in(sent):
        if len(loc) == 1 and loc[0] in GROUPS and loc[0] not in sent.keys() - names_in(sent):
            loc = []  # a rule of a group that is only in the translation
        yield InitErrorDetails(type=kind, loc=tuple(loc), input=value, ctx=context)
        return
    if FLAT[name].default == "auto" and len(loc) == 2:  # the field of the group has a number as its default
        yield InitErrorDetails(
            type="literal_error", loc=(name, "'auto'"), input=value, ctx={"expected": "'auto'"}
        )
        loc.append("float")
    elif _same(FLAT[name].default, 0) and kind == "greater_than":
        kind, context = "greater_than_equal", {"ge": 0}  # 0 is off, and has no place in the group
    yield InitErrorDetails(type=kind, loc=(name, *loc[2:]), input=value, ctx=context)


def describe(schema: dict[str, Any]) -> None:
    """Add the flat names to the JSON schema of `advanced`."""
    properties = schema["properties"]
    for name, flat in FLAT.items():
        plain = {
            "description": f"The flat name of `{'.'.join(flat.place)}`.",
            "type": list(flat.types),
        }
        properties[name] = {"anyOf": [properties[name], plain]} if name in GROUPS else plain


def _is_group(name: str, value: Any) -> bool:
    return name in GROUPS and (isinstance(value, Mapping) or (name == "kl" and value is None))


def _once(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Keep one spelling of each hyperparameter.

    A default beside another value was not chosen: a job is shown with all its flat names, or with whole groups, and a
    clone of it may set one field in the other spelling.

    Raises:
        ValueError: both spellings have values that are no defaults.
    """
    kept, flat = dict(sent), names_in(sent)
    for name in flat:
        group, field = FLAT[name].place
        inside = kept.get(group) if group not in flat else None
        both = (field, "type") if name == "off_policy_steps" else (field,)
        given = [field for field in both if isinstance(inside, Mapping) and field in inside]
        if not given or not isinstance(inside, Mapping):
            continue
        if FLAT[name].is_unset(kept[name]):
            del kept[name]
        elif given == [field] and _same(inside[field], FLAT[name].default):
            kept[group] = {key: value for key, value in inside.items() if key != field}
        else:
            raise ValueError(
                f"{name} and {group}.{given[0]} are the same hyperparameter: give only one of them"
            )
    return kept


def _select(result: dict[str, Any], name: str, value: Any) -> None:
    """Choose the variant of a group. 0 is off: the penalty has no group then, and steps are on policy."""
    if name == "kl":
        result |= {} if _same(value, 0) else {"kl": {"weight": value}}
    elif name == "off_policy_steps":
        given = result.get("schedule")
        chosen = {"type": "off_policy", **(given if isinstance(given, dict) else {}), "steps": value}
        result |= {} if _same(value, 0) else {"schedule": chosen}
    else:
        result[name] = {"type": value}


def _put(result: dict[str, Any], flat: Flat, value: Any) -> None:
    group, field = flat.place
    if not _has_place(result, group, field):
        if not flat.is_unset(value):
            raise ValueError(flat.refusal)
        return
    inside = result.setdefault(group, {"type": _DEFAULT_TYPE[group]} if group in VARIANTS else {})
    if isinstance(inside, dict):  # otherwise the group is refused
        inside[field] = value


def _has_place(result: Mapping[str, Any], group: str, field: str) -> bool:
    """Whether the chosen variant of the group has the field. An unknown variant is another error: it has all."""
    if group == "kl":
        return result.get("kl") is not None
    if group not in VARIANTS:
        return True
    inside = result.get(group, {"type": _DEFAULT_TYPE[group]})
    chosen = inside.get("type") if isinstance(inside, dict) else None
    variant = VARIANTS[group].get(chosen) if isinstance(chosen, str) else None
    return variant is None or field in variant.model_fields


def _value(advanced: BaseModel, flat: Flat, requested: bool) -> Any:
    group, field = getattr(advanced, flat.place[0]), flat.place[1]
    if group is None or field not in type(group).model_fields:
        return flat.default if requested else flat.absent
    if requested and flat.default == "auto" and field not in group.model_fields_set:
        return "auto"
    return getattr(group, field)


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON values: false is not 0."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
