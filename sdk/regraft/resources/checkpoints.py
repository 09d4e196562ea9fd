"""client.checkpoints: list and download the checkpoints of a job."""

import asyncio
import hashlib
import json
import re
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai import AsyncStream
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

from regraft._rules.system_errors import file_problem
from regraft.errors import DownloadCorrupt
from regraft.routes import route
from regraft.saving import async_chunks

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MANIFEST = "reproduce.json"
SILENCE_SECONDS = 60.0


class AsyncCheckpoints:
    def __init__(self, client: "AsyncOpenAI") -> None:
        self._client = client

    async def list(self, job_id: str) -> list[FineTuningJobCheckpoint]:
        """List the checkpoints of a job, newest first."""
        return [one async for one in self._client.fine_tuning.jobs.checkpoints.list(job_id, limit=100)]

    async def download(self, job_id: str, checkpoint_id: str | None = None, *, to: str | Path) -> Path:
        """Download the adapter in PEFT format, or the whole model, to the new folder `to`, and return its path.

        The folder also has its tokenizer, a model card and reproduce.json with its origin. The default checkpoint is
        the one
        with the highest validation reward. Every file is verified against its hash in reproduce.json, and the folder
        appears
        only when all of them match.

        Raises:
            FileExistsError: `to` exists.
            DownloadCorrupt: a file does not match its hash.
        """
        target = _absent(Path(to))
        chosen = checkpoint_id or best(await self.list(job_id), job_id).id
        with tempfile.TemporaryFile() as archive:
            async with await self._client.get(
                _path(chosen),
                cast_to=object,
                options=_PATIENT,
                stream=True,
                stream_cls=AsyncStream[object],
            ) as stream:
                async for chunk in async_chunks(stream.response):
                    archive.write(chunk)
            archive.seek(0)
            return await asyncio.to_thread(unpack, archive, target)


_PATIENT: Any = {"timeout": SILENCE_SECONDS}


def best(checkpoints: Iterable[FineTuningJobCheckpoint], job_id: str) -> FineTuningJobCheckpoint:
    """The checkpoint with the highest validation reward; of equals the earliest, as on the server.

    Supervised and dpo jobs have no rewards: the newest.
    """
    found = list(checkpoints)
    if not found:
        raise FileNotFoundError(f"The job {job_id} has no checkpoint yet.")
    graded = [(reward, one) for one in found if (reward := _reward(one)) is not None]
    if not graded:
        return max(found, key=lambda one: one.step_number)
    return min(graded, key=lambda pair: (-pair[0], pair[1].step_number))[1]


def _reward(checkpoint: FineTuningJobCheckpoint) -> float | None:
    reward = getattr(checkpoint.metrics, "full_valid_mean_reward", None)
    return None if reward is None else float(reward)


def unpack(archive: Any, target: Path) -> Path:
    """Unpack the server's tar to a folder that appears only when all files are verified."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        folder = Path(scratch, "files")
        folder.mkdir()
        try:
            with tarfile.open(fileobj=archive) as tar:
                for entry in tar:
                    # Only plain files of the archive's one folder: an archive must not write anywhere else.
                    name = re.fullmatch(r"[^/\\]+/([^/\\]+)", entry.name)
                    if not entry.isfile() or name is None or name[1] == "..":
                        raise DownloadCorrupt(f"The archive holds {entry.name!r}, which is not a plain file.")
                    _copy(tar.extractfile(entry), folder / name[1])
        except tarfile.TarError as cause:
            raise DownloadCorrupt(f"The archive cannot be read: {cause}") from cause
        _compare(folder)
        folder.rename(_absent(target))
    return target


def _compare(folder: Path) -> None:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        expected = {file["name"]: file["sha256"] for file in manifest["checkpoint"]["files"]}
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise DownloadCorrupt(f"The archive has no usable {MANIFEST}: {file_problem(cause)}") from cause
    for name, sha256 in expected.items():
        path = folder / name
        if not path.is_file():
            raise DownloadCorrupt(f"{name} is missing from the archive.")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise DownloadCorrupt(f"{name} does not have the sha256 that {MANIFEST} names.")


def _copy(source: Any, target: Path) -> None:
    with target.open("xb") as file:
        while chunk := source.read(1 << 20):
            file.write(chunk)


def _absent(target: Path) -> Path:
    if target.exists():
        raise FileExistsError(f"{target} already exists.")
    return target


def _path(checkpoint_id: str) -> str:
    return route("/regraft/checkpoints", checkpoint_id, "archive")
