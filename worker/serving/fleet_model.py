"""A base model whose requests are answered by its rollout fleet, so that this process starts no engine for it.

The API has checked the project's right to the weights. This process counts, and converts requests and answers, as it
does where it runs vLLM itself. A member of the fleet (worker/serving/fleet_server.py) gets the request in
vLLM's format and downloads the adapter from the blob store.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx

from core.chat import InternalChat, InternalCompletion
from core.registry import BaseModelEntry
from core.settings import Settings
from worker.engine.client import EngineClient
from worker.engine.protocol import OTHER_PROTOCOL
from worker.model.policy import source_of
from worker.sampling.fleet import Members
from worker.sampling.weights import name_of
from worker.serving.engines import EngineRefused
from worker.serving.proxy import Proxied, UpstreamFailed, is_stream
from worker.serving.vllm_server import VllmModel

log = logging.getLogger(__name__)

# Between two resolutions of the addresses. A member that has failed is the last choice for as long.
FIND_SECONDS = 5.0


class FleetModel(VllmModel):
    """A base model with a fleet. Implements worker.serving.engine.LoadedModel."""

    lost = False

    def __init__(self, name: str, entry: BaseModelEntry, source: str, settings: Settings) -> None:
        super().__init__(name, entry, source, rank=settings.inference_max_lora_rank)
        self._members = Members(settings.samplers[name], settings.samplers_key)
        self.upstream = FleetUpstream(name, self._members)

    async def close(self) -> None:
        await self._members.close()

    def prepare(self, request: InternalChat | InternalCompletion, adapter: Path | None) -> Proxied:
        """As VllmModel does.

        Raises:
            EngineRefused: the request asks for log-probabilities that a fleet does not give.
        """
        if wants_logprobs(request) and (changed := changes_of(request)):
            raise EngineRefused(
                f"'logprobs' together with {changed} is not supported for {self.name}: its samplers report "
                "probabilities after these, as jobs need them.",
                code="unsupported_parameter",
                param="logprobs",
            )
        return super().prepare(request, adapter)

    def adapter_name(self, request: InternalChat | InternalCompletion, folder: Path | None) -> str:
        return name_of(request.served.adapter)


def wants_logprobs(request: InternalChat | InternalCompletion) -> bool:
    return request.logprobs is not None and request.logprobs is not False


def changes_of(request: InternalChat | InternalCompletion) -> str:
    """The parameters of the request that change the distribution which tokens are drawn from; "" if none does."""
    names = {
        "temperature": request.temperature not in (None, 0, 1),
        "top_p": request.top_p not in (None, 1),
        "frequency_penalty": bool(request.frequency_penalty),
        "presence_penalty": bool(request.presence_penalty),
        "logit_bias": bool(request.logit_bias),
    }
    if isinstance(request, InternalChat):
        names |= {
            "response_format": bool(request.response_schema),
            "tools": bool(request.tools),
            "reasoning_effort": request.reasoning_effort is not None
            or request.served.thinking_budget is not None,
        }
    return ", ".join(f"'{name}'" for name, changes in names.items() if changes)


class FleetUpstream:
    """Implements VllmUpstream: a member of a fleet answers."""

    def __init__(self, name: str, members: Members) -> None:
        self.name, self.members = name, members
        self._failed: dict[EngineClient, float] = {}  # when it last did
        self._found = -math.inf  # when the addresses were resolved
        self._failure = ""  # why one was not
        self._finding = asyncio.Lock()

    @asynccontextmanager
    async def open(self, path: str, body: bytes) -> AsyncIterator[httpx.Response]:
        """Ask the member with the fewest requests of this process, or the next one if it fails.

        An error of its engine is tried on one other member and no more: the request may be its cause.
        """
        failure = await self._find()
        left = sorted(self.members.named, key=lambda one: (self._has_failed(one), one.load))
        tries_again = True
        while left:
            member = left.pop(0)
            member.load += 1
            try:
                async with AsyncExitStack() as stack:
                    try:
                        response = await stack.enter_async_context(member.probed(path, body))
                        if not is_stream(response):
                            await response.aread()
                    except httpx.TransportError as cause:
                        failure = f"{type(cause).__name__}: {cause}"
                    else:
                        if response.status_code == 401:
                            failure = "it does not accept the key: REGRAFT_SAMPLERS_KEY differs"
                        elif response.status_code == OTHER_PROTOCOL:
                            failure = "it is of another release"
                        elif response.status_code >= 500 and tries_again and left:
                            failure = f"it answers with status {response.status_code}"
                            tries_again = False
                        else:
                            yield response
                            return
            finally:
                member.load -= 1
                if member.has_hung:  # perhaps in the middle of a stream
                    member.has_hung, self._failed[member] = False, time.monotonic()
            self._failed[member] = time.monotonic()
            log.warning("the sampler of %s at %s has failed: %s", self.name, member.name, failure)
        if failure:
            log.error("no sampler of %s answers: %s", self.name, failure)
        # The names of machines are none of a client's business.
        raise UpstreamFailed(f"No sampler of {self.name} answers. The log of the inference server says why.")

    async def _find(self) -> str:
        """Resolve the addresses from time to time. Returns why there may be no member."""
        async with self._finding:
            if time.monotonic() - self._found >= FIND_SECONDS:
                self._failure = await self.members.find()
                self._found = time.monotonic()  # not before: the client may leave meanwhile, and others wait
            return self._failure

    def _has_failed(self, member: EngineClient) -> bool:
        return time.monotonic() - self._failed.get(member, -math.inf) < FIND_SECONDS


class FleetBuilder:
    """Implements worker.serving.engines.Builder for base models with a fleet. They need no memory here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def bytes_needed(self, entry: BaseModelEntry) -> int:
        return 0

    def bytes_free(self) -> int:
        return 0

    def bytes_in_all(self) -> int:
        return 0

    async def build(self, name: str, entry: BaseModelEntry, others: Sequence[BaseModelEntry]) -> FleetModel:
        source = await asyncio.to_thread(source_of, entry, self.settings.model_cache)
        return await asyncio.to_thread(FleetModel, name, entry, str(source), self.settings)
