"""Pydantic's complaints in OpenAI's words: one message, the dotted path of the field, and a code."""

from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import InvalidRequest
from graders.spec import InvalidGrader

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
}
_BOUNDS = {
    "greater_than_equal": (">=", "ge", "below_min_value", "below minimum"),
    "greater_than": (">", "gt", "below_min_value", "below minimum"),
    "less_than_equal": ("<=", "le", "above_max_value", "above maximum"),
    "less_than": ("<", "lt", "above_max_value", "above maximum"),
}

Complaint = Mapping[str, Any]
"""One of pydantic's ErrorDetails."""


def explain(complaints: Sequence[Complaint], sent: Any) -> InvalidRequest:
    """The first thing wrong with what was `sent`. A value that fits no branch of a union is one thing."""
    located = [(_path(complaint, sent), complaint) for complaint in complaints]
    param = located[0][0]
    about = [complaint for path, complaint in located if path == param]
    if len(about) > 1:
        return _no_branch(param, about)
    return _single(param, about[0])


def _single(param: str, complaint: Complaint) -> InvalidRequest:
    kind, value, context = complaint["type"], complaint["input"], complaint.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, InvalidGrader):  # has said it better, and knows the path inside the grader
        return InvalidRequest(cause.message, param=cause.param, code=cause.code)
    if not param:
        return _whole_body(complaint)
    if kind == "missing":
        return _refusal(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        return _refusal(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
    if kind in _EXPECTED:
        return _wrong_type(param, _EXPECTED[kind], value)
    if kind == "literal_error" and isinstance(value, str):
        supported = f"Supported values are: {context['expected']}."
        return _refusal(f"Invalid value: {_shown(value)}. {supported}", param)
    if kind == "literal_error":
        return _wrong_type(param, f"one of {context['expected']}", value)
    if kind in _BOUNDS:
        return _out_of_bounds(param, complaint)
    if kind in ("string_too_long", "string_too_short"):
        return _wrong_length(param, kind, len(value), context)
    if kind == "too_long":
        count, most = len(value), context["max_length"]
        message = f"Invalid '{param}': too many entries. Expected at most {most}, but got {count} instead."
        return _refusal(
            message, param, "object_above_max_properties" if isinstance(value, dict) else "too_long"
        )
    if kind == "string_pattern_mismatch":
        return _refusal(f"Invalid '{param}': expected a string that matches '{context['pattern']}'.", param)
    return _refusal(f"Invalid value for '{param}': {cause or complaint['msg']}.", param)


def _no_branch(param: str, complaints: Sequence[Complaint]) -> InvalidRequest:
    """`'auto' or an integer` got neither: say all that it could have been."""
    expected = " or ".join(_wanted(complaint) for complaint in complaints)
    value = complaints[0]["input"]
    # The last branch is the one that says most: those before it are words such as "auto".
    kind = complaints[-1]["type"]
    if kind in _BOUNDS:
        code = f"{_number(complaints[-1]).split()[-1]}_{_BOUNDS[kind][2]}"
        return _refusal(
            f"Invalid value for '{param}': expected {expected}, but got {value} instead.", param, code
        )
    if kind == "literal_error" and isinstance(value, str):
        return _refusal(f"Invalid value: {_shown(value)}. Supported values are: {expected}.", param)
    return _wrong_type(param, expected, value)


def _wanted(complaint: Complaint) -> str:
    kind, context = complaint["type"], complaint.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"])
    if kind in _BOUNDS:
        sign, bound, *_ = _BOUNDS[kind]
        return f"{_number(complaint)} {sign} {context[bound]:.15g}"
    return _EXPECTED.get(kind, str(complaint["msg"]))


def _number(complaint: Complaint) -> str:
    branch = str(complaint["loc"][-1])  # in a union pydantic adds the branch: "constrained-float"
    value = complaint["input"]  # text, if it stood in the URL
    is_integer = (isinstance(value, int) or str(value).isdecimal()) and "float" not in branch
    return "an integer" if is_integer else "a number"


def _whole_body(complaint: Complaint) -> InvalidRequest:
    if complaint["type"] == "json_invalid":
        where = f"{complaint['ctx']['error']} at character {complaint['loc'][-1]}"
        return InvalidRequest(
            f"We could not parse the JSON body of your request: {where}.", code="invalid_json"
        )
    if complaint["type"] == "value_error":
        return InvalidRequest(f"Invalid request: {complaint['ctx']['error']}.")
    hint = "expected a JSON object and the header 'Content-Type: application/json'"
    return InvalidRequest(f"Invalid request body: {hint}.", code="invalid_type")


def _out_of_bounds(param: str, complaint: Complaint) -> InvalidRequest:
    sign, bound, code, words = _BOUNDS[complaint["type"]]
    limit = f"{complaint['ctx'][bound]:.15g}"
    kind = _number(complaint).split()[-1]
    expected = f"Expected a value {sign} {limit}, but got {complaint['input']} instead."
    return _refusal(f"Invalid '{param}': {kind} {words} value. {expected}", param, f"{kind}_{code}")


def _wrong_length(param: str, kind: str, length: int, context: Mapping[str, Any]) -> InvalidRequest:
    side, word, code = (
        ("max", "long", "above_max") if kind == "string_too_long" else ("min", "short", "below_min")
    )
    side_name = {"max": "maximum", "min": "minimum"}[side]
    expected = f"Expected a string with {side_name} length {context[f'{side}_length']}"
    message = (
        f"Invalid '{param}': string too {word}. {expected}, but got a string with length {length} instead."
    )
    return _refusal(message, param, f"string_{code}_length")


def _wrong_type(param: str, expected: str, value: Any) -> InvalidRequest:
    message = f"Invalid type for '{param}': expected {expected}, but got {_json_type(value)} instead."
    return _refusal(message, param, "invalid_type")


def _refusal(message: str, param: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(message, param=param, code=code)


def _path(complaint: Complaint, sent: Any) -> str:
    """`method.reinforcement.grader`, `tags[0]`: the steps that were sent, and a last one that is missing.

    Pydantic's other steps name the branch of a union, or "[key]": nothing that the caller wrote.
    """
    where, *loc = complaint["loc"]
    if where != "body":
        return ".".join(map(str, loc))
    path, here = "", sent
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


def _shown(value: str) -> str:
    return repr(value if len(value) <= 100 else value[:100] + "…")


def _json_type(value: Any) -> str:
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
        case list():
            return "an array"
        case _:
            return "an object"
