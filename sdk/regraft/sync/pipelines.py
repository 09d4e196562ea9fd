"""Written by .ci/sync_client.py from regraft.resources.pipelines; do not edit."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import openai
from openai.pagination import SyncCursorPage

from regraft._rules.states import PIPELINE
from regraft.requests import Source, read_pipeline
from regraft.resources.pipelines import PATH, POLL_SECONDS, _listed, _unused, _validate_local
from regraft.routes import route
from regraft.sync.waiting import Waiting
from regraft.types import Pipeline

if TYPE_CHECKING:
    from openai import OpenAI


class Pipelines:
    def __init__(self, client: "OpenAI") -> None:
        self._client = client

    def create(
        self,
        *,
        stages: Sequence[Mapping[str, Any]],
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Pipeline:
        """Create a pipeline from stages as the API reads them (docs/howto/pipelines.md)."""
        return self._post(PATH, {"stages": list(stages), "name": name, "metadata": metadata})

    def submit(self, source: Source) -> Pipeline:
        """Create a pipeline from a .toml, .json or .yaml file; local files of its jobs are validated, all are uploaded.

        If the server refuses the pipeline or one of its files, the files that were uploaded are deleted.
        """
        asked, files = read_pipeline(source), self._client.files
        _validate_local(asked)
        ids: dict[tuple[str | int, ...], str] = {}
        try:
            for way, path in asked.uploads.items():
                ids[way] = files.create(file=path, purpose="fine-tune").id
            return self._post(PATH, asked.with_ids(ids))
        except (OSError, openai.APIError) as error:
            for file_id in _unused(ids, asked.uploads, error):
                with suppress(openai.APIError):  # the first error is the one to report
                    files.delete(file_id)
            raise

    def sweep(
        self,
        job: Mapping[str, Any],
        over: Mapping[str, Sequence[Any]],
        *,
        budget: Mapping[str, Any] | None = None,
        stop_losers: bool = True,
        name: str | None = None,
    ) -> Pipeline:
        """Create a pipeline of one sweep: the job with each combination of these settings.

        Args:
            job: its request, as `client.jobs.prepare` returns it.
            over: values by setting, such as {"learning_rate": [1e-5, 3e-5]}.
            budget: of all jobs together, such as {"gpu_seconds": 3600}; only the best one continues beyond it.
            stop_losers: stop a job once another is certainly better.
        """
        sweep: dict[str, Any] = {"job": dict(job), "over": dict(over), "stop_losers": stop_losers}
        if budget is not None:
            sweep["budget"] = dict(budget)
        return self.create(stages=[{"name": "sweep", "sweep": sweep}], name=name)

    def list(self, *, after: str | None = None, limit: int = 20) -> SyncCursorPage[Pipeline]:
        """Newest first."""
        return self._client.get_api_list(
            PATH, page=SyncCursorPage[Pipeline], model=Pipeline, options=_listed(after, limit)
        )

    def retrieve(self, pipeline_id: str) -> Pipeline:
        return self._client.get(route(PATH, pipeline_id), cast_to=Pipeline)

    def wait(
        self,
        pipeline_id: str,
        *,
        progress: Callable[[Pipeline], None] = lambda pipeline: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Pipeline:
        """Return the pipeline once it has ended or is paused; `progress` gets it every few seconds until then."""
        return Waiting(POLL_SECONDS, sleep).until(
            lambda pipeline: pipeline.status in PIPELINE.stopped, lambda: self.retrieve(pipeline_id), progress
        )

    def cancel(self, pipeline_id: str) -> Pipeline:
        """Cancel it and the jobs of its running stages."""
        return self._post(route(PATH, pipeline_id, "cancel"))

    def pause(self, pipeline_id: str) -> Pipeline:
        """Start no further stage, and pause the running jobs."""
        return self._post(route(PATH, pipeline_id, "pause"))

    def resume(self, pipeline_id: str) -> Pipeline:
        return self._post(route(PATH, pipeline_id, "resume"))

    def retry(self, pipeline_id: str) -> Pipeline:
        """Start its failed and cancelled stages again."""
        return self._post(route(PATH, pipeline_id, "retry"))

    def clone(self, pipeline_id: str, *, first: str | None = None, name: str | None = None) -> Pipeline:
        """Create a copy. Stages before `first` keep their results; without it all start again."""
        return self._post(route(PATH, pipeline_id, "clone"), {"from": first, "name": name})

    def _post(self, path: str, body: object = None) -> Pipeline:
        return self._client.post(path, body=body, cast_to=Pipeline)
