"""Episodes: the policy calls tools, reads their results and continues, until it answers without a call.

An episode is a coroutine, so tools run while other episodes are sampled. `EpisodeSampler` is a Sampler whose answers
are episodes; what grades, learns and records does not know the difference. docs/howto/agents.md describes the rules.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from graders.tools.episode import EPISODE_S, NOT_EXECUTED, TRUNCATED, Episode, StopReason, ToolUse, trace_id
from graders.tools.protocol import Tools, ToolsFail
from graders.tools.turns import EpisodeTools, Message
from worker.sampling import Answer, SampledTurns, Sampling, TurnSampler
from worker.types import Call, Node, Prompt, Rollout

# Tokens of the results of one turn, up to which memory is planned. Longer ones leave room for fewer turns.
RESULT_TOKENS = 1024

ReadCalls = Callable[[Rollout, Mapping[str, Any]], Rollout]
"""From an answer and its row to the answer with its calls: CallReader.parsed."""


class Suffixes(Protocol):
    """The tokens between two calls of the policy. worker/model/suffixes.py: TemplateSuffixes."""

    @property
    def takes_several(self) -> bool:
        """Whether an answer may call several tools. Else its first call counts alone."""
        ...

    def after(
        self,
        answer: Rollout,
        message: Message,
        results: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[int, ...]:
        """Tokens behind the answer: the end of its message, the results, and the start of the next answer."""
        ...

    def fewest(self, results: Sequence[Message]) -> int:
        """A number of tokens that the results have at least, found without tokenizing them."""
        ...


@dataclass(frozen=True)
class EpisodeLimits:
    calls: int  # of the policy
    context: int  # tokens of the prompt and all that follows, with the longest next answer
    seconds: float = EPISODE_S


def context_of(context: int, prompt: int, completion: int, calls: int) -> int:
    """The tokens of an episode for which memory is planned, at most the model's context.

    Args:
        prompt: tokens of the longest prompt.
        completion: tokens of the longest answer of a call.
        calls: of the policy in an episode.
    """
    return min(context, prompt + calls * (completion + RESULT_TOKENS))


def trace_of(job: str, batch: str, prompt: Prompt, member: int) -> str:
    """The id of an answer to the prompt, as `trace_id`."""
    return trace_id(job, batch, prompt.line, prompt.repeat, member)


@dataclass(frozen=True)
class Runner:
    """Runs episodes, all with one policy."""

    calls: SampledTurns
    sampling: Sampling
    tools: Tools
    read_calls: ReadCalls
    suffixes: Suffixes
    limits: EpisodeLimits
    job: str  # its id
    # Results are rendered in one thread at a time: the tokens of a megabyte take 150 MB.
    rendering: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, prompt: Prompt, member: int) -> Rollout:
        """Sample one episode.

        Raises:
            ToolsFail: most of the newest calls of a tool failed.
        """
        return await _Run(self, prompt, member, trace_of(self.job, self.sampling.batch, prompt, member)).run()


class _Run:
    """One episode under way."""

    def __init__(self, runner: Runner, prompt: Prompt, member: int, trace: str) -> None:
        self.runner, self.prompt, self.member, self.trace = runner, prompt, member, trace
        self.functions: Sequence[Mapping[str, Any]] = prompt.item.get("tools") or ()
        self.tools = EpisodeTools(runner.tools, self.functions, prompt.item, trace)
        self.ids: tuple[int, ...] = prompt.ids
        self.context: tuple[int, ...] = ()  # behind `ids`, before the next answer
        self.nodes: list[Node] = []
        self.messages: list[Message] = []
        self.uses: list[ToolUse] = []

    async def run(self) -> Rollout:
        stop, problem = await self.tools.play(self._turns)
        episode = Episode(tuple(self.messages), tuple(self.uses), stop, self.trace, problem)
        rollout = Rollout.of_nodes(self.nodes, is_truncated=stop in TRUNCATED)
        return replace(rollout, episode=episode)

    async def _turns(self, limit: asyncio.Timeout) -> StopReason:
        limits = self.runner.limits
        while True:
            answer = await self._call()
            if len(self.nodes) == 1:
                limit.reschedule(asyncio.get_running_loop().time() + limits.seconds)
            if answer.is_truncated:
                return "tokens"
            if not answer.tool_calls and (answer.parsed is None or not answer.parsed.error):
                return "final"
            if len(self.nodes) == limits.calls:
                self.uses += [ToolUse(call, None, NOT_EXECUTED) for call in answer.tool_calls]
                return "max_steps"
            message, results = await self._use_tools(answer)
            room = limits.context - len(self.ids) - self.runner.sampling.max_completion_tokens
            if self.runner.suffixes.fewest(results) > room:
                return "context"
            self.context = await self._suffix(answer, message, results)
            if len(self.context) > room:
                return "context"

    async def _suffix(self, answer: Rollout, message: Message, results: Sequence[Message]) -> tuple[int, ...]:
        """The tokens behind the answer, rendered in a thread so that other episodes continue."""
        async with self.runner.rendering:
            return await asyncio.to_thread(
                self.runner.suffixes.after, answer, message, results, self.functions
            )

    async def _call(self) -> Rollout:
        """Sample the next answer, and add its node and its message."""
        before = self.ids + self.context
        prompt = replace(self.prompt, ids=before)
        sampled = await self.runner.calls.next(prompt, self.member)
        answer = with_calls(
            self.runner.read_calls(sampled, self.prompt.item),
            takes_several=self.runner.suffixes.takes_several,
            seed=f"{self.trace}/{len(self.nodes)}",
        )
        parent = len(self.nodes) - 1 if self.nodes else None
        self.nodes.append(Node(parent, self.context, answer))
        self.ids, self.context = before + answer.output_ids_T, ()
        self.messages.append(message_of(answer))
        return answer

    async def _use_tools(self, answer: Rollout) -> tuple[Message, Sequence[Message]]:
        """Call the tools of an answer at once, and add their results in the order of the calls.

        Returns:
            The message of the answer, and those of the results.

        Raises:
            ToolFailed: the episode is discarded. `uses` has the call that failed.
            ToolsFail: the job pauses, whatever other calls of the answer did.
        """
        unreadable = ""
        if not answer.tool_calls and answer.parsed is not None:
            unreadable = answer.parsed.error
            self.messages[-1] = self._with_unreadable_call(answer)
        message = self.messages[-1]
        results = await self.tools.use(
            message["tool_calls"], len(self.nodes) - 1, self.uses, unreadable=unreadable
        )
        self.messages += results
        return message, results

    def _with_unreadable_call(self, answer: Rollout) -> Message:
        """The message of an answer whose calls cannot be read, with one that has no name."""
        assert answer.parsed is not None, "or it has no error"
        [call] = replace(answer.parsed, calls=(Call("", ""),)).tool_calls("")
        return {**self.messages[-1], "tool_calls": [call]}


def with_calls(answer: Rollout, *, takes_several: bool, seed: str) -> Rollout:
    """An answer with the calls that count, whose ids follow from the seed.

    Not of the text alone: a tool that knows the id of a call answers as it did before.

    Args:
        takes_several: whether the template takes answers with several calls. Else the first one counts alone.
    """
    if answer.parsed is None:
        return answer
    counted = answer.parsed.calls if takes_several else answer.parsed.calls[:1]
    return replace(answer, parsed=replace(answer.parsed, calls=counted, ids_seed=seed))


def message_of(answer: Rollout) -> Message:
    """An answer of one call in OpenAI's format."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = list(answer.tool_calls)
    return message


class EpisodeSampler:
    """Implements worker.sampling.Sampler: each answer is an episode."""

    def __init__(
        self,
        sampler: TurnSampler,
        tools: Tools,
        read_calls: ReadCalls,
        suffixes: Suffixes,
        limits: EpisodeLimits,
        job: str,
    ) -> None:
        """`job`: its id."""
        self._sampler, self._tools, self._read_calls, self._suffixes = sampler, tools, read_calls, suffixes
        self._limits, self._job = limits, job

    async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        """Yield the episodes as they end.

        Raises:
            ToolsFail: most of the newest calls of a tool failed, or most of these episodes were discarded.
        """
        ended: asyncio.Queue[Answer | BaseException] = asyncio.Queue()
        async with self._sampler.turns(sampling) as calls:
            runner = Runner(
                calls, sampling, self._tools, self._read_calls, self._suffixes, self._limits, self._job
            )

            async def run(place: int, member: int) -> None:
                try:
                    await ended.put(Answer(place, member, await runner.run(prompts_P[place], member)))
                except BaseException as cause:
                    ended.put_nowait(cause)
                    raise

            tasks = [
                asyncio.create_task(run(place, member))
                for place in range(len(prompts_P))
                for member in range(sampling.group_size)
            ]
            failures: list[str] = []
            try:
                for _ in tasks:
                    answer = await ended.get()
                    if isinstance(answer, BaseException):
                        raise answer
                    if answer.rollout.is_discarded:
                        assert answer.rollout.episode is not None
                        failures.append(answer.rollout.episode.problem)
                    yield answer
                if 2 * len(failures) > len(tasks):
                    raise ToolsFail.of_episodes(len(tasks), failures)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
