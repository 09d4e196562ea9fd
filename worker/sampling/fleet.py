"""The engines of a rollout fleet: processes of `regraft-server sampler` that serve all jobs on one base model.

The members behind an address are those that its name resolves to, so a headless service of Kubernetes is one address.
Every few seconds each is probed. One that does not answer is left out until it does, and the others sample its
unfinished answers.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from worker.engine.client import EngineClient, EngineLost, EngineUnusable
from worker.engine.protocol import HEALTH, PROTOCOL, PROTOCOL_HEADER, ServerInfo
from worker.refusals import NoMember, SamplerUnusable
from worker.sampling.pool import EngineSource, OnReady

PROBE_SECONDS = 30.0  # for an answer to a probe: the engine may be in the middle of a step
MAX_FAILED_PROBES = 2
# A member that was lost is probed again after a time that doubles with each loss without an answer in between.
MAX_BACK_OFF_SECONDS = 60.0
MAX_REPORTED = 3  # losses of one member in a row
_LOGPROBS = "processed_logprobs"


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


class Members:
    """The processes behind the addresses of a fleet."""

    def __init__(self, addresses: tuple[str, ...], key: str) -> None:
        self.addresses = addresses
        self._key = key
        self._found: dict[tuple[str, str], EngineClient] = {}  # by address and its number
        self._numbers: dict[str, set[str]] = {}  # of each address when it was last resolved
        self._clients = AsyncExitStack()

    async def close(self) -> None:
        await self._clients.aclose()

    @property
    def known(self) -> list[EngineClient]:
        """Also those whose names are gone."""
        return list(self._found.values())

    @property
    def named(self) -> list[EngineClient]:
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
                                PROTOCOL_HEADER: str(PROTOCOL),
                            },
                            limits=httpx.Limits(max_connections=None),
                            trust_env=False,  # a proxy of the environment is for the internet
                        )
                    )
                    self._found[address, number] = EngineClient(f"{host}:{port}", client, parts.hostname)
        return failure


class FleetEngines(EngineSource):
    """The members of a fleet. Others have started them."""

    has_answered = True  # its operator has tried it

    def __init__(self, config: FleetConfig, on_lost: Callable[[str], None]) -> None:
        self.config, self.on_lost = config, on_lost
        self._ready: list[EngineClient] = []
        self._starting = 0  # members that are being connected to
        self._silence = "no address resolves"  # why no member answers
        self._failing_since: float | None = None  # the first loss of any member since the last answer

    @property
    def ready(self) -> Sequence[EngineClient]:
        return self._ready

    @property
    def starting(self) -> int:
        return self._starting

    async def watch(self, tensors: Sequence[str], on_ready: OnReady) -> None:
        """Find and probe members. Raises NoMember if none has answered for `patience` seconds."""
        self._ready, self._starting, self._failing_since = [], 0, None
        members = Members(self.config.addresses, self.config.key)
        heard = time.monotonic()

        async def probe(member: EngineClient) -> None:
            facts = await self._probe(member, tensors)
            if facts is not None:
                on_ready(facts)

        try:
            while True:
                self._silence = await members.find() or self._silence
                await asyncio.gather(*map(probe, members.known))
                if self._ready:
                    heard = time.monotonic()
                elif time.monotonic() - heard > self.config.patience:
                    raise self._no_member("answered")
                await asyncio.sleep(self.config.probe_interval)
        finally:
            await members.close()

    async def lose(self, engine: EngineClient, cause: EngineLost) -> None:
        if isinstance(cause, EngineUnusable):
            raise SamplerUnusable(f"The sampler at {engine.name} refuses the request: {str(cause)[:400]}")
        if engine.lost is None:
            return
        engine.lost.set()
        engine.lost = None
        engine.losses += 1
        now = time.monotonic()
        engine.free_at = now + self._back_off(engine.losses)
        self._ready.remove(engine)
        self._silence = f"{engine.name}: {cause}"
        if engine.losses <= MAX_REPORTED:
            self.on_lost(self._silence)
        if self._failing_since is None:
            self._failing_since = now
        elif not self._ready and now - self._failing_since > self.config.patience:
            # Another one may be in the middle of a long answer.
            raise self._no_member("sampled an answer")

    def answered(self, engine: EngineClient) -> None:
        super().answered(engine)
        self._failing_since = None

    def _back_off(self, losses: int) -> float:
        """Seconds until a lost member is probed again, which must be within the patience."""
        doubled = self.config.probe_interval * 2.0 ** (min(losses, 16) - 1)
        return float(min(doubled, MAX_BACK_OFF_SECONDS, self.config.patience / 4))

    def _no_member(self, what: str) -> NoMember:
        return NoMember(
            f"No sampler of {self.config.model} at {', '.join(self.config.addresses)} has {what} for "
            f"{self.config.patience:.0f} s: {self._silence}"
        )

    async def _probe(self, member: EngineClient, tensors: Sequence[str]) -> ServerInfo | None:
        """Returns the facts of a member that takes requests again."""
        if member.lost is None and member.free_at > time.monotonic():
            return None
        facts = None
        is_new = not (member.lost or member.losses or member.failed_probes)
        self._starting += is_new
        try:
            if member.lost is not None:
                await member.request("GET", HEALTH, seconds=PROBE_SECONDS)
            else:
                facts = await member.facts(tensors, PROBE_SECONDS)
                self._check(member, facts)
        except EngineLost as cause:
            member.failed_probes += 1
            self._silence = f"{member.name}: {cause}"
            if member.failed_probes >= MAX_FAILED_PROBES:
                await self.lose(member, cause)
            return None
        finally:
            self._starting -= is_new
        member.failed_probes = 0
        if facts is not None:
            member.lost = asyncio.Event()
            self._ready.append(member)
        return facts

    def _check(self, member: EngineClient, facts: ServerInfo) -> None:
        """Raise SamplerUnusable if it serves another model, or with limits that the job exceeds."""
        config = self.config
        wrong = [
            f"{what} {has}, and the job needs {needs}"
            for what, has, needs, fits in (
                ("the model", facts.model, config.model, facts.model == config.model),
                ("log-probabilities", facts.logprobs_mode, _LOGPROBS, facts.logprobs_mode == _LOGPROBS),
                ("the precision", facts.dtype, config.dtype, facts.dtype == config.dtype),
                ("a context of", facts.context, config.context, facts.context >= config.context),
                ("LoRA ranks up to", facts.max_lora_rank, config.rank, facts.max_lora_rank >= config.rank),
            )
            if not fits
        ]
        if wrong:
            raise SamplerUnusable(f"The sampler at {member.name} serves {'; '.join(wrong)}.")
