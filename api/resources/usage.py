"""/v1/regraft/usage: what projects have used, by day, model and project."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.http.deps import CurrentCaller, CurrentProject, ReadSession, ServiceDep
from api.http.openapi import refusals
from api.http.shapes import Money
from core.errors import InvalidRequest
from core.jobs.budgets import Price
from core.tenancy import keys, usage_report
from core.tenancy.usage_report import DAY, GROUPINGS, UsageRow

router = APIRouter(prefix="/regraft/usage", tags=["regraft"])


class UsageRowOut(BaseModel):
    """The sums of a group; a field that is not grouped by is null."""

    day: Annotated[str | None, Field(description="In UTC, as 2026-11-25.")]
    model: Annotated[str | None, Field(description="null also: usage without a model, as of a grader run.")]
    project_id: str | None
    project_name: str | None
    gpu_seconds: Annotated[float, Field(description="Of training, steps that were repeated included.")]
    sampled_tokens: int
    unused_tokens: Annotated[
        int,
        Field(description="Of the sampled tokens: no step learned from them, as of a batch sampled ahead."),
    ]
    trained_tokens: int
    grader_tokens: Annotated[int, Field(description="Those that the limit grader_tokens_per_30_days counts.")]
    cost: Annotated[Money | None, Field(description="Of the GPU-seconds at today's price; null: no price.")]

    @classmethod
    def of(cls, row: UsageRow, price: Price) -> "UsageRowOut":
        return cls(
            day=None if row.day is None else _date(row.day),
            model=row.model,
            project_id=row.project_id,
            project_name=row.project_name,
            gpu_seconds=row.gpu_seconds,
            sampled_tokens=row.sampled_tokens,
            unused_tokens=row.unused_tokens,
            trained_tokens=row.trained_tokens,
            grader_tokens=row.grader_tokens,
            cost=Money.of(price.amount(row.gpu_seconds)),
        )


class UsageReport(BaseModel):
    """Sums of usage by day, model or project."""

    object: Literal["regraft.usage"] = "regraft.usage"
    first_day: str
    last_day: str
    by: list[str]
    data: list[UsageRowOut]


@router.get("", responses=refusals(403))
def report_usage(
    project: CurrentProject,
    caller: CurrentCaller,
    session: ReadSession,
    service: ServiceDep,
    by: Annotated[
        str, Query(max_length=64, description="`day`, `model`, `project`, or several: `day,model`.")
    ] = "day",
    days: Annotated[int, Query(ge=1, le=366, description="Today and the days before, in UTC.")] = 30,
    projects: Annotated[
        Literal["own", "all"], Query(description="`all` requires a key with the scope `operator`.")
    ] = "own",
) -> UsageReport:
    """Sum the usage of the key's project, or of all projects, on the last days."""
    asked = {name.strip() for name in by.split(",")}
    groupings = [name for name in GROUPINGS if name in asked]
    if asked - set(groupings):
        raise InvalidRequest(
            f"Invalid value for 'by': expected some of {', '.join(GROUPINGS)}, separated by commas.",
            param="by",
        )
    if projects == "all":
        keys.require(caller.key, "operator")
    price = Price.of(service.settings)
    rows = usage_report.report(session, None if projects == "all" else project.id, groupings, days=days)
    first = usage_report.first_day(days)
    return UsageReport(
        first_day=_date(first),
        last_day=_date(first + days - 1),
        by=list(groupings),
        data=[UsageRowOut.of(row, price) for row in rows],
    )


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * DAY, UTC).strftime("%Y-%m-%d")
