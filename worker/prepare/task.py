"""The prompts of a job, and the hyperparameters that it trains with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from core.database.tables import Job
from core.jobs import hyperparameters
from core.jobs import tools as job_tools
from core.jobs.distillation import hyperparameters_of
from core.jobs.hyperparameter_groups import RATIO_TO_SAMPLER, LoraTargets, names_experts
from core.jobs.hyperparameter_places import param_of
from core.jobs.hyperparameters import Hyperparameters, Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.model_templates import tools_problem
from core.response_format import stored_response_schema
from core.results.lineage import Parent
from core.tool_parsers import tool_parser_of
from graders.spec import parse_grader
from graders.weighted_sum import weighted_parts
from worker.attempt import Attempt
from worker.model import sizing
from worker.model.adapters import adapter_targets
from worker.model.architecture import without_weights
from worker.model.json_schema import schema_problem
from worker.model.parent import continuing
from worker.model.policy import read_config, read_tokenizer, render, set_arguments
from worker.model.reasoning import Reasoning, detect, plan_effort
from worker.model.sizing import Workload
from worker.model.template import with_fixed_clock
from worker.model.token_constraints import Bounds, UnsupportedTags, grammar_of
from worker.prepare.model import BaseModel
from worker.prepare.teachers import TeacherModel
from worker.refusals import InvalidTargets, UserMistake
from worker.rollout.episodes import EpisodeLimits, context_of
from worker.rollout.prompts import NoPassRate, PromptStream, PromptTooLong, tokenize
from worker.rollout.rows import Rows
from worker.types import Prompt

SomeSettings = TypeVar("SomeSettings", Resolved, ResolvedOffline)
NO_THOUGHTS = "thinking_budget needs a model that reasons, and this model's chat template has no thoughts."


@dataclass(frozen=True)
class PromptTask:
    """The training and validation prompts of a job, and the settings it trains with."""

    settings: Resolved
    train: PromptStream  # in the order of the epochs
    valid: list[Prompt]
    workload: Workload
    response_schema: str  # the schema that answers are JSON of, or ""
    tool_parser: str | None = None  # how the model writes calls; None: no row has tools
    episodes: EpisodeLimits | None = None  # None: calls of functions are not executed


def prepare_task(
    attempt: Attempt, rows: Rows, base: BaseModel, teacher: TeacherModel | None = None
) -> PromptTask:
    """Resolve the hyperparameters and render the prompts.

    Raises:
        UserMistake: a prompt is too long or lacks what prompts are ordered by, or the sampler does not do what a
            hyperparameter asks for.
    """
    job = attempt.job
    resolved, tokenizer = with_tokenizer(resolve(job, rows, base, teacher), base, job)
    parser = tool_parser_for(job, rows, base, tokenizer)
    train, valid = tokenized(
        job, rows, base, resolved, tokenizer, added=0 if teacher is None else teacher.added_tokens
    )
    schema = stored_response_schema(job.body.get("response_format"))
    refuse_what_is_not_sampled(job, base, resolved, tokenizer, schema)
    refuse_uncorrected(job, base, resolved)
    prompt = max(len(prompt.ids) for prompt in [*train, *valid])
    episodes = episode_limits(job, base.entry.context, prompt, resolved.max_completion_tokens)
    if episodes is not None and resolved.max_episode_tokens is None:  # a resumed job has it
        longest = min(episodes.calls * resolved.max_completion_tokens, base.entry.context)
        resolved = resolved.model_copy(update={"max_episode_tokens": longest})
    workload = sizing.workload(
        rank=resolved.lora_rank,
        targets=resolved.lora_targets,
        full=resolved.train == "full",
        references=resolved.reference_copies,
        copied=base.rows and base.sampler == "transformers",
        prompt=prompt if episodes is None else episodes.context - resolved.max_completion_tokens,
        completion=resolved.max_completion_tokens,
        batch=resolved.batch_size + resolved.resample_prompts,
        group=resolved.group_size,
        valid_rows=len(valid),
        eval_samples=resolved.eval_samples,
        off_policy_steps=resolved.off_policy_steps,
        has_values=resolved.has_values,
        undoes=resolved.step_kl > 0,
        limit=base.entry.context,
    )
    try:
        stream = PromptStream(
            train, batch_size=resolved.batch_size, seed=job.seed, order=resolved.prompt_order
        )
    except NoPassRate as cause:
        raise UserMistake("invalid_value", str(cause), "training_file") from cause
    return PromptTask(resolved, stream, valid, workload, schema, parser, episodes)


def episode_limits(job: Job, context: int, prompt: int, completion: int) -> EpisodeLimits | None:
    """The limits of the job's episodes; None: it has neither tools nor an agent.

    Args:
        context: of the model, in tokens.
        prompt: tokens of the longest prompt.
        completion: tokens of the longest answer of a call.
    """
    if not job_tools.has_episodes(job.body):
        return None
    calls = job_tools.steps_of(job.body)
    limits = EpisodeLimits(calls, context_of(context, prompt, completion, calls))
    environment = job.body.get("environment")
    return limits if environment is None else replace(limits, seconds=environment["timeout_s"])


def tool_parser_for(job: Job, rows: Rows, base: BaseModel, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The format in which the model writes calls; None: no row has tools.

    Raises:
        UserMistake: a row has tools, and prompts cannot have them or answers could not be read.
    """
    files = (("training_file", rows.train), ("validation_file", rows.valid))
    param, line = next(((param, row.line) for param, many in files for row in many if row.tools), ("", 0))
    if not param:
        return None
    template = tokenizer.chat_template
    if problem := tools_problem(job.model, base.entry.tool_parser, template):
        raise UserMistake("invalid_value", f"Line {line} has tools, and {problem}", param)
    return tool_parser_of(base.entry.tool_parser, template)


def resolve(job: Job, rows: Rows, base: BaseModel, teacher: TeacherModel | None) -> Resolved:
    asked = hyperparameters_of(job)
    named = None if asked.advanced.sampling.chat_template == "auto" else asked.advanced.sampling.chat_template
    reasoning = detect(read_tokenizer(base.entry, base.source, named))
    resolved = hyperparameters.resolve(
        asked,
        rows=len(rows.train),
        parameters=base.shape.parameters,
        context=base.entry.context,
        reasons=reasoning is not None and not reasoning.form.off,
    )
    resolved = continuing(with_effort(resolved, asked, reasoning), start_of_adapter(job, teacher))
    return with_parts(hyperparameters.with_first_values(resolved, job.resolved), job)


def with_parts(resolved: Resolved, job: Job) -> Resolved:
    """Add what the scale `each` needs to know of the job's multi grader."""
    if resolved.advantage_scale != "each":
        return resolved
    weights, invalid_grade = weighted_parts(parse_grader(job.body["grader"]))
    return resolved.model_copy(update={"part_weights": weights, "part_invalid_grade": invalid_grade})


def start_of_adapter(job: Job, teacher: TeacherModel | None) -> Parent | None:
    """The tuned model whose shape the job's adapter has, if there is one."""
    # An adapter that teaches takes turns with the student's own, so both have one shape.
    return Parent.of(job) or (None if teacher is None else teacher.adapter)


def with_tokenizer(
    resolved: SomeSettings, base: BaseModel, job: Job
) -> tuple[SomeSettings, PreTrainedTokenizerBase]:
    """The job's tokenizer with its chat template, and the settings with the time that this shows.

    Raises:
        UserMistake: layers with these names do not exist, or cannot have an adapter.
    """
    refuse_absent_targets(base, resolved.lora_targets, job.method)
    tokenizer = read_tokenizer(base.entry, base.source, resolved.chat_template)
    resolved = with_fixed_clock(resolved, tokenizer, job.created_at)
    set_arguments(tokenizer, resolved.chat_template_kwargs)
    return resolved, tokenizer


def tokenized(
    job: Job,
    rows: Rows,
    base: BaseModel,
    resolved: Resolved,
    tokenizer: PreTrainedTokenizerBase,
    *,
    added: int = 0,
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of both files. Raises UserMistake if one is too long. `added`: as in `tokenize`."""
    assert job.validation_file is not None, "the API requires one"
    room = {
        "context": base.entry.context,
        "max_completion_tokens": resolved.max_completion_tokens,
        "added": added,
    }

    def rendered(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return render(tokenizer, messages, tools=tools)

    param = "training_file"
    try:
        train = tokenize(rows.train, rendered, file=job.training_file, **room)
        param = "validation_file"
        valid = tokenize(rows.valid, rendered, file=job.validation_file, **room)
    except PromptTooLong as cause:
        raise UserMistake("prompt_too_long", str(cause), param) from cause
    return train, valid


def refuse_what_is_not_sampled(
    job: Job, base: BaseModel, resolved: Resolved, tokenizer: PreTrainedTokenizerBase, schema: str
) -> None:
    """Raises UserMistake: the sampler does not do what a hyperparameter or the response format asks for."""
    if resolved.off_policy_steps and base.sampler == "transformers":
        raise UserMistake(
            "invalid_value", hyperparameters.NO_SAMPLER_OF_ITS_OWN, "method.reinforcement.hyperparameters"
        )
    if resolved.continue_in_flight and base.fleet:
        raise UserMistake(
            "invalid_value", hyperparameters.NO_ENGINES_OF_ITS_OWN, param_of(job.method, "continue_in_flight")
        )
    if base.fleet and names_experts(resolved.lora_targets):
        raise UserMistake(
            "invalid_value", hyperparameters.NO_SLOTS_FOR_EXPERTS, param_of(job.method, "lora_targets")
        )
    if (schema or resolved.thinking_budget is not None) and (problem := schema_problem(tokenizer)):
        raise UserMistake("invalid_value", f"The model cannot do this: {problem}.", "model")
    if base.sampler == "vllm":
        try:
            grammar_of(detect(tokenizer), Bounds(schema, resolved.thinking_budget))
        except UnsupportedTags as cause:
            raise UserMistake("invalid_value", str(cause), "model") from cause


def refuse_uncorrected(job: Job, base: BaseModel, resolved: Resolved) -> None:
    """Raises UserMistake: the sampler quantizes activations, and nothing corrects for that."""
    is_uncorrected = resolved.importance == "none" and resolved.loss not in RATIO_TO_SAMPLER
    if base.quantizes_activations and is_uncorrected:
        raise UserMistake(
            "invalid_value",
            f"vLLM may quantize activations with the {base.quantization} weights of this model, so answers are not "
            "sampled by the policy that learns from them, and importance 'none' does not correct for that. Use "
            "importance 'truncate' or 'mask', or the model's files in bfloat16.",
            param_of(job.method, "importance"),
        )


def refuse_absent_targets(base: BaseModel, targets: LoraTargets, method: str) -> None:
    """Check the names before the weights are loaded.

    Raises:
        UserMistake: layers with these names do not exist, or cannot have an adapter.
    """
    if targets == "all-linear":
        return
    try:
        adapter_targets(without_weights(read_config(base.source)), targets)
    except InvalidTargets as cause:
        raise UserMistake(cause.code, str(cause), param_of(method, "lora_targets")) from cause


def is_off_policy(job: Job) -> bool:
    return hyperparameters_of(job).advanced.schedule.type == "off_policy"


def effort_of(job: Job) -> str:
    return hyperparameters_of(job).reasoning_effort


def with_effort(resolved: Resolved, requested: Hyperparameters, reasoning: Reasoning | None) -> Resolved:
    """Translate `reasoning_effort` to arguments of the chat template and a budget, where neither is given.

    Raises:
        UserMistake: a thinking_budget without thoughts, or without room for an answer.
    """
    param = param_of("reinforcement", "thinking_budget")
    if reasoning is None:
        if resolved.thinking_budget is not None:
            raise UserMistake(
                "invalid_value",
                NO_THOUGHTS,
                param,
            )
        return resolved
    longest, given = resolved.max_completion_tokens, resolved.thinking_budget
    effort = plan_effort(reasoning, requested.reasoning_effort, longest)
    budget = effort.budget if given is None else given
    if budget is not None and budget + len(reasoning.closing_ids) >= longest:
        if given is not None:
            raise UserMistake(
                "invalid_value",
                f"thinking_budget {given} leaves no room for an answer in max_completion_tokens {longest}.",
                param,
            )
        budget = None
    arguments = {**effort.arguments, **resolved.chat_template_kwargs}
    return resolved.model_copy(update={"chat_template_kwargs": arguments, "thinking_budget": budget})
