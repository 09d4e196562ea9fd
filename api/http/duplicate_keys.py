"""Rejects JSON bodies in which an object has a key twice."""

import json

from fastapi import Request

from core.errors import InvalidRequest
from core.storage.datasets import DuplicateKey, unique_keys


async def refuse_duplicate_keys(request: Request) -> None:
    """A dependency of all routes. FastAPI's parser keeps the last of two equal keys, and drops the other silently.

    Raises:
        InvalidRequest: with the code `duplicate_key`.
    """
    # A route without a body field reads its body in pieces (files), or ignores it.
    if request.scope["route"].body_field is None:
        return
    try:
        json.loads(await request.body(), object_pairs_hook=unique_keys)
    except DuplicateKey as cause:
        message = f"The body of the request {cause}."
        raise InvalidRequest(message, param=cause.key, code="duplicate_key") from None
    except (ValueError, RecursionError):
        return  # not JSON: FastAPI reports it
