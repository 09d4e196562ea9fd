"""The requests of batches: as strict as their endpoints, and answered in the same shapes."""

from functools import partial
from typing import Any

from pydantic import ValidationError

from api.http.validation_errors import explain
from api.resources.chat import ChatCreate, meaningful
from api.resources.responses import ResponseCreate, ResponseInProgress, response_of
from core.chat import Chat
from core.errors import InvalidRequest
from core.evals.batches import Endpoint, PreparedRequest


def prepare_request(endpoint: Endpoint, body: dict[str, Any]) -> PreparedRequest:
    """Check the body of a request and convert it for the inference server.

    Raises:
        InvalidRequest: the endpoint refuses the body, or it asks for a stream.
    """
    kind = ChatCreate if endpoint == "/v1/chat/completions" else ResponseCreate
    try:
        request = kind.model_validate(body)
        chat = request if isinstance(request, ChatCreate) else request.chat()
    except ValidationError as invalid:
        complaints = [error | {"loc": ("body", *error["loc"])} for error in invalid.errors()]
        raise explain(complaints, body, kind.model_fields) from None
    if request.stream:
        message = "Unsupported parameter: 'stream' is not supported in a batch; leave it out."
        raise InvalidRequest(message, param="stream", code="unsupported_parameter")
    fields = meaningful(chat, set(Chat.model_fields) - {"model"})
    if isinstance(request, ChatCreate):
        return PreparedRequest(fields, lambda completion: completion)
    return PreparedRequest(fields, partial(_response, request))


def _response(request: ResponseCreate, completion: dict[str, Any]) -> dict[str, Any]:
    return response_of(ResponseInProgress(request, completion["model"]), completion)
