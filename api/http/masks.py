"""Refuses masked secrets, which a client that changes what it has read sends back."""

from typing import Any

from core.errors import InvalidRequest
from core.masking import masked_path


def refuse_masks(value: Any, param: str) -> None:
    """Check that no text in a value has the mask of a secret.

    Raises:
        InvalidRequest: one has.
    """
    if (masked := masked_path(value, param)) is not None:
        raise InvalidRequest(f"'{masked}' has the mask of a secret: send its value.", param=masked)
