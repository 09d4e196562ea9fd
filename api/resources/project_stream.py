"""/v1/regraft/stream: what changes in a project, as server-sent events.

    id: 1764040000
    event: job
    data: {"object": "regraft.state", "kind": "job", "id": "ftjob-…", "status": "running", "progress": {…}, …}

The stream begins with the state of every unfinished job, pipeline and eval run, and continues with each change: a
message has the whole state, of which only the newest matters. The id is a time; a client that reconnects with
`Last-Event-ID`, as every EventSource does, gets what has ended since then, but not what ended more than a day ago. It
ends when the server shuts down, the key is revoked or expires, or the project is archived.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse

from api.http.deps import CurrentCaller, CurrentProject, ServiceDep
from api.http.json_responses import encode
from api.http.shutdown import Shutdown
from api.resources.stream import KEEP_ALIVE_SECONDS, POLL_SECONDS, Following
from core.asgi import sent_event
from core.database.engine import Database
from core.database.tables import ApiKey
from core.errors import InvalidApiKey, InvalidRequest
from core.pipelines import activity
from core.pipelines.activity import Snapshot, State
from core.tenancy import keys

router = APIRouter(prefix="/regraft/stream", tags=["regraft"])


@router.get("", response_class=StreamingResponse)
async def stream_project(
    project: CurrentProject,
    service: ServiceDep,
    caller: CurrentCaller,
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Stream the states of the project's jobs, pipelines and eval runs: all unfinished ones, then every change."""
    since = _time(last_event_id)
    place = await service.admission.streams.enter(project.id)
    try:
        log = ProjectLog(service.database, project.id, service.stream_readers, caller.key.id)
        first = await log.first(since)
    except BaseException:
        place.leave()
        raise
    return Following(follow(log, first, service.shutdown), place)


def _time(last_event_id: str | None) -> int | None:
    """Raise InvalidRequest for an id that no stream of a project has sent."""
    if last_event_id is None:
        return None
    if not last_event_id.isascii() or not last_event_id.isdecimal() or len(last_event_id) > 12:
        raise InvalidRequest(f"'{last_event_id}' is not an id of this stream.", param="after")
    return int(last_event_id)


@dataclass(frozen=True)
class ProjectLog:
    """The states of a project, read in short sessions: between polls a stream holds no connection and no thread."""

    database: Database
    project_id: str
    readers: CapacityLimiter
    key_id: str | None = None  # checked at each read

    async def first(self, since: int | None) -> Snapshot:
        return await to_thread.run_sync(partial(self._first, since), limiter=self.readers)

    def _first(self, since: int | None) -> Snapshot:
        with self.database.read() as session:
            return activity.first(session, self.project_id, since=since)

    async def following(self, before: Snapshot) -> Snapshot:
        """Raise InvalidApiKey if the key is no longer valid."""
        return await to_thread.run_sync(partial(self._following, before), limiter=self.readers)

    def _following(self, before: Snapshot) -> Snapshot:
        with self.database.read() as session:
            if self.key_id is not None:
                keys.usable(session, ApiKey.id == self.key_id, self.key_id)
            return activity.following(session, self.project_id, before)


async def follow(log: ProjectLog, snapshot: Snapshot, shutdown: Shutdown) -> AsyncIterator[bytes]:
    """Yield the states of `snapshot` and all later changes as server-sent events. Ends with the server or the key."""
    told: dict[str, State] = {}
    silence = 0.0
    yield b": open\n"  # some proxies hold the headers back until the first byte
    while True:
        news = [state for state in snapshot.states if told.get(state.id) != state]
        for state in news:
            yield _message(snapshot.at, state)
        told = {state.id: state for state in snapshot.states}
        silence = 0.0 if news else silence
        if silence >= KEEP_ALIVE_SECONDS:
            yield b": still here\n"
            silence = 0.0
        await shutdown.sleep(POLL_SECONDS)
        silence += POLL_SECONDS
        if shutdown.begun:
            return
        try:
            snapshot = await log.following(snapshot)
        except InvalidApiKey:
            return  # a client that reconnects gets the reason as 401


def _message(at: int, state: State) -> bytes:
    data = {"object": "regraft.state", "kind": state.kind, "id": state.id, **state.data}
    return sent_event(encode(data), kind=state.kind, event_id=str(at))
