"""An episode as tools, graders and rollouts see it. The tokens of a job's episode are the nodes of its Rollout."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

# final: an answer without a call. max_steps: it called tools, and was the last one that `max_episode_steps` allows.
# tokens: an answer was cut at its limit. context: there is no room for the next one. time: the episode's time is over.
# discarded: a tool failed, or the user's agent.
StopReason = Literal["final", "max_steps", "tokens", "context", "time", "discarded"]

# These stops ended an episode that was not finished.
TRUNCATED = frozenset({"max_steps", "tokens", "context", "time"})
EPISODE_S = 1800.0  # of an episode, from its first answer on
NOT_EXECUTED = "not executed: the episode has reached max_episode_steps"
NO_RESULT = "the agent has sent no result"


def trace_id(owner: str, batch: str, line: int, repeat: int, member: int) -> str:
    """The id of an episode for tools and graders, which is the same after a restart of the job.

    Args:
        owner: the id of the job or the preview.
        batch: the step, and whether it is of training or validation.
        line: of the row, whose prompt is sampled for the `repeat`-th time.
        member: of the group of answers.
    """
    key = f"{owner}/{batch}/{line}/{repeat}/{member}"
    return f"trace_{uuid.UUID(bytes=sha256(key.encode()).digest()[:16])}"


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
