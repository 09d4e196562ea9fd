"""Chat completions of SmolLM2-135M with four adapters: 1, 8 and 32 clients at once, through the API.

`throughput_ratio_32` is tokens a second with 32 clients over those with one. `api_overhead_ms` is what the API adds to
asking the inference server directly for one token. `cold_adapter_seconds` is a first request to an adapter less the
second.
"""

import asyncio
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.models import SMOLLM2, smollm2
from bench.report import report
from bench.sizes import sized
from core.database.engine import Database
from core.database.tables import Checkpoint, Project, TunedModel
from core.registry import DEFAULT_FILE
from core.settings import Settings
from core.storage.store import FolderBlobs
from tests.e2e.conftest import ROOT, start_server
from worker.model.policy import Policy

ADAPTERS, TOKENS, ROUNDS = sized((4, 48, 30), (1, 4, 1))
CLIENTS = sized({1: 4, 8: 16, 32: 64}, {1: 1, 8: 8, 32: 32})  # at once: requests in all
TOPICS = ("rivers", "cats", "music", "trains", "bread", "winter", "glass", "clocks")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, key = Path(name), secrets.token_urlsafe(8)
        with inference(folder, key) as url:
            server = start_server(
                folder,
                folder,
                REGRAFT_MODELS_FILE=str(DEFAULT_FILE),
                REGRAFT_INFERENCE_URL=url,
                REGRAFT_INFERENCE_KEY=key,
                REGRAFT_TORCH_THREADS="0",
            )
            try:
                names = publish(folder)
                figures = asyncio.run(measure(server.base_url, server.key, url, key, names))
            finally:
                server.stop()
    report("serve", figures)


@contextmanager
def inference(folder: Path, key: str) -> Iterator[str]:
    """`regraft-server inference` on the same blob store; its url, up to and with /v1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"REGRAFT_DATA_DIR": str(folder), "REGRAFT_INFERENCE_KEY": key}
    command = [sys.executable, "-m", "worker.cli", "inference", "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | settings)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def publish(folder: Path) -> list[str]:
    """Adapters with random weights, as jobs leave them; the names they are called by."""
    settings = Settings(data_dir=folder)
    database, blobs = Database(settings.database), FolderBlobs(Path(settings.blobs))
    policy = Policy(smollm2(), rank=16, alpha=32, seed=0)
    names = []
    for number in range(ADAPTERS + 1):  # one more, to be loaded cold
        torch.manual_seed(number)
        for parameter in policy.trainable:
            torch.nn.init.normal_(parameter, std=0.005)
        policy.save(folder / "scratch")
        prefix, files = f"bench/{number}", []
        for path in sorted((folder / "scratch").iterdir()):
            info = blobs.put_file(f"{prefix}/{path.name}", path)
            files.append({"name": path.name, "bytes": info.size, "sha256": info.sha256})
        blobs.put_bytes(f"{prefix}/manifest.json", json.dumps({"files": files}).encode())
        with database.write() as session:
            checkpoint = Checkpoint(job_id="ftjob-bench", step=number, epoch=1, blob_prefix=prefix)
            session.add(checkpoint)
            session.flush()
            names.append(f"ft:{SMOLLM2}:bench::{number:08}")
            model = TunedModel(name=names[-1], job_id="ftjob-bench", base_model=SMOLLM2)
            model.project_id, model.checkpoint_id = session.query(Project).one().id, checkpoint.id
            session.add(model)
    database.close()
    return names


async def measure(
    url: str, key: str, inner_url: str, inner_key: str, names: Sequence[str]
) -> dict[str, float]:
    async with (
        httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=600) as api,
        httpx.AsyncClient(
            base_url=inner_url, headers={"authorization": f"Bearer {inner_key}"}, timeout=600
        ) as inner,
    ):
        *warm, cold = names
        for _ in range(20):  # converting the GGUF file may take longer than a client is kept waiting
            status, _ = await ask(inner, SMOLLM2, 0, max_tokens=1)
            if status != 503:
                break
            await asyncio.sleep(5)
        for name in warm:
            await ask(api, name, 0, max_tokens=1)
        first, second = [await timed(ask(api, cold, 0, max_tokens=1)) for _ in range(2)]
        figures = {"cold_adapter_seconds": first - second}
        for clients, requests in CLIENTS.items():
            seconds, tokens = await together(api, warm, clients, requests)
            figures[f"tokens_per_second_{clients}"] = tokens / seconds
        figures["throughput_ratio_32"] = figures["tokens_per_second_32"] / figures["tokens_per_second_1"]
        figures["first_token_seconds_1"] = statistics.median(
            [await first_token(api, warm[n % ADAPTERS], n) for n in range(8)]
        )
        waits = await asyncio.gather(*(first_token(api, warm[n % ADAPTERS], n) for n in range(32)))
        figures["first_token_seconds_32"] = statistics.median(waits)
        return figures | await overhead(api, inner)


async def ask(client: httpx.AsyncClient, model: str, seed: int, **options: Any) -> tuple[int, Any]:
    answer = await client.post("/chat/completions", json=request(model, seed) | options)
    return answer.status_code, answer.json()


def request(model: str, seed: int) -> dict[str, Any]:
    asked = {"role": "user", "content": f"Write about {TOPICS[seed % len(TOPICS)]}."}
    return {"model": model, "messages": [asked], "seed": seed, "max_tokens": TOKENS}


async def timed(work: Any) -> float:
    start = time.perf_counter()
    status, body = await work
    assert status == 200, body
    return time.perf_counter() - start


async def together(
    api: httpx.AsyncClient, models: Sequence[str], clients: int, requests: int
) -> tuple[float, int]:
    """Seconds and tokens of `requests` requests from `clients` concurrent clients, each with one request at a time."""
    seeds = iter(range(requests))
    tokens = 0

    async def client() -> None:
        nonlocal tokens
        for seed in seeds:
            status, body = await ask(api, models[seed % len(models)], seed)
            assert status == 200, body
            tokens += body["usage"]["completion_tokens"]

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - start, tokens


async def first_token(api: httpx.AsyncClient, model: str, seed: int) -> float:
    start = time.perf_counter()
    async with api.stream(
        "POST", "/chat/completions", json=request(model, seed) | {"stream": True}
    ) as answer:
        async for line in answer.aiter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return time.perf_counter() - start
    raise AssertionError("the stream has no text")


async def overhead(api: httpx.AsyncClient, inner: httpx.AsyncClient) -> dict[str, float]:
    seconds: dict[str, list[float]] = {"api": [], "inner": []}
    for round_ in range(ROUNDS + 5):
        for name, client in (("api", api), ("inner", inner)):
            took = await timed(ask(client, SMOLLM2, 0, max_tokens=1))
            if round_ >= 5:
                seconds[name].append(took)
    differences = [ours - theirs for ours, theirs in zip(seconds["api"], seconds["inner"], strict=True)]
    return {
        "api_overhead_ms": statistics.median(differences) * 1000,
        "one_token_ms": statistics.median(seconds["inner"]) * 1000,
    }


if __name__ == "__main__":
    main()
