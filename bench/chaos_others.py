"""The work beside the jobs of bench/chaos.py: pipelines, eval runs, regrades and previews, and what became of them."""

import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI

from core.database.engine import Database
from core.database.states import EVAL_RUN
from core.database.tables import EvalRun, Pipeline, Preview
from core.pipelines.lifecycle import FINAL as ENDED_PIPELINES
from core.results import background
from tests.evals.conftest import CONFIG, EXACT, completions

ROWS = 30  # of an eval run
REGRADER = {
    "type": "string_check",
    "name": "again",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "ilike",
}


@dataclass
class Others:
    """Creates one of each, again and again. The service may be killed during each request."""

    client: OpenAI
    database: Database
    job_id: str  # ended, with stored answers for a regrade
    job: dict[str, Any]  # the request of a job, for a preview
    interrupted: int = 0
    pipelines: list[str] = field(default_factory=list)
    runs: list[tuple[str, str]] = field(default_factory=list)  # eval, run
    regrades: list[str] = field(default_factory=list)
    previews: list[str] = field(default_factory=list)

    def create(self) -> None:
        file = self.job["training_file"]
        stages = [
            {"name": "first", "mix": {"files": [{"file": file}]}},
            {"name": "second", "mix": {"files": [{"file": "{{stages.first.file}}"}, {"file": file}]}},
        ]
        self.pipelines.append(self._post("/regraft/pipelines", {"stages": stages}))
        made = self.client.evals.create(
            data_source_config=CONFIG, testing_criteria=[EXACT], extra_headers=once()
        )
        run = self.client.evals.runs.create(made.id, data_source=completions(ROWS), extra_headers=once())
        self.runs.append((made.id, run.id))
        body = {"grader": REGRADER, "name": f"regrade {len(self.regrades)}"}
        self.regrades.append(self._post(f"/regraft/jobs/{self.job_id}/regrade", body))
        self._preview()

    def _preview(self) -> None:
        self.previews.append(self._post("/regraft/previews", self.job | {"rows": 2, "samples": 2}))

    def _post(self, path: str, body: dict[str, Any]) -> str:
        made: Any = self.client.post(path, cast_to=object, body=body, options={"headers": once()})
        return str(made["id"])

    def finish(self, seconds: float, rest: Callable[[], None]) -> None:
        """Wait until all have ended. A preview whose process was killed is created again, as its error says."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for row in self._rows(Preview, self.previews):
                if background.error_of(row) == background.INTERRUPTED:
                    self.previews.remove(row.id)
                    self.interrupted += 1
                    self._preview()
            if not self._open():
                return
            rest()

    def _open(self) -> list[str]:
        runs = [*(run for _, run in self.runs), *self.regrades]
        return [
            *(row.id for row in self._rows(Pipeline, self.pipelines) if row.status not in ENDED_PIPELINES),
            *(row.id for row in self._rows(EvalRun, runs) if row.status not in EVAL_RUN.final),
            *(row.id for row in self._rows(Preview, self.previews) if row.status == background.IN_PROGRESS),
        ]

    def _rows(self, table: Any, ids: list[str]) -> list[Any]:
        with self.database.read() as session:
            return session.query(table).filter(table.id.in_(ids)).all()

    def figures(self, rows_of_file: int) -> dict[str, float]:
        """Count items and rows that are missing or double, and work that failed."""
        lines: Counter[str] = Counter()
        for made, run in self.runs:
            found = self.client.evals.runs.output_items.list(run, eval_id=made, limit=100)
            counts = Counter(item.datasource_item_id for item in found)
            lines["lost"] += len(set(range(1, ROWS + 1)) - set(counts))
            lines["twice"] += sum(count - 1 for count in counts.values())
        pipelines = self._rows(Pipeline, self.pipelines)
        expected = {"first": rows_of_file, "second": 2 * rows_of_file}
        runs = self._rows(EvalRun, [run for _, run in self.runs])
        regrades = self._rows(EvalRun, self.regrades)
        with self.database.read() as session:
            all_runs, all_pipelines = session.query(EvalRun).count(), session.query(Pipeline).count()
        return {
            "pipelines": len(self.pipelines),
            "pipelines_failed": sum(row.status != "succeeded" for row in pipelines),
            "pipelines_with_wrong_rows": sum(
                stage.get("rows") != expected[stage["name"]] for row in pipelines for stage in row.stages
            ),
            "eval_runs": len(runs),
            "eval_runs_failed": sum(row.status != "completed" for row in runs),
            "eval_items_lost": lines["lost"],
            "eval_items_twice": lines["twice"],
            "regrades": len(regrades),
            "regrades_failed": sum(row.status != "completed" for row in regrades),
            "previews": len(self.previews),
            "previews_failed": sum(
                row.status != background.COMPLETED for row in self._rows(Preview, self.previews)
            ),
            "previews_interrupted": self.interrupted,
            "created_twice": all_runs - len(runs) - len(regrades) + all_pipelines - len(self.pipelines),
        }


def once() -> dict[str, str]:
    """The headers of a request that must have one effect however often it is sent."""
    return {"Idempotency-Key": uuid.uuid4().hex}
