"""The client for an engine, which is a member of a rollout fleet or a child of this process."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec
from pydantic import ValidationError

from worker.engine.protocol import (
    FACTS,
    MSGPACK,
    OTHER_PROTOCOL,
    SAMPLE,
    AnswerFrame,
    AnswerRequest,
    EndFrame,
    ErrorFrame,
    FactsQuestion,
    Failure,
    FrameReader,
    GroupRequest,
    ServerInfo,
)
from worker.refusals import SamplerUnusable

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 300.0  # of an engine that samples, which reports every few seconds that it works
BUSY_SECONDS = 5.0  # until the next request to a busy engine without Retry-After
MAX_BUSY_SECONDS = 60.0
PROBED_TENSORS = ("base_model.model.probe.lora_A.weight",)  # of no model
PROBES = 2  # that an engine may leave without an answer, one after the other

T = TypeVar("T")


class EngineLost(Exception):
    """An engine died, hung or failed; the message says which."""


class EngineGone(EngineLost):
    """The engine's end of a connection is closed."""


class EngineSilent(EngineLost):
    """The engine has not answered in time."""


class EngineUnusable(EngineLost):
    """The engine failed with an error of a kind that lasts: it does not compute the model, if it never has."""


class EngineOfOtherProtocol(EngineLost):
    """The engine is of another release, and says so."""


class EngineBusy(EngineLost):
    """The engine takes no request now. It is lost only if it says so for too long."""

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(reason)
        self.retry_after = retry_after  # seconds


@dataclass(eq=False)
class EngineClient:
    """One engine."""

    name: str
    client: httpx.AsyncClient
    hostname: str | None = None  # of its certificate
    silence: float = SILENCE_SECONDS
    load: int = 0  # tokens that it may still have to compute for this process
    unfinished: dict[str, AnswerRequest] = field(
        default_factory=dict
    )  # answers that it samples for it, by id
    version: int = 0  # of the weights that this process has sent
    lost: asyncio.Event | None = None  # of one that takes requests: set when it is lost
    failed_probes: int = 0
    losses: int = 0  # since its last answer
    busy_since: float | None = None  # when it first said that it is busy, after its last answer (monotonic)
    free_at: float = 0.0  # it gets no request before this time (monotonic)
    has_hung: bool = False  # it has left PROBES probes without an answer
    probe_every: float = 60.0  # seconds without a byte of an answer before a probe
    probe_seconds: float = 30.0  # for the answer to a probe: the engine may be in the middle of a step

    def put_off(self, cause: EngineBusy, now: float) -> bool:
        """Send it no request before the time that it said. Returns False if it has been busy for `silence` seconds."""
        if self.busy_since is None:
            self.busy_since = now
        self.free_at = now + cause.retry_after
        return now - self.busy_since < self.silence

    def has_answered(self) -> None:
        self.losses, self.busy_since = 0, None

    def stream(
        self, path: str, body: bytes, *, content_type: str = "application/json", silence: float | None = None
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Post a body. The context has the answer, of which nothing but the head has been read.

        `silence`: seconds without a byte after which reading or writing fails.
        """
        return self.client.stream(
            "POST",
            path,
            content=body,
            headers={"content-type": content_type},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS, read=silence, write=silence),
            extensions=self._extensions,
        )

    @asynccontextmanager
    async def probed(self, path: str, body: bytes) -> AsyncIterator[httpx.Response]:
        """As `stream`, for an answer that may take long to begin: probe the engine while it sends nothing.

        This and reading the answer raise httpx.ReadTimeout if it leaves PROBES probes without an answer.
        """
        stream = self.stream(path, body)
        response = await self._unless_hung(stream.__aenter__())
        try:
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _Probed(self, response.stream)
            yield response
        finally:
            await stream.__aexit__(None, None, None)

    async def _unless_hung(self, doing: Awaitable[T]) -> T:
        task, silent = asyncio.ensure_future(doing), 0
        try:
            while not (await asyncio.wait([task], timeout=self.probe_every))[0]:
                silent = silent + 1 if await self._is_silent() else 0
                if silent == PROBES:
                    self.has_hung = True
                    raise httpx.ReadTimeout(
                        f"it has not answered {PROBES} probes of {self.probe_seconds:g} s"
                    )
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _is_silent(self) -> bool:
        """Whether it does not answer a question for which it generates nothing. Any answer will do.

        vLLM's HTTP server would answer others while its engine hangs; this one goes to the engine's processes.
        """
        try:
            await self.facts(PROBED_TENSORS, self.probe_seconds)
        except EngineSilent:
            return True
        except (EngineLost, SamplerUnusable):
            return False
        return False

    async def sample(self, group: GroupRequest) -> AsyncGenerator[AnswerFrame, None]:
        """Yield the answers as they end. Closing the iterator aborts the others.

        Raises:
            EngineLost: it has failed, closed the connection or sent nothing for `silence` seconds.
            EngineBusy: it takes no request now.
            EngineUnusable: it has failed, as any other engine would.
            SamplerUnusable: it refuses the request, as any other engine would.
        """
        self._check_open()
        body, frames = msgspec.msgpack.encode(group), FrameReader()
        try:
            async with self.stream(SAMPLE, body, content_type=MSGPACK, silence=self.silence) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._check(response)
                async for part in response.aiter_raw():
                    for frame in frames.feed(part):
                        if isinstance(frame, EndFrame):
                            return
                        if isinstance(frame, ErrorFrame):
                            raise (EngineUnusable if frame.lasting else EngineLost)(frame.error)
                        if isinstance(frame, AnswerFrame):
                            yield frame
        except (httpx.HTTPError, msgspec.DecodeError) as cause:
            raise self._lost(cause, self.silence) from cause
        raise EngineGone("it closed the connection")

    async def put(self, path: str, message: msgspec.Struct, seconds: float) -> None:
        """Send a message. Raises what `request` raises."""
        await self.request("POST", path, content=msgspec.msgpack.encode(message), seconds=seconds)

    async def facts(self, tensors: Sequence[str], seconds: float) -> ServerInfo:
        """Which model it has, and which of these adapter tensors it would ignore. Raises what `request` raises."""
        body = await self.request(
            "POST", FACTS, json=FactsQuestion(tensors=list(tensors)).model_dump(), seconds=seconds
        )
        try:
            return ServerInfo.model_validate(body)
        except ValidationError as cause:
            raise EngineLost("it is no sampler of this version") from cause

    async def request(
        self, method: str, path: str, *, json: Any = None, content: bytes | None = None, seconds: float
    ) -> Any:
        """The body of the answer.

        Raises:
            EngineLost: it has not answered, or not with what was requested.
            EngineBusy: it takes no request now.
            SamplerUnusable: it refuses the request, as any other engine would.
        """
        self._check_open()
        limit = httpx.Timeout(seconds, connect=CONNECT_SECONDS, pool=None)
        try:
            response = await self.client.request(
                method, path, json=json, content=content, timeout=limit, extensions=self._extensions
            )
        except httpx.HTTPError as cause:
            raise self._lost(cause, seconds) from cause
        self._check(response)
        return response.json() if response.content else None

    @property
    def _extensions(self) -> dict[str, Any]:
        # The address is a number, and its certificate is for the name.
        return {} if self.hostname is None else {"sni_hostname": self.hostname}

    def _check_open(self) -> None:
        """Raise EngineGone if another group has lost the engine, and its client is closed."""
        if self.client.is_closed:
            raise EngineGone("it was lost")

    def _lost(self, cause: Exception, seconds: float) -> EngineLost:
        if isinstance(cause, httpx.ReadTimeout | httpx.WriteTimeout):
            return EngineSilent(f"it sent no heartbeat for {seconds:.0f} s")
        return EngineGone(f"{type(cause).__name__}: {cause}")

    def _check(self, response: httpx.Response) -> None:
        """Raise what `request` raises, unless it has answered."""
        if response.status_code == 401:
            # An operator can repair this, as by the end of a rotation, so the job waits for it.
            raise EngineLost("it does not accept the key: REGRAFT_SAMPLERS_KEY differs")
        if response.status_code in (400, 403, 422):
            raise SamplerUnusable(f"The sampler at {self.name} refuses the request: {response.text[:400]}")
        if response.status_code != 200:
            raise self._failed(response)

    def _failed(self, response: httpx.Response) -> EngineLost:
        if response.status_code == OTHER_PROTOCOL:
            return EngineOfOtherProtocol(f"it is of another release: {response.text[:400]}")
        try:
            failure = Failure.model_validate_json(response.content)
        except ValidationError:
            reason = f"it answered with {response.status_code}: {response.text[:400]}"
            if response.status_code in (429, 503):
                return EngineBusy(reason, retry_after(response.headers))
            return EngineLost(reason)
        return (EngineUnusable if failure.lasting else EngineLost)(failure.error)


def retry_after(headers: httpx.Headers) -> float:
    """Return the seconds of Retry-After, at most MAX_BUSY_SECONDS. Not of a date, which our servers do not send."""
    said = headers.get("retry-after", "")
    return min(float(said) if said.isdecimal() else BUSY_SECONDS, MAX_BUSY_SECONDS)


class _Probed(httpx.AsyncByteStream):
    """A body whose parts are read as `EngineClient.probed` says."""

    def __init__(self, engine: EngineClient, body: httpx.AsyncByteStream) -> None:
        self._engine, self._body = engine, body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        parts = aiter(self._body)

        async def following() -> bytes | None:
            return await anext(parts, None)

        while (part := await self._engine._unless_hung(following())) is not None:
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()
