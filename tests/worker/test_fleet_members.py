"""A job keeps the members of its fleet that fail for a while, whatever they fail at."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.graders.servers import serving
from tests.worker.test_pool import FACTS, Named, expected, group
from worker.engine.client import EngineLost
from worker.engine.protocol import (
    HEALTH,
    OTHER_PROTOCOL,
    SAMPLE,
    AnswerFrame,
    EndFrame,
    Frame,
    pack,
    pack_ids,
    pack_logprobs,
)
from worker.refusals import NoMember
from worker.sampling.fleet import MAX_REPORTED, FleetConfig, FleetEngines
from worker.sampling.pool import EnginePool


@dataclass
class Member:
    """Stands in for a sampler. It answers probes, and fails at a number of groups."""

    failures: int
    groups: int = 0

    def __call__(self, path: str, sent: Any) -> tuple[int, str | bytes]:
        if path == HEALTH:
            return 200, ""
        if path != SAMPLE:
            return 200, FACTS.model_dump_json()
        self.groups += 1
        if self.groups <= self.failures:
            return 500, "out of memory"
        frames: list[Frame] = [
            AnswerFrame(one.id, pack_ids((one.seed,)), pack_logprobs((-1.0,)), "stop")
            for one in group(0).answers
        ]
        return 200, b"".join(map(pack, [*frames, EndFrame()]))


@dataclass
class Sampled:
    answers: dict[str, bytes] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


def sample(member: Member, patience: float) -> Sampled:
    """Have the member sample a group."""
    sampled = Sampled()

    async def run(address: str) -> None:
        config = FleetConfig(
            "tiny", "float32", 64, 8, (address,), "key", patience=patience, probe_interval=0.01
        )
        pool = EnginePool(FleetEngines(config, sampled.lost.append), Named())  # type: ignore[arg-type]

        def put(answer: AnswerFrame) -> None:
            sampled.answers[answer.id] = answer.ids

        both = [asyncio.create_task(pool.watch(())), asyncio.create_task(pool.sample(group(0), put))]
        [first, *_], others = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        await asyncio.wait(both)
        first.result()

    with serving(member) as address:
        asyncio.run(run(address))
    return sampled


def test_a_member_is_probed_again_after_any_number_of_losses() -> None:
    member = Member(failures=5)

    sampled = sample(member, patience=60.0)

    assert sampled.answers == expected(0)
    assert member.groups == 6
    assert [reason.partition(": ")[2] for reason in sampled.lost] == [
        "it answered with 500: out of memory"
    ] * MAX_REPORTED


def test_members_that_only_answer_probes_are_none() -> None:
    with pytest.raises(
        NoMember, match=r"No sampler of tiny at .* has (sampled an answer|answered) for 0 s: .*out of memory"
    ):
        sample(Member(failures=1000), patience=0.1)


class OfAnotherRelease(Member):
    def __call__(self, path: str, sent: Any) -> tuple[int, str | bytes]:
        return OTHER_PROTOCOL, "This sampler speaks protocol 1, and its client 2."


def test_samplers_of_another_release_are_left_out_and_named() -> None:
    with pytest.raises(
        NoMember, match=r"No sampler of tiny .* of another release: This sampler speaks protocol 1"
    ):
        sample(OfAnotherRelease(failures=0), patience=0.1)


def test_a_member_that_keeps_failing_ends_nothing_while_another_one_samples() -> None:
    """The other one may be in the middle of answers that take longer than the patience."""

    async def run(addresses: tuple[str, ...]) -> None:
        config = FleetConfig("tiny", "float32", 64, 8, addresses, "key", patience=0.1, probe_interval=0.01)
        engines, cause = FleetEngines(config, lambda reason: None), EngineLost("out of memory")
        watching = asyncio.create_task(engines.watch((), lambda facts: None))
        while len(engines.ready) < 2:
            await asyncio.sleep(0.001)
        failing, other = engines.ready
        began = time.monotonic()
        while time.monotonic() - began < 3 * config.patience:
            await engines.lose(failing, cause)
            await asyncio.sleep(0.001)

        await engines.lose(failing, cause)
        with pytest.raises(NoMember, match="has sampled an answer for 0 s"):
            await engines.lose(other, cause)
        watching.cancel()
        await asyncio.wait([watching])

    with serving(Member(0)) as one, serving(Member(0)) as two:
        asyncio.run(run((one, two)))
