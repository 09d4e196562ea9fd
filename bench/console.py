"""Measure what the console's pages of rollouts wait for: filters, a search, a sort and the prompts of 100,000 rollouts.

    python -m bench.console

A real server with SQLite and blobs in a folder. Milliseconds are medians of whole requests over HTTP. The job has 100
steps of 1,000 rollouts; `short_` is another one with 400 steps of 256.
"""

import argparse
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

from bench.report import report
from core.database.engine import Database
from core.database.tables import Project
from core.settings import Settings
from core.storage.store import blobs_of
from tests import factories
from tests.e2e.conftest import Server, start_server
from tests.many_rollouts import GROUP_SIZE, NEEDLE, pages

REQUESTS = {
    "filter_score": "?min_score=0.99999",
    "filter_line": "?line=77",
    "filter_grader": "?grader=a&min_score=0.99999",
    "search_once": f"?q={NEEDLE.lower().replace(' ', '%20')}",
    "search_nothing": "?q=not%20there%20at%20all",
    "sort_advantage": "?sort=advantage&order=desc&limit=50",
    "prompts": "/prompts?split=train",
    "prompts_by_change": "/prompts?split=train&sort=change&order=desc",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=125, help="of eight answers, in each step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = start_server(folder, folder)
        try:
            figures = measure(server, folder, arguments.steps, arguments.groups, arguments.rounds)
            short = measure(server, folder, 4 * arguments.steps, arguments.groups // 4 + 1, arguments.rounds)
        finally:
            server.stop()
    report("console", figures | {f"short_{name}": value for name, value in short.items()})


def measure(server: Server, folder: Path, steps: int, groups: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each request, the kilobytes of the prompts, and the number of rollouts."""
    job_id = fill(folder, steps, groups)
    sizes = {name: len(get(server, job_id, path)) for name, path in REQUESTS.items()}
    took: dict[str, list[float]] = {name: [] for name in REQUESTS}
    for _ in range(rounds):  # interleaved, so that a slow moment of the machine hits all alike
        for name, path in REQUESTS.items():
            start = time.perf_counter()
            get(server, job_id, path)
            took[name].append(time.perf_counter() - start)
    figures = {f"{name}_ms": 1000 * statistics.median(times) for name, times in took.items()}
    for name, milliseconds in figures.items():
        print(f"{milliseconds:7.0f} ms  {name.removesuffix('_ms')}")
    return figures | {"prompts_kb": sizes["prompts"] / 1000, "rollouts": steps * groups * GROUP_SIZE}


def fill(folder: Path, steps: int, groups: int) -> str:
    settings = Settings(data_dir=folder)
    database, blobs = Database(settings.database), blobs_of(settings)
    with database.write() as session:
        job = factories.job(session, session.query(Project).one(), status="succeeded")
        session.add_all(pages(blobs, job.id, steps=steps, groups=groups))
        job_id = job.id
    database.close()
    return job_id


def get(server: Server, job_id: str, path: str) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/regraft/jobs/{job_id}/rollouts{path}",
        headers={"Authorization": f"Bearer {server.key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


if __name__ == "__main__":
    main()
