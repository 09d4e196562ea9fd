"""Hyperparameters in tests, which name them as the run does."""

from collections.abc import Mapping
from typing import Any

from core.jobs.hyperparameter_places import PLACES, VARIANTS

_TYPES = {"loss": "dapo", "importance": "truncate", "schedule": "on_policy"}


def in_groups(values: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of `advanced` with these values, by their names in `Resolved`, whole groups and `train` as they are.

    A value that switches a whole group off, such as `kl` 0, is left out. A group with variants gets the default one,
    unless a value says another.
    """
    advanced: dict[str, Any] = {}
    for name, value in values.items():
        if (
            name not in PLACES
            or value is None
            or (isinstance(value, Mapping) and name != "chat_template_kwargs")
        ):
            advanced[name] = advanced.get(name, {}) | value if isinstance(value, Mapping) else value
        elif not _is_absent(name, values):
            advanced.setdefault(PLACES[name].group, {})[PLACES[name].field] = value
    if "steps" in (schedule := advanced.get("schedule", {})):
        schedule.setdefault("type", "off_policy")
    for name, chosen in _TYPES.items():
        if isinstance(group := advanced.get(name), dict):
            advanced[name] = {"type": chosen} | group
    return advanced


def _is_absent(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the value is that of a group, or of a variant, without the field, or is the default of the field."""
    place, value = PLACES[name], values[name]
    if place.absent is None or value != place.absent:
        return False
    chosen = values.get(place.group, _TYPES.get(place.group))
    variant = chosen.get("type") if isinstance(chosen, Mapping) else chosen
    cls = VARIANTS.get(place.group, {}).get(variant or "")
    field = None if cls is None else cls.model_fields.get(place.field)
    return field is None or field.default == value
