"""Bodies of POST /v1/regraft/pipelines, and the checks of their stages before anything starts."""

import json
import math
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, JsonValue, ValidationError, field_validator, model_validator

from api.http.shapes import Body
from api.http.stored_graders import OrStored
from api.http.validation_errors import explain
from api.resources.eval_requests import CompletionsParams, Metadata, Name, RunBudget
from api.resources.job_body import Budget, JobCreate
from core.errors import InvalidRequest
from core.jobs.budgets import Price
from core.pipelines import sweeps
from core.pipelines.graph import KINDS, MAX_STAGES, PlannedStage
from core.pipelines.rows import Form, Selection
from core.pipelines.sweeps import MAX_JOBS
from core.strict import StrictModel
from graders.spec import GraderSpec, dump, parse_grader

# Of all stages: a list of pipelines reads a hundred of them.
MAX_BYTES = 512 << 10
StageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
FileOrReference = Annotated[str, Field(min_length=1, max_length=128)]
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10_000)]
SettingName = Annotated[str, Field(pattern=r"^[a-z_.]{1,64}$")]
SettingValues = Annotated[list[JsonValue], Field(min_length=1, max_length=MAX_JOBS)]
Characters = Annotated[int, Field(ge=0, le=10_000_000)]


def _one_grader(sent: Any) -> Any:
    return None if sent is None else parse_grader(sent, "grader")


class SweepStage(StrictModel):
    """A job with each combination of some settings, of which the losers stop early; its model is the best one's."""

    job: dict[str, Any]
    over: Annotated[dict[SettingName, SettingValues], Field(min_length=1, max_length=8)]
    stop_losers: bool = True
    budget: Budget | None = None

    @model_validator(mode="after")
    def _is_of_several_jobs(self) -> "SweepStage":
        count = math.prod(map(len, self.over.values()))
        if not 2 <= count <= MAX_JOBS:
            raise ValueError(f"'over' has {count} combinations; a sweep has 2 to {MAX_JOBS}")
        for name, values in self.over.items():
            if len({json.dumps(value, sort_keys=True) for value in values}) < len(values):
                raise ValueError(f"'over.{name}' has a value twice")
        return self

    def with_one_seed(self) -> "SweepStage":
        """The same with a seed, if it has none: all jobs must see the same prompts in the same order."""
        if "seed" in self.over or self.job.get("seed") is not None:
            return self
        return self.model_copy(update={"job": {**self.job, "seed": secrets.randbelow(2**31)}})

    @property
    def settings(self) -> list[dict[str, Any]]:
        return sweeps.combinations(self.over)

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """The requests of its jobs. Raises InvalidRequest: there is no setting of a name."""
        return [sweeps.with_settings(self.job, one) for one in self.settings]

    def gpu_seconds(self, price: Price) -> float | None:
        """The budget in GPU-seconds. Raises InvalidRequest if it is money, and the service has no such price."""
        return None if self.budget is None else float(self.budget.to_row(price)["gpu_seconds"])


class SampleStage(StrictModel):
    """A model answers each prompt of a file `n` times, and a grader scores the answers."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    file: FileOrReference
    n: Annotated[int, Field(ge=1, le=256)] = 1
    grader: Annotated[Annotated[GraderSpec, OrStored()] | None, BeforeValidator(_one_grader)] = None
    sampling_params: CompletionsParams | None = None
    budget: RunBudget | None = None


class SelectStage(StrictModel):
    """Some answers of a sample stage, as rows for the next one (core/pipelines/rows.py, Selection)."""

    file: FileOrReference
    form: Form = "supervised"
    min_score: Finite | None = None
    max_score: Finite | None = None
    min_pass_rate: Finite | None = None
    max_pass_rate: Finite | None = None
    best: Count | None = None
    min_characters: Characters | None = None
    max_characters: Characters | None = None
    finished: bool = True
    deduplicate: bool = True
    script: Annotated[str, Field(pattern=r"^[A-Z][A-Z -]{0,39}$")] | None = None
    script_share: Share = 0.9
    max_similarity: Share | None = None

    def selection(self) -> Selection:
        return Selection(**self.model_dump(exclude={"file"}))


class MixedFile(StrictModel):
    file: FileOrReference
    weight: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0


class MixStage(StrictModel):
    """The lines of several files, shuffled."""

    files: Annotated[list[MixedFile], Field(min_length=1, max_length=32)]
    seed: Annotated[int, Field(ge=0, le=2147483647)] = 0


class StageCreate(StrictModel):
    """A stage: its name and one of its kinds. A job is the body of POST /v1/fine_tuning/jobs."""

    name: StageName
    job: dict[str, Any] | None = None
    sweep: SweepStage | None = None
    sample: SampleStage | None = None
    select: SelectStage | None = None
    mix: MixStage | None = None
    after: Annotated[list[StageName], Field(max_length=MAX_STAGES)] = []

    @model_validator(mode="after")
    def _is_one_kind(self) -> "StageCreate":
        if sum(getattr(self, kind) is not None for kind in KINDS) != 1:
            raise ValueError(f"a stage has exactly one of {', '.join(KINDS)}")
        return self

    def planned(self) -> PlannedStage:
        kind = next(kind for kind in KINDS if getattr(self, kind) is not None)
        sent = getattr(self, kind)
        # As sent: a later version's defaults must not change a pipeline that is cloned.
        spec = sent if isinstance(sent, dict) else sent.model_dump(mode="json", exclude_unset=True)
        if self.sample is not None and self.sample.grader is not None:
            spec["grader"] = dump(self.sample.grader)
        return PlannedStage(self.name, kind, spec, tuple(self.after))


class PipelineCreate(Body):
    name: Name | None = None
    metadata: Metadata = None
    stages: Annotated[list[StageCreate], Field(min_length=1, max_length=MAX_STAGES, fail_fast=True)]

    @field_validator("stages", mode="before")
    @classmethod
    def _graders_parse(cls, sent: Any) -> Any:
        """Parse the graders of samples first, here, where the number of their stage is known for an error."""
        for number, stage in enumerate(sent[:MAX_STAGES] if isinstance(sent, list) else ()):
            sample = stage.get("sample") if isinstance(stage, Mapping) else None
            if isinstance(sample, Mapping) and sample.get("grader") is not None:
                parse_grader(sample["grader"], f"stages[{number}].sample.grader")
        return sent

    @model_validator(mode="after")
    def _is_not_too_large(self) -> "PipelineCreate":
        size = sum(len(stage.model_dump_json()) for stage in self.stages)
        if size > MAX_BYTES:
            raise ValueError(f"the stages have {size:,} bytes of JSON, at most {MAX_BYTES:,} are supported")
        return self


class PipelineClone(Body):
    """`from`: this stage and all that need it start again, the others keep their results; null: all start again."""

    first: StageName | None = Field(default=None, alias="from")
    name: Name | None = None
    metadata: Metadata = None


def parsed_job(sent: Mapping[str, Any], where: str) -> JobCreate:
    """The body of a job, as a request for it would be parsed; references are strings like any other.

    Raises:
        InvalidRequest: it is invalid; the parameter begins with `where`.
    """
    try:
        return JobCreate.model_validate(sent)
    except ValidationError as invalid:
        complaints = [error | {"loc": ("body", *error["loc"])} for error in invalid.errors()]
        mistake = explain(complaints, sent, JobCreate.model_fields)
        raise named_within(mistake, where) from None


def of_pipeline(spec: Mapping[str, Any], pipeline_id: str, name: str) -> dict[str, Any]:
    """The body of a job with the metadata that name its pipeline and stage, by which jobs can be listed."""
    ours = {"pipeline": pipeline_id, "stage": name}
    return {**spec, "metadata": ours | dict(spec.get("metadata") or {})}


def named_within(mistake: InvalidRequest, where: str) -> InvalidRequest:
    """The same mistake, whose parameter is inside `where`."""
    param = where if not mistake.param else f"{where}.{mistake.param}"
    message = mistake.message
    if mistake.param:
        message = message.replace(f"'{mistake.param}'", f"'{param}'")
    return InvalidRequest(message, param=param, code=mistake.code)
