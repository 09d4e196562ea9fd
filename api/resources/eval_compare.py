"""/v1/regraft/evals/{id}/compare: two runs of an eval, row by row."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, Service, ServiceDep
from api.resources.estimates import in_reader
from api.resources.eval_runs import stored_items, validation_of
from api.resources.eval_shapes import ItemOut
from core.database.tables import Eval, Project
from core.errors import EvalNotFound, InvalidRequest
from core.evals import catalog, items, summary
from core.results import rollouts
from core.results.rollout_filters import Wanted

router = APIRouter(prefix="/regraft/evals", tags=["regraft"])


class Difference(BaseModel):
    """The second run minus the first, over the rows that both graded; the interval is that of Student's t."""

    compared: int
    ungraded: int = Field(description="Paired rows that one of the runs could not grade.")
    first: float | None
    second: float | None
    difference: float | None
    standard_error: float | None
    ci_low: float | None = Field(description="Lower end of the 95 % interval; null: fewer than two rows.")
    ci_high: float | None
    wins: int = Field(description="Rows on which the second run is better.")
    losses: int
    ties: int


class Comparison(BaseModel):
    """Two runs of an eval: the pass rate, and the mean score of each criterion."""

    object: Literal["regraft.eval.comparison"] = "regraft.eval.comparison"
    eval_id: str
    runs: list[str]
    rows: int
    unpaired: int = Field(description="Items whose row is not in the other run.")
    passed: Difference = Field(description="Of the pass rate over all criteria.")
    criteria: dict[str, Difference] = Field(description="Of the mean score, by criterion.")


@router.get("/{eval_id}/compare")
async def compare_runs(
    eval_id: str,
    project: CurrentProject,
    service: ServiceDep,
    runs: Annotated[str, Query(description="The ids of two runs of this eval: `first,second`.")],
) -> Comparison:
    """Compare two runs over the rows that they share. Rows pair by their content."""
    names = [name.strip() for name in runs.split(",")]
    if len(names) != 2 or not all(names):
        raise InvalidRequest(
            "Invalid value for 'runs': expected two run ids, as 'first,second'.", param="runs"
        )

    def read() -> dict[str, Any]:
        first, second = (_items(service, project, eval_id, name) for name in names)
        return summary.compare(first, second)

    return Comparison(eval_id=eval_id, runs=names, **await in_reader(service, project, read))


def _items(service: Service, project: Project, eval_id: str, run_id: str) -> Iterator[dict[str, Any]]:
    try:
        with service.database.read() as session:
            found = catalog.find(session, project.id, eval_id)
            if isinstance(found, Eval):
                _, where = stored_items(session, found, run_id)
                return items.find(service.blobs, where)
        page, model = validation_of(service, found, run_id)
    except EvalNotFound as missing:
        if missing.param != "run_id":
            raise
        with service.database.read() as session:
            other = catalog.eval_of(session, project.id, run_id)
        if other is not None:
            raise InvalidRequest(
                f"The runs of different evals cannot be compared: {run_id} is a run of {other}, not of {eval_id}.",
                param="runs",
            ) from None
        raise EvalNotFound("run", f"{run_id} (of {eval_id})", param="runs") from None
    rows = rollouts.find(service.blobs, [page], Wanted())
    return (ItemOut.of(found, page, row, model=model).model_dump() for row in rows)
