"""The client of the service and the folder that the tools work with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regraft.cli.shared import Refused
from regraft.client import AsyncRegraft
from regraft.requests import Source, read_grader, read_job


class OutsideRoot(Refused):
    """A tool named a file outside of the folder that it may use."""

    def __init__(self, path: Path | str, root: Path) -> None:
        super().__init__(
            f"{path} is outside of {root}. Tools only use files below it; links count as their target."
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
            raise OutsideRoot(path, self.folder)
        return target

    def file(self, path: Path | str) -> Path:
        """As `path`, of a file that exists."""
        target = self.path(path)
        if not target.is_file():
            raise Refused(f"There is no file {path} in {self.folder}.")
        return target

    def relative(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def job(self, source: Source) -> dict[str, Any]:
        """The content of a job file with its graders, and with the paths of its files that are to be uploaded."""
        job = read_job(source, locate=self.file)
        return job.body | job.uploads

    def grader(self, source: Source) -> dict[str, Any]:
        return read_grader(source, locate=self.file)


@dataclass(frozen=True)
class Workspace:
    client: AsyncRegraft
    root: Root
