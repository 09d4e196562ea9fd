"""Exception handlers: every error response has the same shape."""

import re
from collections.abc import Collection

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from api.http.deps import Service
from api.http.idempotency import Replayed
from api.http.json_responses import JSON
from api.http.large_bodies import BodyRejected
from api.http.middleware import of_outage
from api.http.validation_errors import explain
from core.database.migrate import other_schema
from core.errors import InvalidRequest, ServiceError, Unavailable
from core.outages import lacks_schema

# The path that the client sent, in the scope of a request whose path was rewritten.
SENT_PATH = "regraft.sent_path"
_PARAMETER = re.compile(r"\{[^{}]*\}")  # of a path


def add_handlers(app: FastAPI) -> None:
    """Register the handlers. api/http/middleware.py handles crashes, because it knows the request id."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(Replayed, _replayed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(BodyRejected, _refused)
    app.add_exception_handler(DataError, _not_storable)
    app.add_exception_handler(DBAPIError, _maybe_outage)
    app.add_exception_handler(OSError, _maybe_outage)
    app.add_exception_handler(ClientDisconnect, _gone)


def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return JSON(error.envelope(), status_code=error.status_code, headers=dict(error.headers))


def _replayed(request: Request, error: Exception) -> Response:
    assert isinstance(error, Replayed)
    return error.response


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _service_error(request, explain(error.errors(), error.body, _fields_of_body(request)))


def _fields_of_body(request: Request) -> Collection[str]:
    field = getattr(request.scope.get("route"), "body_field", None)
    body = None if field is None else field.field_info.annotation
    return body.model_fields.keys() if isinstance(body, type) and issubclass(body, BaseModel) else ()


def _framework_error(request: Request, error: Exception) -> Response:
    """Errors of Starlette and FastAPI themselves: unknown URL, wrong method, unreadable body."""
    assert isinstance(error, HTTPException)
    message, code, status = error.detail, None, error.status_code
    headers, path = error.headers, request.scope.get(SENT_PATH, request.url.path)
    if status == 405 and _is_only_an_id(request):
        status, headers = 404, None
    if status == 404:
        message = f"Invalid URL ({request.method} {path})"
        if request.url.path.startswith("/v1/v1/"):
            message += "; the path has /v1 twice: check the client's base URL"
        elif "/v1/" in request.url.path[1:] or request.headers.get("x-forwarded-prefix", "/") != "/":
            message += "; serve it at the root of a separate host name: a proxy cannot serve it below a path"
        code = "unknown_url"
    elif status == 405:
        message = f"Not allowed to {request.method} on {path}."
        code = "method_not_supported"
        methods = _methods(request)
        headers = {"allow": ", ".join(methods)} if methods else headers
    elif status == 408:
        code = "request_timeout"
    elif status == 413:
        code = "payload_too_large"
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSON(body, status_code=status, headers=headers)


def _methods(request: Request) -> list[str]:
    """The methods of a path, of which each has its own route. Empty for paths of a mounted application."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    path = _PARAMETER.sub("{}", request.scope["route"].path)
    alike = (route for route in routes if _PARAMETER.sub("{}", route.path) == path)
    return sorted({method for route in alike for method in route.methods or ()})


def _is_only_an_id(request: Request) -> bool:
    """Whether the last part of a path of the API matches another route's parameter only.

    POST /v1/files/import is a path that this API does not have, and not a wrong method of the file `import`.
    """
    path: str = request.scope["route"].path
    return path.startswith("/v1/") and path.endswith("}")


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
    """Values that PostgreSQL rejects and our validation does not, such as an integer over 64 bits."""
    return _service_error(request, InvalidRequest("A value in the request cannot be stored or looked up."))


def _maybe_outage(request: Request, error: Exception) -> Response:
    """An outage is a retryable 503, or a 507 if a store is full. Anything else is a crash."""
    unavailable = of_outage(error) or _of_other_schema(request, error)
    if unavailable is None:
        raise error
    return _service_error(request, unavailable)


def _of_other_schema(request: Request, error: Exception) -> ServiceError | None:
    """The answer while the database waits for a migration, or has one that this version does not know."""
    if not isinstance(error, DBAPIError) or not lacks_schema(error):
        return None
    service: Service = request.app.state.service
    try:
        with service.database.read() as session:
            problem = other_schema(session.connection())
    except SQLAlchemyError:
        return None
    return None if problem is None else Unavailable(problem)


def _gone(request: Request, error: Exception) -> Response:
    # The client has disconnected; this keeps it out of the crash log.
    return _service_error(request, InvalidRequest("The client closed the connection."))
