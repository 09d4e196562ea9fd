"""The work beside the jobs of bench/chaos.py, and what became of it.

Pipelines, eval runs, batches, regrades, previews and audits of graders.
"""

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from openai import OpenAI

from core.database.engine import Database
from core.database.states import EVAL_RUN, PIPELINE
from core.database.tables import BackgroundRun, EvalRun, GraderAudit, Pipeline, Preview
from core.evals import batches
from core.results import background
from tests.e2e.conftest import jsonl
from tests.evals.conftest import CONFIG, EXACT, completions

ROWS = 30  # of an eval run and a batch
REGRADER = {
    "type": "string_check",
    "name": "again",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "ilike",
}


@dataclass
class InApi:
    """Runs of one kind that a process of the API does (core/results/background.py).

    A run whose process was killed is created again, as its error says.
    """

    table: type[BackgroundRun]
    path: str
    body: dict[str, Any]
    ids: list[str] = field(default_factory=list)
    interrupted: int = 0


@dataclass
class Others:
    """Creates one of each, again and again. The service may be killed during each request."""

    client: OpenAI
    database: Database
    job_id: str  # ended, with stored answers for a regrade
    job: dict[str, Any]  # the request of a job, for previews and audits
    pipelines: list[str] = field(default_factory=list)
    runs: list[tuple[str, str]] = field(default_factory=list)  # eval, run
    regrades: list[str] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        audit = {"grader": REGRADER, "training_file": self.job["training_file"], "rows": 4}
        self.in_api = {
            "previews": InApi(Preview, "/regraft/previews", self.job | {"rows": 2, "samples": 2}),
            "audits": InApi(GraderAudit, "/regraft/graders/audit", audit),
        }

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
        self._create_batch()
        for kind in self.in_api.values():
            kind.ids.append(self._post(kind.path, kind.body))

    def _create_batch(self) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "say it again"}]}
        path: Literal["/v1/chat/completions"] = "/v1/chat/completions"
        lines = [
            {"custom_id": f"row-{number}", "method": "POST", "url": path, "body": body}
            for number in range(ROWS)
        ]
        file = self.client.files.create(file=("requests.jsonl", jsonl(lines)), purpose="batch")
        made = self.client.batches.create(
            input_file_id=file.id, endpoint=path, completion_window="24h", extra_headers=once()
        )
        self.batches.append(made.id)

    def _post(self, path: str, body: dict[str, Any]) -> str:
        made: Any = self.client.post(path, cast_to=object, body=body, options={"headers": once()})
        return str(made["id"])

    def finish(self, seconds: float, rest: Callable[[], None]) -> None:
        """Wait until all have ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for kind in self.in_api.values():
                self._create_interrupted_again(kind)
            if not self._open():
                return
            rest()

    def _create_interrupted_again(self, kind: InApi) -> None:
        for id, _, error in self._background(kind):
            if error == background.INTERRUPTED:
                kind.ids.remove(id)
                kind.interrupted += 1
                kind.ids.append(self._post(kind.path, kind.body))

    def _open(self) -> list[str]:
        runs = [*(run for _, run in self.runs), *self.regrades, *self.batches]
        return [
            *(row.id for row in self._rows(Pipeline, self.pipelines) if row.status not in PIPELINE.final),
            *(row.id for row in self._rows(EvalRun, runs) if row.status not in EVAL_RUN.final),
            *(row.id for row in self._rows(EvalRun, self.batches) if not self._is_written(row)),
            *(
                id
                for kind in self.in_api.values()
                for id, status, _ in self._background(kind)
                if status == background.IN_PROGRESS
            ),
        ]

    @staticmethod
    def _is_written(batch: EvalRun) -> bool:
        """Whether the files of a batch are there; its run ends a moment before."""
        return batches.status(batch) in ("completed", "failed", "expired", "cancelled")

    def _background(self, kind: InApi) -> list[tuple[str, str, dict[str, Any] | None]]:
        """Id, status and error of each run of a kind."""
        with self.database.read() as session:
            rows = session.query(kind.table).filter(kind.table.id.in_(kind.ids)).all()
            return [(row.id, background.status_of(row), background.error_of(row)) for row in rows]

    def _rows(self, table: Any, ids: list[str]) -> list[Any]:
        with self.database.read() as session:
            return session.query(table).filter(table.id.in_(ids)).all()

    def _answered(self, batch: EvalRun) -> Counter[str]:
        """How often each request of a batch is in its output file."""
        output = batch.data_source.get("output_file_id")
        if output is None:
            return Counter()
        return Counter(
            json.loads(line)["custom_id"] for line in self.client.files.content(output).text.splitlines()
        )

    def figures(self, rows_of_file: int) -> dict[str, float]:
        """Count items and rows that are missing or double, and work that failed."""
        lines: Counter[str] = Counter()
        for made, run in self.runs:
            found = self.client.evals.runs.output_items.list(run, eval_id=made, limit=100)
            counts = Counter(item.datasource_item_id for item in found)
            lines["lost"] += len(set(range(1, ROWS + 1)) - set(counts))
            lines["twice"] += sum(count - 1 for count in counts.values())
        made_batches = self._rows(EvalRun, self.batches)
        answered = [self._answered(batch) for batch in made_batches]
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
            "batches": len(made_batches),
            "batches_failed": sum(batches.status(batch) != "completed" for batch in made_batches),
            "batch_answers_lost": sum(ROWS - len(counts) for counts in answered),
            "batch_answers_twice": sum(counts.total() - len(counts) for counts in answered),
            **{name: len(kind.ids) for name, kind in self.in_api.items()},
            **{
                f"{name}_failed": sum(
                    status != background.COMPLETED for _, status, _ in self._background(kind)
                )
                for name, kind in self.in_api.items()
            },
            **{f"{name}_interrupted": kind.interrupted for name, kind in self.in_api.items()},
            "created_twice": all_runs
            - len(runs)
            - len(regrades)
            - len(made_batches)
            + all_pipelines
            - len(self.pipelines),
        }


def once() -> dict[str, str]:
    """The headers of a request that must have one effect however often it is sent."""
    return {"Idempotency-Key": uuid.uuid4().hex}
