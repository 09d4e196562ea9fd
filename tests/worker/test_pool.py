"""Groups that are dealt to engines, whose answers a transport makes up."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec
import pytest

from worker.engine.client import EngineClient, EngineLost, retry_after
from worker.engine.protocol import (
    AnswerFrame,
    AnswerRequest,
    EndFrame,
    Frame,
    GroupRequest,
    ServerInfo,
    pack,
    pack_ids,
    pack_logprobs,
)
from worker.model.engine_sizes import SEQUENCES
from worker.sampling.pool import EnginePlaces, EnginePool
from worker.sampling.weight_sync import WEIGHT_SYNC

FACTS = ServerInfo(
    model="tiny",
    dtype="float32",
    context=64,
    max_lora_rank=8,
    logprobs_mode="processed_logprobs",
    vllm="0",
    left_out=[],
)


class Named:
    """Weights that all engines have."""

    version = 1

    async def deliver(self, engine: EngineClient) -> str:
        return "weights"


@dataclass
class FixedEngines:
    """All ready, until one is lost."""

    ready: list[EngineClient]
    starting: int = 0
    has_answered: bool = False
    lost: list[str] = field(default_factory=list)

    def answered(self, engine: EngineClient) -> None:
        engine.has_answered()

    async def watch(self, tensors: Sequence[str], on_ready: Callable[[ServerInfo], None]) -> None:
        for engine in self.ready:
            engine.lost = asyncio.Event()
        on_ready(FACTS)

    async def lose(self, engine: EngineClient, cause: EngineLost) -> None:
        if engine.lost is not None:
            engine.lost.set()
            engine.lost = None
            self.ready.remove(engine)
            self.lost.append(f"{engine.name}: {cause}")


class Replies:
    """An engine that answers each request of a group with its seed, and remembers the groups."""

    def __init__(self, finish: str = "stop", *, ends_after: int | None = None) -> None:
        self.finish, self.ends_after = finish, ends_after
        self.groups: list[GroupRequest] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        group = msgspec.msgpack.decode(request.content, type=GroupRequest)
        self.groups.append(group)
        frames: list[Frame] = [
            AnswerFrame(one.id, pack_ids((one.seed,)), pack_logprobs((-1.0,)), self.finish)
            for one in group.answers[: self.ends_after]
        ]
        if self.ends_after is None:
            frames.append(EndFrame())
        return httpx.Response(200, stream=httpx.ByteStream(b"".join(map(pack, frames))))


class Busy(Replies):
    """Says that it is busy, a number of times."""

    def __init__(self, times: int, retry_after: str = "0") -> None:
        super().__init__()
        self.times, self.retry_after = times, retry_after

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.times == 0:
            return super().__call__(request)
        self.times -= 1
        return httpx.Response(503, headers={"retry-after": self.retry_after})


class ReadyAgain(Replies):
    """Is lost and ready again while it answers its first group."""

    engine: EngineClient

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.ends_after is not None:
            assert self.engine.lost is not None
            self.engine.lost.set()
            self.engine.lost = asyncio.Event()
        answer = super().__call__(request)
        self.ends_after = None
        return answer


def group(place: int, size: int = 3, tokens: int = 10) -> GroupRequest:
    answers = tuple(
        AnswerRequest(f"{place}/{member}", 100 * place + member, tokens) for member in range(size)
    )
    return GroupRequest("", pack_ids((1, 2)), answers, 1.0, ())


def sampled(engines: FixedEngines, groups: Sequence[GroupRequest]) -> dict[str, bytes]:
    answers: dict[str, bytes] = {}

    def put(answer: AnswerFrame) -> None:
        assert answer.id not in answers
        answers[answer.id] = answer.ids

    async def sample() -> None:
        pool = EnginePool(engines, Named())  # type: ignore[arg-type]  # what the pool uses of them
        await pool.watch(())
        await asyncio.gather(*(pool.sample(one, put) for one in groups))

    asyncio.run(sample())
    return answers


def engines_of(*replies: Replies) -> FixedEngines:
    return FixedEngines(
        [
            EngineClient(
                str(number),
                httpx.AsyncClient(transport=httpx.MockTransport(reply), base_url="http://engine"),
            )
            for number, reply in enumerate(replies)
        ]
    )


def expected(*places: int) -> dict[str, bytes]:
    return {one.id: pack_ids((one.seed,)) for place in places for one in group(place).answers}


def test_whole_groups_go_to_the_engine_with_the_least_to_do() -> None:
    one, other = Replies(), Replies()
    engines = engines_of(one, other)

    assert sampled(engines, [group(place) for place in range(4)]) == expected(0, 1, 2, 3)
    assert [len(replies.groups) for replies in (one, other)] == [2, 2]
    assert {len(sent.answers) for sent in one.groups} == {3}
    assert {sent.adapter for sent in one.groups} == {"weights"}
    assert [engine.load for engine in engines.ready] == [0, 0]
    assert not any(engine.unfinished for engine in engines.ready)


def test_what_a_lost_engine_leaves_unfinished_is_sampled_by_another_with_the_same_seeds() -> None:
    cut, whole = Replies(ends_after=1), Replies()
    engines = engines_of(cut, whole)

    assert sampled(engines, [group(0)]) == expected(0)
    assert [sent.answers for sent in whole.groups] == [group(0).answers[1:]]
    assert engines.lost == ["0: it closed the connection"]
    assert engines.ready[0].load == 0


def test_an_answer_that_its_engine_aborted_is_none() -> None:
    aborting, whole = Replies("abort"), Replies()
    engines = engines_of(aborting, whole)

    assert sampled(engines, [group(0)]) == expected(0)
    assert engines.lost == ["0: it ended an answer with abort"]


def test_the_largest_engine_has_places_for_its_answers_and_for_as_many_waiting() -> None:
    async def count() -> int:
        places, taken = EnginePlaces(), 0
        while not places.free.locked():
            await places.free.acquire()
            taken += 1
        return taken

    assert asyncio.run(count()) == 2 * SEQUENCES[-1]


def test_more_answers_than_an_engine_has_places_for_are_sampled() -> None:
    replies = Replies()

    answers = sampled(engines_of(replies), [group(place, size=300) for place in range(3)])

    assert len(answers) == 900


def test_a_loss_is_counted_once_if_the_engine_is_ready_again_before_its_group_learns_of_it() -> None:
    again = ReadyAgain(ends_after=1)
    engines = engines_of(again)
    [again.engine] = engines.ready

    assert sampled(engines, [group(0)]) == expected(0)
    assert engines.lost == []
    assert len(again.groups) == 2


def test_an_engine_that_is_busy_is_asked_again_and_not_lost() -> None:
    busy = Busy(times=5)
    engines = engines_of(busy)

    assert sampled(engines, [group(0)]) == expected(0)
    assert (engines.lost, len(busy.groups)) == ([], 1)


def test_while_an_engine_is_busy_the_others_have_its_groups() -> None:
    busy, free = Busy(times=100, retry_after="60"), Replies()
    engines = engines_of(busy, free)

    assert sampled(engines, [group(place) for place in range(4)]) == expected(0, 1, 2, 3)
    assert (engines.lost, len(busy.groups), len(free.groups)) == ([], 0, 4)


def test_an_engine_that_is_busy_for_as_long_as_it_may_be_silent_is_lost() -> None:
    engines = engines_of(Busy(times=1), Replies())
    engines.ready[0].silence = 0.0

    assert sampled(engines, [group(0)]) == expected(0)
    assert engines.lost == ["0: it answered with 503: "]


def test_the_first_engine_that_has_the_weights_ends_their_synchronization() -> None:
    before = WEIGHT_SYNC.seconds
    WEIGHT_SYNC.begin()

    assert sampled(engines_of(Replies()), [group(0)]) == expected(0)
    assert WEIGHT_SYNC.seconds > before


@pytest.mark.parametrize(
    ("said", "seconds"), [("7", 7.0), ("3600", 60.0), (None, 5.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 5.0)]
)
def test_a_busy_engine_says_for_how_long(said: str | None, seconds: float) -> None:
    assert retry_after(httpx.Headers({} if said is None else {"retry-after": said})) == seconds
