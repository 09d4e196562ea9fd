"""Converts an OpenAI fine-tuning job to a job file, and reports the differences."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from regraft.requests import OF_THE_METHOD, InvalidRequestFile

# Keys of OpenAI's job object that are not parameters.
_OF_THE_RESULT = frozenset(
    "id object created_at finished_at estimated_finish fine_tuned_model organization_id status result_files "
    "trained_tokens error usage_metrics shared_with_openai eval_id usage".split()
)
_KEPT = ("seed", "metadata")
_AUTO = {
    "batch_size": "8 prompts per step, or all of a smaller file",
    "n_epochs": "as many as needed for about 20 steps, at most 10",
    "learning_rate_multiplier": "1, on a rate for LoRA that depends on the size of the model",
    "compute_multiplier": "1, which is 8 answers per prompt",
    "eval_interval": "ten validations per run",
    "eval_samples": "one greedy answer per row",
}
_FILES = {"training_file": "train.jsonl", "validation_file": "valid.jsonl"}
NO_MODEL = "CHOOSE-ONE"
# Methods that learn from the answers in their file; a validation file is optional.
_OFFLINE = ("supervised", "dpo")


@dataclass(frozen=True)
class Migration:
    """The text of a job file, and the differences: one sentence each, those that require action first."""

    text: str
    to_do: list[str]
    differs: list[str]
    body: dict[str, Any]  # of POST /fine_tuning/jobs, without the files


def migrate(params: Mapping[str, Any], *, model: str | None = None) -> Migration:
    """Convert the arguments of `fine_tuning.jobs.create`, or the job that it returned, to a job file.

    Without a method it is a supervised job, as at OpenAI.

    Raises:
        InvalidRequestFile: its method is unknown, or lacks a part.
    """
    method = params.get("method") or {"type": "supervised"}
    kind = method.get("type") if isinstance(method, Mapping) else method
    if kind in _OFFLINE:
        return _migrate_offline(params, kind, method.get(kind) or {}, model)
    if kind != "reinforcement":
        raise InvalidRequestFile(f"The job's method is {kind!r}, which is unknown here.")
    inside = method.get("reinforcement")
    if not isinstance(inside, Mapping) or not isinstance(inside.get("grader"), Mapping):
        raise InvalidRequestFile("The job has no method.reinforcement.grader.")
    to_do, differs = [*_to_do(params, inside, model)], [*_differs(params, inside)]
    job = _job(params, inside, model)
    comments = [f"# To do: {line}" for line in to_do]
    return Migration(
        "\n".join([*comments, *([""] if comments else []), toml(job)]), to_do, differs, _body(job)
    )


def _migrate_offline(
    params: Mapping[str, Any], kind: str, inside: Mapping[str, Any], model: str | None
) -> Migration:
    asked = inside.get("hyperparameters") or (params.get("hyperparameters") if kind == "supervised" else None)
    hyperparameters = {name: value for name, value in (asked or {}).items() if value is not None}
    suffix = params.get("suffix") or params.get("user_provided_suffix")
    job = {
        "model": model or NO_MODEL,
        **{field: name for field, name in _FILES.items() if params.get(field) or field == "training_file"},
        "suffix": suffix or None,
        **{name: params.get(name) for name in _KEPT},
        "integrations": [*_wandb(params)] or None,
        "method": {"type": kind, kind: {"hyperparameters": hyperparameters}},
    }
    job = {name: value for name, value in job.items() if value is not None}
    to_do = [*_choose_model(params, model), *_download(params, required=("training_file",))]
    differs = [
        'hyperparameters: "auto" follows OpenAI\'s rule for n_epochs; batch_size is rows / 20, at most 16.',
        *_rate(hyperparameters),
        "Rows that are longer than the model's context fail the job with their line numbers; OpenAI cuts them.",
        "Rows may not have images; `regraft convert FILE --to sft` writes `functions` as tools.",
    ]
    comments = [f"# To do: {line}" for line in to_do]
    text = "\n".join([*comments, *([""] if comments else []), toml(job)])
    return Migration(text, to_do, differs, {name: value for name, value in job.items() if name not in _FILES})


def _rate(hyperparameters: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(hyperparameters.get("learning_rate_multiplier"), int | float):
        yield "hyperparameters.learning_rate_multiplier scales our own base rate, which is not OpenAI's."


def _choose_model(params: Mapping[str, Any], model: str | None) -> Iterator[str]:
    if model is None:
        model_name = params.get("model")
        yield f"model: {model_name} is OpenAI's. Choose one of `regraft models list`."


def _download(params: Mapping[str, Any], *, required: Collection[str]) -> Iterator[str]:
    for field, name in _FILES.items():
        if file := params.get(field):
            yield f"{field}: {file} is at OpenAI. Download it as {name}: client.files.content({file!r})."
        elif field in required:
            yield f"{field}: not set, but required here. Hold out some rows as {name}."


def _job(params: Mapping[str, Any], inside: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    hyperparameters = {
        name: value for name, value in (inside.get("hyperparameters") or {}).items() if value is not None
    }
    suffix = params.get("suffix") or params.get("user_provided_suffix")
    job = {
        "model": model or NO_MODEL,
        **_FILES,
        "suffix": suffix or None,
        **{name: params.get(name) for name in _KEPT},
        "integrations": [*_wandb(params)] or None,
        "hyperparameters": hyperparameters or None,
        "response_format": inside.get("response_format"),
        "tools": inside.get("tools") or None,
        "max_episode_steps": inside.get("max_episode_steps") if inside.get("tools") else None,
        "grader": inside["grader"],
    }
    return {name: value for name, value in job.items() if value is not None}


def _body(job: Mapping[str, Any]) -> dict[str, Any]:
    inside = {name: job[name] for name in OF_THE_METHOD if name in job}
    rest = {name: value for name, value in job.items() if name not in (*OF_THE_METHOD, *_FILES)}
    return rest | {"method": {"type": "reinforcement", "reinforcement": inside}}


def _wandb(params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The job's integrations, all of this type, without the fields that OpenAI's response adds."""
    for one in params.get("integrations") or []:
        if isinstance(one, Mapping) and isinstance(place := one.get("wandb"), Mapping):
            asked = {name: value for name, value in place.items() if name != "run_id" and value is not None}
            yield {"type": "wandb", "wandb": asked}


def _to_do(params: Mapping[str, Any], inside: Mapping[str, Any], model: str | None) -> Iterator[str]:
    yield from _choose_model(params, model)
    yield from _download(params, required=_FILES)
    for where, grader in _graders(inside["grader"], "grader"):
        match grader.get("type"):
            case "score_model" | "label_model":
                yield (
                    f"{where}.model: {grader.get('model')} must be a judge configured by the operator of this server "
                    "(docs/howto/graders.md)."
                )
            case "endpoint":
                yield f"{where}: the operator of the server must allow its host, and its headers must be set again."
            case "text_similarity" if grader.get("evaluation_metric") == "cosine":
                yield f"{where}.evaluation_metric: cosine needs an embedding model and is not supported."


def _differs(params: Mapping[str, Any], inside: Mapping[str, Any]) -> Iterator[str]:
    hyperparameters = inside.get("hyperparameters") or {}
    effort = hyperparameters.get("reasoning_effort")
    if effort not in (None, "default"):
        yield f"hyperparameters.reasoning_effort: {effort} has an effect on models that reason only."
    automatic = [
        f"{name} is {meaning}"
        for name, meaning in _AUTO.items()
        if hyperparameters.get(name, "auto") in (None, "auto")
    ]
    if automatic:
        yield f'hyperparameters: OpenAI does not document its "auto". Here {"; ".join(automatic)}.'
    yield from _rate(hyperparameters)
    if [*_wandb(params)]:
        yield "integrations: W&B runs use the account of the server's operator, who must enable W&B."
    if inside.get("tools"):
        yield "tools: the server's operator must allow the hosts of your tools, and their headers must be sent again."
    suffix = params.get("suffix") or params.get("user_provided_suffix")
    if suffix and _suffix(suffix) != suffix:
        yield f"suffix: {suffix!r} appears as {_suffix(suffix)!r} in the name of the model."
    unknown = params.keys() - _OF_THE_RESULT - {
        *_KEPT, *_FILES, "model", "method", "suffix", "user_provided_suffix", "integrations", "hyperparameters",
        "trainingType",
    }  # fmt: skip
    if params.get("hyperparameters"):
        yield "hyperparameters at the top level is left out: it belongs to supervised jobs and is rejected here."
    for name in sorted(unknown):
        yield f"{name} is left out: it is not a parameter here."
    for where, grader in _graders(inside["grader"], "grader"):
        if grader.get("type") == "python":
            yield f"{where}: python graders run on the server with the packages it has; try it with `graders run`."
            break
    yield "Rows may not have images; `regraft validate train.jsonl --grader job.toml` finds them."
    yield "An answer that cannot be graded is left out and reported; at OpenAI it counts as a bad one."
    yield "The result file is plain CSV; OpenAI's is base64."


def _graders(grader: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield where, grader
    subs = grader.get("graders")
    named = subs.items() if isinstance(subs, Mapping) else enumerate(subs if isinstance(subs, list) else [])
    for key, sub in named:
        if isinstance(sub, Mapping):
            yield from _graders(sub, f"{where}.graders.{key}")


def _suffix(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")


def toml(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """A table as TOML: values first, then its tables. Nulls are omitted, since TOML has none."""
    values = {key: value for key, value in table.items() if not _is_table(value) and value is not None}
    tables = {key: value for key, value in table.items() if _is_table(value)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in values.items()]
    for key, value in tables.items():
        where = (*path, key)
        head = f"[{'.'.join(map(_key, where))}]"
        below = toml(value, where)
        # A table that contains only tables needs no header.
        bare = bool(value) and all(_is_table(inner) for inner in value.values())
        lines += ([""] if lines else []) + ([below] if bare else [head, below])
    return "\n".join(line for line in lines).rstrip("\n") + ("\n" if not path else "")


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _basic(key)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value if item is not None)}]"
    return json.dumps(value)


def _string(text: str) -> str:
    # Code stays readable on multiple lines. A literal string has no escapes.
    readable = all(one.isprintable() or one in "\n\t" for one in text)
    if "\n" in text and readable and "'''" not in text and not text.endswith("'"):
        return f"'''\n{text}'''"
    return _basic(text)


def _basic(text: str) -> str:
    # JSON escapes are valid in TOML, except for surrogate pairs, which ensure_ascii would produce.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
