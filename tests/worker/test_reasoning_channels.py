"""The thought and the answer of a chat completion, streamed token by token."""

from typing import Any

import pytest

from tests.present import present
from tests.thinking import DISTILL, FAMILIES, HYBRID, thinking_tokenizer
from worker.model.reasoning import Reasoning, detect
from worker.serving.channels import ReasoningAnswer
from worker.serving.engine import Token

HARMONY = FAMILIES["harmony"]


def stream(
    template: str, answer: str, *, special: bool = True, stops: tuple[Any, ...] = (), ends: bool = True
) -> tuple[list[str], list[str], ReasoningAnswer]:
    """The answer's deltas of the thought and of the text, and the answer itself."""
    tokenizer = thinking_tokenizer(template, special=special)
    ids = tokenizer.encode(answer)
    channels = ReasoningAnswer(
        tokenizer, frozenset({tokenizer.eos_token_id}), stops, present(detect(tokenizer))
    )
    pieces = []
    for place, token in enumerate(ids):
        pieces.append(channels.add(Token(token, last=ends and place == len(ids) - 1)))
        if channels.finish_reason:
            break
    return [one.reasoning for one in pieces], [one.text for one in pieces], channels


@pytest.mark.parametrize(
    ("template", "answer", "thought", "text"),
    [
        (HYBRID, "<think>\nab c\n</think>\n\n42<end>", "ab c", "42"),
        (HYBRID, "42<end>", "", "42"),
        (HYBRID, "  42<end>", "", "  42"),
        (DISTILL, "ab\n</think>\n42<end>", "ab", "42"),
        (DISTILL, "</think>42<end>", "", "42"),
        (DISTILL, "ab c", "ab c", ""),
        (
            HARMONY,
            "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>final<|message|>42<end>",
            "ab",
            "42",
        ),
        (HARMONY, "<|channel|>final<|message|>42<end>", "", "42"),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_a_stream_has_the_parts_of_the_whole(
    template: str, answer: str, thought: str, text: str, special: bool
) -> None:
    if template is HARMONY and not special:
        pytest.skip("channels are always special tokens")
    thoughts, texts, channels = stream(template, answer, special=special)

    assert ("".join(thoughts), "".join(texts)) == (thought, text)
    tokenizer = thinking_tokenizer(template, special=special)
    parts = present(detect(tokenizer)).split(tokenizer.encode(answer))
    assert (parts.thought, parts.text) == (thought, text)
    assert channels.reasoning_tokens == parts.thought_tokens


def test_a_thought_arrives_token_by_token() -> None:
    thoughts, _, _ = stream(HYBRID, "<think>abc</think>42<end>")

    assert thoughts[:4] == ["", "a", "b", "c"]


def test_stop_strings_apply_to_the_answer_alone() -> None:
    thoughts, texts, channels = stream(HYBRID, "<think>a.b</think>4.2<end>", stops=(".",))

    assert ("".join(thoughts), "".join(texts), channels.finish_reason) == ("a.b", "4", "stop")


def test_an_answer_that_is_cut_within_its_thought_ends() -> None:
    _, texts, channels = stream(DISTILL, "abc")

    assert ("".join(texts), channels.finish_reason, channels.reasoning_tokens) == ("", "length", 3)


class CountingTokenizer:
    """Counts the tokens that it decodes."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.decoded = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        return str(self.inner.decode(ids, **options))


@pytest.mark.parametrize("text", ["\n", "<|start|>", "\ufffd"], ids=ascii)
@pytest.mark.parametrize("template", [HYBRID, DISTILL])
def test_the_work_for_a_token_does_not_grow_with_the_answer(template: str, text: str) -> None:
    """A model may be trained to write white space, tokens that are not shown, or broken characters for ever."""
    tokenizer: Any = CountingTokenizer(thinking_tokenizer(template))
    found = present(detect(tokenizer.inner))
    reasoning = Reasoning(found.form, found.switches, tokenizer)
    channels = ReasoningAnswer(tokenizer, frozenset(), (), reasoning)
    token = tokenizer.encode(text)[0]

    for _ in range(2_000):
        channels.add(Token(token, last=False))

    assert tokenizer.decoded < 2_000 * 100
