"""Eval runs of SmolLM2-135M against as many plain chat completions through the API, with equal concurrency.

`ratio` is items a second of the runs, grading and records included, over plain completions a second. Both sides take
turns, ROUNDS times each, so that other work on the machine slows both. REGRAFT_BENCH_ITEMS sets the number of items.
"""

import asyncio
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench.models import SMOLLM2
from bench.report import report
from bench.serve import TOPICS, inference
from core.registry import DEFAULT_FILE
from tests.e2e.conftest import start_server

ITEMS = int(os.environ.get("REGRAFT_BENCH_ITEMS", "1000"))
ROUNDS = 4
AT_ONCE, TOKENS = 64, 32
POLL_SECONDS = 0.25
CRITERION = {
    "type": "string_check",
    "name": "mentions",
    "input": "{{sample.output_text}}",
    "reference": "{{item.topic}}",
    "operation": "ilike",
}


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
                REGRAFT_EVAL_CONCURRENCY=str(AT_ONCE),
                REGRAFT_TORCH_THREADS="0",
            )
            try:
                figures = asyncio.run(measure(server.base_url, server.key))
            finally:
                server.stop()
    report("evals", figures)


async def measure(url: str, key: str) -> dict[str, float]:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600) as api:
        for _ in range(20):  # converting the GGUF file may take longer than a client is kept waiting
            if (await api.post("/chat/completions", json=chat(0) | {"max_tokens": 1})).status_code == 200:
                break
            await asyncio.sleep(5)
        await plain(api, min(ITEMS, AT_ONCE))  # warm
        plain_seconds = eval_seconds = 0.0
        for _ in range(ROUNDS):
            plain_seconds += await plain(api, ITEMS // ROUNDS)
            eval_seconds += await evaluated(api, ITEMS // ROUNDS)
    items = ITEMS // ROUNDS * ROUNDS
    return {
        "items": items,
        "plain_per_second": items / plain_seconds,
        "eval_per_second": items / eval_seconds,
        "ratio": plain_seconds / eval_seconds,
    }


def chat(number: int) -> dict[str, Any]:
    return {"model": SMOLLM2, "messages": [message(number)], "seed": 1, "max_tokens": TOKENS}


def message(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"Write about {TOPICS[number % len(TOPICS)]}, part {number}."}


async def plain(api: httpx.AsyncClient, count: int) -> float:
    """Seconds for `count` completions from AT_ONCE clients."""
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            (await api.post("/chat/completions", json=chat(number))).raise_for_status()

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return time.perf_counter() - start


async def evaluated(api: httpx.AsyncClient, count: int) -> float:
    """Seconds from the creation of a run of `count` items to its end."""
    config = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
    made = await posted(api, "/evals", {"data_source_config": config, "testing_criteria": [CRITERION]})
    rows = [
        {"item": {"topic": TOPICS[number % len(TOPICS)], "text": message(number)["content"]}}
        for number in range(count)
    ]
    source = {
        "type": "completions",
        "model": SMOLLM2,
        "sampling_params": {"seed": 1, "max_completion_tokens": TOKENS},
        "input_messages": {"type": "template", "template": [{"role": "user", "content": "{{item.text}}"}]},
        "source": {"type": "file_content", "content": rows},
    }
    start = time.perf_counter()
    run = await posted(api, f"/evals/{made['id']}/runs", {"data_source": source})
    while run["status"] in ("queued", "in_progress"):
        await asyncio.sleep(POLL_SECONDS)
        run = (await api.get(f"/evals/{made['id']}/runs/{run['id']}")).json()
    seconds = time.perf_counter() - start
    assert run["status"] == "completed", run["error"]
    assert run["result_counts"]["errored"] == 0, run["result_counts"]
    return seconds


async def posted(api: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await api.post(path, json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


if __name__ == "__main__":
    main()
