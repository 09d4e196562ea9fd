"""The call that ends the RFT guide, and what cookbooks and the Responses guides do with it."""

import asyncio
import os
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.fine_tuning.fine_tuning_job import FineTuningJob
from pydantic import BaseModel

from tests.conformance.helpers import RESPONSE, assert_documented
from tests.present import untyped

MODEL = "o4-mini-2025-04-16"


class Verdict(BaseModel):
    compliant: str
    explanation: str


@pytest.fixture
def client(inference: None) -> OpenAI:
    return OpenAI(timeout=120)


@pytest.mark.slow
def test_the_guides_last_call_is_answered_by_the_tuned_model(trained: FineTuningJob, inference: None) -> None:
    answer = httpx.post(
        f"{os.environ['OPENAI_BASE_URL']}/responses",
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        json={"model": trained.fine_tuned_model, "input": "Is it safe to sign?"},
        timeout=120,
    )

    assert answer.status_code == 200, answer.text
    assert_documented(answer.json(), RESPONSE | {"model": trained.fine_tuned_model})


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_a_benchmark_sets_the_effort(client: OpenAI, effort: Literal["low", "medium", "high"]) -> None:
    response = client.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}],
        reasoning={"effort": effort},
        max_output_tokens=4000,
    )

    assert_documented(response, RESPONSE | {"reasoning": {"effort": effort}})


@pytest.mark.slow
def test_a_conversation_is_kept_by_sending_the_output_back(client: OpenAI) -> None:
    history: Any = [{"role": "user", "content": "Hello!"}]
    first = client.responses.create(model=MODEL, input=history, max_output_tokens=8, store=False)
    second = client.responses.create(
        model=MODEL,
        input=[*history, *untyped(first.output), {"role": "user", "content": "And?"}],
        max_output_tokens=8,
    )

    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.slow
def test_an_answer_that_is_cut_is_incomplete(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=1, temperature=0)

    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage is not None
    assert response.usage.output_tokens == 1


@pytest.mark.slow
def test_a_class_is_parsed_from_the_answer(client: OpenAI) -> None:
    response = client.responses.parse(model=MODEL, input="Is it safe?", text_format=Verdict)

    assert isinstance(response.output_parsed, Verdict)


@pytest.mark.slow
def test_a_stream_has_typed_events(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hello!", max_output_tokens=200) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        response = stream.get_final_response()

    assert_documented(response, RESPONSE)
    assert text == response.output_text


@pytest.mark.slow
def test_the_async_client_streams(inference: None) -> None:
    async def read() -> list[Any]:
        stream = await AsyncOpenAI(timeout=120).responses.create(model=MODEL, input="Hello!", stream=True)
        return [event async for event in stream]

    events = asyncio.run(read())

    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")


def test_a_stored_response_is_refused_by_name() -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        OpenAI().responses.retrieve("resp_abc123")
    with pytest.raises(openai.BadRequestError) as refused:
        OpenAI().responses.create(model=MODEL, input="And?", previous_response_id="resp_abc123")

    assert unknown.value.code == "response_not_found"
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "unsupported_parameter")
