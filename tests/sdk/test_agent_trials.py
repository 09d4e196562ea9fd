"""regraft.agent_trials: an agent plays without a job, and what it would learn from is counted."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import regraft
from fastapi import FastAPI, Request
from regraft.agent_trials import Trial, is_cut_off, joined_answer, try_agent
from regraft.agents import Agent, Episode
from regraft.cli import main
from starlette.responses import JSONResponse, Response

from tests.api.test_chat import served

QUESTION: Any = {"role": "user", "content": "?"}
TOOL: Any = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
ROWS = [{"messages": [QUESTION], "digit": "7"}]
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


class Service:
    """Calls the tool once, and then says 7."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.app = FastAPI()

        @self.app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            self.asked.append(body)
            if body.get("temperature") == 9 and body.get("stream"):
                return Response('data: {"error": {"message": "too hot"}}\n\n', media_type="text/event-stream")
            if body.get("temperature") == 9:
                return JSONResponse(
                    {"error": {"message": "too hot", "code": "c", "param": "temperature"}}, 400
                )
            message = {"role": "assistant", **self._message(body)}
            if not body.get("stream"):
                cause = "length" if body.get("max_tokens") == 1 else "stop"
                choice = {"index": 0, "message": message, "finish_reason": cause}
                return JSONResponse(
                    {"id": "c", "object": "chat.completion", "choices": [choice], "usage": USAGE}
                )
            for number, call in enumerate(message.get("tool_calls", [])):
                call["index"] = number
            chunks: list[Any] = [{"choices": [{"index": 0, "delta": message, "finish_reason": None}]}]
            if (body.get("stream_options") or {}).get("include_usage"):
                chunks.append({"choices": [], "usage": USAGE})
            events = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks)
            return Response(f"{events}data: [DONE]\n\n", media_type="text/event-stream")

        @self.app.post("/v1/responses")
        async def respond(request: Request) -> Response:
            body = await request.json()
            self.asked.append(body)
            text = {"type": "output_text", "text": "7", "annotations": []}
            item = {
                "id": "m",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
            usage = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
            response = {"id": "r", "object": "response", "output": [item], "usage": usage}
            if not body.get("stream"):
                return JSONResponse(response)
            event = {"type": "response.completed", "sequence_number": 0, "response": response}
            return Response(
                f"event: response.completed\ndata: {json.dumps(event)}\n\n", media_type="text/event-stream"
            )

    def _message(self, body: Any) -> dict[str, Any]:
        if body.get("tools") and not any(one["role"] == "tool" for one in body["messages"]):
            call = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": '{"a":1}'}}
            return {"content": None, "tool_calls": [call]}
        return {"content": "7"}


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    yield from served(service.app)


def tried(url: str, agent: Agent, rows: Any = ROWS) -> Trial:
    client = regraft.Regraft(base_url=f"{url}/v1", api_key="k", max_retries=0)
    [trial] = try_agent(agent, "tiny", rows, client=client)
    return trial


def counts(trial: Trial) -> tuple[int, int, int, int]:
    return trial.turns, trial.prompt_tokens, trial.completion_tokens, trial.branches


def test_turns_tokens_and_the_reward_of_an_agent_with_a_tool_are_counted(url: str, service: Service) -> None:
    def play(episode: Episode) -> float:
        client, messages = episode.openai(), list[Any](episode.messages)
        asked: Any = {"model": "policy", "messages": messages, "tools": [TOOL]}
        message = client.chat.completions.create(**asked).choices[0].message.to_dict()
        call: Any = message["tool_calls"][0]
        call["function"]["arguments"] = '{ "a" : 1 }'  # as frameworks spell them
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
        return float(
            client.chat.completions.create(**asked).choices[0].message.content == episode.item["digit"]
        )

    trial = tried(url, play)

    assert (trial.reward, trial.error) == (1.0, "")
    assert counts(trial) == (2, 10, 4, 0)
    assert {body["model"] for body in service.asked} == {"tiny"}


def test_an_answer_to_another_history_is_a_branch(url: str) -> None:
    def play(episode: Episode) -> None:
        create = episode.openai().chat.completions.create
        create(model="m", messages=[QUESTION])
        create(model="m", messages=[QUESTION, {"role": "assistant", "content": "7"}, QUESTION])
        create(model="m", messages=[{"role": "system", "content": "be brief"}, QUESTION])

    assert tried(url, play).branches == 1


def edited_tool(asked: Any) -> None:
    asked["tools"] = [{"type": "function", "function": TOOL["function"] | {"description": "changed"}}]


def edited_call(asked: Any) -> None:
    asked["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'


@pytest.mark.parametrize("edit", [edited_tool, edited_call])
def test_an_edited_tool_or_call_is_a_branch(url: str, edit: Any) -> None:
    def play(episode: Episode) -> None:
        create, messages = episode.openai().chat.completions.create, list[Any](episode.messages)
        asked: Any = {"model": "policy", "messages": messages, "tools": [TOOL]}
        message: Any = create(**asked).choices[0].message.to_dict()
        messages += [message, {"role": "tool", "tool_call_id": "c", "content": "7"}]
        edit(asked)
        create(**asked)

    assert tried(url, play).branches == 1


def named(asked: Any) -> None:
    asked["messages"][0] = QUESTION | {"name": "ann"}


def without_the_answer(asked: Any) -> None:
    del asked["messages"][1]


def split(asked: Any) -> None:
    """The text and the call of an answer as two messages."""
    call = asked["messages"][1]
    asked["messages"][1:2] = [{"role": "assistant", "content": ""}, call]


@pytest.mark.parametrize("edit", [named, without_the_answer, split])
def test_what_is_another_conversation_for_a_job_is_one_for_a_trial(url: str, edit: Any) -> None:
    """Both have the same rules (core/conversations.py)."""

    def play(episode: Episode) -> None:
        create, messages = episode.openai().chat.completions.create, list[Any](episode.messages)
        asked: Any = {"model": "policy", "messages": messages}
        message: Any = create(**asked).choices[0].message.to_dict()
        messages += [message, QUESTION]
        edit(asked)
        create(**asked)

    assert tried(url, play).branches == 1


def test_a_request_behind_an_answer_that_was_cut_off_is_a_branch(url: str) -> None:
    def play(episode: Episode) -> None:
        create, messages = episode.openai().chat.completions.create, list[Any](episode.messages)
        for limit in (8, 1, 8):  # the second answer is cut off
            answer: Any = create(model="policy", messages=messages, max_tokens=limit).choices[0].message
            messages += [answer.to_dict(), QUESTION]

    assert tried(url, play).branches == 1


def test_a_second_continuation_of_an_answer_is_a_branch(url: str) -> None:
    def play(episode: Episode) -> None:
        create, answer = episode.openai().chat.completions.create, {"role": "assistant", "content": "7"}
        create(model="m", messages=[QUESTION])
        for text in ("one", "two"):
            history: Any = [QUESTION, answer, {"role": "user", "content": text}]
            create(model="m", messages=history)

    assert tried(url, play).branches == 1


def test_an_answer_is_cut_off_in_both_apis_and_in_streams() -> None:
    events = [{"choices": [{"delta": {"content": "7"}, "finish_reason": "length"}]}]

    assert is_cut_off(joined_answer(events))
    assert is_cut_off({"status": "incomplete", "output": []})
    assert not is_cut_off({"status": "completed", "output": []})


def test_a_streamed_call_that_comes_in_pieces_is_whole() -> None:
    pieces: list[Any] = [
        {"index": 0, "id": "c", "function": {"name": "lookup", "arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
    ]

    whole: Any = joined_answer([{"choices": [{"delta": {"tool_calls": [piece]}}]} for piece in pieces])

    [call] = whole["choices"][0]["message"]["tool_calls"]
    assert (call["id"], call["function"]) == ("c", {"name": "lookup", "arguments": '{"a": 1}'})


@pytest.mark.parametrize(
    ("header", "status"),
    [({}, 411), ({"Content-Length": "abc"}, 411), ({"Content-Length": "99999999999"}, 413)],
)
def test_a_body_of_unknown_or_absurd_length_is_refused_before_it_is_read(
    url: str, header: dict[str, str], status: int
) -> None:
    answers: list[int] = []

    def play(episode: Episode) -> None:
        address = urlsplit(episode.base_url)
        for key, expected in ((episode.api_key, status), ("guessed", 401)):
            connection = http.client.HTTPConnection(address.netloc, timeout=10)
            connection.putrequest("POST", "/v1/chat/completions")
            for name, value in ({"Authorization": f"Bearer {key}"} | header).items():
                connection.putheader(name, value)
            connection.endheaders()
            answers.append(connection.getresponse().status - expected)
            connection.close()

    assert tried(url, play).error == ""
    assert answers == [0, 0]


@pytest.mark.parametrize("asks_for_usage", [False, True])
def test_a_stream_is_counted_and_looks_as_it_was_asked_for(url: str, asks_for_usage: bool) -> None:
    pieces: list[Any] = []

    def play(episode: Episode) -> None:
        options: Any = {"stream_options": {"include_usage": True}} if asks_for_usage else {}
        asked: Any = {"model": "m", "messages": [QUESTION], "tools": [TOOL], "stream": True, **options}
        pieces.extend(episode.openai().chat.completions.create(**asked))

    assert counts(tried(url, play)) == (1, 5, 2, 0)
    assert [bool(one.choices) for one in pieces] == [True, False][: 1 + asks_for_usage]


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api_is_counted_too(url: str, stream: bool) -> None:
    def play(episode: Episode) -> None:
        client = episode.openai()
        answer: Any = client.responses.create(model="m", input="?", stream=stream)
        last = list(answer)[-1].response if stream else answer
        further: list[Any] = [QUESTION, *(item.to_dict() for item in last.output), QUESTION]
        client.responses.create(model="m", input=further)

    assert counts(tried(url, play)) == (2, 10, 4, 0)


def test_an_error_of_the_service_reaches_the_agent_and_one_of_the_agent_the_trial(url: str) -> None:
    def play(episode: Episode) -> None:
        create = episode.openai().chat.completions.create
        with pytest.raises(openai.BadRequestError, match="too hot"):
            create(model="m", messages=[QUESTION], temperature=9)
        with pytest.raises(openai.APIError, match="too hot"):
            list(create(model="m", messages=[QUESTION], temperature=9, stream=True))
        raise ValueError("no idea")

    trial = tried(url, play)

    assert (trial.reward, trial.error, trial.turns) == (None, "ValueError: no idea", 0)


def test_another_program_of_the_machine_cannot_use_the_key_of_the_service(url: str, service: Service) -> None:
    def play(episode: Episode) -> None:
        stranger = openai.OpenAI(base_url=episode.base_url, api_key="guessed", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model="m", messages=[QUESTION])

    assert tried(url, play).error == ""
    assert service.asked == []


@pytest.mark.parametrize(
    ("rows", "limit", "said"),
    [
        (b'{"a": 1}\n\xff\n', "0", "Row 2 of rows.jsonl is not JSON"),
        (b"[1]\n", "1", "not a JSON object"),
        (b"{}\n", "-1", "the least is 0"),
    ],
)
def test_the_command_refuses_a_file_or_limit_that_it_cannot_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: bytes,
    limit: str,
    said: str,
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGRAFT_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("REGRAFT_API_KEY", "k")

    code = main(["agents", "try", "json:dumps", "--model", "m", "--rows", "rows.jsonl", f"--limit={limit}"])

    assert code == 2
    assert said in capsys.readouterr().err


def test_the_command_prints_a_row_for_each_episode(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def play(episode):\n    return float(episode.item['digit'])\n"
    (tmp_path / "agent_of_a_trial.py").write_text(source)
    (tmp_path / "rows.jsonl").write_text('{"digit": "7"}\n\n{"digit": "x"}\n{"digit": "8"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # which the command does for the working directory, for good
    monkeypatch.setenv("REGRAFT_BASE_URL", f"{url}/v1")
    monkeypatch.setenv("REGRAFT_API_KEY", "k")

    code = main(
        ["agents", "try", "agent_of_a_trial:play", "--model", "tiny", "--rows", "rows.jsonl", "--limit", "2"]
    )

    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == "reward turns tokens read tokens written branches seconds error".split()
    assert first.split()[0] == "7.000"
    assert "ValueError" in second
    assert code == 1
