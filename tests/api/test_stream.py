import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import httpx2
import pytest
import uvicorn
from anyio import CapacityLimiter
from fastapi.responses import StreamingResponse
from openai import OpenAI, Stream
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

from api.http.deps import Caller
from api.http.shutdown import Server, Shutdown
from api.resources.stream import KEEP_ALIVE_SECONDS, JobLog, follow, stream_events
from core.database.engine import Work
from core.database.tables import ApiKey, Job
from core.errors import TooManyAtOnce
from core.jobs import events, lifecycle
from tests.api.conftest import House
from tests.present import untyped


def say(house: House, job_id: str, *messages: str) -> list[str]:
    with house.database.write() as session:
        return [events.append(session, job_id, message).id for message in messages]


def cancel(house: House, job_id: str) -> None:
    with house.database.write() as session:
        lifecycle.cancel(Work(session), session.query(Job).where(Job.id == job_id).one())


def caller(house: House) -> Caller:
    with house.database.read() as session:
        return Caller(session.get_one(ApiKey, house.key_id()), house.project)


def parse(text: str) -> list[dict[str, Any]]:
    """The data of every message in a stream; comments and the like are left out."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [{"done": True} if one == "[DONE]" else json.loads(one) for one in data]


def words(messages: list[dict[str, Any]]) -> list[str]:
    return [one.get("message") or one.get("status") or "done" for one in messages]


@pytest.mark.both_databases
def test_a_finished_job_is_told_from_its_first_event_to_its_end(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    say(house, job_id, "one", "two")
    cancel(house, job_id)

    answer = api.get(f"/v1/regraft/jobs/{job_id}/stream")

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert words(parse(answer.text))[2:] == ["one", "two", "Fine-tuning job cancelled", "cancelled", "done"]


def test_an_event_is_sent_as_the_list_has_it_with_its_id(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    cancel(house, job_id)

    answer = api.get(f"/v1/regraft/jobs/{job_id}/stream")

    listed = api.get(f"/v1/fine_tuning/jobs/{job_id}/events").json()["data"]
    assert parse(answer.text)[: len(listed)] == listed[::-1]
    assert f"id: {listed[0]['id']}\n" in answer.text


@pytest.mark.both_databases
def test_who_was_cut_off_goes_on_behind_the_last_event_it_saw(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    one, _ = say(house, job_id, "one", "two")
    cancel(house, job_id)

    answer = api.get(f"/v1/regraft/jobs/{job_id}/stream", headers={"Last-Event-ID": one})

    assert words(parse(answer.text)) == ["two", "Fine-tuning job cancelled", "cancelled", "done"]


def test_a_browser_that_cannot_send_the_header_names_the_event_in_the_address(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    """Not when it reconnects: then it sends the header, which is newer."""
    job_id = create_job()["id"]
    one, two = say(house, job_id, "one", "two")
    cancel(house, job_id)
    path = f"/v1/regraft/jobs/{job_id}/stream?after={one}"

    first, again = api.get(path), api.get(path, headers={"Last-Event-ID": two})

    assert words(parse(first.text)) == ["two", "Fine-tuning job cancelled", "cancelled", "done"]
    assert words(parse(again.text)) == ["Fine-tuning job cancelled", "cancelled", "done"]


def test_it_can_have_seen_everything_but_the_end(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    cancel(house, job_id)
    last = api.get(f"/v1/fine_tuning/jobs/{job_id}/events").json()["data"][0]["id"]

    answer = api.get(f"/v1/regraft/jobs/{job_id}/stream", headers={"Last-Event-ID": last})

    assert words(parse(answer.text)) == ["cancelled", "done"]


@pytest.mark.both_databases
def test_an_event_of_another_job_is_no_place_to_go_on_from(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    (other,) = say(house, create_job()["id"], "elsewhere")

    answer = api.get(f"/v1/regraft/jobs/{job_id}/stream", headers={"Last-Event-ID": other})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


class Clock(Shutdown):
    """Time passes only in `sleep`, where `script` says what happens at which second."""

    def __init__(self, script: Mapping[float, Callable[[], object]]) -> None:
        super().__init__()
        self.script, self.now = script, 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if happens := self.script.get(self.now):
            await asyncio.to_thread(happens)


def follow_to_the_end(
    house: House,
    job_id: str,
    script: Mapping[float, Callable[[], object]],
    *,
    with_progress: bool = False,
    key_id: str | None = None,
) -> str:
    async def collect() -> bytes:
        log = JobLog(
            house.database,
            house.project.id,
            job_id,
            CapacityLimiter(1),
            with_progress=with_progress,
            key_id=key_id,
        )
        first = await log.read(None)
        return b"".join([chunk async for chunk in follow(log, first, Clock(script))])

    return asyncio.run(collect()).decode()


@pytest.mark.both_databases
def test_what_is_written_meanwhile_arrives_with_every_change_of_the_status(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]

    def run() -> None:
        with house.database.write() as session:
            session.query(Job).where(Job.id == job_id).one().status = "running"
            events.append(session, job_id, "started")

    script = {2.0: run, 4.0: lambda: say(house, job_id, "step"), 9.0: lambda: cancel(house, job_id)}
    told = words(parse(follow_to_the_end(house, job_id, script)))

    end = ["step", "Fine-tuning job cancelled", "cancelled", "done"]
    assert told[2:] == ["validating_files", "started", "running", *end]


@pytest.mark.both_databases
@pytest.mark.parametrize("is_asked_for", [True, False])
def test_progress_inside_of_a_step_is_sent_when_it_changes_to_those_who_ask(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]], is_asked_for: bool
) -> None:
    job_id = create_job()["id"]

    def does(phase: str, done: int | None) -> Callable[[], object]:
        of = None if done is None else 8
        now = {"step": 1, "phase": phase, "done": done, "of": of, "since": 1700000000}

        def report() -> None:
            with house.database.write() as session:
                job = session.query(Job).where(Job.id == job_id).one()
                job.status, job.progress = "running", {"epoch": job.epoch, **now}

        return report

    shown: list[Any] = []
    script = {
        2.0: does("sampling", 3),
        5.0: does("training", None),
        6.0: lambda: shown.append(api.get(f"/v1/fine_tuning/jobs/{job_id}").json()["progress"]),
        9.0: lambda: cancel(house, job_id),
    }
    told = parse(follow_to_the_end(house, job_id, script, with_progress=is_asked_for))

    sent = [one for one in told if one.get("object") == "regraft.job.progress"]
    now = {"step": 1, "phase": "training", "done": None, "of": None, "since": 1700000000}
    assert [(one["phase"], one["done"]) for one in sent] == is_asked_for * [
        ("sampling", 3),
        ("training", None),
    ]
    assert shown == [now]
    assert api.get(f"/v1/fine_tuning/jobs/{job_id}").json()["progress"] is None, "it has ended"


def test_a_silent_job_keeps_its_connection_alive(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]

    text = follow_to_the_end(house, job_id, {2.5 * KEEP_ALIVE_SECONDS + 0.5: lambda: cancel(house, job_id)})

    assert text.count(": still here") == 2


def test_openais_own_client_can_read_it_silence_and_all(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    script = {KEEP_ALIVE_SECONDS + 2: lambda: cancel(house, job_id)}

    text = follow_to_the_end(house, job_id, script).encode()

    assert b": still here" in text
    with OpenAI(
        api_key="k", base_url="http://none", http_client=httpx2.Client(transport=Says(text))
    ) as client:
        stream = client.get("/", cast_to=dict[str, Any], stream=True, stream_cls=Stream[dict[str, Any]])
        assert words(list(stream))[-2:] == ["Fine-tuning job cancelled", "cancelled"]


class Says(httpx2.BaseTransport):
    """Answers every request with the same stream."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=self.text)


@pytest.mark.both_databases
def test_more_events_than_a_page_are_all_sent_once_and_before_the_end(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    say(house, job_id, *map(str, range(250)))
    cancel(house, job_id)

    told = words(parse(follow_to_the_end(house, job_id, {})))

    assert told[2:-3] == [str(number) for number in range(250)]


def test_no_more_are_followed_at_once_than_the_process_can(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    cancel(house, job_id)
    house.app.state.service.admission.streams.places = 0

    answer = api.get(f"/v1/regraft/jobs/{job_id}/stream")

    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def send_to(client: Callable[..., Coroutine[Any, Any, None]], answer: StreamingResponse) -> None:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, client)


def test_a_burst_is_refused_beyond_the_limit_and_nobody_hangs(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    """All of them ask before the first one is answered; an answer that has begun can be no 429 any more."""
    job_id = create_job()["id"]
    cancel(house, job_id)
    service = house.app.state.service
    service.admission.streams.places = 1
    sent = []

    async def client(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def burst() -> list[StreamingResponse | BaseException]:
        asks = [stream_events(job_id, house.project, service, caller(house)) for _ in range(3)]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, StreamingResponse):
                await asyncio.wait_for(send_to(client, answer), 10)
        return answers

    answers = asyncio.run(burst())

    assert [type(answer) for answer in answers].count(TooManyAtOnce) == 2
    assert b"data: [DONE]\n\n" in sent
    assert service.admission.streams.in_use == 0


def test_neither_a_refusal_nor_a_client_that_has_left_takes_a_place(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    service = house.app.state.service

    async def left(message: Any) -> None:
        raise OSError

    async def leave() -> None:
        await send_to(left, await stream_events(job_id, house.project, service, caller(house)))

    with pytest.raises(ClientDisconnect):
        asyncio.run(leave())
    assert api.get("/v1/regraft/jobs/ftjob-none/stream").status_code == 404

    assert service.admission.streams.in_use == 0


def test_a_stream_that_ends_makes_room(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    cancel(house, job_id)

    for _ in range(2):
        assert api.get(f"/v1/regraft/jobs/{job_id}/stream").status_code == 200

    assert house.app.state.service.admission.streams.in_use == 0


@pytest.mark.both_databases
def test_between_two_looks_no_connection_is_held(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    held: list[int] = []

    def look() -> None:
        held.append(untyped(house.database.engine.pool).checkedout())

    follow_to_the_end(house, job_id, {1.0: look, 2.0: look, 3.0: lambda: cancel(house, job_id)})

    assert held == [0, 0]


def test_a_sleep_is_over_when_the_server_ends() -> None:
    async def wake() -> None:
        shutdown = Shutdown()
        sleeping = asyncio.create_task(shutdown.sleep(3600))
        await asyncio.sleep(0)
        shutdown.begin()
        await asyncio.wait_for(sleeping, 10)
        await asyncio.wait_for(shutdown.sleep(3600), 10)

    asyncio.run(wake())


def test_an_open_stream_does_not_keep_the_server(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    """It would wait for a minute here, and the job has no end at all."""
    job_id = create_job()["id"]
    config = uvicorn.Config(
        house.app, log_level="critical", log_config=None, timeout_graceful_shutdown=60, lifespan="off"
    )
    server = Server(config, house.app.state.service.shutdown)
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/regraft/jobs/{job_id}/stream"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()

    with httpx2.stream("GET", url, headers={"Authorization": f"Bearer {house.key}"}, timeout=20) as answer:
        lines = answer.iter_lines()
        told = [next(lines) for _ in range(9)]
        server.should_exit = True
        rest = list(lines)
    thread.join(60)

    assert "event: status" in told
    assert "data: [DONE]" not in rest
    assert not thread.is_alive()
