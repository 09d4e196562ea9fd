"""The HTTP server of a run whose episodes an agent plays. The API forwards to it; no other client has its secret."""

import asyncio
import hmac
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from core.addresses import HostPort, family_of
from core.asgi import until_gone
from core.chat import envelope
from core.connections import connection_options
from core.errors import EpisodeRefused
from core.settings import Settings
from worker.rollout.agent_episodes import Board, ChatRequest, Completed, SamplerFailed

GRACE_S = 10  # for the answers under way when a step has ended


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals of the run to the run."""
        yield


def listener(host: str) -> socket.socket:
    """A socket that listens at this address, on a port that the system chooses."""
    listening = socket.socket(family_of(host), socket.SOCK_STREAM)
    listening.bind((host, 0))
    listening.listen()  # connections wait until the server accepts them
    return listening


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{HostPort(host, port)}"


@asynccontextmanager
async def served(
    board: Board, listening: socket.socket, secret: str, settings: Settings
) -> AsyncIterator[None]:
    """Answer requests about the board's episodes in the context, in this event loop."""
    config = uvicorn.Config(
        app_of(board, secret),
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=GRACE_S,
        lifespan="off",
        **connection_options(settings),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield
    finally:
        board.close()
        server.should_exit = True
        await serving


def app_of(board: Board, secret: str) -> Starlette:
    """The application. Requests have the secret as their bearer token, or get 401."""

    async def lease(request: Request) -> Response:
        body = await request.json()
        leased = await until_gone(request.receive, board.lease(body["max"], body["wait_s"])) or []
        if await request.is_disconnected():
            board.put_back([one["id"] for one in leased])
        return _json({"data": leased})

    async def chat(request: Request) -> Response:
        return _json(await board.ask(request.path_params["id"], ChatRequest(**await request.json())))

    async def complete(request: Request) -> Response:
        board.complete(request.path_params["id"], Completed(**await request.json()))
        return _json({})

    return Starlette(
        routes=[
            Route("/lease", lease, methods=["POST"]),
            Route("/episodes/{id}/chat", chat, methods=["POST"]),
            Route("/episodes/{id}/complete", complete, methods=["POST"]),
        ],
        middleware=[Middleware(RequiresSecret, secret=secret)],
        exception_handlers={EpisodeRefused: _refused, SamplerFailed: _failed},
    )


class RequiresSecret:
    """Rejects requests of others than the API."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app, self._expected = app, f"Bearer {secret}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = dict(scope["headers"]).get(b"authorization", b"")
        app = self._app if hmac.compare_digest(sent, self._expected) else Response(status_code=401)
        await app(scope, receive, send)


async def _refused(request: Request, cause: Exception) -> Response:
    assert isinstance(cause, EpisodeRefused)
    return _json(envelope(cause.status_code, cause.message, cause.code, cause.param), cause.status_code)


async def _failed(request: Request, cause: Exception) -> Response:
    return _json(envelope(503, "The run of the job has ended; try again.", "not_ready"), 503)


def _json(content: Any, status: int = 200) -> Response:
    # Escaped, because a row may have any text, lone surrogates too.
    return Response(json.dumps(content, default=dict), status, media_type="application/json")
