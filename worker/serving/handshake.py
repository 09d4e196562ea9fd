"""A new inference server waits until samplers of the same release answer, before it replaces an earlier server."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Literal

from core.registry import Registry
from core.settings import Settings
from worker.engine.client import EngineClient, EngineLost, EngineOfOtherProtocol
from worker.refusals import SamplerUnusable
from worker.sampling.fleet import PROBE_SECONDS, Members

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0

Answer = Literal["ours", "other", "none"]


class Handshake:
    """Whether no fleet consists of samplers of another protocol only.

    Asks at the start, until it is so for each fleet once. A fleet of which no sampler answers is no reason to wait: a
    server of any release could not use it.
    """

    def __init__(
        self, fleets: Mapping[str, tuple[str, ...]], key: str, *, look_seconds: float = LOOK_SECONDS
    ) -> None:
        """`fleets`: their addresses, by base model."""
        self.look_seconds = look_seconds
        self._waiting = {name: Members(addresses, key) for name, addresses in fleets.items()}
        self._logged: set[str] = set()

    @classmethod
    def of(cls, settings: Settings, registry: Registry) -> "Handshake":
        """With the fleets of the models that this server serves."""
        fleets = {name: found for name, found in settings.samplers.items() if name in registry.models}
        return cls(fleets, settings.samplers_key)

    @property
    def is_complete(self) -> bool:
        return not self._waiting

    async def complete(self) -> None:
        """Return when it is."""
        while True:
            for name, members in [*self._waiting.items()]:
                if await _is_ours(members):
                    await self._waiting.pop(name).close()
                elif name not in self._logged:
                    self._logged.add(name)
                    log.warning(
                        "waiting for the fleet of %s: all samplers that answer are of another release", name
                    )
            if self.is_complete:
                return
            await asyncio.sleep(self.look_seconds)


async def _is_ours(members: Members) -> bool:
    await members.find()
    answers = await asyncio.gather(*map(_answer, members.named))
    return "ours" in answers or "other" not in answers


async def _answer(member: EngineClient) -> Answer:
    try:
        await member.facts((), PROBE_SECONDS)
    except EngineOfOtherProtocol:
        return "other"
    except (EngineLost, SamplerUnusable, ValueError):  # also what is no sampler
        return "none"
    return "ours"
