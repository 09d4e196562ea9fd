"""/v1/regraft/jobs/{id}/compare: two jobs side by side, prompt by prompt."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, ServiceDep
from api.resources.estimates import in_reader
from api.resources.eval_compare import Difference
from core.jobs import lifecycle
from core.results import job_comparison
from core.results.job_comparison import Validated
from graders.spec import hide_secrets

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])


class ComparedJob(BaseModel):
    job_id: str
    model: Annotated[str, Field(description="The delivered model; the base model before there is one.")]
    step: Annotated[
        int | None, Field(description="Of the validation that counts; null: the job has stored none.")
    ]


class ChangedField(BaseModel):
    """A field of the request, by its dotted name."""

    field: str
    first: Any
    second: Any


class JobComparison(BaseModel):
    """The second job minus the first, over the validation prompts that both have."""

    object: Literal["regraft.job.comparison"] = "regraft.job.comparison"
    first: ComparedJob
    second: ComparedJob
    prompts: int
    unpaired: Annotated[int, Field(description="Prompts that only one of the jobs has.")]
    reward: Annotated[Difference | None, Field(description="Of the mean reward of a prompt.")]
    same_grader: Annotated[bool, Field(description="If not, the rewards are not on one scale.")]
    config: list[ChangedField]


@router.get("/{job_id}/compare")
async def compare_jobs(
    job_id: str,
    project: CurrentProject,
    service: ServiceDep,
    other: Annotated[
        str, Query(max_length=64, pattern=r"^[^\x00]*$", description="The id of the second job.")
    ],
) -> JobComparison:
    """Compare the validated rewards of two jobs prompt by prompt, and their requests."""

    def compared() -> JobComparison:
        with service.database.read() as session:
            jobs = [lifecycle.get(session, project.id, one) for one in (job_id, other)]
            first, second = (job_comparison.validated(session, job) for job in jobs)
            configs = [job_comparison.config(session, job) for job in jobs]
        paired = None
        if first.page is not None and second.page is not None:
            paired = job_comparison.paired(service.blobs, first.page, second.page)
        graders = [one.get("grader") for one in configs]
        for one in configs:
            if isinstance(one.get("grader"), dict):
                one["grader"] = hide_secrets(one["grader"])
        return JobComparison(
            first=_shown(first),
            second=_shown(second),
            prompts=0 if paired is None else paired.prompts,
            unpaired=0 if paired is None else paired.unpaired,
            reward=None if paired is None else Difference(**paired.difference),
            same_grader=graders[0] == graders[1],
            config=[
                ChangedField(field=name, first=a, second=b)
                for name, a, b in job_comparison.differing(*configs)
            ],
        )

    return await in_reader(service, project, compared)


def _shown(one: Validated) -> ComparedJob:
    job = one.job
    return ComparedJob(
        job_id=job.id,
        model=job.fine_tuned_model or job.model,
        step=None if one.page is None else one.page.step,
    )
