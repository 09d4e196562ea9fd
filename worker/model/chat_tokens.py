"""The tokens of a chat: content is text, whatever it contains. Trainer, samplers and servers all tokenize with this."""

from collections.abc import Callable
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from core.special_tokens import Chat, SpecialTokens, Tools
from worker.model.reasoning import detect


def content_tokens(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    chat: Chat,
    tools: Tools,
    render: Callable[[Chat, Tools], str],
) -> list[int] | None:
    """The tokens of a chat whose content has texts of special tokens. None: it has none, so any way gives its tokens.

    Args:
        template: Jinja text in place of the tokenizer's own.
        render: renders messages and tools with this template.
    """
    special = special_tokens(tokenizer)
    if not special.occur_in_chat(chat, tools, ()):
        return None
    kept = answer_texts(tokenizer, template)
    if not special.occur_in_chat(chat, tools, kept):
        return None
    return special.encode(render(special.hide_in_chat(chat, kept), special.hide(tools)))


@lru_cache(maxsize=32)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """The special tokens of a tokenizer."""
    return SpecialTokens(
        tokenizer.added_tokens_decoder,
        tokenizer.backend_tokenizer if tokenizer.is_fast else None,
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
    )


def answer_texts(tokenizer: PreTrainedTokenizerBase, template: str | None) -> frozenset[str]:
    """The special tokens that are tokens in answers too, such as the tags around thoughts."""
    reasoning = detect(tokenizer, template)
    return special_tokens(tokenizer).answer_texts(None if reasoning is None else reasoning.form)
