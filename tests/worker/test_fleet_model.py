"""The inference server passes the requests for a model with a rollout fleet on to a member of it."""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from core.chat import Adapter, InternalChat
from core.registry import Registry
from core.settings import Settings
from core.storage.store import FolderBlobs
from tests.graders.servers import serving
from tests.servers import reserve_port
from tests.worker.test_vllm_server import publish
from worker.engine.client import EngineClient
from worker.engine.names import NOTHING
from worker.engine.protocol import FACTS, OTHER_PROTOCOL
from worker.model.policy import Policy
from worker.sampling.fleet import Members
from worker.sampling.weights import name_of
from worker.serving.adapters import AdapterFolders
from worker.serving.engines import Engines
from worker.serving.fleet_model import FleetBuilder, FleetUpstream
from worker.serving.handshake import Handshake
from worker.serving.proxy import CHAT, COMPLETIONS, Proxied
from worker.serving.server import create_app

ASKED = {"messages": [{"role": "user", "content": "say it"}], "max_tokens": 4}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


@dataclass
class Member:
    """Stands in for vLLM's server: always the same answer."""

    status: int = 200
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def __call__(self, path: str, sent: Any) -> tuple[int, str]:
        self.asked.append((path, sent))
        if self.status != 200:
            return self.status, json.dumps({"error": {"message": "no", "param": None}})
        said = {"text": "red"} if path == COMPLETIONS else {"message": {"content": "red"}}
        choice = {"index": 0, "finish_reason": "stop", **said}
        return 200, json.dumps({"id": "1", "choices": [choice], "usage": USAGE})


@dataclass
class Service:
    folder: Path
    model: Path

    @contextmanager
    def at(self, *addresses: str) -> Iterator[TestClient]:
        """An inference server that can start no engine of its own."""
        (self.folder / "models.toml").write_text(
            f'[models.tiny]\npath = "{self.model}"\ndtype = "float32"\ncontext = 128\n'
        )
        settings = Settings(
            models_file=self.folder / "models.toml",
            data_dir=self.folder,
            samplers={"tiny": addresses},
            samplers_key="secret",
            inference_max_lora_rank=8,
        )
        blobs = FolderBlobs(self.folder / "blobs")
        caches = [AdapterFolders(blobs, self.folder / name) for name in ("adapters", "tuned-models")]
        registry = Registry.load(settings.models_file)
        app = create_app(Engines(settings, registry, {"fleet": FleetBuilder(settings)}, *caches), "key")
        with TestClient(app, headers={"authorization": "Bearer key"}) as client:
            yield client


@pytest.fixture
def service(tmp_path: Path, tiny_model: Path) -> Service:
    return Service(tmp_path, tiny_model)


def test_a_base_model_and_its_adapters_are_answered_by_the_fleet(
    service: Service, make_policy: Callable[..., Policy]
) -> None:
    adapter = publish(service.folder, make_policy(), "projects/p/jobs/j/attempts/1/steps/1")
    tuned = {"regraft": {"base_model": "tiny", "adapter": adapter}}
    member = Member()
    with serving(member) as address, service.at(address) as client:
        answers = [
            client.post(CHAT, json=ASKED | {"model": "ft:x"} | served).json() for served in ({}, tuned)
        ]
        client.post(COMPLETIONS, json={"model": "tiny", "prompt": "say it"})

    assert "does not exist" in answers[0]["error"]["message"], "a tuned model is named by the API"
    assert answers[1]["choices"][0]["message"]["content"] == "red"
    assert (answers[1]["model"], answers[1]["usage"]["completion_tokens"]) == ("ft:x", 1)
    assert [(path, sent["model"]) for path, sent in member.asked] == [
        (CHAT, name_of(Adapter(**adapter))),
        (COMPLETIONS, NOTHING),
    ]


def test_a_member_that_does_not_answer_is_followed_by_another_and_is_the_last_choice(
    service: Service,
) -> None:
    gone, member, locked = f"http://127.0.0.1:{reserve_port()}", Member(), Member(status=401)
    with ExitStack() as members:
        addresses = [gone, *(members.enter_context(serving(one)) for one in (locked, member))]
        client = members.enter_context(service.at(*addresses))
        answers = [client.post(CHAT, json=ASKED | {"model": "tiny"}) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200] * 3
    assert (len(locked.asked), len(member.asked)) == (1, 3)


def test_a_member_of_another_release_is_followed_by_any_number_of_others(service: Service) -> None:
    others, member = [Member(status=OTHER_PROTOCOL) for _ in range(3)], Member()
    with ExitStack() as members:
        addresses = [members.enter_context(serving(one)) for one in (*others, member)]
        client = members.enter_context(service.at(*addresses))
        answers = [client.post(CHAT, json=ASKED | {"model": "tiny"}) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(member.asked) == 2


def test_a_server_waits_while_a_fleet_has_only_samplers_of_another_release(
    caplog: pytest.LogCaptureFixture,
) -> None:
    member, away = Member(status=OTHER_PROTOCOL), f"http://127.0.0.1:{reserve_port()}"

    async def upgrade(address: str) -> None:
        handshake = Handshake({"tiny": (address, away), "gone": (away,)}, "secret", look_seconds=0.001)
        completing = asyncio.create_task(handshake.complete())
        while len(member.asked) < 3:
            await asyncio.sleep(0.001)
        assert not handshake.is_complete
        member.status = 200
        await asyncio.wait_for(completing, 30)
        assert handshake.is_complete

    with serving(member) as address:
        asyncio.run(upgrade(address))
    assert [record.getMessage() for record in caplog.records if "another release" in record.getMessage()] == [
        "waiting for the fleet of tiny: all samplers that answer are of another release"
    ]


def test_an_engine_that_fails_is_followed_by_one_other_and_no_more(service: Service) -> None:
    """A request that ends an engine must not end all of them."""
    lost = [Member(status=500) for _ in range(3)]
    with ExitStack() as members:
        client = members.enter_context(service.at(*(members.enter_context(serving(one)) for one in lost)))
        answer = client.post(CHAT, json=ASKED | {"model": "tiny"})
    assert answer.status_code == 500
    assert sorted(len(one.asked) for one in lost) == [0, 1, 1]

    broken, member = Member(status=500), Member()
    with ExitStack() as members:
        addresses = [members.enter_context(serving(one)) for one in (broken, member)]
        client = members.enter_context(service.at(*addresses))
        answers = [client.post(CHAT, json=ASKED | {"model": "tiny"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert (len(broken.asked), len(member.asked)) == (1, 2)


def test_without_a_member_the_client_is_to_retry(service: Service) -> None:
    with service.at(f"http://127.0.0.1:{reserve_port()}") as client:
        answer = client.post(CHAT, json=ASKED | {"model": "tiny"})

    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("No sampler of tiny answers. The log of")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 0.7}, "'temperature'"),
        ({"top_p": 0.9, "frequency_penalty": 1}, "'top_p', 'frequency_penalty'"),
        ({"response_format": {"type": "json_object"}}, "'response_format'"),
        ({"logit_bias": {"3": 5}, "presence_penalty": 1}, "'presence_penalty', 'logit_bias'"),
    ],
)
def test_logprobs_of_another_distribution_than_the_models_are_refused(
    service: Service, changes: dict[str, Any], named: str
) -> None:
    member = Member()
    with serving(member) as address, service.at(address) as client:
        refused = client.post(CHAT, json=ASKED | {"model": "tiny", "logprobs": True} | changes)
        plain = client.post(CHAT, json=ASKED | {"model": "tiny"} | changes)

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "logprobs"
    assert f"together with {named} is" in refused.json()["error"]["message"]
    if "response_format" not in changes:  # a schema needs a decoder, which the tiny tokenizer lacks
        assert plain.status_code == 200


def test_an_adapter_of_too_high_a_rank_is_refused_with_what_to_do(
    service: Service, make_policy: Callable[..., Policy]
) -> None:
    adapter = publish(service.folder, make_policy(rank=16), "projects/p/jobs/j/attempts/1/steps/1")
    served = {"model": "ft:x", "regraft": {"base_model": "tiny", "adapter": adapter}}
    with serving(Member()) as address, service.at(address) as client:
        answer = client.post(CHAT, json=ASKED | served)

    assert "REGRAFT_INFERENCE_MAX_LORA_RANK" in answer.json()["error"]["message"]


class Silent(httpx.AsyncBaseTransport):
    """A connection to a member that never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.is_aborted = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.set()
        try:
            return await asyncio.Future()
        finally:
            self.is_aborted = True


class Several(Members):
    def __init__(self, members: list[EngineClient]) -> None:
        super().__init__((), "key")
        self.members = members

    @property
    def named(self) -> list[EngineClient]:
        return self.members


class OneMember(Several):
    def __init__(self, member: EngineClient) -> None:
        super().__init__([member])


async def answered(upstream: FleetUpstream, left: asyncio.Event) -> list[Message]:
    """What is sent to a client that leaves at this event."""
    sent = list[Message]()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    request = InternalChat.model_validate(ASKED | {"model": "tiny"})
    scope = {"type": "http", "app": Namespace(state=Namespace())}
    await Proxied(upstream, CHAT, {}, request)(scope, receive, send)
    return sent


def test_a_client_that_leaves_aborts_its_request_at_the_member() -> None:
    async def leave() -> Silent:
        silent = Silent()
        client = httpx.AsyncClient(transport=silent, base_url="http://member")
        upstream = FleetUpstream("tiny", OneMember(EngineClient("member", client, "member")))
        assert await answered(upstream, silent.asked) == []
        return silent

    assert asyncio.run(leave()).is_aborted


class Resolving(OneMember):
    """Has no member until its addresses are resolved, which takes until `resolved`."""

    def __init__(self, member: EngineClient) -> None:
        super().__init__(member)
        self.asked, self.resolved, self.is_found = asyncio.Event(), asyncio.Event(), False

    async def find(self) -> str:
        self.asked.set()
        await self.resolved.wait()
        self.is_found = True
        return ""

    @property
    def named(self) -> list[EngineClient]:
        return self.members if self.is_found else []


def test_a_client_that_leaves_while_addresses_are_resolved_costs_others_no_answer() -> None:
    async def status() -> int:
        answer = {"choices": [], "usage": USAGE}
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answer))
        client = httpx.AsyncClient(transport=transport, base_url="http://member")
        members = Resolving(EngineClient("member", client, "member"))
        upstream = FleetUpstream("tiny", members)

        assert await answered(upstream, members.asked) == []
        members.resolved.set()
        sent = await answered(upstream, asyncio.Event())
        return int(sent[0]["status"])

    assert asyncio.run(status()) == 200


class Hung(httpx.AsyncByteStream):
    """A stream of which nothing comes."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await asyncio.Future()
        yield b""


@dataclass
class Busy(httpx.AsyncBaseTransport):
    """A connection to a member whose answer does not end; its engine answers so many probes before it hangs."""

    probes: int = 0
    has_head: bool = False  # whether the answer begins

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == FACTS:
            self.probes -= 1
            if self.probes < 0:
                raise httpx.ReadTimeout("nothing was received")
            return httpx.Response(500)
        if self.has_head:
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Hung())
        return await asyncio.Future()


@pytest.mark.parametrize("has_head", [False, True])
def test_a_member_that_hangs_is_given_up_when_it_leaves_two_probes_without_an_answer(has_head: bool) -> None:
    async def body() -> tuple[int, bytes]:
        busy = Busy(probes=3, has_head=has_head)
        client = httpx.AsyncClient(transport=busy, base_url="http://member")
        upstream = FleetUpstream("tiny", OneMember(EngineClient("member", client, probe_every=0.0)))
        sent = await answered(upstream, asyncio.Event())
        return busy.probes, b"".join(message.get("body", b"") for message in sent)

    probes, said = asyncio.run(body())

    assert probes == -2
    assert (b"before the end" if has_head else b"No sampler of tiny answers") in said


def test_a_member_that_hangs_in_a_stream_is_the_last_choice_of_the_next_request() -> None:
    async def probes_left() -> list[int]:
        one, other = Busy(has_head=True), Busy(has_head=True)
        members = [
            EngineClient(
                "member", httpx.AsyncClient(transport=busy, base_url="http://member"), probe_every=0.0
            )
            for busy in (one, other)
        ]
        upstream = FleetUpstream("tiny", Several(members))
        for _ in range(2):
            await answered(upstream, asyncio.Event())
        return [one.probes, other.probes]

    assert asyncio.run(probes_left()) == [-2, -2]


class Cut(httpx.AsyncByteStream):
    """A stream of events whose server dies after the first one."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunk = {"choices": [{"index": 0, "delta": {"content": "re"}}], "usage": USAGE}
        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
        raise httpx.ReadError("reset")


def test_a_stream_that_is_cut_ends_with_an_error_and_is_not_tried_again() -> None:
    async def body() -> bytes:
        head = {"content-type": "text/event-stream"}
        transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=head, stream=Cut()))
        client = httpx.AsyncClient(transport=transport, base_url="http://member")
        upstream = FleetUpstream("tiny", OneMember(EngineClient("member", client, "member")))
        sent = await answered(upstream, asyncio.Event())
        return b"".join(message.get("body", b"") for message in sent)

    first, error, rest = asyncio.run(body()).split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"] == {"content": "re"}
    assert "before the end" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
    assert rest == b""


def test_the_log_says_each_time_why_there_is_no_member(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with service.at("http://sampler.invalid:8300") as client:
        answers = [client.post(CHAT, json=ASKED | {"model": "tiny"}) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [503, 503]
    said = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert len(said) == 2 and all("sampler.invalid" in one for one in said)
    assert not any("sampler.invalid" in answer.text for answer in answers)
