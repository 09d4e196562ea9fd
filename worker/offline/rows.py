"""From the rows of a file to packs of tokens, each token marked as learned or only read."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from core.jobs.methods import LOGITS, REWARD_MODEL
from core.storage.datasets import Example
from core.storage.offline_rows import is_labeled, is_learned, reward_kind, step_ends
from core.template_messages import arguments_of
from worker.refusals import ChatTemplateFailed, UserMistake
from worker.training.steps import token_ends
from worker.types import Pack, TrainingSequence

Message = Mapping[str, Any]
# (messages, tools, with a generation prompt) -> token ids
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]], bool], list[int]]

T = TypeVar("T")
MAX_REPORTED = 20


@dataclass(frozen=True)
class ChatTemplate:
    """The model's chat template, and the tokens that end an answer."""

    render: Render
    stop_ids: frozenset[int]  # the tokens that end an answer
    end_id: int  # ends an answer whose rendering has no such token
    decode: Callable[[Sequence[int]], str]  # without special tokens


@dataclass(frozen=True)
class _Turn:
    """An answer as it is rendered after the messages before it."""

    ids: tuple[int, ...]  # the whole rendering, to the end of the answer
    start: int  # of the answer
    is_closed: bool  # the template itself ended the answer


@dataclass(frozen=True)
class TokenizedRow:
    """A row of the file. A conversation that the template does not render in one piece has several packs."""

    line: int
    packs: tuple[Pack, ...]
    loses_text: bool = False  # the template leaves out the text that an answer has beside its calls

    @property
    def longest(self) -> int:
        """Tokens of the longest pack."""
        return max(pack.tokens for pack in self.packs)


class _Shared:
    """Keeps equal tokens, zeros and masks of all rows of a file once, so that they take a fraction of the memory."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._tuples: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def pack(self, pack: Pack) -> Pack:
        return Pack(self._tokens(pack.prompt_ids), tuple(map(self._sequence, pack.sequences)))

    def _sequence(self, sequence: TrainingSequence) -> TrainingSequence:
        return replace(
            sequence,
            output_ids_T=self._tokens(sequence.output_ids_T),
            logprobs_T=self._same(sequence.logprobs_T),
            advantages_T=self._same(sequence.advantages_T),
            learned_T=self._same(sequence.learned_T),
        )

    def _tokens(self, ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._ids.setdefault(one, one) for one in ids)

    def _same(self, values: tuple[T, ...]) -> tuple[T, ...]:
        return self._tuples.setdefault(values, values)


def tokenize(
    variant: str,
    examples: Sequence[Example],
    template: ChatTemplate,
    *,
    file: str,
    field: Literal["training_file", "validation_file"],
    context: int,
    added: int = 0,
    beat: Callable[[], None] = lambda: None,
) -> list[TokenizedRow]:
    """Convert the rows of `file`, which is the job's `field`, to packs.

    Args:
        context: of the model, in tokens.
        added: tokens that the server of a teacher adds to each row.

    Raises:
        UserMistake: rows exceed the context. Names up to 20 of their lines.
        ChatTemplateFailed: names the line that the chat template rejects.
    """
    packs_of, shared = PACKS[variant], _Shared()
    rows, long = [], []
    for number, example in enumerate(examples):
        if number % 100 == 0:
            beat()
        try:
            packs = packs_of(example.item, template)
            loses_text = _loses_text(example.item, template)
        except ChatTemplateFailed as cause:
            raise ChatTemplateFailed(f"Line {example.line} of {file}: {cause}") from cause
        row = TokenizedRow(example.line, tuple(map(shared.pack, packs)), loses_text)
        longest = max(
            len(pack.prompt_ids) + len(one.output_ids_T) for pack in row.packs for one in pack.sequences
        )
        if longest > context - added:
            long.append(f"line {row.line}: {longest} tokens")
        rows.append(row)
    if long:
        less = f", less {added} that the teacher's server adds" if added else ""
        raise UserMistake(
            "example_too_long",
            f"{len(long)} rows of {file} are longer than the model's context of {context} tokens{less}: "
            f"{'; '.join(long[:MAX_REPORTED])}",
            field,
        )
    return rows


def supervised_packs(row: Mapping[str, Any], template: ChatTemplate) -> list[Pack]:
    """The packs of a conversation: one if its answers are parts of one rendering, else one for each learned answer.

    Templates that drop earlier thoughts, for instance, render an answer differently once others follow; the model is
    then asked, and taught, each answer with the messages before it as they are rendered at that point.
    """
    messages, tools = _messages(row["messages"]), row.get("tools") or []
    _refuse_ignored_tools(messages, tools, template)
    learned = [number for number, message in enumerate(row["messages"]) if is_learned(message)]
    turns = [_turn(messages[:number], messages[number], tools, template) for number in learned]
    last = turns[-1]
    if all(turn.is_closed and last.ids[: len(turn.ids)] == turn.ids for turn in turns[:-1]):
        spans = [(turn.start, len(turn.ids)) for turn in turns]
        return [_pack(last.ids, spans)]
    return [_pack(turn.ids, [(turn.start, len(turn.ids))]) for turn in turns]


def preference_packs(row: Mapping[str, Any], template: ChatTemplate) -> list[Pack]:
    """One pack: the prompt, the preferred answer and the other one, or the one answer with its label."""
    if is_labeled(row):
        pack = answers_pack(
            row["input"]["messages"], row["output"], row["input"].get("tools") or [], template
        )
        [one] = pack.sequences
        label = float(row["label"])
        return [Pack(pack.prompt_ids, (replace(one, scores=(label,) * len(one.output_ids_T)),))]
    answers = [row[name][0] for name in ("preferred_output", "non_preferred_output")]
    return [answers_pack(row["input"]["messages"], answers, row["input"].get("tools") or [], template)]


def reward_packs(row: Mapping[str, Any], template: ChatTemplate) -> list[Pack]:
    """One pack: both answers of a pair with its margin, or an answer with its score or the labels of its steps."""
    kind = reward_kind(row)
    if kind == "pairs":
        return [scored_at_the_end(preference_packs(row, template)[0], float(row.get("margin") or 0.0))]
    *before, answer = row["messages"]
    pack = answers_pack(before, [answer], row.get("tools") or [], template)
    if kind == "steps":
        return [scored_at_steps(pack, answer["content"], template, row["step_labels"])]
    return [scored_at_the_end(pack, float(row["score"]))]


def scored_at_the_end(pack: Pack, score: float = 0.0) -> Pack:
    """The pack with each answer's last token as an input, and nothing else of it learned: a reward is read there."""
    return Pack(
        pack.prompt_ids,
        tuple(_scored(one.output_ids_T, [len(one.output_ids_T)], [score]) for one in pack.sequences),
    )


def scored_at_steps(
    pack: Pack, answer: str, template: ChatTemplate, labels: Sequence[float] | None = None
) -> Pack:
    """The pack of one answer, of which the tokens that end steps are learned (`step_ends`).

    Raises:
        ChatTemplateFailed: the template does not render the text of the answer as it is.
    """
    [one] = pack.sequences
    ids_T, ends = one.output_ids_T, step_ends(answer)

    def decode(ids: Sequence[int]) -> str:
        return template.decode(ids).lstrip()

    text = answer.lstrip()
    cut = len(answer) - len(text)  # templates strip answers
    if not decode(ids_T).startswith(text.rstrip()):
        raise ChatTemplateFailed(
            "the chat template changes the text of the answer, so its steps are not found."
        )
    tokens = token_ends(ids_T, text.rstrip(), [max(0, end - cut) for end in ends], decode)
    return Pack(pack.prompt_ids, (_scored(ids_T, tokens, labels or [0.0] * len(tokens)),))


def _scored(ids_T: Sequence[int], ends: Sequence[int], scores: Sequence[float]) -> TrainingSequence:
    """An answer whose rewards are read at the tokens that end at `ends`, counted from 1."""
    read = dict(zip(ends, scores, strict=True))  # of two steps that end within one token, the second counts
    learned = tuple(place in read for place in range(len(ids_T) + 1))
    whole = (*ids_T, ids_T[-1])  # so that the last token is an input; the copy is never read
    return replace(_sequence(whole, learned), scores=tuple(float(read[end]) for end in sorted(read)))


def answers_pack(
    before: Sequence[Message],
    answers: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
) -> Pack:
    """A conversation and different answers to it, each rendered through the token that ends it."""
    messages = _messages(before)
    said = _messages(answers)
    for answer in said:
        _refuse_ignored_tools([*messages, answer], tools, template)
    turns = [_turn(messages, answer, tools, template) for answer in said]
    start = min(turn.start for turn in turns)
    prompt = turns[0].ids[:start]
    return Pack(prompt, tuple(_sequence(turn.ids[start:], ()) for turn in turns))


def _turn(
    before: Sequence[Message], answer: Message, tools: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> _Turn:
    """Render an answer after the messages before it, through the token that ends it.

    The answer starts where the rendering with it leaves the one with a generation prompt. For the first message, and
    where that prompt does not begin the rendering, it starts where those of other answers leave it: templates may
    write a system message or the tools before it. Its end is looked for only where its content begins.

    Raises:
        ChatTemplateFailed: the template renders the messages before the answer differently once it follows, or leaves
            out the answer.
    """
    ids = template.render([*before, answer], tools, False)
    begin, content = _places(before, answer, tools, template, ids)
    start = max(
        1, _start(before, tools, template, ids, begin) if before else begin
    )  # the first is not predicted
    ends = [number for number in range(max(start, content), len(ids)) if ids[number] in template.stop_ids]
    if ends:
        return _Turn(tuple(ids[: ends[-1] + 1]), start, True)
    return _Turn((*ids, template.end_id), start, False)


def _start(
    before: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    ids: Sequence[int],
    begin: int,
) -> int:
    """Where an answer to `before` starts in `ids`; `begin` is where renderings of other answers leave it."""
    asked = template.render(before, tools, True)
    shared = _common(asked, ids)
    if shared == len(asked):
        return shared
    header = _common(template.render(before, tools, False), asked)
    if shared < header:
        raise ChatTemplateFailed(
            "the chat template renders earlier messages differently once an answer follows, so the answer's "
            "tokens cannot be separated from theirs."
        )
    # Some templates close a question only once an answer follows: what closes it is no part of the answer.
    closes_question = shared == header or not template.stop_ids.isdisjoint(ids[shared:begin])
    return begin if closes_question else shared


def _places(
    before: Sequence[Message],
    answer: Message,
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    ids: Sequence[int],
) -> tuple[int, int]:
    """The answer begins in `ids` at the first place, its content at the second: other answers leave it there.

    A thought, for instance, stands between the two.

    Raises:
        ChatTemplateFailed: the template leaves out the content.
    """

    def renderings(message: Message) -> list[list[int]]:
        return [template.render([*before, {**message, "content": text}], tools, False) for text in "0x"]

    plain = renderings({"role": "assistant"})
    others = renderings(answer) if answer.keys() - {"role", "content"} else plain
    begin = min(_common(other, ids) for other in plain)
    if any(other != ids for other in others):
        return begin, min(_common(other, ids) for other in others)
    if answer.get("content") and not answer.get("tool_calls"):
        raise ChatTemplateFailed(
            "the chat template leaves out the text of the answer: set chat_template to a template that renders it."
        )
    return begin, begin


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return number
    return min(len(first), len(second))


def _pack(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Pack:
    first = spans[0][0]
    learned = [False] * (len(ids) - first)
    for start, end in spans:
        learned[start - first : end - first] = [True] * (end - start)
    return Pack(tuple(ids[:first]), (_sequence(ids[first:], () if all(learned) else tuple(learned)),))


def _sequence(ids_T: Sequence[int], learned_T: tuple[bool, ...]) -> TrainingSequence:
    nothing = (0.0,) * len(ids_T)
    return TrainingSequence(tuple(ids_T), nothing, nothing, 1.0, learned_T=learned_T)


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As chat templates expect them: without weights and empty fields."""
    return [{key: value for key, value in message.items() if _is_said(key, value)} for message in messages]


def _is_said(key: str, value: Any) -> bool:
    return key != "weight" and (key in ("role", "content") or value not in (None, [], ""))


def _refuse_ignored_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> None:
    """Raises ChatTemplateFailed if the template leaves out the row's tools, or any of its calls and their results."""
    if tools and template.render(messages, [], False) == template.render(messages, tools, False):
        raise ChatTemplateFailed(_NO_PLACE.format("tools"))
    refuse_ignored_calls(messages, tools, template)


def refuse_ignored_calls(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> None:
    """Raises ChatTemplateFailed if the template leaves out a call, or the result of one.

    Each is looked for in one rendering that has a word in its place. Not all tokenizers write words as they are, so a
    part without its word is lost only if the conversation is rendered the same with another part.
    """
    parts = {f"part7q{number:05}": part for number, part in enumerate(_tool_texts(messages))}
    if not parts:
        return
    marked = list(messages)
    for word, part in parts.items():
        marked[part.message] = part.with_word(marked[part.message], word)
    text = template.decode(template.render(marked, tools, False))
    for word, part in parts.items():
        if word in text:
            continue
        other = list(messages)
        other[part.message] = part.with_word(other[part.message], word)
        if template.render(other, tools, False) == template.render(messages, tools, False):
            raise ChatTemplateFailed(_NO_PLACE.format(part.name))


_NO_PLACE = "the model's chat template has no place for {}: choose a model whose template has one."


@dataclass(frozen=True)
class _ToolText:
    """The name or the arguments of a call, or a result."""

    message: int
    call: int | None = None  # None: the message is a result
    key: Literal["name", "arguments"] = "name"

    @property
    def name(self) -> str:
        return (
            "results of tools"
            if self.call is None
            else "tool calls"
            if self.call == 0
            else "several tool calls"
        )

    def with_word(self, message: Message, word: str) -> dict[str, Any]:
        """The message with a word in place of the part. Not without it: Mistral's need a call before a result."""
        if self.call is None:
            return {**message, "content": word}
        calls = list(message["tool_calls"])
        call = calls[self.call]
        value = word if self.key == "name" else json.dumps(dict.fromkeys(arguments_of(call), word))
        calls[self.call] = {**call, "function": {**call["function"], self.key: value}}
        return {**message, "tool_calls": calls}


def _tool_texts(messages: Sequence[Message]) -> list[_ToolText]:
    """The parts of the conversation that depend on tools. Arguments that are no object, or an empty one, have none."""
    found = [_ToolText(number) for number, message in enumerate(messages) if message["role"] == "tool"]
    for number, message in enumerate(messages):
        for place, call in enumerate(message.get("tool_calls") or []):
            arguments = arguments_of(call)
            found.append(_ToolText(number, place))
            if arguments and isinstance(arguments, dict):
                found.append(_ToolText(number, place, "arguments"))
    return found


def _loses_text(row: Mapping[str, Any], template: ChatTemplate) -> bool:
    """Whether the template leaves out the text that an answer of the row has beside its calls."""
    given = row if "messages" in row else row["input"]
    names = ("output", "preferred_output", "non_preferred_output")
    tools = given.get("tools") or []
    for conversation in [
        given["messages"],
        *([*given["messages"], *row[name]] for name in names if name in row),
    ]:
        messages = _messages(conversation)
        words = {
            number: f"text7q{number:05}"
            for number, message in enumerate(messages)
            if message.get("content") and message.get("tool_calls")
        }
        if not words:
            continue
        # One rendering with a word in each text. A text without its word is lost if the conversation up to the answer,
        # as it is learned, is rendered the same with other texts.
        marked = [
            message | {"content": words.get(n, message.get("content"))} for n, message in enumerate(messages)
        ]
        text = template.decode(template.render(marked, tools, False))
        for number in (number for number, word in words.items() if word not in text):
            message = messages[number]
            others = [message, *({**message, "content": other} for other in "0x")]
            renderings = [template.render([*messages[:number], other], tools, False) for other in others]
            if all(one == renderings[0] for one in renderings):
                return True
    return False


PACKS: Mapping[str, Callable[[Mapping[str, Any], ChatTemplate], list[Pack]]] = MappingProxyType(
    {
        "supervised": supervised_packs,
        "dpo": preference_packs,
        REWARD_MODEL: reward_packs,
        LOGITS: supervised_packs,
    }
)
