"""Reference, models and chat: what is listed, deleted, and answered whole and as a stream."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.conformance.conftest import MODELS
from tests.conformance.helpers import CHAT, MODEL, assert_documented, starts
from tests.present import present

MESSAGES: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]


@pytest.mark.parametrize("name", MODELS)
def test_openais_names_are_models_here(name: str) -> None:
    client = OpenAI()

    assert_documented(client.models.retrieve(name), MODEL | {"id": name})


def test_the_list_has_every_name() -> None:
    models = OpenAI().models.list()

    for model in models:
        assert_documented(model, MODEL)
    assert {model.id for model in models} >= set(MODELS)


def test_a_base_model_is_not_deleted() -> None:
    with pytest.raises(openai.BadRequestError):
        OpenAI().models.delete("o4-mini-2025-04-16")


@pytest.mark.slow
def test_a_completion_has_the_documented_shape(inference: None) -> None:
    completion = OpenAI(timeout=120).chat.completions.create(
        model="o4-mini-2025-04-16", messages=MESSAGES, max_completion_tokens=8, n=2, seed=1, temperature=1
    )

    assert_documented(completion, CHAT)
    assert [choice.index for choice in completion.choices] == [0, 1]
    usage = completion.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.slow
def test_a_stream_has_the_documented_chunks(inference: None) -> None:
    stream = OpenAI(timeout=120).chat.completions.create(
        model="o4-mini-2025-04-16",
        messages=MESSAGES,
        max_completion_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )

    chunks = list(stream)
    for chunk in chunks:
        assert_documented(
            chunk,
            {"id": starts("chatcmpl-"), "object": "chat.completion.chunk", "created": int, "model": str},
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert next(choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason)
    assert chunks[-1].choices == [] and present(chunks[-1].usage).completion_tokens > 0
