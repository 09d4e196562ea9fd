"""The errors that the API returns, as one tree. Each error knows its own HTTP status.

ServiceError                    500 server_error
├── InvalidRequest              400 invalid_request_error; names the parameter
│   └── InvalidJobState         400: the job is not in a state that allows this
│       └── BudgetReached       400: its budget is used up
├── InvalidApiKey               401
├── InsufficientPermissions     403: the key lacks the required scope
├── NotFound                    404
│   ├── FileNotFound
│   ├── JobNotFound
│   ├── CheckpointNotFound
│   ├── ModelNotFound           names the models that are most like it
│   ├── TunedModelNotFound
│   ├── NoEmbeddingModel        no model of this service can embed
│   ├── NoPassportKey           the operator has set no key that signs passports
│   ├── ResponseNotFound        responses are not stored
│   ├── PermissionNotFound
│   ├── UploadNotFound
│   ├── EvalNotFound            an eval, a run or an output item
│   ├── BatchNotFound
│   ├── PipelineNotFound
│   ├── GraderNotFound          a stored grader, or a version of one
│   ├── GoldenCaseNotFound
│   ├── WebhookEndpointNotFound
│   ├── OrganizationNotFound
│   ├── ProjectNotFound
│   └── KeyNotFound
├── EpisodeRefused              400: the run of the job says why
│   └── EpisodeOver             409: it is completed, or its time, its step or its job has ended
├── CheckpointDamaged           410: a retry does not help
├── ContentDamaged              410: the same for a file
├── MadeByJobs                  405: the eval of a job is read-only
├── PayloadTooLarge             413
├── QuotaExceeded               429: a retry does not help
├── RateLimited                 429: retry later
├── TooManyAtOnce               429: the concurrency limit and its queue are full
├── Unavailable                 503: a dependency of the service is unavailable
├── InsufficientStorage         507: the database or the blob store is full
├── GraderEnvironmentMissing    503: the operator has not built the environment of python graders
└── NotReady                    503: retry after the given number of seconds
    └── InferenceNotReady       the inference server is not reachable or loads the model (core/inference.py)
"""

import difflib
from collections.abc import Iterable, Mapping


class ServiceError(Exception):
    """The base: `message` is for people, `code` for programs, `param` is the dotted path of the field.

    `headers` are added to the response of this error only.
    """

    status_code = 500
    type = "server_error"
    code: str | None = "internal_error"
    headers: Mapping[str, str] = {}

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


class InvalidParameter(ValueError):
    """A validator of a request raises it to set the message, `param` and `code` itself.

    api/http/validation_errors.py turns it into an InvalidRequest; pydantic lets only ValueErrors through.
    """

    def __init__(self, message: str, *, param: str, code: str) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class UnsupportedValue(ValueError):
    """A validator of a request raises it for a value of OpenAI's API that this server does not support.

    Its error has the code `unsupported_parameter`, and the path of the field as `param`.
    """


class InvalidJobState(InvalidRequest):
    # 400, not 409: OpenAI's client retries a 409, and a retry cannot change the result.
    code = "invalid_job_state"


class BudgetReached(InvalidJobState):
    code = "budget_reached"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="budget")


class InvalidApiKey(ServiceError):
    status_code, type, code = 401, "invalid_request_error", "invalid_api_key"
    headers = {"www-authenticate": "Bearer"}


class InsufficientPermissions(ServiceError):
    status_code, type, code = 403, "invalid_request_error", "insufficient_permissions"

    def __init__(self, *, needed: str, scope: str) -> None:
        super().__init__(
            f"This request needs an API key with scope '{needed}', and the key that was sent has '{scope}'."
        )


class NotFound(ServiceError):
    status_code, type = 404, "invalid_request_error"
    code: str | None = None


class FileNotFound(NotFound):
    def __init__(self, file_id: str) -> None:
        super().__init__(f"No such File object: {file_id}", param="id")


class JobNotFound(NotFound):
    code = "fine_tune_not_found"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Could not find fine tune: {job_id}", param="fine_tune_id")


class CheckpointNotFound(NotFound):
    code = "checkpoint_not_found"

    def __init__(self, checkpoint_id: str) -> None:
        super().__init__(f"No such checkpoint: {checkpoint_id}", param="checkpoint_id")


class EpisodeRefused(ServiceError):
    """The run of a job refuses a request of the user's agent."""

    type, code = "invalid_request_error", "invalid_value"

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status_code = status


class EpisodeOver(EpisodeRefused):
    """An episode that gets no more answers."""

    def __init__(self, message: str) -> None:
        super().__init__(409, message, code="episode_over")


class CheckpointDamaged(ServiceError):
    """410: a retry does not help, and clients retry 409 and 5xx."""

    status_code, type, code = 410, "invalid_request_error", "checkpoint_damaged"

    def __init__(self, checkpoint_id: str, damage: str) -> None:
        message = f"The checkpoint {checkpoint_id} is damaged: {damage}. Use another checkpoint of its job."
        super().__init__(message, param="checkpoint_id")


class ContentDamaged(ServiceError):
    """410, as for CheckpointDamaged. The message comes from core.storage.files.FileDamaged."""

    status_code, type, code = 410, "invalid_request_error", "file_damaged"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="id")


class PermissionNotFound(NotFound):
    def __init__(self, permission_id: str) -> None:
        super().__init__(f"No such checkpoint permission: {permission_id}", param="permission_id")


# Of the names that an error lists.
MAX_NAMES = 5
# Names that are compared with an unknown one: 500 take up to 20 ms.
COMPARED_NAMES = 500


def _nearest(model: str, available: Iterable[str]) -> str:
    """The names that are most like `model`, then others. All, in order, if there are few."""
    names = list(available)
    if len(names) <= MAX_NAMES:
        return ", ".join(sorted(names)) or "none"
    near = difflib.get_close_matches(model[:200], names[:COMPARED_NAMES], n=MAX_NAMES)
    shown = list(dict.fromkeys([*near, *names]))[:MAX_NAMES]
    return f"{', '.join(shown)} and {len(names) - len(shown)} more (GET /v1/models lists all)"


class ModelNotFound(NotFound):
    """The service has no model of this name, or the project may not use it."""

    code = "model_not_found"

    def __init__(self, model: str, available: Iterable[str]) -> None:
        """`available`: the base models first. A project may have thousands of tuned models, so few are named."""
        super().__init__(
            f"The model '{model}' does not exist. Available: {_nearest(model, available)}.", param="model"
        )


class TunedModelNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, model: str, available: Iterable[str]) -> None:
        super().__init__(
            f"This project has no tuned model or checkpoint with the name '{model}' (GET /v1/models lists its tuned "
            f"models). Base models: {_nearest(model, available)}.",
            param="model",
        )


class AliasIsNoTarget(NotFound):
    code = "model_not_found"

    def __init__(self, alias: str, model: str) -> None:
        super().__init__(
            f"'{alias}' is an alias, which points at '{model}': an alias points at a model.", param="model"
        )


class AliasNotFound(NotFound):
    code = "alias_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"No alias '{name}' in this project.", param="alias")


class AliasTargetNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, alias: str, model: str) -> None:
        super().__init__(
            f"The alias '{alias}' points at '{model}', which no longer exists or is no longer shared with this "
            "project: point the alias at another model.",
            param="model",
        )


class NoEmbeddingModel(NotFound):
    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model '{model}' cannot create embeddings: this service has no embedding models.",
            param="model",
        )


class NoPassportKey(NotFound):
    code = "no_passport_key"

    def __init__(
        self,
        message: str = "This service has no key that signs passports. The operator sets REGRAFT_PASSPORT_KEY "
        "(docs/howto/passports.md).",
    ) -> None:
        super().__init__(message)


class ResponseNotFound(NotFound):
    code = "response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Response with id '{response_id}' not found: this server does not store responses ('store' has no "
            "effect). Use the result of POST /v1/responses, and send earlier messages again in 'input'.",
            param="response_id",
        )


class UploadNotFound(NotFound):
    def __init__(self, upload_id: str) -> None:
        super().__init__(f"No such Upload object: {upload_id}", param="upload_id")


class EvalNotFound(NotFound):
    def __init__(self, what: str, its_id: str, *, param: str | None = None) -> None:
        """`what` is the kind (eval, run, output_item), which also names the parameter."""
        super().__init__(f"No such {what.replace('_', ' ')}: {its_id}", param=param or f"{what}_id")


class BatchNotFound(NotFound):
    def __init__(self, batch_id: str) -> None:
        super().__init__(f"No such batch: {batch_id}", param="batch_id")


class PreviewNotFound(NotFound):
    def __init__(self, preview_id: str) -> None:
        super().__init__(f"No such preview: {preview_id}", param="preview_id")


class GraderAuditNotFound(NotFound):
    def __init__(self, audit_id: str) -> None:
        super().__init__(f"No such grader audit: {audit_id}", param="audit_id")


class PipelineNotFound(NotFound):
    def __init__(self, pipeline_id: str) -> None:
        super().__init__(f"No such pipeline: {pipeline_id}", param="pipeline_id")


class GraderNotFound(NotFound):
    code = "grader_not_found"

    def __init__(self, name: str, version: str | None = None) -> None:
        of_it = f" with the version {version}" if version else ""
        super().__init__(f"No stored grader '{name}'{of_it} in this project.", param="grader_name")


class GoldenCaseNotFound(NotFound):
    def __init__(self, case_id: str) -> None:
        super().__init__(f"No such golden case: {case_id}", param="case_id")


class WebhookEndpointNotFound(NotFound):
    def __init__(self, endpoint_id: str) -> None:
        super().__init__(f"No such webhook endpoint: {endpoint_id}", param="webhook_endpoint_id")


class WebhookDeliveryNotFound(NotFound):
    def __init__(self, delivery_id: str) -> None:
        super().__init__(f"No such webhook delivery: {delivery_id}", param="delivery_id")


class OrganizationNotFound(NotFound):
    def __init__(self, organization_id: str) -> None:
        super().__init__(f"No such organization: {organization_id}", param="organization_id")


class ProjectNotFound(NotFound):
    def __init__(self, project_id: str) -> None:
        super().__init__(f"No such project: {project_id}", param="project_id")


class KeyNotFound(NotFound):
    def __init__(self, key_id: str) -> None:
        super().__init__(f"No such API key: {key_id}", param="key_id")


class MadeByJobs(ServiceError):
    status_code, type, code = 405, "invalid_request_error", "method_not_supported"
    headers = {"allow": "GET"}

    def __init__(self) -> None:
        super().__init__(
            "This eval shows the validations of a fine-tuning job and is read-only. Create an eval of your own with "
            "POST /v1/evals."
        )


class PayloadTooLarge(ServiceError):
    status_code, type, code = 413, "invalid_request_error", "payload_too_large"


class RangeNotSatisfiable(ServiceError):
    """The requested range of bytes is not part of the content."""

    status_code, type, code = 416, "invalid_request_error", "range_not_satisfiable"

    def __init__(self, size: int) -> None:
        super().__init__(f"The content has {size} bytes, and the requested range is not part of them.")
        self.headers = {"content-range": f"bytes */{size}"}


class QuotaExceeded(ServiceError):
    """The project has reached a limit, which the operator can raise."""

    status_code, type, code = 429, "insufficient_quota", "insufficient_quota"
    headers = {"x-should-retry": "false"}  # OpenAI's client would retry twice

    def __init__(self, limit: str, *, used: float, maximum: float, hint: str) -> None:
        """`limit` is its name in core/tenancy/limits.py, `hint` the action that frees capacity."""
        super().__init__(f"The project's limit {limit} is {maximum:,}, and {used:,} are in use: {hint}.")


class RateLimited(ServiceError):
    status_code, type, code = 429, "requests", "rate_limit_exceeded"

    def __init__(self, *, per_minute: int, retry_after: int) -> None:
        super().__init__(
            f"The project's limit requests_per_minute is {per_minute}. Please try again in {retry_after} s."
        )
        self.headers = {"retry-after": str(retry_after)}


class TooManyAtOnce(ServiceError):
    status_code, type, code = 429, "requests", "rate_limit_exceeded"
    headers = {"retry-after": "5"}

    def __init__(self, what: str, *, running: int, waiting: int) -> None:
        """`what` is the kind of request, of which `running` may run at once and `waiting` more may queue."""
        queue = f", and no more than {waiting} may wait" if waiting else ""
        super().__init__(
            f"Too many concurrent {what}: {running} of this project are running{queue}. Try again in a moment."
        )


class Unavailable(ServiceError):
    status_code, code = 503, "unavailable"
    headers = {"retry-after": "2"}


class InsufficientStorage(ServiceError):
    status_code, code = 507, "insufficient_storage"
    headers = {"x-should-retry": "false"}  # a retry fails until space is freed

    def __init__(self) -> None:
        super().__init__(
            "The service is out of storage: the disk of its database or of its files is full. "
            "Nothing was stored. Contact the operator."
        )


class GraderEnvironmentMissing(ServiceError):
    status_code, code = 503, "grader_environment_missing"
    headers = {"x-should-retry": "false"}  # until the operator has built it


class NotReady(ServiceError):
    status_code, code = 503, "not_ready"

    def __init__(self, message: str, *, retry_after: int | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after
        if retry_after is not None:
            self.headers = {"retry-after": str(retry_after)}
