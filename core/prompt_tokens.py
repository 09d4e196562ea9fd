"""Count the tokens of rendered conversations in a child process, without torch and transformers.

A chat template is a program, so the process that renders it has limited time and memory (core/template_process.py). The
child reads its model from the first line on stdin, then a list of batches, and answers each with the counts.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from core.template_messages import messages_for
from core.template_process import chat_renderer, format_of

if TYPE_CHECKING:  # the child needs neither
    from core.model_templates import TemplateFiles
    from core.special_tokens import SpecialTokens

CPU_SECONDS = 120  # of all batches, over all threads
MEMORY_BYTES = 4 << 30
FILE = "tokenizer.json"


class CannotCount(Exception):
    """The tokens of this model cannot be counted; the message has the reason."""


@dataclass(frozen=True)
class ChatTokens:
    """The tokens of a conversation."""

    tokens: int
    special_texts: bool  # its content has the text of a special token, which is text and no control token


class TokenCounter:
    """The tokenizer and the chat template of a model. Use it as a context manager; it is not thread-safe.

    Args:
        cpu_seconds: limit of the whole process.
    """

    def __init__(self, files: "TemplateFiles", *, cpu_seconds: int = CPU_SECONDS) -> None:
        """Raises CannotCount if the model has no tokenizer.json."""
        if not (files.folder / FILE).is_file():
            raise CannotCount(f"the model has no {FILE} on this machine")
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        )
        self._first: dict[str, Any] | None = {
            "tokenizer": str(files.folder / FILE),
            "templates": {"default": files.template, "tool_use": files.template_for_tools},
            "special_tokens": dict(files.special_tokens),
            "cpu_seconds": cpu_seconds,
        }

    def __enter__(self) -> "TokenCounter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.kill()
        self._child.communicate()

    def count(self, chats: Sequence[Mapping[str, Any]]) -> list["ChatTokens | None"]:
        """Count the tokens of each conversation; None if the template rejects it.

        Args:
            chats: `messages`, `tools` and `prompt`: whether an answer is to follow.

        Raises:
            CannotCount: the template or the tokenizer is invalid, or needs too much time or memory.
        """
        assert self._child.stdin is not None and self._child.stdout is not None
        lines = [json.dumps(one) for one in (self._first, chats) if one is not None]
        self._first = None
        try:
            self._child.stdin.write("".join(f"{line}\n" for line in lines))
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise CannotCount(
                "the chat template or the tokenizer needs too much time or memory, or is invalid"
            )
        return [None if one is None else ChatTokens(*one) for one in json.loads(answer)]


def main() -> None:
    """Answer each batch of conversations on stdin with a line of counts."""
    from tokenizers import Tokenizer

    from core.special_tokens import SpecialTokens

    first = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_CPU, (first["cpu_seconds"], first["cpu_seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    tokenizer = Tokenizer.from_file(first["tokenizer"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    templates = first["templates"]
    renders = {name: chat_renderer(template, first["special_tokens"]) for name, template in templates.items()}
    special = SpecialTokens.of_backend(tokenizer)
    kept = special.answer_texts(format_of(templates["default"], first["special_tokens"]))
    for line in sys.stdin:
        chats = json.loads(line)
        found = [special.occur_in_chat(chat["messages"], chat["tools"], kept) for chat in chats]
        texts = [
            _rendered(renders, templates, _hidden(special, chat, kept) if has_special else chat)
            for chat, has_special in zip(chats, found, strict=True)
        ]
        plain = [
            text
            for text, has_special in zip(texts, found, strict=True)
            if text is not None and not has_special
        ]
        encoded = iter(tokenizer.encode_batch_fast(plain, add_special_tokens=False))
        counts = [
            None
            if text is None
            else [len(special.encode(text) if has_special else next(encoded).ids), has_special]
            for text, has_special in zip(texts, found, strict=True)
        ]
        sys.stdout.write(json.dumps(counts) + "\n")
        sys.stdout.flush()


def _hidden(special: "SpecialTokens", chat: Mapping[str, Any], literal: frozenset[str]) -> dict[str, Any]:
    messages = special.hide_in_chat(chat["messages"], literal)
    return {**chat, "messages": messages, "tools": special.hide(chat["tools"])}


def _rendered(
    renders: Mapping[str, Callable[..., str]], templates: Mapping[str, str], chat: Mapping[str, Any]
) -> str | None:
    """The text of a conversation. None: the template rejects it."""
    render = renders["tool_use" if chat["tools"] else "default"]
    try:
        return render(messages_for(templates, chat["messages"]), chat["tools"] or None, prompt=chat["prompt"])
    except Exception:  # a template is a program
        return None


if __name__ == "__main__":
    main()
