"""regraft.agents: episodes are leased, played by a function, and completed; nothing is lost when the function fails."""

import asyncio
import json
import runpy
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import regraft
from fastapi import FastAPI, Request
from regraft.agents import PATIENCE_S, Agent, Episode, Played
from regraft.cli.agents import function_of
from regraft.cli.shared import Refused
from starlette.responses import JSONResponse, Response

from tests.api.test_chat import served

EXAMPLES = Path(__file__).parents[2] / "examples"
LEASED = {
    "api_key": "episode-key", "item": {"digit": "7"}, "messages": [], "tools": [], "split": "train", "trace_id": "t",
    "deadline": 9,
}  # fmt: skip


class Service:
    """Leases each of its answers in turn, and then its job has succeeded."""

    def __init__(self) -> None:
        self.leases: list[Any] = []
        self.completed: dict[str, tuple[str, Any]] = {}  # key and body by id
        self.most: list[int] = []  # of the requests for episodes
        self.refuses = 0  # the status of completions that are ready
        self.app = FastAPI()

        @self.app.post("/v1/regraft/jobs/{job}/episodes/lease")
        async def lease(job: str, request: Request) -> Response:
            self.most.append(json.loads(await request.body())["max"])
            if not self.leases:
                return JSONResponse({"data": [], "job_status": "succeeded"})
            found = self.leases.pop(0)
            if isinstance(found, int):
                return JSONResponse({"error": {"message": "later", "code": "not_ready"}}, found)
            return JSONResponse({"data": [LEASED | {"id": id} for id in found], "job_status": "running"})

        @self.app.post("/v1/regraft/episodes/{id}/complete")
        async def complete(id: str, request: Request) -> Response:
            body = json.loads(await request.body())
            self.completed[id] = request.headers["authorization"], body
            error = {"error": {"message": "no", "code": "no"}}
            is_refused = self.refuses and body["status"] == "ready"
            return JSONResponse(error, self.refuses) if is_refused else JSONResponse({"id": id})


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def play(service: Service) -> Iterator[Callable[[Agent], Played]]:
    for url in served(service.app):
        yield partial(played, url)


def played(url: str, function: Agent, concurrency: int = 2, **options: Any) -> Played:
    client = regraft.Regraft(base_url=f"{url}/v1", api_key="k", max_retries=0)
    return regraft.agents.run(
        "job", function, concurrency, client=client, pause=lambda seconds: None, **options
    )


def test_each_episode_is_completed_with_its_reward_and_its_key(
    service: Service, play: Callable[[Agent], Played]
) -> None:
    service.leases = [["a", "b"], [], 503, 429, ["c"]]

    done = play(lambda episode: float(episode.item["digit"]))

    assert done == Played(3, 0, "succeeded")
    ready = {"status": "ready", "reward": 7.0}
    assert service.completed == dict.fromkeys("abc", ("Bearer episode-key", ready))


def test_a_coroutine_function_plays_too_and_none_leaves_the_reward_to_the_grader(
    service: Service, play: Callable[[Agent], Played]
) -> None:
    service.leases = [["a"]]

    async def agent(episode: Episode) -> None:
        await asyncio.sleep(0)
        assert episode.base_url.endswith("/v1/regraft/episodes/a/v1")
        assert episode.async_openai().api_key == "episode-key"

    play(agent)

    assert service.completed["a"][1] == {"status": "ready", "reward": None}


def test_an_agent_that_fails_gives_its_episode_back_and_goes_on(
    service: Service, play: Callable[[Agent], Played]
) -> None:
    service.leases = [["a"], ["b"]]

    def agent(episode: Episode) -> float:
        return 1.0 if episode.id == "b" else 1 / 0

    assert play(agent) == Played(1, 1, "succeeded")
    assert service.completed["a"][1] == {"status": "failed"}


@pytest.mark.parametrize("status", [409, 503])
def test_an_episode_that_is_over_is_no_error_of_the_agent(
    service: Service, play: Callable[[Agent], Played], status: int
) -> None:
    service.leases, service.refuses = [["a"]], status

    assert play(lambda episode: 1.0) == Played(1, 0, "succeeded")


def test_an_episode_whose_reward_the_server_refuses_is_given_back(
    service: Service, play: Callable[[Agent], Played]
) -> None:
    service.leases, service.refuses = [["a"]], 400

    assert play(lambda episode: 1e30) == Played(0, 1, "succeeded")
    assert service.completed["a"][1] == {"status": "failed"}


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "high", {"reward": 1}])
def test_what_is_no_reward_gives_the_episode_back(
    service: Service, play: Callable[[Agent], Played], reward: Any
) -> None:
    service.leases = [["a"], ["b"]]

    assert play(lambda episode: reward) == Played(0, 2, "succeeded")
    assert service.completed["a"][1] == {"status": "failed"}


def test_a_number_of_another_library_is_a_reward(service: Service, play: Callable[[Agent], Played]) -> None:
    service.leases = [["a"]]

    play(lambda episode: Fraction(1, 2))  # type: ignore[arg-type, return-value]

    assert service.completed["a"][1] == {"status": "ready", "reward": 0.5}


def test_the_patience_with_a_server_begins_with_its_first_failure_in_a_row(service: Service) -> None:
    service.leases = [503, 503, [], 503, 503, 503, ["a"]]
    late = 100 * PATIENCE_S
    times = iter([late, late + PATIENCE_S, 2 * late, 2 * late + PATIENCE_S, 2 * late + PATIENCE_S + 1])

    for url in served(service.app):
        with pytest.raises(openai.InternalServerError):
            played(url, lambda episode: 1.0, clock=times.__next__)

    assert service.leases == [["a"]]


def test_more_episodes_at_once_than_a_request_may_lease_take_several_requests(service: Service) -> None:
    service.leases = [["a"], ["b"]]

    for url in served(service.app):
        done = played(url, lambda episode: 1.0, concurrency=300)

    assert done.ready == 2
    assert set(service.most) == {256}


def test_the_key_of_an_episode_is_not_printed() -> None:
    episode = Episode("id", "url", "secret", {}, [], [], "train", "trace", 9)

    assert "secret" not in repr(episode)


def test_the_tool_of_the_examples_agent_answers_whatever_the_model_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    result_of = runpy.run_path(str(EXAMPLES / "digit_agent.py"))["result_of"]

    def result(arguments: str) -> str:
        message = result_of({"id": "c", "function": {"name": "lookup", "arguments": arguments}})
        assert (message["role"], message["tool_call_id"]) == ("tool", "c")
        content: str = message["content"]
        return content

    assert result('{"drawer": 2}').startswith("The digit in drawer 2 is ")
    for wrong in ("{", "[]", "{}", '{"drawer": "two"}'):
        assert result(wrong).startswith("error: ")


def test_the_command_line_finds_a_function_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_agent_of_a_test.py").write_text("def play(episode):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # which the command does for the working directory, for good

    episode = Episode("id", "url", "key", {}, [], [], "train", "trace", 9)

    assert function_of("my_agent_of_a_test:play")(episode) == 0.5
    for wrong, why in {
        "play": "is not MODULE",
        "no_module_here:play": "cannot be imported",
        "os:absent": "no function",
    }.items():
        with pytest.raises(Refused, match=why):
            function_of(wrong)
