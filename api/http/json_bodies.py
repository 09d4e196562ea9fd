"""Parses JSON bodies, and says why one cannot be read: a key that an object has twice, NaN, another encoding."""

import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.routing import APIRoute

from core.errors import InvalidRequest
from core.storage.datasets import DuplicateKey, unique_keys

MAX_PARAM = 200  # characters of a key that are sent back
IN_THREAD_BYTES = 64 << 10  # a larger body would hold up other requests


class UnreadableBody(Exception):
    """The body is not JSON in UTF-8. The text is the predicate of a sentence about it."""


def _read(body: bytes) -> Any:
    try:
        return json.loads(body, object_pairs_hook=unique_keys, parse_constant=_refuse)
    except UnicodeDecodeError as cause:
        raise UnreadableBody(f"is not UTF-8 at byte {cause.start}; send JSON as UTF-8") from cause
    except RecursionError as cause:
        raise UnreadableBody("nests objects and arrays too deeply") from cause
    except (json.JSONDecodeError, DuplicateKey):
        raise  # FastAPI says where; the route names the key
    except ValueError as cause:  # the bound of Python against quadratic time
        raise UnreadableBody(
            f"has an integer of more than {sys.get_int_max_str_digits():,} digits"
        ) from cause


def _refuse(constant: str) -> Any:
    raise UnreadableBody(f"has {constant}, which JSON does not know; send null or a number")


class _Request(Request):
    """A request that parses its JSON with each key once. Starlette's parser silently drops the first of two."""

    async def json(self) -> Any:
        """The parsed body, the same object each time: a dependency may change it before FastAPI validates it."""
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = (
                    await to_thread.run_sync(_read, body) if len(body) > IN_THREAD_BYTES else _read(body)
                )
            except (DuplicateKey, UnreadableBody) as cause:
                # The only exception class that FastAPI's body parsing re-raises.
                raise HTTPException(400) from cause
        return self._json


class UniqueKeysRoute(APIRoute):
    """A route that parses a JSON body once, with the codes `duplicate_key` and `invalid_json` for those it refuses."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_unique(request: Request) -> Response:
            try:
                return await handle(_Request(request.scope, request.receive))
            except HTTPException as refused:
                cause = refused.__cause__
                if not isinstance(cause, DuplicateKey | UnreadableBody):
                    raise
            message = f"The body of the request {cause}."
            if isinstance(cause, DuplicateKey):
                raise InvalidRequest(message, param=cause.key[:MAX_PARAM], code="duplicate_key")
            raise InvalidRequest(message, code="invalid_json")

        return handle_unique


class UniqueKeysRouter(APIRouter):
    """A router whose routes, those of included routers too, reject duplicate keys."""

    def add_api_route(self, *args: Any, **options: Any) -> None:
        super().add_api_route(*args, **options | {"route_class_override": UniqueKeysRoute})
