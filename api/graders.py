"""/v1/fine_tuning/alpha/graders: try a grader before a job depends on it."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BeforeValidator

from api.deps import CurrentProject
from api.wire import Body
from graders.build import build
from graders.report import run_report
from graders.run import grade_all
from graders.spec import GraderSpec, dump, parse_grader
from graders.types import Sample

router = APIRouter(prefix="/fine_tuning/alpha/graders", tags=["Graders"])

# A person is waiting; a job gives its graders longer.
TIMEOUT_S = 60.0


def usable(raw: Any, param: str = "grader") -> GraderSpec:
    """A grader that is well formed and that this server can run; InvalidGrader says what is wrong, and where."""
    spec = parse_grader(raw, param=param)
    build(spec, param=param)
    return spec


Grader = Annotated[GraderSpec, BeforeValidator(usable)]


class GraderValidate(Body):
    grader: Grader


class GraderRun(Body):
    grader: Grader
    model_sample: str
    item: dict[str, Any] | None = None
    trace_id: str | None = None  # for graders that call a server; none of ours does yet


@router.post("/validate")
def validate_grader(body: GraderValidate, project: CurrentProject) -> dict[str, Any]:
    """Check a grader without running it; the answer has it as a job would keep it."""
    return {"grader": dump(body.grader, masked=True)}


@router.post("/run")
def run_grader(body: GraderRun, project: CurrentProject) -> dict[str, Any]:
    """Grade one sample. A grader that fails is an answer, too: reward 0, and a flag that says why."""
    sample = Sample.from_text(body.model_sample, parse_json=True)
    # In this thread and not in the server's event loop, which a grader that computes for a second would stop.
    grades = asyncio.run(grade_all(build(body.grader), [(sample, body.item or {})], timeout_s=TIMEOUT_S))
    return run_report(body.grader, grades[0])
