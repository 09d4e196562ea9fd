"""What any inference Engine must do. A new one is added to the parameters of `make_engine`."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from transformers import AutoTokenizer

from core.registry import BaseModelEntry
from tests.engines import END, ScriptedEngine
from worker.model.policy import load_base
from worker.serving.continuous import ContinuousEngine
from worker.serving.engine import Engine, GenerationRequest, Token

T = TypeVar("T")
ASK = GenerationRequest(
    prompt_ids=(6, 7, 8),
    adapter=None,
    temperature=1.0,
    top_p=1.0,
    seed=1,
    max_tokens=12,
    response_schema="",
    stop_ids=frozenset({END}),
    top_logprobs=None,
)


@pytest.fixture(params=["scripted", "continuous"])
def make_engine(request: pytest.FixtureRequest, byte_model: Path) -> Callable[[], Engine]:
    def make() -> Engine:
        if request.param == "scripted":
            return ScriptedEngine(AutoTokenizer.from_pretrained(byte_model))
        entry = BaseModelEntry(path=byte_model, dtype="float32", context=128)
        return ContinuousEngine(load_base("tiny", entry, byte_model, "cpu"))

    return make


async def tokens(engine: Engine, ask: GenerationRequest) -> list[Token]:
    return [token async for token in engine.generate(ask)]


def with_engine(make: Callable[[], Engine], use: Callable[[Engine], Awaitable[T]]) -> T:
    async def run() -> T:
        engine = make()
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def test_an_answer_ends_with_its_last_token_and_within_the_limit(make_engine: Callable[[], Engine]) -> None:
    for limit in (1, 12):
        ask = replace(ASK, max_tokens=limit)

        answer = with_engine(make_engine, partial(tokens, ask=ask))

        assert 1 <= len(answer) <= limit
        assert [token.last for token in answer] == [False] * (len(answer) - 1) + [True]


def test_an_answer_shorter_than_the_limit_ends_with_a_stop_token(make_engine: Callable[[], Engine]) -> None:
    async def use(engine: Engine) -> tuple[list[Token], frozenset[int]]:
        return await tokens(engine, replace(ASK, max_tokens=40)), engine.stop_ids(None)

    answer, stop_ids = with_engine(make_engine, use)

    assert len(answer) == 40 or answer[-1].id in stop_ids


@pytest.mark.parametrize("count", [None, 0, 2])
def test_log_probabilities_are_those_asked_for(make_engine: Callable[[], Engine], count: int | None) -> None:
    ask = replace(ASK, top_logprobs=count)

    for token in with_engine(make_engine, partial(tokens, ask=ask)):
        assert (token.logprob is None) == (count is None)
        assert len(token.top) == (count or 0)


def test_who_asks_at_once_is_answered_each(make_engine: Callable[[], Engine]) -> None:
    async def use(engine: Engine) -> list[list[Token]]:
        return await asyncio.gather(*(tokens(engine, replace(ASK, seed=seed)) for seed in range(4)))

    assert all(answer[-1].last for answer in with_engine(make_engine, use))


def test_who_leaves_early_disturbs_nobody(make_engine: Callable[[], Engine]) -> None:
    async def use(engine: Engine) -> list[Token]:
        leaving = engine.generate(ASK)
        await anext(leaving)
        staying = asyncio.create_task(tokens(engine, ASK))
        await leaving.aclose()
        assert not engine.lost
        return await staying

    assert with_engine(make_engine, use)[-1].last
