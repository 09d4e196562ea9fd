"""/v1/regraft/jobs/{id}/rollouts/attribution: the prompts and grader parts that updates came from."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, ServiceDep
from api.http.shapes import Limit, clamped
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
from core.jobs.hyperparameter_groups import MEAN_OF_ANSWERS
from core.results import attribution, prompt_histories, what_if
from core.results.attribution import MAX_PARTS, Effects, LearnedAnswer
from graders.formula import Formula
from graders.weighted_sum import weights_of

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])


class GroupShareOut(BaseModel):
    """A group of answers to one prompt."""

    step: int
    group: Annotated[int, Field(description="Index of the prompt in its step.")]
    line: Annotated[int | None, Field(description="Of the dataset file, from 1.")]
    text: Annotated[str | None, Field(description="First characters of the prompt's last message.")]
    share: Annotated[float, Field(description="Of the updates of the selected steps; all groups sum to 1.")]
    answers: int
    with_advantage: Annotated[int, Field(description="Trained answers with an advantage other than 0.")]
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
    with_advantage: Annotated[int, Field(description="Trained answers with an advantage other than 0.")]
    groups: int
    groups_of_half: Annotated[
        int, Field(description="The smallest number of groups that have half of the updates; 0 without any.")
    ]
    largest: Annotated[list[GroupShareOut], Field(description="The groups with the largest shares.")]
    parts: Annotated[
        list[PartShareOut] | None,
        Field(
            description="Null without a multi grader; where the advantages follow something else than its score; and "
            "for a formula that is no weighted sum, with many parts or answers."
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
    limit: Limit = 20,
) -> AttributionOut:
    """Say which prompts, and which parts of a multi grader, the updates of training steps came from."""
    with service.database.read() as session:
        job = lifecycle.get(session, project.id, job_id)
        grader, resolved = job.body.get("grader", {}), job.resolved or {}
        attribution.refuse_other_advantages(job.method, resolved)
    pages = training_pages(job_id, project, service, step, step_from, step_to)
    if (selected := sum(page.samples for page in pages)) > MAX_RESCORED:
        raise InvalidRequest(
            f"{selected} answers are selected, and at most {MAX_RESCORED} are attributed at once: select fewer steps "
            "with step, or with step_from and step_to.",
            param="step_from",
        )
    answers = attribution.learned_answers(service.blobs, pages, grader.get("invalid_grade"))
    by_token = resolved.get("loss") not in MEAN_OF_ANSWERS
    shares = attribution.group_shares(answers, by_token=by_token)
    largest = [one for one in shares[: clamped(limit)] if one.share > 0.0]
    texts = prompt_histories.texts(
        service.blobs, pages, {one.line: one.step for one in largest if one.line is not None}
    )
    return AttributionOut(
        weight="token" if by_token else "answer",
        answers=len(answers),
        with_advantage=sum(answer.advantage != 0.0 for answer in answers),
        groups=len(shares),
        groups_of_half=attribution.groups_of_half(shares),
        largest=[
            GroupShareOut(**asdict(one), text=None if one.line is None else texts.get(one.line))
            for one in largest
        ],
        parts=_part_shares(answers, grader, resolved, by_token),
    )


def _part_shares(
    answers: Sequence[LearnedAnswer], grader: Mapping[str, Any], resolved: Mapping[str, Any], by_token: bool
) -> list[PartShareOut] | None:
    """None: see `parts`. The scale "each" adds up normalized parts, and the others take lengths off the score."""
    names = what_if.part_names(grader)
    follows_others = (
        resolved.get("advantage_scale") == "each"
        or resolved.get("overlong") == "soft"
        or resolved.get("length_weight")
    )
    effects = None if not names or follows_others else _effects(grader, names, len(answers))
    shares = None if effects is None else attribution.part_shares(answers, names, effects, by_token=by_token)
    return (
        None if shares is None else [PartShareOut(name=name, share=share) for name, share in shares.items()]
    )


def _effects(grader: Mapping[str, Any], names: Sequence[str], answers: int) -> Effects | None:
    """None: the formula would be computed for too long."""
    formula = grader["calculate_output"]
    weights = weights_of(Formula.parse(formula, names))
    if weights is not None:
        return attribution.weighted_effects(dict.fromkeys(names, 0.0) | weights)
    if len(names) > MAX_PARTS or (answers * len(formula)) << len(names) > MAX_RESCORED_CHARACTERS:
        return None
    return attribution.shapley_effects(names, part_formula(grader, formula))
