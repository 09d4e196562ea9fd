"""Everything we tell a caller about, as one tree. Each error knows its own HTTP status.

ServiceError                    500 server_error
├── InvalidRequest              400 invalid_request_error; names the parameter
│   └── InvalidJobState         400: the job is not in a state that allows this
│       └── BudgetReached       400: it has used what it may
├── InvalidApiKey               401
├── NotFound                    404
│   ├── FileNotFound
│   ├── JobNotFound
│   ├── ModelNotFound           lists what there is
│   ├── UploadNotFound
│   └── WebhookEndpointNotFound
└── PayloadTooLarge             413
"""

from collections.abc import Iterable


class ServiceError(Exception):
    """The base: `message` is for people, `code` for programs, `param` is the dotted path of the field."""

    status_code = 500
    type = "server_error"
    code: str | None = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """The body OpenAI's clients parse: all four keys, always."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(ServiceError):
    status_code, type, code = 400, "invalid_request_error", "invalid_value"


class InvalidJobState(InvalidRequest):
    # 400, not 409: OpenAI's client retries a 409, and asking again cannot change the answer.
    code = "invalid_job_state"


class BudgetReached(InvalidJobState):
    code = "budget_reached"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="budget")


class InvalidApiKey(ServiceError):
    status_code, type, code = 401, "invalid_request_error", "invalid_api_key"


class NotFound(ServiceError):
    status_code, type = 404, "invalid_request_error"
    code: str | None = None


class FileNotFound(NotFound):
    def __init__(self, file_id: str, *, param: str = "id") -> None:
        super().__init__(f"No such File object: {file_id}", param=param)


class JobNotFound(NotFound):
    code = "fine_tune_not_found"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Could not find fine tune: {job_id}", param="fine_tune_id")


class ModelNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, model: str, available: Iterable[str]) -> None:
        names = ", ".join(sorted(available)) or "none"
        super().__init__(f"The model '{model}' does not exist. Available: {names}.", param="model")


class UploadNotFound(NotFound):
    def __init__(self, upload_id: str) -> None:
        super().__init__(f"No such Upload object: {upload_id}", param="upload_id")


class WebhookEndpointNotFound(NotFound):
    def __init__(self, endpoint_id: str) -> None:
        super().__init__(f"No such webhook endpoint: {endpoint_id}", param="webhook_endpoint_id")


class PayloadTooLarge(ServiceError):
    status_code, type, code = 413, "invalid_request_error", "payload_too_large"
