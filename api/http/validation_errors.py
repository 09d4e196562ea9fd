"""Converts validation errors to one API error."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any

from core.errors import InvalidParameter, InvalidRequest
from core.jobs import hyperparameters, offline_hyperparameters
from core.jobs.methods import LOGITS
from graders import complaints as translator
from graders.complaints import Complaint
from graders.spec import InvalidGrader


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
        return _whole_body(about[0])
    mistake = translator.explain(param, about)
    meant = _meant(param, about[0]["loc"], fields) if mistake.code == "unknown_parameter" else None
    hint = f" Did you mean '{meant}'?" if meant else ""
    return InvalidRequest(f"{mistake.message}{hint}", param=mistake.param, code=mistake.code)


def _meant(param: str, loc: Sequence[int | str], fields: Collection[str]) -> str | None:
    """`loc` has the tags of unions, such as the mode of a distillation, which are not in `param`."""
    if "." not in param and "[" not in param:
        if close := get_close_matches(param, fields, n=1, cutoff=0.75):
            return close[0]
        if "method" not in fields:  # the body is no job
            return None
        inside = (f"hyperparameters.{param}", f"hyperparameters.advanced.{param}")
        return next(filter(None, map(hyperparameters.meant, inside)), None)
    *_, method = f".{param}".partition(".method.")
    method = LOGITS if "logits" in loc else method.partition(".")[0]
    if method in offline_hyperparameters.KINDS:
        return offline_hyperparameters.meant(param, method)
    return hyperparameters.meant(param)


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
