"""Hyperparameters in tests, which name them as the run does."""

from collections.abc import Mapping
from typing import Any

from core.jobs.hyperparameter_places import PLACES

_TYPES = {"loss": "dapo", "importance": "truncate", "schedule": "on_policy"}


def in_groups(values: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of `advanced` with these values, by their names in `Resolved`, whole groups and `train` as they are.

    A value that switches something off, such as `kl` 0, is left out. A group with variants gets the default one unless
    a value says another.
    """
    advanced: dict[str, Any] = {}
    for name, value in values.items():
        if (
            name not in PLACES
            or value is None
            or (isinstance(value, Mapping) and name != "chat_template_kwargs")
        ):
            advanced[name] = advanced.get(name, {}) | value if isinstance(value, Mapping) else value
        elif PLACES[name].absent is None or value != PLACES[name].absent:
            advanced.setdefault(PLACES[name].group, {})[PLACES[name].field] = value
    if "steps" in (schedule := advanced.get("schedule", {})):
        schedule.setdefault("type", "off_policy")
    for name, chosen in _TYPES.items():
        if isinstance(group := advanced.get(name), dict):
            advanced[name] = {"type": chosen} | group
    return advanced
