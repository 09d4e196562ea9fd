"""The client of the service and the folder that the tools work with."""

import asyncio
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai

from regraft._rules.datasets import unique_keys
from regraft.cli.failures import Failure, failure_of
from regraft.cli.shared import Refused
from regraft.client import AsyncRegraft
from regraft.errors import NotARegraftServer, is_page
from regraft.requests import Source, read_grader, read_job

log = logging.getLogger(__name__)


class OutsideRoot(Refused):
    """A tool named a file outside of the folder that it may use."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(
            f"{path} is outside of the root. Tools only use files below it; links count as their target."
        )


@dataclass(frozen=True)
class Root:
    """The folder whose files tools may read and write.

    Args:
        folder: resolved; paths of tools are relative to it.
    """

    folder: Path

    def path(self, path: Path | str) -> Path:
        """The target of a path, which may not exist.

        Raises:
            OutsideRoot
            Refused: it is not a path.
        """
        try:
            target = (self.folder / path).resolve()
        except (ValueError, RuntimeError) as cause:  # a zero byte, or links in a circle
            raise Refused(f"{str(path)!r} is not a path: {cause}") from cause
        if not target.is_relative_to(self.folder):
            raise OutsideRoot(path)
        return target

    def file(self, path: Path | str) -> Path:
        """As `path`, of a file that exists."""
        target = self.path(path)
        if not target.is_file():
            raise Refused(f"There is no file {path} below the root.")
        return target

    def relative(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def with_relative_paths(self, text: str) -> str:
        """A text whose paths below the root are relative to it."""
        return text if self.folder.parent == self.folder else text.replace(f"{self.folder}/", "")

    def job(self, source: Source) -> dict[str, Any]:
        """The content of a job file with its graders, and with the paths of its files that are to be uploaded."""
        job = read_job(content(source), locate=self.file)
        return job.body | job.uploads

    def grader(self, source: Source) -> dict[str, Any]:
        return read_grader(content(source), locate=self.file)


def content(source: Any) -> Any:
    """Parse a text that is JSON; paths and other values are returned as they are.

    Raises:
        Refused: it begins as JSON, and is not.
    """
    if not isinstance(source, str) or not source.lstrip().startswith(("{", "[")):
        return source
    try:
        return json.loads(source, object_pairs_hook=unique_keys)
    except ValueError as cause:
        raise Refused(f"The text is neither a path nor JSON: {cause}") from cause


@dataclass(frozen=True)
class Workspace:
    """The client and the folder of one caller.

    Args:
        is_remote: the caller is on another machine, perhaps of another person.
    """

    client: AsyncRegraft
    root: Root
    is_remote: bool = False

    async def job(self, source: Source) -> dict[str, Any]:
        return await asyncio.to_thread(self.root.job, source)

    async def grader(self, source: Source) -> dict[str, Any]:
        return await asyncio.to_thread(self.root.grader, source)

    def failure_of(self, error: Exception) -> Failure | None:
        """As `regraft.cli.failures.failure_of`. A remote caller gets no path and no address of this machine."""
        failure = failure_of(error)
        if failure is None:
            return None
        if self.is_remote and has_address(error):
            log.warning("%s", failure.message)
            return replace(failure, message="The service does not answer.")
        return replace(failure, message=self.root.with_relative_paths(failure.message))


def has_address(error: Exception) -> bool:
    """Whether the message of an error of the client names the address of the service."""
    if isinstance(error, openai.APIStatusError):
        return is_page(error.response)
    return isinstance(error, openai.APIConnectionError | NotARegraftServer)
