"""Tokenize a rendered conversation so that the texts of special tokens inside its content are text.

Added tokens that look like markup count as special here too, whatever their flag says: Qwen's `<tool_response>` is not
flagged, and a user's message that forges one must be text as well.
A tokenizer replaces `<|im_end|>` by the control token everywhere: in the chat template, and in a user's message.
Here content is rendered with placeholders for such texts, and encoded by a second tokenizer on the same vocabulary
whose special tokens have names that no content has. All other tokens, and those beside the texts, are the same.
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from core.reasoning import KNOWN_TAGS, Format

# Breaks the text of a special token that the vocabulary has as an ordinary word too, so that it is spelled.
ESCAPE = "\u200b"  # ZERO WIDTH SPACE
_NOTHING: frozenset[str] = frozenset()
# Tokenizers also add runs of spaces and rare letters, which are text.
_MARKUP = re.compile(r"<.*>|\[.*\]|\{.*\}", re.DOTALL)

Chat = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


class SpecialTokens:
    """The special tokens of a tokenizer. Thread-safe."""

    def __init__(
        self,
        added: Mapping[int, AddedToken],
        backend: Tokenizer | None,
        encode: Callable[[str], list[int]],
    ) -> None:
        """Builds a second tokenizer that shares the vocabulary.

        Args:
            added: the added tokens of the tokenizer by id, special ones and others.
            backend: None: it is not one of the `tokenizers` library, so the texts in content are escaped.
            encode: encodes a text with the tokenizer itself, without the tokens that it adds to texts.
        """
        nonce = secrets.token_hex(8)  # no content has the names and placeholders that contain it
        self.flagged = tuple(token.content for token in added.values() if token.special and token.content)
        self.texts = tuple(token.content for token in added.values() if _is_control(token))
        self._numbers = {text: number for number, text in enumerate(self.texts)}
        self._placeholder = re.compile(f"{nonce}x([0-9]+)z")
        self._placeholders = tuple(f"{nonce}x{number}z" for number in range(len(self.texts)))
        self._names = tuple(f"{nonce}y{number}z" for number in range(len(self.texts)))
        self._finder = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
        self._finder.add_special_tokens([AddedToken(text, normalized=False) for text in self.texts])
        self._encode, self._ids = encode, dict[int, int]()
        if backend is not None:
            second = self._second(added, backend)
            self._encode = lambda text: second.encode(text, add_special_tokens=False).ids
        self._rendered = tuple(
            _escaped(text) if backend is None or self._is_word(text, added) else text for text in self.texts
        )

    @classmethod
    def of_backend(cls, backend: Tokenizer) -> "SpecialTokens":
        """Read them from the tokenizer of a tokenizer.json."""
        return cls(
            backend.get_added_tokens_decoder(),
            backend,
            lambda text: list(backend.encode(text, add_special_tokens=False).ids),
        )

    def answer_texts(self, form: Format | None) -> frozenset[str]:
        """Those that are tokens in answers too: an SFT file teaches thoughts and calls by writing their tags.

        These are the tags around thoughts, and all tokens that are not flagged as special.

        Args:
            form: of the model's thoughts; None: no format is known.
        """
        tags = KNOWN_TAGS if form is None else (*KNOWN_TAGS, form.start, form.end)
        return frozenset(self.texts) - {one for one in self.flagged if not any(one in text for text in tags)}

    def occur_in(self, value: Any, allowed: Collection[str] = _NOTHING) -> bool:
        """Whether a text of JSON `value` has the text of a special token, apart from those in `allowed`."""
        return any(text not in allowed for part in _strings(value) for _, _, text in self._found(part))

    def occur_in_chat(self, chat: Chat, tools: Tools, allowed: Collection[str]) -> bool:
        """The same for the content of messages, of which those of the assistant may have `allowed`."""
        return self.occur_in(tools) or any(
            self.occur_in(_content(message), _tokens_to_keep(message, allowed)) for message in chat
        )

    def hide(self, value: Any, allowed: Collection[str] = _NOTHING) -> Any:
        """A copy of JSON `value` with placeholders for the texts of special tokens, apart from those in `allowed`."""
        if isinstance(value, str):
            return self._replaced(value, self._placeholders, allowed)
        if isinstance(value, Mapping):
            return {self.hide(key, allowed): self.hide(one, allowed) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(one, allowed) for one in value]
        return value

    def hide_in_chat(self, chat: Chat, allowed: Collection[str]) -> list[dict[str, Any]]:
        """The same for the content of messages, of which those of the assistant keep `allowed`."""
        return [
            {"role": message["role"]} | self.hide(_content(message), _tokens_to_keep(message, allowed))
            for message in chat
        ]

    def encode(self, rendered: str) -> list[int]:
        """The tokens of a rendered conversation with placeholders, which become the text that they stand for."""
        named = self._replaced(rendered, self._names)
        text = self._placeholder.sub(lambda found: self._rendered[int(found[1])], named)
        return [self._ids.get(token, token) for token in self._encode(text)]

    def _second(self, added: Mapping[int, AddedToken], backend: Tokenizer) -> Tokenizer:
        """The tokenizer with other names for its special tokens, whose ids `_ids` translates back."""
        second = Tokenizer(backend.model)
        second.normalizer, second.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        names = {
            token_id: self._names[self._numbers[token.content]] if _is_control(token) else token.content
            for token_id, token in sorted(added.items())
            if token.content
        }
        second.add_tokens([_named(added[token_id], name) for token_id, name in names.items()])
        for token_id, name in names.items():
            new_id = second.token_to_id(name)
            assert new_id is not None, "it was just added"
            self._ids[new_id] = token_id
        return second

    def _is_word(self, text: str, added: Mapping[int, AddedToken]) -> bool:
        """Whether the vocabulary has the text as an ordinary word whose token is the special one."""
        own = {token_id for token_id, token in added.items() if token.content == text}
        return not own.isdisjoint(self._encode(text))

    def _replaced(self, text: str, replacements: tuple[str, ...], allowed: Collection[str] = _NOTHING) -> str:
        parts, at = [], 0
        for start, end, found in self._found(text):
            if found not in allowed:
                parts += [text[at:start], replacements[self._numbers[found]]]
                at = end
        return "".join([*parts, text[at:]]) if at else text

    def _found(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Where special tokens stand, as a tokenizer finds them: start, end and text."""
        encoding = self._finder.encode(text, add_special_tokens=False)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token:
                yield start, end, text[start:end]


def _is_control(token: AddedToken) -> bool:
    return bool(token.content) and (token.special or _MARKUP.fullmatch(token.content.strip()) is not None)


def _named(token: AddedToken, name: str) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(name, **{flag: getattr(token, flag) for flag in flags})


def _escaped(text: str) -> str:
    return text[:1] + ESCAPE + text[1:]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _strings(key)
            yield from _strings(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)


def _content(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "role"}


def _tokens_to_keep(message: Mapping[str, Any], allowed: Collection[str]) -> Collection[str]:
    return allowed if message["role"] == "assistant" else _NOTHING
