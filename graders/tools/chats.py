"""Episodes over chat completions, for previews: they need texts, where episodes of a job need tokens."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graders.tools.episode import EPISODE_S, NOT_EXECUTED, Episode, StopReason, ToolUse
from graders.tools.turns import EpisodeTools, Message


class ContextIsFull(Exception):
    """The conversation and another answer do not fit into the model's context."""


@dataclass(frozen=True)
class ChatAnswer:
    """An answer of the model."""

    message: Mapping[str, Any]  # in OpenAI's format
    is_cut: bool  # at its limit of tokens

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        return self.message.get("tool_calls") or ()


Ask = Callable[[Sequence[Message]], Awaitable[ChatAnswer]]
"""Samples the answer to messages of an episode, which are those after its prompt. Raises ContextIsFull."""


async def play(ask: Ask, tools: EpisodeTools, steps: int, *, seconds: float = EPISODE_S) -> Episode:
    """Play an episode as a job does, with the same ends and results of tools.

    Args:
        steps: the most answers of the model.
        seconds: from the first answer to the end.

    Raises:
        ToolsFail: most of the newest calls of a tool failed.
        ContextIsFull: for the first answer.
    """
    messages: list[Message] = []
    uses: list[ToolUse] = []
    stop, problem = await tools.play(lambda limit: _turns(ask, tools, steps, messages, uses, limit, seconds))
    return Episode(tuple(messages), tuple(uses), stop, tools.trace_id, problem)


async def _turns(
    ask: Ask,
    tools: EpisodeTools,
    steps: int,
    messages: list[Message],
    uses: list[ToolUse],
    limit: asyncio.Timeout,
    seconds: float,
) -> StopReason:
    for turn in range(steps):
        try:
            answer = await ask(messages)
        except ContextIsFull:
            if not turn:
                raise
            return "context"
        if not turn:
            limit.reschedule(asyncio.get_running_loop().time() + seconds)
        messages.append(answer.message)
        if answer.is_cut:
            return "tokens"
        if not answer.calls:
            return "final"
        if turn == steps - 1:
            break
        messages += await tools.use(answer.calls, turn, uses)
    uses += [ToolUse(call, None, NOT_EXECUTED) for call in answer.calls]
    return "max_steps"
