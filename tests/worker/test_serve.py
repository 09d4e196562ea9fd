"""Chat completions on this machine: what judges ask of them."""

import threading

import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI
from starlette.testclient import TestClient

from core.response_format import held_to
from worker.samplers import Answer
from worker.serve import Refused, create_app
from worker.types import Rollout

USER = [{"role": "user", "content": "hello"}]


class Echo:
    """A model whose answer is its seed; it remembers what it was asked at once."""

    context = 50

    def __init__(self):
        self.batches = []
        self.started, self.go = threading.Event(), threading.Event()
        self.go.set()

    def render(self, messages):
        return [ord(letter) for message in messages for letter in message["content"]]

    def answers(self, prompts, sampling):
        self.started.set()
        self.go.wait(10)
        self.batches.append((len(prompts), sampling.held_to, sampling.temperature))
        return [
            Answer(n, 0, Rollout((1, 2), (0.0, 0.0), f"{sampling.seed(prompt, 0)}", "stop"))
            for n, prompt in reversed(list(enumerate(prompts)))
        ]


@pytest.fixture
def model():
    return Echo()


@pytest.fixture
def client(model):
    def load(name):
        if name != "echo":
            raise Refused(f"The model '{name}' does not exist.", 404)
        return model

    with TestClient(create_app(load, "key")) as web:
        yield OpenAI(api_key="key", base_url="http://testserver/v1", http_client=web, max_retries=0)


def test_an_answer_is_a_chat_completion(client):
    reply = client.chat.completions.create(model="echo", messages=USER, seed=7)

    assert reply.choices[0].message.content == "7"
    assert reply.choices[0].finish_reason == "stop"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (5, 2, 7)


def test_what_comes_while_the_model_is_busy_is_answered_together(client, model):
    model.go.clear()
    said = {}

    def ask(seed):
        said[seed] = client.chat.completions.create(model="echo", messages=USER, seed=seed)

    first = threading.Thread(target=ask, args=(0,))
    first.start()
    assert model.started.wait(10)
    others = [threading.Thread(target=ask, args=(seed,)) for seed in range(1, 6)]
    for thread in others:
        thread.start()
    model.go.set()
    for thread in [first, *others]:
        thread.join()

    assert {seed: reply.choices[0].message.content for seed, reply in said.items()} == {
        n: str(n) for n in range(6)
    }
    assert sum(size for size, _, _ in model.batches) == 6
    assert len(model.batches) < 6


def test_requests_that_sample_differently_are_not_mixed(client, model):
    client.chat.completions.create(model="echo", messages=USER, temperature=0)
    client.chat.completions.create(
        model="echo",
        messages=USER,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1]}}},
    )

    assert model.batches == [(1, "", 0.0), (1, held_to({"enum": [1]}), 1.0)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 2}, "n: Extra inputs are not permitted"),
        ({"top_p": 0.5}, "top_p"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 50}]}, "50 tokens; echo takes 50"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "vibes"}},
                }
            },
            "schema",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(client, fields, said):
    with pytest.raises(BadRequestError, match=said):
        client.chat.completions.create(**{"model": "echo", "messages": USER} | fields)


def test_an_unknown_model_is_404_and_a_wrong_key_401(client):
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(model="echo", messages=USER)


def test_a_model_that_fails_answers_500_and_goes_on(client, model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Echo, "answers", lambda self, prompts, sampling: 1 / 0)
        with pytest.raises(Exception, match="the model failed: division by zero"):
            client.chat.completions.create(model="echo", messages=USER)

    assert (
        client.chat.completions.create(model="echo", messages=USER, seed=3).choices[0].message.content == "3"
    )
