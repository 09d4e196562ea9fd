"""Rejects JSON bodies in which an object has a key twice."""

import json
from functools import partial

from anyio import to_thread
from fastapi import Request

from core.errors import InvalidRequest
from core.storage.datasets import DuplicateKey, unique_keys

MAX_PARAM = 200  # characters of a key that are sent back
IN_THREAD_BYTES = 64 << 10  # a larger body would hold up other requests


async def refuse_duplicate_keys(request: Request) -> None:
    """A dependency of all routes. FastAPI's parser keeps the last of two equal keys, and drops the other silently.

    Raises:
        InvalidRequest: with the code `duplicate_key`.
    """
    # A route without a body field reads its body in pieces (files), or ignores it.
    if request.scope["route"].body_field is None:
        return
    try:
        body = await request.body()
        read = partial(json.loads, body, object_pairs_hook=unique_keys)
        await to_thread.run_sync(read) if len(body) > IN_THREAD_BYTES else read()
    except DuplicateKey as cause:
        message = f"The body of the request {cause}."
        raise InvalidRequest(message, param=cause.key[:MAX_PARAM], code="duplicate_key") from None
    except (ValueError, RecursionError):
        return  # not JSON: FastAPI reports it
