"""The stream of a project tells the states of its jobs, pipelines and eval runs, and each change of them."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from anyio import CapacityLimiter
from sqlalchemy import event
from starlette.testclient import TestClient

from api.resources.project_stream import ProjectLog, follow
from api.resources.stream import KEEP_ALIVE_SECONDS
from core.database.tables import ApiKey, EvalRun, Job, Pipeline, now
from core.evals import summary
from tests.api.conftest import House
from tests.api.test_stream import Clock, cancel

pytestmark = pytest.mark.both_databases


def told(
    house: House,
    script: Mapping[float, Callable[[], object]],
    *,
    until: float,
    since: int | None = None,
) -> list[tuple[str, str]]:
    """The id and status of every message until this second, in order."""
    return [(one["id"], one["status"]) for one in messages(house, script, until=until, since=since)]


def messages(
    house: House,
    script: Mapping[float, Callable[[], object]],
    *,
    until: float,
    since: int | None = None,
) -> list[dict[str, Any]]:
    lines = text(house, script, until=until, since=since).splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def text(
    house: House, script: Mapping[float, Callable[[], object]], *, until: float, since: int | None = None
) -> str:
    clock: Clock

    async def collect() -> bytes:
        log = ProjectLog(house.database, house.project.id, CapacityLimiter(1))
        return b"".join([chunk async for chunk in follow(log, await log.first(since), clock)])

    clock = Clock({**script, until: lambda: clock.begin()})
    return asyncio.run(collect()).decode()


def change(house: House, job_id: str, **fields: Any) -> Callable[[], None]:
    def act() -> None:
        with house.database.write() as session:
            job = session.query(Job).where(Job.id == job_id).one()
            for name, value in fields.items():
                setattr(job, name, value)

    return act


def test_it_begins_with_what_is_under_way_and_tells_every_change_once(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    ended, job_id = create_job()["id"], create_job()["id"]
    cancel(house, ended)
    script = {
        2.0: change(house, job_id, status="running", trained_tokens=8),
        4.0: change(house, job_id, trained_tokens=16),
        6.0: lambda: cancel(house, job_id),
    }

    seen = told(house, script, until=9)

    assert seen == [
        (job_id, "validating_files"),
        (job_id, "running"),
        (job_id, "running"),
        (job_id, "cancelled"),
    ]


def test_progress_inside_of_a_step_is_part_of_a_jobs_state(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    now_doing = {"step": 1, "phase": "sampling", "done": 3, "of": 8, "since": 1700000000}
    script = {2.0: change(house, job_id, status="running", progress={"epoch": 0, **now_doing})}

    [_, running] = messages(house, script, until=5)

    assert (running["object"], running["kind"], running["model"]) == ("regraft.state", "job", "tiny")
    assert running["progress"] == now_doing


def test_pipelines_and_eval_runs_are_told_too(house: House) -> None:
    with house.database.write() as session:
        pipeline = Pipeline(project_id=house.project.id, actor="key", stages=[])
        pipeline.stages = [{"name": "learn", "status": "running"}]
        run = EvalRun(eval_id="eval_1", project_id=house.project.id, name="", data_source={}, total=5)
        run.summary = summary.empty([])
        session.add_all([pipeline, run])
        session.flush()
        ids = pipeline.id, run.id

    def end() -> None:
        with house.database.write() as session:
            found = session.query(EvalRun).one()
            found.status, found.finished_at = "completed", now()

    seen = messages(house, {3.0: end}, until=6)

    assert [(one["kind"], one["id"], one["status"]) for one in seen] == [
        ("pipeline", ids[0], "running"),
        ("eval_run", ids[1], "queued"),
        ("eval_run", ids[1], "completed"),
    ]
    assert seen[0]["stages"] == {"learn": "running"}
    assert seen[1]["progress"] == {"finished": 0, "total": 5}


def test_one_that_is_created_and_ends_between_two_looks_is_told(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    made: list[str] = []

    def live_and_die() -> None:
        made.append(create_job()["id"])
        cancel(house, made[0])

    assert told(house, {2.0: live_and_die}, until=5) == [(made[0], "cancelled")]


def test_who_was_cut_off_is_told_what_has_ended_since(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    long_ago, lately = create_job()["id"], create_job()["id"]
    cancel(house, long_ago)
    cancel(house, lately)
    change(house, long_ago, finished_at=now() - 3600)()

    assert told(house, {}, until=3, since=now() - 60) == [(lately, "cancelled")]
    assert told(house, {}, until=3) == []


def test_an_old_id_brings_what_ended_in_the_last_day(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    long_ago, lately = create_job()["id"], create_job()["id"]
    cancel(house, long_ago)
    cancel(house, lately)
    change(house, long_ago, finished_at=now() - 2 * 86400)()
    change(house, lately, finished_at=now() - 80000)()

    assert told(house, {}, until=3, since=0) == [(lately, "cancelled")]


def test_the_requests_of_jobs_and_eval_runs_are_not_read(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    create_job()
    statements: list[str] = []
    event.listen(house.database.engine, "before_cursor_execute", lambda *call: statements.append(call[2]))

    assert len(messages(house, {}, until=3, since=0)) == 1

    assert not [one for one in statements if "reinforcement" in one or "data_source" in one]


def test_another_project_hears_nothing(house: House, create_job: Callable[..., dict[str, Any]]) -> None:
    create_job()

    async def first() -> int:
        log = ProjectLog(house.database, "proj_other", CapacityLimiter(1))
        return len((await log.first(0)).states)

    assert asyncio.run(first()) == 0


def test_a_silent_project_keeps_its_connection_alive(house: House) -> None:
    assert text(house, {}, until=2.5 * KEEP_ALIVE_SECONDS + 0.5).count(": still here") == 2


@pytest.mark.parametrize("last", ["yesterday", "-1", "1" * 13, "1.5"])
def test_an_id_of_another_stream_is_refused(api: TestClient, house: House, last: str) -> None:
    refused = api.get("/v1/regraft/stream", headers={"Last-Event-ID": last})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
    assert house.app.state.service.admission.streams.in_use == 0


def test_a_revoked_key_ends_its_stream(house: House, create_job: Callable[..., dict[str, Any]]) -> None:
    create_job()
    key = house.key_id()

    def revoke() -> None:
        with house.database.write() as session:
            session.query(ApiKey).where(ApiKey.id == key).one().revoked_at = now()

    async def collect() -> bytes:
        log = ProjectLog(house.database, house.project.id, CapacityLimiter(1), key)
        clock = Clock({3.0: revoke})
        return b"".join([chunk async for chunk in follow(log, await log.first(None), clock)])

    assert asyncio.run(collect()).decode().count("event: job") == 1, (
        "and it ends, though no server shuts down"
    )
