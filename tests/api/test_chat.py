"""What the API makes of a chat completion, over a real connection to an inference server that does as it is told."""

import asyncio
import hashlib
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from api.app import create_app
from api.resources.chat import Upstream
from core.database.tables import Checkpoint, TunedModel
from core.registry import Registry
from core.results import tuned_models
from core.settings import Settings
from graders.backends import Backends
from tests.api.conftest import ALIASES, MODELS, House
from tests.present import present

NAME = "ft:tiny:acme::12345678"
MANIFEST = b'{"format": 1, "files": []}'
USER = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Inference:
    """An inference server: what it was asked, and what it answers."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    encodings: list[str] = field(default_factory=list)
    streams: bool = True
    answer: Response | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    sent: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/healthz")
        async def healthy() -> dict[str, str]:
            return {"status": "ok"}

        @app.post("/v1/completions")
        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            self.asked.append(await request.json())
            self.keys.append(request.headers["authorization"])
            self.begun.set()
            self.encodings.append(request.headers["accept-encoding"])
            if self.asked[-1].get("stream") and self.streams:
                return StreamingResponse(self.events(), media_type="text/event-stream")
            if self.answer is None:
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                self.left.set()
            return self.answer or Response()

        return app

    async def events(self) -> AsyncIterator[bytes]:
        from anyio import to_thread

        try:
            while self.sent < 10_000:
                yield b"data: " + b"x" * 20_000 + b"\n\n"
                self.sent += 1
                await asyncio.sleep(0)  # as a real one does, which waits for its tokens
                if self.sent == 3:
                    await to_thread.run_sync(self.go.wait, 10)
        finally:
            self.left.set()


def served(app: FastAPI) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", log_config=None))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def inference() -> Inference:
    return Inference(answer=JSONResponse({"object": "chat.completion"}))


@pytest.fixture
def upstream(inference: Inference) -> Iterator[str]:
    yield from served(inference.app())


def api_over(house: House, url: str | dict[str, str]) -> FastAPI:
    address = (
        {model: f"{one}/v1" for model, one in url.items()} if isinstance(url, dict) else url and f"{url}/v1"
    )
    settings = Settings(data_dir=house.folder, inference_url=address, inference_key="between us")
    return create_app(
        settings,
        house.database,
        house.blobs,
        Registry(models=MODELS, aliases=ALIASES),
        Backends.none(),
        lambda *wake: True,
    )


@pytest.fixture
def web(house: House, upstream: str) -> Iterator[httpx.Client]:
    for url in served(api_over(house, upstream)):
        with httpx.Client(base_url=f"{url}/v1", headers={"Authorization": f"Bearer {house.key}"}) as client:
            yield client


@pytest.fixture
def tuned(house: House) -> str:
    house.blobs.put_bytes("jobs/1/step-5/manifest.json", MANIFEST)
    with house.database.write() as session:
        checkpoint = Checkpoint(job_id="ftjob-1", step=5, epoch=1, blob_prefix="jobs/1/step-5")
        session.add(checkpoint)
        session.flush()
        model = TunedModel(name=NAME, project_id=house.project.id, job_id="ftjob-1", base_model="tiny")
        model.checkpoint_id = checkpoint.id
        session.add(model)
    return NAME


def ask(web: httpx.Client, **fields: Any) -> httpx.Response:
    return web.post("/chat/completions", json=USER | fields)


def test_a_base_model_is_asked_for_by_its_name(web: httpx.Client, inference: Inference) -> None:
    answer = ask(web, temperature=0, user="me", metadata={"k": "v"}, store=True)

    assert (answer.status_code, answer.json()) == (200, {"object": "chat.completion"})
    [asked] = inference.asked
    assert asked == USER | {"temperature": 0.0, "regraft": {"base_model": "tiny"}}
    assert inference.keys == ["Bearer between us"]


def test_an_alias_is_asked_for_by_the_model_it_leads_to(web: httpx.Client, inference: Inference) -> None:
    ask(web, model="o4-mini-2025-04-16")

    assert inference.asked == [USER | {"regraft": {"base_model": "tiny"}}]


def test_azures_deployment_in_the_path_is_the_model(
    web: httpx.Client, inference: Inference, tuned: str
) -> None:
    url = str(web.base_url).removesuffix("/v1/") + "/openai/deployments/"
    body = {"messages": USER["messages"]}

    for deployment, base in ((tuned, "tiny"), ("org%2Flarge", "org/large"), ("o4-mini-2025-04-16", "tiny")):
        answer = web.post(f"{url}{deployment}/chat/completions?api-version=2025-04-01-preview", json=body)
        assert answer.status_code == 200
        assert inference.asked[-1]["regraft"]["base_model"] == base
    assert web.post(f"{url}nothing/chat/completions", json=body).status_code == 404


def test_azures_completions_name_the_deployment_in_the_path(web: httpx.Client, inference: Inference) -> None:
    url = str(web.base_url).removesuffix("/v1/") + "/openai/deployments/"

    answer = web.post(f"{url}o4-mini-2025-04-16/completions?api-version=2024-10-21", json={"prompt": "Say"})

    assert answer.status_code == 200
    served = {"base_model": "tiny"}
    assert inference.asked == [{"model": "tiny", "prompt": "Say", "regraft": served}]
    assert web.post(f"{url}nothing/completions", json={"prompt": "Say"}).status_code == 404


@pytest.mark.both_databases
def test_a_tuned_model_is_asked_for_by_the_hash_of_its_weights(
    web: httpx.Client, inference: Inference, tuned: str
) -> None:
    ask(web, model=tuned)

    adapter = {"prefix": "jobs/1/step-5", "manifest_sha256": hashlib.sha256(MANIFEST).hexdigest()}
    assert inference.asked[0]["regraft"] == {"base_model": "tiny", "adapter": adapter}
    assert inference.asked[0]["model"] == tuned


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_the_model_answers_at_which_an_alias_points_now(
    web: httpx.Client, inference: Inference, tuned: str, path: str
) -> None:
    text: dict[str, Any] = {"prompt": "Say"} if path == "completions" else USER
    body = text | {"model": "production"}

    for target in ("tiny", tuned):
        web.post("/regraft/aliases", json={"name": "production", "model": target}).raise_for_status()
        assert web.post(f"/{path}", json=body).status_code == 200

    assert [asked["model"] for asked in inference.asked] == ["tiny", tuned]
    adapters = [asked["regraft"].get("adapter") for asked in inference.asked]
    assert [adapter and adapter["prefix"] for adapter in adapters] == [None, "jobs/1/step-5"]


def test_an_alias_of_a_deleted_model_says_what_it_points_at(
    house: House, web: httpx.Client, tuned: str
) -> None:
    web.post("/regraft/aliases", json={"name": "production", "model": tuned}).raise_for_status()
    with house.database.write() as session:
        tuned_models.delete_names_of(session, session.query(Checkpoint).one().id)

    answer = ask(web, model="production")

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert f"The alias 'production' points at '{tuned}', which no longer exists" in answer.text


def test_a_schema_reaches_the_inference_server_as_it_was_sent(
    web: httpx.Client, inference: Inference
) -> None:
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "boolean"}, "strict": True},
    }
    ask(web, response_format=wanted)

    assert inference.asked[0]["response_format"] == wanted


@pytest.mark.both_databases
def test_a_model_of_another_project_does_not_exist(web: httpx.Client, house: House, tuned: str) -> None:
    answer = web.post(
        "/chat/completions",
        json=USER | {"model": tuned},
        headers={"Authorization": f"Bearer {house.other_key}"},
    )

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert tuned not in answer.json()["error"]["message"].split("Available:")[1]


@pytest.mark.both_databases
def test_a_deleted_model_is_not_served_any_more(web: httpx.Client, inference: Inference, tuned: str) -> None:
    assert ask(web, model=tuned).status_code == 200
    web.delete(f"/models/{tuned}")

    assert ask(web, model=tuned).status_code == 404
    assert len(inference.asked) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"logit_bias": {"a": 2}}, "logit_bias.a"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", "b" * 1001]}, "stop[1]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "a", "refusal": "No."}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_what_would_not_be_honoured_is_refused_by_its_name(
    web: httpx.Client, inference: Inference, fields: dict[str, Any], param: str | None
) -> None:
    answer = ask(web, **fields)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert inference.asked == []


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (list("abcde"), "Invalid 'stop': too many entries. Expected at most 4, but got 5 instead."),
        (
            "",
            "Invalid 'stop': string too short. Expected a string with minimum length 1, but got a string with length "
            "0 instead.",
        ),
        (5, "Invalid type for 'stop': expected a string or an array, but got an integer instead."),
    ],
)
def test_a_stop_sequence_is_refused_in_openais_words(web: httpx.Client, stop: Any, message: str) -> None:
    assert ask(web, stop=stop).json()["error"]["message"] == message


@pytest.mark.parametrize("sent", [3, 3.0, 200])
def test_a_number_beyond_its_bound_is_refused_in_openais_words(web: httpx.Client, sent: float) -> None:
    """OpenAI's code is that of the field, also for a number without decimals."""
    error = ask(web, temperature=sent).json()["error"]

    assert error["code"] == "decimal_above_max_value"
    assert error["message"] == (
        f"Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got {sent} instead."
    )


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_refused_by_what_it_is(
    web: httpx.Client, inference: Inference, kind: str
) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {}}]
    answer = ask(web, messages=[{"role": "user", "content": parts}])

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content[1]")
    assert {"image_url": "image", "input_audio": "audio", "file": "file"}[kind] in error["message"]
    assert inference.asked == []


def test_a_search_with_its_defaults_is_refused(web: httpx.Client, inference: Inference) -> None:
    """As OpenAI's guide asks for one: `web_search_options={}`."""
    error = ask(web, web_search_options={}).json()["error"]

    assert (error["param"], error["code"]) == ("web_search_options", "unsupported_parameter")
    assert inference.asked == []


def test_what_is_not_supported_has_openais_code(web: httpx.Client) -> None:
    error = ask(web, prediction={"type": "content", "content": "x"}).json()["error"]

    assert (error["param"], error["code"]) == ("prediction", "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
    ],
)
def test_tools_other_than_functions_have_openais_code(
    web: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    error = ask(web, **fields).json()["error"]

    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max", None])
def test_reasoning_effort_reaches_the_model_and_verbosity_has_no_effect(
    web: httpx.Client, inference: Inference, effort: str | None
) -> None:
    answer = ask(web, reasoning_effort=effort, verbosity=effort if effort in ("low", "high") else None)

    assert answer.status_code == 200
    sent = {"reasoning_effort": effort} if effort else {}
    assert inference.asked == [USER | sent | {"regraft": {"base_model": "tiny"}}]


def test_an_earlier_answer_is_sent_back_as_openais_client_has_it(
    web: httpx.Client, inference: Inference
) -> None:
    earlier = {"role": "assistant", "content": "[1]", "refusal": None}
    empty: dict[str, Any] = {"annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    part = {"type": "text", "text": "and?"}
    question = {"role": "user", "content": [part]}
    marked = {"role": "user", "content": [part | {"prompt_cache_breakpoint": {"mode": "explicit"}}]}

    answer = ask(web, messages=[earlier | empty | {"parsed": [1], "reasoning_content": "hm"}, marked])

    assert answer.status_code == 200
    thought = {"reasoning_content": "hm"}
    assert inference.asked[0]["messages"] == [{"role": "assistant", "content": "[1]"} | thought, question]


REFUSED = {"type": "refusal", "refusal": "No."}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"refusal": "No."}, "No."),
        ({"content": [REFUSED]}, [{"type": "text", "text": "No."}]),
    ],
)
def test_a_refusal_of_the_assistant_is_its_text(
    web: httpx.Client, inference: Inference, message: dict[str, Any], content: Any
) -> None:
    question = {"role": "user", "content": "Why?"}

    assert ask(web, messages=[{"role": "assistant"} | message, question]).status_code == 200
    assert inference.asked[0]["messages"] == [{"role": "assistant", "content": content}, question]


class Place(BaseModel):
    place: str


CALLED: dict[str, Any] = {"id": "1", "type": "function"}
CALLED["function"] = {"name": "Place", "arguments": '{"place": "Rome"}'}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_parsed_calls_of_a_helper_are_sent_back_as_it_made_them(
    web: httpx.Client, inference: Inference, is_streamed: bool
) -> None:
    choice = {"index": 0, "logprobs": None, "finish_reason": "tool_calls"}
    body = {"id": "c", "created": 1, "model": "tiny"}
    if is_streamed:
        delta = {"role": "assistant", "content": None, "tool_calls": [CALLED | {"index": 0}]}
        chunk = body | {"object": "chat.completion.chunk", "choices": [choice | {"delta": delta}]}
        events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        inference.streams, inference.answer = False, Response(events, media_type="text/event-stream")
    else:
        said = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALLED]}
        whole = body | {"object": "chat.completion", "choices": [choice | {"message": said}]}
        inference.answer = JSONResponse(whole)
    key = web.headers["authorization"].removeprefix("Bearer ")
    client = OpenAI(base_url=str(web.base_url), api_key=key, max_retries=0)
    question: Any = {"role": "user", "content": "Where?"}
    asked: Any = {"model": "tiny", "tools": [pydantic_function_tool(Place)]}
    if is_streamed:
        with client.chat.completions.stream(**asked, messages=[question]) as stream:
            answer = stream.get_final_completion()
    else:
        answer = client.chat.completions.parse(**asked, messages=[question])

    message = answer.choices[0].message
    assert present(message.tool_calls)[0].function.parsed_arguments == Place(place="Rome")
    result = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
    inference.answer = JSONResponse({"object": "chat.completion"})
    assert ask(web, messages=[question, message.to_dict(), result]).status_code == 200
    assert inference.asked[1]["messages"][1]["tool_calls"] == [CALLED]


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def test_tools_penalties_and_biases_reach_the_inference_server(
    web: httpx.Client, inference: Inference
) -> None:
    sent: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {"40": -100.0},
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "sun", "tool_call_id": "1"},
        ],
    }
    collected = [
        sent["messages"][0],
        {"role": "assistant", "tool_calls": [CALL | {"index": 0}]},
        sent["messages"][2],
    ]

    assert ask(web, **sent | {"messages": collected}).status_code == 200
    assert inference.asked == [sent | {"model": "tiny", "regraft": {"base_model": "tiny"}}]


def test_a_required_tools_schema_is_checked_as_any_other(web: httpx.Client, inference: Inference) -> None:
    impossible = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"pattern": "("}}}}
    answer = ask(web, tools=[{"type": "function", "function": impossible}], tool_choice="required")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].function.parameters")
    assert inference.asked == []


def test_required_tools_are_refused_before_they_are_sent_if_their_schemas_do_not_go_together(
    web: httpx.Client, inference: Inference
) -> None:
    moves = {"type": "object", "properties": {"x": {"$id": "https://x.test/y"}}}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": moves}} for n in range(2)]

    answer = ask(web, tools=tools, tool_choice="required")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].function.parameters")
    assert inference.asked == []


def test_a_completion_is_passed_on_with_the_weights_of_its_model(
    web: httpx.Client, inference: Inference, tuned: str
) -> None:
    answer = web.post("/completions", json={"model": tuned, "prompt": ["a", "b"], "max_tokens": 3})

    assert answer.status_code == 200
    [asked] = inference.asked
    assert (asked["prompt"], asked["max_tokens"]) == (["a", "b"], 3)
    assert asked["regraft"]["adapter"] is not None
    for fields, param in (
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
    ):
        refused = web.post("/completions", json={"model": "tiny", "prompt": "a"} | fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_what_asks_for_nothing_is_accepted(web: httpx.Client) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "presence_penalty": 0,
        "logit_bias": {},
        "modalities": ["text"],
    }

    assert ask(web, **nothing, service_tier="auto", parallel_tool_calls=True).status_code == 200


def test_an_error_of_the_inference_server_comes_through_with_its_retry_after(
    web: httpx.Client, inference: Inference
) -> None:
    error = {"error": {"message": "loading", "type": "server_error", "param": None, "code": "loading"}}
    inference.answer = JSONResponse(error, 503, {"retry-after": "7"})
    answer = ask(web, stream=False)

    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (503, error, "7")


def test_the_caller_may_try_again_while_the_inference_server_has_another_key(
    web: httpx.Client, inference: Inference
) -> None:
    inference.answer = JSONResponse({}, 401)
    answer = ask(web)

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "REGRAFT_INFERENCE_KEY" in answer.text


def test_what_no_inference_server_says_is_not_passed_on(web: httpx.Client, inference: Inference) -> None:
    inference.streams = False
    for answer, status, said in (
        (HTMLResponse("<h1>Bad Gateway</h1>", 502), 503, "status 502"),
        (HTMLResponse("<h1>Error</h1>", 500), 500, "status 500"),
        (HTMLResponse("<h1>Welcome</h1>", 200), 500, "status 200"),
        (JSONResponse({"detail": "Not Found"}, 404), 500, "REGRAFT_INFERENCE_URL"),
        (JSONResponse(["error"], 400), 500, "status 400"),
        (JSONResponse({"error": "no"}, 400), 500, "status 400"),
    ):
        inference.answer = answer
        for passed_on in (ask(web), ask(web, stream=True)):
            assert passed_on.status_code == status
            assert said in passed_on.json()["error"]["message"]
            assert passed_on.headers.get("retry-after") == ("5" if status == 503 else None)


def test_answers_are_asked_for_uncompressed(web: httpx.Client, inference: Inference) -> None:
    """A stream goes through byte for byte: a proxy on the way must not pack what nobody unpacks."""
    ask(web)

    assert inference.encodings == ["identity"]


def test_an_answer_that_does_not_come_is_no_server_that_is_starting(
    house: House, upstream: str, inference: Inference
) -> None:
    inference.answer = None
    app = api_over(house, upstream)
    app.state.upstream = Upstream(app.state.service.settings, timeout=httpx.Timeout(0.2))
    for url in served(app):
        headers = {"Authorization": f"Bearer {house.key}"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=USER, headers=headers)

    assert (answer.status_code, "retry-after" in answer.headers) == (500, False)
    assert "has not answered for" in answer.json()["error"]["message"]


def test_without_an_inference_server_the_refusal_says_what_to_do(house: House) -> None:
    for url in served(api_over(house, "")):
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=USER, headers={"Authorization": f"Bearer {house.key}"}
        )

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "serving_not_configured")
    assert "REGRAFT_INFERENCE_URL" in answer.json()["error"]["message"]


def test_each_base_model_is_asked_at_its_own_server_and_a_tuned_model_at_that_of_its_base(
    house: House, upstream: str, inference: Inference, tuned: str
) -> None:
    for url in served(api_over(house, {"tiny": upstream})):
        with httpx.Client(base_url=f"{url}/v1", headers={"Authorization": f"Bearer {house.key}"}) as web:
            answers = [
                web.post("/chat/completions", json=USER | {"model": model})
                for model in ("tiny", tuned, "org/large")
            ]

    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert [asked["regraft"]["base_model"] for asked in inference.asked] == ["tiny", "tiny"]
    error = answers[2].json()["error"]
    assert error["code"] == "serving_not_configured"
    assert "no inference server for org/large" in error["message"]


def test_an_inference_server_that_is_not_there_is_503_with_retry_after(house: House) -> None:
    for url in served(api_over(house, "http://127.0.0.1:9")):
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=USER, headers={"Authorization": f"Bearer {house.key}"}
        )

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "The inference server does not accept connections" in answer.json()["error"]["message"]


def test_an_inference_server_that_accepts_but_does_not_answer_is_starting(house: House) -> None:
    """As while `up` starts its process: the socket is there first."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = api_over(house, f"http://127.0.0.1:{listening.getsockname()[1]}")
        app.state.upstream.patience = 0.2
        for url in served(app):
            answer = httpx.post(
                f"{url}/v1/chat/completions", json=USER, headers={"Authorization": f"Bearer {house.key}"}
            )

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "is starting" in answer.json()["error"]["message"]


def test_a_stream_comes_as_it_is_made(web: httpx.Client, inference: Inference) -> None:
    """The first events are here while the server has not made the fourth."""
    with web.stream("POST", "/chat/completions", json=USER | {"stream": True}) as answer:
        parts = answer.iter_raw()
        first = next(parts)
        made = inference.sent
        inference.go.set()

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert first.startswith(b"data: x")
    assert made <= 3


def test_a_client_that_leaves_a_stream_ends_it_upstream(web: httpx.Client, inference: Inference) -> None:
    inference.go.set()
    with web.stream("POST", "/chat/completions", json=USER | {"stream": True}) as answer:
        next(answer.iter_raw())

    assert inference.left.wait(30)
    assert inference.sent < 10_000


def test_a_client_that_leaves_before_its_answer_ends_it_upstream(
    house: House, upstream: str, inference: Inference
) -> None:
    inference.answer = None
    for url in served(api_over(house, upstream)):
        body = json.dumps(USER).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {house.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client:
            client.sendall(head.encode() + body)
            assert inference.begun.wait(30)
        assert inference.left.wait(30)


def test_a_client_that_does_not_read_holds_up_who_writes(web: httpx.Client, inference: Inference) -> None:
    """200 MB are on offer; what is made stays at what the buffers on the way hold."""
    inference.go.set()
    with web.stream("POST", "/chat/completions", json=USER | {"stream": True}) as answer:
        parts = answer.iter_raw()  # kept: when it goes, the connection does
        next(parts)
        before = -1
        while before != inference.sent:  # until nothing moves for a moment
            before = inference.sent
            assert not inference.left.wait(0.5)
        stood_still_at = inference.sent

    assert stood_still_at < 5_000


@pytest.mark.both_databases
def test_a_checkpoint_is_downloaded_as_a_tar_by_its_own_project_only(
    house: House, web: httpx.Client, create_job: Callable[..., dict[str, Any]]
) -> None:
    import io
    import tarfile

    job_id = create_job()["id"]
    weights = os.urandom(3000)
    files = [
        {"name": name, "bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
        for name in ("adapter_model.safetensors", "trainer.pt")
    ]
    for file in files:
        house.blobs.put_bytes(f"step-1/{file['name']}", weights)
    house.blobs.put_bytes("step-1/manifest.json", json.dumps({"format": 1, "files": files}).encode())
    with house.database.write() as session:
        checkpoint = Checkpoint(job_id=job_id, step=1, epoch=1, blob_prefix="step-1", valid_reward=0.5)
        session.add(checkpoint)
        session.flush()
        url = f"/regraft/checkpoints/{checkpoint.id}/archive"
    answer = web.get(url)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        found = {member.name: present(tar.extractfile(member)).read() for member in tar}

    folder = f"{job_id}-step-1"
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert set(found) == {
        f"{folder}/{n}" for n in ("adapter_model.safetensors", "README.md", "reproduce.json")
    }
    assert found[f"{folder}/adapter_model.safetensors"] == weights
    assert json.loads(found[f"{folder}/reproduce.json"])["checkpoint"]["valid_reward"] == 0.5
    assert web.get(url, headers={"Authorization": f"Bearer {house.other_key}"}).status_code == 404

    house.blobs.put_bytes("step-1/adapter_model.safetensors", weights[:-1] + b"?")
    damaged = web.get(url)
    assert (damaged.status_code, damaged.json()["error"]["code"]) == (410, "checkpoint_damaged")
    assert "adapter_model.safetensors is not the stored content" in damaged.json()["error"]["message"]
