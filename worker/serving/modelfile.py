"""Ollama's Modelfile for an export: the weights, the chat template in Ollama's language, and where answers end.

Ollama's templates are Go's, and no program translates Jinja into them. But most chat templates put fixed texts around
each message, and rendering a few chats shows these texts. A template that does more is left out, and the Modelfile says
so.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]  # messages, and whether an answer follows

_SYSTEM, _USER, _ASSISTANT, _SECOND = "Ssystemtext", "Uusertext", "Aassistanttext", "Vsecondtext"


@dataclass(frozen=True)
class FixedTexts:
    """The texts around the messages of a chat."""

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    default_system: str  # the system message of a chat without one; "" if there is none

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt of a chat, as Ollama renders it."""
        if self.default_system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default_system}, *messages]
        around = {"system": self.system, "user": self.user, "assistant": self.assistant}
        texts = [message["content"].join(around[message["role"]]) for message in messages]
        return "".join(texts) + self.assistant[0]

    def as_go(self) -> str:
        """The same as a template of Ollama."""
        roles = {"system": self.system, "user": self.user, "assistant": self.assistant}
        cases = "{{ else }}".join(
            f'{{{{ if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for role, (before, after) in roles.items()
        )
        return f"{{{{ range .Messages }}}}{cases}{'{{ end }}' * len(roles)}{{{{ end }}}}{self.assistant[0]}"


def fixed_texts(render: Render) -> FixedTexts | None:
    """The texts around messages. None: the chat template does more than to put texts around them."""
    try:
        found = _read(render)
        if found is not None and all(found.render(chat) == render(chat, True) for chat in _chats()):
            return found
    except Exception as cause:  # a template is a program, and may take no system message
        log.info("the chat template is not written for Ollama: %r", cause)
    return None


def modelfile_of(tokenizer: PreTrainedTokenizerBase, file: str, base: str | None) -> str:
    """The text of a Modelfile.

    Args:
        file: the GGUF file of the export.
        base: the GGUF file of the base model, if `file` is an adapter.
    """
    texts = fixed_texts(renderer(tokenizer))
    lines = [f"FROM ./{file}"]
    if base is not None:
        lines = [
            "# The GGUF file of the model that the adapter was trained on, or its name in a library of Ollama.",
            f"FROM ./{base}",
            f"ADAPTER ./{file}",
        ]
    if texts is None:
        lines += [
            "# The chat template of the job (chat_template.jinja) is more than texts around messages, so it is not",
            "# written in Ollama's language. Ollama chooses another: compare it (`ollama show --template`).",
        ]
    else:
        lines.append(f'TEMPLATE """{texts.as_go()}"""')
        if texts.default_system:
            lines.append(f'SYSTEM """{texts.default_system}"""')
    stops = dict.fromkeys([tokenizer.eos_token, texts and texts.assistant[1].strip()])
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop and '"' not in stop]
    return "\n".join(lines) + "\n"


def renderer(tokenizer: PreTrainedTokenizerBase) -> Render:
    """Renders chats without the token before each text, which Ollama adds itself."""
    begin = tokenizer.bos_token if tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] else None

    def render(messages: Sequence[Message], is_prompt: bool) -> str:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=is_prompt)
        return str(text).removeprefix(begin or "")

    return render


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _chats() -> Iterator[list[Message]]:
    """Chats of each shape, with which the texts must give what the chat template gives."""
    turns = [_message("user", "One\n\ntwo"), _message("assistant", "3 {x}"), _message("user", "Four?")]
    for length in (1, 3):
        yield turns[:length]
        yield [_message("system", "Be\nbrief."), *turns[:length]]


def _read(render: Render) -> FixedTexts | None:
    """The texts, from chats whose messages differ."""
    question = [_message("user", _USER)]
    asked, answering = render(question, False), render(question, True)
    chat = [
        _message("system", _SYSTEM),
        *question,
        _message("assistant", _ASSISTANT),
        _message("user", _SECOND),
    ]
    parts = _split(render(chat, True), [_SYSTEM, _USER, _ASSISTANT, _SECOND])
    answered = _split(render([*question, _message("assistant", _ASSISTANT)], False), [_USER, _ASSISTANT])
    if parts is None or answered is None or not answering.startswith(asked):
        return None
    start, after_system, after_user, after_answer, end = parts
    opening, closing = answering.removeprefix(asked), answered[-1]
    if not (
        opening and end == after_user and after_user.endswith(opening) and after_answer.startswith(closing)
    ):
        return None
    before_user = after_answer.removeprefix(closing)
    user = (before_user, after_user.removesuffix(opening))
    if not after_system.endswith(before_user):
        return None
    system = (start, after_system.removesuffix(before_user))
    head = asked.partition(_USER)[0].removesuffix(before_user)
    default = head.removeprefix(system[0]).removesuffix(system[1])
    texts = FixedTexts(system, user, (opening, closing), default)
    return None if any(mark in texts.as_go() + default for mark in ('"""', "{{{")) else texts


def _split(text: str, marks: Sequence[str]) -> list[str] | None:
    """The texts around marks that occur once each and in this order; None if they do not."""
    places = [text.find(mark) for mark in marks]
    if any(text.count(mark) != 1 for mark in marks) or any(one > other for one, other in pairwise(places)):
        return None
    parts = []
    for mark in marks:
        part, _, text = text.partition(mark)
        parts.append(part)
    return [*parts, text]
