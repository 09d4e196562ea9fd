"""/v1/regraft/graders/audit and /v1/regraft/grader_audits: try a grader on probes before it trains.

This process runs an audit in the background and stores it (core/results/grader_audits.py).
"""

import asyncio
import logging
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, Field

from api.http import background as background_runs
from api.http.deps import CurrentProject, ReadSession, Service, ServiceDep, UnitOfWork
from api.http.judge_usage import refuse_judges_beyond
from api.http.openapi import refusals
from api.http.shapes import After, Body, Limit, Listing, RunErrorOut, clamped
from api.resources import estimates as sizes
from api.resources import graders
from api.resources.drawn_rows import draw_rows
from api.resources.graded_probes import AuditInputs, audit
from api.resources.graders import TAKES_GRADER, Grader
from api.resources.regrades import JudgeBudget
from core import stored_graders
from core.asgi import until_gone
from core.database.tables import GraderAudit, Project
from core.errors import InvalidRequest
from core.results import background, grader_audits
from core.results.grader_audit_report import GraderAuditReport, Outcome
from core.retry import RetryPolicy
from core.storage import files
from core.tenancy import tenants
from graders.build import EPISODE_FIELDS, calls_servers, reads_sample
from graders.exploits.corpus import KINDS, AuditedRow
from graders.exploits.right_answers import checked_answer_template, right_answer
from graders.hazards.pool import OWNER
from graders.spec import GraderSpec, dump

log = logging.getLogger(__name__)

router = APIRouter(prefix="/regraft", tags=["regraft"])

# Rows of an audit that does not say how many: a probe of a grader that calls a server costs time, and often money.
ROWS, ROWS_OF_SERVERS = 200, 20


def _checked(template: str | None) -> str | None:
    if template is not None:
        checked_answer_template(template)
    return template


Answer = Annotated[
    Annotated[str, Field(max_length=4_000)] | None,
    AfterValidator(_checked),
    Field(
        description="Template of a right answer to a row, such as <answer>{{item.answer}}</answer>. Default: as the "
        "grader compares it, or a field of the row such as `answer`."
    ),
]


class GraderAuditCreate(Body):
    """A grader, and the file that its job would train on."""

    grader: Grader
    training_file: str
    answer: Answer = None
    rows: Annotated[
        int | None, Field(ge=1, le=1_000, description="Default: 200, or 20 of a grader that calls a server.")
    ] = None
    repeats: Annotated[int, Field(ge=2, le=8, description="Grades of one answer by judges.")] = 3
    seed: Annotated[int, Field(ge=0, le=2147483647)] = 0
    budget: JudgeBudget | None = None

    @property
    def row_count(self) -> int:
        return self.rows or (ROWS_OF_SERVERS if calls_servers(self.grader) else ROWS)


class GraderAuditProgressOut(BaseModel):
    """How far an audit is, in grades."""

    of: int
    graded: int


class GraderAuditOut(BaseModel):
    """An audit of a grader. `request` is the body that created it; values of grader headers are masked."""

    id: str
    object: Literal["regraft.grader_audit"] = "regraft.grader_audit"
    created_at: int
    finished_at: int | None
    status: str = Field(description="in_progress, completed, failed or canceled.")
    request: dict[str, Any]
    version: Annotated[str, Field(description="SHA-256 of the specification.")]
    progress: GraderAuditProgressOut
    verdict: Annotated[
        Outcome | None, Field(description="Of the report, once it is completed; lists have it, too.")
    ]
    report: Annotated[
        GraderAuditReport | None, Field(description="Once it is completed; lists leave it out.")
    ]
    error: RunErrorOut | None

    @classmethod
    def of(cls, row: GraderAudit, *, with_report: bool = True) -> "GraderAuditOut":
        error = background.error_of(row)
        return cls(
            id=row.id,
            created_at=row.created_at,
            finished_at=row.finished_at,
            status=background.status_of(row),
            request=row.request,
            version=row.version,
            progress=GraderAuditProgressOut(**row.progress),
            verdict=None if row.report is None else row.report["verdict"],
            report=None
            if row.report is None or not with_report
            else grader_audits.REPORT.validate_python(row.report),
            error=None if error is None else RunErrorOut(**error),
        )


class GraderAuditDeleted(BaseModel):
    object: Literal["regraft.grader_audit.deleted"] = "regraft.grader_audit.deleted"
    deleted: Literal[True] = True
    id: str


@dataclass
class AuditProgress:
    of: int
    graded: int = 0

    def begun(self, of: int) -> None:
        """Start from the beginning, also after an outage."""
        self.of, self.graded = of, 0

    def one_graded(self) -> None:
        self.graded += 1


@router.post(
    "/graders/audit",
    status_code=201,
    response_model=GraderAuditOut,
    responses=refusals(404, 503),
    dependencies=TAKES_GRADER,
)
async def create_grader_audit(
    request: Request, body: GraderAuditCreate, project: CurrentProject, service: ServiceDep, uow: UnitOfWork
) -> GraderAuditOut | Response:
    """Try a grader on right answers and on answers that deserve nothing, made from rows of a file, in the background.

    Nothing is sampled. Tokens of judges count towards the project's limit. The result is also kept on the version of
    the stored grader.
    """

    async def read() -> tuple[AuditInputs, GraderAudit]:
        await graders.refuse(body.grader, service, project)
        return await sizes.in_reader(service, project, partial(_prepared, body, project, service))

    prepared = await until_gone(request.receive, read())
    if prepared is None:
        return Response(status_code=499)
    inputs, row = prepared
    slot = await background_runs.enter(service, project)

    def add() -> GraderAuditOut:
        with uow() as work:
            grader_audits.add(work, row)
            return GraderAuditOut.of(row)

    async def run(added: GraderAuditOut) -> None:
        progress = AuditProgress(added.progress.of)
        grading = partial(_audited, inputs, service, project.id, progress)
        retry = RetryPolicy(service.settings.patience_seconds, log.warning)
        await background_runs.run(
            service,
            GraderAudit,
            added.id,
            retry.call_async(lambda: slot.in_thread(grading)),
            what="audit",
            too_slow=InvalidRequest(
                f"The audit took longer than {service.preview_seconds:.0f} s. Request fewer rows.",
                code="audit_too_slow",
            ),
            progress=lambda: asdict(progress),
            complete=grader_audits.complete,
        )

    return await background_runs.begin(service, slot, add, run)


def _refuse_graders_of_episodes(spec: GraderSpec) -> None:
    if (found := reads_sample(spec, "grader", ("output_tools", *EPISODE_FIELDS))) is not None:
        where, name = found
        raise InvalidRequest(
            f"Not audited: the grader reads sample.{name}, and the answers of an audit have neither tool calls nor "
            "episodes. Try it with `regraft graders run` and cases with 'output_tools'.",
            param=where,
        )


def _prepared(body: GraderAuditCreate, project: Project, service: Service) -> tuple[AuditInputs, GraderAudit]:
    """Read the file and validate the request. Runs in a thread."""
    refuse_judges_beyond(service, project, body.grader)
    _refuse_graders_of_episodes(body.grader)
    with service.database.read() as session:
        limits = tenants.limits(project, service.settings.default_limits)
        tenants.free_storage(session, project.id, limits)
        training = files.get_dataset(session, project.id, body.training_file, param="training_file")
    rows, of_rows = draw_rows(service.blobs, training, body.row_count, body.seed)
    if not rows:
        raise InvalidRequest("The training_file has no rows.", param="training_file")
    template = None if body.answer is None else checked_answer_template(body.answer)
    audited = [AuditedRow(row.line, row.item, right_answer(body.grader, row.item, template)) for row in rows]
    if template is not None and not any(row.right for row in audited):
        raise InvalidRequest(
            f"'answer' is {body.answer!r}, and none of the {len(rows)} audited rows of the training_file has a value "
            "for it: name a field that they have.",
            param="answer",
        )
    inputs = AuditInputs(
        spec=body.grader,
        rows=audited,
        of_rows=of_rows,
        seed=body.seed,
        repeats=body.repeats,
        max_tokens=None if body.budget is None else body.budget.tokens,
    )
    spec = dump(body.grader)
    row = GraderAudit(
        project_id=project.id,
        request={
            "grader": dump(body.grader, masked=True),
            "training_file": body.training_file,
            "answer": body.answer,
            "rows": body.row_count,
            "repeats": body.repeats,
            "seed": body.seed,
            "budget": None if body.budget is None else body.budget.model_dump(),
        },
        training_sha256=training.sha256,
        version=stored_graders.version_of(spec),
        behavior_sha256=stored_graders.behavior_of(spec),
        # The most there can be: the audit counts them once it has made them.
        progress=asdict(AuditProgress(of=len(rows) * len(KINDS))),
    )
    return inputs, row


def _audited(
    inputs: AuditInputs, service: Service, project_id: str, progress: AuditProgress
) -> dict[str, Any]:
    """Grade the probes and build the report, in an event loop of this thread."""
    OWNER.set(project_id)
    report = asyncio.run(audit(inputs, service, project_id, begun=progress.begun, graded=progress.one_graded))
    return asdict(report)


@router.get("/grader_audits")
def list_grader_audits(
    project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> Listing[GraderAuditOut]:
    """List the audits of graders without their reports, newest first."""
    page = background.page(session, GraderAudit, project.id, after=after, limit=clamped(limit))
    return Listing(
        data=[GraderAuditOut.of(row, with_report=False) for row in page.items], has_more=page.has_more
    )


@router.get("/grader_audits/{audit_id}")
def retrieve_grader_audit(audit_id: str, project: CurrentProject, session: ReadSession) -> GraderAuditOut:
    """Retrieve an audit: how far it is, and its report once it is completed."""
    return GraderAuditOut.of(grader_audits.get(session, project.id, audit_id))


@router.post("/grader_audits/{audit_id}/cancel")
def cancel_grader_audit(audit_id: str, project: CurrentProject, uow: UnitOfWork) -> GraderAuditOut:
    """Cancel an audit. One that has ended stays as it is."""
    with uow() as work:
        row = grader_audits.get(work.session, project.id, audit_id)
        grader_audits.cancel(work, row)
        return GraderAuditOut.of(row)


@router.delete("/grader_audits/{audit_id}")
def delete_grader_audit(audit_id: str, project: CurrentProject, uow: UnitOfWork) -> GraderAuditDeleted:
    """Delete an audit. One in progress is canceled. Versions of stored graders keep its result."""
    with uow() as work:
        grader_audits.remove(work, grader_audits.get(work.session, project.id, audit_id))
    return GraderAuditDeleted(id=audit_id)
