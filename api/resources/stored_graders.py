"""/v1/regraft/graders: named graders with versions and golden cases (docs/howto/stored-graders.md)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, model_validator
from sqlalchemy.orm import Session

from api.http.deps import CurrentProject, ReadSession, Service, ServiceDep, UnitOfWork
from api.http.idempotency import Once
from api.http.judge_usage import booked_judges, refuse_judges_beyond
from api.http.openapi import refusals
from api.http.shapes import After, Body, Limit, Listing, clamped
from api.http.stored_graders import StoredName, Version
from api.resources import graders
from api.resources.graders import TAKES_GRADER, TIMEOUT_S, Grader
from api.resources.job_body import NoNul
from core import golden_cases, stored_graders
from core.asgi import until_gone
from core.database.engine import Work
from core.database.tables import GoldenCase, GraderVersion, Project, StoredGrader
from core.errors import InvalidRequest
from core.golden_cases import MAX_CASES, NewCase
from core.masking import hide_secrets
from core.results.grader_audit_report import ErrorRate, Outcome
from core.storage.datasets import MAX_DEPTH, is_nested_too_deeply
from core.strict import StrictModel
from core.tenancy import tenants
from graders.hazards.pool import OWNER
from graders.prompts import sample_of
from graders.report import run_report
from graders.run import grade_all
from graders.spec import GraderSpec, dump, parse_grader
from graders.types import ErrorKind, Grade, GraderWrapper, Item, Sample

router = APIRouter(prefix="/regraft/graders", tags=["regraft"])

AT_ONCE = 8  # cases of a check

Finite = Annotated[float, Field(allow_inf_nan=False)]
Note = Annotated[str, Field(max_length=1024, pattern=NoNul)]


def _named(sent: Any, info: ValidationInfo) -> GraderSpec:
    """Parse the specification, with names that do not change from one request to the next."""
    if isinstance(sent, dict) and (name := info.data.get("name")):
        sent = stored_graders.with_names(sent, name)
    return parse_grader(sent)


class StoredGraderSave(Body):
    """The content that becomes the current version of a grader."""

    name: StoredName
    grader: Annotated[GraderSpec, BeforeValidator(_named)]
    note: Annotated[Note, Field(description="What this version changes.")] = ""


class StoredGraderOut(BaseModel):
    """A named grader with its current version."""

    id: str
    object: Literal["regraft.grader"] = "regraft.grader"
    name: str
    created_at: int
    updated_at: int
    version: Annotated[str, Field(description="SHA-256 of the specification.")]
    versions: int
    cases: Annotated[int, Field(description="Golden cases.")]
    grader: Annotated[dict[str, Any], Field(description="The specification; header values are masked.")]


class AuditedOut(BaseModel):
    """The main results of an audit (docs/howto/grader-audits.md)."""

    id: str
    created_at: int
    verdict: Outcome
    sentence: str
    false_positives: ErrorRate
    mentions: ErrorRate
    false_negatives: ErrorRate
    correlation: float | None


class GraderVersionOut(BaseModel):
    """A version of a stored grader. `id` is its hash."""

    id: str
    object: Literal["regraft.grader.version"] = "regraft.grader.version"
    name: str
    version: str
    created_at: int
    is_current: bool
    note: str
    grader: dict[str, Any]
    audit: Annotated[AuditedOut | None, Field(description="Its newest audit; null: it has none.")]

    @classmethod
    def of(cls, grader: StoredGrader, row: GraderVersion) -> "GraderVersionOut":
        return cls(
            id=row.version,
            name=grader.name,
            version=row.version,
            created_at=row.created_at,
            is_current=row.version == grader.version,
            note=row.note,
            grader=hide_secrets(row.spec),
            audit=None if row.audit is None else AuditedOut(**row.audit),
        )


class ScoreRange(StrictModel):
    """The scores that pass, both bounds included."""

    min: Finite | None = None
    max: Finite | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> "ScoreRange":
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("min may be at most max")
        return self


class GoldenSample(StrictModel):
    """An answer as graders see it. JSON in its text is parsed, unless `output_json` is given."""

    output_text: str
    output_json: Any = None
    output_tools: list[dict[str, Any]] | None = None

    def as_data(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class GoldenCaseCreate(StrictModel):
    sample: GoldenSample
    item: dict[str, Any] = {}
    expect: Annotated[Finite | ScoreRange, Field(description="A score, or the range of those that pass.")]
    note: Note = ""
    rollout_id: Annotated[
        Annotated[str, Field(max_length=128, pattern=NoNul)] | None,
        Field(description="The stored answer of a job that the case was made from."),
    ] = None

    @model_validator(mode="after")
    def _can_be_shown(self) -> "GoldenCaseCreate":
        if is_nested_too_deeply([self.sample.output_json, self.sample.output_tools, self.item]):
            raise ValueError(f"the sample and the item may have at most {MAX_DEPTH} levels")
        return self

    def new(self) -> NewCase:
        asked = self.expect
        bounds = asked if isinstance(asked, ScoreRange) else ScoreRange(min=asked, max=asked)
        return NewCase(self.sample.as_data(), self.item, bounds.min, bounds.max, self.note, self.rollout_id)


class GoldenCasesCreate(Body):
    cases: Annotated[list[GoldenCaseCreate], Field(min_length=1, max_length=MAX_CASES, fail_fast=True)]


class ExpectOut(BaseModel):
    """The scores that pass, both bounds included."""

    min: Annotated[float | None, Field(description="null: no lower bound.")]
    max: Annotated[float | None, Field(description="null: no upper bound.")]


class GoldenCaseOut(BaseModel):
    """An answer and its row, with the scores that all versions of a grader must give it."""

    id: str
    object: Literal["regraft.grader.case"] = "regraft.grader.case"
    created_at: int
    sample: dict[str, Any]
    item: dict[str, Any]
    expect: ExpectOut
    note: str
    rollout_id: str | None

    @classmethod
    def of(cls, case: GoldenCase) -> "GoldenCaseOut":
        return cls(
            id=case.id,
            created_at=case.created_at,
            sample=case.sample,
            item=case.item,
            expect=ExpectOut(min=case.min_score, max=case.max_score),
            note=case.note,
            rollout_id=case.rollout_id,
        )


class GraderCheckCreate(Body):
    """The grader to run on the golden cases; default: the current version."""

    version: Version | None = None
    grader: Annotated[Grader | None, Field(description="A specification that is not saved.")] = None

    @model_validator(mode="after")
    def _is_one_of_them(self) -> "GraderCheckCreate":
        if self.version is not None and self.grader is not None:
            raise ValueError("give either version or grader")
        return self


class CheckedCaseOut(BaseModel):
    """A golden case and its score. Null: it could not be graded, which fails the case."""

    case_id: str
    passed: bool
    score: float | None
    expect: ExpectOut
    reason: str
    errors: list[str]
    output: Annotated[str, Field(description="Printed by the grader.")]
    scores: Annotated[dict[str, float | None], Field(description="Of the parts of a multi grader.")]
    execution_time: float


class GraderCheckOut(BaseModel):
    """The golden cases of a stored grader, run with one of its versions or with another specification."""

    object: Literal["regraft.grader.check"] = "regraft.grader.check"
    name: str
    version: Annotated[str, Field(description="The version of what was run, saved or not.")]
    passed: int
    failed: Annotated[int, Field(description="Cases out of their range, or without a score.")]
    results: list[CheckedCaseOut]


class StoredGraderDeleted(BaseModel):
    object: Literal["regraft.grader.deleted"] = "regraft.grader.deleted"
    deleted: Literal[True] = True
    id: str
    name: str


class GraderVersionDeleted(BaseModel):
    object: Literal["regraft.grader.version.deleted"] = "regraft.grader.version.deleted"
    deleted: Literal[True] = True
    id: str


class GoldenCaseDeleted(BaseModel):
    object: Literal["regraft.grader.case.deleted"] = "regraft.grader.case.deleted"
    deleted: Literal[True] = True
    id: str


def _render(session: Session, *some: StoredGrader) -> list[StoredGraderOut]:
    current = stored_graders.current(session, some)
    versions = stored_graders.counts(session, some, GraderVersion)
    cases = stored_graders.counts(session, some, GoldenCase)
    return [
        StoredGraderOut(
            id=one.id,
            name=one.name,
            created_at=one.created_at,
            updated_at=one.updated_at,
            version=one.version,
            versions=versions[one.id],
            cases=cases.get(one.id, 0),
            grader=hide_secrets(current[one.id].spec),
        )
        for one in some
    ]


@router.post("", response_model=StoredGraderOut)
async def save_grader(
    body: StoredGraderSave, project: CurrentProject, service: ServiceDep, once: Once
) -> StoredGraderOut | JSONResponse:
    """Save a grader under a name. Other content than before is a new version; equal content is the same version."""
    await graders.refuse(body.grader, service, project, in_job=True)

    def save(work: Work) -> StoredGraderOut:
        grader = stored_graders.save(work, project.id, body.name, dump(body.grader), body.note)
        _refuse_beyond(work, project, service)
        return _render(work.session, grader)[0]

    return await to_thread.run_sync(once, save)


def _refuse_beyond(work: Work, project: Project, service: Service) -> None:
    limits = tenants.limits(project, service.settings.default_limits)
    tenants.refuse_stored_beyond(work.session, project.id, limits)


@router.get("")
def list_stored_graders(
    project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> Listing[StoredGraderOut]:
    """List the stored graders, newest first."""
    page = stored_graders.page(session, project.id, after=after, limit=clamped(limit))
    return Listing(data=_render(session, *page.items), has_more=page.has_more)


@router.get("/{grader_name}")
def retrieve_stored_grader(
    grader_name: str, project: CurrentProject, session: ReadSession
) -> StoredGraderOut:
    """Retrieve a stored grader with its current version."""
    return _render(session, stored_graders.get(session, project.id, grader_name))[0]


@router.delete("/{grader_name}")
def delete_stored_grader(grader_name: str, project: CurrentProject, uow: UnitOfWork) -> StoredGraderDeleted:
    """Delete a stored grader, its versions and its golden cases. Jobs and evals of it keep its content."""
    with uow() as work:
        grader = stored_graders.get(work.session, project.id, grader_name)
        stored_graders.remove(work, grader)
        return StoredGraderDeleted(id=grader.id, name=grader.name)


@router.get("/{grader_name}/versions")
def list_grader_versions(
    grader_name: str, project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> Listing[GraderVersionOut]:
    """List the versions of a stored grader, newest first."""
    grader = stored_graders.get(session, project.id, grader_name)
    page = stored_graders.versions(session, grader, after=after, limit=clamped(limit))
    return Listing(data=[GraderVersionOut.of(grader, row) for row in page.items], has_more=page.has_more)


@router.get("/{grader_name}/versions/{version}")
def retrieve_grader_version(
    grader_name: str, version: str, project: CurrentProject, session: ReadSession
) -> GraderVersionOut:
    """Retrieve a version of a stored grader by its hash, or by at least 8 characters of it."""
    grader = stored_graders.get(session, project.id, grader_name)
    return GraderVersionOut.of(grader, stored_graders.version(session, grader, version))


@router.delete("/{grader_name}/versions/{version}", responses=refusals(400))
def delete_grader_version(
    grader_name: str, version: str, project: CurrentProject, uow: UnitOfWork
) -> GraderVersionDeleted:
    """Delete a version that is not the current one."""
    with uow() as work:
        grader = stored_graders.get(work.session, project.id, grader_name)
        row = stored_graders.version(work.session, grader, version)
        stored_graders.remove_version(work, grader, row)
        return GraderVersionDeleted(id=row.version)


@router.post("/{grader_name}/cases", status_code=201)
def add_golden_cases(
    grader_name: str, body: GoldenCasesCreate, project: CurrentProject, service: ServiceDep, uow: UnitOfWork
) -> Listing[GoldenCaseOut]:
    """Add golden cases. A case of the same sample and item as an earlier one replaces its expectation and note."""
    with uow() as work:
        grader = stored_graders.get(work.session, project.id, grader_name)
        made = golden_cases.add(work, grader, [case.new() for case in body.cases])
        _refuse_beyond(work, project, service)
        return Listing(data=[GoldenCaseOut.of(case) for case in made])


@router.get("/{grader_name}/cases")
def list_golden_cases(
    grader_name: str, project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> Listing[GoldenCaseOut]:
    """List the golden cases of a stored grader, oldest first."""
    grader = stored_graders.get(session, project.id, grader_name)
    page = golden_cases.page(session, grader, after=after, limit=clamped(limit))
    return Listing(data=[GoldenCaseOut.of(case) for case in page.items], has_more=page.has_more)


@router.delete("/{grader_name}/cases/{case_id}")
def delete_golden_case(
    grader_name: str, case_id: str, project: CurrentProject, uow: UnitOfWork
) -> GoldenCaseDeleted:
    """Delete a golden case."""
    with uow() as work:
        grader = stored_graders.get(work.session, project.id, grader_name)
        case = golden_cases.get(work.session, grader, case_id)
        golden_cases.remove(work, grader, case)
        return GoldenCaseDeleted(id=case_id)


@router.post("/{grader_name}/check", response_model=GraderCheckOut, dependencies=TAKES_GRADER)
async def check_grader(
    request: Request, grader_name: str, body: GraderCheckCreate, project: CurrentProject, service: ServiceDep
) -> GraderCheckOut | Response:
    """Run a version, or a specification that is not saved, on all golden cases. It counts as one grader run.

    A client that disconnects cancels the check.
    """
    checked = await until_gone(request.receive, _checked(grader_name, body, project, service))
    return Response(status_code=499) if checked is None else checked


async def _checked(name: str, body: GraderCheckCreate, project: Project, service: Service) -> GraderCheckOut:
    spec, cases = await to_thread.run_sync(_what_to_check, name, body, project, service)
    if not cases:
        raise InvalidRequest(f"The grader '{name}' has no golden cases.", param="grader_name")
    await graders.refuse(spec, service, project)
    async with service.admission.grader_runs.admitted(project.id):
        await to_thread.run_sync(refuse_judges_beyond, service, project, spec)
        pairs = [(sample_of(case.sample), case.item) for case in cases]
        grades = await service.graders.run(_grades(service, project.id, spec, pairs))
    results = [_result(spec, case, grade) for case, grade in zip(cases, grades, strict=True)]
    passed = sum(one.passed for one in results)
    return GraderCheckOut(
        name=name,
        version=stored_graders.version_of(dump(spec)),
        passed=passed,
        failed=len(results) - passed,
        results=results,
    )


def _what_to_check(
    name: str, body: GraderCheckCreate, project: Project, service: Service
) -> tuple[GraderSpec, Sequence[GoldenCase]]:
    with service.database.read() as session:
        grader = stored_graders.get(session, project.id, name)
        spec = body.grader
        if spec is None:
            spec = parse_grader(stored_graders.version(session, grader, body.version).spec)
        return spec, golden_cases.everything(session, grader)


async def _grades(
    service: Service, owner: str, spec: GraderSpec, pairs: Sequence[tuple[Sample, Item]]
) -> list[Grade]:
    OWNER.set(owner)
    async with (
        booked_judges(service, owner, model=None) as ledger,
        service.backends.open(spec, owner=owner, ledger=ledger) as grader,
    ):
        ends = asyncio.get_running_loop().time() + service.check_seconds
        return await grade_all(_UntilThen(grader, ends), pairs, concurrency=AT_ONCE, timeout_s=TIMEOUT_S)


@dataclass(frozen=True)
class _UntilThen(GraderWrapper):
    """A grader that gives no score after a time of the event loop, so that a check ends."""

    ends: float

    async def grade(self, sample: Sample, item: Item) -> Grade:
        late = Grade(None, f"{self.name}: the check took too long", ErrorKind.other_error)
        if asyncio.get_running_loop().time() >= self.ends:  # most graders have no await to be interrupted at
            return late
        try:
            async with asyncio.timeout_at(self.ends):
                return await self.grader.grade(sample, item)
        except TimeoutError:
            return late


def _result(spec: GraderSpec, case: GoldenCase, grade: Grade) -> CheckedCaseOut:
    told = run_report(spec, grade)["metadata"]
    return CheckedCaseOut(
        case_id=case.id,
        passed=golden_cases.passes(case, grade.score),
        score=grade.score,
        expect=ExpectOut(min=case.min_score, max=case.max_score),
        reason=told["reason"],
        errors=[name for name, value in told["errors"].items() if value is True],
        output=told["output"],
        scores=told["scores"],
        execution_time=grade.seconds,
    )
