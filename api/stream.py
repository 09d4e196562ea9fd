"""/v1/regraft/jobs/{id}/stream: a job's events as they are written, as server-sent events.

    id: ftevent-…                                        data: the event, as /events has it
    event: status    data: {"object": "regraft.job.status", "id": "ftjob-…", "status": "running"}

A status is sent at the beginning and whenever it has changed, behind the events that led to it, and has no id of
its own. Behind a final one comes `data: [DONE]`, as in OpenAI's streams. Whoever was cut off sends the last id back
as `Last-Event-ID`, as every EventSource does, and misses nothing. A server that ends cuts everybody off.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.admission import Place
from api.deps import CurrentProject, Parts
from api.jobs import EventOut
from api.shutdown import Shutdown
from core import events, jobs
from core.db import Database

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])

POLL_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15.0  # proxies give up on a connection after a minute of silence
PAGE = 100  # events held at once; the next ones are read when a client has taken these


@router.get("/{job_id}/stream", response_class=StreamingResponse)
async def stream_events(
    job_id: str,
    project: CurrentProject,
    service: Parts,
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Follow a job: all its events so far, then each as it is written, until the job ends."""
    # Both here and not in the stream, where it is too late for a 429 or a 404.
    place = await service.admission.streams.enter(project.id)
    try:
        log = JobLog(service.database, project.id, job_id, service.stream_readers)
        first = await log.read(last_event_id)
    except BaseException:
        place.leave()
        raise
    return Following(follow(log, first, service.shutdown, after=last_event_id), place)


class Following(StreamingResponse):
    """A stream that leaves its place when it ends, also if its client has left before the first event."""

    def __init__(self, chunks: AsyncIterator[bytes], place: Place) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nginx would collect it otherwise
        super().__init__(chunks, media_type="text/event-stream", headers=headers)
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._place.leave()


@dataclass(frozen=True)
class News:
    """What was written behind an event, and the job's status when it was read."""

    events: list[EventOut]
    status: str
    has_more: bool


@dataclass(frozen=True)
class JobLog:
    """The log of one job, read in short sessions: between two of them a stream holds no connection and no thread."""

    database: Database
    project_id: str
    job_id: str
    readers: CapacityLimiter

    async def read(self, after: str | None) -> News:
        """Raise JobNotFound, or InvalidRequest for an `after` that is no event of this job."""
        return await to_thread.run_sync(partial(self._read, after), limiter=self.readers)

    def _read(self, after: str | None) -> News:
        # One snapshot for both: a final status comes with all that led to it.
        with self.database.read() as session:
            job = jobs.get(session, self.project_id, self.job_id)
            page = events.onwards(session, job.id, after=after, limit=PAGE)
            return News([EventOut.of(event) for event in page.items], job.status, page.has_more)


async def follow(
    log: JobLog, news: News, shutdown: Shutdown, *, after: str | None = None
) -> AsyncIterator[bytes]:
    """`news`, which was read behind `after`, and then whatever comes, as server-sent events, until the server ends."""
    last, status, silence = after, "", 0.0
    while True:
        for event in news.events:
            last = event.id
            yield f"id: {event.id}\ndata: {event.model_dump_json()}\n\n".encode()
        if not news.has_more and news.status != status:
            status = news.status
            yield _status(log.job_id, status)
            if status in jobs.FINAL:
                yield b"data: [DONE]\n\n"
                return
            silence = 0.0
        elif news.events:
            silence = 0.0
        elif silence >= KEEP_ALIVE_SECONDS:
            # No empty line behind it: OpenAI's decoder would take that for the end of a message, an empty one.
            yield b": still here\n"
            silence = 0.0
        if not news.has_more:
            await shutdown.sleep(POLL_SECONDS)
            silence += POLL_SECONDS
        if shutdown.begun:
            return
        news = await log.read(last)


def _status(job_id: str, status: str) -> bytes:
    data = json.dumps({"object": "regraft.job.status", "id": job_id, "status": status})
    return f"event: status\ndata: {data}\n\n".encode()
