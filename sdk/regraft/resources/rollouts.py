"""client.rollouts: every answer that was sampled, and what the graders said of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from openai import AsyncStream, Stream
from openai.pagination import AsyncCursorPage, SyncCursorPage

from regraft.saving import async_chunks, chunks, whole
from regraft.types import Rollout

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from openai._base_client import AsyncPaginator

Split = Literal["train", "valid"]
Format = Literal["jsonl", "parquet"]
Order = Literal["asc", "desc"]
SILENCE_SECONDS = 60.0


class Filters(TypedDict, total=False):
    """Which answers; what is not given, or None, lets all through. docs/rollouts.md says more of each."""

    step: int | None  # 0 is the validation of the base model
    step_from: int | None
    step_to: int | None
    split: Split | None  # with `step` it is "train" unless given
    line: int | None  # of the dataset file, from 1
    finish_reason: Literal["stop", "length"] | None
    graded: bool | None  # whether there is a score
    error: str | None  # the kind of error that kept it from being graded
    grader: str | None  # a part of a multi grader: `graded` and the bounds are about its score
    min_score: float | None
    max_score: float | None


class Rollouts:
    def __init__(self, client: "OpenAI") -> None:
        self._client = client

    def list(
        self,
        job_id: str,
        *,
        limit: int | None = None,
        order: Order | None = None,
        **filters: Unpack[Filters],
    ) -> SyncCursorPage[Rollout]:
        """A page of answers, by step; `for rollout in client.rollouts.list(...)` goes on over all the pages.

        A page has at most `limit` answers: 100 unless given, 1000 at the most, and with `step` all of that step.
        """
        return self._client.get_api_list(
            _path(job_id),
            model=Rollout,
            page=SyncCursorPage[Rollout],
            options=_asking(filters, limit=limit, order=order),
        )

    def download(
        self, job_id: str, path: str | Path, *, format: Format = "jsonl", **filters: Unpack[Filters]
    ) -> Path:
        """Write all answers that the filters let through to the file `path`, and return it.

        The file appears, or replaces the one that was there, when it is whole.

        Raises:
            openai.APIConnectionError: the connection broke before it was.
        """
        target = Path(path)
        with (
            self._client.get(
                f"{_path(job_id)}/download",
                cast_to=object,
                options=_asking(filters, format=format) | {"timeout": SILENCE_SECONDS},
                stream=True,
                stream_cls=Stream[object],
            ) as stream,
            whole(target) as file,
        ):
            for chunk in chunks(stream.response):
                file.write(chunk)
        return target


class AsyncRollouts:
    def __init__(self, client: "AsyncOpenAI") -> None:
        self._client = client

    def list(
        self,
        job_id: str,
        *,
        limit: int | None = None,
        order: Order | None = None,
        **filters: Unpack[Filters],
    ) -> "AsyncPaginator[Rollout, AsyncCursorPage[Rollout]]":
        """As Rollouts.list: `async for rollout in client.rollouts.list(...)`, or await it for one page."""
        return self._client.get_api_list(
            _path(job_id),
            model=Rollout,
            page=AsyncCursorPage[Rollout],
            options=_asking(filters, limit=limit, order=order),
        )

    async def download(
        self, job_id: str, path: str | Path, *, format: Format = "jsonl", **filters: Unpack[Filters]
    ) -> Path:
        """As Rollouts.download."""
        target = Path(path)
        async with await self._client.get(
            f"{_path(job_id)}/download",
            cast_to=object,
            options=_asking(filters, format=format) | {"timeout": SILENCE_SECONDS},
            stream=True,
            stream_cls=AsyncStream[object],
        ) as stream:
            with whole(target) as file:
                async for chunk in async_chunks(stream.response):
                    file.write(chunk)
        return target


def _path(job_id: str) -> str:
    return f"/regraft/jobs/{job_id}/rollouts"


def _asking(filters: Mapping[str, Any], **more: Any) -> Any:
    # The server passes over what it does not know: a misspelt filter would let everything through.
    if unknown := filters.keys() - Filters.__annotations__.keys():
        raise TypeError(
            f"Rollouts have no filter {min(unknown)!r}; there are {', '.join(Filters.__annotations__)}."
        )
    asked = {**filters, **more}
    return {"params": {name: value for name, value in asked.items() if value is not None}}
