"""Episodes of the user's own agent: where an answer goes in the tree, what is never sampled twice, and leases."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from core.conversations import Message, Tools
from core.errors import EpisodeRefused
from core.jobs.hyperparameters import Hyperparameters, resolve
from graders.tools.episode import NO_RESULT
from graders.tools.protocol import ToolsFail
from graders.types import Grade
from tests.worker.test_episodes import FUNCTIONS, LIMITS, PROMPT, SAMPLING, Script, read_calls, said
from worker.recording import metrics
from worker.refusals import PausedWhileWaiting
from worker.rollout.agent_episodes import Board, ChatRequest, Completed, Game, ignored_of
from worker.rollout.agent_sampler import AgentLink, AgentRules, AgentSampler
from worker.rollout.episodes import EpisodeLimits
from worker.sampling import Answer, Sampling
from worker.types import NEW_ROOT, NO_ANSWER, Group, Prompt, Rollout

ROLES = {"system": 50, "user": 51, "assistant": 52, "tool": 53}
ASK: Message = {"role": "user", "content": "?"}
# As `Words` renders it: the prompt of the row.
ROW = Prompt(7, (60, 61, 51, 1, 52), {"messages": [ASK], "tools": FUNCTIONS})


class Words:
    """Implements Rendering: a token for each role, the length of each word, and 60 and more for each tool."""

    takes_several = True

    def conversation(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        roles = [token for message in messages for token in self._of(message)]
        return (*(60 + number for number in range(len(tools))), *roles, ROLES["assistant"])

    def behind(self, message: Message, further: Sequence[Message], tools: Tools) -> tuple[int, ...] | None:
        if any(one["content"] == "rewrite" for one in further):
            return None
        return (*(token for one in further for token in self._of(one)), ROLES["assistant"])

    def _of(self, message: Message) -> list[int]:
        calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        return [ROLES[message["role"]], *map(len, [*(message["content"] or "").split(), *calls])]


@dataclass
class Counted:
    """Implements SampledTurns: numbers its answers, and writes down what they were drawn for."""

    texts: Sequence[str] = ()
    drawn: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    free: asyncio.Event | None = None  # answers wait for it

    async def next(self, prompt: Prompt, member: int) -> Rollout:
        number = len(self.drawn)
        self.drawn.append((prompt.ids, prompt.ask))
        if self.free is not None:
            await self.free.wait()
        return said(self.texts[number] if number < len(self.texts) else f"a{number}")


def game(calls: Any, limits: EpisodeLimits = LIMITS, **options: Any) -> Game:
    return Game(calls, SAMPLING, read_calls, Words(), limits, **options)


def played(
    agent: Callable[[Callable[..., Awaitable[Message]]], Awaitable[None]],
    calls: Counted,
    limits: EpisodeLimits = LIMITS,
) -> Rollout:
    """The episode of an agent that gets a function which asks for the next message."""

    async def play() -> Rollout:
        board = Board(game(calls, limits), lambda: "episode", 60)
        playing = asyncio.create_task(board.play(ROW, 0, "trace"))
        [leased] = await board.lease(1, 60)

        async def ask(*messages: Message, tools: Tools = FUNCTIONS, **options: Any) -> Message:
            answer = await board.ask(leased["id"], ChatRequest(messages, tools, **options))
            message: Message = answer["choices"][0]["message"]
            return message

        await agent(ask)
        board.complete(leased["id"], Completed("ready"))
        return await playing

    return asyncio.run(play())


def result_of(message: Message, content: str = "42") -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": content} for call in message["tool_calls"]
    ]


def shape(rollout: Rollout) -> list[tuple[int | None, tuple[int, ...], str]]:
    return [(node.parent, node.context_ids, node.answer.text) for node in rollout.nodes]


def test_a_request_that_goes_on_stays_on_the_exact_tokens_of_its_branch() -> None:
    async def agent(ask: Any) -> None:
        first = await ask(ASK)
        # As clients send it back: without content, and with the arguments spelled in another way.
        [call] = first["tool_calls"]
        again = {"role": "assistant", "content": "", "tool_calls": [_spelled(call, '{ "q" : 1 }')]}
        await ask(ASK, again, *result_of(first))

    calls = Counted(['search:{"q":1}', "it is 42"])

    rollout = played(agent, calls)

    assert [ids for ids, _ in calls.drawn] == [ROW.ids, (*ROW.ids, 14, 53, 2, 52)]
    assert shape(rollout) == [(None, (), 'search:{"q":1}'), (0, (53, 2, 52), "it is 42")]
    assert rollout.episode is not None
    assert [message["role"] for message in rollout.episode.messages] == ["assistant", "tool", "assistant"]
    assert (rollout.episode.stop, rollout.episode.turns) == ("final", 2)
    assert [call["output"] for call in rollout.tool_calls] == ["42"]


def _spelled(call: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def test_an_edited_history_branches_where_its_tokens_differ() -> None:
    async def agent(ask: Any) -> None:
        first = await ask(ASK)
        edited = {"role": "assistant", "content": "no"}
        await ask(ASK, first, {"role": "user", "content": "more"})
        await ask(ASK, edited, {"role": "user", "content": "more"})

    rollout = played(agent, Counted(["aaa", "b", "c"]))

    assert shape(rollout) == [
        (None, (), "aaa"), (0, (51, 4, 52), "b"), (None, (2, 51, 4, 52), "c")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change", [{"tools": FUNCTIONS[:1]}, {"system": {"role": "system", "content": "be brief"}}]
)
def test_other_tools_or_another_system_prompt_begin_a_tree_of_their_own(change: Mapping[str, Any]) -> None:
    system = [change["system"]] if "system" in change else []
    tools = change.get("tools", FUNCTIONS)

    async def agent(ask: Any) -> None:
        await ask(ASK)
        await ask(*system, ASK, tools=tools)

    rollout = played(agent, Counted(["a", "b"]))

    whole = Words().conversation([*system, ASK], tools)
    assert shape(rollout) == [(None, (), "a"), (NEW_ROOT, whole, "b")]


def test_a_template_that_does_not_continue_behind_an_answer_gets_the_whole_conversation() -> None:
    async def agent(ask: Any) -> None:
        await ask(ASK, await ask(ASK), {"role": "user", "content": "rewrite"})

    rollout = played(agent, Counted(["aaa", "b"]))

    assert shape(rollout) == [(None, (), "aaa"), (0, (51, 7, 52), "b")]  # its tokens are the same here


def test_a_request_that_is_asked_again_has_a_sibling_with_another_seed() -> None:
    system: Message = {"role": "system", "content": "be brief"}

    async def agent(ask: Any) -> None:
        await asyncio.gather(ask(system, ASK), ask(system, ASK))

    calls = Counted(["a", "b"])

    rollout = played(agent, calls)

    whole = Words().conversation([system, ASK], FUNCTIONS)
    assert calls.drawn == [(whole, 0), (whole, 1)]
    assert [(node.parent, node.context_ids) for node in rollout.nodes] == [
        (NEW_ROOT, whole),
        (0, ()),
        (0, ()),
    ]
    assert rollout.nodes[0].answer is NO_ANSWER
    assert len({SAMPLING.turn_seed(replace(ROW, ids=whole, ask=ask), 0) for ask in (0, 1)}) == 2


@pytest.mark.parametrize("options", [{"key": "k"}, {"is_retry": True}])
def test_a_retry_gets_the_first_answer_and_nothing_is_sampled(options: Mapping[str, Any]) -> None:
    answers: list[Message] = []

    async def agent(ask: Any) -> None:
        first = {} if options.get("is_retry") else options
        answers.extend(await asyncio.gather(ask(ASK, **first), ask(ASK, **options)))
        answers.append(await ask(ASK, **options))

    calls = Counted()

    rollout = played(agent, calls)

    assert len(calls.drawn) == len(rollout.nodes) == 1
    assert answers[0] == answers[1] == answers[2]


def test_an_idempotency_key_of_another_request_is_refused() -> None:
    async def agent(ask: Any) -> None:
        await ask(ASK, key="k")
        with pytest.raises(EpisodeRefused, match="used for another request") as refused:
            await ask(ASK, ASK, key="k")
        assert refused.value.status_code == 400

    played(agent, Counted())


@pytest.mark.parametrize(
    ("limits", "stop"),
    [(EpisodeLimits(calls=1, context=100), "max_steps"), (EpisodeLimits(calls=9, context=10), "context")],
)
def test_what_an_agent_sampled_before_a_limit_is_graded_also_if_the_agent_then_fails(
    limits: EpisodeLimits, stop: str
) -> None:
    async def play() -> Rollout:
        board = Board(game(Counted(["aa bb"]), limits), lambda: "episode", 60)
        playing = asyncio.create_task(board.play(ROW, 0, "trace"))
        [leased] = await board.lease(1, 60)
        first = await board.ask(leased["id"], ChatRequest([ASK], FUNCTIONS))
        further = [ASK, first["choices"][0]["message"], ASK]
        with pytest.raises(EpisodeRefused, match="Complete it: what was sampled is graded"):
            await board.ask(leased["id"], ChatRequest(further, FUNCTIONS))
        board.complete(leased["id"], Completed("failed"))
        return await playing

    rollout = asyncio.run(play())

    assert rollout.episode is not None
    assert (rollout.episode.stop, rollout.is_truncated, len(rollout.nodes)) == (stop, True, 1)


class Copy(dict[str, Any]):
    """A message that can be watched."""


def test_a_message_that_a_conversation_repeats_is_kept_once() -> None:
    async def agent(ask: Any) -> None:
        first = await ask(ASK)
        copy = Copy(ASK)
        watched = weakref.ref(copy)
        await ask(copy, first, ASK)
        del copy
        await asyncio.sleep(0)
        gc.collect()
        assert watched() is None

    played(agent, Counted())


async def _one_leased(
    calls: Counted, limits: EpisodeLimits = LIMITS
) -> "tuple[Board, asyncio.Task[Rollout]]":
    board = Board(game(calls, limits), lambda: "episode", 60)
    playing = asyncio.create_task(board.play(ROW, 0, "trace"))
    await board.lease(1, 60)
    return board, playing


LONG: Message = {"role": "user", "content": "one two three four five"}


def test_an_agent_that_shortens_its_conversation_at_a_limit_ends_as_any_other() -> None:
    async def agent(ask: Any) -> None:
        first = await ask(ASK)
        with pytest.raises(EpisodeRefused, match="has room for"):
            await ask(ASK, first, LONG)
        await ask(ASK, first, ASK)

    rollout = played(agent, Counted(), EpisodeLimits(calls=9, context=14))

    assert rollout.episode is not None
    assert (rollout.episode.stop, rollout.is_truncated, len(rollout.nodes)) == ("final", False, 2)


def test_an_episode_whose_first_request_is_too_long_says_so() -> None:
    async def play() -> Rollout:
        board, playing = await _one_leased(Counted(), EpisodeLimits(calls=9, context=10))
        with pytest.raises(EpisodeRefused):
            await board.ask("episode", ChatRequest([LONG], FUNCTIONS))
        board.complete("episode", Completed("ready", 1.0))
        return await playing

    rollout = asyncio.run(play())

    assert rollout.is_discarded
    assert rollout.episode is not None
    assert "has room for 10 tokens" in rollout.episode.problem


def test_a_reward_for_no_answer_is_refused() -> None:
    async def play() -> None:
        board, playing = await _one_leased(Counted())
        with pytest.raises(EpisodeRefused, match="no answer yet") as refused:
            board.complete("episode", Completed("ready", 1.0))
        assert (refused.value.status_code, refused.value.param) == (400, "reward")
        await board.ask("episode", ChatRequest([ASK]))
        board.complete("episode", Completed("ready", 1.0))
        await playing

    asyncio.run(play())


def test_behind_an_answer_that_was_cut_the_tokens_of_the_answer_before_it_stay() -> None:
    async def agent(ask: Any) -> None:
        first = await ask(ASK)
        cut = await ask(ASK, first, ASK)
        await ask(ASK, first, ASK, cut, ASK)

    rollout = played(agent, Cut(["aaa", "bb", "c"]))

    assert [node.parent for node in rollout.nodes] == [None, 0, 0]


class Cut(Counted):
    """The second answer is cut at its limit of tokens."""

    async def next(self, prompt: Prompt, member: int) -> Rollout:
        answer = await super().next(prompt, member)
        return said(answer.text, "length" if len(self.drawn) == 2 else "stop")


def test_a_refused_request_is_not_kept() -> None:
    async def play() -> None:
        board, playing = await _one_leased(Counted(), EpisodeLimits(calls=9, context=10))
        request = ChatRequest([LONG], FUNCTIONS)
        watched = weakref.ref(request)
        with pytest.raises(EpisodeRefused):
            await board.ask("episode", request)
        del request
        await asyncio.sleep(0)
        gc.collect()
        playing.cancel()
        assert watched() is None

    asyncio.run(play())


def test_an_abandoned_episode_is_leased_once_more_and_then_has_no_reward() -> None:
    async def play() -> Rollout:
        board = Board(game(Counted()), map("episode_{}".format, count()).__next__, 0.0)
        playing = asyncio.create_task(board.play(ROW, 0, "trace"))
        for _ in range(2):
            [leased] = await board.lease(1, 60)
        rollout = await playing
        with pytest.raises(EpisodeRefused, match="its deadline has passed") as refused:
            await board.ask(leased["id"], ChatRequest([ASK]))
        assert refused.value.status_code == 409
        return rollout

    rollout = asyncio.run(play())

    assert rollout.is_discarded
    assert rollout.episode is not None
    assert rollout.episode.problem == "the agent did not complete it in 0 s"


def test_a_request_that_gets_no_episode_waits_for_the_next_one() -> None:
    async def play() -> None:
        board = Board(game(Counted()), lambda: "episode", 60)
        asking = [asyncio.create_task(board.lease(1, 60)) for _ in range(2)]
        await asyncio.sleep(0)
        playing = asyncio.create_task(board.play(ROW, 0, "trace"))
        for _ in range(20):  # until both have seen it
            await asyncio.sleep(0)
        assert [one.done() for one in asking] == [True, False]
        board.close()
        assert await asking[1] == []
        playing.cancel()

    asyncio.run(play())


def test_the_first_completion_of_an_episode_counts() -> None:
    async def play() -> Rollout:
        board = Board(game(Counted()), lambda: "episode", 60)
        playing = asyncio.create_task(board.play(ROW, 0, "trace"))
        [leased] = await board.lease(1, 60)
        await board.ask(leased["id"], ChatRequest([ASK]))
        board.complete("episode", Completed("ready", 0.5))
        board.complete("episode", Completed("ready", 0.5))
        with pytest.raises(EpisodeRefused) as refused:
            board.complete("episode", Completed("ready", 1.0))
        assert refused.value.status_code == 409
        with pytest.raises(EpisodeRefused) as refused:
            await board.ask("episode", ChatRequest([ASK]))
        assert refused.value.status_code == 409
        return await playing

    rollout = asyncio.run(play())

    assert rollout.episode is not None
    assert rollout.episode.reward == 0.5


def test_a_completion_aborts_what_is_being_sampled() -> None:
    async def play() -> None:
        calls = Counted(free=asyncio.Event())
        board = Board(game(calls), lambda: "episode", 60)
        playing = asyncio.create_task(board.play(ROW, 0, "trace"))
        await board.lease(1, 60)
        asking = asyncio.create_task(board.ask("episode", ChatRequest([ASK])))
        while not calls.drawn:
            await asyncio.sleep(0)
        board.complete("episode", Completed("ready"))
        with pytest.raises(EpisodeRefused):
            await asking
        assert (await playing).is_discarded  # without an answer there is nothing to grade

    asyncio.run(play())


def test_tools_of_a_model_that_has_none_are_refused_by_name() -> None:
    async def play() -> None:
        board = Board(game(Counted(), tools_problem="the chat_template has none"), lambda: "episode", 60)
        playing = asyncio.create_task(board.play(ROW, 0, "trace"))
        await board.lease(1, 60)
        with pytest.raises(EpisodeRefused, match="chat_template") as refused:
            await board.ask("episode", ChatRequest([ASK], FUNCTIONS))
        assert (refused.value.status_code, refused.value.param) == (400, "tools")
        playing.cancel()

    asyncio.run(play())


def test_other_sampling_parameters_are_reported_once() -> None:
    reported: list[Mapping[str, Any]] = []

    async def note(asked: Mapping[str, Any]) -> None:
        reported.append(asked)

    answers = sampled(an_agent("ready", {"temperature": 0.2, "max_tokens": 9, "seed": 1}), on_ignored=note)

    assert len(answers) == 4
    assert reported == [{"temperature": 0.2, "seed": 1}]


def test_calls_whose_result_nobody_read_are_no_errors_of_tools() -> None:
    async def agent(ask: Any) -> None:
        first = await ask(ASK)
        await ask(ASK, first, *result_of(first))

    rollout = played(agent, Counted(['search:{"q":1}', 'search:{"q":2}']))

    assert [(call["output"], call["error"]) for call in rollout.tool_calls] == [
        ("42", None),
        (None, NO_RESULT),
    ]
    groups_P = [Group(ROW, (rollout,), (Grade(1.0),))]
    measured = metrics.of_step(
        step=1, total_steps=1, graders=(), settings=resolve(Hyperparameters(), rows=1, parameters=1, context=9),
        train_P=groups_P, resampled_P=(), signals_P=(), valid_P=None, update=None, seconds={},
    )  # fmt: skip
    assert (measured.tool_calls_mean, measured.tool_errors_share) == (1, 0)


def test_the_jobs_own_sampling_parameters_are_no_others() -> None:
    asked = {"temperature": SAMPLING.temperature, "top_p": 1.0, "max_tokens": SAMPLING.max_completion_tokens}

    assert ignored_of(asked, SAMPLING) == {}


async def _nothing(asked: Any) -> None:
    pass


def sampled(
    serve: Callable[[Board], Any],
    script: Any = None,
    waiting: Callable[[bool], Awaitable[None]] = _nothing,
    on_ignored: Callable[[Mapping[str, Any]], Awaitable[None]] = _nothing,
) -> list[Answer]:
    rules = AgentRules("job", read_calls, Words(), LIMITS)
    link = AgentLink(serve, map("episode_{}".format, count()).__next__, waiting, on_ignored)
    sampler = AgentSampler(script or Script(lambda member: [said("a")] * 9), rules, link, 0.0)

    async def sample() -> list[Answer]:
        return [answer async for answer in sampler.sample([PROMPT, replace(PROMPT, line=8)], SAMPLING)]

    return asyncio.run(sample())


def an_agent(status: str, sampling: Mapping[str, Any] = {}) -> Callable[[Board], Any]:
    """Plays all episodes with these parameters, and completes them so."""

    @asynccontextmanager
    async def serve(board: Board) -> AsyncIterator[None]:
        async def play() -> None:
            while True:
                for leased in await board.lease(8, 60):
                    await board.ask(
                        leased["id"], ChatRequest(leased["messages"], leased["tools"], sampling=sampling)
                    )
                    board.complete(leased["id"], Completed(status))  # type: ignore[arg-type]

        playing = asyncio.create_task(play())
        yield
        playing.cancel()

    return serve


def test_the_sampler_yields_an_episode_for_each_member_of_each_group() -> None:
    answers = sampled(an_agent("ready"))

    assert sorted((answer.prompt, answer.member) for answer in answers) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    traces = {answer.rollout.episode.trace_id for answer in answers if answer.rollout.episode}
    assert len(traces) == 4


def test_a_job_whose_agent_fails_most_episodes_pauses() -> None:
    with pytest.raises(ToolsFail, match="4 of 4 episodes were discarded because the agent failed"):
        sampled(an_agent("failed"))


@asynccontextmanager
async def no_agent(board: Board) -> AsyncIterator[None]:
    yield


def test_a_job_that_waits_for_an_agent_can_be_paused() -> None:
    async def paused(is_idle: bool) -> None:
        assert is_idle
        raise PausedWhileWaiting

    with pytest.raises(PausedWhileWaiting):
        sampled(no_agent, waiting=paused)


@dataclass
class Broken(Script):
    """A sampler whose engines are lost."""

    @asynccontextmanager
    async def turns(self, sampling: Sampling) -> AsyncIterator["Broken"]:
        yield self

    async def next(self, prompt: Prompt, member: int) -> Rollout:
        raise RuntimeError("the engine is lost")


def test_an_error_of_the_sampler_ends_the_step() -> None:
    @asynccontextmanager
    async def serve(board: Board) -> AsyncIterator[None]:
        async def play() -> None:
            [leased] = await board.lease(1, 60)
            await board.ask(leased["id"], ChatRequest(leased["messages"], leased["tools"]))

        playing = asyncio.create_task(play())
        yield
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    with pytest.raises(RuntimeError, match="the engine is lost"):
        sampled(serve, Broken(lambda member: ()))
