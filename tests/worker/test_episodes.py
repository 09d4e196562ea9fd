"""Episodes: what is sampled and called in which order, how they end, and what becomes of them."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from core.storage.message_rows import conversation_problems
from graders.tools.protocol import ToolFailed, ToolRequest, ToolResult, ToolsFail
from graders.tools.turns import MAX_CALLS, TOO_MANY_CALLS
from worker.rollout.episodes import EpisodeLimits, EpisodeSampler
from worker.sampling import Answer, Sampling
from worker.types import Call, ParsedAnswer, Prompt, Rollout

SAMPLING = Sampling(
    group_size=2, temperature=1.0, max_completion_tokens=4, job_seed=1, step=3, batch="train/3"
)
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "required": ["q"]}}}
    for name in ("search", "sum")
]
PROMPT = Prompt(7, (1, 2), {"messages": [{"role": "user", "content": "?"}], "tools": FUNCTIONS})
LIMITS = EpisodeLimits(calls=3, context=100)


def said(text: str, finish_reason: str = "stop") -> Rollout:
    """An answer of one token for each word. `name:argument` is a call."""
    ids = tuple(len(word) for word in text.split())
    return Rollout(ids, (-1.0,) * len(ids), text, "length" if finish_reason == "length" else "stop")


def read_calls(rollout: Rollout, row: Mapping[str, Any]) -> Rollout:
    if not row.get("tools"):
        return rollout
    words = [] if rollout.is_truncated else rollout.text.split()
    calls = tuple(Call(name, argument) for name, sign, argument in (w.partition(":") for w in words) if sign)
    if "{" in words:
        return replace(rollout, parsed=ParsedAnswer(rollout.text, error="a call is not JSON"))
    return replace(rollout, parsed=ParsedAnswer("" if calls else rollout.text, calls))


@dataclass
class Script:
    """Implements TurnSampler: the answers of each member in turn, and the tokens that it read before."""

    answers: Callable[[int], Sequence[Rollout]]
    read: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    @asynccontextmanager
    async def turns(self, sampling: Sampling) -> AsyncIterator["Script"]:
        yield self

    def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        raise AssertionError("episodes are sampled call by call")

    async def next(self, prompt: Prompt, member: int) -> Rollout:
        self.read.append((member, prompt.ids))
        place = self.places[member] = self.places.get(member, -1) + 1
        return self.answers(member)[place]


@dataclass
class Notes:
    """Implements Tools: writes calls down."""

    answer: Callable[[ToolRequest], ToolResult] = lambda call: ToolResult(call.arguments)
    calls: list[ToolRequest] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    async def call(self, call: ToolRequest) -> ToolResult:
        self.calls.append(call)
        return self.answer(call)

    async def end(self, trace_id: str) -> None:
        self.ended.append(trace_id)


@dataclass(frozen=True)
class Lengths:
    """Implements Suffixes: one token for each result, its length, between two zeros."""

    takes_several: bool = True

    def after(
        self,
        answer: Rollout,
        message: Mapping[str, Any],
        results: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[int, ...]:
        assert [call["id"] for call in message["tool_calls"]] == [one["tool_call_id"] for one in results]
        return (0, *(len(one["content"]) for one in results), 0)

    def fewest(self, results: Sequence[Mapping[str, Any]]) -> int:
        return len(results)


def episodes(
    script: Script,
    tools: Any = None,
    limits: EpisodeLimits = LIMITS,
    sampling: Sampling = SAMPLING,
    prompt: Prompt = PROMPT,
    *,
    takes_several: bool = True,
) -> list[Rollout]:
    suffixes = Lengths(takes_several)
    sampler = EpisodeSampler(script, tools or Notes(), read_calls, suffixes, limits, "job_1")

    async def sample() -> list[Answer]:
        return [answer async for answer in sampler.sample([prompt], sampling)]

    return [one.rollout for one in sorted(asyncio.run(sample()), key=lambda one: one.member)]


def one(*answers: Rollout, tools: Any = None, limits: EpisodeLimits = LIMITS) -> Rollout:
    [rollout] = episodes(Script(lambda member: answers), tools, limits, replace(SAMPLING, group_size=1))
    return rollout


def test_an_episode_goes_on_from_the_exact_tokens_of_its_answers_and_results() -> None:
    script = Script(lambda member: [said('search:{"q":1} sum:{"q":22}'), said("it is 23")])
    notes = Notes()

    first, second = episodes(script, notes)

    assert [ids for member, ids in script.read if member == 0] == [(1, 2), (1, 2, 14, 12, 0, 7, 8, 0)]
    assert [(node.parent, node.context_ids) for node in first.nodes] == [(None, ()), (0, (0, 7, 8, 0))]
    assert first.output_ids_T == (14, 12, 2, 2, 2)
    assert first.content == "it is 23"
    assert first.episode is not None
    assert first.episode.stop == "final"
    assert [message["role"] for message in first.episode.messages] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert [call["output"] for call in first.tool_calls] == ['{"q":1}', '{"q":22}']
    assert second.episode is not None
    assert second.episode.trace_id != first.episode.trace_id


def test_the_ids_of_episodes_and_calls_are_the_same_after_a_restart_and_no_other_call_has_them() -> None:
    answers = [said('search:{"q":1}'), said('search:{"q":1}'), said("done")]

    def calls(sampling: Sampling = SAMPLING) -> list[tuple[str, str]]:
        notes = Notes()
        episodes(Script(lambda member: answers), notes, sampling=sampling)
        return sorted((call.trace_id, call.id) for call in notes.calls)

    assert calls() == calls()
    assert len({call for _, call in calls() + calls(replace(SAMPLING, batch="valid/3"))}) == 8


@pytest.mark.parametrize(
    ("answers", "limits", "stop", "turns"),
    [
        ([said("no")], LIMITS, "final", 1),
        ([said("a b", "length")], LIMITS, "tokens", 1),
        ([said('search:{"q":1}')] * 3, LIMITS, "max_steps", 3),
        ([said('search:{"q":1}')] * 3, replace(LIMITS, context=9), "context", 1),
    ],
)
def test_an_episode_says_why_it_ended(
    answers: list[Rollout], limits: EpisodeLimits, stop: str, turns: int
) -> None:
    rollout = one(*answers, limits=limits)

    assert rollout.episode is not None
    assert (rollout.episode.stop, rollout.episode.turns) == (stop, turns)
    assert rollout.is_truncated == (stop != "final")


def test_the_calls_of_the_last_answer_that_an_episode_may_have_are_not_executed() -> None:
    notes = Notes()

    rollout = one(*[said('search:{"q":1}')] * 3, tools=notes)

    assert len(notes.calls) == 2
    assert [call["output"] for call in rollout.tool_calls] == ['{"q":1}', '{"q":1}', None]


def test_an_episode_ends_when_its_time_is_over() -> None:
    class Waiting(Notes):
        async def call(self, call: ToolRequest) -> ToolResult:
            await asyncio.Event().wait()
            raise AssertionError("nothing sets it")

    rollout = one(said('search:{"q":1}'), tools=Waiting(), limits=replace(LIMITS, seconds=0.0))

    assert rollout.episode is not None
    assert rollout.episode.stop == "time"
    assert [message["role"] for message in rollout.episode.messages] == ["assistant"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("find:{}", "there is no function 'find'"),
        ("search:{", "the arguments are not JSON"),
        ("search:{}", "'q' is a required property"),
        ("{", "a call is not JSON"),
    ],
)
def test_the_model_reads_what_is_wrong_with_a_call_and_nothing_is_sent(answer: str, error: str) -> None:
    notes = Notes()

    rollout = one(said(answer), said("sorry"), tools=notes)

    assert rollout.episode is not None
    [use] = rollout.episode.uses
    assert error in use.error
    assert json.loads(rollout.episode.messages[1]["content"])["error"]["message"] == use.error
    assert (notes.calls, rollout.episode.stop) == ([], "final")


def test_a_tool_that_fails_discards_its_episode_and_no_other() -> None:
    def fail(call: ToolRequest) -> ToolResult:
        if call.arguments == '{"q":0}':
            raise ToolFailed("HTTP 500: 'boom'")
        return ToolResult("fine")

    script = Script(lambda member: [said(f'search:{{"q":{member}}}'), said("done")])

    discarded, other = episodes(script, Notes(fail))

    assert discarded.episode is not None
    assert other.episode is not None
    assert (discarded.episode.stop, discarded.episode.problem) == ("discarded", "HTTP 500: 'boom'")
    assert other.episode.stop == "final"


def test_a_batch_of_which_most_episodes_are_discarded_pauses_the_job() -> None:
    def fail(call: ToolRequest) -> ToolResult:
        raise ToolFailed("HTTP 500: 'boom'")

    script = Script(lambda member: [said('search:{"q":1}') if member else said("done")])

    with pytest.raises(ToolsFail, match="2 of 3 episodes were discarded") as paused:
        episodes(script, Notes(fail), sampling=replace(SAMPLING, group_size=3))

    assert paused.value.data == {"episodes": 3, "failed": 2, "reasons": ["HTTP 500: 'boom'"] * 2}


def test_a_tool_of_which_most_calls_fail_ends_the_sampling() -> None:
    def fail(call: ToolRequest) -> ToolResult:
        raise ToolsFail.of_calls("search", 64, ["HTTP 500: 'boom'"] * 33)

    with pytest.raises(ToolsFail, match="33 of the newest 64 calls of the tool 'search' failed"):
        episodes(Script(lambda member: [said('search:{"q":1}')]), Notes(fail))


def test_a_job_pauses_although_another_call_of_the_answer_only_discards_its_episode() -> None:
    both = asyncio.Barrier(2)

    class Failing(Notes):
        async def call(self, call: ToolRequest) -> ToolResult:
            await both.wait()
            raise (
                ToolFailed("HTTP 500")
                if call.name == "search"
                else ToolsFail.of_calls("sum", 64, ["HTTP 500"] * 33)
            )

    with pytest.raises(ToolsFail):
        one(said('search:{"q":1} sum:{"q":2}'), tools=Failing())


def test_the_call_that_discards_an_episode_is_among_its_calls_with_its_error() -> None:
    def fail(call: ToolRequest) -> ToolResult:
        raise ToolFailed("HTTP 500: 'boom'")

    answers = {0: [said('search:{"q":1}')], 1: [said("done")]}
    rollout, _ = episodes(Script(answers.__getitem__), Notes(fail))

    assert [(call["output"], call["error"]) for call in rollout.tool_calls] == [(None, "HTTP 500: 'boom'")]


def test_a_timeout_that_is_not_the_limit_of_the_episode_is_an_error() -> None:
    def fail(call: ToolRequest) -> ToolResult:
        raise TimeoutError("of something else")

    with pytest.raises(TimeoutError, match="of something else"):
        one(said('search:{"q":1}'), tools=Notes(fail))


def test_results_that_cannot_fit_are_not_rendered() -> None:
    class Long(Lengths):
        def fewest(self, results: Sequence[Mapping[str, Any]]) -> int:
            return LIMITS.context

        def after(self, *given: Any) -> tuple[int, ...]:
            raise AssertionError("they do not fit")

    sampler = EpisodeSampler(
        Script(lambda member: [said('search:{"q":1}')]), Notes(), read_calls, Long(), LIMITS, "job_1"
    )

    async def sample() -> list[Answer]:
        return [answer async for answer in sampler.sample([PROMPT], replace(SAMPLING, group_size=1))]

    [answer] = asyncio.run(sample())

    assert answer.rollout.episode is not None
    assert answer.rollout.episode.stop == "context"


def test_results_are_rendered_beside_the_event_loop() -> None:
    class Elsewhere(Lengths):
        def after(self, *given: Any) -> tuple[int, ...]:
            assert threading.current_thread() is not threading.main_thread()
            return super().after(*given)

    sampler = EpisodeSampler(
        Script(lambda member: [said('search:{"q":1}'), said("done")]),
        Notes(),
        read_calls,
        Elsewhere(),
        LIMITS,
        "job_1",
    )

    async def sample() -> list[Answer]:
        return [answer async for answer in sampler.sample([PROMPT], replace(SAMPLING, group_size=1))]

    [answer] = asyncio.run(sample())

    assert answer.rollout.content == "done"


def test_an_answer_executes_a_bounded_number_of_calls() -> None:
    notes = Notes()

    rollout = one(
        said(" ".join(['search:{"q":1}'] * (MAX_CALLS + 2))),
        said("done"),
        tools=notes,
        limits=replace(LIMITS, context=1000),
    )

    assert len(notes.calls) == MAX_CALLS
    assert [call["error"] for call in rollout.tool_calls[-3:]] == [None, TOO_MANY_CALLS, TOO_MANY_CALLS]


def test_the_key_of_a_call_depends_on_its_episode_its_place_and_its_arguments() -> None:
    def keys(*answers: str) -> list[str]:
        notes = Notes()
        one(*map(said, answers), said("done"), tools=notes)
        return [call.key for call in notes.calls]

    first = keys('search:{"q":1} search:{"q":1}', 'search:{"q":1}')

    assert len(set(first)) == 3
    assert set(keys('search:{"q":1}')) < set(first)
    assert set(keys('search:{"q":2}')).isdisjoint(first)


def test_the_result_of_a_call_that_cannot_be_read_belongs_to_a_call_of_the_conversation() -> None:
    rollout = one(said("{"), said("sorry"))

    assert rollout.episode is not None
    assert list(conversation_problems("messages", {"messages": list(rollout.episode.messages)})) == []


def test_tools_of_all_episodes_and_of_one_answer_run_at_once() -> None:
    everyone = asyncio.Event()

    class Together(Notes):
        async def call(self, call: ToolRequest) -> ToolResult:
            self.calls.append(call)
            if len(self.calls) == 4:
                everyone.set()
            await everyone.wait()
            return ToolResult("")

    answers = [said('search:{"q":1} sum:{"q":2}'), said("done")]

    assert len(episodes(Script(lambda member: answers), Together())) == 2


def test_only_the_first_call_counts_where_the_template_takes_one() -> None:
    answers = [said('search:{"q":1} sum:{"q":2}'), said("done")]

    [rollout, _] = episodes(Script(lambda member: answers), takes_several=False)

    assert [call["function"]["name"] for call in rollout.tool_calls] == ["search"]


def test_a_row_without_tools_has_one_call() -> None:
    prompt = replace(PROMPT, item={"messages": []})

    [rollout, _] = episodes(Script(lambda member: [said("search:{}")]), prompt=prompt)

    assert rollout.episode is not None
    assert (rollout.episode.stop, rollout.content) == ("final", "search:{}")
