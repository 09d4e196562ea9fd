"""Errors of a server by their code. Every class is also a subclass of the openai class of its status.

    except regraft.JobNotFound        one kind of 404
    except openai.NotFoundError       all 404s, including these

JobFailed, DownloadCorrupt and NotARegraftServer are raised by this library itself.
"""

from collections.abc import Mapping

import httpx2
import openai
from openai.types.fine_tuning import FineTuningJob


class InvalidApiKey(openai.AuthenticationError):
    """The server does not know this key, or it belongs to another project."""


class InsufficientPermissions(openai.PermissionDeniedError):
    """The key lacks the required scope."""


class JobNotFound(openai.NotFoundError): ...


class FileNotFound(openai.NotFoundError): ...


class CheckpointNotFound(openai.NotFoundError): ...


class ModelNotFound(openai.NotFoundError): ...


class AliasNotFound(openai.NotFoundError): ...


class GraderNotFound(openai.NotFoundError):
    """The project has no stored grader with this name, or not this version of it."""


class NotSupportedByServer(openai.NotFoundError):
    """This server has no such URL: it is older than this library, or not a regraft server."""


class InvalidJobState(openai.BadRequestError):
    """The job's state does not allow this operation, such as resuming a job that has ended."""


class BudgetReached(InvalidJobState):
    """The job has used up its budget."""


class InvalidGrader(openai.BadRequestError):
    """The server cannot use this grader; `param` is the path to the mistake."""


class QuotaExceeded(openai.RateLimitError):
    """The project has reached a limit. A retry does not help; the operator can raise the limit."""


class RateLimited(openai.RateLimitError):
    """Too many requests; retry later."""


class JobFailed(openai.OpenAIError):
    """The job ended without a model: `job.status` is "failed" or "cancelled", `code` and `param` are the server's."""

    def __init__(self, job: FineTuningJob) -> None:
        self.job = job
        error = job.error if job.status == "failed" else None
        self.code = error.code if error else None
        self.param = error.param if error else None
        super().__init__(f"The job {job.id} {job.status}{': ' + error.message if error else ''}")


class DownloadCorrupt(openai.OpenAIError):
    """The download does not match the server's content. Nothing was kept."""


class NotARegraftServer(openai.OpenAIError):
    """The server is not a regraft server: another program, or a login page of a proxy."""

    code = "not_a_regraft_server"


_BY_CODE: Mapping[str, type[openai.APIStatusError]] = {
    "fine_tune_not_found": JobNotFound,
    "checkpoint_not_found": CheckpointNotFound,
    "model_not_found": ModelNotFound,
    "alias_not_found": AliasNotFound,
    "grader_not_found": GraderNotFound,
    "unknown_url": NotSupportedByServer,
    "invalid_job_state": InvalidJobState,
    "budget_reached": BudgetReached,
    "insufficient_quota": QuotaExceeded,
    "rate_limit_exceeded": RateLimited,
    "insufficient_permissions": InsufficientPermissions,
    "invalid_api_key": InvalidApiKey,
    "mismatched_organization": InvalidApiKey,
    "mismatched_project": InvalidApiKey,
}


def typed_error(
    error: openai.APIStatusError, message: str, response: httpx2.Response
) -> openai.APIStatusError:
    """Convert `error` to the class of its code, if there is one."""
    if is_page(response):  # of a proxy: the class stays, but the HTML is not a useful message
        return type(error)(
            f"{foreign(response)} (status {error.status_code})", response=response, body=error.body
        )
    kind = _BY_CODE.get(error.code or "") or _by_param(error)
    # A proxy may return any body: the result must stay a subclass of the openai class of its status.
    if kind is None or not issubclass(kind, type(error)):
        return error
    return kind(message, response=response, body=error.body)


def is_page(response: httpx2.Response) -> bool:
    """Whether the response is an HTML page, which a regraft server never returns."""
    return _content_type(response) == "text/html"


def refuse_foreign(response: httpx2.Response, *, wants_json: bool) -> None:
    """
    Raises:
        NotARegraftServer: the response is not one of a regraft server.
    """
    if is_page(response) or (wants_json and not _content_type(response).endswith("json")):
        raise foreign(response)


def foreign(response: httpx2.Response) -> NotARegraftServer:
    url = (response.history or [response])[0].url.copy_with(query=None)
    led = f"redirects to {response.url.copy_with(query=None)}, which sends" if response.history else "sends"
    return NotARegraftServer(
        f"{url} does not answer as a regraft server: it {led} {_content_type(response) or 'no content type'}"
    )


def _content_type(response: httpx2.Response) -> str:
    kind: str = response.headers.get("content-type", "")
    return kind.split(";")[0].strip().lower()


def _by_param(error: openai.APIStatusError) -> type[openai.APIStatusError] | None:
    if error.status_code == 404 and error.param == "id" and "/files/" in error.request.url.path:
        return FileNotFound
    param = (error.param or "").removeprefix("method.reinforcement.")
    if error.status_code == 400 and (param == "grader" or param.startswith(("grader.", "grader["))):
        return InvalidGrader
    return None
