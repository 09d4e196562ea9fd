"""The continuous batch over transformers: every row as if it were alone, with its own adapter."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from core.registry import BaseModelEntry
from core.response_format import SchemaTooLarge, response_schema
from tests.present import untyped
from tests.tiny import WORDS, make_byte_model
from worker.model.decoding import CopiedDecoding
from worker.model.generation import choose
from worker.model.policy import Policy, load_base
from worker.serving.continuous import ContinuousEngine, ServedAdapter, ServedModel
from worker.serving.engine import GenerationRequest, Token

# Of which llguidance cannot follow all: each of the branches is open when an answer begins.
TOO_LARGE = {
    "anyOf": [
        {
            "type": "array",
            "items": {
                "type": "array",
                "items": {"type": "array", "items": {"type": "string", "pattern": f"^x{{{n}}}y*$"}},
            },
        }
        for n in range(299)
    ]
}
TEMPERATE: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}


def ask(length: int = 4, adapter: Path | None = None, **options: Any) -> GenerationRequest:
    defaults: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 1,
        "max_tokens": 12,
        "response_schema": "",
        "stop_ids": frozenset({WORDS.index("<end>")}),
        "top_logprobs": 3,
    }
    return GenerationRequest(prompt_ids=tuple(range(6, 6 + length)), adapter=adapter, **defaults | options)


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[Callable[..., ContinuousEngine]]:
    engines = []

    def make(folder: Path = tiny_model, **options: Any) -> ContinuousEngine:
        entry = BaseModelEntry(path=folder, dtype="float32", context=128)
        engines.append(ContinuousEngine(load_base("tiny", entry, folder, "cpu"), **options))
        return engines[-1]

    yield make
    for engine in engines:
        asyncio.run(engine.close())


@pytest.fixture
def adapters(make_policy: Callable[..., Policy], tmp_path: Path) -> dict[Path, Policy]:
    """Two that have learned different things, each with the policy that it was saved from."""
    policies = {tmp_path / str(seed): make_policy(moved=True, seed=seed) for seed in (1, 2)}
    for folder, policy in policies.items():
        policy.save(folder)
    return policies


def answer(engine: ContinuousEngine, *asks: GenerationRequest) -> list[Any]:
    async def one(ask: GenerationRequest) -> list[Any]:
        return [token async for token in engine.generate(ask)]

    async def everyone() -> list[Any]:
        return list(await asyncio.gather(*map(one, asks)))

    return asyncio.run(everyone())


@pytest.mark.slow
def test_greedy_answers_of_mixed_adapters_are_those_of_transformers_own_generate(
    make_engine: Callable[..., ContinuousEngine], adapters: dict[Any, Any]
) -> None:
    """Base model and two adapters in one batch, prompts of different lengths; logprobs are of a plain forward pass."""
    folders = [None, *adapters]
    asks = [ask(length, folders[length % 3]) for length in range(1, 25)]
    engine = make_engine()
    answers = answer(engine, *asks)

    assert engine.steps < len(asks) * 12 / 3, "they were not answered together"
    for asked, tokens in zip(asks, answers, strict=True):
        policy = adapters[asked.adapter or folders[1]]
        ids = torch.tensor([asked.prompt_ids])
        with torch.no_grad(), contextlib.nullcontext() if asked.adapter else policy.as_base():
            expected = policy.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )
            logprobs = (
                policy.model(expected, use_cache=False).logits[0].log_softmax(-1)[ids.shape[1] - 1 : -1]
            )
        written = expected[0, ids.shape[1] :].tolist()
        assert [token.id for token in tokens] == written
        assert [token.logprob for token in tokens] == pytest.approx(
            logprobs[range(len(written)), written].tolist(), abs=1e-4
        )
        assert [dict(token.top) for token in tokens] == [
            pytest.approx(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)), abs=1e-4)
            for best in (row.topk(3) for row in logprobs)
        ]


def test_the_adapters_of_that_test_say_different_things(
    make_engine: Callable[..., ContinuousEngine], adapters: dict[Any, Any]
) -> None:
    said = answer(make_engine(), *(ask(9, folder) for folder in (None, *adapters)))

    assert len({tuple(token.id for token in tokens) for tokens in said}) == 3


@pytest.mark.slow
def test_an_answer_depends_on_its_seed_and_on_nothing_else_in_the_batch(
    make_engine: Callable[..., ContinuousEngine], adapters: dict[Any, Any]
) -> None:
    asks = [ask(5, folder, seed=seed, **TEMPERATE) for seed in range(6) for folder in (None, *adapters)]
    engine = make_engine()
    together = answer(engine, *asks)
    alone = [answer(engine, asked)[0] for asked in asks]

    assert [[token.id for token in tokens] for tokens in together] == [[t.id for t in ts] for ts in alone]
    assert len({tuple(token.id for token in tokens) for tokens in alone}) > 10


@pytest.mark.slow
def test_more_than_fit_wait_for_their_turn(make_engine: Callable[..., ContinuousEngine]) -> None:
    answers = answer(make_engine(most_rows=3), *(ask(3, seed=seed, **TEMPERATE) for seed in range(10)))

    assert all(tokens[-1].last for tokens in answers)


def test_who_leaves_is_not_computed_for(make_engine: Callable[..., ContinuousEngine]) -> None:
    engine = make_engine()

    async def leave() -> list[Token]:
        tokens = engine.generate(ask(max_tokens=100, seed=3, **TEMPERATE))
        await anext(tokens)
        await tokens.aclose()
        others = [token async for token in engine.generate(ask(max_tokens=3))]
        return others

    assert asyncio.run(leave())[-1].last
    assert engine.steps < 50


@pytest.mark.slow
def test_an_answer_is_held_to_its_own_schema_and_its_neighbours_to_none(
    make_engine: Callable[..., ContinuousEngine], tmp_path: Path
) -> None:
    engine = make_engine(make_byte_model(tmp_path / "bytes"))
    schemas = [response_schema({"enum": ["yes"]}), response_schema({"type": "boolean"}), ""]
    answers = answer(engine, *(ask(response_schema=schema, max_tokens=40, **TEMPERATE) for schema in schemas))
    said = [engine.tokenizer.decode([t.id for t in tokens], skip_special_tokens=True) for tokens in answers]

    assert said[0] == '"yes"'
    assert said[1] in ("true", "false")
    assert said[2] not in ('"yes"', "true", "false")


@pytest.mark.slow
def test_a_schema_that_allows_too_much_at_once_ends_its_own_answer_alone(
    make_engine: Callable[..., ContinuousEngine], tmp_path: Path
) -> None:
    engine = make_engine(make_byte_model(tmp_path / "bytes"))

    async def beside() -> list[Any]:
        other = engine.generate(ask(max_tokens=60, **TEMPERATE))
        first = await anext(other)
        with pytest.raises(SchemaTooLarge, match="max is 2000"):
            [
                token
                async for token in engine.generate(
                    ask(response_schema=response_schema(TOO_LARGE), max_tokens=60)
                )
            ]
        return [first, *[token async for token in other]]

    assert asyncio.run(beside())[-1].last


class FailingDecoding(CopiedDecoding):
    failures: Sequence[Exception] = ()

    def next(self, token_R: torch.Tensor) -> torch.Tensor:
        if isinstance(self.failures, list) and self.failures:
            raise self.failures.pop()
        return super().next(token_R)


class Failing(ServedModel):
    """Fails to write with each of `failures` once, after the model has checked itself."""

    failures: Sequence[Exception] = ()

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        self.failures = [ZeroDivisionError()]

    def decoding(self, prompts_P: Sequence[Sequence[int]], prompt_R: Sequence[int]) -> CopiedDecoding:
        decoding = FailingDecoding(self._decoder, prompts_P, prompt_R, self.device, self._joined)
        decoding.failures = self.failures
        return decoding


class Gated(ServedModel):
    """Holds the first reading until `go`, and remembers the lengths of the prompts of each reading after that.

    The model reads before that, to check itself.
    """

    checked = False

    def __init__(self, base: Any) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.readings: list[list[int]] = []
        super().__init__(base)
        self.checked = True

    def decoding(self, prompts_P: Sequence[Sequence[int]], prompt_R: Sequence[int]) -> CopiedDecoding:
        if self.checked and not self.go.is_set():
            self.begun.set()
            assert self.go.wait(10)
        elif self.checked:
            self.readings.append([len(prompt) for prompt in prompts_P])
        return super().decoding(prompts_P, prompt_R)


class GatedFailing(Gated, Failing):
    pass


def test_a_failure_reaches_those_it_concerns_and_the_next_is_answered(
    make_engine: Callable[..., ContinuousEngine],
) -> None:
    engine = make_engine(served=Failing)
    with pytest.raises(ZeroDivisionError):
        answer(engine, ask())

    assert answer(engine, ask())[0][-1].last


def together(engine: ContinuousEngine, *asks: GenerationRequest) -> list[Any]:
    """Their answers, when they arrive while another prompt is read. The engine's model is `Gated`."""

    async def everyone() -> list[Any]:
        first = asyncio.create_task(collect(engine, ask(2, max_tokens=1)))
        assert await asyncio.to_thread(untyped(engine.model).begun.wait, 10)
        answering = [asyncio.create_task(collect(engine, one)) for one in asks]
        while engine.arriving < len(asks):
            await asyncio.sleep(0)
        untyped(engine.model).go.set()
        await first
        return list(await asyncio.gather(*answering, return_exceptions=True))

    return asyncio.run(everyone())


async def collect(engine: ContinuousEngine, ask: GenerationRequest) -> list[Any]:
    return [token async for token in engine.generate(ask)]


def test_a_long_prompt_and_short_ones_are_not_read_as_if_all_were_long(
    make_engine: Callable[..., ContinuousEngine],
) -> None:
    """They are padded to the longest; an n of 4 is four rows of one prompt."""
    asks = [ask(30), *(ask(length, seed=seed) for length in (3, 4, 5) for seed in range(4))]
    engine = make_engine(served=Gated, most_prompt_tokens=40)

    assert all(tokens[-1].last for tokens in together(engine, *asks))
    assert untyped(engine.model).readings == [[30], [3, 4, 5]]


def test_a_failure_leaves_those_alone_that_wait_for_their_turn(
    make_engine: Callable[..., ContinuousEngine],
) -> None:
    failed, answered = together(make_engine(served=GatedFailing, most_rows=1), ask(3), ask(4))

    assert isinstance(failed, ZeroDivisionError)
    assert answered[-1].last


@pytest.mark.slow
def test_an_adapter_under_a_new_name_is_read_anew(
    make_engine: Callable[..., ContinuousEngine], make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    """What was trained again lies in a folder of another name; nothing of the old one is used."""
    engine = make_engine()
    old, new = make_policy(moved=True, seed=1), make_policy(moved=True, seed=5)
    old.save(tmp_path / "old")
    before = answer(engine, ask(9, tmp_path / "old"))
    new.save(tmp_path / "new")
    after = answer(engine, ask(9, tmp_path / "new"), ask(9, tmp_path / "old"))

    assert [t.logprob for t in after[0]] != pytest.approx([t.logprob for t in before[0]], abs=1e-2)
    assert [t.logprob for t in after[1]] == pytest.approx([t.logprob for t in before[0]], abs=1e-4)


class Reading(ServedModel):
    """Remembers which adapters it has read; a second reading frees the first, or 0.3 s do."""

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        self.folders: list[Path] = []
        self.second = threading.Event()

    def lora(self, folder: Path) -> ServedAdapter:
        self.folders.append(folder)
        if len(self.folders) > 1:
            self.second.set()
        self.second.wait(0.3)
        return super().lora(folder)


@pytest.mark.slow
def test_an_adapter_that_many_ask_for_at_once_is_read_once(
    make_engine: Callable[..., ContinuousEngine], adapters: dict[Any, Any]
) -> None:
    """Two copies of it would be two adapters to the batch, and what is forgotten must not be what another reads."""
    engine = make_engine(served=Reading)

    answer(engine, *(ask(9, next(iter(adapters)), seed=seed) for seed in range(4)))

    assert len(untyped(engine.model).folders) == 1


@pytest.mark.slow
def test_closing_an_engine_ends_its_thread_and_frees_its_weights(
    make_engine: Callable[..., ContinuousEngine],
) -> None:
    import weakref

    engine = make_engine()
    answer(engine, ask())
    weights = weakref.ref(engine.model)
    asyncio.run(engine.close())
    assert engine.lost
    untyped(engine).model = None
    gc.collect()

    assert weights() is None


def test_top_p_keeps_the_likeliest_tokens_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    draws = [number / 100 for number in range(100)]
    chosen = [choose(logits, torch.tensor([draw]), 1.0, torch.tensor([0.7]))[0].item() for draw in draws]

    assert set(chosen) == {0, 1}
    assert chosen.count(0) == pytest.approx(62, abs=2)


def test_each_row_has_its_own_temperature() -> None:
    logits = torch.tensor([[1.0, 0.9], [1.0, 0.9]])

    tokens, _ = choose(logits, torch.tensor([0.99, 0.99]), torch.tensor([0.0, 1.0]))

    assert tokens.tolist() == [0, 1]
