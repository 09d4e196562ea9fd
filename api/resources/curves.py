"""/v1/regraft/curves: the validations of many jobs, for lists."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, ReadSession
from api.http.openapi import refusals
from api.http.shapes import Listing
from core.errors import InvalidRequest
from core.jobs import lifecycle
from core.results import curves
from core.results.curves import MAX_POINTS, Curve

MAX_JOBS = 100

router = APIRouter(prefix="/regraft/curves", tags=["regraft"])


class CurveOut(BaseModel):
    """The validations of a job in order, thinned."""

    object: Literal["regraft.curve"] = "regraft.curve"
    job_id: str
    metric: Annotated[
        str | None,
        Field(
            description="`full_valid_mean_reward`, or `full_valid_loss` of jobs without rewards; null: no validation."
        ),
    ]
    steps: Annotated[list[int], Field(description=f"Of the validations, at most {MAX_POINTS} of them.")]
    values: Annotated[
        list[float], Field(description="The first is that of the model that the job started from.")
    ]
    step: Annotated[int | None, Field(description="The last one; null: none has been recorded.")]
    total_steps: int | None

    @classmethod
    def of(cls, curve: Curve) -> "CurveOut":
        return cls(
            job_id=curve.job_id,
            metric=curve.metric,
            steps=[step for step, _ in curve.points],
            values=[value for _, value in curve.points],
            step=curve.step,
            total_steps=curve.total_steps,
        )


@router.get("", responses=refusals(404))
def list_curves(
    project: CurrentProject,
    session: ReadSession,
    jobs: Annotated[
        str,
        Query(
            max_length=MAX_JOBS * 65,
            pattern=r"^[^\x00]*$",
            description=f"The ids of 1 to {MAX_JOBS} jobs, separated by commas.",
        ),
    ],
) -> Listing[CurveOut]:
    """Return the validations of jobs as short curves, in the order of the ids."""
    ids = [name.strip() for name in jobs.split(",")]
    if not all(ids) or len(ids) > MAX_JOBS:
        raise InvalidRequest(
            f"Invalid value for 'jobs': expected 1 to {MAX_JOBS} ids of jobs, separated by commas.",
            param="jobs",
        )
    found = [lifecycle.get(session, project.id, name) for name in ids]
    return Listing(data=[CurveOut.of(curve) for curve in curves.curves(session, found)])
