"""The tokens of a chat: content is text, whatever it contains. Trainer, samplers and servers all tokenize with this."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from core.reasoning import KNOWN_TAGS
from core.special_tokens import SpecialTokens
from worker.model.reasoning import detect

Chat = Sequence[Mapping[str, Any]]
# (messages, tools) -> the text of the conversation
RenderText = Callable[[Chat, Sequence[Mapping[str, Any]] | None], str]


def content_tokens(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    chat: Chat,
    tools: Sequence[Mapping[str, Any]] | None,
    render: RenderText,
) -> list[int] | None:
    """The tokens of a chat whose content has texts of special tokens. None: it has none, so any way gives its tokens.

    Args:
        template: Jinja text in place of the tokenizer's own.
        render: renders messages and tools with this template.
    """
    if not has_special_texts(tokenizer, template, chat, tools):
        return None
    special, tags = special_tokens(tokenizer), thought_tags(tokenizer, template)
    hidden = [
        {"role": message["role"]} | special.hide(_content(message), _kept(message, tags)) for message in chat
    ]
    return special.encode(render(hidden, special.hide(tools)))


def has_special_texts(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    chat: Chat,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> bool:
    """Whether the content of a chat has the text of a special token that is no tag of an answer's thought."""
    special = special_tokens(tokenizer)
    if not special.occur_in([tools, *map(_content, chat)]):
        return False
    tags = thought_tags(tokenizer, template)
    return special.occur_in(tools) or any(
        special.occur_in(_content(message), _kept(message, tags)) for message in chat
    )


@lru_cache(maxsize=32)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """The special tokens of a tokenizer."""
    return SpecialTokens(
        tokenizer.added_tokens_decoder,
        tokenizer.backend_tokenizer if tokenizer.is_fast else None,
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
    )


def thought_tags(tokenizer: PreTrainedTokenizerBase, template: str | None) -> frozenset[str]:
    """The special tokens of the tags around thoughts. Answers may have them: rows of an SFT file teach thoughts so."""
    reasoning = detect(tokenizer, template)
    texts = {*KNOWN_TAGS} if reasoning is None else {*KNOWN_TAGS, reasoning.form.start, reasoning.form.end}
    return frozenset(one for one in special_tokens(tokenizer).texts if any(one in text for text in texts))


def _kept(message: Mapping[str, Any], tags: frozenset[str]) -> frozenset[str]:
    return tags if message["role"] == "assistant" else frozenset()


def _content(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "role"}
