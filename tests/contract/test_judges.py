"""What any judge must do. A new one is added to JUDGES."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import pytest

from graders.build import build
from graders.judge.judges import HttpJudges, JudgeFailed, JudgeModel, JudgeReply, Judges, Message
from graders.spec import parse_grader
from graders.types import Grade, Sample
from tests.graders.servers import ScriptedServer, verdict

T = TypeVar("T")
SCHEMA = {
    "type": "object",
    "properties": {"steps": {"type": "array"}, "result": {"type": "number"}},
    "required": ["steps", "result"],
}
PROMPT = [{"role": "user", "content": "Rate this."}]
GRADER = {
    "type": "score_model",
    "name": "judged",
    "model": "judge",
    "input": [{"role": "user", "content": "{{sample.output_text}}"}],
    "range": [0, 1],
}


class Undecided:
    """Judges in this process: half of the points for everything."""

    @property
    def models(self) -> Collection[str]:
        return ["judge"]

    async def complete(
        self,
        model: str,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, Any],
        sampling: Mapping[str, Any],
    ) -> JudgeReply:
        if model not in self.models:
            raise JudgeFailed(f"no judge model {model} is configured")
        return JudgeReply(json.dumps({"steps": [], "result": 0.5}), prompt_tokens=3, completion_tokens=4)


@asynccontextmanager
async def in_process() -> AsyncIterator[Judges]:
    yield Undecided()


@asynccontextmanager
async def over_http() -> AsyncIterator[Judges]:
    async with (
        ScriptedServer([verdict(0.5)]) as url,
        HttpJudges({"judge": JudgeModel(f"{url}/v1")}) as judges,
    ):
        yield judges


Open = Callable[[], AbstractAsyncContextManager[Judges]]
JUDGES: dict[str, Open] = {"in_process": in_process, "over_http": over_http}


@pytest.fixture(params=JUDGES)
def judges(request: pytest.FixtureRequest) -> Open:
    return JUDGES[request.param]


def asked(judges: Open, use: Callable[[Judges], Awaitable[T]]) -> T:
    async def run() -> T:
        async with judges() as opened:
            return await use(opened)

    return asyncio.run(run())


def test_a_reply_is_json_of_the_schema_and_counts_its_tokens(judges: Open) -> None:
    reply = asked(judges, lambda one: one.complete("judge", PROMPT, schema=SCHEMA, sampling={}))

    assert isinstance(json.loads(reply.text)["result"], float)
    assert (reply.refusal, reply.finish_reason) == (None, "stop")
    assert reply.prompt_tokens > 0
    assert reply.completion_tokens > 0


def test_a_model_that_is_not_listed_fails_by_name(judges: Open) -> None:
    async def use(one: Judges) -> None:
        assert "other" not in one.models
        await one.complete("other", PROMPT, schema=SCHEMA, sampling={})

    with pytest.raises(JudgeFailed, match="other"):
        asked(judges, use)


def test_who_asks_the_same_at_once_is_told_the_same(judges: Open) -> None:
    async def use(one: Judges) -> list[JudgeReply]:
        return await asyncio.gather(
            *(one.complete("judge", PROMPT, schema=SCHEMA, sampling={}) for _ in range(3))
        )

    assert len({reply.text for reply in asked(judges, use)}) == 1


def test_a_model_grader_scores_with_it(judges: Open) -> None:
    async def use(one: Judges) -> Grade:
        return await build(parse_grader(GRADER), one).grade(Sample("an answer"), {})

    assert asked(judges, use).score == 0.5
