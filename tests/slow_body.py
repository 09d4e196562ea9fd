"""A client that announces a body and never sends it."""

import asyncio
from typing import Any

from starlette.types import ASGIApp


async def stopped_body(
    app: ASGIApp, path: str, key: str, content_type: str = "application/json"
) -> list[Any]:
    """Post to an app without a server. Returns the messages of its answer."""
    sent: list[Any] = []
    cancelled: list[int] = []

    async def receive() -> dict[str, Any]:
        if cancelled:
            return {"type": "http.disconnect"}
        try:
            await asyncio.Event().wait()
            raise AssertionError("nothing sets the event")
        finally:
            cancelled.append(1)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"authorization", f"Bearer {key}".encode()),
            (b"content-type", content_type.encode()),
            (b"content-length", b"1000"),
        ],
    }
    await app(scope, receive, send)
    return sent
