"""Written by .ci/sync_client.py from regraft.client; do not edit."""

import json
from collections.abc import Callable
from functools import cached_property
from typing import Any

import httpx2
import openai

from regraft.client import ESTIMATE, Datasets, _profile, _too_old, _wants_json, _where, _without_openais
from regraft.errors import NotARegraftServer, NotSupportedByServer, foreign, refuse_foreign, typed_error
from regraft.literals import FileMethod
from regraft.requests import Source
from regraft.resources.previews import PATH as PREVIEWS
from regraft.resources.waiting import refuse_failed
from regraft.routes import route
from regraft.sync.aliases import Aliases
from regraft.sync.checkpoints import Checkpoints
from regraft.sync.evals import Evals
from regraft.sync.grader_audits import GraderAudits
from regraft.sync.graders import Graders
from regraft.sync.jobs import Jobs
from regraft.sync.pipelines import Pipelines
from regraft.sync.previews import Previews
from regraft.sync.regrades import Regrades
from regraft.sync.rollouts import Rollouts
from regraft.sync.service import Service
from regraft.types import Estimate, FileProfile, PreviewProgress, PreviewReport


class Regraft(openai.OpenAI):
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
        """The other options are those of openai.OpenAI.

        Raises:
            NotConfigured: no server or key is configured.
        """
        super().__init__(**_where(base_url, api_key), **options)
        _without_openais(self, options)

    @cached_property
    def jobs(self) -> Jobs:
        return Jobs(self)

    @cached_property
    def rollouts(self) -> Rollouts:
        return Rollouts(self)

    @cached_property
    def regrades(self) -> Regrades:
        return Regrades(self)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self)

    @cached_property
    def aliases(self) -> Aliases:
        return Aliases(self)

    @cached_property
    def graders(self) -> Graders:
        return Graders(self)

    @cached_property
    def evals(self) -> Evals:
        return Evals(self)

    @cached_property
    def grader_audits(self) -> GraderAudits:
        return GraderAudits(self)

    @cached_property
    def pipelines(self) -> Pipelines:
        return Pipelines(self)

    @cached_property
    def service(self) -> Service:
        return Service(self)

    @cached_property
    def previews(self) -> Previews:
        return Previews(self)

    @cached_property
    def datasets(self) -> Datasets:
        return Datasets()

    def estimate(self, request: Source) -> Estimate:
        """Estimate the size, time and cost of a job. Uploads its local files; creates nothing.

        Raises:
            NotSupportedByServer: the server is too old.
        """
        try:
            return self.post(ESTIMATE, body=self.jobs.prepare(request), cast_to=Estimate)
        except NotSupportedByServer as old:
            raise _too_old("estimate", old) from old

    def profile(
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
            return self.post(route("/regraft/files", file_id, "profile"), body=body, cast_to=FileProfile)
        except NotSupportedByServer as old:
            raise _too_old("profile", old, "files") from old

    def preview(
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
            made = self.previews.create(request, rows=rows, samples=samples)
        except NotSupportedByServer as old:
            raise _too_old("preview", old) from old
        progress(made.progress)
        ended = self.previews.wait(made.id, progress=lambda preview: progress(preview.progress))
        refuse_failed(self, ended, PREVIEWS)
        assert ended.report is not None, "a completed preview has a report"
        return ended.report

    def _process_response(self, *, response: httpx2.Response, **how: Any) -> Any:
        try:
            refuse_foreign(response, wants_json=_wants_json(**how))
            return super()._process_response(response=response, **how)
        except NotARegraftServer:
            response.close()
            raise
        except json.JSONDecodeError as cause:
            raise foreign(response) from cause

    def _make_status_error(
        self, err_msg: str, *, body: object, response: httpx2.Response
    ) -> openai.APIStatusError:
        error = super()._make_status_error(err_msg, body=body, response=response)
        return typed_error(error, err_msg, response)
