"""The route that samples groups of answers from vLLM's engine; protocol.py has its messages."""

import asyncio
import logging
from argparse import Namespace
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from worker.engine.options import sampling_options
from worker.engine.protocol import (
    MSGPACK,
    AliveFrame,
    AnswerFrame,
    AnswerRequest,
    EndFrame,
    ErrorFrame,
    FactsQuestion,
    GroupRequest,
    ServerInfo,
    pack,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)
from worker.engine.stepped import EngineFailed

log = logging.getLogger(__name__)

# Finds vLLM's LoRARequest of an adapter's name, or returns the response to its request.

ALIVE_SECONDS = 5.0  # without another frame


class SampledGroup:
    """One request for a group. Each answer is a separate request to the engine, with its seed."""

    def __init__(self, engine: Any, group: GroupRequest, adapter: Any) -> None:
        """`engine`: vLLM's EngineClient, or SteppedEngine. `adapter`: vLLM's LoRARequest."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        self._engine, self._group, self._adapter = engine, group, adapter
        self._params, self._kind = SamplingParams, RequestOutputKind.FINAL_ONLY
        self._structured, self._refusals = StructuredOutputsParams, (VLLMClientError, ValueError)
        self._prompt_ids = unpack_ids(group.prompt)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the answers as they end. Closing the iterator aborts the others."""
        waiting = {asyncio.create_task(self._answer(wanted)) for wanted in self._group.answers}
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    await self._engine.collective_rpc("check_health")
                    yield pack(AliveFrame())
                for answer in done:
                    yield pack(answer.result())
            yield pack(EndFrame())
        except EngineFailed as cause:
            yield pack(ErrorFrame(str(cause), cause.lasting))
        except self._refusals as cause:
            yield pack(ErrorFrame(str(cause), lasting=True))
        except Exception as cause:
            log.exception("answers failed")
            yield pack(ErrorFrame(f"{type(cause).__name__}: {cause}", lasting=False))
        finally:
            for unfinished in waiting:
                unfinished.cancel()

    async def _answer(self, wanted: AnswerRequest) -> AnswerFrame:
        group = self._group
        params = self._params(
            **sampling_options(group, wanted),
            output_kind=self._kind,
            structured_outputs=self._structured(grammar=group.grammar) if group.grammar else None,
        )
        outputs = self._engine.generate(
            {"type": "token", "prompt_token_ids": list(self._prompt_ids)},
            params,
            f"sample-{uuid4().hex}",
            lora_request=self._adapter,
        )
        [output] = [output async for output in outputs]
        [answer] = output.outputs
        return AnswerFrame(
            wanted.id,
            pack_ids(answer.token_ids),
            pack_logprobs(answer.logprobs.logprobs),
            answer.finish_reason,
            getattr(output, "versions", ()),  # of SteppedEngine
        )


class FrameStream(StreamingResponse):
    """Frames, whose answers are aborted when the client disconnects, even before the first frame."""

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        self.frames = frames
        super().__init__(frames, media_type=MSGPACK)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.frames.aclose()


async def sample(request: HttpRequest) -> Response:
    """Sample answers to one prompt from one adapter."""
    state: Namespace = request.app.state
    try:
        group = msgspec.msgpack.decode(await request.body(), type=GroupRequest)
    except msgspec.DecodeError as cause:
        return JSONResponse({"error": {"message": str(cause)}}, 422)
    adapter = await state.find_adapter(group.adapter)
    if isinstance(adapter, Response):
        return adapter
    return FrameStream(SampledGroup(state.engine_client, group, adapter).frames())


async def facts_of(engine: Any, args: Namespace, question: FactsQuestion) -> ServerInfo:
    """The model and the limits of an engine, whose options are `args`."""
    names: list[str] = []
    if question.tensors:
        names, *_ = await engine.collective_rpc(
            "policy_tensors_without_layer", args=(tuple(question.tensors),)
        )  # the same in all workers
    from vllm.version import __version__

    return ServerInfo(
        model=args.served_model_name[0],
        dtype=args.dtype,
        context=args.max_model_len,
        max_lora_rank=args.max_lora_rank,
        logprobs_mode=args.logprobs_mode,
        vllm=__version__,
        left_out=names,
    )
