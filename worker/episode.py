"""An episode as tools, graders and rollouts see it. Its tokens are the nodes of its Rollout (worker/types.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# final: an answer without a call. max_steps: it called tools, and was the last one that `max_episode_steps` allows.
# tokens: an answer was cut at its limit. context: there is no room for the next one. time: the episode's time is over.
# discarded: a tool failed, or the user's agent.
StopReason = Literal["final", "max_steps", "tokens", "context", "time", "discarded"]

NOT_EXECUTED = "not executed: the episode has reached max_episode_steps"
NO_RESULT = "the agent has sent no result"


@dataclass(frozen=True)
class ToolUse:
    """A call of a tool in an episode, and what the model read."""

    call: Mapping[str, Any]  # in OpenAI's format
    output: str | None  # None: it was not executed, or failed and discarded the episode
    error: str = ""  # the reason why `output` is not the output of the tool
    seconds: float = 0.0

    def as_row(self) -> dict[str, Any]:
        return {**self.call, "output": self.output, "error": self.error or None, "seconds": self.seconds}


@dataclass(frozen=True)
class Episode:
    """What an episode was for tools and graders."""

    messages: tuple[Mapping[str, Any], ...]  # after the prompt, in OpenAI's format
    uses: tuple[ToolUse, ...]
    stop: StopReason
    trace_id: str
    problem: str = ""  # why it was discarded
    # Of an episode that the user's agent has played, whose `messages` are those of the newest of its conversations.
    calls: int | None = None  # of the policy, in all conversations
    reward: float | None = None  # that the agent gave; None: the job's grader scores it

    @property
    def turns(self) -> int:
        """The calls of the policy."""
        if self.calls is not None:
            return self.calls
        return sum(message["role"] == "assistant" for message in self.messages)
