"""A base model whose requests are answered by its rollout fleet, so that this process starts no engine for it.

The API has checked the project's right to the weights. This process counts, and converts requests and answers, as it
does where it runs vLLM itself. A member of the fleet (worker/rollout/samplers/fleet_server.py) gets the request in
vLLM's format and downloads the adapter from the blob store.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
from starlette.types import Message, Receive, Scope, Send

from core.chat import InternalChat, InternalCompletion, envelope
from core.disconnect import until_gone
from core.registry import BaseModelEntry
from core.settings import Settings
from worker.model.policy import source_of
from worker.rollout.samplers.fleet import name_of
from worker.rollout.samplers.fleet_members import FleetMember, Members
from worker.serve.engines import EngineRefused
from worker.serve.passed import Passed
from worker.serve.vllm_server import VllmModel

log = logging.getLogger(__name__)

# Between two resolutions of the addresses. A member that has failed is the last choice for as long.
FIND_SECONDS = 5.0


class FleetModel(VllmModel):
    """A base model with a fleet. Implements worker.serve.engine.LoadedModel."""

    lost = False

    def __init__(self, name: str, entry: BaseModelEntry, source: str, settings: Settings) -> None:
        super().__init__(name, entry, source, rank=settings.inference_max_lora_rank)
        self._members = Members(settings.samplers[name], settings.samplers_key)
        self.app = FleetApp(name, self._members)

    async def close(self) -> None:
        await self._members.close()

    def prepare(self, request: InternalChat | InternalCompletion, adapter: Path | None) -> Passed:
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
            "response_format": bool(request.held_to),
            "tools": bool(request.tools),
            "reasoning_effort": request.reasoning_effort is not None
            or request.served.thinking_budget is not None,
        }
    return ", ".join(f"'{name}'" for name, changes in names.items() if changes)


class FleetApp:
    """An ASGI application that has a member of a fleet answer. A client that leaves aborts the request."""

    def __init__(self, name: str, members: Members) -> None:
        self.name, self.members = name, members
        self._failed: dict[FleetMember, float] = {}  # when it last did
        self._found = -math.inf  # when the addresses were resolved
        self._failure = ""  # why one was not
        self._finding = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await until_gone(receive, self._answer(scope["path"], body, send))

    async def _answer(self, path: str, body: bytes, send: Send) -> None:
        """Pass on the answer of the member with the fewest requests of this process, or of the next one if it fails.

        An error of its engine is tried on one other member and no more: the request may be its cause.
        """
        failure = await self._find()
        left = sorted(self.members.named, key=lambda one: (self._has_failed(one), one.load))
        tries_again = True
        while left:
            member = left.pop(0)
            member.load += 1
            begun = False
            try:
                async with member.stream(path, body) as response:
                    if response.status_code == 401:
                        failure = "it does not accept the key: REGRAFT_SAMPLERS_KEY differs"
                    elif response.status_code >= 500 and tries_again and left:
                        failure = f"it answers with status {response.status_code}"
                        tries_again = False
                    else:
                        async for message in _messages(response):
                            begun = True
                            await send(message)
                        return
            except httpx.TransportError as cause:
                if begun:
                    raise
                failure = f"{type(cause).__name__}: {cause}"
            finally:
                member.load -= 1
            self._failed[member] = time.monotonic()
            log.warning("the sampler of %s at %s has failed: %s", self.name, member.name, failure)
        if failure:
            log.error("no sampler of %s answers: %s", self.name, failure)
        # The names of machines are none of a client's business.
        said = f"No sampler of {self.name} answers. The log of the inference server says why."
        error = json.dumps(envelope(503, said)).encode()
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": error, "more_body": False})

    async def _find(self) -> str:
        """Resolve the addresses from time to time. Returns why there may be no member."""
        async with self._finding:
            if time.monotonic() - self._found >= FIND_SECONDS:
                self._failure = await self.members.find()
                self._found = time.monotonic()  # not before: the client may leave meanwhile, and others wait
            return self._failure

    def _has_failed(self, member: FleetMember) -> bool:
        return time.monotonic() - self._failed.get(member, -math.inf) < FIND_SECONDS


async def _messages(response: httpx.Response) -> AsyncIterator[Message]:
    """The response as ASGI messages: of an answer that is no stream, none before all of it has been read."""
    head = {"type": "http.response.start", "status": response.status_code, "headers": response.headers.raw}
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        content = await response.aread()
        yield head
        yield {"type": "http.response.body", "body": content, "more_body": False}
        return
    yield head
    async for chunk in response.aiter_raw():
        yield {"type": "http.response.body", "body": chunk, "more_body": True}
    yield {"type": "http.response.body", "body": b"", "more_body": False}


class FleetBuilder:
    """Implements worker.serve.engines.Builder for base models with a fleet. They need no memory here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def bytes_needed(self, entry: BaseModelEntry) -> int:
        return 0

    def bytes_free(self) -> int:
        return 0

    async def build(self, name: str, entry: BaseModelEntry, others: Sequence[BaseModelEntry]) -> FleetModel:
        source = await asyncio.to_thread(source_of, entry, self.settings.model_cache)
        return await asyncio.to_thread(FleetModel, name, entry, str(source), self.settings)
