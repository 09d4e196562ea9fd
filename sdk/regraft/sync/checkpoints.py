"""Written by .ci/sync_client.py from regraft.resources.checkpoints; do not edit."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from openai import Stream
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

from regraft.resources.checkpoints import _PATIENT, _absent, _path, best, unpack
from regraft.saving import chunks

if TYPE_CHECKING:
    from openai import OpenAI


class Checkpoints:
    def __init__(self, client: "OpenAI") -> None:
        self._client = client

    def list(self, job_id: str) -> list[FineTuningJobCheckpoint]:
        """List the checkpoints of a job, newest first."""
        return [one for one in self._client.fine_tuning.jobs.checkpoints.list(job_id, limit=100)]

    def download(self, job_id: str, checkpoint_id: str | None = None, *, to: str | Path) -> Path:
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
        chosen = checkpoint_id or best(self.list(job_id), job_id).id
        with tempfile.TemporaryFile() as archive:
            with self._client.get(
                _path(chosen),
                cast_to=object,
                options=_PATIENT,
                stream=True,
                stream_cls=Stream[object],
            ) as stream:
                for chunk in chunks(stream.response):
                    archive.write(chunk)
            archive.seek(0)
            return unpack(archive, target)
