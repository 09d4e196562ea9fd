"""Exception handlers: every error response has the same shape."""

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import DataError, DBAPIError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from api.http.large_bodies import BodyRejected
from api.http.middleware import of_outage
from api.http.validation_errors import explain
from core.errors import InvalidRequest, ServiceError


class AsciiJSON(JSONResponse):
    """ASCII-escaped JSON: messages quote the request, which may contain lone surrogates."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def add_handlers(app: FastAPI) -> None:
    """Register the handlers. api/http/middleware.py handles crashes, because it knows the request id."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(BodyRejected, _refused)
    app.add_exception_handler(DataError, _not_storable)
    app.add_exception_handler(DBAPIError, _maybe_outage)
    app.add_exception_handler(OSError, _maybe_outage)
    app.add_exception_handler(ClientDisconnect, _gone)


def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return AsciiJSON(error.envelope(), status_code=error.status_code, headers=dict(error.headers))


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _service_error(request, explain(error.errors(), error.body))


def _framework_error(request: Request, error: Exception) -> Response:
    """Errors of Starlette and FastAPI themselves: unknown URL, wrong method, unreadable body."""
    assert isinstance(error, HTTPException)
    message, code = error.detail, None
    if error.status_code == 404:
        message = f"Invalid URL ({request.method} {request.url.path})"
        code = "unknown_url"
    elif error.status_code == 405:
        message = f"Not allowed to {request.method} on {request.url.path}."
        code = "method_not_supported"
    elif error.status_code == 408:
        code = "request_timeout"
    elif error.status_code == 413:
        code = "payload_too_large"
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return AsciiJSON(body, status_code=error.status_code, headers=error.headers)


def _refused(request: Request, error: Exception) -> Response:
    """The response for the wrapped cause, as if an endpoint had raised it."""
    assert isinstance(error, BodyRejected)
    handlers = request.app.exception_handlers
    for kind in type(error.cause).__mro__:
        if kind in handlers:
            response: Response = handlers[kind](request, error.cause)
            return response
    raise error.cause


def _not_storable(request: Request, error: Exception) -> Response:
    """Values that PostgreSQL rejects and our validation does not: a NUL character in an id, an integer over 64 bits."""
    if "\0" in request.scope["path"]:  # SQLite finds no row for such an id
        return _framework_error(request, HTTPException(404))
    return _service_error(request, InvalidRequest("A value in the request cannot be stored or looked up."))


def _maybe_outage(request: Request, error: Exception) -> Response:
    """An outage is a retryable 503, or a 507 if a store is full. Anything else is a crash."""
    unavailable = of_outage(error)
    if unavailable is None:
        raise error
    return _service_error(request, unavailable)


def _gone(request: Request, error: Exception) -> Response:
    # The client has disconnected; this keeps it out of the crash log.
    return _service_error(request, InvalidRequest("The client closed the connection."))
