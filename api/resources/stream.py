"""/v1/regraft/jobs/{id}/stream: a job's events as server-sent events.

    id: ftevent-…                                        data: the event, as /events has it
    event: status    data: {"object": "regraft.job.status", "id": "ftjob-…", "status": "running"}
    event: progress  data: {"object": "regraft.job.progress", "id": "ftjob-…", "step": 3, "phase": "sampling", ...}
    event: queue     data: {"object": "regraft.job.queue", "id": "ftjob-…", "position": 2, "reason": "waiting for ..."}

A status is sent at the start and on every change, after the events that led to it, and has no id. With `?progress=true`
so are the progress inside of a step, of which only the newest is kept, and the place of a waiting job in its queue. A
final status is followed by `data: [DONE]`, as in OpenAI's streams. A client that reconnects with `Last-Event-ID`, as
every EventSource does, misses nothing. Shutdown of the server closes all streams. A stream also ends when its key is
revoked or expires, or its project is archived.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.http.admission import AdmittedRequest
from api.http.deps import CurrentCaller, CurrentProject, ServiceDep
from api.http.json_responses import encode
from api.http.shutdown import Shutdown
from api.resources.job_shapes import EventOut
from core.asgi import END_OF_EVENTS, UNBUFFERED, sent_event
from core.database.engine import Database
from core.database.states import JOB
from core.database.tables import ApiKey
from core.errors import InvalidApiKey
from core.jobs import events, fairness, lifecycle
from core.jobs.fairness import QueuePosition
from core.tenancy import keys
from core.tenancy.limits import NO_LIMITS, Limits

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])

POLL_SECONDS = 1.0
PLACE_SECONDS = 5.0  # between two reads of a waiting job's place, for which the whole queue is sorted
KEEP_ALIVE_SECONDS = 15.0  # proxies close idle connections after a minute
PAGE = 100  # events in memory per stream


@router.get("/{job_id}/stream", response_class=StreamingResponse)
async def stream_events(
    job_id: str,
    project: CurrentProject,
    service: ServiceDep,
    caller: CurrentCaller,
    last_event_id: Annotated[str | None, Header()] = None,
    progress: bool = False,
    after: Annotated[
        str | None, Query(description="As `Last-Event-ID`, which takes precedence: start after this event.")
    ] = None,
) -> StreamingResponse:
    """Stream the events of a job, past and future, until it ends; with `progress` what it does inside of its steps."""
    # Both raise here, because a stream that has started cannot return 429 or 404.
    place = await service.admission.streams.enter(project.id)
    try:
        log = JobLog(
            service.database,
            project.id,
            job_id,
            service.stream_readers,
            with_progress=progress,
            key_id=caller.key.id,
            limits=service.settings.default_limits,
            pod_classes=service.settings.hardware.pod_classes,
        )
        start = last_event_id or after
        first = await log.read(start)
    except BaseException:
        place.leave()
        raise
    return Following(follow(log, first, service.shutdown, after=start), place)


class Following(StreamingResponse):
    """A streaming response that releases its place when it ends, even if the client left before the first event."""

    def __init__(self, chunks: AsyncIterator[bytes], place: AdmittedRequest) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers=UNBUFFERED)
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._place.leave()


@dataclass(frozen=True)
class News:
    """The events after a cursor, and the job's status and progress in the same snapshot."""

    events: list[EventOut]
    status: str
    has_more: bool
    progress: dict[str, Any] | None = None
    place: QueuePosition | None = None  # None: the job does not wait, or the place was not read


@dataclass(frozen=True)
class JobLog:
    """The log of one job, read in short sessions: between polls a stream holds no connection and no thread."""

    database: Database
    project_id: str
    job_id: str
    readers: CapacityLimiter
    with_progress: bool = False
    key_id: str | None = None  # checked at each read
    limits: Limits = NO_LIMITS  # of projects without their own
    pod_classes: frozenset[str] = frozenset()  # of the settings

    async def read(self, after: str | None, *, with_place: bool = True) -> News:
        """Return the news after an event. `with_place`: with the place of a waiting job, if the log has progress.

        Raises:
            InvalidApiKey: the key is no longer valid.
            JobNotFound: there is no such job.
            InvalidRequest: `after` is not an event of this job.
        """
        return await to_thread.run_sync(partial(self._read, after, with_place), limiter=self.readers)

    def _read(self, after: str | None, with_place: bool) -> News:
        # One snapshot for both, so that a final status comes with all of its events.
        with self.database.read() as session:
            if self.key_id is not None:
                keys.usable(session, ApiKey.id == self.key_id, self.key_id)
            job = lifecycle.get(session, self.project_id, self.job_id)
            page = events.onwards(session, job.id, after=after, limit=PAGE)
            found = [EventOut.of(event) for event in page.items]
            progress = lifecycle.progress_of(job) if self.with_progress else None
            jobs = [job] if self.with_progress and with_place else []
            places = fairness.places(session, jobs, self.limits, self.pod_classes)
            return News(found, job.status, page.has_more, progress, places.get(job.id))


async def follow(
    log: JobLog, news: News, shutdown: Shutdown, *, after: str | None = None
) -> AsyncIterator[bytes]:
    """Yield `news` (read after `after`) and all later events as server-sent events. Ends with the server or the key."""
    last, status, silence = after, "", 0.0
    progress: dict[str, Any] | None = None
    place, place_age = news.place, 0.0
    is_new_place = place is not None
    while True:
        for event in news.events:
            last = event.id
            yield sent_event(encode(event), event_id=event.id)
        if not news.has_more and news.status != status:
            status = news.status
            yield _named("status", log.job_id, {"status": status})
            if status in JOB.final:
                yield END_OF_EVENTS
                return
            silence = 0.0
        elif news.events:
            silence = 0.0
        if is_new_place and place is not None:
            yield _named("queue", log.job_id, asdict(place))
            is_new_place, silence = False, 0.0
        if not news.has_more and news.progress is not None and news.progress != progress:
            progress = news.progress
            yield _named("progress", log.job_id, progress)
            silence = 0.0
        elif silence >= KEEP_ALIVE_SECONDS:
            # No empty line follows: OpenAI's decoder would parse it as the end of an empty message.
            yield b": still here\n"
            silence = 0.0
        if not news.has_more:
            await shutdown.sleep(POLL_SECONDS)
            silence += POLL_SECONDS
            place_age += POLL_SECONDS
        if shutdown.begun:
            return
        try:
            reads_place = place_age >= PLACE_SECONDS
            news = await log.read(last, with_place=reads_place)
        except InvalidApiKey:
            return  # a client that reconnects gets the reason as 401
        if reads_place:
            is_new_place, place, place_age = news.place not in (None, place), news.place, 0.0


def _named(event: str, job_id: str, data: Mapping[str, Any]) -> bytes:
    content = encode({"object": f"regraft.job.{event}", "id": job_id, **data})
    return sent_event(content, kind=event)
