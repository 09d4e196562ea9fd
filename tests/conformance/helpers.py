"""What every script needs: rows as a file, the end of a job, and documented answers to compare with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, TypeVar

T = TypeVar("T")

FINAL = ("succeeded", "failed", "cancelled")


def jsonl(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def poll(ask: Callable[[], T], done: Callable[[T], Any], seconds: float = 240.0) -> T:
    """Ask until the answer is `done`, as scripts against OpenAI do. Raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not done(answer := ask()):
        assert time.monotonic() < deadline, f"still {answer!r} after {seconds:g} s"
        time.sleep(0.5)
    return answer


def finished(client: Any, job_id: str) -> Any:
    """The job, once its status is a final one."""
    return poll(lambda: client.fine_tuning.jobs.retrieve(job_id), lambda job: job.status in FINAL)


def started(client: Any, job_id: str) -> Any:
    """The first page of the job's events, once it holds the metrics of a step."""
    list_events = client.fine_tuning.jobs.list_events
    return poll(
        lambda: list_events(job_id, limit=100).data,
        lambda events: any(event.type == "metrics" and event.data["step"] >= 1 for event in events),
    )


def differs(value: Any, shape: Any, where: str = "answer") -> str | None:
    """The first place where `value`, parsed JSON, is not as documented; None where there is none.

    Args:
        shape: A type or a tuple of types; a dict of keys that must be there; a list with the shape of every
            element; a function that says whether a value is right; any other value stands for itself. More
            keys than documented are allowed: the client keeps them.
    """
    match shape:
        case dict():
            if not isinstance(value, dict):
                return f"{where} is {value!r}, not an object"
            if missing := shape.keys() - value.keys():
                return f"{where} lacks {sorted(missing)}"
            found = (differs(value[key], part, f"{where}.{key}") for key, part in shape.items())
            return next((one for one in found if one), None)
        case list():
            if not isinstance(value, list):
                return f"{where} is {value!r}, not a list"
            found = (differs(one, shape[0], f"{where}[{i}]") for i, one in enumerate(value))
            return next((one for one in found if one), None)
        case type() | tuple():
            types = shape if isinstance(shape, tuple) else (shape,)
            right = type(value) in types or (int in types and float in types and type(value) in (int, float))
            return None if right else f"{where} is {value!r}, not {shape}"
        case _ if callable(shape):
            return None if shape(value) else f"{where} is {value!r}"
        case _:
            return None if value == shape else f"{where} is {value!r}, not {shape!r}"


def assert_documented(value: Any, shape: Any) -> None:
    """Fail with the first place where an answer is not as documented. `value`: JSON, or an object of the client."""
    plain = value.to_dict(mode="json", warnings=False) if hasattr(value, "to_dict") else value
    assert differs(plain, shape) is None, differs(plain, shape)


def starts(*prefixes: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value.startswith(prefixes)


NUMBER = (int, float)
TEXT_OR_NULL = (str, NoneType)
INT_OR_NULL = (int, NoneType)

FILE = {
    "id": starts("file-"),
    "object": "file",
    "bytes": int,
    "created_at": int,
    "expires_at": INT_OR_NULL,
    "filename": str,
    "purpose": str,
    "status": "processed",
    "status_details": None,
}
UPLOAD = {
    "id": starts("upload_"),
    "object": "upload",
    "bytes": int,
    "created_at": int,
    "expires_at": int,
    "filename": str,
    "purpose": str,
    "status": str,
    "file": (dict, NoneType),
}
JOB = {
    "id": starts("ftjob-"),
    "object": "fine_tuning.job",
    "created_at": int,
    "finished_at": INT_OR_NULL,
    "estimated_finish": INT_OR_NULL,
    "model": str,
    "fine_tuned_model": TEXT_OR_NULL,
    "organization_id": starts("org-"),
    "status": lambda value: value in ("validating_files", "queued", "running", "paused", *FINAL),
    "training_file": starts("file-"),
    "validation_file": starts("file-"),
    "result_files": [starts("file-")],
    "trained_tokens": INT_OR_NULL,
    "error": None,
    "seed": int,
    "integrations": list,
    "metadata": (dict, NoneType),
    "method": {
        "type": "reinforcement",
        "reinforcement": {
            "grader": {"type": str, "name": str},
            "hyperparameters": {
                "batch_size": (int, str),
                "compute_multiplier": (int, float, str),
                "eval_interval": (int, str),
                "eval_samples": (int, str),
                "learning_rate_multiplier": (int, float, str),
                "n_epochs": (int, str),
                "reasoning_effort": str,
            },
            "response_format": (dict, NoneType),
        },
    },
    "user_provided_suffix": TEXT_OR_NULL,
    "usage_metrics": (dict, NoneType),
    "shared_with_openai": False,
    "eval_id": lambda value: value is None or value.startswith("eval_"),
}
NEW_JOB = JOB | {
    "status": "validating_files",
    "fine_tuned_model": None,
    "finished_at": None,
    "result_files": lambda value: value == [],
    "trained_tokens": None,
}
FINISHED_JOB = JOB | {
    "status": "succeeded",
    "fine_tuned_model": starts("ft:"),
    "finished_at": int,
    "result_files": lambda value: len(value) == 1 and value[0].startswith("file-"),
    "trained_tokens": int,
    "usage_metrics": dict,
}
EVENT = {
    "id": starts("ftevent-"),
    "object": "fine_tuning.job.event",
    "created_at": int,
    "level": lambda value: value in ("info", "warn", "error"),
    "message": str,
    "type": lambda value: value in ("message", "metrics"),
    "data": dict,
}
CHECKPOINT = {
    "id": starts("ftckpt_"),
    "object": "fine_tuning.job.checkpoint",
    "created_at": int,
    "fine_tuned_model_checkpoint": lambda value: value.startswith("ft:") and ":ckpt-step-" in value,
    "fine_tuning_job_id": starts("ftjob-"),
    "step_number": int,
    "metrics": {
        "step": NUMBER,
        "train_mean_reward": NUMBER,
        "full_valid_mean_reward": NUMBER,
        "completion_tokens_mean": NUMBER,
    },
}
PERMISSION = {
    "id": starts("cp_"),
    "object": "checkpoint.permission",
    "created_at": int,
    "project_id": starts("proj_"),
}
MODEL = {"id": str, "object": "model", "created": int, "owned_by": str}
CHAT = {
    "id": starts("chatcmpl-"),
    "object": "chat.completion",
    "created": int,
    "model": str,
    "choices": [
        {
            "index": int,
            "finish_reason": lambda value: value in ("stop", "length"),
            "message": {"role": "assistant", "content": str, "refusal": None},
            "logprobs": (dict, NoneType),
        }
    ],
    "usage": {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int},
}
RESPONSE = {
    "id": starts("resp_"),
    "object": "response",
    "created_at": NUMBER,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "instructions": TEXT_OR_NULL,
    "max_output_tokens": INT_OR_NULL,
    "model": str,
    "output": [
        {
            "type": "message",
            "id": starts("msg_"),
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": str, "annotations": list}],
        }
    ],
    "parallel_tool_calls": bool,
    "previous_response_id": None,
    "reasoning": {"effort": TEXT_OR_NULL, "summary": TEXT_OR_NULL},
    "store": bool,
    "temperature": NUMBER,
    "text": {"format": {"type": str}},
    "tool_choice": "auto",
    "tools": list,
    "top_p": NUMBER,
    "truncation": "disabled",
    "usage": {
        "input_tokens": int,
        "input_tokens_details": {"cached_tokens": int},
        "output_tokens": int,
        "output_tokens_details": {"reasoning_tokens": int},
        "total_tokens": int,
    },
    "user": TEXT_OR_NULL,
    "metadata": dict,
}
GRADER_ERRORS = {
    "formula_parse_error": bool,
    "sample_parse_error": bool,
    "sample_parse_error_details": TEXT_OR_NULL,
    "truncated_observation_error": bool,
    "unresponsive_reward_error": bool,
    "invalid_variable_error": bool,
    "invalid_variable_error_details": TEXT_OR_NULL,
    "other_error": bool,
    "python_grader_server_error": bool,
    "python_grader_server_error_type": TEXT_OR_NULL,
    "python_grader_runtime_error": bool,
    "python_grader_runtime_error_details": TEXT_OR_NULL,
    "model_grader_server_error": bool,
    "model_grader_server_error_details": TEXT_OR_NULL,
    "model_grader_refusal_error": bool,
    "model_grader_refusal_error_details": TEXT_OR_NULL,
    "model_grader_parse_error": bool,
    "model_grader_parse_error_details": TEXT_OR_NULL,
    "model_grader_exceeded_max_tokens_error": bool,
    "endpoint_grader_internal_error": bool,
    "endpoint_grader_internal_error_details": TEXT_OR_NULL,
    "endpoint_grader_server_error": bool,
    "endpoint_grader_server_error_details": TEXT_OR_NULL,
    "endpoint_grader_safety_check_error": bool,
}
TOKENS = {"prompt_tokens": int, "total_tokens": int, "completion_tokens": int, "cached_tokens": int}
GRADER_RUN = {
    "reward": NUMBER,
    "metadata": {
        "name": str,
        "type": str,
        "errors": GRADER_ERRORS,
        "execution_time": float,
        "scores": dict,
        "token_usage": (dict, NoneType),
        "sampled_model_name": TEXT_OR_NULL,
    },
    "sub_rewards": dict,
    "model_grader_token_usage_per_model": dict,
}
ERROR = {"error": {"message": str, "type": str, "param": TEXT_OR_NULL, "code": TEXT_OR_NULL}}


def flags(run: Mapping[str, Any]) -> set[str]:
    """The errors that a grader's run reports."""
    return {name for name, value in run["metadata"]["errors"].items() if value is True}
