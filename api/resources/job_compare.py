"""/v1/regraft/jobs/{id}/compare: two to six jobs side by side, prompt by prompt."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, ServiceDep
from api.http.shapes import Money
from api.resources.estimates import in_reader
from api.resources.eval_compare import Difference
from api.resources.ledgers import LedgerBucket, buckets_of
from core.errors import InvalidRequest
from core.jobs import lifecycle
from core.jobs.budgets import Price
from core.masking import hide_in_method
from core.results import job_comparison, ledger
from core.results.job_comparison import PairedRewards, Validated
from core.results.ledger import Ledger

MAX_OTHERS = 5

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])


class ComparedJob(BaseModel):
    """A job of a comparison."""

    job_id: str
    model: Annotated[str, Field(description="The delivered model; the base model before there is one.")]
    step: Annotated[
        int | None, Field(description="Of the validation that counts; null: the job has stored none.")
    ]
    gpu_seconds: Annotated[float, Field(description="Of its recorded steps.")]
    cost: Annotated[Money | None, Field(description="Of these GPU-seconds; null: the service has no price.")]
    ledger: Annotated[list[LedgerBucket], Field(description="What its tokens and its GPU time taught.")]


class ComparedPair(BaseModel):
    """A job minus the first one, over the validation prompts that both have."""

    job_id: str
    prompts: int
    unpaired: Annotated[int, Field(description="Prompts that only one of the two jobs has.")]
    reward: Annotated[
        Difference | None, Field(description="Of the mean reward of a prompt; `first` is the first job.")
    ]
    same_grader: Annotated[bool, Field(description="If not, the rewards are not on one scale.")]


class ChangedField(BaseModel):
    """A field that the requests do not all have with the same value, by its dotted name."""

    field: str
    values: Annotated[list[Any], Field(description="In the order of the jobs; null: the request lacks it.")]


class JobComparison(BaseModel):
    """The first job beside the others. Each interval is that of its pair alone."""

    object: Literal["regraft.job.comparison"] = "regraft.job.comparison"
    jobs: list[ComparedJob]
    pairs: Annotated[list[ComparedPair], Field(description="One for each of the other jobs.")]
    config: list[ChangedField]


@router.get("/{job_id}/compare")
async def compare_jobs(
    job_id: str,
    project: CurrentProject,
    service: ServiceDep,
    other: Annotated[
        str,
        Query(
            max_length=MAX_OTHERS * 65,
            pattern=r"^[^\x00]*$",
            description="The ids of one to five other jobs, separated by commas.",
        ),
    ],
) -> JobComparison:
    """Compare the validated rewards of jobs prompt by prompt with those of the first, and their requests."""
    ids = [job_id, *(name.strip() for name in other.split(","))]
    if not all(ids) or not 2 <= len(ids) <= 1 + MAX_OTHERS:
        raise InvalidRequest(
            f"Invalid value for 'other': expected 1 to {MAX_OTHERS} ids of jobs, separated by commas.",
            param="other",
        )

    def compared() -> JobComparison:
        with service.database.read() as session:
            jobs = [lifecycle.get(session, project.id, name) for name in ids]
            if twice := [name for place, name in enumerate(ids) if name in ids[:place]]:
                raise InvalidRequest(
                    f"Invalid value for 'other': the job '{twice[0]}' is named twice.", param="other"
                )
            validations = [job_comparison.validated(session, job) for job in jobs]
            configs = [job_comparison.config(session, job) for job in jobs]
            ledgers = [ledger.of_job(session, job) for job in jobs]
        graders = [config.get("grader") for config in configs]
        configs = [hide_in_method(config) for config in configs]
        pairs = job_comparison.against_first(service.blobs, [validation.page for validation in validations])
        price = Price.of(service.settings)
        return JobComparison(
            jobs=[
                _compared_job(validation, of_job, price)
                for validation, of_job in zip(validations, ledgers, strict=True)
            ],
            pairs=[
                _compared_pair(job.id, pair, same_grader=grader == graders[0])
                for job, pair, grader in zip(jobs[1:], pairs, graders[1:], strict=True)
            ],
            config=[
                ChangedField(field=name, values=values) for name, values in job_comparison.differing(configs)
            ],
        )

    return await in_reader(service, project, compared)


def _compared_job(validation: Validated, of_job: Ledger, price: Price) -> ComparedJob:
    job = validation.job
    return ComparedJob(
        job_id=job.id,
        model=job.fine_tuned_model or job.model,
        step=None if validation.page is None else validation.page.step,
        gpu_seconds=job.gpu_seconds,
        cost=Money.of(price.amount(job.gpu_seconds)),
        ledger=buckets_of(of_job, price),
    )


def _compared_pair(job_id: str, pair: PairedRewards | None, *, same_grader: bool) -> ComparedPair:
    if pair is None:
        return ComparedPair(job_id=job_id, prompts=0, unpaired=0, reward=None, same_grader=same_grader)
    return ComparedPair(
        job_id=job_id,
        prompts=pair.prompts,
        unpaired=pair.unpaired,
        reward=Difference(**pair.difference),
        same_grader=same_grader,
    )
