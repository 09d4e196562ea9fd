"""The HTTP server of a run whose episodes an agent plays."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from core.settings import Settings
from tests.worker.test_agent_episodes import ROW, Counted, game
from worker.rollout.agent_episodes import Board
from worker.rollout.episode_server import app_of, listener, served, url_of
from worker.types import Rollout

ASKED = {
    "messages": [{"role": "user", "content": "?"}], "tools": [], "parallel": True, "key": "", "is_retry": False,
    "sampling": {},
}  # fmt: skip


def client_of(listening: socket.socket) -> httpx.AsyncClient:
    headers = {"authorization": "Bearer between us"}
    return httpx.AsyncClient(base_url=url_of(listening), headers=headers, trust_env=False, timeout=60)


def with_server(talk: Callable[[httpx.AsyncClient, "asyncio.Task[Rollout]"], Awaitable[None]]) -> None:
    """Talk with the server of a board that has one episode."""

    async def run() -> None:
        board = Board(game(Counted()), lambda: "episode", 60)
        playing = asyncio.create_task(board.play(ROW, 0, "trace"))
        with listener("127.0.0.1") as listening:
            async with client_of(listening) as client, served(board, listening, "between us", Settings()):
                await talk(client, playing)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    asyncio.run(run())


def test_an_episode_is_leased_played_and_completed_over_http() -> None:
    async def talk(client: httpx.AsyncClient, playing: "asyncio.Task[Rollout]") -> None:
        [leased] = (await client.post("/lease", json={"max": 4, "wait_s": 1})).json()["data"]
        assert (leased["id"], leased["split"], leased["item"]) == ("episode", "train", dict(ROW.item))
        answer = (await client.post("/episodes/episode/chat", json=ASKED)).json()
        assert answer["choices"][0]["message"]["content"] == "a0"
        completed = await client.post("/episodes/episode/complete", json={"status": "ready", "reward": 0.5})
        assert completed.status_code == 200
        rollout = await playing
        assert rollout.episode is not None
        assert rollout.episode.reward == 0.5
        over = await client.post("/episodes/episode/chat", json=ASKED)
        assert (over.status_code, over.json()["error"]["code"]) == (409, "episode_over")

    with_server(talk)


def test_only_the_api_has_the_secret_of_the_run() -> None:
    async def talk(client: httpx.AsyncClient, playing: "asyncio.Task[Rollout]") -> None:
        for headers in ({"authorization": "Bearer another"}, {"authorization": ""}):
            answer = await client.post("/lease", json={"max": 1, "wait_s": 0}, headers=headers)
            assert answer.status_code == 401

    with_server(talk)


def test_a_request_that_waits_for_an_episode_does_not_hold_up_the_end_of_a_step() -> None:
    async def run() -> Any:
        board = Waited(game(Counted()), lambda: "episode", 60)
        with listener("127.0.0.1") as listening:
            async with client_of(listening) as client:
                async with served(board, listening, "between us", Settings()):
                    asking = asyncio.create_task(client.post("/lease", json={"max": 1, "wait_s": 60}))
                    await board.is_waited_for.wait()
                return (await asking).json()

    assert asyncio.run(run()) == {"data": []}


class Waited(Board):
    """Knows that a request waits for an episode."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_waited_for = asyncio.Event()

    async def lease(self, most: int, wait_s: float) -> list[dict[str, Any]]:
        self.is_waited_for.set()
        return await super().lease(most, wait_s)


@pytest.mark.parametrize("has_episode", [False, True])
def test_a_client_that_has_left_takes_no_episode(has_episode: bool) -> None:
    async def run() -> None:
        board = Board(game(Counted()), lambda: "episode", 60)
        sent = iter([b'{"max": 1, "wait_s": 60}'])

        async def receive() -> Any:
            for body in sent:
                return {"type": "http.request", "body": body}
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        def offered() -> "asyncio.Task[Rollout]":
            return asyncio.create_task(board.play(ROW, 0, "trace"))

        if has_episode:
            playing = offered()
            await asyncio.sleep(0)
        asking = asyncio.create_task(app_of(board, "s")(SCOPE, receive, send))
        for _ in range(20):  # until it waits, or has left
            await asyncio.sleep(0)
        if not has_episode:
            playing = offered()
            await asyncio.sleep(0)
        await asking
        assert board.is_idle
        assert len(await board.lease(1, 0)) == 1
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    asyncio.run(run())


SCOPE = {
    "type": "http", "method": "POST", "path": "/lease", "query_string": b"",
    "headers": [(b"authorization", b"Bearer s")],
}  # fmt: skip
