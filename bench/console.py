"""Measure what the console waits for: rollouts on the server, the page of a long job, and the first load.

    python -m bench.console

- Filters, a search, a sort and the prompts of 100,000 rollouts (100 steps of 1,000; `short_` is another job with 400
  steps of 256). Milliseconds are medians of whole requests over HTTP.
- The page of a job with 5,000 steps in Chromium, by its Performance API: `job_page_draw_ms` is the time from the last
  byte of the steps (`responseEnd`) to the frame with all charts that are not folded away. `job_page_cpu_ms` is the time
  that the page's thread computed since the click, by Chromium's count, which other work on the machine does not change,
  and `job_page_total_ms` the time since the click, with all requests.
- The first load: `first_load_kb`, the gzipped size of all files that the page loads up to the login.

A real server with SQLite and blobs in a folder.
"""

import argparse
import gzip
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import CDPSession, Page, Response

from bench.report import report
from bench.sizes import sized
from core.database.engine import Database
from core.database.tables import Project
from core.settings import Settings
from core.storage.store import blobs_of
from tests import factories, many_steps
from tests.console.conftest import chromium, log_in
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

LONG = sized(5000, 50)
# Resolves once every chart that is not folded away shows this number of points and the frame with them is done.
DRAWN = """count => new Promise(resolve => {
    const look = () => {
        const charts = [...document.querySelectorAll("figure")].filter(one => one.offsetParent !== null);
        const isDrawn = one => one.dataset.points === String(count) && one.querySelector("canvas");
        if (!charts.length || !charts.every(isDrawn)) return requestAnimationFrame(look);
        const requests = performance.getEntriesByType("resource").filter(one => one.name.includes("/metrics?"));
        requestAnimationFrame(() => setTimeout(() => resolve({
            drawn: performance.now(),
            arrived: requests.at(-1).responseEnd,
            clicked: performance.getEntriesByName("click").at(-1).startTime,
        })));
    };
    look();
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=sized(7, 1))
    parser.add_argument("--steps", type=int, default=sized(100, 2))
    parser.add_argument("--groups", type=int, default=sized(125, 4), help="of eight answers, in each step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = start_server(folder, folder)
        try:
            figures = measure(server, folder, arguments.steps, arguments.groups, arguments.rounds)
            short = measure(server, folder, 4 * arguments.steps, arguments.groups // 4 + 1, arguments.rounds)
            pages = measure_pages(server, folder, arguments.rounds)
        finally:
            server.stop()
    report("console", figures | {f"short_{name}": value for name, value in short.items()} | pages)


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


def measure_pages(server: Server, folder: Path, rounds: int) -> dict[str, float]:
    """Medians of the page of a long job, and the size of the first load."""
    job_id = fill_long(folder)
    taken: dict[str, list[float]] = {"draw": [], "cpu": [], "total": []}
    with chromium() as browser:
        page = browser.new_page(base_url=f"http://127.0.0.1:{server.port}")
        loaded: list[Response] = []

        def remember(response: Response) -> None:
            loaded.append(response)

        page.on("response", remember)
        page.goto("/")
        page.get_by_label("API key").wait_for()
        size = sum(len(gzip.compress(one.body())) for one in loaded if one.ok)
        page.remove_listener("response", remember)
        log_in(page, server.key)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        for _ in range(rounds + 1):
            page.goto("/#/jobs")
            page.get_by_role("heading", name="Jobs", exact=True).wait_for()
            open_job(page, session, job_id, taken)
    figures = {
        f"job_page_{name}_ms": statistics.median(times[1:]) for name, times in taken.items()
    }  # once warm
    for name, milliseconds in figures.items():
        print(f"{milliseconds:7.0f} ms  {name.removesuffix('_ms')}")
    print(f"{size / 1000:7.0f} kB  first_load")
    return figures | {"first_load_kb": size / 1000, "job_page_steps": LONG}


def open_job(page: Page, session: CDPSession, job_id: str, milliseconds: dict[str, list[float]]) -> None:
    before = computed(session)
    page.evaluate("job => { performance.mark('click'); location.hash = `#/jobs/${job}`; }", job_id)
    times: dict[str, float] = page.evaluate(DRAWN, LONG + 1)
    milliseconds["cpu"].append(1000 * (computed(session) - before))
    milliseconds["draw"].append(times["drawn"] - times["arrived"])
    milliseconds["total"].append(times["drawn"] - times["clicked"])


def computed(session: CDPSession) -> float:
    """Seconds that the tasks of the page's thread have computed."""
    metrics: list[dict[str, Any]] = session.send("Performance.getMetrics")["metrics"]
    return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")


def fill_long(folder: Path) -> str:
    database = Database(Settings(data_dir=folder).database)
    with database.write() as session:
        project = session.query(Project).one()
        job = factories.job(session, project, status="succeeded", suffix="long", epoch=2)
        many_steps.record(session, job, LONG)
        job_id = job.id
    database.close()
    return job_id


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
