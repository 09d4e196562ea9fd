"""Text that models, graders and other services return, made storable."""

from typing import Any


def storable(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def storable_json(value: Any) -> Any:
    """The same JSON value with all its texts storable."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {storable_json(key): storable_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [storable_json(inner) for inner in value]
    return value
