"""What may be None in the code, and is not at this point of a test."""

from typing import Any, TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    assert value is not None
    return value


def untyped(value: object) -> Any:
    """The same, where a test knows more than types say: what the service adds to OpenAI's objects, a body as JSON."""
    return value
