"""`python -m worker.engine.child FILE`: a job's own engine, which launch.py starts.

Its main thread computes and another one answers requests, from the beginning: the first question for its facts is
answered when the model is loaded, or with the reason why it is not.
"""

import json
import os
import socket
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from worker import process
from worker.engine.options import EngineConfig, engine_options
from worker.engine.protocol import (
    ADAPTER,
    FACTS,
    SAMPLE,
    SLEEP,
    WAKE,
    WEIGHTS,
    AdapterRequest,
    FactsQuestion,
    Failure,
    ServerInfo,
    WeightsRequest,
)
from worker.engine.routes import RequiresKey
from worker.engine.sampling import facts_of, sample
from worker.engine.stepped import EngineFailed, SamplingEngine, SteppedEngine, failure_of

KEEP_ALIVE_SECONDS = 7 * 24 * 3600  # its client has the same life


def application(engine: SteppedEngine, options: dict[str, Any], key: str) -> FastAPI:
    """The routes of a job's own engine."""
    app = FastAPI(openapi_url=None)
    app.add_middleware(RequiresKey)
    without_adapter = {"max_lora_rank": 0, "max_loras": 0}
    args = Namespace(**without_adapter | options, served_model_name=[options["model"]], api_key=[key])

    app.state.args, app.state.engine_client, app.state.find_adapter = args, engine, find_adapter
    app.add_exception_handler(EngineFailed, failed)
    routes = EngineRoutes(engine, args)
    for path, route in (
        (FACTS, routes.facts),
        (ADAPTER, routes.adapter),
        (WEIGHTS, routes.weights),
        (SLEEP, routes.sleep),
        (WAKE, routes.wake),
        (SAMPLE, sample),
    ):
        app.add_api_route(path, route, methods=["POST"])
    return app


async def find_adapter(name: str) -> None:
    return None  # every request has the one that the engine has


async def failed(request: Request, cause: Exception) -> JSONResponse:
    assert isinstance(cause, EngineFailed)
    return JSONResponse(Failure(error=str(cause), lasting=cause.lasting).model_dump(), 500)


@dataclass(frozen=True)
class EngineRoutes:
    """The requests of the job's process to its engine, besides those for samples."""

    engine: SteppedEngine
    args: Namespace  # vLLM's

    async def facts(self, question: FactsQuestion) -> ServerInfo:
        await self.engine.call(lambda engine: None)
        return await facts_of(self.engine, self.args, question)

    async def adapter(self, request: Request) -> Response:
        sent = msgspec.msgpack.decode(await request.body(), type=AdapterRequest)
        return await self._call(lambda engine: engine.put(sent.adapter, sent.version))

    async def weights(self, request: Request) -> Response:
        sent = msgspec.msgpack.decode(await request.body(), type=WeightsRequest)
        return await self._call(lambda engine: engine.load(sent.files, sent.version))

    async def sleep(self) -> Response:
        return await self._call(lambda engine: engine.sleep())

    async def wake(self) -> Response:
        return await self._call(lambda engine: engine.wake_up())

    async def _call(self, function: Callable[[SamplingEngine], None]) -> Response:
        try:
            await self.engine.call(function)
        except EngineFailed:
            raise
        except Exception as cause:
            raise failure_of(cause) from cause
        return Response()


def main(file: Path) -> None:
    start = json.loads(file.read_text())
    process.die_with_parent(start["parent"])
    config = EngineConfig.of_row(start["config"])
    engine = SteppedEngine(partial(SamplingEngine, config))
    app = application(engine, engine_options(config), os.environ["VLLM_API_KEY"])
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE_SECONDS
        )
    )
    listening = socket.socket(fileno=start["listening"])
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True, name="routes").start()
    engine.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
