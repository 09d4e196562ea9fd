"""Hyperparameters of what learns from the answers in a file: supervised, dpo, reward_model, distillation's `logits`.

OpenAI's names are at the top; `advanced` has the rest. "auto" is resolved when the job starts (`resolve`).
"""

import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from core import chat_templates
from core.errors import InvalidParameter
from core.jobs.hyperparameter_groups import (
    AnyHyperparameters,
    AnyOptimizer,
    Auto,
    LearningRateSchedule,
    Lora,
    LoraTargets,
    OnlyLora,
    TemplateChoice,
    Train,
    Value,
    automatic_warmup,
    refuse_unused_lora,
)
from core.jobs.hyperparameters import COMMON_NAMES, FULL_LEARNING_RATE
from core.jobs.methods import LOGITS, REWARD_MODEL
from core.storage.offline_rows import RewardKind

PreferenceLoss = Literal["sigmoid", "ipo", "simpo", "orpo", "kto"]
# SimPO's own settings; 0.1 is the usual beta of the other losses.
_SIMPO_BETA, _SIMPO_GAMMA = 2.0, 1.0
# Other trainers' names.
_ELSEWHERE = COMMON_NAMES | {
    "loss_type": "loss",
    "r": "rank",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_target_modules": "targets",
    "target_modules": "targets",
    "simpo_gamma": "gamma",
}
# Losses that compare with a reference model.
WITH_REFERENCE: frozenset[PreferenceLoss] = frozenset({"sigmoid", "ipo", "kto"})


# These methods overfit in a second epoch over a file that is not small.
_ONE_EPOCH = frozenset({"dpo", REWARD_MODEL})


class OfflineOptimizer(AnyOptimizer):
    """AdamW on the weights that are trained."""

    schedule: LearningRateSchedule = "linear"
    # The step trust region, as in reinforcement; off, because no value of it is measured for these methods. A reward
    # model of scores has none. 0: off.
    step_kl: float = Field(default=0.0, ge=0, le=10)
    # With train 'full' not of norms and biases.
    weight_decay: float = Field(default=0.0, ge=0, le=1)


class OfflineAdvanced(Value):
    """Hyperparameters beyond OpenAI's, in groups."""

    # The weights to train: those of a LoRA adapter, or all of a model with at most 8B parameters.
    train: Train = "lora"
    optimizer: OfflineOptimizer = OfflineOptimizer()
    lora: Lora = Lora()
    template: TemplateChoice = TemplateChoice()

    @model_validator(mode="after")
    def _lora_is_used(self) -> "OfflineAdvanced":
        refuse_unused_lora(self.train, self.lora)
        return self


class Preference(Value):
    """The loss of a pair of answers (docs/howto/supervised.md)."""

    # DPO (sigmoid), IPO, SimPO, ORPO or KTO.
    type: PreferenceLoss = "sigmoid"
    # sigmoid and ipo: divide the log-probabilities of an answer by its length. The papers add them up.
    length_normalize: bool = False
    # sigmoid: the share of pairs that are expected to be labeled the wrong way round (conservative DPO).
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    # simpo: the margin by which the preferred answer is to lead. Null: 1.
    gamma: float | None = Field(default=None, ge=0)
    # kto: factors of the losses of desirable (preferred) and undesirable answers. Null: 1.
    desirable_weight: float | None = Field(default=None, gt=0, le=100)
    undesirable_weight: float | None = Field(default=None, gt=0, le=100)

    @model_validator(mode="before")
    @classmethod
    def _is_an_object(cls, sent: Any) -> Any:
        if isinstance(sent, str):
            raise ValueError(f'expected an object such as {{"type": "{get_args(PreferenceLoss)[2]}"}}')
        return sent

    @model_validator(mode="after")
    def _fields_of_this_loss(self) -> "Preference":
        if self.length_normalize and self.type not in ("sigmoid", "ipo"):
            raise ValueError("length_normalize is for the losses sigmoid and ipo")
        if self.label_smoothing and self.type != "sigmoid":
            raise ValueError("label_smoothing is for the loss sigmoid")
        if self.gamma is not None and self.type != "simpo":
            raise ValueError("gamma is for the loss simpo")
        for name in ("desirable_weight", "undesirable_weight"):
            if getattr(self, name) is not None and self.type != "kto":
                raise ValueError(f"{name} is for the loss kto")
        return self


class DpoAdvanced(OfflineAdvanced):
    loss: Preference = Preference()


class SupervisedHyperparameters(AnyHyperparameters):
    """method.supervised.hyperparameters, with OpenAI's names and bounds."""

    advanced: OfflineAdvanced = OfflineAdvanced()

    @model_validator(mode="after")
    def _one_learning_rate(self) -> "SupervisedHyperparameters":
        if self.advanced.optimizer.learning_rate != "auto" and self.learning_rate_multiplier not in (
            "auto",
            1,
        ):
            raise ValueError(
                "learning_rate_multiplier scales the automatic learning rate: give only one of it and "
                "advanced.optimizer.learning_rate"
            )
        return self


class DpoHyperparameters(SupervisedHyperparameters):
    """method.dpo.hyperparameters."""

    # At most 2, as at OpenAI, and 10 for simpo, which divides log-probabilities by the length of the answer.
    beta: Auto | Annotated[float, Field(gt=0, le=10)] = "auto"
    advanced: DpoAdvanced = DpoAdvanced()

    @model_validator(mode="after")
    def _beta_of_this_loss(self) -> "DpoHyperparameters":
        if self.beta != "auto" and self.beta > 2 and self.advanced.loss.type != "simpo":
            raise InvalidParameter(
                f"Invalid beta: expected 'auto' or a number <= 2 (<= 10 for the loss simpo), but got {self.beta:g}.",
                param="method.dpo.hyperparameters.beta",
                code="invalid_value",
            )
        return self

    @model_validator(mode="after")
    def _more_than_one_row(self) -> "DpoHyperparameters":
        if self.batch_size == 1 and self.advanced.loss.type == "kto":
            raise InvalidParameter(
                "Invalid batch_size: the loss kto needs at least 2 rows a step, because it compares each answer with "
                "those of other rows.",
                param="method.dpo.hyperparameters.batch_size",
                code="invalid_value",
            )
        return self


class RewardAdvanced(OfflineAdvanced):
    train: OnlyLora = "lora"  # no other
    # Pairs: pulls the rewards of both answers towards a sum of 0, which their difference alone leaves open.
    centering: float = Field(default=0.01, ge=0, le=1)


class RewardHyperparameters(SupervisedHyperparameters):
    """method.reward_model.hyperparameters."""

    advanced: RewardAdvanced = RewardAdvanced()


class SoftTargets(Value):
    """The loss of distillation in the mode `logits`: the forward KL to the teacher (docs/howto/distillation.md)."""

    # The teacher's likeliest tokens, which are compared one by one; all others count as one. Auto: every token.
    top_k: Auto | Annotated[int, Field(ge=1, le=1_000_000)] = "auto"
    # Divides the logits of both models; the loss is multiplied by its square.
    temperature: float = Field(default=1.0, gt=0, le=20)


class LogitsAdvanced(OfflineAdvanced):
    train: OnlyLora = "lora"  # no other
    loss: SoftTargets = SoftTargets()


class LogitsHyperparameters(SupervisedHyperparameters):
    """method.distillation.hyperparameters in the mode `logits`."""

    advanced: LogitsAdvanced = LogitsAdvanced()


class ResolvedOffline(Value):
    """Hyperparameters with every "auto" resolved, as the run uses them. None: not used by the method."""

    batch_size: int
    learning_rate: float
    n_epochs: int
    steps_per_epoch: int
    total_steps: int
    schedule: LearningRateSchedule
    warmup_steps: int
    step_kl: float
    max_grad_norm: float
    weight_decay: float
    lora_rank: int
    lora_alpha: int
    lora_targets: LoraTargets
    train: Train = "lora"
    chat_template: chat_templates.Name | None
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    beta: float | None = None
    preference_loss: PreferenceLoss | None = None
    length_normalize: bool = False
    label_smoothing: float = 0.0
    gamma: float | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    reward_kind: RewardKind | None = None
    centering: float | None = None  # of pairs
    top_k: int | None = None  # None: every token
    soft_temperature: float | None = None  # of a teacher's and the student's probabilities

    @property
    def has_reference(self) -> bool:
        return self.preference_loss in WITH_REFERENCE

    @property
    def reference_copies(self) -> int:
        """Copies of all weights that are kept to compare with, if all weights are trained."""
        return int(self.train == "full" and self.has_reference)


KINDS: Mapping[str, type[SupervisedHyperparameters]] = MappingProxyType(
    {
        "supervised": SupervisedHyperparameters,
        "dpo": DpoHyperparameters,
        REWARD_MODEL: RewardHyperparameters,
        LOGITS: LogitsHyperparameters,
    }
)


def similar_hyperparameter(param: str, variant: str) -> str | None:
    """The hyperparameter of this variant of a method that an unknown dotted path probably means; None: none."""
    _, _, path = f".{param}".partition(".hyperparameters.")
    kind = KINDS[variant]
    advanced = type(kind().advanced)
    places = {name: f"hyperparameters.{name}" for name in kind.model_fields}
    for group, field in advanced.model_fields.items():
        places[group] = f"hyperparameters.advanced.{group}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Value):
            inside = {name: f"{places[group]}.{name}" for name in field.annotation.model_fields}
            places = inside | places
    name = path.rpartition(".")[2]
    close = difflib.get_close_matches(_ELSEWHERE.get(name, name), places, n=1, cutoff=0.75)
    found = places[close[0]] if close else None
    return None if found is None or f".{param}".endswith(f".{found}") else found


def requested_hyperparameters(variant: str, hyperparameters: Mapping[str, Any]) -> SupervisedHyperparameters:
    """The hyperparameters of a job with this variant of a method, as they are stored."""
    return KINDS[variant].model_validate(hyperparameters)


def epochs(rows: int) -> int:
    """OpenAI's rule for an automatic n_epochs: between 100 and 25,000 rows in all, three epochs if that fits."""
    if rows * 3 < 100:
        return min(25, 100 // rows)
    if rows * 3 > 25_000:
        return max(1, 25_000 // rows)
    return 3


def base_learning_rate(method: str, parameters: int) -> float:
    """The automatic learning rate for LoRA on all linear layers; small models need a higher one.

    About ten times what is published for full fine-tuning. Preference losses act on sums over whole answers, and need
    a tenth of the supervised rate, reward models half of it.
    """
    rate = 5e-4 if parameters <= 300e6 else 2e-4 if parameters <= 14e9 else 1e-4
    return rate / {"dpo": 10, REWARD_MODEL: 2}.get(method, 1)


def resolve(
    method: str,
    requested: SupervisedHyperparameters,
    *,
    rows: int,
    parameters: int,
    reward_kind: RewardKind = "pairs",
) -> ResolvedOffline:
    """Resolve every "auto". `rows` of training data, `parameters` of the base model.

    `reward_kind`: what the rows of a reward model have.

    An epoch has ceil(rows / batch_size) steps, of which the last may be smaller, so that epochs end between steps.
    """
    advanced = requested.advanced
    optimizer, lora, template = advanced.optimizer, advanced.lora, advanced.template
    least = 2 if isinstance(requested, DpoHyperparameters) and requested.advanced.loss.type == "kto" else 1
    batch_size = max(least, min(rows, _or(requested.batch_size, max(1, min(16, rows // 20)))))
    n_epochs = _or(requested.n_epochs, 1 if method in _ONE_EPOCH and rows >= 100 else epochs(rows))
    steps_per_epoch = math.ceil(rows / batch_size)
    base = base_learning_rate(method, parameters) * _or(requested.learning_rate_multiplier, 1.0)
    if advanced.train == "full":
        base *= FULL_LEARNING_RATE
    step_kl = optimizer.step_kl
    return ResolvedOffline(
        batch_size=batch_size,
        learning_rate=_or(optimizer.learning_rate, base),
        n_epochs=n_epochs,
        steps_per_epoch=steps_per_epoch,
        total_steps=n_epochs * steps_per_epoch,
        schedule=optimizer.schedule,
        warmup_steps=_or(optimizer.warmup_steps, automatic_warmup(step_kl, n_epochs * steps_per_epoch)),
        step_kl=step_kl,
        max_grad_norm=optimizer.max_grad_norm,
        weight_decay=optimizer.weight_decay,
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        lora_targets=_or(lora.targets, "all-linear"),
        train=advanced.train,
        chat_template=None if template.chat_template == "auto" else template.chat_template,
        chat_template_kwargs=dict(template.chat_template_kwargs),
        **_of_loss(requested, reward_kind),
    )


def _of_loss(requested: SupervisedHyperparameters, reward_kind: RewardKind) -> dict[str, Any]:
    """The fields of ResolvedOffline that one method's loss reads."""
    if isinstance(requested, DpoHyperparameters):
        return _of_preference(requested.advanced.loss, requested.beta)
    if isinstance(requested, RewardHyperparameters):
        pairs = {"reward_kind": "pairs", "centering": requested.advanced.centering}
        return pairs if reward_kind == "pairs" else {"reward_kind": reward_kind}
    if isinstance(requested, LogitsHyperparameters):
        soft = requested.advanced.loss
        return {"top_k": _or(soft.top_k, None), "soft_temperature": soft.temperature}
    return {}


def _of_preference(loss: Preference, beta: float | Auto) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "beta": _or(beta, _SIMPO_BETA if loss.type == "simpo" else 0.1),
        "preference_loss": loss.type,
        "length_normalize": loss.length_normalize,
        "label_smoothing": loss.label_smoothing,
        "gamma": _SIMPO_GAMMA if loss.type == "simpo" and loss.gamma is None else loss.gamma,
    }
    if loss.type == "kto":
        fields |= {
            "desirable_weight": 1.0 if loss.desirable_weight is None else loss.desirable_weight,
            "undesirable_weight": 1.0 if loss.undesirable_weight is None else loss.undesirable_weight,
        }
    return fields


def with_first_values(resolved: ResolvedOffline, first: Mapping[str, Any] | None) -> ResolvedOffline:
    """The hyperparameters of a job that started with `first`; None for a job that starts now."""
    return resolved if first is None else ResolvedOffline.model_validate({**resolved.model_dump(), **first})


def with_resolved_values(requested: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The requested hyperparameters with their resolved values, as the API shows them. A request may have all of it.

    A requested multiplier stays in place of the learning rate that it scales.
    """
    advanced = requested["advanced"]
    optimizer, lora, template = (dict(advanced[group]) for group in ("optimizer", "lora", "template"))
    if requested["learning_rate_multiplier"] == "auto":
        optimizer["learning_rate"] = resolved["learning_rate"]
    # Those of a tuned model that is trained further, unless the request has others.
    lora |= {name: resolved[f"lora_{name}"] for name in ("rank", "alpha", "targets")}
    known = {name: resolved[name] for name in ("batch_size", "n_epochs")}
    if "beta" in requested:
        known["beta"] = resolved["beta"]
    if requested["learning_rate_multiplier"] == "auto" and advanced["optimizer"]["learning_rate"] == "auto":
        known["learning_rate_multiplier"] = 1.0
    groups = {**advanced, "optimizer": optimizer, "lora": lora, "template": template}
    return {**requested, **known, "advanced": groups}


def _or(value: Any, automatic: Any) -> Any:
    return automatic if value == "auto" else value
