"""Messages and exit codes of errors, for the command line and for the server of agents."""

from dataclasses import dataclass

import httpx2
import openai

from regraft._rules.datasets import InvalidDataset
from regraft._rules.system_errors import file_problem
from regraft.cli.files import invalid_report, problem_lines
from regraft.cli.shared import AUTH, BY_STATUS, NO, UNREACHABLE, USAGE, Refused
from regraft.config import NotConfigured
from regraft.errors import DownloadCorrupt, JobFailed, is_page
from regraft.requests import InvalidRequestFile
from regraft.resources.evals import InvalidGate
from regraft.routes import InvalidId


@dataclass(frozen=True)
class Failure:
    """An error that has a remedy, as a message and an exit code of the command line."""

    exit_code: int
    message: str
    code: str | None
    param: str | None = None
    request_id: str | None = None


def failure_of(error: Exception) -> Failure | None:
    """None: a defect of this program."""
    match error:
        case openai.APIStatusError():
            return _refusal(error)
        case openai.APIConnectionError():
            server = error.request.url.copy_with(path="/", query=None)
            why = f": {error.__cause__}" if error.__cause__ else ""
            message = f"Cannot reach {server}{why}. Is the server running?"
            return Failure(UNREACHABLE, message, "connection_error")
        case JobFailed():
            # The last event lists all lines of the error, such as the invalid rows of a file.
            return Failure(NO, str(error).splitlines()[0], error.code, error.param)
        case DownloadCorrupt():
            return Failure(UNREACHABLE, str(error), "download_corrupt")
        case openai.OpenAIError() | httpx2.RequestError():
            # Errors after the first byte: an error event in a stream, or a truncated response.
            named = getattr(error, "code", None), getattr(error, "param", None)
            return Failure(UNREACHABLE, str(error) or type(error).__name__, *named)
        case NotConfigured():
            return Failure(AUTH, str(error), "not_configured")
        case InvalidDataset():
            return Failure(NO, "\n".join(problem_lines(invalid_report("the file", error))), "invalid_dataset")
        case InvalidRequestFile() | InvalidGate() | InvalidId() | Refused() | httpx2.InvalidURL():
            return Failure(USAGE, str(error), "invalid_command")
        case OSError():
            return Failure(USAGE, file_problem(error), "invalid_command")
    return None


def _refusal(error: openai.APIStatusError) -> Failure:
    message = error.message.removeprefix(f"Error code: {error.status_code} - ")
    unreachable = error.status_code >= 500 or (error.status_code == 404 and is_page(error.response))
    exit_code = UNREACHABLE if unreachable else BY_STATUS.get(error.status_code, USAGE)
    return Failure(exit_code, message, error.code, error.param, error.request_id)
