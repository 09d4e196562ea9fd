"""The answers of a preview, from the inference server: one completion, or an episode whose tools are executed."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from api.resources.chat import Upstream, read_response
from core.errors import InvalidRequest, NotReady, ServiceError
from core.inference import InferenceNotReady, UnknownToInference
from core.jobs.params import TOOLS_PARAM
from core.storage.datasets import Example
from graders.tools.chats import ChatAnswer, ContextIsFull, play
from graders.tools.episode import TRUNCATED, Episode
from graders.tools.protocol import ToolsFail
from graders.tools.turns import EpisodeTools, Message
from graders.types import ErrorKind, Grade, Sample

CONTEXT_EXCEEDED = "context_length_exceeded"
# The longest tokens of vocabularies have 128 characters (Qwen, Llama 3). This process has no tokenizer.
MAX_TOKEN_CHARACTERS = 256


@dataclass(frozen=True)
class Completion:
    text: str
    cut_off: bool
    prompt_tokens: int
    tokens: int
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    episode: Episode | None = None  # None: the answer is one completion

    @classmethod
    def of_episode(cls, answers: Sequence["Completion"], episode: Episode) -> "Completion":
        """An episode as one completion: the last text, the tokens of all answers, and the calls with their results."""
        last = answers[-1]
        return replace(
            last,
            cut_off=episode.stop in TRUNCATED,
            prompt_tokens=answers[0].prompt_tokens,
            tokens=sum(answer.tokens for answer in answers),
            tool_calls=[use.as_row() for use in episode.uses],
            episode=episode,
        )

    @classmethod
    def of_answer(cls, answer: Mapping[str, Any]) -> "Completion":
        """The completion that an earlier preview of a job without tools has stored."""
        return cls(
            text=answer["output_text"],
            cut_off=answer["finish_reason"] == "length",
            prompt_tokens=answer["prompt_tokens"],
            tokens=answer["completion_tokens"],
            reasoning=answer["output_reasoning"] or "",
            tool_calls=answer["output_tools"],
        )

    @property
    def message(self) -> dict[str, Any]:
        """In OpenAI's format."""
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text, **thought, **calls}

    def sample(self, *, parse_json: bool) -> Sample:
        """The answer as graders read it."""
        finish = "length" if self.cut_off else "stop"
        sample = replace(
            Sample.from_text(self.text, finish, parse_json, reasoning=self.reasoning),
            output_tools=tuple(self.tool_calls),
        )
        if self.episode is None:
            return sample
        episode = self.episode
        return replace(sample, messages=episode.messages, stop=episode.stop, trace_id=episode.trace_id)

    @property
    def discarded(self) -> Grade | None:
        """The grade of an episode that a tool has discarded; None: the grader scores the answer."""
        if self.episode is None or self.episode.stop != "discarded":
            return None
        return Grade(None, f"a tool failed: {self.episode.problem}", ErrorKind.other_error)

    def episode_fields(self) -> dict[str, Any]:
        """Return the fields of a stored answer that describe its episode."""
        if self.episode is None:
            return {"conversation": None, "stop": None, "trace_id": None}
        episode = self.episode
        return {
            "conversation": list(episode.messages),
            "stop": episode.stop,
            "trace_id": episode.trace_id,
        }

    @property
    def cut_thought(self) -> bool:
        """Whether the answer ended within its thought."""
        return bool(self.reasoning) and not self.text and not self.tool_calls and self.cut_off


async def complete(upstream: Upstream, chat: dict[str, Any], row: Example) -> Completion:
    """Sample one completion for a row."""
    answer = await upstream.send(chat)
    await read_response(answer)
    if answer.status_code != 200:
        raise _refusal(row, answer.status_code, answer.json()["error"], answer.headers.get("retry-after"))
    said: dict[str, Any] = answer.json()
    [choice] = said["choices"]
    return Completion(
        text=choice["message"]["content"] or "",
        cut_off=choice["finish_reason"] == "length",
        prompt_tokens=said["usage"]["prompt_tokens"],
        tokens=said["usage"]["completion_tokens"],
        reasoning=choice["message"].get("reasoning_content") or "",
        tool_calls=choice["message"].get("tool_calls") or (),
    )


Complete = Callable[[dict[str, Any]], Awaitable[Completion]]
"""Samples one completion, and retries while the inference server is unavailable."""


async def play_episode(
    complete: Complete, chat: dict[str, Any], tools: EpisodeTools, steps: int, context: int
) -> Completion:
    """Sample an episode of at most `steps` answers.

    Args:
        context: of the model, in tokens.

    Raises:
        InvalidRequest: most of the newest calls of a tool failed.
    """
    answers: list[Completion] = []

    async def ask(messages: Sequence[Message]) -> ChatAnswer:
        results = sum(len(message["content"]) for message in messages if message["role"] == "tool")
        if results > context * MAX_TOKEN_CHARACTERS:
            raise ContextIsFull
        try:
            answer = await complete(chat | {"messages": [*chat["messages"], *messages]})
        except InvalidRequest as refused:
            if messages and refused.code == CONTEXT_EXCEEDED:
                raise ContextIsFull from refused
            raise
        answers.append(answer)
        return ChatAnswer(answer.message, answer.cut_off)

    try:
        episode = await play(ask, tools, steps)
    except ToolsFail as failing:
        raise InvalidRequest(
            f"{failing.what}. Repair the tool.", param=TOOLS_PARAM, code="tools_fail"
        ) from None
    return Completion.of_episode(answers, episode)


def _refusal(row: Example, status: int, error: dict[str, Any], retry_after: str | None) -> ServiceError:
    """The inference server's error as ours; an error about a chat is one about a row of the file."""
    message, code = error["message"], error["code"]
    if code in ("not_enough_memory", "engine_unavailable"):  # these do not pass by themselves
        return NotReady(message, code=code)
    if status == 503:
        return InferenceNotReady(message, retry_after=int(retry_after) if retry_after else None, code=code)
    if code == "model_not_found":
        return UnknownToInference(message)
    if status < 500:
        return InvalidRequest(f"line {row.line}: {message}", param="training_file", code=code)
    return ServiceError(message)
