"""Waiting for the end of something: the server may be restarted meanwhile, and a job may repeat a step."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from regraft import Regraft, jobs
from regraft.resources.waiting import MAX_FAILURES, AsyncWaiting, refuse_failed
from regraft.sync.waiting import Waiting
from regraft.types import GraderAudit

from tests.present import untyped

REQUEST = httpx2.Request("GET", "http://server/v1")
BROKEN = openai.APIConnectionError(request=REQUEST)
STARTING = openai.InternalServerError("no", response=httpx2.Response(503, request=REQUEST), body=None)
GONE = openai.NotFoundError("no", response=httpx2.Response(404, request=REQUEST), body=None)


class Server:
    """Gives these replies in turn, and the last one again and again."""

    def __init__(self, *replies: str | Exception) -> None:
        self.replies = list(replies)
        self.slept: list[float] = []

    def read(self) -> str:
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def wait(self) -> str:
        waiting = Waiting(2.0, self.slept.append)
        return waiting.until(lambda status: status == "ended", self.read, lambda status: None)

    async def wait_in_a_loop(self) -> str:
        async def read() -> str:
            return self.read()

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)

        return await AsyncWaiting(2.0, sleep).until(
            lambda status: status == "ended", read, lambda status: None
        )


def test_a_server_that_restarts_is_waited_for() -> None:
    replies = ("running", BROKEN, STARTING, STARTING, "running", "ended")
    here, there = Server(*replies), Server(*replies)

    assert here.wait() == asyncio.run(there.wait_in_a_loop()) == "ended"
    assert here.slept == there.slept == [2.0, 0.0, 1.0, 2.0, 2.0]


def test_a_server_that_stays_away_is_given_up_after_three_minutes() -> None:
    server = Server(BROKEN)

    with pytest.raises(openai.APIConnectionError):
        server.wait()

    assert len(server.slept) == MAX_FAILURES
    assert 120 < sum(server.slept) < 200


def test_what_was_deleted_is_not_waited_for() -> None:
    server = Server("running", GONE)

    with pytest.raises(openai.NotFoundError):
        server.wait()

    assert server.slept == [2.0]


class Jobs:
    """A job whose worker is lost in its second step, which is repeated."""

    def __init__(self) -> None:
        self.logs: list[Sequence[str]] = [
            ["step 1", "step 2"],
            ["step 1", "restart"],
            ["step 1", "restart", "step 2 again"],
        ]

    def retrieve(self, job_id: str) -> Any:
        return SimpleNamespace(status="running" if len(self.logs) > 1 else "succeeded")

    def list_events(self, job_id: str, limit: int) -> Any:
        return [SimpleNamespace(id=text) for text in reversed(self.logs.pop(0))]


def test_no_event_comes_twice_if_the_newest_one_is_superseded() -> None:
    client = untyped(SimpleNamespace(fine_tuning=SimpleNamespace(jobs=Jobs())))

    seen = [event.id for event in jobs.events(client, "ftjob-1", poll_seconds=0)]

    assert seen == ["step 1", "step 2", "restart", "step 2 again"]


def test_a_run_that_failed_raises_as_its_creation_would() -> None:
    client = Regraft(base_url="http://server/v1", api_key="key")
    began = {
        "id": "graderaudit_1",
        "created_at": 1,
        "request": {},
        "version": "",
        "progress": {"of": 1, "graded": 0},
    }
    error = {"message": "too long", "type": "invalid_request_error", "code": "audit_too_slow", "status": 400}
    failed = GraderAudit.model_validate(began | {"status": "failed", "error": error})
    canceled = GraderAudit.model_validate(began | {"status": "canceled"})

    with pytest.raises(openai.BadRequestError, match="too long") as raised:
        refuse_failed(client, failed, "/regraft/graders/audit")
    with pytest.raises(openai.OpenAIError, match="graderaudit_1 was canceled"):
        refuse_failed(client, canceled, "/regraft/graders/audit")

    assert raised.value.code == "audit_too_slow"
