"""`AsyncRegraft` is an `openai.AsyncOpenAI` for a regraft server, extended by its features beyond OpenAI's API.

The synchronous classes in regraft.sync are generated from the asynchronous ones here and in regraft.resources.
"""

import inspect
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2
import openai

from regraft import config, datasets
from regraft.datasets import Summary
from regraft.errors import NotARegraftServer, NotSupportedByServer, foreign, refuse_foreign, typed_error
from regraft.literals import FileMethod, Method, Split
from regraft.requests import Source, read_grader
from regraft.resources.aliases import AsyncAliases
from regraft.resources.checkpoints import AsyncCheckpoints
from regraft.resources.evals import AsyncEvals
from regraft.resources.grader_audits import AsyncGraderAudits
from regraft.resources.graders import AsyncGraders
from regraft.resources.jobs import AsyncJobs
from regraft.resources.pipelines import AsyncPipelines
from regraft.resources.previews import PATH as PREVIEWS
from regraft.resources.previews import AsyncPreviews
from regraft.resources.regrades import AsyncRegrades
from regraft.resources.rollouts import AsyncRollouts
from regraft.resources.service import AsyncService
from regraft.resources.waiting import refuse_failed
from regraft.routes import route
from regraft.types import Estimate, FileProfile, PreviewProgress, PreviewReport

ESTIMATE = "/regraft/estimate"


class Datasets:
    """Works without the server."""

    def validate(
        self,
        file: str | Path,
        *,
        grader: Source | None = None,
        split: Split = "train",
        method: Method = "reinforcement",
    ) -> Summary:
        """Validate a JSONL file by the server's own rules; see regraft.datasets.validate."""
        return datasets.validate(file, grader=grader, split=split, method=method)


class AsyncRegraft(openai.AsyncOpenAI):
    """OpenAI's client for a regraft server, with all of its resources and `jobs`, `rollouts`, `regrades`,
    `checkpoints`, `aliases`, `graders`, `grader_audits`, `evals`, `pipelines`, `previews`, `datasets`, `estimate`,
    `preview` and `profile`.

    Server and key are the arguments, else REGRAFT_BASE_URL and REGRAFT_API_KEY, else the login saved by `regraft
    login`.
    OPENAI_* environment variables are ignored, so OpenAI's keys are not sent to this server.
    """

    def __init__(
        self, *, base_url: str | httpx2.URL | None = None, api_key: Any = None, **options: Any
    ) -> None:
        """The other options are those of openai.AsyncOpenAI.

        Raises:
            NotConfigured: no server or key is configured.
        """
        super().__init__(**_where(base_url, api_key), **options)
        _without_openais(self, options)

    @cached_property
    def jobs(self) -> AsyncJobs:
        return AsyncJobs(self)

    @cached_property
    def rollouts(self) -> AsyncRollouts:
        return AsyncRollouts(self)

    @cached_property
    def regrades(self) -> AsyncRegrades:
        return AsyncRegrades(self)

    @cached_property
    def checkpoints(self) -> AsyncCheckpoints:
        return AsyncCheckpoints(self)

    @cached_property
    def aliases(self) -> AsyncAliases:
        return AsyncAliases(self)

    @cached_property
    def graders(self) -> AsyncGraders:
        return AsyncGraders(self)

    @cached_property
    def evals(self) -> AsyncEvals:
        return AsyncEvals(self)

    @cached_property
    def grader_audits(self) -> AsyncGraderAudits:
        return AsyncGraderAudits(self)

    @cached_property
    def pipelines(self) -> AsyncPipelines:
        return AsyncPipelines(self)

    @cached_property
    def service(self) -> AsyncService:
        return AsyncService(self)

    @cached_property
    def previews(self) -> AsyncPreviews:
        return AsyncPreviews(self)

    @cached_property
    def datasets(self) -> Datasets:
        return Datasets()

    async def estimate(self, request: Source) -> Estimate:
        """Estimate the size, time and cost of a job. Uploads its local files; creates nothing.

        Raises:
            NotSupportedByServer: the server is too old.
        """
        try:
            return await self.post(ESTIMATE, body=await self.jobs.prepare(request), cast_to=Estimate)
        except NotSupportedByServer as old:
            raise _too_old("estimate", old) from old

    async def profile(
        self,
        file_id: str,
        *,
        model: str | None = None,
        method: FileMethod | None = None,
        validation_file: str | None = None,
        grader: Source | None = None,
        max_completion_tokens: int | None = None,
    ) -> FileProfile:
        """Read a dataset file on the server: token lengths, duplicates, overlap with the validation file, and the
        fields of its rows. Creates nothing.

        Args:
            model: counts tokens with its tokenizer and chat template.
            method: whose rows the file has; default: by the format of its first row.
            grader: a specification, or a file as `graders.test` reads it: which rows lack a field that it reads?
            max_completion_tokens: room for an answer; default: that of "auto".
        """
        body = _profile(model, method, validation_file, grader, max_completion_tokens)
        try:
            return await self.post(
                route("/regraft/files", file_id, "profile"), body=body, cast_to=FileProfile
            )
        except NotSupportedByServer as old:
            raise _too_old("profile", old, "files") from old

    async def preview(
        self,
        request: Source,
        *,
        rows: int | None = None,
        samples: int | None = None,
        progress: Callable[[PreviewProgress], None] = lambda progress: None,
    ) -> PreviewReport:
        """Sample and grade a few rows with the job's model, and estimate the job: how many answers pass, and whether
        there is signal to learn from. Uploads local files; creates no job.

        The server samples `samples` answers to each of `rows`, by default 8 and 8. `progress` is called with how far
        it is, twice a second. This is `previews.create` and `previews.wait`.

        Raises:
            NotSupportedByServer: the server is too old.
        """
        try:
            made = await self.previews.create(request, rows=rows, samples=samples)
        except NotSupportedByServer as old:
            raise _too_old("preview", old) from old
        progress(made.progress)
        ended = await self.previews.wait(made.id, progress=lambda preview: progress(preview.progress))
        refuse_failed(self, ended, PREVIEWS)
        assert ended.report is not None, "a completed preview has a report"
        return ended.report

    async def _process_response(self, *, response: httpx2.Response, **how: Any) -> Any:
        try:
            refuse_foreign(response, wants_json=_wants_json(**how))
            return await super()._process_response(response=response, **how)
        except NotARegraftServer:
            await response.aclose()
            raise
        except json.JSONDecodeError as cause:
            raise foreign(response) from cause

    def _make_status_error(
        self, err_msg: str, *, body: object, response: httpx2.Response
    ) -> openai.APIStatusError:
        error = super()._make_status_error(err_msg, body=body, response=response)
        return typed_error(error, err_msg, response)


def _where(base_url: str | httpx2.URL | None, api_key: Any) -> dict[str, Any]:
    if callable(api_key) and base_url is not None:  # OpenAI's clients accept a function that returns keys
        return {"base_url": config.normal(str(base_url)), "api_key": api_key}
    login = config.find(None if base_url is None else str(base_url), api_key)
    return {"base_url": login.base_url, "api_key": login.api_key}


def _without_openais(client: openai.OpenAI | openai.AsyncOpenAI, options: dict[str, Any]) -> None:
    # OPENAI_ORG_ID and OPENAI_PROJECT_ID do not exist on this server, which would reject them.
    client.organization, client.project = options.get("organization"), options.get("project")


def _wants_json(cast_to: Any = None, stream: bool = False, **_: Any) -> bool:
    # For other types OpenAI's client would return the text, which has none of the expected attributes.
    return not stream and (
        cast_to is object or (inspect.isclass(cast_to) and issubclass(cast_to, openai.BaseModel))
    )


def _profile(
    model: str | None,
    method: FileMethod | None,
    validation_file: str | None,
    grader: Source | None,
    max_completion_tokens: int | None,
) -> dict[str, Any]:
    given = {
        "model": model,
        "method": method,
        "validation_file": validation_file,
        "grader": None if grader is None else read_grader(grader),
        "max_completion_tokens": max_completion_tokens,
    }
    return {name: value for name, value in given.items() if value is not None}


def _too_old(what: str, old: NotSupportedByServer, of: str = "jobs") -> NotSupportedByServer:
    message = f"This server cannot {what} {of}: it is older than this version of regraft."
    return NotSupportedByServer(message, response=old.response, body=old.body)
