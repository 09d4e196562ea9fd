"""Measure a run's bookkeeping (rules, records, warnings) in a step after 3,000 others, on fakes that cost nothing.

SQLite in a folder. The rows of the earlier steps are as large as those of the demo (a multi grader of two parts).
`step_ms` is a whole step without a validation, `statements` how many it sends to the database.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import event

from bench.report import report
from core.database.tables import StepMetric
from tests.worker.conftest import Bench
from tests.worker.conftest import bench as prepared

STEPS, TIMED = 3000, 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="recorded before the timed ones")
    steps = parser.parse_args().steps
    made = contextmanager(prepared.__wrapped__)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder, made(Path(folder)) as bench:
        asyncio.run(timed(bench, steps))


async def timed(bench: Bench, steps: int) -> None:
    run = bench.run(n_epochs=50, eval_interval=1000)
    await run.measure_base()
    await run.step(1)
    with bench.database.write() as session:
        data = session.get_one(StepMetric, (bench.claim.job_id, 1)).data
        graders = data["scores"]["graders"] * 2, data["errors"]["graders"] * 2, data["timing"]["graders"] * 2
        data = json.loads(json.dumps(data))
        data["scores"]["graders"], data["errors"]["graders"], data["timing"]["graders"] = graders
        for step in range(2, steps + 1):
            row = StepMetric(job_id=bench.claim.job_id, step=step, epoch=1, data=data | {"step": step})
            session.add(row)
    if hasattr(run.recorder, "recorded"):
        _, run.history = run.recorder.recorded()
    statements: list[str] = []
    event.listen(bench.database.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    seconds = []
    for step in range(steps + 1, steps + 1 + TIMED):
        start = time.process_time()
        await run.step(step)
        seconds.append(time.process_time() - start)
    report(
        "bookkeeping", {"step_ms": statistics.median(seconds) * 1000, "statements": len(statements) / TIMED}
    )


if __name__ == "__main__":
    main()
