"""The model that a job starts from: a base model, or a tuned model whose adapter or weights it trains further."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from core.database.engine import json_text
from core.database.states import JOB
from core.database.tables import Job, TunedModel
from core.errors import InvalidRequest, NotFound
from core.jobs.hyperparameter_groups import Train
from core.jobs.methods import REWARD_MODEL
from core.registry import Registry
from core.results import model_aliases, tuned_models

# The shape of the adapter, by the names of resolved hyperparameters.
SHAPE = ("lora_rank", "lora_alpha", "lora_targets")
# How its prompts were rendered; a job that asks for nothing else keeps it.
RENDERING = ("chat_template", "chat_template_kwargs")


@dataclass(frozen=True)
class Parent:
    """A tuned model that a job trains further, as it was when the job was created."""

    model: str  # its name
    job_id: str
    step: int
    checkpoint_id: str
    blob_prefix: str
    settings: dict[str, Any]  # SHAPE and RENDERING of its job
    reward_kind: str | None = None  # of a reward model: what it learned from
    # A rank above that of its adapter, which is then frozen: the job learns the rest of the rank on top of it.
    grown_rank: int | None = None
    # What its job trained: it is an adapter, or a whole model.
    train: Train = "lora"

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole model, and no adapter on the base model."""
        return self.train == "full"

    @property
    def frozen_rank(self) -> int:
        """The part of the job's rank that it does not train."""
        return 0 if self.grown_rank is None else int(self.settings["lora_rank"])

    @property
    def shape(self) -> dict[str, Any]:
        """SHAPE of the job's adapter. A grown one has the parent's scale, alpha / rank, so the parent's weights fit."""
        shape = {name: self.settings[name] for name in SHAPE}
        if self.grown_rank is not None:
            alpha = shape["lora_alpha"] * self.grown_rank // shape["lora_rank"]
            shape |= {"lora_rank": self.grown_rank, "lora_alpha": alpha}
        return shape

    @property
    def is_reward_model(self) -> bool:
        return self.reward_kind is not None

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """The parent of a job; None: it starts from a base model."""
        return None if job.parent is None else cls(**job.parent)

    def to_row(self) -> dict[str, Any]:
        return asdict(self)

    def as_data(self) -> dict[str, Any]:
        return {"model": self.model, "job_id": self.job_id, "step": self.step}


def checkpoints_in_use() -> Select[str]:
    """The ids of the checkpoints that unfinished jobs start from. Their names may have been deleted since."""
    checkpoint_id = json_text(Job.parent, "checkpoint_id")
    return select(checkpoint_id).where(Job.status.not_in(JOB.final), checkpoint_id.is_not(None))


def grading_model(
    session: Session, project_id: str, model: str, base_model: str | None, registry: Registry, *, param: str
) -> Parent:
    """The reward model of this name, for the answers of a job on `base_model`; None: on any.

    Raises:
        TunedModelNotFound, ModelNotFound: the project may use no model of this name.
        InvalidRequest: it is no reward model, or on another base model.
    """
    base, found = start_of(session, project_id, model, registry, param=param, reward_model=True)
    if found is None or not found.is_reward_model:
        raise InvalidRequest(
            f"'{model}' is not a reward model. A job with the method 'reward_model' trains one.", param=param
        )
    if base_model not in (None, base):
        raise InvalidRequest(
            f"The reward model '{model}' is on '{base}', and the job's base model is '{base_model}'. A reward model "
            "can score answers of models on its own base model only.",
            param=param,
        )
    return found


def trained_from(session: Session, project_id: str, models: Sequence[TunedModel]) -> Mapping[str, str]:
    """The model that each model's job started from, by the name of the model.

    For a model of another project it is the base model: this project may not know its other models.
    """
    own = {model.job_id for model in models if model.project_id == project_id}
    jobs = session.execute(select(Job.id, Job.parent).where(Job.id.in_(own)))
    parents = {row.id: row.parent["model"] for row in jobs if row.parent is not None}
    return {model.name: parents.get(model.job_id, model.base_model) for model in models}


def start_name(parent: Parent | None) -> str:
    """The model of a job's step 0, as sentences name it."""
    return "the base model" if parent is None else parent.model


def _refuse_absent(base_model: str, registry: Registry, param: str) -> None:
    try:
        registry.get(base_model)
    except NotFound as absent:
        absent.param = param
        raise


def start_of(
    session: Session,
    project_id: str,
    model: str,
    registry: Registry,
    *,
    param: str = "model",
    reward_model: bool = False,
) -> tuple[str, Parent | None]:
    """The base model of a job that names `model`, and the tuned model that it trains further, if any.

    Args:
        param: where the request names it.
        reward_model: a reward model may be named as well.

    Raises:
        TunedModelNotFound, ModelNotFound: the project may use no model of this name.
        InvalidRequest: its files were deleted, or it is a reward model or an alias of the project.
    """
    found = None if model in registry.names else tuned_models.find(session, project_id, model)
    if found is None:
        if model not in registry.names:
            model_aliases.refuse(session, project_id, model, param)
        _refuse_absent(model, registry, param)
        return registry.resolve(model), None
    _refuse_absent(found.base_model, registry, param)
    checkpoint = tuned_models.checkpoint_of(session, found)
    job = session.scalar(select(Job).where(Job.id == found.job_id))
    if checkpoint is None or job is None or job.resolved is None:
        raise InvalidRequest(
            f"The files of '{model}' were deleted, so it cannot be used.",
            param=param,
            code="model_not_available",
        )
    if job.method == REWARD_MODEL and not reward_model:
        raise tuned_models.only_scores(model, param)
    settings = {name: job.resolved.get(name) for name in (*SHAPE, *RENDERING)}
    return found.base_model, Parent(
        model,
        job.id,
        checkpoint.step,
        checkpoint.id,
        checkpoint.blob_prefix,
        settings,
        job.resolved.get("reward_kind"),
        train=job.resolved.get("train", "lora"),
    )
