"""/v1/responses through OpenAI's client: a chat completion is asked for, and its answer has the client's types."""

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai import AsyncOpenAI, AzureOpenAI, OpenAI
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from core.database.engine import Database
from core.database.tables import Checkpoint, TunedModel
from tests.api.conftest import House, open_house
from tests.api.test_chat import api_over, served
from tests.present import present, untyped

NAME = "ft:tiny:acme::12345678"
USER = {"role": "user", "content": "hello"}
LOGPROB = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
}
ERROR = {"error": {"message": "no room", "type": "server_error", "param": None, "code": "loading"}}
IN_ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@dataclass
class Inference:
    """An inference server that writes `pieces`."""

    pieces: list[str] = field(default_factory=lambda: ["a", "b"])
    finish_reason: str = "stop"
    calls: list[dict[str, Any]] = field(default_factory=list)
    pieces_after_calls: list[str] = field(default_factory=list)
    error: Response | None = None
    error_event: dict[str, Any] | None = None
    whole: bool = True
    endless: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/healthz")
        async def healthy() -> dict[str, str]:
            return {"status": "ok"}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            self.asked.append(await request.json())
            if self.error is not None:
                return self.error
            if self.asked[-1].get("stream"):
                return StreamingResponse(self.events(), media_type="text/event-stream")
            logprobs = {"content": [LOGPROB], "refusal": None} if self.asked[-1].get("logprobs") else None
            message: dict[str, Any] = {"role": "assistant", "refusal": None}
            message["content"] = "".join(self.pieces) or None
            if self.calls:
                message["tool_calls"] = self.calls
            choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
            return JSONResponse({"choices": [choice | {"logprobs": logprobs}], "usage": USAGE})

        return app

    async def events(self) -> AsyncIterator[bytes]:
        def event(**body: Any) -> bytes:
            return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"

        def choice(delta: dict[str, Any], reason: str | None = None) -> bytes:
            logprobs = {"content": [LOGPROB], "refusal": None} if self.asked[-1].get("logprobs") else None
            only = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
            return event(choices=[only], usage=None)

        try:
            yield event(choices=[{"index": 0, "delta": {}, "finish_reason": None, "logprobs": None}])
            for piece in self.pieces:
                data = choice({"content": piece})
                yield data[:9]  # the network cuts where it likes
                await asyncio.sleep(0)
                yield data[9:]
            for number, call in enumerate(self.calls):
                begun = {"name": call["function"]["name"], "arguments": ""}
                yield choice({"tool_calls": [{"index": number, **call, "function": begun}]})
                for letter in call["function"]["arguments"]:
                    written = {"arguments": letter}
                    yield choice({"tool_calls": [{"index": number, "function": written}]})
            for piece in self.pieces_after_calls:
                yield choice({"content": piece})
            while self.endless:
                yield choice({"content": "x" * 1000})
                await asyncio.sleep(0)
            if self.error_event is not None:
                yield event(**self.error_event)
            elif self.whole:
                last = {"index": 0, "delta": {}, "finish_reason": self.finish_reason, "logprobs": None}
                yield event(choices=[last], usage=None)
                yield event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"
        finally:
            self.left.set()


@pytest.fixture(scope="module")
def house(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for all tests: the database has no part in them."""
    folder = tmp_path_factory.mktemp("responses")
    database = Database(f"sqlite:///{shutil.copy(migrated_sqlite, folder / 'regraft.db')}")
    with open_house(database, folder) as house:
        yield house
    database.close()


@pytest.fixture(scope="module")
def server() -> Inference:
    return Inference()


@pytest.fixture(scope="module")
def url(house: House, server: Inference) -> Iterator[str]:
    for upstream in served(server.app()):
        yield from served(api_over(house, upstream))


@pytest.fixture
def inference(server: Inference) -> Inference:
    """The inference server, as it is at first."""
    vars(server).update(vars(Inference()))
    return server


@pytest.fixture(scope="module")
def stream_event() -> TypeAdapter[Any]:
    return TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def client(house: House, url: str, inference: Inference) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key=house.key, max_retries=0) as client:
        yield client


@pytest.fixture
def create(client: OpenAI) -> Callable[..., Any]:
    return lambda **fields: client.responses.create(**{"model": "tiny", "input": "hello"} | fields)


@pytest.fixture
def post(house: House, url: str, inference: Inference) -> Callable[..., httpx.Response]:
    headers = {"Authorization": f"Bearer {house.key}"}

    def post(**fields: Any) -> httpx.Response:
        body = {"model": "tiny", "input": "hello"} | fields
        return httpx.post(f"{url}/v1/responses", json=body, headers=headers)

    return post


def test_a_string_is_a_message_of_the_user(create: Callable[..., Any], inference: Inference) -> None:
    answer = create(instructions="Be brief.", max_output_tokens=5, temperature=0, top_p=0.5)

    assert answer.output_text == "ab"
    [asked] = inference.asked
    assert asked == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, USER],
        "max_completion_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.5,
        "regraft": {"base_model": "tiny"},
    }


def test_a_list_is_a_conversation_and_takes_an_earlier_output(
    create: Callable[..., Any], inference: Inference
) -> None:
    first = create()
    create(
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "type": "message", "content": [{"type": "input_text", "text": "hello"}]},
            *first.output,
            {"role": "user", "content": "and?"},
        ]
    )

    assert inference.asked[1]["messages"] == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "ab"}]},
        {"role": "user", "content": "and?"},
    ]


def test_the_answer_has_every_type_of_the_client_and_repeats_the_request(
    post: Callable[..., httpx.Response],
) -> None:
    sent = {
        "instructions": "Be brief.",
        "metadata": {"k": "v"},
        "reasoning": {"effort": "high"},
        "store": True,
        "text": {"verbosity": "low"},
        "user": "me",
    }
    body = post(**sent).json()
    answer = OpenAIResponse.model_validate(body, strict=True)

    assert (answer.status, answer.object, answer.model) == ("completed", "response", "tiny")
    assert answer.id.startswith("resp_") and present(answer.output[0].id).startswith("msg_")
    assert body["store"] is False and body["reasoning"] == {"effort": "high", "summary": None}
    assert {name: body[name] for name in ("instructions", "metadata", "user")} == {
        name: sent[name] for name in ("instructions", "metadata", "user")
    }
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert body["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }


def test_an_answer_that_is_cut_is_incomplete(create: Callable[..., Any], inference: Inference) -> None:
    inference.finish_reason = "length"
    answer = create(max_output_tokens=3)

    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[0].status, answer.output_text, answer.completed_at) == ("incomplete", "ab", None)


def test_the_effort_reaches_the_model_and_verbosity_has_no_effect(
    create: Callable[..., Any], inference: Inference
) -> None:
    create(reasoning={"effort": "xhigh", "summary": "auto"}, text={"verbosity": "low"})

    assert inference.asked[0].keys() == {"model", "messages", "reasoning_effort", "regraft"}
    assert inference.asked[0]["reasoning_effort"] == "xhigh"


def test_a_schema_reaches_the_inference_server_in_chats_spelling(
    create: Callable[..., Any], inference: Inference
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    format_ = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = create(text={"format": format_})

    nested = {"name": "x", "schema": schema, "strict": True}
    assert inference.asked[0]["response_format"] == {"type": "json_schema", "json_schema": nested}
    assert answer.text.format.to_dict(mode="json") == format_ | {"description": None}


def test_a_schema_that_does_not_compile_is_refused_by_its_own_place(
    post: Callable[..., httpx.Response],
) -> None:
    format_ = {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}
    error = post(text={"format": format_}).json()["error"]

    assert error["param"] == "text.format.schema"
    assert "response_format" not in error["message"]


class Number(BaseModel):
    n: int


def test_parse_gives_the_class_that_was_asked_for(client: OpenAI, inference: Inference) -> None:
    inference.pieces = ['{"n":', " 5}"]
    answer = client.responses.parse(model="tiny", input="a number", text_format=Number)

    assert answer.output_parsed == Number(n=5)
    assert inference.asked[0]["response_format"]["json_schema"]["name"] == "Number"
    client.responses.parse(
        model="tiny", input=[*untyped(answer.output), {"role": "user", "content": "more"}], text_format=Number
    )
    assert inference.asked[1]["messages"][0]["role"] == "assistant"


@pytest.mark.parametrize(
    ("finish_reason", "last"), [("stop", "response.completed"), ("length", "response.incomplete")]
)
def test_a_stream_has_the_clients_events_in_openais_order(
    post: Callable[..., httpx.Response],
    inference: Inference,
    stream_event: TypeAdapter[Any],
    finish_reason: str,
    last: str,
) -> None:
    inference.finish_reason = finish_reason
    inference.pieces = ["a\u2028", "b"]  # JSON may hold a line separator as it is
    answer = post(stream=True)
    blocks = [block.split("\n") for block in answer.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [event["type"] for event in events] == [*IN_ORDER, last]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        stream_event.validate_python(event, strict=True)
    first, final = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert first["id"] == final["id"]
    assert final["output"][0]["content"][0]["text"] == "a\u2028b"
    assert final["usage"]["output_tokens"] == 3
    assert inference.asked[0]["stream_options"] == {"include_usage": True}


def test_a_stream_ends_with_the_response_that_would_have_come_in_one_piece(
    create: Callable[..., Any],
) -> None:
    def comparable(answer: Any) -> Any:
        body = answer.to_dict(mode="json") | {"id": "", "created_at": 0, "completed_at": 0}
        body["output"][0]["id"] = ""
        return body

    *_, last = create(stream=True)

    assert comparable(last.response) == comparable(create())


def test_the_clients_stream_helper_collects_text_and_parsed_answer(
    client: OpenAI, inference: Inference
) -> None:
    inference.pieces = ['{"n":', " 5}"]
    with client.responses.stream(model="tiny", input="a number", text_format=Number) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        answer = stream.get_final_response()

    assert deltas == ['{"n":', " 5}"]
    assert answer.output_parsed == Number(n=5)


def test_the_async_client_reads_answers_and_streams(house: House, url: str, inference: Inference) -> None:
    async def both() -> tuple[str, str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=house.key, max_retries=0) as client:
            answer = await client.responses.create(model="tiny", input="hello")
            stream = await client.responses.create(model="tiny", input="hello", stream=True)
            text = "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])
            return answer.output_text, text

    assert asyncio.run(both()) == ("ab", "ab")


@pytest.mark.parametrize("fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_log_probabilities_are_in_answers_and_events(
    create: Callable[..., Any], inference: Inference, fields: dict[str, Any]
) -> None:
    answer = create(**fields)
    events = list(create(stream=True, **fields))

    assert inference.asked[0]["logprobs"] is True
    assert inference.asked[0].get("top_logprobs") == fields.get("top_logprobs")
    assert [one.token for one in answer.output[0].content[0].logprobs] == ["a"]
    assert [len(event.logprobs) for event in events if event.type == "response.output_text.delta"] == [1, 1]
    assert len(events[-1].response.output[0].content[0].logprobs) == 2


@pytest.mark.parametrize("kind", ["error", "broken off"])
def test_a_stream_that_fails_ends_with_response_failed(
    create: Callable[..., Any], inference: Inference, kind: str
) -> None:
    if kind == "error":
        inference.error_event = ERROR
    inference.whole = False
    *_, last = create(stream=True)

    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error"
    assert {"error": "no room", "broken off": "closed the connection"}[kind] in last.response.error.message


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_inference_server_comes_through(
    create: Callable[..., Any], inference: Inference, stream: bool
) -> None:
    inference.error = JSONResponse(ERROR, 503, {"retry-after": "7"})
    with pytest.raises(openai.InternalServerError) as refused:
        create(stream=stream)

    assert (refused.value.status_code, refused.value.code) == (503, "loading")
    assert refused.value.response.headers["retry-after"] == "7"


WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": True,
}


def call_of(number: int) -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps({"place": str(number)})}
    return {"id": f"call_{number}", "type": "function", "function": function}


def test_tools_are_those_of_a_chat(create: Callable[..., Any], inference: Inference) -> None:
    choice = {"type": "function", "name": "weather"}
    answer = create(tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)

    [asked] = inference.asked
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    assert asked["tools"] == [{"type": "function", "function": function}]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert asked["parallel_tool_calls"] is False
    assert (answer.tools[0].name, answer.tool_choice.name, answer.parallel_tool_calls) == ("weather",) * 2 + (
        False,
    )


def test_calls_are_items_and_are_sent_back_with_their_results(
    create: Callable[..., Any], inference: Inference
) -> None:
    inference.pieces, inference.calls, inference.finish_reason = [], [call_of(1), call_of(2)], "tool_calls"
    first = create(tools=[WEATHER])

    assert [(item.type, item.call_id, item.arguments) for item in first.output] == [
        ("function_call", f"call_{number}", json.dumps({"place": str(number)})) for number in (1, 2)
    ]
    assert first.status == "completed"
    results = [
        {"type": "function_call_output", "call_id": f"call_{number}", "output": "sun"} for number in (1, 2)
    ]
    create(input=[{"role": "user", "content": "hello"}, *first.output, *results], tools=[WEATHER])

    assert inference.asked[1]["messages"] == [
        USER,
        {"role": "assistant", "tool_calls": [call_of(1), call_of(2)]},
        {"role": "tool", "content": "sun", "tool_call_id": "call_1"},
        {"role": "tool", "content": "sun", "tool_call_id": "call_2"},
    ]


@pytest.mark.parametrize("before", [[], ["I look."]])
def test_text_after_a_call_does_not_part_it_from_its_result(
    create: Callable[..., Any], inference: Inference, before: list[str]
) -> None:
    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "output_text", "text": text}]}

    call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"place": "1"}'}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "sun"}
    create(input=[USER, *map(said, before), call, said("Wait."), result], tools=[WEATHER])

    assert inference.asked[0]["messages"][1:] == [
        {"role": "assistant", "content": "\n".join([*before, "Wait."]), "tool_calls": [call_of(1)]},
        {"role": "tool", "content": "sun", "tool_call_id": "call_1"},
    ]


def test_a_refusal_of_the_assistant_is_its_text(create: Callable[..., Any], inference: Inference) -> None:
    refused = {"type": "refusal", "refusal": "No."}
    create(input=[{"role": "assistant", "content": [refused]}, USER])

    [message, _] = inference.asked[0]["messages"]
    assert message == {"role": "assistant", "content": [{"type": "text", "text": "No."}]}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_parsed_calls_of_a_helper_are_sent_back_as_it_made_them(
    client: OpenAI, create: Callable[..., Any], inference: Inference, is_streamed: bool
) -> None:
    inference.pieces, inference.calls = [], [call_of(1)]
    asked: Any = {"model": "tiny", "input": "hello", "tools": [WEATHER | {"strict": True}]}
    if is_streamed:
        with client.responses.stream(**asked) as stream:
            answer: Any = stream.get_final_response()
    else:
        answer = client.responses.parse(**asked)

    [call] = answer.output
    assert call.parsed_arguments == {"place": "1"}
    sent = {"caller": {"type": "direct"}, "namespace": None, "async": False} | call.to_dict()
    sent["parsed_arguments"] = call.parsed_arguments
    result = {"type": "function_call_output", "call_id": "call_1", "output": "sun", "name": "weather"}
    create(input=[USER, sent, result | {"caller": None, "namespace": None}], tools=[WEATHER])

    assert inference.asked[1]["messages"][1:] == [
        {"role": "assistant", "tool_calls": [call_of(1)]},
        {"role": "tool", "content": "sun", "tool_call_id": "call_1"},
    ]


@pytest.mark.parametrize("pieces", [[], ["a", "b"]])
def test_calls_of_a_stream_have_openais_events(
    create: Callable[..., Any], inference: Inference, pieces: list[str]
) -> None:
    inference.pieces, inference.calls, inference.finish_reason = (
        pieces,
        [call_of(1), call_of(2)],
        "tool_calls",
    )
    events = list(create(tools=[WEATHER], stream=True))

    [done] = [event for event in events if event.type == "response.completed"]
    whole = create(tools=[WEATHER])
    assert [item.type for item in done.response.output] == [item.type for item in whole.output]
    assert done.response.output_text == whole.output_text == "".join(pieces)
    arguments = {item.id: "" for item in done.response.output if item.type == "function_call"}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] += event.delta
            assert done.response.output[event.output_index].id == event.item_id
    assert list(arguments.values()) == [call_of(number)["function"]["arguments"] for number in (1, 2)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    ended = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert added == ended == list(range(len(done.response.output)))


def test_the_text_after_a_call_of_a_stream_is_a_message_of_its_own(
    create: Callable[..., Any], inference: Inference, stream_event: TypeAdapter[Any]
) -> None:
    inference.calls, inference.pieces_after_calls = [call_of(1)], ["\n", "It ", "is."]
    events = list(create(tools=[WEATHER], stream=True))

    [done] = [event for event in events if event.type == "response.completed"]
    before, call, after = done.response.output
    assert [item.type for item in done.response.output] == ["message", "function_call", "message"]
    assert (before.content[0].text, after.content[0].text) == ("ab", "It is.")
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    places = [(event.output_index, event.item_id) for event in deltas]
    assert places == [(0, before.id)] * 2 + [(2, after.id)] * 2
    ended = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert ended == [before.id, call.id, after.id]
    for event in events:
        stream_event.validate_python(event.to_dict(), strict=True)


def test_a_client_that_leaves_a_stream_ends_it_upstream(
    create: Callable[..., Any], inference: Inference
) -> None:
    inference.endless = True
    stream = create(stream=True)
    next(stream)
    stream.close()

    assert inference.left.wait(30)


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "Missing"),
        ({"max_tool_calls": 1}, "max_tool_calls", "'max_tool_calls' is not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"conversation": "conv_1"}, "conversation", "stores no responses"),
        ({"background": True}, "background", "'background' is not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "'prompt' is not supported"),
        ({"include": ["file_search_call.results"]}, "include[0]", "file_search_call.results"),
        ({"truncation": "auto"}, "truncation", "'auto'"),
        ({"stop": "x"}, "stop", "Unknown parameter"),
        ({"temperature": 3}, "temperature", "above maximum"),
        ({"input": 3}, "input", "a string or an array"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]", "'item_reference'"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id", "Missing"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "image"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "file"),
        (
            {"input": [{"role": "user", "content": "?"}] * 2048, "instructions": "Go"},
            "input",
            "2048 messages",
        ),
        ({"input": [{"role": "user", "content": "?"}, *[CALL] * 129]}, "input", "128 calls of one answer"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "Missing"),
        ({"reasoning": {"effort": "hard"}}, "reasoning.effort", "'hard'"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    post: Callable[..., httpx.Response], inference: Inference, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = post(**fields)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]
    assert inference.asked == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "custom", "name": "f"}]},
        {"tool_choice": {"type": "file_search"}},
        {"include": ["file_search_call.results"]},
        {"truncation": "auto"},
        {"input": [{"type": "item_reference", "id": "1"}]},
        {"personality": "friendly"},
    ],
)
def test_what_openai_has_and_this_server_lacks_has_the_code_of_an_unsupported_parameter(
    post: Callable[..., httpx.Response], fields: dict[str, Any]
) -> None:
    assert post(**fields).json()["error"]["code"] == "unsupported_parameter"


def test_what_asks_for_nothing_is_accepted(post: Callable[..., httpx.Response]) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "auto",
        "previous_response_id": None,
        "background": False,
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "me",
    }

    assert post(**nothing).status_code == 200


def test_a_model_is_what_it_is_in_a_chat(
    house: House, client: OpenAI, create: Callable[..., Any], inference: Inference
) -> None:
    house.blobs.put_bytes("jobs/1/step-5/manifest.json", b"{}")
    with house.database.write() as session:
        checkpoint = Checkpoint(job_id="ftjob-1", step=5, epoch=1, blob_prefix="jobs/1/step-5")
        session.add(checkpoint)
        session.flush()
        model = TunedModel(name=NAME, project_id=house.project.id, job_id="ftjob-1", base_model="tiny")
        model.checkpoint_id = checkpoint.id
        session.add(model)

    assert create(model=NAME).model == NAME
    assert inference.asked[0]["regraft"]["adapter"]["prefix"] == "jobs/1/step-5"
    assert create(model="o4-mini-2025-04-16").model == "tiny"
    client.post("/regraft/aliases", body={"name": "production", "model": NAME}, cast_to=object)
    assert create(model="production").model == NAME
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="gpt-9")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


def test_azures_paths_reach_it(house: House, url: str, inference: Inference) -> None:
    azure = AzureOpenAI(azure_endpoint=url, api_key=house.key, api_version="2025-04-01-preview")
    newer = OpenAI(base_url=f"{url}/openai/v1/", api_key=house.key)

    for client in (azure, newer):
        assert client.responses.create(model="tiny", input="hello").output_text == "ab"


def test_the_tokens_of_an_input_are_those_that_a_response_would_read(
    client: OpenAI, create: Callable[..., Any], inference: Inference
) -> None:
    fields: Any = {"model": "tiny", "instructions": "Be brief.", "input": "hello"}

    counted = client.responses.input_tokens.count(**fields, text={"format": {"type": "json_object"}})

    assert (counted.object, counted.input_tokens) == ("response.input_tokens", USAGE["prompt_tokens"])
    assert counted.input_tokens == create(**fields).usage.input_tokens
    asked, answered = inference.asked
    assert asked == answered | {"max_completion_tokens": 1}


def test_a_count_of_tokens_passes_on_the_error_of_the_inference_server(
    client: OpenAI, inference: Inference
) -> None:
    error = {"message": "too long", "type": "invalid_request_error", "param": None, "code": None}
    inference.error = JSONResponse({"error": error}, 400)

    with pytest.raises(openai.BadRequestError, match="too long"):
        client.responses.input_tokens.count(model="tiny", input="hello")


def test_nothing_is_stored_and_the_refusal_says_so(client: OpenAI, create: Callable[..., Any]) -> None:
    answer = create()
    for look_up in (
        lambda: client.responses.retrieve(answer.id),
        lambda: client.responses.delete(answer.id),
        lambda: client.responses.cancel(answer.id),
        lambda: client.responses.input_items.list(answer.id),
    ):
        with pytest.raises(openai.NotFoundError, match="does not store responses") as unknown:
            look_up()
        assert unknown.value.code == "response_not_found"
