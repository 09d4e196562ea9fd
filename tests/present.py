"""Values of which a test knows more than their types say."""

from typing import Any, TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """What may be None in general, and is not here."""
    assert value is not None
    return value


def untyped(value: object) -> Any:
    """For what the service adds to OpenAI's objects, a body as JSON, or a fake of a class."""
    return value
