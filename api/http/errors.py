"""Exception handlers: every error response has the same shape."""

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import DataError, DBAPIError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from api.http.large_bodies import BodyRejected
from api.http.middleware import no_room
from api.http.validation_errors import explain
from core.database import engine
from core.errors import InvalidRequest, ServiceError, Unavailable
from core.storage import disk

log = logging.getLogger(__name__)


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
    app.add_exception_handler(DBAPIError, _database_error)
    app.add_exception_handler(OSError, _system_error)
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
        if "/v1/" in request.url.path[1:] or request.headers.get("x-forwarded-prefix", "/") != "/":
            message += (
                "; the service is served at / of its own host name: a proxy cannot serve it below a path"
            )
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


def _database_error(request: Request, error: Exception) -> Response:
    """An unavailable database is a retryable 503, not a crash."""
    if disk.is_full(error):
        return _service_error(request, no_room(error))
    if not engine.is_away(error):
        raise error
    log.warning("the database does not answer: %s", error)
    return _service_error(
        request, Unavailable("The service cannot reach its database. Try again in a moment.")
    )


def _system_error(request: Request, error: Exception) -> Response:
    """A full disk is not a crash either."""
    if not disk.is_full(error):
        raise error
    return _service_error(request, no_room(error))


def _gone(request: Request, error: Exception) -> Response:
    # The client has disconnected; this keeps it out of the crash log.
    return _service_error(request, InvalidRequest("The client closed the connection."))
