"""Translate pydantic's errors to OpenAI's format: one message, the dotted path of the field, and a code.

parse_grader uses this for grader specs, and api/http/validation_errors.py for all request bodies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graders.template import quoted

_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "a boolean",
    "dict_type": "an object",
    "list_type": "an array",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
    "text_or_list": "a string or an array",  # core/chat.py
}
_BOUNDS = {
    "greater_than_equal": (">=", "ge", "below_min_value", "below minimum"),
    "greater_than": (">", "gt", "below_min_value", "below minimum"),
    "less_than_equal": ("<=", "le", "above_max_value", "above maximum"),
    "less_than": ("<", "lt", "above_max_value", "above maximum"),
}
# The type fits, and the value does not.
_REJECTED = {
    "value_error",
    "string_too_short",
    "string_too_long",
    "string_pattern_mismatch",
    "too_short",
    "too_long",
}

Complaint = Mapping[str, Any]
"""One of pydantic's ErrorDetails."""


@dataclass(frozen=True)
class Mistake:
    """An error in user input. `param` is the dotted path of the invalid field, `code` the kind of error."""

    message: str
    param: str
    code: str


def first_of(complaints: Sequence[Complaint], sent: Any, prefix: str = "") -> tuple[str, list[Complaint]]:
    """Return the path of the first error in `sent`, below `prefix`, and all errors at that path."""
    located = [(_path(complaint, sent, prefix), complaint) for complaint in complaints]
    param = located[0][0]
    return param, [complaint for path, complaint in located if path == param]


def explain(param: str, complaints: Sequence[Complaint], notes: Mapping[str, str] | None = None) -> Mistake:
    """Build the error at `param`. Several complaints are merged into one: the value matches no branch of a union.

    If the type fits one branch, which rejects the value, only the message of that branch is returned.

    `notes` maps unsupported values to hints.
    """
    rejected = [complaint for complaint in complaints if complaint["type"] in _REJECTED]
    if len(rejected) == 1 and all(
        complaint["type"] in _EXPECTED for complaint in complaints if complaint is not rejected[0]
    ):
        complaints = rejected
    return (
        _no_branch(param, complaints) if len(complaints) > 1 else _single(param, complaints[0], notes or {})
    )


def _single(param: str, complaint: Complaint, notes: Mapping[str, str]) -> Mistake:
    kind, value, context = complaint["type"], complaint["input"], complaint.get("ctx", {})
    if kind == "missing":
        return missing(param)
    if kind == "extra_forbidden":
        return Mistake(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
    if kind in _EXPECTED:
        return wrong_type(param, _EXPECTED[kind], value)
    if kind == "literal_error" and isinstance(value, str):
        return unsupported(value, param, context["expected"], notes)
    if kind == "literal_error":
        return wrong_type(param, f"one of {context['expected']}", value)
    if kind in _BOUNDS:
        return _out_of_bounds(param, complaint)
    if kind in ("string_too_long", "string_too_short"):
        return _wrong_length(param, kind, len(value), context)
    if kind == "too_long":
        count, most = len(value), context["max_length"]
        message = f"Invalid '{param}': too many entries. Expected at most {most}, but got {count} instead."
        return Mistake(
            message, param, "object_above_max_properties" if isinstance(value, dict) else "too_long"
        )
    if kind == "too_short":
        least = context["min_length"]
        entries = "entry" if least == 1 else "entries"
        message = f"Invalid '{param}': expected at least {least} {entries}, but got {len(value)} instead."
        return Mistake(message, param, "too_short")
    if kind == "union_tag_not_found":  # the field that names the branch
        return missing(_tag(param, context))
    if kind == "union_tag_invalid":
        return unsupported(context["tag"], _tag(param, context), context["expected_tags"], notes)
    if kind == "string_pattern_mismatch":
        message = f"Invalid '{param}': expected a string that matches '{context['pattern']}'."
        return Mistake(message, param, "invalid_value")
    return invalid_value(param, f"{context.get('error') or complaint['msg']}.")


def _tag(param: str, context: Mapping[str, Any]) -> str:
    name = context["discriminator"].strip("'")
    return f"{param}.{name}".removeprefix(".")


def missing(param: str) -> Mistake:
    return Mistake(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def wrong_type(param: str, expected: str, value: object) -> Mistake:
    message = f"Invalid type for '{param}': expected {expected}, but got {json_type(value)} instead."
    return Mistake(message, param, "invalid_type")


def invalid_value(param: str, why: str) -> Mistake:
    return Mistake(f"Invalid value for '{param}': {why}", param, "invalid_value")


def unsupported(value: str, param: str, supported: str, notes: Mapping[str, str]) -> Mistake:
    message = f"Invalid value: {quoted(value)}.{notes.get(value, '')} Supported values are: {supported}."
    return Mistake(message, param, "invalid_value")


def _no_branch(param: str, complaints: Sequence[Complaint]) -> Mistake:
    """Describe a value that matches no branch of a union, such as `'auto' or an integer`, with all alternatives."""
    expected = " or ".join(_wanted(complaint) for complaint in complaints)
    value = complaints[0]["input"]
    # The last branch is the most specific: those before it are literals such as "auto".
    kind = complaints[-1]["type"]
    if kind in _BOUNDS:
        code = f"{_kind(complaints[-1])}_{_BOUNDS[kind][2]}"
        return Mistake(
            f"Invalid value for '{param}': expected {expected}, but got {value} instead.", param, code
        )
    if kind == "literal_error" and isinstance(value, str):
        return Mistake(
            f"Invalid value: {quoted(value)}. Supported values are: {expected}.", param, "invalid_value"
        )
    return wrong_type(param, expected, value)


def _wanted(complaint: Complaint) -> str:
    kind, context = complaint["type"], complaint.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"])
    if kind in _BOUNDS:
        sign, bound, *_ = _BOUNDS[kind]
        return f"{_number(complaint)} {sign} {_bound_text(context[bound])}"
    return _EXPECTED.get(kind, str(complaint["msg"]))


def _number(complaint: Complaint) -> str:
    return "an integer" if _kind(complaint) == "integer" else "a number"


def _kind(complaint: Complaint) -> str:
    """Name what the field wants by OpenAI's word, whatever was sent: its bound has the field's type."""
    bound = complaint["ctx"][_BOUNDS[complaint["type"]][1]]
    return "integer" if isinstance(bound, int) else "decimal"


def _out_of_bounds(param: str, complaint: Complaint) -> Mistake:
    sign, bound, code, words = _BOUNDS[complaint["type"]]
    limit = _bound_text(complaint["ctx"][bound])
    kind = _kind(complaint)
    expected = f"Expected a value {sign} {limit}, but got {complaint['input']} instead."
    return Mistake(f"Invalid '{param}': {kind} {words} value. {expected}", param, f"{kind}_{code}")


def _bound_text(bound: float) -> str:
    """With all digits if it is an integer."""
    return str(int(bound)) if abs(bound) <= 2**63 and bound == int(bound) else f"{bound:.15g}"


def _wrong_length(param: str, kind: str, length: int, context: Mapping[str, Any]) -> Mistake:
    side, word, code = (
        ("max", "long", "above_max") if kind == "string_too_long" else ("min", "short", "below_min")
    )
    side_name = {"max": "maximum", "min": "minimum"}[side]
    expected = f"Expected a string with {side_name} length {context[f'{side}_length']}"
    message = (
        f"Invalid '{param}': string too {word}. {expected}, but got a string with length {length} instead."
    )
    return Mistake(message, param, f"string_{code}_length")


def _path(complaint: Complaint, sent: Any, prefix: str) -> str:
    """Format the location of an error, such as `method.reinforcement.grader` or `tags[0]`.

    Keeps the steps that exist in `sent`, and a last one that is missing. Drops the steps that pydantic adds: the branch
    of a union, and "[key]".
    """
    path, here, loc = prefix, sent, complaint["loc"]
    for depth, step in enumerate(loc, 1):
        if isinstance(here, list) and isinstance(step, int):
            path += f"[{step}]"
            here = here[step]
        elif isinstance(here, Mapping) and step in here:
            path += f".{step}"
            here = here[step]
        elif isinstance(here, Mapping) and complaint["type"] == "missing" and depth == len(loc):
            path += f".{step}"
    return path.removeprefix(".")


def json_type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "an array"
        case _:
            return "an object"
