"""Chat completions as the inference server answers them: what the API and judges ask of it."""

import asyncio
import errno
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.responses import Response
from jinja2 import TemplateError
from openai import (
    APIError,
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    OpenAI,
)
from prometheus_client import REGISTRY, Gauge
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from core.chat import InternalChat, Served
from core.registry import BaseModelEntry, InvalidRegistry, Registry
from core.reloaded import Reloaded
from core.response_format import SchemaTooLarge
from core.settings import Settings
from core.storage.store import FolderBlobs
from core.telemetry.metrics import COUNTED
from tests.engines import ScriptedEngine
from tests.present import present, untyped
from tests.slow_body import stopped_body
from tests.thinking import thinking_tokenizer
from tests.tiny import make_byte_model
from worker.refusals import InvalidModel, ModelUnavailable, NotEnoughMemory
from worker.serving.adapters import AdapterFolders
from worker.serving.engines import DOWNLOADS_AT_ONCE, EngineRefused, Engines
from worker.serving.kept_model import KeptModel, ModelChoice
from worker.serving.proxy import CHAT, Proxied, UpstreamFailed
from worker.serving.server import create_app
from worker.serving.serving_metrics import OwnVllmMetrics
from worker.serving.transformers_engine import TransformersBuilder
from worker.serving.vllm_builder import VllmBuilder

pytestmark = pytest.mark.slow

USER = [{"role": "user", "content": "hello"}]


class Broken:
    """A tokenizer of which one method fails, by its name."""

    def __init__(self, tokenizer: Any, **causes: Any) -> None:
        self.tokenizer, self.causes = tokenizer, causes

    def __getattr__(self, name: str) -> Any:
        if name not in self.causes:
            return getattr(self.tokenizer, name)

        def fails(*given: Any, **options: Any) -> NoReturn:
            raise self.causes[name]

        return fails


class ScriptedBuilder:
    """Implements worker.serving.engines.Builder: room for `room` models, each of size 1."""

    def __init__(self, tokenizer: Any, room: int = 1) -> None:
        self.tokenizer, self.room, self.in_all = tokenizer, room, room
        self.built: list[Any] = []
        self.entries: list[tuple[str, Any]] = []  # names and entries of what was built
        self.others: list[Any] = []  # for which it was to leave memory
        self.go = threading.Event()
        self.go.set()
        self.failure: Exception | None = None

    def bytes_needed(self, entry: Any) -> int:
        assert self.go.wait(30)
        return 1

    def bytes_free(self) -> int:
        return self.room - sum(not engine.lost for engine in self.built)

    def bytes_in_all(self) -> int:
        return self.in_all

    async def build(self, name: str, entry: Any, others: Any) -> Any:
        if self.failure:
            raise self.failure
        self.built.append(ScriptedEngine(self.tokenizer))
        self.entries.append((name, entry))
        self.others = others
        return self.built[-1]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_byte_model(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def builder(tokenizer: Any) -> ScriptedBuilder:
    return ScriptedBuilder(tokenizer)


def folders_in(tmp_path: Path) -> tuple[AdapterFolders, AdapterFolders]:
    """Of adapters and of whole models."""
    blobs = FolderBlobs(tmp_path / "blobs")
    return AdapterFolders(blobs, tmp_path / "adapters"), AdapterFolders(blobs, tmp_path / "models")


@pytest.fixture
def engines(builder: ScriptedBuilder, tmp_path: Path) -> Engines:
    registry = Registry(models={name: BaseModelEntry(hub=name) for name in ("a", "b")})
    folders, wholes = folders_in(tmp_path)
    return Engines(Settings(), registry, {"transformers": builder}, folders, wholes)


@pytest.fixture
def client(engines: Engines) -> Iterator[OpenAI]:
    with TestClient(create_app(engines, "key")) as web:
        yield OpenAI(api_key="key", base_url="http://testserver/v1", http_client=web, max_retries=0)


def say(client: OpenAI, model: str = "a", **options: Any) -> Any:
    return client.chat.completions.create(**{"model": model, "messages": USER} | options)


def loaded(client: OpenAI, builder: ScriptedBuilder, script: str) -> Any:
    """The engine of model a, which from now on says this."""
    say(client)
    builder.built[-1].script = script
    return builder.built[-1]


def test_an_answer_is_a_chat_completion(client: OpenAI) -> None:
    reply = say(client)

    assert reply.choices[0].message.content == "hi"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 3


def test_a_model_with_a_fleet_is_loaded_by_it_and_others_leave_no_memory_for_it(
    client: OpenAI, engines: Engines, builder: ScriptedBuilder, tokenizer: Any
) -> None:
    fleet = ScriptedBuilder(tokenizer)
    engines.settings = Settings(samplers={"b": ("http://sampler:8300",)}, samplers_key="secret")
    engines.builders = {"transformers": builder, "fleet": fleet}

    say(client, "a")
    say(client, "b")

    assert builder.others == []
    assert [name for name, _ in builder.entries] == ["a"]
    assert [name for name, _ in fleet.entries] == ["b"]


def test_what_is_asked_for_reaches_the_engine(client: OpenAI, builder: ScriptedBuilder) -> None:
    say(client, temperature=0.5, top_p=0.9, max_tokens=7, n=3, seed=4)
    say(client, n=3, seed=4)

    first, second = builder.built[0].asked[:3], builder.built[0].asked[3:]
    assert {(ask.temperature, ask.top_p, ask.max_tokens) for ask in first} == {(0.5, 0.9, 7)}
    assert len({ask.seed for ask in first}) == 3
    assert [ask.seed for ask in first] == [ask.seed for ask in second]


def test_without_a_limit_an_answer_may_fill_the_context(client: OpenAI, builder: ScriptedBuilder) -> None:
    reply = say(client)

    assert reply.usage is not None
    assert builder.built[0].asked[0].max_tokens == 50 - reply.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it_and_the_work_with_it(
    client: OpenAI, builder: ScriptedBuilder, stream: bool
) -> None:
    engine = loaded(client, builder, "one STOP two")
    reply = say(client, stop=["STOP", "never"], stream=stream)
    text = (
        "".join(c.choices[0].delta.content or "" for c in reply)
        if stream
        else reply.choices[0].message.content
    )

    assert text == "one "
    assert engine.ended == len(engine.asked) == 2


def test_a_letter_of_several_tokens_is_streamed_whole(client: OpenAI, builder: ScriptedBuilder) -> None:
    loaded(client, builder, "für 🌱")
    pieces = [chunk.choices[0].delta.content for chunk in say(client, stream=True)]

    assert "".join(piece or "" for piece in pieces) == "für 🌱"
    assert not any("\ufffd" in (piece or "") for piece in pieces)


def test_an_answer_cut_in_the_middle_of_a_letter_says_length(
    client: OpenAI, builder: ScriptedBuilder
) -> None:
    loaded(client, builder, "🌱")
    reply = say(client, max_tokens=2)

    assert reply.choices[0].finish_reason == "length"


def test_log_probabilities_are_those_of_the_tokens_of_the_text(
    client: OpenAI, builder: ScriptedBuilder
) -> None:
    loaded(client, builder, "aü")
    content = present(say(client, logprobs=True, top_logprobs=1).choices[0].logprobs).content

    assert content is not None
    assert [entry.bytes for entry in content] == [[97], [0xC3], [0xBC]]
    assert [entry.logprob for entry in content] == [-0.5] * 3
    assert content[0].top_logprobs[0].token == "a"


def test_a_stream_ends_with_its_usage_if_it_was_asked_for(client: OpenAI) -> None:
    chunks = list(say(client, stream=True, n=2, stream_options={"include_usage": True}))

    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"top_logprobs": 2}, "'top_logprobs' needs 'logprobs'"),
        ({"messages": [{"role": "user", "content": "x" * 50}]}, "tokens; a takes 50"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array", "minItems": 10**9}},
                }
            },
            "minItems",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(client: OpenAI, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        say(client, **fields)


def test_the_previous_key_is_accepted_while_there_is_one(engines: Engines) -> None:
    with TestClient(create_app(engines, "new", previous_key="old")) as web:
        for key in ("new", "old"):
            say(OpenAI(api_key=key, base_url="http://testserver/v1", http_client=web, max_retries=0))
        with pytest.raises(AuthenticationError):
            say(OpenAI(api_key="older", base_url="http://testserver/v1", http_client=web, max_retries=0))


def test_an_unknown_model_is_404_and_a_wrong_key_401(client: OpenAI) -> None:
    with pytest.raises(NotFoundError):
        say(client, "other")
    with pytest.raises(AuthenticationError):
        say(client.with_options(api_key="wrong"))


def test_a_model_that_fails_answers_500_and_goes_on(client: OpenAI, builder: ScriptedBuilder) -> None:
    engine = loaded(client, builder, "hi")
    engine.failure = ZeroDivisionError("division by zero")
    with pytest.raises(
        InternalServerError, match=r"The model failed\. The log of the inference server says why"
    ):
        say(client)
    with pytest.raises(Exception, match="The model failed"):
        list(say(client, stream=True))

    engine.failure = None
    assert say(client).choices[0].message.content == "hi"


def test_a_model_that_cannot_be_loaded_answers_500_with_the_reason(
    client: OpenAI, builder: ScriptedBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    builder.failure = OSError("no such file: model.safetensors")
    with pytest.raises(
        InternalServerError, match=r"cannot be loaded\. The log of the inference server says why"
    ):
        say(client)

    assert "a cannot be loaded" in caplog.text


def test_a_model_that_cannot_be_fetched_now_is_to_be_asked_for_again(
    client: OpenAI, builder: ScriptedBuilder
) -> None:
    builder.failure = ModelUnavailable("The weights of the model 'a/b' could not be fetched from the hub")
    with pytest.raises(InternalServerError, match="could not be fetched from the hub") as refused:
        say(client)

    assert refused.value.status_code == 503
    assert refused.value.code == "model_unavailable"
    assert refused.value.response.headers["retry-after"] == "10"


@pytest.mark.parametrize(
    ("cause", "status"),
    [(TemplateError("roles must alternate"), 400), (TypeError("no"), 400), (OSError("disk I/O"), 500)],
)
def test_only_what_a_template_says_of_the_messages_is_the_askers_mistake(
    client: OpenAI, builder: ScriptedBuilder, cause: TemplateError | TypeError | OSError, status: int
) -> None:
    engine = loaded(client, builder, "hi")
    engine.tokenizer = Broken(engine.tokenizer, apply_chat_template=cause)
    said = "chat template failed. The log" if status == 500 else f"chat template .*: {cause}"
    with pytest.raises(APIStatusError, match=said) as refused:
        say(client)

    assert refused.value.status_code == status


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_engine_refuses_is_no_failure_of_it(
    client: OpenAI, builder: ScriptedBuilder, stream: bool
) -> None:
    """As vLLM's does when it has read that an adapter's rank is too high."""
    loaded(client, builder, "hi").failure = EngineRefused("The adapter's rank is 128")
    before = counted("requests_total", result="refused")
    with pytest.raises(openai.APIError, match="The adapter's rank is 128") as refused:
        list(say(client, stream=stream))

    assert stream or untyped(refused.value).status_code == 400
    assert counted("requests_total", result="refused") == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_allows_too_much_is_the_askers_mistake(
    client: OpenAI, builder: ScriptedBuilder, stream: bool
) -> None:
    loaded(client, builder, "hi").failure = SchemaTooLarge("The schema allows too much")

    with pytest.raises(openai.APIError, match="response_format: The schema allows too much") as refused:
        list(say(client, stream=stream))

    assert stream or untyped(refused.value).status_code == 400


def test_the_model_that_was_not_used_the_longest_makes_room(client: OpenAI, builder: ScriptedBuilder) -> None:
    for model in ("a", "a", "b"):
        say(client, model)

    assert [engine.lost for engine in builder.built] == [True, False]


def test_a_model_that_answers_is_not_unloaded_and_others_are_told_to_come_back(
    client: OpenAI, builder: ScriptedBuilder
) -> None:
    stream = say(client, "a", stream=True)
    with pytest.raises(APIStatusError) as busy:
        say(client, "b")
    assert busy.value.status_code == 503
    assert busy.value.response.headers["retry-after"] == "10"

    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hi"
    assert say(client, "b").choices[0].message.content == "hi"


def test_more_answers_than_may_be_under_way_are_told_to_come_back(engines: Engines) -> None:
    before = counted("requests_total", result="not_ready")
    with TestClient(create_app(engines, "key", most_answers=3)) as web:
        client = OpenAI(api_key="key", base_url="http://testserver/v1", http_client=web, max_retries=0)
        with say(client, n=2, stream=True):
            with pytest.raises(APIStatusError) as busy:
                say(client, n=2)
            assert say(client).choices[0].message.content == "hi"
        assert len(say(client, n=3).choices) == 3

    assert (busy.value.status_code, busy.value.code) == (503, "overloaded")
    assert busy.value.response.headers["retry-after"] == "5"
    assert counted("requests_total", result="not_ready") == before + 1


def test_what_is_refused_or_fails_makes_room_again(engines: Engines, builder: ScriptedBuilder) -> None:
    with TestClient(create_app(engines, "key", most_answers=1)) as web:
        client = OpenAI(api_key="key", base_url="http://testserver/v1", http_client=web, max_retries=0)
        engine = loaded(client, builder, "hi")
        with pytest.raises(BadRequestError):
            say(client, messages=[{"role": "user", "content": "x" * 100}])
        engine.failure = ZeroDivisionError("division by zero")
        with pytest.raises(InternalServerError):
            say(client)
        engine.failure = None

        assert say(client).choices[0].message.content == "hi"


def test_an_engine_that_died_is_replaced(client: OpenAI, builder: ScriptedBuilder) -> None:
    say(client)
    builder.built[0].lost = True

    assert say(client).choices[0].message.content == "hi"
    assert len(builder.built) == 2


def test_a_model_that_loads_for_long_is_503_with_retry_after_and_then_there(
    client: OpenAI, builder: ScriptedBuilder, engines: Engines
) -> None:
    engines.patience = 0.01
    builder.go.clear()
    with pytest.raises(APIStatusError) as loading:
        say(client)
    assert loading.value.status_code == 503
    assert loading.value.response.headers["retry-after"] == "5"

    engines.patience = 30
    builder.go.set()
    assert say(client).choices[0].message.content == "hi"
    assert len(builder.built) == 1


class SlowBlobs(FolderBlobs):
    """A blob store that gives nothing of `slow/` away before `go`; `begun` counts who waits for it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go, self.begun, self.gave_up = threading.Event(), 0, False

    def open(self, key: str, **options: int) -> Iterator[bytes]:
        if key.startswith("slow/"):
            self.begun += 1
            self.gave_up = not self.go.wait(30) or self.gave_up
        return super().open(key, **options)


@pytest.fixture
def blobs(engines: Engines) -> Iterator[SlowBlobs]:
    blobs = engines.adapters.blobs = engines.wholes.blobs = SlowBlobs(engines.adapters.root.parent / "blobs")
    yield blobs
    blobs.go.set()


ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def stored(
    blobs: SlowBlobs, prefix: str, names: Sequence[str] = ADAPTER, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """As the API names it."""
    weights = {name: prefix.encode() for name in names}
    if "adapter_config.json" in weights:
        weights["adapter_config.json"] = json.dumps(config or {"r": 1}).encode()
    for name, content in weights.items():
        blobs.put_bytes(f"{prefix}/{name}", content)
    files = [
        {"name": name, "bytes": len(content), "sha256": sha256(content).hexdigest()}
        for name, content in weights.items()
    ]
    manifest = json.dumps({"format": 1, "files": files}).encode()
    blobs.put_bytes(f"{prefix}/manifest.json", manifest)
    return {"base_model": "a", "adapter": {"prefix": prefix, "manifest_sha256": sha256(manifest).hexdigest()}}


def test_a_whole_model_is_loaded_from_its_own_folder_like_a_base_model(
    client: OpenAI, builder: ScriptedBuilder, blobs: SlowBlobs, tmp_path: Path
) -> None:
    """One of a hundred tuned models that are whole takes the place of the base model, not of an adapter on it."""
    blobs.go.set()
    names = ("config.json", "model.safetensors", "chat_template.jinja", "trainer.pt")
    kept = ("masters-00001.safetensors", "moments-00002.safetensors", "reference-00001.safetensors")
    whole = stored(blobs, "tuned/1", (*names, *kept))
    whole["adapter"]["is_whole"] = True

    for _ in range(2):
        assert say(client, extra_body={"regraft": whole}).choices[0].message.content == "hi"
    assert say(client, "a").choices[0].message.content == "hi"

    (name, entry), (base, _) = builder.entries
    assert (name, base) == (f"a@{whole['adapter']['manifest_sha256']}", "a")
    assert (entry.hub, entry.path) == (None, tmp_path / "models" / whole["adapter"]["manifest_sha256"])
    assert {path.name for path in entry.path.iterdir()} == set(names[:3])
    assert [ask.adapter for ask in builder.built[0].asked] == [None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_on_experts_is_refused_before_the_engine_has_it(
    client: OpenAI, builder: ScriptedBuilder, blobs: SlowBlobs, stream: bool
) -> None:
    """It would fail while it answers, or answer as the base model where the experts are changed."""
    blobs.go.set()
    config = {"r": 8, "target_modules": [], "target_parameters": ["model.layers.0.mlp.experts.gate_up_proj"]}
    tuned = stored(blobs, "tuned/1", config=config)

    with pytest.raises(APIStatusError, match=r"on experts, .* export the format 'merged'") as refused:
        say(client, stream=stream, extra_body={"regraft": tuned})

    assert (refused.value.status_code, refused.value.code) == (400, "unsupported_model")
    assert builder.built[0].asked == []


def test_a_cold_adapter_that_comes_slowly_is_503_with_retry_after_and_then_there(
    client: OpenAI, engines: Engines, blobs: SlowBlobs
) -> None:
    cold = stored(blobs, "slow/1")
    engines.adapter_patience = 0.01
    with pytest.raises(APIStatusError, match="the adapter is still loading") as loading:
        say(client, extra_body={"regraft": cold})
    assert (loading.value.status_code, loading.value.code) == (503, "loading")
    assert loading.value.response.headers["retry-after"] == "5"

    engines.adapter_patience = 30
    blobs.go.set()
    assert say(client, extra_body={"regraft": cold}).choices[0].message.content == "hi"
    assert blobs.begun == 3  # the manifest and two files, once


def test_cold_adapters_that_come_slowly_hold_up_nobody_else(
    client: OpenAI, engines: Engines, blobs: SlowBlobs
) -> None:
    """However often they are asked for: there are only so many threads."""
    hot = stored(blobs, "hot")
    say(client, extra_body={"regraft": hot})
    cold = [stored(blobs, f"slow/{number}") for number in range(12)]
    engines.adapter_patience = 0.01
    for number in range(48):
        with pytest.raises(APIStatusError):
            say(client, extra_body={"regraft": cold[number % len(cold)]})

    engines.adapter_patience = 30
    assert say(client, extra_body={"regraft": hot}).choices[0].message.content == "hi"
    assert say(client).choices[0].message.content == "hi"
    assert blobs.begun == DOWNLOADS_AT_ONCE
    assert not blobs.gave_up


@pytest.mark.parametrize("kind", [TransformersBuilder, partial(VllmBuilder, shares_device=False)])
@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        (None, "invalid_model", "The model's files are missing"),
        ("", "invalid_model", "The model's folder has no config.json"),
        ("{damaged", "invalid_model", "The config of the model's folder cannot be read"),
        ('{"model_type": "unheard_of"}', "unsupported_model", "The model is not supported"),
        (
            '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0}',
            "unsupported_model",
            "The model is not supported",
        ),
    ],
)
def test_a_model_that_cannot_be_read_is_refused_by_its_code(
    tmp_path: Path, kind: Callable[[Settings], Any], config: str | None, code: str, said: str
) -> None:
    folder = tmp_path / "model"
    if config is not None:
        folder.mkdir()
    if config:
        (folder / "config.json").write_text(config)
    folders, wholes = folders_in(tmp_path)
    registry = Registry(models={"a": BaseModelEntry(path=folder)})
    builders = {"transformers": kind(Settings(data_dir=tmp_path))}

    with (
        TestClient(create_app(Engines(Settings(), registry, builders, folders, wholes), "key")) as web,
        pytest.raises(BadRequestError, match=said) as refused,
    ):
        say(OpenAI(api_key="key", base_url="http://testserver/v1", http_client=web, max_retries=0))

    assert refused.value.code == code


def test_a_job_gets_the_memory_of_models_that_answer_no_request(
    engines: Engines, builder: ScriptedBuilder
) -> None:
    builder.room = 2

    async def ask_while_one_answers() -> list[bool]:
        async with engines.open(Served(base_model="a")):
            pass
        async with engines.open(Served(base_model="b")):
            await engines.release_idle()
            return [engine.lost for engine in builder.built]

    assert asyncio.run(ask_while_one_answers()) == [True, False]


def test_memory_is_released_also_if_another_model_dies_meanwhile(
    engines: Engines, builder: ScriptedBuilder
) -> None:
    builder.room = 2

    async def release() -> int:
        for name in ("a", "b"):
            async with engines.open(Served(base_model=name)):
                pass
        first, second = builder.built
        is_out, asking = asyncio.Event(), list[asyncio.Task[None]]()

        async def ask() -> None:
            async with engines.open(Served(base_model="b")):
                pass

        async def close_second() -> None:
            is_out.set()

        async def close_first() -> None:
            second.lost = True
            asking.append(asyncio.create_task(ask()))
            await is_out.wait()

        first.at_close.append(close_first)
        second.at_close.append(close_second)
        await engines.release_idle()
        await asking[0]
        return len(builder.built)

    assert asyncio.run(release()) == 3, "the one that died is loaded again"


def test_a_changed_registry_is_used_without_a_restart(builder: ScriptedBuilder, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[models.a]\nhub = "a"\n')
    registry = Reloaded(lambda: Registry.load(file), [file], itertools.count().__next__)
    engines = Engines(Settings(), registry, {"transformers": builder}, *folders_in(tmp_path))
    with TestClient(create_app(engines, "key")) as web:
        client = OpenAI(api_key="key", base_url="http://testserver/v1", http_client=web, max_retries=0)
        say(client)
        file.write_text('[models.a]\nhub = "other"\n[models.b]\nhub = "b"\n')
        say(client)
        say(client)
        say(client, "b")

    assert [(name, entry.hub) for name, entry in builder.entries] == [("a", "a"), ("a", "other"), ("b", "b")]


def test_a_model_in_float32_on_a_gpu_is_served_with_transformers_also_where_vllm_is_installed(
    builder: ScriptedBuilder, tmp_path: Path
) -> None:
    """vLLM's server has adapters, which it computes on a GPU in 16 bits only."""
    registry = Registry(models={"a": BaseModelEntry(hub="a", dtype="float32")})
    builders = {"transformers": builder, "vllm": ScriptedBuilder(builder.tokenizer)}
    folders = folders_in(tmp_path)

    def ask(settings: Settings) -> None:
        engines = Engines(settings, registry, builders, *folders, device="cuda")
        with TestClient(create_app(engines, "key")) as web:
            say(OpenAI(api_key="key", base_url="http://testserver/v1", http_client=web, max_retries=0))

    ask(Settings())
    assert (len(builder.built), builders["vllm"].built) == (1, [])
    with pytest.raises(InternalServerError, match=r'cannot be served: vLLM .*`dtype = "bfloat16"`'):
        ask(Settings(sampler="vllm"))


def test_an_adapter_that_is_gone_is_404(client: OpenAI) -> None:
    adapter = {"prefix": "gone", "manifest_sha256": "0" * 64}
    with pytest.raises(NotFoundError):
        say(client, "ft:a", extra_body={"regraft": {"base_model": "a", "adapter": adapter}})


def test_what_fails_while_tokens_are_read_is_no_client_that_left(
    client: OpenAI, builder: ScriptedBuilder
) -> None:
    engine = loaded(client, builder, "hi")
    engine.tokenizer = Broken(engine.tokenizer, decode=ZeroDivisionError("division by zero"))
    before = counted("requests_total", result="failed")
    with pytest.raises(InternalServerError, match="The model failed"):
        say(client)

    assert counted("requests_total", result="failed") == before + 1


def counted(name: str, **labels: Any) -> float:
    return COUNTED.get_sample_value(f"regraft_inference_{name}", labels) or 0.0


def test_requests_are_counted_by_what_came_of_them(client: OpenAI, builder: ScriptedBuilder) -> None:
    results = ("answered", "refused", "not_ready", "failed", "left")
    before = {result: counted("requests_total", result=result) for result in results}
    engine = loaded(client, builder, "hi")
    list(say(client, stream=True))
    with pytest.raises(BadRequestError):
        say(client, messages=[{"role": "user", "content": "x" * 100}])
    with say(client, stream=True), pytest.raises(APIStatusError):  # and hangs up
        say(client, "b")
    engine.failure = ZeroDivisionError("division by zero")
    with pytest.raises(InternalServerError):
        say(client)

    found = {result: counted("requests_total", result=result) - before[result] for result in results}
    assert found == {"answered": 2, "refused": 1, "not_ready": 1, "failed": 1, "left": 1}
    assert counted("answers") == 0


def test_tokens_are_counted_by_the_base_model_and_the_first_one_is_timed(client: OpenAI) -> None:
    def figures() -> list[Any]:
        tokens = [counted("tokens_total", model="a", kind=kind) for kind in ("prompt", "completion")]
        return [*tokens, counted("first_token_seconds_count"), counted("load_seconds_count", what="model")]

    before = figures()
    usage = say(client, n=2).usage

    assert usage is not None
    assert [now - then for now, then in zip(figures(), before, strict=True)] == [
        usage.prompt_tokens,
        usage.completion_tokens,
        1,
        1,
    ]


@pytest.fixture
def thinker(tmp_path: Path) -> Iterator[tuple[OpenAI, Any]]:
    """A client of a model that thinks, and its builder."""
    builder = ScriptedBuilder(thinking_tokenizer())
    registry = Registry(models={"a": BaseModelEntry(hub="a")})
    folders, wholes = folders_in(tmp_path)
    engines = Engines(Settings(), registry, {"transformers": builder}, folders, wholes)
    with TestClient(create_app(engines, "key")) as web:
        api = OpenAI(api_key="key", base_url="http://testserver/v1", http_client=web, max_retries=0)
        loaded(api, builder, "<think>ab</think>\n\n42")
        yield api, builder.built[-1]


def test_a_thought_is_separate_from_the_content_and_counted(thinker: tuple[OpenAI, Any]) -> None:
    client, _ = thinker
    reply = say(client)

    assert reply.choices[0].message.content == "42"
    assert untyped(reply.choices[0].message).reasoning_content == "ab"
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens == 4
    assert reply.usage.completion_tokens == 9


def test_a_thought_is_streamed_in_deltas_of_its_own(thinker: tuple[OpenAI, Any]) -> None:
    client, _ = thinker
    deltas = [chunk.choices[0].delta for chunk in say(client, stream=True)]

    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == "ab"
    assert "".join(delta.content or "" for delta in deltas) == "42"


def test_an_effort_uses_the_templates_switch_or_a_budget(thinker: tuple[OpenAI, Any]) -> None:
    client, engine = thinker
    for effort in ("none", "low", "high"):
        say(client, reasoning_effort=effort, max_completion_tokens=20)

    off, low, high = engine.asked[-3:]
    assert len(off.prompt_ids) > len(low.prompt_ids) == len(high.prompt_ids)
    assert (off.thinking_budget, low.thinking_budget, high.thinking_budget) == (None, 5, None)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
    ],
)
def test_what_only_vllm_has_is_refused_by_its_name(client: OpenAI, options: Any, param: str) -> None:
    with pytest.raises(BadRequestError, match="only supported where vLLM serves the model") as refused:
        say(client, **options)

    assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")


def test_a_completion_without_vllm_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="only supported where vLLM serves the model"):
        client.completions.create(model="a", prompt="hello")


def test_what_asks_for_nothing_is_accepted(client: OpenAI) -> None:
    assert say(client, frequency_penalty=0, tools=[], logit_bias={}, tool_choice="none").choices


FILE = "/srv/regraft/data/adapters/0a1b/adapter_model.safetensors"
ADDRESS = "10.1.2.3:8300"


def fail_at_the_load(cause: Exception) -> Callable[[OpenAI, ScriptedBuilder], None]:
    def prepare(client: OpenAI, builder: ScriptedBuilder) -> None:
        builder.failure = cause

    return prepare


def fail_in_the_answer(cause: Exception) -> Callable[[OpenAI, ScriptedBuilder], None]:
    def prepare(client: OpenAI, builder: ScriptedBuilder) -> None:
        loaded(client, builder, "hi").failure = cause

    return prepare


def fail_in_the_template(cause: Exception) -> Callable[[OpenAI, ScriptedBuilder], None]:
    def prepare(client: OpenAI, builder: ScriptedBuilder) -> None:
        engine = loaded(client, builder, "hi")
        engine.tokenizer = Broken(engine.tokenizer, apply_chat_template=cause)

    return prepare


SAID = f"no file {FILE} on {ADDRESS}, as file://{FILE} says"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "fails",
    [
        *(
            fail_at_the_load(kind(SAID))
            for kind in (OSError, InvalidModel, NotEnoughMemory, ModelUnavailable, RuntimeError)
        ),
        fail_at_the_load(OSError(errno.ENOSPC, "No space left on device", FILE)),
        *(fail_in_the_answer(kind(SAID)) for kind in (OSError, RuntimeError, EngineRefused)),
        *(fail_in_the_template(kind(SAID)) for kind in (OSError, TypeError, TemplateError)),
    ],
)
def test_no_error_of_an_engine_of_ours_tells_a_client_a_file_or_an_address(
    client: OpenAI,
    builder: ScriptedBuilder,
    fails: Callable[[OpenAI, ScriptedBuilder], None],
    stream: bool,
) -> None:
    fails(client, builder)

    with pytest.raises(APIError) as refused:
        list(say(client, stream=stream))

    assert not unsafe_parts(str(refused.value.body))


VLLMS_ERROR = {"message": SAID, "type": "BadRequestError", "param": None, "code": 400}


class FailingUpstream:
    """Implements VllmUpstream: answers with this, or not at all."""

    def __init__(self, status: int, content: bytes, content_type: str) -> None:
        self.status, self.content, self.content_type = status, content, content_type

    @asynccontextmanager
    async def open(self, path: str, body: bytes) -> AsyncIterator[httpx.Response]:
        if not self.status:
            raise UpstreamFailed(SAID)
        is_whole = self.content_type != "text/event-stream"
        content = self.content if is_whole else self.parts()
        yield httpx.Response(self.status, content=content, headers={"content-type": self.content_type})

    async def parts(self) -> AsyncIterator[bytes]:
        yield self.content


@pytest.mark.parametrize(
    ("status", "content", "content_type"),
    [
        *(
            (status, json.dumps({"error": VLLMS_ERROR | {"param": param}}).encode(), "application/json")
            for status in (400, 404, 500)
            for param in (None, "input_tokens", "temperature")
        ),
        (500, SAID.encode(), "text/plain"),
        (200, f"data: {json.dumps({'error': VLLMS_ERROR})}\n\n".encode(), "text/event-stream"),
        (0, b"", ""),
    ],
)
def test_no_error_of_vllms_server_tells_a_client_a_file_or_an_address(
    status: int, content: bytes, content_type: str
) -> None:
    app = FastAPI()

    @app.post("/")
    async def answer() -> Response:
        asked = InternalChat.model_validate({"model": "a", "messages": USER})
        return Proxied(FailingUpstream(status, content, content_type), CHAT, {}, asked)

    said = TestClient(app).post("/").text

    assert "error" in said
    assert not unsafe_parts(said)


def unsafe_parts(text: str) -> list[str]:
    return [part for part in ("/srv", "safetensors", "10.1.2.3", "8300") if part in text]


def test_a_model_too_large_for_the_device_is_refused_and_one_that_others_leave_no_room_is_to_be_asked_for_again(
    client: OpenAI, builder: ScriptedBuilder
) -> None:
    builder.room = builder.in_all = 0
    with pytest.raises(InternalServerError, match=r"the device has 0\.0 GiB") as too_large:
        say(client)
    builder.in_all = 1
    with pytest.raises(InternalServerError, match="while other processes use the device") as taken:
        say(client)
    builder.room, builder.failure = 1, NotEnoughMemory("CUDA out of memory.")
    with pytest.raises(InternalServerError, match=r"CUDA out of memory\. Retry later\.") as lost:
        say(client)

    assert [one.value.code for one in (too_large, taken, lost)] == ["not_enough_memory", "loading", "loading"]
    assert [one.value.response.headers.get("retry-after") for one in (too_large, taken, lost)] == [
        None,
        "10",
        "10",
    ]


def test_a_client_that_stops_in_the_middle_of_its_body_gets_408(engines: Engines) -> None:
    sent = asyncio.run(stopped_body(create_app(engines, "key", body_window_s=0.01), CHAT, "key"))

    assert sent[0]["status"] == 408
    assert "arrives too slowly" in json.loads(sent[1]["body"])["error"]["message"]


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0)


def test_a_server_of_one_model_is_ready_once_that_is_loaded_and_again_after_it_died(
    engines: Engines, builder: ScriptedBuilder
) -> None:
    kept = KeptModel(engines, "a", look_seconds=0)
    seen: list[int] = []

    async def life() -> None:
        app = create_app(engines, "key", is_ready=lambda: kept.is_ready)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")

        async def look() -> None:
            seen.append((await client.get("/readyz")).status_code)

        builder.go.clear()
        keeping = asyncio.create_task(kept.keep())
        await look()
        builder.go.set()
        await eventually(lambda: kept.is_ready)
        await look()
        builder.built[0].lost = True
        await look()
        await eventually(lambda: kept.is_ready)
        await look()
        keeping.cancel()
        assert (await client.get("/healthz")).status_code == 200

    asyncio.run(life())
    assert seen == [503, 200, 503, 200]
    assert [name for name, _ in builder.entries] == ["a", "a"]


def test_a_model_that_cannot_be_loaded_ends_its_server_unless_it_can_be_later(
    engines: Engines, builder: ScriptedBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptModel(engines, "a", look_seconds=0)
    builder.failure = ModelUnavailable("The weights of the model 'a/b' could not be fetched from the hub")

    async def life() -> None:
        keeping = asyncio.create_task(kept.keep())
        await eventually(lambda: "a cannot be loaded yet" in caplog.text)
        assert not keeping.done()
        builder.failure = InvalidModel("no such architecture")
        await keeping

    asyncio.run(life())
    assert kept.has_failed and not kept.is_ready
    assert "a cannot be loaded: no such architecture" in caplog.text


def test_a_server_of_one_model_has_no_other_and_as_many_gpus_as_it_was_told(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[models.a]\nhub = "a"\ntensor_parallel = 2\n[models.b]\nhub = "b"\n[aliases]\nc = "b"\n')
    settings = Settings(models_file=file)

    def degrees(choice: ModelChoice) -> dict[str, int]:
        return {name: entry.tensor_parallel for name, entry in choice.registry(settings)().models.items()}

    assert degrees(ModelChoice("a")) == {"a": 2}
    assert degrees(ModelChoice("b", 4)) == {"b": 4}
    with pytest.raises(InvalidRegistry, match="c is not a base model; the base models are: a, b"):
        ModelChoice("c").registry(settings)


def test_a_sampler_reports_the_metrics_of_the_vllm_in_its_process() -> None:
    """vLLM has its gauges in the registry of the library, beside those of others."""
    gauges = [Gauge(name, "Of a test.") for name in ("vllm:of_a_test", "other:of_a_test")]
    try:
        gauges[0].set(3)
        [family] = [one for one in OwnVllmMetrics().collect() if "of_a_test" in one.name]
    finally:
        for gauge in gauges:
            REGISTRY.unregister(gauge)

    assert [(sample.name, sample.value) for sample in family.samples] == [("vllm:of_a_test", 3)]
