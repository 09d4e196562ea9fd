"""Measure API latency over HTTP as the tables grow.

First, on the embedded default: both ends of a table of 10,000 jobs and 100,000 events. The rows are written straight
into its database; every figure is taken through the API. Then, on PostgreSQL, what bench/load.py says.
"""

import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from bench import load
from bench.report import report
from bench.sizes import sized
from core.database.engine import Database
from core.database.ids import new_id
from core.database.tables import Event, Job, Project
from core.settings import Settings
from tests.e2e.conftest import Server, start_server

JOBS, EVENTS_PER_JOB, ROUNDS = sized((10_000, 10, 60), (60, 2, 1))
GRADER = {"type": "string_check", "name": "g", "input": "a", "reference": "b", "operation": "eq"}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder), Path(folder))
        try:
            figures = measure(server, *fill(Path(folder)))
        finally:
            server.stop()
    report("api", figures | load.measure())


def fill(folder: Path) -> tuple[str, str]:
    """Write the rows; returns the ids of the oldest and the newest job."""
    database = Database(Settings(data_dir=folder).database)
    ids = [new_id("ftjob-") for _ in range(JOBS)]
    with database.write() as session:
        project = session.query(Project).one()
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
        session.execute(
            insert(Event),
            [{"job_id": job_id, "message": f"event {n}"} for n in range(EVENTS_PER_JOB) for job_id in ids],
        )
    database.close()
    return ids[0], ids[-1]


def measure(server: Server, oldest: str, newest: str) -> dict[str, float]:
    jobs = "/fine_tuning/jobs"
    # The page that holds the very last rows of a listing over the whole table.
    second_page_from_the_end = walk_to_the_end(server, jobs)
    paths = {
        "list_first": f"{jobs}?limit=20",
        "list_last": f"{jobs}?limit=20&after={second_page_from_the_end}",
        "retrieve_newest": f"{jobs}/{newest}",
        "retrieve_oldest": f"{jobs}/{oldest}",
        "events_newest": f"{jobs}/{newest}/events",
        "events_oldest": f"{jobs}/{oldest}/events",
    }
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for path in paths.values():
        get(server, path)
    for _ in range(ROUNDS):  # interleaved, so that a slow moment of the machine hits all alike
        for name, path in paths.items():
            start = time.perf_counter()
            get(server, path)
            seconds[name].append(time.perf_counter() - start)
    p50 = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        "list_last_over_first": p50["list_last"] / p50["list_first"],
        "retrieve_oldest_over_newest": p50["retrieve_oldest"] / p50["retrieve_newest"],
        "events_oldest_over_newest": p50["events_oldest"] / p50["events_newest"],
    }
    milliseconds = {f"{name}_ms": value * 1000 for name, value in p50.items()}
    return {
        "last_page_over_first_page": max(ratios.values()),
        **ratios,
        **milliseconds,
        "create_ms": create(server),
    }


def create(server: Server) -> float:
    """Median milliseconds to create a job in the full table."""
    client = server.client()
    row = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode() + b"\n"
    train, valid = (client.files.create(file=(name, row), purpose="fine-tune").id for name in "ab")
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        job = client.fine_tuning.jobs.create(
            model="tiny",
            training_file=train,
            validation_file=valid,
            method={"type": "reinforcement", "reinforcement": {"grader": GRADER}},  # type: ignore[typeddict-item]
        )
        seconds.append(time.perf_counter() - start)
        client.fine_tuning.jobs.cancel(job.id)
    return statistics.median(seconds) * 1000


def walk_to_the_end(server: Server, path: str) -> str:
    """The cursor before the last twenty rows, found the way a client finds it: page by page."""
    seen: list[str] = []
    after = ""
    while True:
        page = get(server, f"{path}?limit=100{after}")
        seen += [row["id"] for row in page["data"]]
        if not page["has_more"]:
            assert len(seen) == len(set(seen)) == JOBS
            return seen[-21]
        after = f"&after={seen[-1]}"


def get(server: Server, path: str) -> Any:
    request = urllib.request.Request(
        server.base_url + path, headers={"Authorization": f"Bearer {server.key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
