"""Groups of answers over HTTP: frames that arrive in any parts, and a member that fails in the middle of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.__main__ import AdaptersInFolder
from worker.engine.client import EngineClient, EngineLost, EngineUnusable
from worker.engine.protocol import (
    AliveFrame,
    AnswerFrame,
    EndFrame,
    ErrorFrame,
    Frame,
    FrameReader,
    GroupRequest,
    pack,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from worker.refusals import SamplerUnusable

GROUP = GroupRequest(adapter="a", prompt=pack_ids((1, 2)), answers=(), temperature=1.0, stop_ids=(0,))
ANSWER = AnswerFrame("0/1", pack_ids((4, 9)), pack_logprobs((-0.5, -1.25)), "stop")
frames = st.lists(
    st.one_of(
        st.just(AliveFrame()),
        st.builds(ErrorFrame, st.text(), st.booleans()),
        st.builds(AnswerFrame, st.text(), st.binary(), st.binary(), st.text()),
    )
)


@given(frames, st.integers(1, 40))
def test_frames_arrive_as_sent_in_parts_of_any_size(sent: list[Frame], size: int) -> None:
    body, reader = b"".join(map(pack, [*sent, EndFrame()])), FrameReader()

    read = [frame for at in range(0, len(body), size) for frame in reader.feed(body[at : at + size])]

    assert read == [*sent, EndFrame()]


@given(
    st.lists(st.integers(0, 2**31 - 1)),
    st.lists(st.floats(max_value=0, width=32, allow_nan=False)),
)
def test_ids_and_log_probabilities_are_exact(ids: list[int], logprobs: list[float]) -> None:
    assert unpack_ids(pack_ids(ids)) == tuple(ids)
    assert unpack_logprobs(pack_logprobs(logprobs)) == tuple(np.asarray(logprobs, np.float32).tolist())


class Body(httpx.AsyncByteStream):
    """Frames, and then what happens to the connection."""

    def __init__(self, frames: Sequence[Frame | bytes], then: Exception | None = None) -> None:
        self.frames, self.then, self.is_closed = frames, then, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for frame in self.frames:
            yield frame if isinstance(frame, bytes) else pack(frame)
        if self.then is not None:
            raise self.then

    async def aclose(self) -> None:
        self.is_closed = True


def sampled(response: httpx.Response) -> list[AnswerFrame]:
    async def sample() -> list[AnswerFrame]:
        transport = httpx.MockTransport(lambda request: response)
        async with httpx.AsyncClient(transport=transport, base_url="http://member") as client:
            member = EngineClient("member", client, silence=60.0)
            return [answer async for answer in member.sample(GROUP)]

    return asyncio.run(sample())


def test_a_group_has_the_answers_and_not_the_signs_of_life() -> None:
    body = Body([AliveFrame(), ANSWER, AliveFrame(), EndFrame()])

    assert sampled(httpx.Response(200, stream=body)) == [ANSWER]
    assert body.is_closed


@pytest.mark.parametrize(
    ("response", "error", "words"),
    [
        (httpx.Response(200, stream=Body([ANSWER])), EngineLost, "closed the connection"),
        (httpx.Response(200, stream=Body([ANSWER], httpx.ReadTimeout("silent"))), EngineLost, "no heartbeat"),
        (httpx.Response(200, stream=Body([], httpx.ReadError("reset"))), EngineLost, "reset"),
        (httpx.Response(200, stream=Body([b"\0\0\0\1x"])), EngineLost, "Error"),
        (httpx.Response(200, stream=Body([ErrorFrame("died", lasting=False)])), EngineLost, "died"),
        (
            httpx.Response(200, stream=Body([ErrorFrame("too long", lasting=True)])),
            EngineUnusable,
            "too long",
        ),
        (httpx.Response(401), EngineLost, "REGRAFT_SAMPLERS_KEY"),
        (httpx.Response(422, text="no such field"), SamplerUnusable, "no such field"),
        (httpx.Response(404, text="no such adapter"), EngineLost, "no such adapter"),
        (httpx.Response(503, text="overloaded"), EngineLost, "overloaded"),
    ],
)
def test_a_member_that_fails_is_lost_unless_any_other_would_refuse_too(
    response: httpx.Response, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        sampled(response)


@pytest.mark.parametrize("name", ["", ".", "..", "inside/adapter", "../secrets", ".part-x", "absent"])
def test_an_adapter_is_an_entry_of_its_folder(name: str, tmp_path: Path) -> None:
    for folder in ("secrets", "adapters/.part-x", "adapters/inside/adapter"):
        (tmp_path / folder).mkdir(parents=True)
    adapters = AdaptersInFolder(tmp_path / "adapters", None)

    assert asyncio.run(adapters.resolve_lora("tiny", name)) is None
