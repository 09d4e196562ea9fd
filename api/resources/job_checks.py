"""Checks of a request for a job: its graders, models, teachers, and hyperparameters that do not fit together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from api.http.deps import Service
from api.http.schema_checks import refuse_unusable_schema
from api.resources.graders import refuse
from api.resources.integrations import to_rows
from api.resources.job_body import MAX_MULTIPLIER, JobCreate, Method, Reinforcement
from api.resources.tool_checks import usable_tools
from core.database.tables import GraderAudit, Preview, Project
from core.errors import InvalidRequest, NotFound
from core.jobs import distillation, estimates, full, methods, resources
from core.jobs.budgets import Price
from core.jobs.devices import device_of
from core.jobs.distillation import Distillation, OnPolicyDistillation
from core.jobs.hyperparameter_groups import Lora, names_experts
from core.jobs.hyperparameter_places import param_at, param_of
from core.jobs.hyperparameters import NO_ENGINES_OF_ITS_OWN, NO_SAMPLER_OF_ITS_OWN, NO_SLOTS_FOR_EXPERTS
from core.jobs.params import GRADER_PARAM, SHADOW_PARAM, TEACHER_PARAM
from core.model_templates import is_reasoning
from core.registry import BaseModelEntry, SamplerName, sampler_of
from core.results import grader_audits, lineage, previews
from core.results.grader_audit_report import enough_rows, is_enough, worst_kind
from core.results.lineage import Parent
from core.settings import Settings
from core.storage import files
from core.stored_graders import behavior_of
from graders.build import reward_model_parts
from graders.spec import dump

AJob = TypeVar("AJob", bound=JobCreate)


@dataclass(frozen=True)
class Accepted:
    """The validated parts of a job request, without its files."""

    base_model: str  # aliases are resolved
    parent: Parent | None  # the tuned model that the job trains further
    model: BaseModelEntry
    gpu_class: str
    budget: dict[str, Any] | None
    integrations: list[dict[str, Any]]


@dataclass(frozen=True)
class EarlierRuns:
    """The preview of the same request, and the audit that the request is refused without."""

    preview: Preview | None = None
    audit: GraderAudit | None = None


def earlier_runs(body: JobCreate, model: BaseModelEntry, project: Project, service: Service) -> EarlierRuns:
    """Find the runs that a job shows in its events.

    Raises:
        InvalidRequest: the named preview has another request, or the audit does not allow the job.
    """
    audit = audit_of(body, project, service)
    return EarlierRuns(preview_of(body, model, project, service), audit)


def preview_of(body: JobCreate, model: BaseModelEntry, project: Project, service: Service) -> Preview | None:
    """The preview that the request names, else the newest completed one of the same request.

    Raises:
        InvalidRequest: the named preview has another request.
    """
    asked = body.method.reinforcement
    if asked is None:
        return None
    with service.database.read() as session:
        training = files.get_dataset(session, project.id, body.training_file, param="training_file")
        if body.preview is None and not previews.has_some(session, project.id, training.sha256):
            return None
    chosen = asked.hyperparameters
    reasons = is_reasoning(model, service.settings.model_cache, chosen.advanced.sampling.chat_template)
    settings = estimates.sizes(chosen, rows=1, context=model.context, reasons=reasons)
    wanted = previews.parts_of(body.model, model, body.method_body(), settings, training.sha256)
    with service.database.read() as session:
        if body.preview is not None:
            return previews.preview_of_job(session, project.id, body.preview, wanted)
        return previews.matching(session, project.id, training.sha256, wanted)


async def usable_body(body: AJob, service: Service, project: Project) -> AJob:
    """Reject a grader or a tool that this server cannot run, and a schema that cannot be enforced.

    Together with `accept` these are the validation rules of a job. A queued check holds no thread.

    Returns:
        The body, whose tools of MCP servers have the functions that were read from them.
    """
    asked = body.method.reinforcement
    if asked is None:
        return body
    await refuse(asked.grader, service, project, GRADER_PARAM, in_job=True)
    if asked.shadow_grader is not None:
        await refuse(asked.shadow_grader, service, project, SHADOW_PARAM)
    where = "method.reinforcement.response_format"
    await refuse_unusable_schema(asked.response_format, where, service, project)
    return body.with_tools(await usable_tools(asked.tools, service, project)) if asked.tools else body


def audit_of(body: JobCreate, project: Project, service: Service) -> GraderAudit | None:
    """The newest audit of the job's grader on its training file, if the request asks for one.

    Raises:
        InvalidRequest: there is none that tells enough, its verdict is stop, or more answers of some kind that needs
            no knowledge passed than the request allows.
    """
    if body.audit is None:
        return None
    spec = dump(body.reinforcement("An audit").grader)
    with service.database.read() as session:
        training = files.get_dataset(session, project.id, body.training_file, param="training_file")
        audit = grader_audits.newest(session, project.id, behavior_of(spec), training.sha256)
    if audit is None or audit.report is None:
        raise InvalidRequest(
            "This grader has no completed audit on this training_file: create one with POST "
            "/v1/regraft/graders/audit, or leave 'audit' out.",
            param="audit",
            code="grader_not_audited",
        )
    report = grader_audits.REPORT.validate_python(audit.report)
    worst = worst_kind(report.kinds)
    if worst is None or worst.share is None or not is_enough(report.coverage):
        raise InvalidRequest(
            f"The audit {audit.id} of this grader tells too little: it graded {report.coverage.rows} rows"
            f"{'' if report.coverage.is_complete else ' until its budget was used up'}, and at least "
            f"{enough_rows(report.coverage)} are needed. Create another one with more rows or a larger budget.",
            param="audit",
            code="grader_not_audited",
        )
    if report.verdict == "stop":
        raise InvalidRequest(
            f"The audit {audit.id} of this grader stops: {report.sentence}",
            param="audit",
            code="grader_blocked",
        )
    share = worst.share["expected"]
    if share > body.audit.block_above:
        raise InvalidRequest(
            f"In the audit {audit.id} {worst.passed} of {worst.answers} answers of the kind {worst.kind} pass the "
            f"grader, {share:.3f} of the graded ones, and block_above is {body.audit.block_above:g}. {report.sentence}",
            param="audit.block_above",
            code="grader_blocked",
        )
    return audit


def accept(body: JobCreate, service: Service, project: Project) -> Accepted:
    """Check a request that passed `usable_body` against this installation.

    Creating a job and validating one share these rules.
    """
    base_model, parent = start(body, service, project)
    if body.method.distillation is not None:
        refuse_unusable_teacher(body.method.distillation, base_model, parent, service, project)
    if body.method.reinforcement is not None:
        refuse_unusable_reward_models(body.method.reinforcement, base_model, service, project)
    refuse_full_context(body.method, service.registry.get(base_model).context)
    refuse_unusable_full(body.method, base_model, service)
    refuse_absurd_learning_rate(body.method)
    model = usable_model(body, base_model, service)
    return Accepted(
        base_model=base_model,
        parent=parent,
        model=model,
        gpu_class=model.gpu_class or service.settings.gpu_class,
        budget=body.budget.to_row(Price.of(service.settings)) if body.budget else None,
        integrations=to_rows(body.integrations, service.settings.enabled_integrations),
    )


def refuse_unusable_resources(
    body: JobCreate, base_model: str, model: BaseModelEntry, settings: Settings
) -> None:
    """Check the GPUs and nodes that the request chose.

    Raises:
        InvalidRequest: the operator does not allow them, an engine of the model needs more, or all weights are to be
            trained on several nodes.
    """
    gpu_class, asked = model.gpu_class or settings.gpu_class, body.resources
    resources.refuse_beyond(settings, gpu_class, asked.gpus, asked.nodes)
    chosen = resources.resources_of(settings, gpu_class, asked.gpus, asked.nodes)
    if chosen is None:
        return
    if not body.method.learns_from_file:
        resources.refuse_small(settings, gpu_class, chosen, base_model, model)
    if chosen.nodes > 1 and body.method.is_full:
        raise InvalidRequest(
            f"train 'full' is for one node, and the job has {chosen.nodes}. Send 'resources.nodes' 1, or train 'lora'.",
            param="resources.nodes",
        )


def refuse_absurd_learning_rate(method: Method) -> None:
    """Refuse a multiplier that makes any learning rate larger than 1, which ruins every model.

    Raises:
        InvalidRequest: it is above MAX_MULTIPLIER.
    """
    asked = getattr(getattr(method, method.type), "hyperparameters", None)
    multiplier = getattr(asked, "learning_rate_multiplier", "auto")
    if isinstance(multiplier, float) and multiplier > MAX_MULTIPLIER:
        param = f"method.{method.type}.hyperparameters.learning_rate_multiplier"
        raise InvalidRequest(
            f"Invalid value for '{param}': {multiplier:g} is above {MAX_MULTIPLIER:g}. Times the automatic learning "
            "rate it would exceed 1.",
            param=param,
        )


def refuse_unusable_full(method: Method, base_model: str, service: Service) -> None:
    """Refuse what cannot be done with all weights of a model (`train: "full"`). The worker knows the model's size.

    Raises:
        InvalidRequest: runs have several machines, a fleet samples the model, or a reward model is to grade.
    """
    asked = method.reinforcement
    if not method.is_full:
        return
    param = param_at(method.type, "train")
    if problem := full.several_machines(service.settings):
        raise InvalidRequest(problem, param=param)
    if asked is None:
        return
    for where, part in reward_model_parts(asked.grader, GRADER_PARAM):
        raise InvalidRequest(
            f"The reward model '{part.model}' is an adapter on the base model, whose weights change in a job with "
            "train 'full'. Use another grader, or train 'lora'.",
            param=f"{where}.model",
        )
    if problem := full.problem(base_model, service.settings):
        raise InvalidRequest(problem, param=param)


def refuse_full_context(method: Method, context: int) -> None:
    """Refuse answers that leave no room for a prompt in the context.

    Raises:
        InvalidRequest: `max_completion_tokens` is not less than the context.
    """
    if method.reinforcement is not None:
        asked = method.reinforcement.hyperparameters
    elif isinstance(method.distillation, OnPolicyDistillation):
        asked = method.distillation.hyperparameters.as_reinforcement()
    else:
        return
    longest = asked.advanced.sampling.max_completion_tokens
    if longest != "auto" and longest >= context:
        raise InvalidRequest(
            f"max_completion_tokens {longest} leaves no room for a prompt in the model's context of {context} tokens.",
            param=param_of(method.type, "max_completion_tokens"),
        )


def start(body: JobCreate, service: Service, project: Project) -> tuple[str, Parent | None]:
    """The base model of the job, and the tuned model that it trains further.

    Raises:
        InvalidRequest: the job asks for an adapter of another shape than the one that it continues, or for one that its
            sampler does not compute.
    """
    base_model, parent = _start(body, service, project)
    _refuse_unsampled_experts(body.method, base_model, parent, service.settings)
    return base_model, parent


def _refuse_unsampled_experts(
    method: Method, base_model: str, parent: Parent | None, settings: Settings
) -> None:
    if method.learns_from_file or base_model not in settings.samplers:
        return
    advanced = getattr(method, method.type).hyperparameters.advanced
    targets = advanced.lora.targets
    if targets == "auto" and parent is not None and not parent.is_whole:
        targets = parent.settings["lora_targets"]
    if names_experts(targets):
        raise InvalidRequest(NO_SLOTS_FOR_EXPERTS, param=param_of(method.type, "lora_targets"))


def _start(body: JobCreate, service: Service, project: Project) -> tuple[str, Parent | None]:
    with service.database.read() as session:
        base_model, parent = lineage.start_of(
            session,
            project.id,
            body.model,
            service.registry,
            reward_model=body.method.type == methods.REWARD_MODEL,
        )
    if parent is None:
        return base_model, None
    method = body.method
    asked = (
        method.supervised
        or method.dpo
        or method.reward_model
        or method.distillation
        or body.reinforcement("An adapter")
    )
    advanced = asked.hyperparameters.advanced
    if advanced.train != parent.train:
        raise _trained_otherwise(body.model, parent, param_at(method.type, "train"))
    if parent.is_whole:
        return base_model, parent
    lora = advanced.lora
    _refuse_grown_experts(method, lora, parent)
    parent = _grown(lora, parent)
    if (other := _other_shape(lora, parent.shape)) is not None:
        param = param_of(method.type, f"lora_{other}")
        if parent.grown_rank is not None and other == "alpha":
            raise InvalidRequest(
                f"lora rank {lora.rank} on top of the adapter of '{body.model}' needs alpha "
                f"{parent.shape['lora_alpha']}, which keeps its alpha / rank: send that, or leave alpha out.",
                param=param,
            )
        raise InvalidRequest(
            f"'{body.model}' has an adapter with lora {other} {parent.settings[f'lora_{other}']}, which the job trains "
            "further: leave that out. A larger rank, at the same alpha / rank, freezes it and learns a new one on top.",
            param=param,
        )
    return base_model, parent


def _trained_otherwise(name: str, parent: Parent, param: str) -> InvalidRequest:
    """The refusal of a job that would train an adapter on a whole model, or all weights below an adapter."""
    if parent.is_whole:
        return InvalidRequest(
            f"'{name}' is a whole model, trained with train 'full'. Only jobs with train 'full' train it further in "
            "this version.",
            param=param,
        )
    return InvalidRequest(
        f"'{name}' is a LoRA adapter, and train 'full' trains the weights of a base model or of a model that was "
        "trained with it. Leave train out, or have the operator add the merged model to the registry (`regraft-server "
        "export --format merged`).",
        param=param,
    )


def _refuse_grown_experts(method: Method, lora: Lora, parent: Parent) -> None:
    asked_rank = lora.rank if "rank" in lora.model_fields_set else 0
    if asked_rank > parent.settings["lora_rank"] and names_experts(parent.settings["lora_targets"]):
        raise InvalidRequest(
            f"'{parent.model}' has an adapter on experts, which is not trained further with a larger rank: leave "
            "lora.rank out.",
            param=param_of(method.type, "lora_rank"),
        )


def _grown(lora: Lora, parent: Parent) -> Parent:
    """The parent with the larger rank that the request asks for, if any."""
    rank, alpha = (parent.settings[f"lora_{name}"] for name in ("rank", "alpha"))
    asks = "rank" in lora.model_fields_set and isinstance(lora.rank, int) and lora.rank > rank
    # An alpha that is no whole number cannot have the parent's alpha / rank.
    return replace(parent, grown_rank=lora.rank) if asks and alpha * lora.rank % rank == 0 else parent


def _other_shape(lora: Lora, shape: Mapping[str, Any]) -> str | None:
    """The field in which an adapter of this shape differs from what a request asks for."""
    return next(
        (
            name
            for name in sorted(lora.model_fields_set)
            if getattr(lora, name) not in ("auto", shape[f"lora_{name}"])
        ),
        None,
    )


def refuse_unusable_reward_models(
    method: Reinforcement, base_model: str, service: Service, project: Project
) -> None:
    """Check the reward models that grade answers of a job on `base_model`.

    Raises:
        TunedModelNotFound, ModelNotFound: the project may use no model of this name.
        InvalidRequest: it is no reward model, on another base model, or gives no steps to a job that needs them.
    """
    for where, part in reward_model_parts(method.grader, GRADER_PARAM):
        param = f"{where}.model"
        with service.database.read() as session:
            model = lineage.grading_model(
                session, project.id, part.model, base_model, service.registry, param=param
            )
        of_steps = method.hyperparameters.advanced.supervision == "process"
        if of_steps and part is method.grader and model.reward_kind != "steps":
            raise InvalidRequest(
                f"supervision 'process' needs a grader that scores steps, and the reward model '{part.model}' gives "
                "one score per answer: it learned from rows without step_labels.",
                param=param,
            )


def _checkpoint_of(tuned: Parent | None) -> str | None:
    return None if tuned is None else tuned.checkpoint_id


def refuse_unusable_teacher(
    method: Distillation, base_model: str, parent: Parent | None, service: Service, project: Project
) -> None:
    """Check the teacher of a student on `base_model`. Whether both have the same tokenizer is for the worker to say.

    Raises:
        TunedModelNotFound, ModelNotFound: the project may use no model of this name.
        InvalidRequest: it is what the student starts from, or its adapter is on another base model or has another shape
            than the student's.
    """
    name = method.teacher.model
    try:
        with service.database.read() as session:
            teacher_base, teacher = lineage.start_of(
                session, project.id, name, service.registry, param=TEACHER_PARAM
            )
    except NotFound as absent:
        if name in service.backends.models:
            refuse_unusable_server(method)
            return
        absent.message += (
            " A model on a server teaches once the operator has named it under [models] in REGRAFT_GRADERS_FILE "
            "(docs/howto/distillation.md)."
        )
        raise
    if (teacher_base, _checkpoint_of(teacher)) == (base_model, _checkpoint_of(parent)):
        raise InvalidRequest(
            f"The teacher '{name}' is the model that the student starts from: there is nothing to learn from it.",
            param=TEACHER_PARAM,
        )
    if teacher is None:
        return
    if teacher.is_whole:
        raise InvalidRequest(
            f"The teacher '{name}' is a whole model, trained with train 'full'. Only base models, adapters and models "
            "on a server teach in this version (docs/howto/distillation.md).",
            param=TEACHER_PARAM,
        )
    if teacher_base != base_model:
        raise InvalidRequest(distillation.other_base(name, teacher_base, base_model), param=TEACHER_PARAM)
    student = method.hyperparameters.advanced.lora
    differs = _other_shape(student, teacher.shape)
    if differs is None and parent is not None:
        differs = next((one for one in lineage.SHAPE if parent.shape[one] != teacher.shape[one]), None)
    if differs is not None:
        raise InvalidRequest(
            f"The adapter of the teacher '{name}' has another {differs.removeprefix('lora_')} than the student's. "
            "They take turns on one base model, so they need the same shape: leave 'lora' out.",
            param=TEACHER_PARAM,
        )


def refuse_unusable_server(method: Distillation) -> None:
    """Check what a teacher on a server cannot do. Whether it has the student's tokenizer is for the worker to say.

    Raises:
        InvalidRequest: the loss needs the whole vocabulary, or another temperature than 1.
    """
    if isinstance(method, distillation.OnPolicyDistillation):
        temperature = method.hyperparameters.advanced.sampling.temperature
        param = param_of(distillation.METHOD, "temperature")
    else:
        loss = method.hyperparameters.advanced.loss
        temperature, param = loss.temperature, param_at(distillation.METHOD, "loss.temperature")
        if loss.top_k == "auto" or loss.top_k > distillation.MAX_SERVED_TOP_K:
            raise InvalidRequest(
                f"The teacher '{method.teacher.model}' is on a server, which gives the probabilities of its likeliest "
                f"tokens and not those of the whole vocabulary: set top_k, to at most "
                f"{distillation.MAX_SERVED_TOP_K}. vLLM gives 20 unless it was started with --max-logprobs.",
                param=param_at(distillation.METHOD, "loss.top_k"),
            )
    if temperature != 1:
        raise InvalidRequest(
            f"The teacher '{method.teacher.model}' is on a server, which gives log-probabilities at temperature 1, not "
            f"{temperature:g}.",
            param=param,
        )


def usable_model(body: JobCreate, base_model: str, service: Service) -> BaseModelEntry:
    """Return the model to train; reject requests that this service cannot fulfill with it."""
    model = service.registry.get(base_model)
    refuse_unusable_resources(body, base_model, model, service.settings)
    asked = body.method.reinforcement
    if asked is None:
        return model
    advanced = asked.hyperparameters.advanced
    sampler = _known_sampler(base_model, model, service.settings, adapters=advanced.train == "lora")
    if advanced.schedule.type == "off_policy" and sampler == "transformers":
        where = param_of("reinforcement", "off_policy_steps")
        raise InvalidRequest(NO_SAMPLER_OF_ITS_OWN, param=where)
    continues = advanced.schedule.type == "off_policy" and advanced.schedule.continue_in_flight
    if continues and base_model in service.settings.samplers:
        where = param_of("reinforcement", "continue_in_flight")
        raise InvalidRequest(NO_ENGINES_OF_ITS_OWN, param=where)
    return model


def _known_sampler(
    name: str, model: BaseModelEntry, settings: Settings, *, adapters: bool
) -> SamplerName | None:
    """None: it depends on the worker, which validates the request before it loads the model."""
    if name in settings.samplers:
        return "vllm"
    gpu_class = model.gpu_class or settings.gpu_class
    choice = settings.of_class(gpu_class).sampler
    device = device_of(settings, gpu_class)
    return sampler_of(model, choice, device, vllm_installed=None, adapters=adapters)
