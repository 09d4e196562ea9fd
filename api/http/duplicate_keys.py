"""Parses JSON bodies, and rejects those in which an object has a key twice."""

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.routing import APIRoute

from core.errors import InvalidRequest
from core.storage.datasets import DuplicateKey, unique_keys

MAX_PARAM = 200  # characters of a key that are sent back
IN_THREAD_BYTES = 64 << 10  # a larger body would hold up other requests

_read = partial(json.loads, object_pairs_hook=unique_keys)


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
            except DuplicateKey as cause:
                # The only exception class that FastAPI's body parsing re-raises.
                raise HTTPException(400) from cause
        return self._json


class UniqueKeysRoute(APIRoute):
    """A route that parses a JSON body once, and answers a duplicate key with the code `duplicate_key`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_unique(request: Request) -> Response:
            try:
                return await handle(_Request(request.scope, request.receive))
            except HTTPException as refused:
                if not isinstance(cause := refused.__cause__, DuplicateKey):
                    raise
            message = f"The body of the request {cause}."
            raise InvalidRequest(message, param=cause.key[:MAX_PARAM], code="duplicate_key")

        return handle_unique


class UniqueKeysRouter(APIRouter):
    """A router whose routes, those of included routers too, reject duplicate keys."""

    def add_api_route(self, *args: Any, **options: Any) -> None:
        super().add_api_route(*args, **options | {"route_class_override": UniqueKeysRoute})
