"""/v1/regraft/jobs/{id}/ledger: what the tokens and the GPU time of a job taught."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, Service, ServiceDep
from api.http.openapi import refusals
from api.http.ranges import NO_RANGES
from api.http.shapes import Money
from api.resources.estimates import in_reader
from core.jobs import lifecycle
from core.jobs.budgets import Price
from core.results import ledger
from core.results.ledger import Ledger, StepLedger, percents, seconds_of

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])


class LedgerBucket(BaseModel):
    """The tokens and the GPU time with one use."""

    bucket: Annotated[str, Field(description="Such as `learned` or `zero_variance` (docs/howto/ledger.md).")]
    title: str
    tokens: Annotated[
        int,
        Field(description="Sampled ones; of a job that learns from the rows of its file, the trained ones."),
    ]
    tokens_percent: Annotated[float, Field(description="With one digit; these of all buckets add up to 100.")]
    gpu_seconds: float
    time_percent: Annotated[float, Field(description="With one digit; these of all buckets add up to 100.")]
    cost: Annotated[Money | None, Field(description="Of the GPU-seconds; null: the service has no price.")]


class StepUse(BaseModel):
    """The ledger of one step. Buckets without an amount are absent."""

    step: int
    tokens: dict[str, int]
    gpu_seconds: dict[str, float]


class JobLedger(BaseModel):
    """The tokens and the GPU time of the recorded steps of a job, by what they taught."""

    object: Literal["regraft.job.ledger"] = "regraft.job.ledger"
    job_id: str
    tokens: Annotated[int, Field(description="The sum of the buckets.")]
    gpu_seconds: Annotated[float, Field(description="The sum of the buckets.")]
    cost: Annotated[Money | None, Field(description="Of these GPU-seconds; null: the service has no price.")]
    waiting_seconds: Annotated[
        float,
        Field(description="Of waiting for other jobs on the same device: in no bucket, as in `gpu_seconds`."),
    ]
    buckets: list[LedgerBucket]
    steps: list[StepUse]


CSV: dict[int | str, dict[str, Any]] = {200: {"description": "CSV.", "content": {"text/csv": {}}}}


@router.get("/{job_id}/ledger", responses=refusals(404))
async def show_ledger(
    job_id: str,
    project: CurrentProject,
    service: ServiceDep,
    steps: Annotated[bool, Query(description="Whether the response has each step.")] = True,
) -> JobLedger:
    """Return what the tokens and the GPU time of a job taught, by step and in all."""

    def read() -> JobLedger:
        found, price = _read(job_id, project.id, service), Price.of(service.settings)
        buckets = buckets_of(found, price)
        gpu_seconds = seconds_of(sum(found.gpu_time.values()))
        return JobLedger(
            job_id=job_id,
            tokens=sum(bucket.tokens for bucket in buckets),
            gpu_seconds=gpu_seconds,
            cost=Money.of(price.amount(gpu_seconds)),
            waiting_seconds=found.waiting,
            buckets=buckets,
            steps=[_step(step) for step in found.steps] if steps else [],
        )

    return await in_reader(service, project, read)


@router.get("/{job_id}/ledger/download", response_class=StreamingResponse, responses=CSV | refusals(404))
async def download_ledger(job_id: str, project: CurrentProject, service: ServiceDep) -> StreamingResponse:
    """Download the ledger as CSV: a row for each step and bucket."""

    def written() -> str:
        return ledger.to_csv(_read(job_id, project.id, service), Price.of(service.settings))

    headers = NO_RANGES | {"content-disposition": f'attachment; filename="{job_id}-ledger.csv"'}
    content = await in_reader(service, project, written)
    return StreamingResponse([content], media_type="text/csv; charset=utf-8", headers=headers)


def _read(job_id: str, project_id: str, service: Service) -> Ledger:
    with service.database.read() as session:
        return ledger.of_job(session, lifecycle.get(session, project_id, job_id))


def buckets_of(found: Ledger, price: Price) -> list[LedgerBucket]:
    """All buckets of a job, also those without an amount, in the order of reports."""
    tokens, gpu_time = found.tokens, found.gpu_time
    of_tokens, of_time = percents(tokens), percents(gpu_time)
    return [
        LedgerBucket(
            bucket=bucket,
            title=title,
            tokens=tokens[bucket],
            tokens_percent=of_tokens[bucket],
            gpu_seconds=seconds_of(gpu_time[bucket]),
            time_percent=of_time[bucket],
            cost=Money.of(price.amount(seconds_of(gpu_time[bucket]))),
        )
        for bucket, title in ledger.TITLES.items()
    ]


def _step(step: StepLedger) -> StepUse:
    seconds = {bucket: seconds_of(time) for bucket, time in step.gpu_time.items()}
    return StepUse(step=step.step, tokens=dict(step.tokens), gpu_seconds=seconds)
