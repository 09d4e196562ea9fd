"""client.pipelines: stages of jobs and files, each from the results of others."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import openai
from openai.pagination import AsyncCursorPage

from regraft._rules.states import PIPELINE
from regraft.requests import PipelineRequest, Source, read_pipeline
from regraft.resources.jobs import validate_local
from regraft.resources.waiting import AsyncWaiting
from regraft.routes import route
from regraft.types import Pipeline

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai._base_client import AsyncPaginator

PATH = "/regraft/pipelines"
POLL_SECONDS = 2.0


def _validate_local(request: PipelineRequest) -> None:
    """Raise InvalidDataset for the first local file of a job with invalid rows."""
    for job in request.jobs:
        validate_local(job)


class AsyncPipelines:
    def __init__(self, client: "AsyncOpenAI") -> None:
        self._client = client

    async def create(
        self,
        *,
        stages: Sequence[Mapping[str, Any]],
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Pipeline:
        """Create a pipeline from stages as the API reads them (docs/howto/pipelines.md)."""
        return await self._post(PATH, {"stages": list(stages), "name": name, "metadata": metadata})

    async def submit(self, source: Source) -> Pipeline:
        """Create a pipeline from a .toml, .json or .yaml file; local files of its jobs are validated, all are uploaded.

        If the server refuses the pipeline or one of its files, the files that were uploaded are deleted.
        """
        asked, files = await asyncio.to_thread(read_pipeline, source), self._client.files
        await asyncio.to_thread(_validate_local, asked)
        ids: dict[tuple[str | int, ...], str] = {}
        try:
            for way, path in asked.uploads.items():
                ids[way] = (await files.create(file=path, purpose="fine-tune")).id
            return await self._post(PATH, asked.with_ids(ids))
        except (OSError, openai.APIError) as error:
            for file_id in _unused(ids, asked.uploads, error):
                with suppress(openai.APIError):  # the first error is the one to report
                    await files.delete(file_id)
            raise

    async def sweep(
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
        return await self.create(stages=[{"name": "sweep", "sweep": sweep}], name=name)

    def list(
        self, *, after: str | None = None, limit: int = 20
    ) -> "AsyncPaginator[Pipeline, AsyncCursorPage[Pipeline]]":
        """Newest first."""
        return self._client.get_api_list(
            PATH, page=AsyncCursorPage[Pipeline], model=Pipeline, options=_listed(after, limit)
        )

    async def retrieve(self, pipeline_id: str) -> Pipeline:
        return await self._client.get(route(PATH, pipeline_id), cast_to=Pipeline)

    async def wait(
        self,
        pipeline_id: str,
        *,
        progress: Callable[[Pipeline], None] = lambda pipeline: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> Pipeline:
        """Return the pipeline once it has ended or is paused; `progress` gets it every few seconds until then."""
        return await AsyncWaiting(POLL_SECONDS, sleep).until(
            lambda pipeline: pipeline.status in PIPELINE.stopped, lambda: self.retrieve(pipeline_id), progress
        )

    async def cancel(self, pipeline_id: str) -> Pipeline:
        """Cancel it and the jobs of its running stages."""
        return await self._post(route(PATH, pipeline_id, "cancel"))

    async def pause(self, pipeline_id: str) -> Pipeline:
        """Start no further stage, and pause the running jobs."""
        return await self._post(route(PATH, pipeline_id, "pause"))

    async def resume(self, pipeline_id: str) -> Pipeline:
        return await self._post(route(PATH, pipeline_id, "resume"))

    async def retry(self, pipeline_id: str) -> Pipeline:
        """Start its failed and cancelled stages again."""
        return await self._post(route(PATH, pipeline_id, "retry"))

    async def clone(self, pipeline_id: str, *, first: str | None = None, name: str | None = None) -> Pipeline:
        """Create a copy. Stages before `first` keep their results; without it all start again."""
        return await self._post(route(PATH, pipeline_id, "clone"), {"from": first, "name": name})

    async def _post(self, path: str, body: object = None) -> Pipeline:
        return await self._client.post(path, body=body, cast_to=Pipeline)


# After any other error, such as a lost connection, the server may have created the pipeline.
REFUSALS = (
    openai.BadRequestError,
    openai.AuthenticationError,
    openai.PermissionDeniedError,
    openai.NotFoundError,
    openai.UnprocessableEntityError,
)


def _unused(ids: Mapping[Any, str], uploads: Collection[Any], error: Exception) -> list[str]:
    """The uploaded files of a pipeline that certainly does not exist after this error."""
    certainly = len(ids) < len(uploads) or isinstance(error, REFUSALS)
    return list(ids.values()) if certainly else []


def _listed(after: str | None, limit: int) -> Any:
    return {"params": {"limit": limit} | ({} if after is None else {"after": after})}
