"""Episodes that the user's own agent plays: it leases one, asks for answers as of OpenAI's API, and completes it.

`Board` has the episodes of a step or a validation. Everything here runs in the event loop of the run.
docs/howto/own-agent.md describes the rules.
"""

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal, Protocol

from core.chat import token_usage
from core.conversations import Message, Tools, continued, spelled
from core.errors import EpisodeOver, EpisodeRefused
from graders.tools.episode import NO_RESULT, TRUNCATED, Episode, StopReason, ToolUse
from worker.refusals import ChatTemplateFailed
from worker.rollout.episodes import EpisodeLimits, ReadCalls, message_of, with_calls
from worker.rollout.token_tree import Parent, TokenTree
from worker.sampling import SampledTurns, Sampling
from worker.types import NO_ANSWER, Node, Prompt, Rollout

LEASES = 2  # of an episode, before it has no reward
Status = Literal["ready", "failed"]


class SamplerFailed(Exception):
    """The sampler gave no answer."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _over(episode: str) -> EpisodeOver:
    return EpisodeOver(f"The episode {episode} is completed, or its deadline has passed.")


class Rendering(Protocol):
    """The tokens of conversations. worker/model/suffixes.py: TemplateConversations."""

    @property
    def takes_several(self) -> bool:
        """Whether an answer may have several calls. Else its first call counts alone."""
        ...

    def conversation(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """A conversation, up to its next answer. Raises ChatTemplateFailed: the template rejects it."""
        ...

    def behind(self, message: Message, further: Sequence[Message], tools: Tools) -> tuple[int, ...] | None:
        """The tokens behind an answer up to the next one; None: the template does not continue behind it."""
        ...


@dataclass(frozen=True)
class ChatRequest:
    """A request of the agent for an answer."""

    messages: Sequence[Message]
    tools: Tools = ()
    parallel: bool = True  # False: the first call of the answer counts alone
    key: str = ""  # its Idempotency-Key
    is_retry: bool = False  # OpenAI's client repeats a request that it has sent before
    # Sampling parameters that it has, and that count only where they are the job's.
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Equal for equal requests."""
        content = [list(self.messages), list(self.tools), self.parallel]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Game:
    """The part that the episodes of a step or a validation have in common."""

    calls: SampledTurns
    sampling: Sampling
    read_calls: ReadCalls
    rendering: Rendering
    limits: EpisodeLimits
    tools_problem: str = ""  # why the model cannot have tools
    # Gets the sampling parameters of requests that ask for others than the job's.
    on_ignored: Callable[[Mapping[str, Any]], Awaitable[None]] | None = None
    # Conversations are rendered in one thread at a time: the tokens of a megabyte take 150 MB.
    in_turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Known:
    """A conversation that ends with an answer of the policy."""

    tools: str
    messages: Sequence[Message]
    place: int  # of the answer
    answer: Rollout


class AgentEpisode:
    """One lease of an episode: its tokens, and the answers that it has given."""

    def __init__(self, game: Game, id: str, prompt: Prompt, member: int, trace: str) -> None:
        """`id`: of the lease."""
        self.game, self.id, self.prompt, self.member, self.trace = game, id, prompt, member, trace
        self.limit: StopReason | None = None  # that the newest request would have exceeded
        self._exceeding = ""  # how
        self._tree = TokenTree(prompt.ids)
        self._known: list[Known] = []
        self._begun = 0
        self._asks: Counter[int] = Counter()  # by the hash of the tokens, which may be many
        self._messages: dict[bytes, Message] = {}  # each once: a conversation repeats those before it
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()
        self._by_key: dict[str, tuple[str, asyncio.Task[dict[str, Any]]]] = {}
        self._newest: dict[str, asyncio.Task[dict[str, Any]]] = {}  # by digest

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        """Return a chat completion. A repeated request gets the first answer, and nothing is sampled.

        Raises:
            EpisodeRefused: there is no answer.
            SamplerFailed: the run cannot continue.
        """
        digest = request.digest
        if request.key and request.key in self._by_key:
            first, task = self._by_key[request.key]
            if first != digest:
                message = "The Idempotency-Key was used for another request; use a new key for a new request."
                raise EpisodeRefused(400, message, code="idempotency_key_reused")
        elif request.is_retry and digest in self._newest:
            task = self._newest[digest]
        else:
            # In its own task: the client may leave and repeat the request.
            task = asyncio.create_task(self._answer(request))
            task.add_done_callback(lambda done: self._forget_failed(request, digest, done))
            self._tasks.add(task)
            self._newest[digest] = task
            if request.key:
                self._by_key[request.key] = digest, task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise _over(self.id) from None
            raise

    def _forget_failed(self, request: ChatRequest, digest: str, task: asyncio.Task[dict[str, Any]]) -> None:
        """Have a repetition of a request without an answer try again."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is None:
            return
        if self._newest.get(digest) is task:
            del self._newest[digest]
        if request.key and self._by_key.get(request.key, (digest, None))[1] is task:
            del self._by_key[request.key]

    async def _answer(self, request: ChatRequest) -> dict[str, Any]:
        if request.tools and self.game.tools_problem:
            problem = f"The request has tools, and {self.game.tools_problem}"
            raise EpisodeRefused(400, problem, param="tools")
        parent, context = await self._placed(request)
        ids = self._tree.path(parent) + context
        number = self._begin(ids)
        ask = self._asks[hash(ids)]
        self._asks[hash(ids)] += 1
        try:
            sampled = await self.game.calls.next(replace(self.prompt, ids=ids, ask=ask), self.member)
        except Exception as cause:
            raise SamplerFailed(cause) from cause
        answer = self._parsed(request, sampled, number)
        place = self._tree.add(parent, context, answer)
        message = message_of(answer)
        self._known.append(
            Known(spelled(request.tools), self._shared((*request.messages, message)), place, answer)
        )
        return _completion(answer, message, len(ids), f"{self.trace}/{number}")

    def _shared(self, messages: Sequence[Message]) -> Sequence[Message]:
        """These messages, without a second copy of an equal one."""
        digests = [sha256(json.dumps(one).encode()).digest() for one in messages]
        return [self._messages.setdefault(digest, one) for digest, one in zip(digests, messages, strict=True)]

    def _begin(self, ids: tuple[int, ...]) -> int:
        """Count an answer to these tokens, and return its number. Raises EpisodeRefused: it exceeds a limit."""
        limits, longest = self.game.limits, self.game.sampling.max_completion_tokens
        if self._begun >= limits.calls:
            raise self._exceeded("max_steps", f"has had max_episode_steps ({limits.calls}) answers")
        if len(ids) + longest > limits.context:
            raise self._exceeded(
                "context",
                f"has room for {limits.context} tokens, and this conversation has {len(ids)} before an answer of up "
                f"to {longest}",
            )
        self.limit, self._exceeding = None, ""
        self._begun += 1
        return self._begun - 1

    def _exceeded(self, limit: StopReason, what: str) -> EpisodeRefused:
        self.limit, self._exceeding = limit, f"the episode {what}"
        message = f"The episode {what}. Complete it: what was sampled is graded."
        code = "context_length_exceeded" if limit == "context" else "episode_limit"
        return EpisodeRefused(400, message, code=code)

    async def _placed(self, request: ChatRequest) -> tuple[Parent, tuple[int, ...]]:
        """Find the place of the tree behind which the answer goes, and the tokens between them."""
        found = self._continued(request)
        async with self.game.in_turn:
            if found is not None:
                known, further = found
                rendering = self.game.rendering
                behind = await asyncio.to_thread(rendering.behind, known.messages[-1], further, request.tools)
                if behind is not None:
                    return known.place, behind
            try:
                whole = await asyncio.to_thread(
                    self.game.rendering.conversation, request.messages, request.tools
                )
            except ChatTemplateFailed as cause:
                raise EpisodeRefused(400, str(cause), param="messages") from cause
        return self._tree.deepest(whole)

    def _continued(self, request: ChatRequest) -> tuple[Known, Sequence[Message]] | None:
        """The longest conversation with a whole answer that the request continues, and the messages behind it."""
        tools = spelled(request.tools)
        for known in sorted(self._known, key=lambda one: len(one.messages), reverse=True):
            if known.tools != tools or known.answer.is_truncated:
                continue
            if further := continued(known.messages, request.messages):
                return known, further
        return None

    def _parsed(self, request: ChatRequest, sampled: Rollout, number: int) -> Rollout:
        row = {"tools": list(request.tools), "parallel_tool_calls": request.parallel}
        return with_calls(
            self.game.read_calls(sampled, row if request.tools else {}),
            takes_several=self.game.rendering.takes_several,
            seed=f"{self.trace}/{number}",
        )

    def end(self) -> None:
        """Abort what is being sampled."""
        for task in self._tasks:
            task.cancel()

    @property
    def has_answer(self) -> bool:
        return bool(self._known)

    def played(self, reward: float | None) -> Rollout:
        """The episode as it was completed."""
        if not self._known:
            return self.discarded(self._exceeding or "the agent completed it without an answer of the model")
        last = self._known[-1]
        stop = self.limit or ("tokens" if last.answer.is_truncated else "final")
        return self._rollout(stop, reward=reward)

    def discarded(self, problem: str) -> Rollout:
        return self._rollout("discarded", problem=problem)

    def _rollout(self, stop: StopReason, *, problem: str = "", reward: float | None = None) -> Rollout:
        messages = self._known[-1].messages if self._known else ()
        prompt = self.prompt.item.get("messages") or ()
        behind = continued(prompt, messages)
        messages = messages if behind is None else behind
        episode = Episode(
            tuple(messages),
            tuple(uses_of(messages)),
            stop,
            self.trace,
            problem,
            calls=len(self._known),
            reward=reward,
        )
        nodes = self._tree.nodes() or [Node(None, (), NO_ANSWER)]
        return replace(Rollout.of_nodes(nodes, is_truncated=stop in TRUNCATED), episode=episode)


def ignored_of(parameters: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
    """The sampling parameters of a request that ask for something else than the job's."""
    same: dict[str, Callable[[Any], bool]] = {
        "temperature": lambda value: value == sampling.temperature,
        "top_p": lambda value: value == 1,
        "max_tokens": lambda value: value >= sampling.max_completion_tokens,
        "max_completion_tokens": lambda value: value >= sampling.max_completion_tokens,
    }
    return {name: value for name, value in parameters.items() if name not in same or not same[name](value)}


def uses_of(messages: Sequence[Message]) -> list[ToolUse]:
    """The calls of a conversation, and what the agent has sent as their results."""
    results = {
        message["tool_call_id"]: message.get("content") or ""
        for message in messages
        if message["role"] == "tool"
    }
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return [
        ToolUse(call, results.get(call["id"]), "" if call["id"] in results else NO_RESULT) for call in calls
    ]


def _completion(answer: Rollout, written: Message, prompt_tokens: int, seed: str) -> dict[str, Any]:
    """A chat completion in OpenAI's format, without the name of its model."""
    message = {
        **written,
        "content": written["content"] or (None if answer.tool_calls else ""),
        "refusal": None,
    }
    reason = "length" if answer.is_truncated else "tool_calls" if answer.tool_calls else "stop"
    return {
        "id": f"chatcmpl-{sha256(seed.encode()).hexdigest()[:24]}",
        "object": "chat.completion",
        "created": int(time.time()),
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": token_usage(prompt_tokens, len(answer.output_ids_T), reasoning=answer.reasoning_tokens),
    }


@dataclass(eq=False)
class OfferedEpisode:
    """An episode that an agent is to play."""

    prompt: Prompt
    member: int
    trace: str
    rollout: "asyncio.Future[Rollout]"
    leases: int = 0


@dataclass(eq=False)
class Lease:
    """An episode that an agent plays, until it completes it or the time of the lease has passed."""

    id: str
    offer: OfferedEpisode
    episode: AgentEpisode
    expiry: asyncio.TimerHandle


@dataclass(frozen=True)
class Completed:
    status: Status
    reward: float | None = None


class Board:
    """The episodes of a step or a validation: those that wait for an agent, and those that one plays."""

    def __init__(self, game: Game, new_id: Callable[[], str], seconds: float) -> None:
        """`seconds`: of a lease."""
        self._game, self._new_id, self._seconds = game, new_id, seconds
        self._open: deque[OfferedEpisode] = deque()
        self._leases: dict[str, Lease] = {}
        self._over: dict[str, Completed | None] = {}  # by id of the lease; None: its time has passed
        self._is_closed = False
        self._changed = asyncio.Event()  # `_open` has grown, or the board is closed

    @property
    def is_idle(self) -> bool:
        """Whether no agent plays."""
        return not self._leases

    async def play(self, prompt: Prompt, member: int, trace: str) -> Rollout:
        """Offer an episode, and return it once it has ended."""
        offer = OfferedEpisode(prompt, member, trace, asyncio.get_running_loop().create_future())
        self._offer(offer)
        try:
            return await offer.rollout
        finally:
            if offer in self._open:
                self._open.remove(offer)
            for lease in [one for one in self._leases.values() if one.offer is offer]:
                self._end(lease, None)

    def close(self) -> None:
        """Let those that wait for an episode go."""
        self._is_closed = True
        self._changed.set()

    async def lease(self, most: int, wait_s: float) -> list[dict[str, Any]]:
        """Lease up to `most` episodes, once there is one; none after `wait_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._open and not self._is_closed:
                    self._changed.clear()
                    await self._changed.wait()
        return [self._leased(self._open.popleft()) for _ in range(min(most, len(self._open)))]

    def put_back(self, lease_ids: Sequence[str]) -> None:
        """Offer the episodes of these leases again: no agent has them, so they do not count."""
        for lease in [self._leases[id] for id in reversed(lease_ids) if id in self._leases]:
            self._end(lease, None)
            lease.offer.leases -= 1
            self._open.appendleft(lease.offer)
            self._changed.set()

    def _leased(self, offer: OfferedEpisode) -> dict[str, Any]:
        offer.leases += 1
        new_id = self._new_id()
        episode = AgentEpisode(self._game, new_id, offer.prompt, offer.member, offer.trace)
        expiry = asyncio.get_running_loop().call_later(self._seconds, self._expire, new_id)
        self._leases[new_id] = Lease(new_id, offer, episode, expiry)
        item = offer.prompt.item
        return {
            "id": new_id,
            "trace_id": offer.trace,
            "split": self._game.sampling.batch.partition("/")[0],
            "item": dict(item),
            "messages": list(item.get("messages") or ()),
            "tools": list(item.get("tools") or ()),
            "deadline": int(time.time() + self._seconds),
        }

    async def ask(self, lease_id: str, request: ChatRequest) -> dict[str, Any]:
        """Return a chat completion. Raises EpisodeRefused, or SamplerFailed, which is the error of `play` too."""
        if (lease := self._leases.get(lease_id)) is None:
            raise _over(lease_id)
        await self._note_ignored(request.sampling)
        try:
            return await lease.episode.ask(request)
        except SamplerFailed as failed:
            if not lease.offer.rollout.done():
                lease.offer.rollout.set_exception(failed.cause)
            raise

    async def _note_ignored(self, parameters: Mapping[str, Any]) -> None:
        ignored = ignored_of(parameters, self._game.sampling)
        if ignored and self._game.on_ignored is not None:
            await self._game.on_ignored(ignored)

    def complete(self, lease_id: str, completed: Completed) -> None:
        """End a lease.

        Raises:
            EpisodeRefused: it has ended in another way, or has a reward and no answer that gets it.
        """
        if (lease := self._leases.get(lease_id)) is None:
            if self._over.get(lease_id) == completed:
                return
            raise _over(lease_id)
        if completed.reward is not None and not lease.episode.has_answer and lease.episode.limit is None:
            message = "The episode has no answer yet, so nothing gets the reward; use the status 'failed'."
            raise EpisodeRefused(400, message, param="reward")
        self._end(lease, completed)
        if completed.status == "failed" and lease.episode.limit is None:
            self._offer_again(lease, "the agent reported that it failed")
        elif not lease.offer.rollout.done():
            lease.offer.rollout.set_result(lease.episode.played(completed.reward))

    def _expire(self, lease_id: str) -> None:
        lease = self._leases[lease_id]
        self._end(lease, None)
        self._offer_again(lease, f"the agent did not complete it in {self._seconds:g} s")

    def _end(self, lease: Lease, completed: Completed | None) -> None:
        self._over[lease.id] = completed
        del self._leases[lease.id]
        lease.expiry.cancel()
        lease.episode.end()

    def _offer_again(self, lease: Lease, problem: str) -> None:
        """Offer the episode once more, or discard it."""
        if lease.offer.leases < LEASES:
            self._offer(lease.offer)
        elif not lease.offer.rollout.done():
            lease.offer.rollout.set_result(lease.episode.discarded(problem))

    def _offer(self, offer: OfferedEpisode) -> None:
        self._open.append(offer)
        self._changed.set()
