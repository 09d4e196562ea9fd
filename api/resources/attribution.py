"""/v1/regraft/jobs/{id}/rollouts/attribution: the prompts and grader parts that updates came from."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, ServiceDep
from api.resources.rollouts import (
    MAX_RESCORED,
    MAX_RESCORED_CHARACTERS,
    SEARCHES,
    Step,
    part_formula,
    training_pages,
)
from core.errors import InvalidRequest
from core.jobs import lifecycle
from core.results import attribution, prompt_histories, what_if
from core.results.attribution import MAX_PARTS, LearnedAnswer

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])

MOST_GROUPS = 100


class GroupShareOut(BaseModel):
    """A group of answers to one prompt."""

    step: int
    group: Annotated[int, Field(description="Index of the prompt in its step.")]
    line: Annotated[int | None, Field(description="Of the dataset file, from 1.")]
    text: Annotated[str | None, Field(description="First characters of the prompt's last message.")]
    share: Annotated[float, Field(description="Of the update of the selected steps; all groups sum to 1.")]
    answers: int
    trained: Annotated[int, Field(description="Answers with an advantage other than 0.")]
    mean_reward: float | None


class PartShareOut(BaseModel):
    """A part of a multi grader."""

    name: str
    share: Annotated[
        float,
        Field(description="Negative: the updates lower this part for the sake of others. They sum to 1."),
    ]


class AttributionOut(BaseModel):
    """The sources of the updates of the selected steps. docs/howto/rollouts.md#attribution has the formulas."""

    object: Literal["regraft.attribution"] = "regraft.attribution"
    weight: Annotated[
        Literal["answer", "token"],
        Field(description="Whether the job's loss weighs answers or tokens alike."),
    ]
    answers: int
    trained: Annotated[int, Field(description="Answers with an advantage other than 0.")]
    groups: int
    groups_of_half: Annotated[
        int, Field(description="The smallest number of groups that have half of the update; 0 without any.")
    ]
    largest: Annotated[list[GroupShareOut], Field(description="The groups with the largest shares.")]
    parts: Annotated[
        list[PartShareOut] | None,
        Field(
            description="Null without a multi grader, with more than eight parts, with the advantage scale 'each', and "
            "where no advantage follows a difference of these parts."
        ),
    ]


@router.get("/{job_id}/rollouts/attribution", dependencies=SEARCHES)
def attribute(
    job_id: str,
    project: CurrentProject,
    service: ServiceDep,
    step: Step = None,
    step_from: Step = None,
    step_to: Step = None,
    limit: Annotated[int, Query(ge=1, le=MOST_GROUPS, description="Number of groups.")] = 20,
) -> AttributionOut:
    """Say which prompts, and which parts of a multi grader, the updates of training steps came from."""
    with service.database.read() as session:
        job = lifecycle.get(session, project.id, job_id)
        grader, resolved = job.body.get("grader", {}), job.resolved or {}
        attribution.refuse_other_advantages(job.method, resolved)
    pages = training_pages(job_id, project, service, step, step_from, step_to)
    names = _parts(grader, resolved)
    _refuse_many(sum(page.samples for page in pages), names, grader)
    answers = attribution.learned_answers(service.blobs, pages, grader.get("invalid_grade"))
    by_token = resolved.get("loss") not in attribution.MEANS_OF_ANSWERS
    shares = attribution.group_shares(answers, by_token=by_token)
    largest = [one for one in shares[:limit] if one.share > 0.0]
    texts = prompt_histories.texts(
        service.blobs, pages, {one.line: one.step for one in largest if one.line is not None}
    )
    return AttributionOut(
        weight="token" if by_token else "answer",
        answers=len(answers),
        trained=sum(answer.advantage != 0.0 for answer in answers),
        groups=len(shares),
        groups_of_half=attribution.groups_of_half(shares),
        largest=[
            GroupShareOut(**asdict(one), text=None if one.line is None else texts.get(one.line))
            for one in largest
        ],
        parts=_part_shares(answers, names, grader),
    )


def _parts(grader: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[str]:
    """The parts of which a share is computed.

    None with the scale "each", which adds up normalized parts in place of the formula of their scores.
    """
    names = what_if.part_names(grader)
    return [] if len(names) > MAX_PARTS or resolved.get("advantage_scale") == "each" else names


def _refuse_many(selected: int, names: Sequence[str], grader: Mapping[str, Any]) -> None:
    """Raises InvalidRequest: the formula would be computed for too long."""
    most = MAX_RESCORED
    if names:
        most = min(most, MAX_RESCORED_CHARACTERS // (len(grader["calculate_output"]) << len(names)))
    if selected > most:
        raise InvalidRequest(
            f"{selected} answers are selected, and the shares of at most {most} answers of this job are computed at "
            "once: select fewer steps with step_from and step_to.",
            param="step_from",
        )


def _part_shares(
    answers: Sequence[LearnedAnswer], names: Sequence[str], grader: Mapping[str, Any]
) -> list[PartShareOut] | None:
    if not names:
        return None
    formula = part_formula(grader, grader["calculate_output"])
    shares = attribution.part_shares(answers, names, formula)
    return (
        None if shares is None else [PartShareOut(name=name, share=share) for name, share in shares.items()]
    )
