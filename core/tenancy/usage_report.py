"""Usage by day, by model and by project."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import Row, Subquery, and_, func, literal, or_, select, union_all
from sqlalchemy.orm import Session

from core.database.tables import ModelUsage, Project, ProjectUsage, now
from core.errors import InvalidRequest

Grouping = Literal["day", "model", "project"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)
DAY = 86400
MAX_ROWS = 10_000
# Sums of floats are not exact: a smaller difference of the project's sum and that of its models is none.
_NOTHING = 1e-6


@dataclass(frozen=True)
class UsageRow:
    """Sums over a group. A field that is not grouped by is None; so is the model of usage without one."""

    day: int | None  # Unix time / 86400
    model: str | None
    project_id: str | None
    project_name: str | None
    gpu_seconds: float
    sampled_tokens: int
    unused_tokens: int
    trained_tokens: int
    grader_tokens: int


def first_day(days: int) -> int:
    """The first of the last `days` days, today included, in UTC."""
    return now() // DAY - days + 1


def report(
    session: Session, project_id: str | None, groupings: Sequence[Grouping], *, days: int
) -> list[UsageRow]:
    """Sum usage by these groupings: by day in order, then the largest GPU time first.

    Args:
        project_id: None: of all projects.

    Raises:
        InvalidRequest: the report would have more than MAX_ROWS rows.
    """
    used = _used(project_id, first_day(days)).c
    columns: dict[Grouping, Any] = {"day": used.day, "model": used.model, "project": used.project_id}
    groups = [columns[name] for name in groupings]
    sums = [func.sum(column) for column in (used.gpu, used.sampled, used.unused, used.trained, used.graded)]
    order = [*([used.day] if "day" in groupings else []), sums[0].desc(), *groups]
    statement = select(*groups, *sums).group_by(*groups).order_by(*order).limit(MAX_ROWS + 1)
    rows = session.execute(statement).all()
    if len(rows) > MAX_ROWS:
        raise InvalidRequest(
            f"The report has more than {MAX_ROWS} rows: ask for fewer days, or group by less.", param="by"
        )
    names = _names(session, rows, groupings.index("project")) if "project" in groupings else {}
    return [_row(row, groupings, names) for row in rows]


def _used(project_id: str | None, since: int) -> Subquery:
    """Usage by project, day and model, and under the model "" what is not known by model."""
    known = (
        select(
            ModelUsage.project_id,
            ModelUsage.day,
            func.sum(ModelUsage.gpu_seconds).label("gpu"),
            func.sum(ModelUsage.grader_tokens).label("graded"),
        )
        .where(ModelUsage.day >= since)
        .group_by(ModelUsage.project_id, ModelUsage.day)
        .subquery()
    )
    gpu = ProjectUsage.gpu_seconds - func.coalesce(known.c.gpu, 0.0)
    graded = ProjectUsage.grader_tokens - func.coalesce(known.c.graded, 0)
    rest = (
        select(
            ProjectUsage.project_id,
            ProjectUsage.day,
            literal("").label("model"),
            gpu.label("gpu"),
            literal(0).label("sampled"),
            literal(0).label("unused"),
            literal(0).label("trained"),
            graded.label("graded"),
        )
        .outerjoin(
            known, and_(known.c.project_id == ProjectUsage.project_id, known.c.day == ProjectUsage.day)
        )
        .where(ProjectUsage.day >= since, or_(gpu > _NOTHING, graded > 0))
    )
    by_model = select(
        ModelUsage.project_id,
        ModelUsage.day,
        ModelUsage.model,
        ModelUsage.gpu_seconds.label("gpu"),
        ModelUsage.sampled_tokens.label("sampled"),
        ModelUsage.unused_tokens.label("unused"),
        ModelUsage.trained_tokens.label("trained"),
        ModelUsage.grader_tokens.label("graded"),
    ).where(ModelUsage.day >= since)
    if project_id is not None:
        rest = rest.where(ProjectUsage.project_id == project_id)
        by_model = by_model.where(ModelUsage.project_id == project_id)
    return union_all(by_model, rest).subquery()


def _names(session: Session, rows: Sequence[Row[Any]], index: int) -> dict[str, str]:
    ids = {row[index] for row in rows}
    return {
        project.id: project.name for project in session.scalars(select(Project).where(Project.id.in_(ids)))
    }


def _row(row: Row[Any], groupings: Sequence[Grouping], names: dict[str, str]) -> UsageRow:
    of = dict(zip(groupings, row, strict=False))
    gpu, sampled, unused, trained, graded = row[len(groupings) :]
    return UsageRow(
        day=of.get("day"),
        model=of.get("model") or None,
        project_id=of.get("project"),
        project_name=names.get(of.get("project", "")),
        gpu_seconds=float(gpu),
        sampled_tokens=int(sampled),
        unused_tokens=int(unused),
        trained_tokens=int(trained),
        grader_tokens=int(graded),
    )
