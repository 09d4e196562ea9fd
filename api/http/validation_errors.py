"""Converts validation errors to one API error."""

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from core.errors import InvalidParameter, InvalidRequest, UnsupportedValue
from core.jobs import hyperparameters, offline_hyperparameters
from core.jobs.methods import LOGITS
from graders import complaints as translator
from graders.complaints import Complaint
from graders.spec import InvalidGrader

_FIRST_WORD = re.compile(r"'(\w+)' ")


def explain(complaints: Sequence[Complaint], sent: Any, fields: Collection[str] = ()) -> InvalidRequest:
    """Report the first error in `sent`. A value that matches no branch of a union is one error.

    Args:
        fields: those of the body, among which a misspelled one is looked for.
    """
    first = complaints[0]
    where, *loc = first["loc"]
    if where == "body":
        in_body = [
            dict(complaint) | {"loc": complaint["loc"][1:]}
            for complaint in complaints
            if complaint["loc"][0] == "body"
        ]
        param, about = translator.first_of(in_body, sent)
    else:  # the path or the query string
        param = ".".join(map(str, loc))
        about = [complaint for complaint in complaints if complaint["loc"] == first["loc"]]
    cause = about[0].get("ctx", {}).get("error")
    if isinstance(cause, InvalidGrader):  # its message already has the path inside the grader
        return InvalidRequest(cause.message, param=cause.param, code=cause.code)
    if isinstance(cause, InvalidParameter):
        return InvalidRequest(str(cause), param=cause.param, code=cause.code)
    if not param and len(about) == 1:
        return _refusal_of_body(about[0], sent)
    mistake = translator.explain(param, about)
    meant = (
        _similar_field(param, about[0]["loc"], fields, sent) if mistake.code == "unknown_parameter" else None
    )
    hint = f" Did you mean '{meant}'?" if meant else ""
    code = "unsupported_parameter" if isinstance(cause, UnsupportedValue) else mistake.code
    return InvalidRequest(f"{mistake.message}{hint}", param=mistake.param, code=code)


def _similar_field(param: str, loc: Sequence[int | str], fields: Collection[str], sent: Any) -> str | None:
    """`loc` has the tags of unions, such as the mode of a distillation, which are not in `param`."""
    if "." not in param and "[" not in param:
        if close := get_close_matches(param, fields, n=1, cutoff=0.75):
            return close[0]
        if "method" not in fields:  # the body is no job
            return None
        return _outside(param, _method_of(sent))
    *_, path = f".{param}".partition(".method.")
    method, _, below = path.partition(".")
    method = LOGITS if "logits" in loc else method
    return _outside(below, method) if below.isidentifier() else _hyperparameter(param, method)


def _outside(name: str, method: str) -> str | None:
    """The hyperparameter that is meant by a field beside or above `hyperparameters`."""
    paths = (f"hyperparameters.{name}", f"hyperparameters.advanced.{name}")
    return next(filter(None, (_hyperparameter(path, method) for path in paths)), None)


def _method_of(sent: Any) -> str:
    """The type of the job's method in a body of any shape. A job in another body is in its `job`."""
    if not isinstance(sent, Mapping):
        return ""
    job = sent.get("job", sent)
    method = job.get("method") if isinstance(job, Mapping) else None
    return str(method.get("type", "")) if isinstance(method, Mapping) else ""


def _hyperparameter(path: str, method: str) -> str | None:
    if method in offline_hyperparameters.KINDS:
        return offline_hyperparameters.similar_hyperparameter(path, method)
    return hyperparameters.similar_hyperparameter(path)


def _refusal_of_body(complaint: Complaint, sent: Any) -> InvalidRequest:
    """An error of fields that do not fit each other is that of the one with which its sentence begins."""
    if complaint["type"] == "json_invalid":
        where = f"{complaint['ctx']['error']} at character {complaint['loc'][-1]}"
        return InvalidRequest(
            f"We could not parse the JSON body of your request: {where}.", code="invalid_json"
        )
    if complaint["type"] == "value_error":
        text = str(complaint["ctx"]["error"])
        named = _FIRST_WORD.match(text)
        is_sent = named is not None and isinstance(sent, Mapping) and named[1] in sent
        return InvalidRequest(f"Invalid request: {text}.", param=named[1] if named and is_sent else None)
    if sent is not None and not isinstance(sent, bytes):  # FastAPI has parsed it, so the header is right
        expected = f"expected a JSON object, but got {translator.json_type(sent)} instead"
        return InvalidRequest(f"Invalid request body: {expected}.", code="invalid_type")
    hint = "expected a JSON object and the header 'Content-Type: application/json'"
    return InvalidRequest(f"Invalid request body: {hint}.", code="invalid_type")
