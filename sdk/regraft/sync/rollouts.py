"""Written by .ci/sync_client.py from regraft.resources.rollouts; do not edit."""

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from openai import Stream
from openai.pagination import SyncCursorPage

from regraft.literals import AdvantageScale, Format, Order, Outcome, PromptSort, Sort, Split
from regraft.resources.rollouts import SILENCE_SECONDS, Filters, _asking, _path, _what_if
from regraft.routes import route
from regraft.saving import atomic_file, chunks
from regraft.types import Attribution, PromptHistory, Rollout, RolloutTokens, WhatIf

if TYPE_CHECKING:
    from openai import OpenAI


class PromptPage(SyncCursorPage[PromptHistory]):
    """A page of prompts, and facts about all prompts of the selected steps."""

    steps: list[int]
    counted_step: int | None = (
        None  # that outcomes and changes are of; of validations the delivered checkpoint's
    )
    pass_threshold: float  # the mean reward from which a prompt counts as solved
    outcomes: dict[str, int]  # the number of prompts by outcome
    stored: int  # the number of answers behind the list


class Rollouts:
    def __init__(self, client: "OpenAI") -> None:
        self._client = client

    def list(
        self,
        job_id: str,
        *,
        limit: int | None = None,
        after: str | None = None,
        order: Order | None = None,
        sort: Sort | None = None,
        **filters: Unpack[Filters],
    ) -> SyncCursorPage[Rollout]:
        """A page of answers, ordered by step or `sort`; iterating over it fetches all pages.

        With `sort`, answers without the value come last. A page continues after the id `after`.
        A page has at most `limit` answers: by default 100, at most 1000; with `step`, by default all of that step.
        """
        return self._client.get_api_list(
            _path(job_id),
            model=Rollout,
            page=SyncCursorPage[Rollout],
            options=_asking(filters, limit=limit, after=after, order=order, sort=sort),
        )

    def prompts(
        self,
        job_id: str,
        *,
        split: Split = "valid",
        step_from: int | None = None,
        step_to: int | None = None,
        line: int | None = None,
        outcome: Outcome | None = None,
        pass_threshold: float | None = None,
        sort: PromptSort | None = None,
        order: Order | None = None,
        limit: int | None = None,
    ) -> PromptPage:
        """A page of prompts with their mean reward at each step; iterating over it fetches all pages.

        The server computes the means, so the answers are not transferred. A page has at most `limit` prompts: by
        default 100, at most 1000. Outcomes are by `pass_threshold`; the default is that of the job's evals.
        """
        options = {
            "split": split,
            "step_from": step_from,
            "step_to": step_to,
            "line": line,
            "outcome": outcome,
            "pass_threshold": pass_threshold,
            "sort": sort,
            "order": order,
            "limit": limit,
        }
        return self._client.get_api_list(
            route(_path(job_id), "prompts"),
            model=PromptHistory,
            page=PromptPage,
            options=_asking({}, **options),
        )

    def what_if(
        self,
        job_id: str,
        formula: str,
        *,
        pass_threshold: float | None = None,
        advantage_scale: AdvantageScale | None = None,
        split: Split | None = None,
        step_from: int | None = None,
        step_to: int | None = None,
    ) -> WhatIf:
        """What another `calculate_output` of the job's multi grader would have changed, from the stored sub-scores.

        `advantage_scale` divides the advantages as a loss does: by nothing, the std of the group, or that of the step.

        Raises:
            openai.BadRequestError: the job has no multi grader, or the formula is invalid.
        """
        options = _what_if(formula, pass_threshold, advantage_scale, split, step_from, step_to)
        return self._client.get(route(_path(job_id), "what-if"), cast_to=WhatIf, options=options)

    def attribution(
        self,
        job_id: str,
        *,
        step: int | None = None,
        step_from: int | None = None,
        step_to: int | None = None,
        limit: int | None = None,
    ) -> Attribution:
        """Which prompts, and which parts of a multi grader, the updates of training steps came from.

        At most `limit` groups are listed: by default 20, at most 100.

        Raises:
            openai.BadRequestError: the answers of the job do not have one advantage each.
        """
        options = _asking({"step": step, "step_from": step_from, "step_to": step_to}, limit=limit)
        return self._client.get(route(_path(job_id), "attribution"), cast_to=Attribution, options=options)

    def tokens(self, job_id: str, rollout_id: str) -> RolloutTokens:
        """The log-probability, advantage and sampler gap of each token of an answer.

        Raises:
            openai.NotFoundError: they are not stored. Answers that have them are listed with `has_tokens=True`.
        """
        return self._client.get(route(_path(job_id), rollout_id, "tokens"), cast_to=RolloutTokens)

    def download(
        self, job_id: str, path: str | Path, *, format: Format = "jsonl", **filters: Unpack[Filters]
    ) -> Path:
        """Download all matching answers to the file `path`, and return it.

        The file appears, or replaces the existing one, when it is complete.

        Raises:
            openai.APIConnectionError: the connection broke before that.
        """
        target = Path(path)
        with self._client.get(
            route(_path(job_id), "download"),
            cast_to=object,
            options=_asking(filters, format=format) | {"timeout": SILENCE_SECONDS},
            stream=True,
            stream_cls=Stream[object],
        ) as stream:
            with atomic_file(target) as file:
                for chunk in chunks(stream.response):
                    file.write(chunk)
        return target
