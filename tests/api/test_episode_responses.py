"""The Responses API in an episode, through OpenAI's client, a live API and the server of a run: as Chat Completions."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from core.database.tables import Job
from core.jobs import episode_servers
from core.jobs.episode_servers import episode_id, key_of
from core.settings import Settings
from tests import factories
from tests.api.conftest import GRADER, House
from tests.api.test_chat import api_over
from tests.api.test_chat import served as in_a_thread
from tests.api.test_responses import CALL
from tests.conformance.test_client_suite import run_pip
from tests.worker.test_agent_episodes import ROW, Counted, game, shape
from worker.rollout.agent_episodes import Board, Completed
from worker.rollout.episode_server import listener, served, url_of
from worker.types import Rollout

ROOT = Path(__file__).parents[2]
Agent = Callable[[OpenAI], Any]
QUESTION: Any = {"role": "user", "content": "?"}
CHAT_TOOLS: Any = ROW.item["tools"]
TOOLS: Any = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]


def played(house: House, agent: Agent, calls: Counted) -> Rollout:
    """The episode of an agent with OpenAI's client."""
    body = {"grader": GRADER, "hyperparameters": {}, "environment": {"type": "client", "timeout_s": 60}}
    with house.database.write() as session:
        job = factories.job(session, house.project, status="running", body=body).id
    episode = episode_id(job, 0, 1)

    async def play(url: str) -> Rollout:
        board = Board(game(calls), lambda: episode, 60)
        playing = asyncio.create_task(board.play(ROW, 0, "trace"))
        with listener("127.0.0.1") as listening:
            with house.database.write() as session:
                row = session.query(Job).where(Job.id == job).one()
                secret = episode_servers.publish(session, row, url_of(listening))
            async with served(board, listening, secret, Settings()):
                await board.lease(1, 60)
                base_url = f"{url}/v1/regraft/episodes/{episode}/v1"
                with OpenAI(base_url=base_url, api_key=key_of(secret, episode), max_retries=0) as client:
                    await asyncio.to_thread(agent, client)
                board.complete(episode, Completed("ready"))
                return await playing

    for url in in_a_thread(api_over(house, "")):
        rollout = asyncio.run(play(url))
    return rollout


def of_chat(client: OpenAI) -> None:
    first = client.chat.completions.create(model="m", messages=[QUESTION], tools=CHAT_TOOLS)
    message = first.choices[0].message
    assert message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    further: list[Any] = [QUESTION, message.to_dict(), result]
    client.chat.completions.create(model="m", messages=further, tools=CHAT_TOOLS)


def of_responses(create: Callable[..., Response]) -> Response:
    first = create(input="?", tools=TOOLS)
    [call] = first.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    return create(input=[QUESTION, call.to_dict(), result], tools=TOOLS)


def whole(client: OpenAI) -> Callable[..., Response]:
    def create(**asked: Any) -> Response:
        response: Response = client.responses.create(model="m", **asked)
        return response

    return create


def streamed(client: OpenAI) -> Callable[..., Response]:
    def create(**asked: Any) -> Response:
        with client.responses.stream(model="m", **asked) as stream:
            return stream.get_final_response()

    return create


@pytest.mark.parametrize("way", [whole, streamed])
def test_an_episode_by_the_responses_api_has_the_tokens_and_branches_of_chats(
    house: House, way: Callable[[OpenAI], Callable[..., Response]]
) -> None:
    texts = ['search:{"q":1}', "it is 42"]
    by_chat, by_responses = Counted(texts), Counted(texts)
    answers: list[Response] = []

    expected = played(house, of_chat, by_chat)
    rollout = played(house, lambda client: answers.append(of_responses(way(client))), by_responses)

    assert by_responses.drawn == by_chat.drawn
    assert shape(rollout) == shape(expected)
    assert rollout.episode is not None
    assert expected.episode is not None
    assert rollout.episode.messages == expected.episode.messages
    [answer] = answers
    assert (answer.output_text, answer.status, answer.model) == ("it is 42", "completed", "m")
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (9, 3)


def test_a_response_that_is_asked_for_again_with_its_key_is_the_first_one(house: House) -> None:
    answers: list[Response] = []

    def agent(client: OpenAI) -> None:
        for _ in range(2):
            asked: Any = {"model": "m", "input": "?", "instructions": "be brief"}
            answers.append(client.responses.create(**asked, extra_headers={"Idempotency-Key": "k"}))

    calls = Counted()

    rollout = played(house, agent, calls)

    assert len(calls.drawn) == 1
    assert rollout.episode is not None
    assert rollout.episode.turns == 1
    first, second = answers
    assert (first.id, first.created_at, first.output) == (second.id, second.created_at, second.output)
    assert first.output_text == "a0"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"background": True}, "background"),
        ({"input": [QUESTION] * 2048, "instructions": "be brief"}, "input"),
        ({"input": [QUESTION, *[CALL] * 129]}, "input"),
    ],
)
def test_what_an_episode_cannot_have_is_refused_by_its_name_in_this_api(
    house: House, asked: dict[str, Any], param: str
) -> None:
    def agent(client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**{"model": "m", "input": "?"} | asked)
        assert refused.value.param == param

    calls = Counted()
    played(house, agent, calls)

    assert calls.drawn == []


PLAY = """
import asyncio, sys
from regraft.agents import Episode
messages = [{"role": "user", "content": "?"}]
episode = Episode("id", sys.argv[1], sys.argv[2], {"digit": "4"}, messages, [], "train", "trace", 9)
print(asyncio.run(play(episode)))
"""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_agents_sdk_plays_as_the_page_shows(house: House, tmp_path: Path) -> None:
    run_pip("install", "--target", str(tmp_path), "openai-agents==0.24.0")
    page = (ROOT / "docs/howto/own-agent.md").read_text()
    [shown] = [
        block for block in re.findall(r"```python\n(.+?)```", page, re.DOTALL) if "import Agent" in block
    ]
    rewards: list[str] = []

    def agent(client: OpenAI) -> None:
        command = [sys.executable, "-c", shown + PLAY, str(client.base_url), client.api_key]
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'sdk'}"}
        rewards.append(subprocess.check_output(command, env=environment, text=True))

    rollout = played(house, agent, Counted(['lookup:{"drawer":2}', "4"]))

    assert rewards == ["1.0\n"]
    assert [(node.parent, node.answer.text) for node in rollout.nodes][-1] == (0, "4")


def test_a_limit_of_the_episode_is_an_error_of_the_client(house: House) -> None:
    def agent(client: OpenAI) -> None:
        for number in range(3):
            client.responses.create(model="m", input=str(number))
        with pytest.raises(openai.BadRequestError, match="max_episode_steps") as refused:
            client.responses.create(model="m", input="?", stream=True)
        assert refused.value.code == "episode_limit"

    assert played(house, agent, Counted()).is_truncated
