"""The tokens between two calls of an episode: the end of an answer's message, tool results, the start of the next one.

Sampled tokens are never rendered or tokenized again. The tokens behind them are the difference of two conversations
with a given answer: one that ends with the answer, and one that continues with the results. The stop token is their
boundary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from worker.model.policy import render
from worker.refusals import ChatTemplateFailed, UnsupportedModel
from worker.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
# How the given answer has a thought: some templates write an empty one only at the end of a conversation, and read
# others from the content.
_THOUGHT: Message = {"content": "a", "reasoning_content": "b"}
_THOUGHTS: tuple[Message, ...] = (
    {"content": "a"},
    _THOUGHT,
    {"content": "<think>\nb\n</think>\n\na"},
)
_QUESTION: Message = {"role": "user", "content": "a"}
_TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
]


class NoSuffix(UnsupportedModel):
    """The chat template does not continue a conversation behind the tokens of an answer."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"The model cannot have episodes with executed tools, because of its chat template: {why}. Set "
            "chat_template in its entry of the model registry, or leave 'tools' out of the job."
        )


@lru_cache(maxsize=8)
def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The characters of the longest token, which in a vocabulary of bytes are bytes. None: one may be of any length."""
    if tokenizer.unk_token_id is not None and "<0x00>" not in tokenizer.get_vocab():
        return None
    return max(map(len, tokenizer.get_vocab()))


def _calling(answer: Message, calls: Sequence[Mapping[str, Any]]) -> Message:
    """An assistant's message with these calls, with other arguments: no template shows them in a result."""
    short = [{**call, "function": {"name": call["function"]["name"], "arguments": "{}"}} for call in calls]
    return {"role": "assistant", **answer, **({"tool_calls": short} if short else {})}


def _example(number: int) -> tuple[list[Mapping[str, Any]], list[Message]]:
    """Calls, and their results."""
    calls: list[Mapping[str, Any]] = [
        {"id": f"call{place:05}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for place in range(number)
    ]
    return calls, [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in calls]


@dataclass(frozen=True)
class TemplateSuffixes:
    """Those of a chat template. Implements worker.rollout.episodes.Suffixes."""

    tokenizer: "PreTrainedTokenizerBase"
    stop_ids: frozenset[int]
    answer: Message  # the given one
    takes_several: bool = True  # False: the template rejects answers with several calls, as Llama 3's

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", stop_ids: frozenset[int]) -> "TemplateSuffixes":
        """Find an answer with which the template is exact, for one result and, unless it rejects them, for two.

        Raises:
            NoSuffix: there is none.
        """
        problems = []
        for answer in _THOUGHTS:
            found = cls(tokenizer, stop_ids, answer)
            try:
                found._check(*_example(1))
                return replace(found, takes_several=found._takes(*_example(2)))
            except (NoSuffix, ChatTemplateFailed) as cause:
                problems.append(cause)
        raise NoSuffix(str(problems[0])) if isinstance(problems[0], ChatTemplateFailed) else problems[0]

    def after(
        self,
        answer: Rollout,
        message: Message,
        results: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[int, ...]:
        """The tokens behind an answer that ends with a stop token.

        Args:
            message: the answer as a message, with its calls.
            results: of all its calls, because a template may join them.

        Raises:
            NoSuffix: the longer conversation does not begin with the one that ends.
        """
        assert answer.output_ids_T[-1] in self.stop_ids, "a truncated answer ends its episode"
        return self._difference(self.answer, message["tool_calls"], results, tools)

    def fewest(self, results: Sequence[Message]) -> int:
        """The tokens that the results have at least: each is at most as long as the longest in the vocabulary.

        0: not known, because the vocabulary has one token for all that it lacks.
        """
        longest = longest_token(self.tokenizer)
        characters = sum(len(result["content"].strip()) for result in results)
        # A normalizer may write three characters as one (the parts of a syllable of Hangul).
        return 0 if longest is None else characters // (3 * longest)

    def behind(
        self,
        message: Message,
        further: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[int, ...]:
        """The tokens behind an answer that ends with a stop token, up to the next answer.

        Args:
            message: the answer as a message, with its calls.
            further: the messages after it, of any role.

        Raises:
            NoSuffix, ChatTemplateFailed: the template does not continue behind this answer with these messages, as one
                that drops a thought when a question of the user follows it.
        """
        calls = message.get("tool_calls") or ()
        suffix = self._difference(self.answer, calls, further, tools)
        if suffix != self._difference(self._other, calls, further, tools):
            raise NoSuffix("what follows an answer depends on the answer")
        return suffix

    @property
    def _other(self) -> Message:
        """Another answer of the same form."""
        return {name: text.replace("a", "other words") for name, text in self.answer.items()}

    def _takes(self, calls: Sequence[Mapping[str, Any]], results: Sequence[Message]) -> bool:
        """Whether the template takes these calls. Raises NoSuffix as `_check` does."""
        try:
            self._check(calls, results)
        except ChatTemplateFailed:
            return False
        return True

    def _check(self, calls: Sequence[Mapping[str, Any]], results: Sequence[Message]) -> None:
        """Raise NoSuffix unless the suffix is the same behind another answer, and shows the results."""
        suffix = self.behind({"tool_calls": calls}, results, _TOOLS)
        if "42" not in self.tokenizer.decode(suffix):
            raise NoSuffix("it does not show results of tools")

    def _difference(
        self,
        answer: Message,
        calls: Sequence[Mapping[str, Any]],
        results: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[int, ...]:
        before = [_QUESTION, _calling(answer, calls)]
        ended = render(self.tokenizer, before, generation_prompt=False, tools=tools)
        longer = render(self.tokenizer, [*before, *results], tools=tools)
        asked = render(self.tokenizer, before[:1], generation_prompt=False, tools=tools)
        stops = [place for place, token in enumerate(ended) if token in self.stop_ids and place >= len(asked)]
        if not stops:
            raise NoSuffix("an answer in a conversation does not end with a stop token")
        end = stops[-1] + 1
        if longer[:end] != ended[:end]:
            raise NoSuffix("an answer is written in another way when results of tools follow it")
        return tuple(longer[end:])


@dataclass(frozen=True)
class TemplateConversations:
    """The tokens of conversations that the user's agent sends. Implements worker.rollout.agent_episodes.Rendering."""

    tokenizer: "PreTrainedTokenizerBase"
    stop_ids: frozenset[int]
    takes_several: bool  # as in TemplateSuffixes
    shows_thoughts: bool  # of an answer that ends a conversation

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", stop_ids: frozenset[int]) -> "TemplateConversations":
        try:
            takes_several = TemplateSuffixes.of(tokenizer, stop_ids).takes_several
        except NoSuffix:  # it has no tools, or never continues behind an answer
            takes_several = True
        return cls(tokenizer, stop_ids, takes_several, _shows_thoughts(tokenizer))

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]:
        """A conversation, up to its next answer. Raises ChatTemplateFailed: the template rejects it."""
        return tuple(render(self.tokenizer, messages, tools=tools))

    def behind(
        self, message: Message, further: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...] | None:
        """As TemplateSuffixes.behind, with any answer with which the template is exact; None: there is none.

        An answer with a thought continues only where the template shows the thought.
        """
        has_thought = bool(message.get("reasoning_content"))
        if has_thought and not self.shows_thoughts:
            return None
        for answer in (_THOUGHT,) if has_thought else _THOUGHTS:
            try:
                return TemplateSuffixes(self.tokenizer, self.stop_ids, answer).behind(message, further, tools)
            except (NoSuffix, ChatTemplateFailed):
                continue
        return None


def _shows_thoughts(tokenizer: "PreTrainedTokenizerBase") -> bool:
    try:
        shown = [
            render(tokenizer, [_QUESTION, {"role": "assistant", **answer}], generation_prompt=False)
            for answer in (_THOUGHT, {**_THOUGHT, "reasoning_content": "c"})
        ]
    except ChatTemplateFailed:
        return False
    return shown[0] != shown[1]
