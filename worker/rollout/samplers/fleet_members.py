"""The members of a rollout fleet during one `sample`: which of them answer, and what each one samples.

The members behind an address are those that its name resolves to, so a headless service of Kubernetes is one address.
Every few seconds each is probed. One that does not answer is left out until it does, and the others sample its
unfinished answers.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from worker.refusals import SamplerUnusable
from worker.rollout.samplers import dealing
from worker.rollout.samplers.dealing import RequestGroup
from worker.rollout.samplers.engine import sampling_options
from worker.rollout.samplers.wire import Finished, Request

FACTS = "/inference/v1/sampler"  # below a path that vLLM's server guards with its key
GENERATE = "/inference/v1/generate"
HEALTH = "/health"
CONNECT_SECONDS = 10.0
PROBE_SECONDS = 30.0  # for an answer to a probe: the engine may be in the middle of a step
MAX_FAILED_PROBES = 2
MAX_LOSSES = 3  # of one member in one `sample`
MAX_REQUESTS = 256  # at once to a member, whose engine decodes as many side by side


class NoMember(Exception):
    """No member of the fleet has answered for too long. Another attempt may find one."""


class MemberLost(Exception):
    """A member has not answered a request; the message says why."""


class Facts(BaseModel):
    """The model and the limits of a member, as it reports them."""

    model: str
    dtype: str
    context: int
    max_lora_rank: int
    left_out: list[str]  # of the adapter tensors in the question: those without a layer


@dataclass(frozen=True)
class FleetConfig:
    """A fleet and what the job needs of it."""

    model: str  # the base's name in the registry
    dtype: str
    context: int  # tokens of the longest prompt and answer together
    rank: int
    addresses: tuple[str, ...]
    key: str = field(repr=False)
    patience: float  # seconds to wait for a member where there is none
    probe_interval: float = 5.0  # seconds


@dataclass(eq=False)
class FleetMember:
    """One process of the fleet."""

    name: str
    client: httpx.AsyncClient
    hostname: str
    load: int = 0  # tokens that it may still have to compute for this job
    failed_probes: int = 0
    losses: int = 0
    lost: asyncio.Event | None = None  # of one that answers: set when it is lost

    def stream(self, path: str, body: bytes) -> AbstractAsyncContextManager[httpx.Response]:
        """Post a body of JSON. The context has the answer, of which nothing but the head has been read."""
        return self.client.stream(
            "POST",
            path,
            content=body,
            headers={"content-type": "application/json"},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            extensions={"sni_hostname": self.hostname},
        )

    async def request(self, method: str, path: str, *, json: Any = None, seconds: float | None) -> Any:
        """The body of the answer.

        Raises:
            MemberLost: it has not answered, or not with what was requested.
            SamplerUnusable: it refuses the request, as any other member would.
        """
        limit = httpx.Timeout(seconds, connect=CONNECT_SECONDS, pool=None)
        # The address is a number, and its certificate is for the name.
        names = {"sni_hostname": self.hostname}
        try:
            response = await self.client.request(method, path, json=json, timeout=limit, extensions=names)
        except httpx.HTTPError as cause:
            raise MemberLost(f"{type(cause).__name__}: {cause}") from cause
        if response.status_code == 401:
            raise SamplerUnusable(
                f"The sampler at {self.name} does not accept the key: REGRAFT_SAMPLERS_KEY differs."
            )
        if response.status_code in (400, 403, 422):
            raise SamplerUnusable(f"The sampler at {self.name} refuses the request: {response.text[:400]}")
        if response.status_code != 200:
            raise MemberLost(f"it answered with {response.status_code}: {response.text[:400]}")
        return response.json() if response.content else None


class Members:
    """The processes behind the addresses of a fleet."""

    def __init__(self, addresses: tuple[str, ...], key: str) -> None:
        self.addresses = addresses
        self._key = key
        self._found: dict[tuple[str, str], FleetMember] = {}  # by address and its number
        self._numbers: dict[str, set[str]] = {}  # of each address when it was last resolved
        self._clients = AsyncExitStack()

    async def close(self) -> None:
        await self._clients.aclose()

    @property
    def known(self) -> list[FleetMember]:
        """Also those whose names are gone."""
        return list(self._found.values())

    @property
    def named(self) -> list[FleetMember]:
        """Those that the names resolve to."""
        return [
            member for (address, number), member in self._found.items() if number in self._numbers[address]
        ]

    async def find(self) -> str:
        """Resolve the addresses. Returns why one does not resolve, or ""."""
        failure = ""
        for address in self.addresses:
            parts = urlsplit(address)
            assert parts.hostname is not None, "the settings check this"
            port = parts.port or (443 if parts.scheme == "https" else 80)
            try:
                found = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname, port, type=socket.SOCK_STREAM
                )
            except OSError as cause:
                failure = f"{parts.hostname}: {cause}"
                continue
            self._numbers[address] = {str(place[0]) for *_, place in found}
            for number in self._numbers[address]:
                if (address, number) not in self._found:
                    host = f"[{number}]" if ":" in number else number
                    client = await self._clients.enter_async_context(
                        httpx.AsyncClient(
                            base_url=f"{parts.scheme}://{host}:{port}{parts.path}",
                            headers={
                                "host": f"{parts.hostname}:{port}",
                                "authorization": f"Bearer {self._key}",
                            },
                            limits=httpx.Limits(max_connections=MAX_REQUESTS),
                            trust_env=False,  # a proxy of the environment is for the internet
                        )
                    )
                    self._found[address, number] = FleetMember(f"{host}:{port}", client, parts.hostname)
        return failure


class Fleet:
    """Use as a context manager; `watch` has to run as long as it is used."""

    def __init__(self, config: FleetConfig, tensors: tuple[str, ...], on_lost: Callable[[str], None]) -> None:
        """`tensors`: names of the adapter's, of which members say whether they apply them."""
        self.config = config
        self.tensors = tensors
        self.on_lost = on_lost
        self.members = Members(config.addresses, config.key)
        self._some_answer = asyncio.Event()
        self._left_out: list[str] = []
        self._silence = "no address resolves"  # why no member answers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.members.close()

    async def watch(self) -> None:
        """Find and probe members until cancelled.

        Raises:
            NoMember: none has answered for `patience` seconds.
            SamplerUnusable: a member does not do what the job needs.
        """
        heard = time.monotonic()
        while True:
            self._silence = await self.members.find() or self._silence
            await asyncio.gather(*map(self._probe, self.members.known))
            if self._answering():
                heard = time.monotonic()
            elif time.monotonic() - heard > self.config.patience:
                raise NoMember(
                    f"No sampler of {self.config.model} at {', '.join(self.config.addresses)} has answered for "
                    f"{self.config.patience:.0f} s: {self._silence}"
                )
            await asyncio.sleep(self.config.probe_interval)

    async def left_out(self) -> list[str]:
        """Wait for a member. Returns the adapter tensors that it would ignore; they are the same in all."""
        await self._some_answer.wait()
        return self._left_out

    async def sample(
        self, group: RequestGroup, adapter: str, put: Callable[[Request, Finished], Awaitable[None]]
    ) -> None:
        """Sample the group at the least loaded member, and what it leaves unfinished at another one."""
        waiting = list(group)
        while waiting:
            await self._some_answer.wait()
            member = min(self._answering(), key=lambda one: one.load)
            load = dealing.tokens(waiting)
            member.load += load
            unfinished: list[Request] = []
            try:
                async with asyncio.TaskGroup() as tasks:
                    for request in waiting:
                        tasks.create_task(self._finish(member, request, adapter, put, unfinished))
            finally:
                member.load -= load
            waiting = unfinished

    async def _finish(
        self,
        member: FleetMember,
        request: Request,
        adapter: str,
        put: Callable[[Request, Finished], Awaitable[None]],
        unfinished: list[Request],
    ) -> None:
        try:
            finished = await self._generate(member, request, adapter)
        except MemberLost as cause:
            self._lose(member, str(cause))
            unfinished.append(request)
            return
        await put(request, finished)

    async def _generate(self, member: FleetMember, request: Request, adapter: str) -> Finished:
        if member.lost is None:
            raise MemberLost("it was lost")
        body = {"model": adapter, "token_ids": request.prompt_ids, "sampling_params": parameters(request)}
        posting = asyncio.create_task(member.request("POST", GENERATE, json=body, seconds=None))
        losing = asyncio.create_task(member.lost.wait())
        try:
            await asyncio.wait([posting, losing], return_when=asyncio.FIRST_COMPLETED)
            if not posting.done():
                raise MemberLost("it was lost")
            return finished_of(request, posting.result())
        finally:
            posting.cancel()
            losing.cancel()

    def _answering(self) -> list[FleetMember]:
        return [member for member in self.members.known if member.lost is not None]

    def _lose(self, member: FleetMember, reason: str) -> None:
        if member.lost is None:
            return
        member.lost.set()
        member.lost = None
        member.losses += 1
        self._silence = f"{member.name}: {reason}"
        if not self._answering():
            self._some_answer.clear()
        self.on_lost(self._silence)

    async def _probe(self, member: FleetMember) -> None:
        if member.losses >= MAX_LOSSES:
            return
        try:
            if member.lost is not None:
                await member.request("GET", HEALTH, seconds=PROBE_SECONDS)
            else:
                self._check(member, await self._facts(member))
        except MemberLost as cause:
            member.failed_probes += 1
            self._silence = f"{member.name}: {cause}"
            if member.failed_probes >= MAX_FAILED_PROBES:
                self._lose(member, str(cause))
            return
        member.failed_probes = 0
        if member.lost is None:
            member.lost = asyncio.Event()
            self._some_answer.set()

    async def _facts(self, member: FleetMember) -> Facts:
        body = await member.request("POST", FACTS, json={"tensors": self.tensors}, seconds=PROBE_SECONDS)
        try:
            return Facts.model_validate(body)
        except ValidationError as cause:
            raise MemberLost("it is no sampler of this version") from cause

    def _check(self, member: FleetMember, facts: Facts) -> None:
        """Raise SamplerUnusable if it serves another model, or with limits that the job exceeds."""
        config = self.config
        wrong = [
            f"{what} {has}, and the job needs {needs}"
            for what, has, needs, fits in (
                ("the model", facts.model, config.model, facts.model == config.model),
                ("the precision", facts.dtype, config.dtype, facts.dtype == config.dtype),
                ("a context of", facts.context, config.context, facts.context >= config.context),
                ("LoRA ranks up to", facts.max_lora_rank, config.rank, facts.max_lora_rank >= config.rank),
            )
            if not fits
        ]
        if wrong:
            raise SamplerUnusable(f"The sampler at {member.name} serves {'; '.join(wrong)}.")
        self._left_out = facts.left_out


def parameters(request: Request) -> dict[str, Any]:
    """vLLM's SamplingParams as JSON: those of a job's own engine."""
    # A schema as a grammar too: what a member adds to schemas is for the calls of tools.
    held = f"start: %json {request.held_to}" if request.held_to else ""
    grammar = request.grammar or held
    return sampling_options(request) | {"structured_outputs": {"grammar": grammar} if grammar else None}


def finished_of(request: Request, body: Any) -> Finished:
    """The answer in the body of a response. Raises MemberLost if it was cut."""
    [choice] = body["choices"]
    if choice["finish_reason"] not in ("stop", "length"):
        raise MemberLost(f"it ended an answer with {choice['finish_reason']}")
    logprobs_T = tuple(token["logprob"] for token in choice["logprobs"]["content"])
    return Finished(request.id, tuple(choice["token_ids"]), logprobs_T)
