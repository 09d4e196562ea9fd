"""Previews of jobs with tools: each test chooses what the inference server and the tool answer."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
from fastapi.responses import JSONResponse, Response

from graders.backends import Backends
from graders.endpoint import Endpoints
from tests.api.conftest import House
from tests.api.test_previews import (
    FIND,
    PREVIEW,
    Model,
    body,
    created,
    ended,
    error,
    inference,
    jsonl,
    model,
    opened,
    refuses,
    says,
)
from tests.graders.servers import serving

__all__ = ["body", "inference", "model"]  # fixtures

GRADER = {
    "type": "string_check",
    "name": "told",
    "operation": "eq",
    "input": "{{sample.output_text}} {{sample.stop}} {{sample.turns}} {{sample.output_tools[0].output}}",
    "reference": "{{item.answer}}",
}


def calls(name: str = "find", arguments: str = "{}", place: int = 0) -> Response:
    call = {"id": f"c{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 3}})


def asks_then_repeats(asked: Mapping[str, Any]) -> Response:
    """Calls the tool, and says what it has read."""
    last = asked["messages"][-1]
    return says(last["content"], read=20) if last["role"] == "tool" else calls()


@pytest.fixture
def web(house: House, inference: str) -> Iterator[httpx.Client]:
    yield from opened(house, inference, Backends({}, Endpoints(("127.0.0.1",))))


@pytest.fixture
def asked(
    body: Callable[..., dict[str, Any]], upload: Callable[..., str]
) -> Callable[[str, int], dict[str, Any]]:
    """The request for two episodes of one row, whose tool has this address."""

    def asked(server_url: str, steps: int) -> dict[str, Any]:
        row = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [FIND],
            "answer": "found final 2 found",
        }
        request = body(grader=GRADER) | {"rows": 1, "samples": 2}
        headers = {"X-Api-Key": "very-secret"}
        request["method"]["reinforcement"] |= {
            "tools": [{"name": "find", "server_url": server_url, "headers": headers}],
            "max_episode_steps": steps,
        }
        return request | {"training_file": upload(jsonl([row, row]), name="tools.jsonl")}

    return asked


def answers(web: httpx.Client, request: dict[str, Any]) -> list[dict[str, Any]]:
    made = ended(web, created(web, request))
    assert made["status"] == "completed", made["error"]
    found: list[dict[str, Any]] = web.get(f"{PREVIEW}/{made['id']}/answers").json()["data"]
    return found


def test_a_preview_of_a_job_with_tools_plays_its_episodes(
    web: httpx.Client, model: Model, asked: Callable[[str, int], dict[str, Any]]
) -> None:
    model.answer = asks_then_repeats
    sent: list[dict[str, Any]] = []

    def tool(path: str, request: dict[str, Any]) -> tuple[int, str]:
        sent.append(request)
        return 200, json.dumps({"output": "found"})

    with serving(tool) as url:
        first, second = answers(web, asked(f"{url}/find", 4))

    assert (first["output_text"], first["stop"], first["score"]) == ("found", "final", 1.0)
    assert [one["role"] for one in first["conversation"]] == ["assistant", "tool", "assistant"]
    assert [(use["output"], use["error"]) for use in first["output_tools"]] == [("found", None)]
    assert first["completion_tokens"] == 7  # of both answers
    assert {first["trace_id"], second["trace_id"]} == {one["trace_id"] for one in sent}
    assert sent[0]["item"]["answer"] == "found final 2 found"


def test_another_grader_samples_the_episodes_again(
    web: httpx.Client, model: Model, asked: Callable[[str, int], dict[str, Any]]
) -> None:
    model.answer = asks_then_repeats
    with serving(lambda path, request: (200, '{"output": "found"}')) as url:
        request = asked(f"{url}/find", 4)
        answers(web, request)
        sampled = len(model.asked)
        request["method"]["reinforcement"]["grader"] = GRADER | {"operation": "like"}

        again = answers(web, request)

    assert len(model.asked) == 2 * sampled
    assert [one["score"] for one in again] == [1.0, 1.0]


def test_the_last_answer_of_an_episode_has_calls_that_are_not_executed(
    web: httpx.Client, model: Model, asked: Callable[[str, int], dict[str, Any]]
) -> None:
    model.answer = lambda request: calls()
    with serving(lambda path, request: (200, '{"output": "found"}')) as url:
        [first, _] = answers(web, asked(f"{url}/find", 2))

    assert first["stop"] == "max_steps"
    assert [use["output"] for use in first["output_tools"]] == ["found", None]
    assert first["finish_reason"] == "length"


def test_a_conversation_without_room_for_another_answer_ends(
    web: httpx.Client, model: Model, asked: Callable[[str, int], dict[str, Any]]
) -> None:
    def answer(request: Mapping[str, Any]) -> Response:
        is_long = request["messages"][-1]["role"] == "tool"
        return refuses(400, "too long", "context_length_exceeded") if is_long else calls()

    model.answer = answer
    with serving(lambda path, request: (200, '{"output": "found"}')) as url:
        [first, _] = answers(web, asked(f"{url}/find", 4))

    assert first["stop"] == "context"


def test_results_beyond_any_context_end_an_episode_before_the_model_is_asked(
    web: httpx.Client, model: Model, asked: Callable[[str, int], dict[str, Any]]
) -> None:
    model.answer = asks_then_repeats
    with serving(lambda path, request: (200, json.dumps({"output": "x" * 500_000}))) as url:
        [first, _] = answers(web, asked(f"{url}/find", 4))

    assert first["stop"] == "context"
    assert not any(one["messages"][-1]["role"] == "tool" for one in model.asked)


def test_a_page_of_answers_ends_by_the_size_of_results(
    web: httpx.Client, model: Model, asked: Callable[[str, int], dict[str, Any]]
) -> None:
    model.answer = asks_then_repeats
    # Each answer has its result twice, and this letter as six bytes of JSON.
    result = json.dumps({"output": "é" * 450_000}, ensure_ascii=False)
    with serving(lambda path, request: (200, result)) as url:
        page = answers(web, asked(f"{url}/find", 4))

    assert len(page) == 1  # of two


def test_an_episode_whose_tool_fails_is_not_graded(
    web: httpx.Client, model: Model, asked: Callable[[str, int], dict[str, Any]]
) -> None:
    model.answer = asks_then_repeats
    with serving(lambda path, request: (302, "very-secret")) as url:
        first, second = answers(web, asked(f"{url}/find", 4))

    assert (first["stop"], first["score"], second["score"]) == ("discarded", None, None)
    assert first["reason"].startswith("a tool failed: HTTP 302")
    assert "very-secret" not in json.dumps(first)


def test_a_function_of_a_row_without_a_tool_is_refused_before_anything_is_sampled(
    web: httpx.Client, model: Model, asked: Callable[[str, int], dict[str, Any]]
) -> None:
    request = asked("https://127.0.0.1/x", 2)
    request["method"]["reinforcement"]["tools"][0]["name"] = "other"

    refused = error(web.post(PREVIEW, json=request), 400)

    assert refused["param"] == "training_file"
    assert "the function 'find'" in refused["message"]
    assert model.asked == []
